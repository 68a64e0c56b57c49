"""A drafter small enough to compare with loops, its target head, and packed rows to train it on."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from reference import ReferenceDrafter, Row, context_of

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.sharding import abstract, place
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.features.source import Batch
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafters import AnyDrafter, new_drafter
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target import TargetHead

VOCAB, HIDDEN, TAPS, LENGTH, RANK, MASK = 40, 16, 2, 20, 8, 39
DEFAULT_ROPE = RopeConfig(theta=100.0)


def make_shape(rope=DEFAULT_ROPE, **options) -> DrafterShape:
    """Two layers, grouped heads, blocks of 4; `options` are those of `DrafterConfig`."""
    head = options.get("markov_head", "vanilla")
    config = {
        "target_layer_ids": (0, 2),
        "mask_token_id": MASK,
        "block_size": 4,
        "num_layers": 2,
        "markov_rank": 0 if head == "none" else RANK,
        "dtype": "float32",
    }
    return DrafterShape(
        config=DrafterConfig(**(config | options)),
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        target_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        rope=rope,
        max_positions=64,
    )


def random_weights(shape: DrafterShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights large enough for every part to matter, unlike those of a fresh drafter.

    The ids of a pruned vocabulary are drawn as well, ascending.
    """
    rng = np.random.default_rng(seed)
    arrays = named(jax.eval_shape(lambda: new_drafter(shape, rngs=nnx.Rngs(0))))
    weights = {}
    for name, array in arrays.items():
        if name == "draft_ids":
            ids = rng.choice(shape.vocab_size, shape.draft_vocab, replace=False)
            weights[name] = np.sort(ids).astype(np.int32)
            continue
        noise = rng.standard_normal(array.shape)
        weights[name] = np.float32(1 + 0.2 * noise if "norm" in name else 0.3 * noise)
    return weights


def make_drafter(shape: DrafterShape, weights: dict[str, np.ndarray]) -> AnyDrafter:
    """The drafter with these weights on the current mesh."""
    empty = abstract(lambda: new_drafter(shape, rngs=nnx.Rngs(0)))
    placed = {
        name: jax.device_put(weights[name], array.sharding) for name, array in named(empty).items()
    }
    return with_arrays(empty, placed)


def head_arrays(seed: int = 7) -> tuple[np.ndarray, np.ndarray]:
    """Embedding and LM head [V, D] of the target."""
    rng = np.random.default_rng(seed)
    embed = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    return embed, rng.normal(0, 0.5, (VOCAB, HIDDEN)).astype(np.float32)


def make_head() -> TargetHead:
    """The target head on the current mesh."""
    return TargetHead(*(place(array, "vocab", "embed") for array in head_arrays()))


def make_reference(shape: DrafterShape, weights: dict[str, np.ndarray]) -> ReferenceDrafter:
    return ReferenceDrafter(weights, *head_arrays(), shape)


def make_row(lengths, generated, seed: int, length: int = LENGTH) -> Row:
    """A row of documents of these lengths; positions in `generated` are the target's own tokens."""
    rng = np.random.default_rng(seed)
    documents = np.zeros(length, np.int32)
    positions = np.zeros(length, np.int32)
    start = 0
    for number, size in enumerate(lengths, start=1):
        documents[start : start + size] = number
        positions[start : start + size] = np.arange(size)
        start += size
    loss_mask = np.zeros(length, bool)
    loss_mask[list(generated)] = True
    return Row(
        rng.integers(0, MASK, length).astype(np.int32),
        loss_mask,
        documents,
        positions,
        rng.standard_normal((length, TAPS, HIDDEN)).astype(np.float32),
        rng.standard_normal((length, HIDDEN)).astype(np.float32),
    )


def packed_rows() -> list[Row]:
    """Two rows: two documents and padding; one document whose mask has a hole."""
    return [
        make_row((9, 8), [*range(3, 9), *range(12, 17)], seed=1),
        make_row((20,), [*range(4, 10), *range(12, 20)], seed=2),
    ]


def make_batch(rows: list[Row], micro: int = 1, numbers=None, pruned: bool = False) -> Batch:
    """M micro-batches of the rows, on the current mesh; `pruned` as a pruned drafter needs them."""

    def put(arrays) -> jax.Array:
        x = np.stack(arrays)
        x = x.reshape(micro, len(rows) // micro, *x.shape[1:])
        return place(x, None, "batch", *[None] * (x.ndim - 2))

    numbers = np.arange(len(rows)) if numbers is None else np.asarray(numbers)
    fields = ("tokens", "loss_mask", "documents", "positions", "taps", "last_hidden")
    values = {name: put([getattr(row, name) for row in rows]) for name in fields}
    if pruned:
        logits = [row.last_hidden.astype(np.float64) @ head_arrays()[1].T for row in rows]
        sums = [np.log(np.exp(z).sum(-1)).astype(np.float32) for z in logits]
        values["teacher_lse"] = put(sums)
        values["teacher_best"] = put([z.argmax(-1).astype(np.int32) for z in logits])
    return Batch(rows=put(list(numbers.astype(np.int32))), **values)


def first_micro(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x[0], batch)


def visible(rows: list[Row], anchors: list[list[int]]) -> np.ndarray:
    """bool[B, A, S], the context of each block, by the reference."""
    seen = np.zeros((len(rows), len(anchors[0]), len(rows[0].tokens)), bool)
    for b, row in enumerate(rows):
        for a, anchor in enumerate(anchors[b]):
            seen[b, a, context_of(anchor, row.documents)] = True
    return seen


def bounds(rows: list[Row], anchors: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """i32[B, A] twice, the context of each block as first <= j < stop, by the reference."""
    seen = visible(rows, anchors)
    count = seen.sum(-1)
    first = np.where(count > 0, seen.argmax(-1), np.asarray(anchors))
    return first.astype(np.int32), (first + count).astype(np.int32)


@jax.jit
def _run(drafter, head, tokens, positions, taps, anchors, first, stop):
    context = drafter.context(taps, positions)
    at = jnp.take_along_axis
    hidden = drafter.backbone(
        head, at(tokens, anchors, 1), at(positions, anchors, 1), context, first, stop
    )
    return hidden, context


def run_blocks(drafter, head, rows: list[Row], anchors: list[list[int]], seen=None):
    """Hidden states [B, A, G, D] of blocks by the training path, and the context of every layer."""
    seen = bounds(rows, anchors) if seen is None else seen
    fields = ("tokens", "positions", "taps")
    arrays = [np.stack([getattr(row, name) for row in rows]) for name in fields]
    arrays = [place(x, "batch") for x in (*arrays, np.asarray(anchors, np.int32), *seen)]
    return jax.device_get(_run(drafter, head, *arrays))
