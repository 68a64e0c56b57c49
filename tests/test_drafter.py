"""The parallel backbone: against the loops of reference.py, what may influence a slot, decoding.

pytest tests/test_drafter.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_drafter import (
    HIDDEN,
    MASK,
    TAPS,
    VOCAB,
    make_drafter,
    make_head,
    make_reference,
    make_row,
    make_shape,
    packed_rows,
    random_weights,
    run_blocks,
)

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named
from dspark_jax.models.cache import LayerCache
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.layers import RopeConfig, rope_angles
from dspark_jax.models.target import TargetConfig

PARTIAL_YARN = RopeConfig(
    theta=300.0,
    kind="yarn",
    factor=4.0,
    original_max_position=256,
    partial_rotary_factor=0.5,
)
# Two documents and padding in row 0; blocks next to each other, at starts and at ends.
ANCHORS = [[3, 5, 12, 15], [1, 5, 6, 18]]


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


@pytest.fixture(scope="module")
def tiny(mesh):
    """Shape, weights, drafter and head."""
    shape = make_shape()
    weights = random_weights(shape)
    return shape, weights, make_drafter(shape, weights), make_head()


@pytest.fixture(scope="module")
def plain(tiny):
    """Rows and what the training path makes of them."""
    _, _, drafter, head = tiny
    return packed_rows(), *run_blocks(drafter, head, packed_rows(), ANCHORS)


def close(got, want, tolerance=1e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


# Element by element against the loops.


def test_context_matches_the_loops(tiny, plain):
    """Features once per token, then keys and values of each layer without its input norm."""
    shape, weights, _, _ = tiny
    rows, _, context = plain
    reference = make_reference(shape, weights)
    for layer in range(2):
        for b, row in enumerate(rows):
            want = reference.context(row, layer)
            keys = np.array([[token[head][0] for token in want] for head in range(2)])
            values = np.array([[token[head][1] for token in want] for head in range(2)])
            close(context[layer].k[b], keys.swapaxes(1, 2))
            close(context[layer].v[b], values)


def check_blocks(shape, weights, rows, hidden):
    reference = make_reference(shape, weights)
    for b, row in enumerate(rows):
        for a, anchor in enumerate(ANCHORS[b]):
            close(hidden[b, a], reference.block(row, anchor))


def test_blocks_match_the_loops(tiny, plain):
    shape, weights, _, _ = tiny
    rows, hidden, _ = plain
    check_blocks(shape, weights, rows, hidden)


def test_blocks_with_scaled_partial_rope_match_the_loops():
    shape = make_shape(PARTIAL_YARN, num_layers=1)
    weights = random_weights(shape, seed=3)
    rows = packed_rows()
    hidden, _ = run_blocks(make_drafter(shape, weights), make_head(), rows, ANCHORS)
    check_blocks(shape, weights, rows, hidden)


def test_a_packed_document_is_as_if_alone(tiny, plain):
    """Positions restart and nothing else of the row is seen (R041)."""
    _, _, drafter, head = tiny
    rows, hidden, _ = plain
    second = slice(9, 17)
    alone = make_row((8,), [], seed=0)
    for name in ("tokens", "positions", "taps"):
        getattr(alone, name)[:8] = getattr(rows[0], name)[second]
    other, _ = run_blocks(drafter, head, [alone, rows[1]], [[0, 0, 3, 6], ANCHORS[1]])
    close(other[0, 2:], hidden[0, 2:])


# What may influence a slot, and what may not.


def differs(got, want) -> bool:
    return bool((np.asarray(got) != np.asarray(want)).any())


@pytest.mark.parametrize("block", range(4))
def test_a_block_sees_the_context_before_its_anchor_only(tiny, plain, block):
    """Huge taps from the anchor on, of other documents and of padding change nothing (R037)."""
    _, _, drafter, head = tiny
    rows, hidden, _ = plain
    spoiled = packed_rows()
    for b, row in enumerate(spoiled):
        anchor = ANCHORS[b][block]
        other = (row.documents != row.documents[anchor]) | (np.arange(20) >= anchor)
        row.taps[other] = 1e6
    got, _ = run_blocks(drafter, head, spoiled, ANCHORS)
    np.testing.assert_array_equal(got[:, block], hidden[:, block])
    later = got[1, block + 1 :] != hidden[1, block + 1 :]
    assert later.any((1, 2)).all()  # while later blocks of that document do see them


@pytest.mark.parametrize("back", [1, 2, 3])
@pytest.mark.parametrize("tap", range(TAPS))
def test_a_block_sees_every_tap_before_its_anchor(tiny, plain, back, tap):
    """Each tap of each position before the anchor, down to the document's first, counts."""
    _, _, drafter, head = tiny
    rows, hidden, _ = plain
    moved = packed_rows()
    for b, at in ((0, 15 - back), (1, 6 - back)):
        moved[b].taps[at, tap] += 1.0
    got, _ = run_blocks(drafter, head, moved, ANCHORS)
    for b, block in ((0, 3), (1, 2)):
        assert (got[b, block] != hidden[b, block]).any(-1).all()  # in every slot


def test_only_the_anchor_token_enters_a_block(tiny, plain):
    """Neither tokens before nor after it; and it enters every slot of its own block only."""
    _, _, drafter, head = tiny
    rows, hidden, _ = plain
    others = packed_rows()
    for b, row in enumerate(others):
        row.tokens[np.setdiff1d(np.arange(20), ANCHORS[b])] = 11
    got, _ = run_blocks(drafter, head, others, ANCHORS)
    np.testing.assert_array_equal(got, hidden)
    anchor = packed_rows()
    for b, row in enumerate(anchor):
        row.tokens[ANCHORS[b][1]] = (row.tokens[ANCHORS[b][1]] + 1) % MASK
    got, _ = run_blocks(drafter, head, anchor, ANCHORS)
    changed = (got != hidden).any(-1)
    assert changed[:, 1].all() and not np.delete(changed, 1, axis=1).any()


def test_the_other_anchors_do_not_matter(tiny, plain):
    """Also where the others overlap, or stand at another place among the anchors (R037)."""
    _, _, drafter, head = tiny
    rows, hidden, _ = plain
    got, _ = run_blocks(drafter, head, rows, [[2, 5, 6, 7], [0, 5, 7, 8]])
    np.testing.assert_array_equal(got[:, 1], hidden[:, 1])
    assert differs(got[:, 0], hidden[:, 0])
    got, _ = run_blocks(drafter, head, rows, [[12, 13, 14, 15], [2, 3, 4, 5]])
    close(got[0, 0], hidden[0, 2])
    close(got[1, 3], hidden[1, 1])


def test_a_block_is_seen_both_ways(tiny):
    """The embedding of slot 3 reaches slot 0, and no slot of another block (R066)."""
    shape, _, drafter, _ = tiny
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 8, HIDDEN)).astype(np.float32)
    context = LayerCache(
        jnp.asarray(rng.standard_normal((1, 2, 8, 6)), jnp.float32),
        jnp.asarray(rng.standard_normal((1, 2, 6, 8)), jnp.float32),
    )
    cos, sin = rope_angles(shape.rope, 8, jnp.asarray([[2, 3, 4, 5, 4, 5, 6, 7]]))
    first, stop = jnp.zeros((1, 2), jnp.int32), jnp.asarray([[2, 4]])
    layer = jax.jit(lambda x: drafter.layers[0](x, cos, sin, context, first, stop, 1e-5))
    before = layer(x)
    for slot in range(8):
        bumped = x.copy()
        bumped[0, slot] += rng.standard_normal(HIDDEN)
        changed = np.asarray(layer(bumped) != before)[0].any(-1)
        np.testing.assert_array_equal(changed, np.arange(8) // 4 == slot // 4)


def test_blocks_without_context_are_finite(tiny, plain):
    """An unfilled block, or one at a document's first token, sees no context at all."""
    _, _, drafter, head = tiny
    rows, *_ = plain
    nothing = np.zeros((2, 4), np.int32)
    anchors = [[0, 0, 0, 0], [0, 0, 0, 0]]
    got, _ = run_blocks(drafter, head, rows, anchors, (nothing, nothing))
    close(got[0, 0], make_reference(*tiny[:2]).block(rows[0], 0))
    got, _ = run_blocks(drafter, head, rows, anchors, (nothing, nothing - 1))
    assert np.isfinite(got).all()


# Decoding is training with one block per row.


@functools.partial(jax.jit, static_argnames="capacity")
def empty(drafter, capacity):
    return drafter.empty_cache(2, capacity)


extend = jax.jit(lambda drafter, cache, taps: drafter.extend(cache, taps))
draft_hidden = jax.jit(lambda drafter, *args: drafter.draft_hidden(*args))


@pytest.fixture(scope="module")
def decoded(tiny):
    """Rows of one document, their cache filled by two rounds with rejections, and its lengths."""
    _, _, drafter, _ = tiny
    rows = [make_row((20,), [], seed=s) for s in (4, 5)]
    taps = np.stack([row.taps for row in rows])
    cache = empty(drafter, 24)
    cache = extend(drafter, cache, taps[:, :6]).advance(jnp.array([3, 6]))
    second = np.stack([taps[0, 3:9], taps[1, 6:12]])
    cache = extend(drafter, cache, second).advance(jnp.array([2, 3]))
    return rows, cache, [5, 9]


def test_decoding_equals_training(tiny, decoded):
    _, _, drafter, head = tiny
    rows, cache, lengths = decoded
    anchor = jnp.array([row.tokens[at] for row, at in zip(rows, lengths)])
    got = draft_hidden(drafter, head, anchor, cache)
    want, _ = run_blocks(drafter, head, rows, [[at, 2, 3, 4] for at in lengths])
    close(got, want[:, 0])

    # What lies in the cache past a row's length is as good as not there.
    def spoil(x, axis):
        at = np.arange(24) >= np.array(lengths)[:, None]
        shape = [2, 1, 1, 1]
        shape[axis] = 24
        return jnp.where(at.reshape(shape), 1e6, x)

    layers = tuple(LayerCache(spoil(c.k, 3), spoil(c.v, 2)) for c in cache.layers)
    spoiled = dataclasses.replace(cache, layers=layers)
    np.testing.assert_array_equal(draft_hidden(drafter, head, anchor, spoiled), got)
    # One row shorter or longer is another block.
    for step in (-1, 1):
        assert differs(draft_hidden(drafter, head, anchor, cache.advance(jnp.full(2, step))), got)


def test_decoding_writes_nothing_before_the_length(tiny, decoded):
    _, _, drafter, _ = tiny
    rows, cache, lengths = decoded
    taps = np.stack([row.taps[:6] for row in rows])
    after = extend(drafter, cache, taps)
    np.testing.assert_array_equal(after.length, lengths)
    for old, new in zip(cache.layers, after.layers):
        for b, at in enumerate(lengths):
            np.testing.assert_array_equal(new.k[b, ..., :at], old.k[b, ..., :at])
            np.testing.assert_array_equal(new.v[b, :, :at], old.v[b, :, :at])
            assert differs(new.v[b, :, at : at + 6], old.v[b, :, at : at + 6])


def test_decoding_is_well_sharded():
    """Types of a (4, 2) mesh hold all through a round; nothing is run."""
    with jax.set_mesh(make_mesh(4, 2)):
        shape = make_shape()
        drafter, head = make_drafter(shape, random_weights(shape)), make_head()

        def a_round(drafter, head, anchor, taps):
            cache = drafter.extend(drafter.empty_cache(8, 16), taps)
            return drafter.draft_hidden(head, anchor, cache)

        spec = jax.sharding.PartitionSpec("fsdp")
        anchor = jax.device_put(np.zeros(8, np.int32), spec)
        taps = jax.device_put(np.zeros((8, 3, TAPS, HIDDEN), np.float32), spec)
        out = jax.eval_shape(a_round, drafter, head, anchor, taps)
        assert out.shape == (8, 4, HIDDEN) and out.sharding.spec[0] == "fsdp"


# What a drafter is made of.


def target_config(**changes) -> TargetConfig:
    config = TargetConfig(
        family="qwen3",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_layers=5,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        rope=PARTIAL_YARN,
        tie_embeddings=True,
        max_positions=64,
    )
    return dataclasses.replace(config, **changes)


def drafter_config(**changes) -> DrafterConfig:
    return DrafterConfig(**{"target_layer_ids": (0, 2), "mask_token_id": MASK} | changes)


def test_a_drafter_takes_over_its_targets_sizes():
    shape = DrafterShape.of(drafter_config(), target_config())
    assert shape.rope == PARTIAL_YARN  # theta and scaling with it (R060)
    assert (shape.hidden_size, shape.vocab_size, shape.num_heads) == (HIDDEN, VOCAB, 4)
    own = DrafterShape.of(drafter_config(num_heads=6, head_dim=4), target_config())
    assert (own.num_heads, own.num_kv_heads, own.head_dim) == (6, 2, 4)
    with pytest.raises(UserError, match="not a multiple"):
        DrafterShape.of(drafter_config(num_heads=3), target_config())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mask_token_id": VOCAB}, f"{VOCAB} rows"),  # R022
        ({"mask_token_id": -1}, f"{VOCAB} rows"),
        ({"target_layer_ids": (0, 2, 4)}, "last layer"),  # R013
        ({"target_layer_ids": (0, 5)}, "out of range"),
        ({"target_layer_ids": (-2, 0)}, "out of range"),
        ({"target_layer_ids": (2, 0)}, "strictly increasing"),
        ({"target_layer_ids": (1, 1)}, "strictly increasing"),  # R015
        ({"target_layer_ids": ()}, "at least one"),
    ],
)
def test_taps_and_mask_must_exist(changes, message):
    with pytest.raises(UserError, match=message):
        DrafterShape.of(drafter_config(**changes), target_config())
    DrafterShape.of(drafter_config(target_layer_ids=(-1, 0, 3)), target_config())


def test_targets_whose_logits_are_transformed_in_another_way_are_refused():
    """Gemma 2 also caps its attention scores (R018; Gemma 3 and 4: test_gemma_drafter.py)."""
    with pytest.raises(UserError, match="gemma2"):
        TargetConfig.from_hf({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "float32")


def test_a_fresh_drafter():
    """N(0, 0.02), biases 0, norms 1; no embedding and no LM head of its own."""
    shape = make_shape(markov_head="rnn", num_layers=1)
    arrays = jax.device_get(named(jax.jit(lambda: Drafter(shape, rngs=nnx.Rngs(0)))()))
    assert not {name for name in arrays if "embed" in name or "head" in name}
    drawn = []
    for name, array in arrays.items():
        assert array.dtype == np.float32
        if "norm" in name:
            np.testing.assert_array_equal(array, 1)
        elif name.endswith("bias"):
            np.testing.assert_array_equal(array, 0)
        else:
            assert array.std() == pytest.approx(0.02, rel=0.4)
            drawn.append(array.ravel())
    drawn = np.concatenate(drawn)
    assert drawn.std() == pytest.approx(0.02, rel=0.03) and abs(drawn.mean()) < 1e-3
    assert len(np.unique(drawn)) > 0.99 * len(drawn)  # no key is used twice
    assert arrays["fc"].shape == (HIDDEN, TAPS * HIDDEN)
