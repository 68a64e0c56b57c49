"""Our side of bench_train_step.py: a case's inputs, and the train step timed in its own process.

python our_step.py prepare FOLDER    FOLDER/case.json -> export/, drafter.npz, inputs.npz
python our_step.py time FOLDER       -> ours.json
"""

import ctypes
import dataclasses
import functools
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dspark_jax.core.allocator import keep_freed_memory
from dspark_jax.core.config import DataConfig, DrafterConfig, RunConfig, TrainConfig
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.metrics import write_json
from dspark_jax.core.semantics import SEMANTICS
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named
from dspark_jax.features.source import Batch
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import rms_norm
from dspark_jax.training.anchors import sample_anchors
from dspark_jax.training.checkpoint import start_from
from dspark_jax.training.flops import StepSizes, drafter_flops
from dspark_jax.training.step import Recipe, init_state, train_step
from dspark_jax.weights.config_parts import Origin, Verifier
from dspark_jax.weights.export import export_drafter
from dspark_jax.weights.fingerprint import fingerprint
from dspark_jax.weights.resolve import resolve_target
from dspark_jax.weights.safetensors import load_target, read_json
from dspark_jax.weights.vocab_tables import head_rows

BLOCK, LENGTH, TAPS = 7, 512, (5, 13, 21)
SEED = 3
PRESET = {k.split(".")[1]: v for k, v in SEMANTICS["speculators"].items() if k[:5] == "loss."}
# What that trainer computes, with the weights of the paper; its tv is half of the l1.
LOSS = LossConfig(**PRESET | {"ce": 0.1, "l1": 1.8, "kl": 0.0, "confidence": 1.0, "decay": 4.0})


@dataclasses.dataclass(frozen=True)
class Case:
    """One size of the step."""

    layers: int
    rank: int
    anchors: int
    vocab: int

    @property
    def name(self) -> str:
        """As its folder is called."""
        return f"l{self.layers}_r{self.rank}_a{self.anchors}_v{self.vocab}"


def least_flops(shape: DrafterShape, anchors: np.ndarray) -> float:
    """The fewest floating-point operations of a step (training/flops.py says what counts).

    Args:
      anchors: i32[A], filled ones.
    """
    labels = np.unique(anchors[:, None] + np.arange(1, BLOCK + 1))
    sizes = StepSizes(LENGTH, len(anchors) * BLOCK, len(labels), int(anchors.sum()))
    return drafter_flops(shape, sizes)


def config_of(case: Case, whole: int) -> RunConfig:
    """The run whose step this is."""
    drafter = DrafterConfig(
        target_layer_ids=TAPS,
        mask_token_id=5,
        block_size=BLOCK,
        num_layers=case.layers,
        markov_rank=case.rank,
        vocab_size=case.vocab if case.vocab < whole else 0,
        dtype="float32",
    )
    train = TrainConfig(num_anchors=case.anchors, global_batch_size=1, num_steps=1000)
    return RunConfig(
        "smollm2",
        DataConfig("generator:1"),
        drafter,
        target_dtype="float32",
        loss=LOSS,
        train=train,
    )


def read_case(folder: Path) -> tuple[Case, dict]:
    """FOLDER/case.json: the case, and how it is run."""
    value = read_json(folder / "case.json")
    return Case(**{f.name: value[f.name] for f in dataclasses.fields(Case)}), value


def optimizer(how: dict) -> optax.GradientTransformation:
    """AdamW as the other side has it, at one rate for all steps."""
    adamw = optax.adamw(how["learning_rate"], weight_decay=0.0)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def prepare(folder: Path) -> None:
    """Writes the case's inputs and its drafter, which both sides start from."""
    case, how = read_case(folder)
    directory = resolve_target("smollm2")
    target = load_target(directory, "float32")
    config = config_of(case, target.config.vocab_size)
    shape = DrafterShape.of(config.drafter, target.config)
    rng = np.random.default_rng(SEED)
    ids = np.sort(rng.choice(shape.vocab_size, case.vocab, replace=False)).astype(np.int32)
    init = functools.partial(init_state, shape=shape, tx=optimizer(how))
    state = jax.jit(init)(jax.random.key(SEED), target, ids if shape.pruned else None)
    arrays = {name: np.asarray(x) for name, x in named(state.drafter).items()}
    pruned = {"lm_head.weight": head_rows(directory, ids)} if shape.pruned else {}
    architectures = tuple(read_json(directory / "config.json")["architectures"])
    export_drafter(
        arrays,
        shape,
        Verifier(str(directory), architectures),
        folder / "export",
        Origin(0, {}, fingerprint(directory, "smollm2")),
        shared=pruned,
        replace=True,
    )
    np.savez(folder / "drafter.npz", **arrays)
    mask = np.arange(LENGTH) >= 16
    states = 4 * rng.standard_normal((LENGTH, shape.hidden_size), np.float32)
    hidden = rms_norm(jnp.asarray(states), target.norm[...], target.config.rms_norm_eps)
    logits = np.asarray(hidden @ target.head.weight.T)
    documents = np.ones(LENGTH, np.int32)
    draws = []
    for step in range(how["warmup"] + how["steps"]):
        key = jax.random.fold_in(jax.random.key(SEED), step)
        row = np.zeros(1, np.int32)
        draws.append(sample_anchors(key, mask[None], documents[None], row, case.anchors, BLOCK))
    np.savez(
        folder / "inputs.npz",
        tokens=rng.choice(ids, LENGTH).astype(np.int32),
        loss_mask=mask,
        documents=documents,
        positions=np.arange(LENGTH, dtype=np.int32),
        taps=rng.standard_normal((LENGTH, len(TAPS), shape.hidden_size), np.float32),
        states=states,
        hidden=np.asarray(hidden),
        lse=np.asarray(jax.nn.logsumexp(logits, axis=-1)),
        best=logits.argmax(-1).astype(np.int32),
        anchors=np.stack([np.asarray(anchors[0]) for anchors, _ in draws]),
        filled=np.stack([np.asarray(filled[0]) for _, filled in draws]),
    )


def time_ours(folder: Path) -> None:
    """The worker of our side: FOLDER/ours.json."""
    began = time.perf_counter()
    keep_freed_memory()  # as the command that trains does
    case, how = read_case(folder)
    target = load_target(resolve_target("smollm2"), "float32")
    config = config_of(case, target.config.vocab_size)
    shape = DrafterShape.of(config.drafter, target.config)
    head = target.head
    with np.load(folder / "inputs.npz") as file:
        given = dict(file)
    with np.load(folder / "drafter.npz") as file:
        arrays = dict(file)
    tx = optimizer(how)
    init = functools.partial(init_state, shape=shape, tx=tx)
    ids = arrays.get("draft_ids")
    state = start_from(jax.jit(init)(jax.random.key(SEED), target, ids), arrays, str(folder))
    del target
    fields = [given[name] for name in ("tokens", "loss_mask", "documents", "positions")]
    fields += [np.int32(0), given["taps"], given["hidden"]]
    if shape.pruned:
        fields += [given["lse"], given["best"]]
    axes = [(None, "batch", *[None] * np.ndim(x)) for x in fields]
    batch = Batch(*(place(np.asarray(x)[None, None], *a) for x, a in zip(fields, axes)))
    recipe = Recipe(LOSS, case.anchors, config.train.loss_chunk, SEED)

    def one() -> tuple[float, float]:
        nonlocal state
        start = time.perf_counter()
        state, result = train_step(state, head, batch, tx=tx, recipe=recipe)
        loss = float(jax.block_until_ready(result["loss"]))
        jax.block_until_ready(state)
        return loss, time.perf_counter() - start

    warm = [one() for _ in range(how["warmup"])]
    ready = time.perf_counter() - began
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    idle = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    timed = [one() for _ in range(how["steps"])]
    filled = given["anchors"][-1][given["filled"][-1]]
    answer = {
        "losses": [loss for loss, _ in warm + timed],
        "seconds": [seconds for _, seconds in timed],
        "first_step_seconds": warm[0][1],
        "ready_seconds": ready,
        "idle_bytes": idle,
        "peak_bytes": resident("VmHWM"),
        "least_flops": least_flops(shape, filled),
        "flops_per_second": product_rate(),
        "versions": {"jax": jax.__version__},
    }
    write_json(folder / "ours.json", answer)


def product_rate() -> float:
    """The most FLOPs per second that a float32 matrix product reaches here, of several sizes."""
    best = 0.0
    for m, k, n in ((2048, 2048, 2048), (1792, 576, 8192), (512, 576, 16384)):
        a, b = jnp.ones((m, k)), jnp.ones((k, n))
        product = jax.jit(jnp.matmul)
        product(a, b).block_until_ready()
        for _ in range(5):
            start = time.perf_counter()
            product(a, b).block_until_ready()
            best = max(best, 2 * m * k * n / (time.perf_counter() - start))
    return best


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    with jax.set_mesh(make_mesh()):
        {"prepare": prepare, "time": time_ours}[sys.argv[1]](Path(sys.argv[2]))
