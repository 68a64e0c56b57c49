"""EAGLE-3: chains against the loops of eagle3_reference.py, what may influence a step, decoding.

pytest tests/test_eagle3.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle3_reference import EAGLE3, ReferenceEagle3, with_options
from reference import Row
from tiny_drafter import (
    HIDDEN,
    MASK,
    TAPS,
    VOCAB,
    head_arrays,
    make_drafter,
    make_head,
    make_row,
    make_shape,
    packed_rows,
    random_weights,
    visible,
)

from dspark_jax.core.config import DrafterConfig, Eagle3Config
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named
from dspark_jax.models.drafter import Drafter
from dspark_jax.models.layers import RopeConfig

STEPS = 4
# Two documents and padding in row 0; next to each other, at starts and so that labels end.
ANCHORS = [[1, 4, 10, 12], [1, 5, 6, 15]]
OPTIONS = (
    {},
    {"norm_before_residual": True, "fc_norm": True},
    {"norm_output": True, "norm_before_fc": True, "qk_norm": False},
)


@pytest.fixture(autouse=True, scope="module")
def mesh():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh(1, 1)):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def shape_of(rope=None, **options):
    rope = {} if rope is None else {"rope": rope}
    return with_options(make_shape(**rope, **EAGLE3, block_size=STEPS), **options)


@jax.jit
def _unrolled(drafter, head, tokens, positions, taps, anchors, seen):
    at = jnp.take_along_axis
    features = drafter.features(taps)
    context = drafter.context(head, features, jnp.roll(tokens, -1, 1), positions)
    rows, count = anchors.shape
    given = (anchors[..., None] + jnp.arange(STEPS)).reshape(rows, -1)
    given = at(tokens, given, 1).reshape(rows, count, STEPS)
    start = at(features, jnp.maximum(anchors - 1, 0)[..., None], 1)
    hidden = drafter.unroll(head, start, given, at(positions, anchors, 1) - 1, context, seen)
    logits = drafter.head(head).logits(hidden.reshape(rows, count * STEPS, -1))
    return logits.reshape(rows, count, STEPS, -1)


def unrolled(drafter, rows: list[Row], anchors=ANCHORS) -> np.ndarray:
    """Logits [B, A, G, V_d] of the chains at the anchors, by the training path."""
    fields = ("tokens", "positions", "taps")
    arrays = [np.stack([getattr(row, name) for row in rows]) for name in fields]
    arrays += [np.asarray(anchors, np.int32), visible(rows, anchors)]
    return np.asarray(_unrolled(drafter, make_head(), *(place(x, "batch") for x in arrays)))


def close(got, want, tolerance=2e-5):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.fixture(scope="module")
def tiny(mesh):
    shape = shape_of()
    weights = random_weights(shape)
    return shape, weights, make_drafter(shape, weights)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "public")
def test_chains_match_the_loops(options):
    shape = shape_of(**options)
    weights = random_weights(shape, seed=1)
    got = unrolled(make_drafter(shape, weights), packed_rows())
    reference = ReferenceEagle3(weights, *head_arrays(), shape)
    for b, row in enumerate(packed_rows()):
        for a, anchor in enumerate(ANCHORS[b]):
            close(got[b, a], reference.chain(row, anchor, STEPS))


def test_chains_of_a_pruned_vocabulary_with_scaled_rope_match_the_loops():
    rope = RopeConfig(
        theta=300.0, kind="yarn", factor=4.0, original_max_position=256, partial_rotary_factor=0.5
    )
    shape = make_shape(rope, **EAGLE3, block_size=STEPS, vocab_size=11)
    weights = random_weights(shape, seed=2)
    rows = packed_rows()
    got = unrolled(make_drafter(shape, weights), rows)
    assert got.shape[-1] == 11
    reference = ReferenceEagle3(weights, *head_arrays(), shape)
    close(got[1, 2], reference.chain(rows[1], 6, STEPS))
    close(got[0, 3], reference.chain(rows[0], 12, STEPS))


# What a step may see, and what it may not.


def changed_steps(tiny, change) -> np.ndarray:
    """bool[B, A, G]: whose logits a change of the rows reaches."""
    _, _, drafter = tiny
    rows, others = packed_rows(), packed_rows()
    for row in others:
        change(row)
    return (unrolled(drafter, rows) != unrolled(drafter, others)).any(-1)


@pytest.mark.parametrize("position", [0, 3, 4, 5, 11, 14])
def test_taps_reach_the_chains_behind_them_in_their_document(tiny, position):
    """Of the target nothing at the anchor or behind is known when a chain is drafted (R037)."""

    def change(row):
        row.taps[position] += 1e3

    got = changed_steps(tiny, change)
    for b, row in enumerate(packed_rows()):
        for a, anchor in enumerate(ANCHORS[b]):
            same = row.documents[position] == row.documents[anchor]
            assert (got[b, a] == (same and position < anchor)).all(), (b, anchor)


@pytest.mark.parametrize("position", [0, 1, 5, 6, 8, 12, 13, 16])
def test_a_token_reaches_the_steps_after_it(tiny, position):
    """Step k of the chain at a is given the token at a + k; the first of a document has no part."""

    def change(row):
        row.tokens[position] = (row.tokens[position] + 7) % MASK

    got = changed_steps(tiny, change)
    for b, row in enumerate(packed_rows()):
        for a, anchor in enumerate(ANCHORS[b]):
            same = row.documents[position] == row.documents[anchor]
            for k in range(STEPS):
                reached = same and row.positions[position] > 0 and position <= anchor + k
                own = anchor <= position <= anchor + k  # its own tokens, whatever they are
                assert got[b, a, k] == (reached or own), (b, anchor, k)


def test_a_chain_does_not_depend_on_the_other_anchors(tiny):
    _, _, drafter = tiny
    rows = packed_rows()
    together = unrolled(drafter, rows)
    for a in range(len(ANCHORS[0])):
        alone = unrolled(drafter, rows, [[anchors[a]] for anchors in ANCHORS])
        close(alone[:, 0], together[:, a], 1e-6)


def test_a_packed_document_is_as_if_alone(tiny):
    _, _, drafter = tiny
    row = packed_rows()[0]
    second = slice(9, 17)
    alone = Row(*(getattr(row, f.name)[second] for f in dataclasses.fields(row)))
    packed = unrolled(drafter, [row], [[10, 12]])
    close(unrolled(drafter, [alone], [[1, 3]]), packed, 1e-6)


def test_an_anchor_without_anything_before_it_is_finite(tiny):
    """Unfilled anchors are 0; their chains see nothing, and neither they nor gradients are NaN."""
    _, _, drafter = tiny
    rows = packed_rows()

    arrays = [np.stack([getattr(row, n) for row in rows]) for n in ("tokens", "positions", "taps")]
    arrays += [np.zeros((2, len(ANCHORS[0])), np.int32), np.zeros((2, len(ANCHORS[0]), 20), bool)]
    arrays, head = [place(x, "batch") for x in arrays], make_head()

    def loss(drafter):
        return _unrolled(drafter, head, *arrays).sum()

    value, grads = jax.value_and_grad(loss)(drafter)
    assert np.isfinite(value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


# The cached path.


@jax.jit
def _decoded(drafter, head, state, tokens, capacity_mask):
    rows = tokens.shape[0]
    hidden, own = state.features[:, None], drafter.chain(rows, 1)
    seen, logits = capacity_mask < state.length[:, None, None], []
    for k in range(tokens.shape[1]):
        hidden, own = drafter.step(
            head, hidden, tokens[:, k, None], state.length[:, None] - 1, jnp.int32(k),
            state.cache.layers[0], seen, own,
        )  # fmt: skip
        logits.append(drafter.head(head).logits(drafter.normed(hidden))[:, 0])
    return jnp.stack(logits, axis=1)


def decoded(drafter, state, tokens):
    """Logits [B, G, V_d] of the chain behind `state`, one step at a time."""
    capacity = place(np.arange(state.cache.capacity)[None, None], None)
    return np.asarray(_decoded(drafter, make_head(), state, place(tokens, "batch"), capacity))


@pytest.mark.parametrize("options", OPTIONS[1:], ids="+".join)
def test_the_cached_path_is_the_training_path(options):
    """Prompts of two lengths, then rounds that keep different numbers of tokens per row."""
    shape = shape_of(**options)
    drafter, head = make_drafter(shape, random_weights(shape, seed=4)), make_head()
    rows = [make_row((24,), [20], seed, length=24) for seed in (5, 6)]
    tokens = np.stack([row.tokens for row in rows])
    taps = np.stack([row.taps for row in rows])

    def batch(x):
        return place(np.asarray(x), "batch")

    lengths = np.array([5, 3], np.int32)
    state = drafter.begin(head, batch(taps[:, :6]), batch(tokens[:, 1:7]), batch(lengths), 24)
    wrong = np.full((2, 6, TAPS, HIDDEN), 1e4, np.float32)
    for count in ([4, 1], [1, 3], [0, 5], [2, 2]):
        at = [[int(n)] for n in np.asarray(state.length)]
        given = np.stack([row[a[0] : a[0] + STEPS] for row, a in zip(tokens, at)])
        close(decoded(drafter, state, given), unrolled(drafter, rows, at)[:, 0])
        # What was verified behind the kept tokens was not the row's: it must leave no trace.
        new = [np.r_[t[a[0] : a[0] + c], wrong[0, c:]] for t, a, c in zip(taps, at, count)]
        next_ = [
            np.r_[t[a[0] + 1 : a[0] + 1 + c], np.full(6 - c, MASK)]
            for t, a, c in zip(tokens, at, count)
        ]
        state = drafter.commit(
            head, state, batch(new), batch(np.array(next_, np.int32)),
            batch(np.array(count, np.int32)),
        )  # fmt: skip
    assert list(np.asarray(state.length)) == [12, 14]


def test_the_state_of_a_row_that_rests_does_not_change():
    shape = shape_of()
    drafter, head = make_drafter(shape, random_weights(shape)), make_head()
    row = make_row((20,), [10], 1)
    arrays = [place(x[None], "batch") for x in (row.taps[:6], row.tokens[1:7])]
    state = drafter.begin(head, *arrays, place(np.array([6], np.int32), "batch"), 20)
    after = drafter.commit(head, state, *arrays, place(np.array([0], np.int32), "batch"))
    assert (np.asarray(state.features) == np.asarray(after.features)).all()
    assert np.asarray(state.length) == np.asarray(after.length) == 6
    k, old = (np.asarray(s.cache.layers[0].k)[..., :6] for s in (after, state))
    assert (k == old).all()


# Configuration.


@pytest.mark.parametrize(
    "change, named_field",
    [
        ({"mask_token_id": 3}, "mask_token_id"),
        ({"markov_head": "vanilla", "markov_rank": 4}, "markov_head"),
        ({"confidence_head": True}, "confidence_head"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"num_layers": 2}, "num_layers"),
        ({"init": "target"}, "init"),
        ({"algorithm": "eagle2"}, "algorithm"),
        ({"algorithm": "dspark", "mask_token_id": 3, "eagle3": Eagle3Config(qk_norm=False)},
         "drafter.eagle3"),
    ],
)  # fmt: skip
def test_what_does_not_belong_is_refused_by_name(change, named_field):
    with pytest.raises(UserError, match=named_field):
        DrafterConfig(target_layer_ids=(0, 2), **(EAGLE3 | change))


@pytest.mark.parametrize("wrong", [{"step_loss_decay": 0.0}, {"step_loss_decay": 1.1},
                                   {"norm_before_fc": True, "fc_norm": True}])  # fmt: skip
def test_options_that_cannot_be_are_refused(wrong):
    with pytest.raises(UserError, match="eagle3"):
        Eagle3Config(**wrong)


def test_other_drafters_have_no_such_parameters(tiny):
    shape, _, drafter = tiny
    assert shape.vocab_size == VOCAB
    names = set(named(drafter))
    assert {"layers.0.hidden_norm", "layers.0.input_norm", "fc", "norm"} <= names
    assert "hidden_norm" not in names
    plain = make_drafter(make_shape(), random_weights(make_shape()))
    assert isinstance(plain, Drafter) and "layers.0.hidden_norm" not in named(plain)
