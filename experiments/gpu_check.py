"""Do the kernels and the train step work on this GPU, and how fast? One script, under five minutes.

On a fresh machine with an NVIDIA GPU and Python >= 3.11, from the root of the repository:

    python -m venv .venv && .venv/bin/pip install -e ".[cuda]" torch && \
        .venv/bin/python experiments/gpu_check.py --out=runs/gpu_check.json

(PyTorch is optional: without it, or without CUDA in it, the script says so and goes on.)

  kernel      the Markov bias by Pallas (Triton) against XLA and eager PyTorch on the same arrays:
              largest difference from a float32 reference, median time, share of the HBM bandwidth
  vocab loss  loss and gradients over the whole vocabulary, ours against all logits at once in XLA
              and in eager PyTorch
  train step  bfloat16, the drafter of Qwen3-4B on random features: seconds, tokens per second, MFU

What is compared takes turns, so that a slow spell hits all alike. A wrong result ends the script
with exit code 1 after the report is written. `--tiny` runs every line on a CPU with small arrays
and interpreted kernels: a test of this script, not of a chip.
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import program_costs
from absl import flags

from dspark_jax.core.chips import Chip, chip_of, mfu
from dspark_jax.core.command import run_main
from dspark_jax.core.config import DrafterConfig, TrainConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.metrics import peak_device_bytes, table, write_json
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import make_mesh
from dspark_jax.features.source import Batch
from dspark_jax.kernels.markov_bias import markov_bias
from dspark_jax.kernels.vocab_loss import Teacher, vocab_loss, vocab_loss_reference
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target import TargetHead
from dspark_jax.training.step import Recipe, init_state, make_optimizer, train_step


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run; the defaults are Qwen3-4B's and the public recipe's."""

    rows: int = 1024  # of the kernels: slots at once
    vocab: int = 151936
    rank: int = 256
    hidden: int = 2560
    layers: int = 5
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    mlp: int = 9728
    taps: int = 5
    length: int = 3072
    anchors: int = 512
    repeats: int = 10


TINY = Sizes(37, 300, 16, 64, 1, 4, 2, 16, 96, 2, 64, 8, 2)


def check(sizes: Sizes, kernel: str, torch: Any, chip: Chip | None) -> dict[str, Any]:
    """Everything; the report.

    Args:
      kernel: the implementation to hold against XLA, "triton" or "interpret".
      torch: the module, or None.
    """
    device = jax.devices()[0]
    report = {
        "device": device.device_kind,
        "chip": chip.name if chip else None,
        "jax": jax.__version__,
        "torch": torch.__version__ if torch else None,
        "cases": [],
    }
    cases = [
        ("Markov bias", jnp.bfloat16, markov_case),
        ("Markov bias", jnp.float32, markov_case),
        ("Markov bias, gradients", jnp.bfloat16, markov_gradient_case),
        ("vocab loss and gradients", jnp.bfloat16, vocab_case),
    ]
    with jax.set_mesh(make_mesh(1, 1)):
        for name, dtype, case in progress(cases, desc="cases", unit="case"):
            rows = case(sizes, dtype, kernel, torch)
            for row in rows:
                row |= {"case": name, "dtype": jnp.dtype(dtype).name}
                moved = row.pop("bytes", None)
                if chip and moved:
                    row["share_of_bandwidth"] = moved / row["seconds"] / chip.hbm_bytes_per_second
            report["cases"] += rows
            print(_lines(rows), flush=True)
        report["train_step"] = step = step_case(sizes, chip)
    print(
        f"train step: {step['seconds'] * 1e3:.1f} ms, {step['tokens_per_second']:,.0f} tokens/s, "
        + (f"MFU {step['mfu']:.1%}" if chip else "no MFU: no peak known for this device")
    )
    report["right"] = all(row["right"] is not False for row in report["cases"]) and step["right"]
    return report


def timed(candidates: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median seconds of each; they take turns, after one call that compiles."""
    for call in candidates.values():
        call()
    seconds = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            began = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _measured(
    results: dict[str, Callable[[], Any]], exact: Any, tolerance: float, repeats: int
) -> list[dict[str, Any]]:
    """A row for each candidate: its time, and its largest difference from `exact`.

    Args:
      results: calls that return when their result is there, a tree of arrays like `exact`.
      exact: float32 numpy arrays.
      tolerance: of the difference, as a share of the largest number in `exact`.
    """
    rows = []
    for name, call in results.items():
        found = jax.tree.map(_numpy, call())
        pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True))
        error = max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)
        right = error <= tolerance and all(np.isfinite(a).all() for a, _ in pairs)
        judged = name != "PyTorch"  # whose error is told, but its rounding is its own
        rows.append({"by": name, "relative_error": error, "right": bool(right) if judged else None})
    seconds = timed(results, repeats)
    return [row | {"seconds": seconds[row["by"]]} for row in rows]


def _numpy(x: Any) -> np.ndarray:
    if isinstance(x, jax.Array):
        return np.asarray(x.astype(jnp.float32))
    return x.detach().float().cpu().numpy()


def _random(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def _to_torch(torch: Any, x: jax.Array) -> Any:
    """The same numbers, on the GPU if PyTorch has one."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    if jnp.issubdtype(x.dtype, jnp.integer):
        return torch.from_numpy(np.array(x)).to(where).long()
    kind = torch.bfloat16 if x.dtype == jnp.bfloat16 else torch.float32
    return torch.from_numpy(np.array(x.astype(jnp.float32))).to(where, kind)


def _finished(torch: Any, run: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """A call that returns when the GPU is done."""
    if torch is None:
        return lambda: jax.block_until_ready(run(*args))

    def call():
        result = run(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    return call


# ---- The Markov bias --------------------------------------------------------------------------


def _markov_inputs(sizes: Sizes, dtype: Any) -> tuple[jax.Array, ...]:
    logits = _random(0, (sizes.rows, sizes.vocab), dtype, 3.0)
    prev = jax.random.randint(jax.random.key(1), (sizes.rows,), 0, sizes.vocab)
    w1, w2 = (_random(seed, (sizes.vocab, sizes.rank), dtype, 0.3) for seed in (2, 3))
    return logits, prev, w1, w2


def _exact_bias(logits, prev, w1, w2) -> jax.Array:
    logits, w1, w2 = (x.astype(jnp.float32) for x in (logits, w1, w2))
    return markov_bias(logits, prev, w1, w2, implementation="xla")


def markov_case(sizes: Sizes, dtype: Any, kernel: str, torch: Any) -> list[dict[str, Any]]:
    """logits + W1[prev] W2^T."""
    inputs = _markov_inputs(sizes, dtype)
    exact = np.asarray(jax.jit(_exact_bias)(*inputs))

    def by(implementation):
        run = jax.jit(lambda *args: markov_bias(*args, implementation=implementation))
        return _finished(None, run, *inputs)

    results = {f"Pallas ({kernel})": by(kernel), "XLA": by("xla")}
    if torch:

        def plain(logits, prev, w1, w2):
            return logits + w1[prev] @ w2.T

        results["PyTorch"] = _finished(torch, plain, *(_to_torch(torch, x) for x in inputs))
    rows = _measured(results, exact, _tolerance(dtype), sizes.repeats)
    moved = 2 * inputs[0].nbytes + inputs[3].nbytes + sizes.rows * sizes.rank * inputs[2].itemsize
    return [row | {"bytes": moved} for row in rows]


def markov_gradient_case(sizes: Sizes, dtype: Any, kernel: str, torch: Any) -> list[dict[str, Any]]:
    """Gradients of sum(bias(...) * g) in W1 and W2: forward kernel and backward products."""
    logits, prev, w1, w2 = _markov_inputs(sizes, dtype)
    g = _random(4, logits.shape, dtype)

    def gradients(implementation, kind):
        def loss(w1, w2):
            out = markov_bias(logits.astype(kind), prev, w1, w2, implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32))

        return jax.jit(jax.grad(loss, argnums=(0, 1)))

    tables = w1.astype(jnp.float32), w2.astype(jnp.float32)
    exact = jax.tree.map(np.asarray, gradients("xla", jnp.float32)(*tables))
    results = {
        f"Pallas ({kernel})": _finished(None, gradients(kernel, dtype), w1, w2),
        "XLA": _finished(None, gradients("xla", dtype), w1, w2),
    }
    if torch:
        arrays = [_to_torch(torch, x) for x in (logits, prev, w1, w2, g)]

        def plain(logits, prev, w1, w2, g):
            w1, w2 = (x.detach().requires_grad_() for x in (w1, w2))
            ((logits + w1[prev] @ w2.T).float() * g.float()).sum().backward()
            return w1.grad, w2.grad

        results["PyTorch"] = _finished(torch, plain, *arrays)
    return _measured(results, exact, 2 * _tolerance(dtype), sizes.repeats)


def _tolerance(dtype: Any) -> float:
    """Two roundings of the result; float32 products may be taken in another order."""
    return 2.0**-7 if dtype == jnp.bfloat16 else 1e-4


# ---- The loss over the vocabulary -------------------------------------------------------------


def vocab_case(sizes: Sizes, dtype: Any, kernel: str, torch: Any) -> list[dict[str, Any]]:
    """Loss and gradients in hidden states, latents and W2, with the weights of the recipe."""
    rows, weights = sizes.rows, LossConfig()
    options = {"ce_weight": weights.ce, "l1_weight": weights.l1}
    hidden, teacher = (_random(s, (1, rows, sizes.hidden), dtype) for s in (0, 1))
    head = _random(2, (sizes.vocab, sizes.hidden), dtype, sizes.hidden**-0.5)
    latent = _random(3, (1, rows, sizes.rank), jnp.float32, 0.3)
    w2 = _random(4, (sizes.vocab, sizes.rank), jnp.float32, 0.3)
    labels = jax.random.randint(jax.random.key(5), (1, rows), 0, sizes.vocab)
    share = jnp.full((1, rows), 1.0 / rows)

    def gradients(loss, kind, **more):
        def total(hidden, latent, w2):
            args = hidden, latent, w2, head.astype(kind), Teacher(teacher.astype(kind))
            return loss(*args, labels, share, **options, **more)[0]

        return jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))

    exact = gradients(vocab_loss_reference, jnp.float32)
    exact = jax.tree.map(np.asarray, exact(hidden.astype(jnp.float32), latent, w2))
    trained = hidden, latent, w2
    results = {
        "ours": _finished(None, gradients(vocab_loss, dtype), *trained),
        "XLA, all logits": _finished(None, gradients(vocab_loss_reference, dtype), *trained),
    }
    if torch:
        arrays = [_to_torch(torch, x) for x in (*trained, head, teacher, labels, share)]

        def plain(hidden, latent, w2, head, teacher, labels, share):
            given = [x.detach().requires_grad_() for x in (hidden, latent, w2)]
            hidden, latent, w2 = given
            z = (hidden @ head.T).float() + latent @ w2.T
            p = torch.softmax((teacher @ head.T).float(), -1)
            log_q = torch.log_softmax(z, -1)
            ce = -log_q.gather(-1, labels[..., None])[..., 0]
            l1 = (log_q.exp() - p).abs().sum(-1)
            loss = (share * (weights.ce * ce + weights.l1 * l1)).sum()
            loss.backward()
            return loss, tuple(x.grad for x in given)

        results["PyTorch"] = _finished(torch, plain, *arrays)
    # The sign of q - p may flip where both are nearly the same: not at the largest gradients.
    return _measured(results, exact, 0.05, max(sizes.repeats // 2, 2))


# ---- The train step ---------------------------------------------------------------------------


def step_case(sizes: Sizes, chip: Chip | None) -> dict[str, Any]:
    """One update of one packed row in bfloat16; loss finite, and falling on the same row."""
    config = DrafterConfig(
        tuple(range(sizes.taps)),
        1,
        num_layers=sizes.layers,
        markov_rank=sizes.rank,
        dtype="bfloat16",
    )
    shape = DrafterShape(
        config=config,
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        target_layers=sizes.taps + 1,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.mlp,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_positions=40960,
    )
    options = TrainConfig(global_batch_size=1, num_anchors=sizes.anchors, warmup_fraction=0.0)
    tx = make_optimizer(options, 10_000)
    recipe = Recipe(LossConfig(), sizes.anchors, options.loss_chunk, 0)
    kind, row = jnp.bfloat16, (1, 1, sizes.length)
    head = TargetHead(_random(0, (sizes.vocab, sizes.hidden), kind, sizes.hidden**-0.5), None)
    batch = Batch(
        tokens=jax.random.randint(jax.random.key(1), row, 2, sizes.vocab),
        loss_mask=jnp.ones(row, bool),
        documents=jnp.ones(row, jnp.int32),
        positions=jnp.arange(sizes.length, dtype=jnp.int32).reshape(row),
        rows=jnp.zeros((1, 1), jnp.int32),
        taps=_random(2, (*row, sizes.taps, sizes.hidden), kind),
        last_hidden=_random(3, (*row, sizes.hidden), kind),
    )
    make = jax.jit(lambda key: init_state(key, None, shape=shape, tx=tx))
    state = make(jax.random.key(4))
    traced = train_step.trace(state, head, batch, tx=tx, recipe=recipe)
    flops = program_costs.flops(traced.jaxpr)
    losses, seconds = [], []
    for _ in range(sizes.repeats + 2):
        began = time.perf_counter()
        state, result = train_step(state, head, batch, tx=tx, recipe=recipe)
        losses.append(float(result["loss"]))
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[2:])  # the first compiles, the second warms up
    return {
        "seconds": median,
        "tokens_per_second": sizes.length / median,
        "flops": flops,
        "mfu": mfu(flops, median, chip) if chip else None,
        "losses": losses,
        "right": bool(np.isfinite(losses).all() and losses[-1] < losses[0]),
        "peak_device_bytes": peak_device_bytes(),
    }


# ---- The command ------------------------------------------------------------------------------


def _lines(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["case"],
            row["dtype"],
            row["by"],
            {True: "yes", False: "NO", None: "-"}[row["right"]],
            row["relative_error"],
            row["seconds"] * 1e3,
            row.get("share_of_bandwidth"),
        )
        for row in rows
    ]
    columns = ("case", "dtype", "by", "right", "relative error", "ms", "of bandwidth")
    return table(cells, columns)


def the_torch(tiny: bool) -> Any:
    """PyTorch if it can be imported and has CUDA (or needs none); says what is missing."""
    try:
        import torch
    except ImportError as error:
        print(f"no PyTorch ({error}): Pallas is compared with XLA alone")
        return None
    if not tiny and not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} has no CUDA here: Pallas is compared with XLA alone")
        return None
    return torch


def main() -> None:
    """Entry point."""
    tiny = flags.FLAGS.tiny
    if not tiny and jax.default_backend() != "gpu":
        raise UserError(
            f"jax sees no GPU here, only {jax.devices()[0].device_kind}: install jax[cuda12] on a "
            "machine with one, or try the script itself with --tiny"
        )
    began = time.monotonic()
    chip = chip_of(jax.devices()[0])
    sizes, kernel = (TINY, "interpret") if tiny else (Sizes(), "triton")
    report = check(sizes, kernel, the_torch(tiny), chip)
    report |= {"tiny": tiny, "seconds_total": time.monotonic() - began}
    if flags.FLAGS.out:
        write_json(Path(flags.FLAGS.out), report)
    print(f"{'all right' if report['right'] else 'WRONG RESULTS'}, {report['seconds_total']:.0f} s")
    if not report["right"]:
        sys.exit(1)


if __name__ == "__main__":  # flags too: tests import this file beside the commands
    flags.DEFINE_bool("tiny", False, "Small arrays and interpreted kernels, on any machine.")
    flags.DEFINE_string("out", "", "A JSON file for the report.")
    run_main(main)
