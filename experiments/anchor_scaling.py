"""Does the cost of anchors grow with the context they use, and with nothing else?

    python experiments/anchor_scaling.py --out=runs/anchor_scaling
    python experiments/anchor_scaling.py --anchors=64,256 --lengths=1024 --documents=1,8 --repeats=5

Forward and backward pass of the drafter's backbone (sizes of SmolLM2-135M: hidden 576, 9 heads of
64, 3 for keys and values, MLP 1536; --layers of them, blocks of 7, float32) over one row: keys and
values of its context, projected once a token, and the blocks of --anchors anchors drawn as in
training. The row holds 1 or more packed --documents of equal length; an anchor sees its own
document up to itself, so with many documents it sees little.

Beside it the same backbone with attention written down plainly: scores and a mask of every slot
with the whole row and all other slots, [anchors x 7, length + anchors x 7]. The results must agree.
It is left out ("-") where its compiled program asks for more than --most_gib.

"used" is what an anchor sees on average, in positions. Times are medians of --repeats turns; in
each turn all programs run once, one after the other, so that a slow spell hits all alike. "temp"
is the memory that the compiled program needs between its arguments and results, "largest" its
largest array, both as XLA's compiler says. Leaves OUT/anchor_scaling.json and prints a table.
"""

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx

from dspark_jax.core.command import run_main
from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named
from dspark_jax.kernels.anchor_attention import anchor_attention
from dspark_jax.models import drafter as drafter_module
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.layers import RopeConfig, attend
from dspark_jax.models.target import TargetHead
from dspark_jax.models.target_config import TargetConfig
from dspark_jax.training.anchors import make_blocks, sample_anchors

BLOCK, VOCAB = 7, 512  # no logits are made: the vocabulary is of no influence


def masked_attention(q, context_k, context_v, k, v, first, stop) -> jax.Array:
    """`anchor_attention` as it is defined: one mask over context and blocks, all scores at once."""
    slots, size, block = q.shape[3], context_v.shape[2], q.shape[3] // first.shape[1]
    position, owner = jnp.arange(size), jnp.arange(slots) // block
    seen = (first[..., None] <= position) & (position < stop[..., None])
    own = jnp.broadcast_to(owner[:, None] == owner, (len(q), slots, slots))
    mask = jnp.concatenate([jnp.repeat(seen, block, axis=1), own], axis=-1)
    keys, values = jnp.concatenate([context_k, k], axis=3), jnp.concatenate([context_v, v], axis=2)
    return attend(q, keys, values, mask)


ATTENTIONS: dict[str, Callable] = {"ours": anchor_attention, "masked": masked_attention}


def make_shape(layers: int) -> DrafterShape:
    """The drafter's sizes."""
    target = TargetConfig(
        "llama", VOCAB, 576, 30, 9, 3, 64, 1536, 1e-5, RopeConfig(1e4), True, 8192
    )
    config = DrafterConfig(
        target_layer_ids=(5, 13, 21), mask_token_id=5, block_size=BLOCK, num_layers=layers,
        markov_rank=0, markov_head="none", confidence_head=False, dtype="float32",
    )  # fmt: skip
    return DrafterShape.of(config, target)


def operands(shape: DrafterShape, anchors: int, length: int, documents: int) -> tuple[tuple, float]:
    """Arguments of `backbone_step` but for the drafter, and the positions an anchor sees."""
    rng = np.random.default_rng(anchors + length + documents)
    numbers = jnp.asarray(1 + np.arange(length) * documents // length, jnp.int32)[None]
    mask, row = jnp.ones((1, length), bool), jnp.zeros(1, jnp.int32)
    drawn = sample_anchors(jax.random.key(0), mask, numbers, row, anchors)
    blocks = make_blocks(*drawn, mask, numbers, shape.config, LossConfig())
    taps = rng.standard_normal((1, length, 3, shape.hidden_size), np.float32)
    wanted = rng.standard_normal((1, anchors, BLOCK, shape.hidden_size), np.float32)
    tokens = rng.integers(0, VOCAB, (1, length)).astype(np.int32)
    used = float(jnp.maximum(blocks.stop - blocks.first, 0).mean())
    arrays = (tokens, taps, blocks.anchors, blocks.first, blocks.stop, wanted)
    return tuple(map(jnp.asarray, arrays)), used


def backbone_step(drafter: Drafter, head: TargetHead, tokens, taps, anchors, first, stop, wanted):
    """A loss of all slots' hidden states, and the gradient of every weight."""

    def loss(drafter: Drafter) -> jax.Array:
        context = drafter.context(taps, jnp.arange(tokens.shape[1])[None])
        at = jnp.take_along_axis(tokens, anchors, axis=1)
        hidden = drafter.backbone(head, at, anchors, context, first, stop)
        return jnp.mean(hidden * wanted)

    return jax.value_and_grad(loss)(drafter)


def compiled_with(attention: Callable, arguments: tuple) -> jax.stages.Compiled:
    """`backbone_step` with such an attention."""
    with mock.patch.object(drafter_module, "anchor_attention", attention):
        return jax.jit(lambda *args: backbone_step(*args)).lower(*arguments).compile()


def largest_array(program: str) -> int:
    """Bytes of the largest array in a compiled program's text, its arguments aside."""
    bits = {"pred": 8, "s8": 8, "bf16": 16, "f16": 16, "s32": 32, "u32": 32, "f32": 32}
    found = 0
    for line in program.splitlines():
        name, _, rest = line.partition(" = ")
        if name and " parameter(" not in rest:
            results = re.split(r" [a-z][\w-]*\(", rest)[0]
            for kind, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", results):
                count = math.prod(map(int, filter(None, sizes.split(","))))
                found = max(found, count * bits.get(kind, 64) // 8)
    return found


def prepare(shape: DrafterShape, drafter, head, sizes: tuple[int, int, int], most: float):
    """The row of the report without times, and the programs to time."""
    given, used = operands(shape, *sizes)
    arguments, programs, results = (drafter, head, *given), {}, {}
    row: dict[str, Any] = dict(zip(("anchors", "length", "documents"), sizes, strict=True))
    row["context_used"] = used
    for name, attention in ATTENTIONS.items():
        program = compiled_with(attention, arguments)
        row[f"{name}_temp_bytes"] = program.memory_analysis().temp_size_in_bytes
        row[f"{name}_largest_bytes"] = largest_array(program.as_text())
        row[f"{name}_seconds"] = []
        if name == "ours" or row[f"{name}_temp_bytes"] <= most:
            programs[name] = lambda program=program: jax.block_until_ready(program(*arguments))
            loss, gradient = programs[name]()
            results[name] = {key: np.asarray(x) for key, x in named(gradient).items()}
    for key, wanted in results.get("masked", {}).items():
        error = np.abs(results["ours"][key] - wanted).max() / max(np.abs(wanted).max(), 1e-30)
        if error > 1e-3:
            raise UserError(f"{sizes}: the gradients of {key} differ by {error:.1e} of the largest")
    return row, programs


def run(out: Path, cases: Sequence[tuple[int, int, int]], layers: int, repeats: int, gib: float):
    """Measures and returns the report."""
    shape = make_shape(layers)
    with jax.set_mesh(make_mesh(1, 1)):
        drafter = Drafter(shape, rngs=nnx.Rngs(0))
        head = TargetHead(jnp.ones((VOCAB, 576)) / 64, jnp.ones((VOCAB, 576)) / 64)
        prepared = []
        with progress(cases, total=len(cases), desc="compiling", unit="case") as bar:
            for sizes in bar:
                prepared.append(prepare(shape, drafter, head, sizes, gib * 2**30))
        with progress(range(repeats), total=repeats, desc="turns", unit="turn") as bar:
            for _ in bar:
                for row, programs in prepared:
                    for name, program in programs.items():
                        began = time.perf_counter()
                        program()
                        row[f"{name}_seconds"].append(time.perf_counter() - began)
    rows = [row for row, _ in prepared]
    report = {"layers": layers, "block": BLOCK, "cases": rows}
    write_json(out / "anchor_scaling.json", report)
    print(show(rows))
    return report


def show(rows: list[dict]) -> str:
    """The table."""
    columns = ("anchors", "length", "documents", "used", "ours s", "masked s", "ratio",
               "temp MB", "masked", "largest MB", "masked")  # fmt: skip
    lines = []
    for r in rows:
        ours, masked = (statistics.median(r[f"{name}_seconds"] or [0]) for name in ATTENTIONS)
        lines.append((
            r["anchors"], r["length"], r["documents"], f"{r['context_used']:.0f}", f"{ours:.3f}",
            f"{masked:.3f}" if masked else "-", f"{masked / ours:.2f}" if masked else "-",
            *(f"{r[f'{n}_{w}_bytes'] / 1e6:.0f}" for w in ("temp", "largest") for n in ATTENTIONS),
        ))  # fmt: skip
    return table(lines, columns)


def chosen(anchors: Sequence, lengths: Sequence, documents: Sequence) -> list[tuple[int, int, int]]:
    """Every combination of the flags' numbers that is possible."""
    numbers = {}
    for name, given in (("anchors", anchors), ("lengths", lengths), ("documents", documents)):
        if not given or not all(str(x).isdigit() and int(x) for x in given):
            raise UserError(f"--{name}={','.join(map(str, given))}: write whole numbers above 0")
        numbers[name] = sorted({int(x) for x in given})
    cases = [
        (a, length, count)
        for length in numbers["lengths"]
        for count in numbers["documents"]
        for a in numbers["anchors"]
        if a <= length - count and 2 * count <= length  # the last of a document is no anchor
    ]
    if not cases:
        raise UserError("no row is long enough: each document needs 2 tokens, each anchor 1")
    return cases


def main() -> None:
    """Entry point."""
    for name, flag, least in (("layers", _LAYERS, 1), ("repeats", _REPEATS, 1)):
        if flag.value < least:
            raise UserError(f"--{name}={flag.value} is too few")
    cases = chosen(_ANCHORS.value, _LENGTHS.value, _DOCUMENTS.value)
    run(Path(_OUT.value), cases, _LAYERS.value, _REPEATS.value, _GIB.value)


if __name__ == "__main__":
    _OUT = flags.DEFINE_string("out", "runs/anchor_scaling", "Folder of the report.")
    _ANCHORS = flags.DEFINE_list("anchors", ["64", "256", "1024"], "Anchors of the row.")
    _LENGTHS = flags.DEFINE_list("lengths", ["512", "2048", "4096"], "Its tokens.")
    _DOCUMENTS = flags.DEFINE_list("documents", ["1", "16"], "Documents packed into it.")
    _LAYERS = flags.DEFINE_integer("layers", 2, "Layers of the drafter.")
    _REPEATS = flags.DEFINE_integer("repeats", 3, "Turns that are timed.")
    _GIB = flags.DEFINE_float("most_gib", 6.0, "Memory that the masked form may take.")
    run_main(main)
