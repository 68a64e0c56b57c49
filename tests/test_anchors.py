"""Anchors, labels, previous tokens, supervision and weights: public fault reports as cases.

pytest tests/test_anchors.py
"""

import functools
import math

import jax
import numpy as np
import pytest
from reference import block_slots, candidates, context_of

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.training.anchors import Blocks, make_blocks, sample_anchors, slot_weights

sample = jax.jit(sample_anchors, static_argnames=("num_anchors", "room"))
KEY = jax.random.key(3)
PAPER = LossConfig()


def config(block_size=4, from_anchor=True) -> DrafterConfig:
    return DrafterConfig((0,), 1, block_size=block_size, sample_from_anchor=from_anchor)


@functools.partial(jax.jit, static_argnames=("chosen", "loss"))
def _blocks(anchors, filled, loss_mask, documents, chosen, loss):
    blocks = make_blocks(anchors, filled, loss_mask, documents, chosen, loss)
    one = jax.tree.map(lambda x: x[None], blocks)  # one micro-batch
    return blocks, slot_weights(one, loss_mask[None], chosen, loss).slots[0]


def blocks_of(anchors, loss_mask, documents=None, from_anchor=True, block_size=4, loss=PAPER):
    """Blocks of one row, and their weights; there is room for 24."""
    loss_mask = np.asarray(loss_mask, bool)[None]
    documents = np.ones(loss_mask.shape) if documents is None else np.asarray(documents)[None]
    room = np.zeros((1, 24), np.int32)
    room[0, : len(anchors)] = anchors
    filled = np.arange(24)[None] < len(anchors)
    documents = documents.astype(np.int32)
    chosen = config(block_size, from_anchor)
    blocks, weights = _blocks(room, filled, loss_mask, documents, chosen, loss)
    blocks, weights = jax.device_get((blocks, weights))
    for rest in (blocks.visible(30), blocks.supervised, weights):
        assert not rest[0, len(anchors) :].any()  # unfilled blocks see and weigh nothing
    return jax.tree.map(lambda x: x[:, : len(anchors)], blocks), weights[0, : len(anchors)]


def mask_of(length, *positions):
    mask = np.zeros(length, bool)
    mask[list(positions)] = True
    return mask


# The numbers of public reports.


def test_labels_of_both_layouts():
    """ids 0..15, block 4, anchor 6 (R032)."""
    blocks, weights = blocks_of([6], np.ones(16))
    assert blocks.label_index[0, 0].tolist() == [7, 8, 9, 10]
    assert blocks.supervised[0, 0].tolist() == [True] * 4
    np.testing.assert_allclose(weights[0], [math.exp(-k / 4) for k in range(4)], rtol=1e-6)
    blocks, weights = blocks_of([6], np.ones(16), from_anchor=False)
    assert blocks.label_index[0, 0, 1:].tolist() == [7, 8, 9]
    assert blocks.supervised[0, 0].tolist() == [False, True, True, True]
    np.testing.assert_allclose(weights[0], [0] + [math.exp(-k / 4) for k in range(3)], rtol=1e-6)
    assert config().num_proposals == 4 and config(from_anchor=False).num_proposals == 3


def test_the_mask_is_read_at_the_label():
    """Answer at 8..39, block 4, anchor 37, labels 38..41 (R034)."""
    mask = mask_of(60, *range(8, 40))
    blocks, weights = blocks_of([37, 8], mask)
    assert blocks.supervised[0, 0].tolist() == [True, True, False, False]
    assert (weights[0] > 0).tolist() == [True, True, False, False]
    # A block at the last prompt token would supervise the first answer token.
    first, _ = blocks_of([7], mask)
    assert first.label_index[0, 0, 0] == 8 and first.supervised[0, 0].all()
    fill_in, _ = blocks_of([37], mask, from_anchor=False)
    assert fill_in.supervised[0, 0].tolist() == [False, True, True, False]


@pytest.mark.parametrize("from_anchor", [True, False])
def test_candidates_need_a_supervised_next_token(from_anchor):
    """Mask [0,0,1,1,1,0]: candidates {2, 3}, and no block without a supervised slot (R035)."""
    mask = np.array([[False, False, True, True, True, False]])
    ones, rows = np.ones((1, 6), np.int32), np.zeros(1, np.int32)
    anchors, filled = sample(KEY, mask, ones, rows, num_anchors=4)
    assert anchors.tolist() == [[2, 3, 0, 0]]
    assert filled.tolist() == [[True, True, False, False]]
    blocks, weights = blocks_of([2, 3], mask[0], None, from_anchor)
    assert blocks.supervised[0].any(-1).all() and weights.any(-1).all()


def test_previous_tokens_of_both_layouts():
    """a = 10, then 11..14, block 4 (R039)."""
    tokens = np.arange(4, 20)
    blocks, _ = blocks_of([6], np.ones(16))
    assert tokens[blocks.prev_index[0, 0]].tolist() == [10, 11, 12, 13]
    blocks, _ = blocks_of([6], np.ones(16), from_anchor=False)
    assert tokens[blocks.prev_index[0, 0, 1:]].tolist() == [10, 11, 12]


def test_blocks_end_with_their_document():
    """Two documents of 6 tokens, mask all ones, anchor 4, block 4 (R041)."""
    documents = [1] * 6 + [2] * 6
    blocks, _ = blocks_of([4, 7], np.ones(12), documents)
    assert blocks.supervised[0, 0].tolist() == [True, False, False, False]
    assert np.flatnonzero(blocks.visible(30)[0, 0]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(blocks.visible(30)[0, 1]).tolist() == [6]
    fill_in, _ = blocks_of([4], np.ones(12), documents, from_anchor=False)
    assert fill_in.supervised[0, 0].tolist() == [False, True, False, False]
    ids = np.asarray([documents], np.int32)
    anchors, filled = sample(KEY, np.ones((1, 12), bool), ids, np.zeros(1, int), num_anchors=12)
    assert anchors[filled].tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]  # neither 5 nor 11


def test_rows_with_no_or_one_candidate():
    """Static shapes, 0 and 1 kept anchors, the only candidate is found (R042)."""
    masks = np.stack([mask_of(10), mask_of(10, 8, 9), mask_of(10, 9), np.ones(10, bool)])
    ones = np.ones((4, 10), np.int32)
    anchors, filled = sample(KEY, masks, ones, np.arange(4), num_anchors=4)
    assert anchors.shape == filled.shape == (4, 4)
    assert filled.sum(1).tolist() == [0, 1, 0, 4]
    assert anchors[1].tolist() == [8, 0, 0, 0]
    assert not anchors[0].any() and not anchors[2].any()


def test_the_first_gap_ends_a_block():
    """A slot is supervised only if all earlier slots are."""
    mask = mask_of(12, 2, 3, 4, 6, 7)
    blocks, _ = blocks_of([2, 4], mask)
    assert blocks.supervised[0].tolist() == [[True, True, False, False], [False] * 4]
    # The row ends: labels past it are clipped into it but supervise nothing.
    blocks, _ = blocks_of([9, 11], np.ones(12))
    assert blocks.supervised[0].tolist() == [[True, True, False, False], [False] * 4]
    assert blocks.label_index.max() == 11 and blocks.prev_index.max() == 11


# Everything against the loops.


def random_row(rng, length=24):
    """A mask, and documents with padding behind them."""
    sizes = rng.multinomial(length, [0.3, 0.4, 0.2, 0.1])
    documents = np.repeat([1, 2, 3, 0], sizes)
    mask = rng.random(length) < 0.8
    return mask & (documents > 0), documents.astype(np.int32)


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("block_size", [2, 5])
def test_blocks_match_the_loops(from_anchor, block_size):
    rng = np.random.default_rng(block_size)
    for _ in range(5):
        mask, documents = random_row(rng)
        anchors = candidates(mask, documents)
        blocks, weights = blocks_of(anchors, mask, documents, from_anchor, block_size)
        for a, anchor in enumerate(anchors):
            assert np.flatnonzero(blocks.visible(30)[0, a]).tolist() == context_of(
                anchor, documents
            )
            slots = block_slots(anchor, mask, documents, block_size, from_anchor, PAPER)
            for k, slot in enumerate(slots):
                assert blocks.supervised[0, a, k] == slot.supervised
                assert weights[a, k] == pytest.approx(slot.weight, rel=1e-6)
                if slot.supervised:
                    assert blocks.label_index[0, a, k] == slot.label
                    assert blocks.prev_index[0, a, k] == slot.prev


OPTIONS = {
    "slot": {"supervision": "slot"},
    "mask at the slot": {"mask_at": "slot"},
    "across documents": {"cross_documents": True},
    "no decay": {"decay": 0.0},
    "speculators": {"supervision": "slot", "mask_at": "slot", "cross_documents": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("from_anchor", [True, False])
def test_each_option_of_supervision_matches_the_loops(options, from_anchor):
    """And is one: some slot is judged otherwise than by default."""
    loss, rng, changed = LossConfig(**options), np.random.default_rng(3), 0
    for _ in range(5):
        mask, documents = random_row(rng)
        anchors = candidates(mask, documents, 4)
        blocks, weights = blocks_of(anchors, mask, documents, from_anchor, 4, loss)
        plain, by_default = blocks_of(anchors, mask, documents, from_anchor, 4)
        for a, anchor in enumerate(anchors):
            slots = block_slots(anchor, mask, documents, 4, from_anchor, loss)
            assert blocks.supervised[0, a].tolist() == [slot.supervised for slot in slots]
            np.testing.assert_allclose(weights[a], [slot.weight for slot in slots], rtol=1e-6)
        np.testing.assert_array_equal(blocks.label_index, plain.label_index)
        np.testing.assert_array_equal(blocks.first, plain.first)
        np.testing.assert_array_equal(blocks.stop, plain.stop)
        changed += (weights != by_default).sum()
    fill_in_alike = options.get("mask_at") == "slot" and len(options) == 1 and not from_anchor
    assert (changed == 0) == fill_in_alike  # there the slot is the label


def test_speculators_learns_one_token_beyond_the_answer():
    """Answer at 8..39, block 4, anchor 37: slots at 37..40, labels 38..41."""
    loss = LossConfig(supervision="slot", mask_at="slot")
    blocks, _ = blocks_of([37], mask_of(60, *range(8, 40)), loss=loss)
    assert blocks.supervised[0, 0].tolist() == [True, True, True, False]
    assert blocks.label_index[0, 0].tolist() == [38, 39, 40, 41]


@pytest.mark.parametrize("room", [None, 4])
def test_all_candidates_are_taken_where_there_is_room(room):
    rng = np.random.default_rng(0)
    rows = [random_row(rng) for _ in range(8)]
    masks, documents = (np.stack(x) for x in zip(*rows))
    anchors, filled = sample(KEY, masks, documents, np.arange(8), num_anchors=30, room=room)
    for b in range(8):
        assert anchors[b][filled[b]].tolist() == candidates(masks[b], documents[b], room)


@pytest.mark.parametrize("denominator", ["weights", "slots"])
@pytest.mark.parametrize("average_over", ["batch", "micro_batch", "row"])
def test_what_the_sums_are_divided_by(denominator, average_over):
    """Two micro-batches of two rows with 4, 1, no and 2 slots; the last row has no answer at all.

    Of the row without a slot, but with an answer, the average knows.
    """
    supervised = np.zeros((2, 2, 2, 2), bool)
    supervised[0, 0], supervised[0, 1, 0, 0], supervised[1, 0, 1] = True, True, False
    supervised[1, 1, 1] = True
    answered = np.array([[True, True], [True, True]])
    for empty in (False, True):
        if empty:
            supervised[1, 1], answered[1, 1] = False, False
        loss = LossConfig(denominator=denominator, average_over=average_over, decay=2.0)
        blocks = Blocks(*[None] * 6, supervised)
        mask = np.broadcast_to(answered[..., None], (2, 2, 5))
        weights = slot_weights(blocks, mask, config(2), loss)
        plain = np.where(supervised, np.exp(-np.arange(2) / 2.0), 0)
        counted = plain if denominator == "weights" else supervised
        groups = {
            "batch": [(slice(None), slice(None))],
            "micro_batch": [(m, slice(None)) for m in range(2)],
            "row": [(m, b) for m in range(2) for b in range(2) if answered[m, b]],
        }[average_over]
        shares = np.zeros_like(plain)
        for group in groups:
            if counted[group].sum():
                shares[group] = plain[group] / counted[group].sum() / len(groups)
        got = np.asarray(weights.slots) / np.asarray(weights.unit).sum()
        np.testing.assert_allclose(got, shares, rtol=1e-6)
        if denominator == "weights":
            full = sum(counted[group].sum() > 0 for group in groups)
            assert got.sum() == pytest.approx(full / len(groups))


def test_anchors_are_drawn_uniformly_without_replacement():
    """Each candidate in the same share of rows, sorted, none twice; pairs too."""
    mask = mask_of(16, *range(4, 12), 13, 14)  # 8 candidates: 4..10 and 13
    wanted = [*range(4, 11), 13]
    rows, ones = np.arange(4000), np.ones((4000, 16), np.int32)
    anchors, filled = sample(KEY, np.tile(mask, (4000, 1)), ones, rows, num_anchors=3)
    anchors = np.asarray(anchors)
    assert np.asarray(filled).all() and (np.diff(anchors, axis=1) > 0).all()
    counts = np.bincount(anchors.ravel(), minlength=16)
    assert np.flatnonzero(counts).tolist() == wanted
    np.testing.assert_allclose(counts[wanted] / 4000, 3 / 8, atol=0.04)  # 5 sigma
    sets = np.unique(anchors, axis=0, return_counts=True)[1]
    assert len(sets) == 56  # 8 choose 3
    assert abs(sets / 4000 - 1 / 56).max() < 0.011  # 5 sigma


def test_a_draw_belongs_to_the_row_and_the_step():
    """Not to the row's place in a batch, nor to the rows beside it; and steps differ."""
    mask, ones = np.ones((6, 24), bool), np.ones((6, 24), np.int32)
    rows = np.array([5, 9, 0, 3, 8, 1], np.int32)
    anchors, _ = sample(KEY, mask, ones, rows, num_anchors=5)
    order = np.array([3, 1, 4, 0, 2, 5])
    again, _ = sample(KEY, mask, ones, rows[order], num_anchors=5)
    np.testing.assert_array_equal(again, np.asarray(anchors)[order])
    assert len(np.unique(np.asarray(anchors), axis=0)) == 6
    other, _ = sample(jax.random.fold_in(KEY, 1), mask, ones, rows, num_anchors=5)
    assert (np.asarray(other) != anchors).any()
