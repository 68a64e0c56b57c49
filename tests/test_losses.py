"""The whole loss: every term, metric and gradient against loops, and what has no influence on it.

pytest tests/test_losses.py
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from reference import context_of, total_loss
from tiny_drafter import (
    first_micro,
    make_batch,
    make_drafter,
    make_head,
    make_reference,
    make_shape,
    packed_rows,
    random_weights,
)

from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named, trainable, with_tables
from dspark_jax.training.anchors import make_blocks, slot_weights
from dspark_jax.training.losses import dspark_loss
from dspark_jax.training.step import summarize

LOSS = LossConfig(ce=0.1, l1=0.9, kl=0.2, confidence=0.5, decay=3.0)
# Row 0: blocks that end with the answer, with the document and an unfilled one; row 1: full blocks
# (in fill-in mode too), blocks cut by the hole in the mask and by the end of the row.
ANCHORS = np.array([[3, 6, 13, 0], [5, 8, 12, 18]], np.int32)
FILLED = np.array([[True, True, True, False], [True] * 4])
CASES = {
    "vanilla": {},
    "gated": {"markov_head": "gated", "confidence_with_markov": False, "num_layers": 1},
    "rnn": {
        "markov_head": "rnn",
        "sample_from_anchor": False,
        "confidence_detach": True,
        "num_layers": 1,
    },
    "dflash": {
        "markov_head": "none",
        "confidence_head": False,
        "sample_from_anchor": False,
        "num_layers": 1,
    },
    "pruned": {"vocab_size": 24, "num_layers": 1},
}


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


@functools.cache
def drafter_of(case: str):
    """Shape, weights and drafter."""
    shape = make_shape(**CASES[case])
    weights = random_weights(shape, seed=5)
    return shape, weights, make_drafter(shape, weights)


@functools.partial(jax.jit, static_argnames="options")
def _run(drafter, head, batch, anchors, filled, options):
    config, mask = drafter.config, batch.loss_mask
    blocks = make_blocks(anchors, filled, mask, batch.documents, config, options)
    one = jax.tree.map(lambda x: x[None], blocks)  # one micro-batch
    weights = jax.tree.map(lambda x: x[0], slot_weights(one, mask[None], config, options))

    def loss(params, taps):
        micro = dataclasses.replace(batch, taps=taps)
        whole = with_tables(params, drafter)
        return dspark_loss(whole, head, micro, blocks, weights, weights.unit, options, 16)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, sums), (grads, d_taps) = grad(trainable(drafter), batch.taps)
    return value, sums, named(grads), d_taps


def run(drafter, rows=None, anchors=ANCHORS, filled=FILLED, options=LOSS):
    """Loss, sums, gradients by name and gradient of the taps."""
    batch = first_micro(make_batch(rows or packed_rows(), pruned=drafter.shape.pruned))
    chosen = place(anchors, "batch"), place(filled, "batch")
    return jax.device_get(_run(drafter, make_head(), batch, *chosen, options=options))


@functools.cache
def plain(case: str):
    return run(drafter_of(case)[2])


@functools.cache
def expected(case: str):
    """Terms of all supervised slots by the loops."""
    shape, weights, _ = drafter_of(case)
    anchors = [list(row[on]) for row, on in zip(ANCHORS, FILLED)]
    return make_reference(shape, weights).terms(packed_rows(), anchors, LOSS)


def same(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(x, y)


# Against the loops.


@pytest.mark.parametrize("case", CASES)
def test_loss_and_sums_match_the_loops(case):
    shape, _, _ = drafter_of(case)
    value, sums, _, _ = plain(case)
    terms = expected(case)
    assert (0 < sum(term.ce == 0 for term in terms) < len(terms)) == shape.pruned
    assert value == pytest.approx(total_loss(terms, LOSS), rel=1e-5)
    for name in ("ce", "l1", "kl", "bce"):
        want = sum(term.weight * getattr(term, name) for term in terms)
        assert getattr(sums, name) == pytest.approx(want, rel=1e-5), name
    assert sums.weight == pytest.approx(sum(term.weight for term in terms), rel=1e-6)
    assert (sums.anchors, sums.rows) == (7, 2)
    per_slot = {name: np.zeros(4) for name in (f.name for f in dataclasses.fields(sums))}
    blocks = {}
    for term in terms:
        blocks.setdefault((term.row, term.anchor), []).append(term)
    for block in blocks.values():
        survive = survive_match = certain = 1.0
        for term in block:
            survive, survive_match = survive * term.accept, survive_match * term.match
            certain *= term.confidence
            for name, x in {
                "slots": 1,
                "accept": term.accept,
                "match": term.match,
                "survive": survive,
                "survive_match": survive_match,
                "confidence_error": abs(term.confidence - term.accept),
                "confidence_bias": term.confidence - term.accept,
                "cumulative_bias": certain - survive,
            }.items():
                per_slot[name][term.slot] += x
    for name in ("slots", "accept", "match", "survive", "survive_match"):
        np.testing.assert_allclose(getattr(sums, name), per_slot[name], rtol=1e-5, err_msg=name)
    if shape.config.confidence_head:
        for name in ("confidence_error", "confidence_bias", "cumulative_bias"):
            np.testing.assert_allclose(getattr(sums, name), per_slot[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_gradients_match_differences_of_the_loops(case):
    """Every array, along random directions; the label c* carries no gradient."""
    shape, weights, _ = drafter_of(case)
    _, _, grads, _ = plain(case)
    base, rows = expected(case), packed_rows()
    wanted = [term.wanted for term in base]
    anchors = [list(row[on]) for row, on in zip(ANCHORS, FILLED)]
    rng = np.random.default_rng(0)
    trained = [name for name in weights if name != "draft_ids"]
    assert set(grads) == set(trained)

    def loss(name, moved):
        terms = make_reference(shape, weights | {name: moved}).terms(rows, anchors, LOSS)
        detached = shape.config.confidence_detach and not name.startswith("confidence")
        return total_loss(terms, LOSS, wanted, base if detached else terms)

    for name in trained:
        direction = rng.standard_normal(weights[name].shape)
        up, down = (loss(name, weights[name] + step * direction) for step in (1e-6, -1e-6))
        slope = float((grads[name] * direction).sum())
        assert slope == pytest.approx((up - down) / 2e-6, rel=2e-3, abs=2e-5), name
        assert np.abs(grads[name]).max() > 1e-4, name  # the comparison is one of numbers, not of 0


@pytest.mark.slow
def test_bfloat16_stays_near():
    """The default compute dtype, with float32 losses and master gradients."""
    shape = make_shape(**CASES["gated"], dtype="bfloat16")
    value, sums, grads, _ = run(make_drafter(shape, drafter_of("gated")[1]))
    want = plain("gated")
    assert value.dtype == np.float32 and value == pytest.approx(float(want[0]), rel=0.02)
    np.testing.assert_allclose(sums.accept, want[1].accept, rtol=0.1)
    for name, grad in grads.items():
        assert grad.dtype == np.float32
        exact = want[2][name]
        cosine = (grad * exact).sum() / np.linalg.norm(grad) / np.linalg.norm(exact)
        assert cosine > 0.98, (name, cosine)


# What may influence it.


def supervised(case="vanilla"):
    """Positions of anchors, labels and previous tokens of supervised slots, by row."""
    anchor, label, prev = ([set(), set()] for _ in range(3))
    shift = int(drafter_of(case)[0].config.sample_from_anchor)
    for term in expected(case):
        at = int(ANCHORS[term.row, term.anchor])
        anchor[term.row].add(at)
        label[term.row].add(at + term.slot + shift)
        prev[term.row].add(at + term.slot + shift - 1)
    return anchor, label, prev


def test_only_tokens_of_anchors_labels_and_previous_slots_enter():
    """Not prompts, padding, other documents' tokens, or tokens behind the last label."""
    _, _, drafter = drafter_of("vanilla")
    rows = packed_rows()
    for row, *used in zip(rows, *supervised()):
        others = np.setdiff1d(np.arange(20), list(set().union(*used)))
        assert {0, 1} <= set(others)
        row.tokens[others] = (row.tokens[others] + 7) % 39
    same(run(drafter, rows), plain("vanilla"))
    for kind in range(3):  # and each of these does
        rows = packed_rows()
        for row, positions in zip(rows, supervised()[kind]):
            at = max(positions)
            row.tokens[at] = (row.tokens[at] + 7) % 39
        assert run(drafter, rows)[0] != plain("vanilla")[0]


@pytest.mark.parametrize("case", ["vanilla", "rnn", "pruned"])
def test_the_teacher_is_the_state_before_the_label(case):
    """No other state of the target's last layer has any influence, NaN included (R044)."""
    _, _, drafter = drafter_of(case)
    _, label, _ = supervised(case)
    rows = packed_rows()
    for row, positions in zip(rows, label):
        others = np.setdiff1d(np.arange(20), [p - 1 for p in positions])
        row.last_hidden[others] = np.nan
    same(run(drafter, rows), plain(case))
    for b, position in ((0, min(label[0])), (1, max(label[1]))):
        rows = packed_rows()
        rows[b].last_hidden[position - 1] += 0.1
        assert run(drafter, rows)[0] != plain(case)[0]


def test_gradients_reach_the_taps_of_visible_context_only():
    """Before the anchor of a supervised block, in its document; padding may hold NaN."""
    _, _, drafter = drafter_of("vanilla")
    *_, d_taps = plain("vanilla")
    for b, row in enumerate(packed_rows()):
        seen = set()
        for term in expected("vanilla"):
            if term.row == b:
                seen |= set(context_of(int(ANCHORS[b, term.anchor]), row.documents))
        reached = np.flatnonzero((d_taps[b] != 0).any((1, 2)))
        assert set(reached) == seen
    rows = packed_rows()
    rows[0].taps[rows[0].documents == 0] = np.nan
    value, sums, grads, _ = run(drafter, rows)
    same((value, sums, grads), plain("vanilla")[:3])


@pytest.mark.parametrize("case", ["vanilla", "rnn"])
def test_later_slots_do_not_reach_earlier_ones(case):
    """The last token of the longest block is only a label; it moves no other slot's terms."""
    _, _, drafter = drafter_of(case)
    rows = packed_rows()
    shift = 1 if case == "vanilla" else 0
    anchors = np.zeros_like(ANCHORS)
    anchors[0, 0] = 3
    filled = anchors > 0
    want = run(drafter, rows, anchors, filled)[1]
    last = 3 + 3 + shift
    rows[0].tokens[last] = (rows[0].tokens[last] + 7) % 39
    got = run(drafter, rows, anchors, filled)[1]
    assert got.ce != want.ce
    same((got.accept, got.match, got.bce, got.l1), (want.accept, want.match, want.bce, want.l1))
    rows = packed_rows()
    rows[0].tokens[last - 1] = (rows[0].tokens[last - 1] + 7) % 39  # previous token of the last
    got = run(drafter, rows, anchors, filled)[1]
    np.testing.assert_array_equal(got.accept[:-1], want.accept[:-1])
    assert got.accept[-1] != want.accept[-1]


def test_a_label_that_cannot_be_drafted_has_no_cross_entropy():
    """Which of those it is makes no difference, while as a previous token each is its own."""
    _, weights, drafter = drafter_of("pruned")
    first, second = np.setdiff1d(np.arange(39), weights["draft_ids"])[[3, 9]]
    anchors = np.zeros_like(ANCHORS)
    anchors[0, 0] = 3  # its last slot's label is the token at 7

    def with_token(at, token):
        rows = packed_rows()
        rows[0].tokens[[6, 7]] = second
        rows[0].tokens[at] = token
        return run(drafter, rows, anchors, anchors > 0)

    outside = with_token(7, first)
    same(with_token(7, second), outside)
    inside = with_token(7, weights["draft_ids"][5])
    assert inside[1].ce > outside[1].ce
    same(inside[1].accept, outside[1].accept)
    other = with_token(6, first)[1]
    np.testing.assert_array_equal(other.accept[:-1], outside[1].accept[:-1])
    assert other.accept[-1] != outside[1].accept[-1]


# Blocks and rows that are not there.


def test_a_row_without_anchors_changes_nothing():
    """The loss is that of the other row's blocks, and no gradient reaches the row (R042)."""
    shape, weights, drafter = drafter_of("vanilla")
    filled = np.array([[False] * 4, [False, True, True, False]])
    value, sums, grads, d_taps = run(drafter, None, np.where(filled, ANCHORS, 0), filled)
    reference = make_reference(shape, weights)
    want = reference.terms(packed_rows(), [[], [8, 12]], LOSS)
    assert value == pytest.approx(total_loss(want, LOSS), rel=1e-5)
    assert sums.anchors == 2 and sums.slots.sum() == len(want)
    assert not d_taps[0].any() and d_taps[1].any()
    assert all(np.isfinite(grad).all() for grad in grads.values())
    # Whatever the row holds.
    rows = packed_rows()
    rows[0].taps[:] = 1e6
    rows[0].last_hidden[:] = np.nan
    got = run(drafter, rows, np.where(filled, ANCHORS, 0), filled)
    same(got[:3], (value, sums, grads))


@pytest.mark.parametrize("case", CASES)
def test_no_anchor_at_all_is_zero(case):
    """Finite, loss 0, gradients exactly 0 (R042, R129)."""
    _, _, drafter = drafter_of(case)
    value, sums, grads, d_taps = run(drafter, None, np.zeros_like(ANCHORS), np.zeros_like(FILLED))
    assert value == 0 and sums.weight == 0 and sums.anchors == 0
    for x in jax.tree.leaves((dataclasses.replace(sums, rows=0.0), grads, d_taps)):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("bias", [1e4, -1e4])
def test_a_saturated_confidence_stays_finite(bias):
    shape, weights, _ = drafter_of("vanilla")
    drafter = make_drafter(shape, weights | {"confidence.bias": np.full(1, bias, np.float32)})
    value, sums, grads, _ = run(drafter)
    missing = [1 - t.accept if bias > 0 else t.accept for t in expected("vanilla")]
    want = abs(bias) * sum(t.weight * m for t, m in zip(expected("vanilla"), missing))
    assert sums.bce == pytest.approx(want, rel=1e-2)
    assert np.isfinite(value) and all(np.isfinite(grad).all() for grad in grads.values())


# Metrics.


@pytest.mark.parametrize("case", ["vanilla", "rnn"])
def test_summary(case):
    """Rates over proposals, weights divided out, the accepted length counts the target's token."""
    shape, _, _ = drafter_of(case)
    value, sums, _, _ = plain(case)
    summary = summarize(sums, LOSS, shape.config)
    assert summary["loss"] == pytest.approx(float(value), rel=1e-5)
    terms = expected(case)
    total = sum(term.weight for term in terms)
    for name in ("ce", "l1", "kl"):
        want = sum(t.weight * getattr(t, name) for t in terms) / total
        assert summary[f"loss_{name}"] == pytest.approx(want, rel=1e-5)
    assert "loss_kl" not in summarize(sums, dataclasses.replace(LOSS, kl=0.0), shape.config)
    first = 0 if case == "vanilla" else 1
    assert len(summary["acceptance"]) == 4 - first
    for k, got in enumerate(summary["acceptance"], start=first):
        assert got == pytest.approx(np.mean([t.accept for t in terms if t.slot == k]), rel=1e-5)
    for name in ("acceptance", "acceptance_t0", "confidence_error"):
        assert all(0 <= rate <= 1 for rate in summary[name])  # R056
    survival = np.asarray(sums.survive)[first:] / np.asarray(sums.slots)[first:]
    assert summary["expected_accepted_length"] == pytest.approx(1 + survival.sum(), rel=1e-6)
    assert 1 < summary["expected_accepted_length"] < 1 + len(survival)
    assert summary["anchors_per_row"] == 3.5
    empty = summarize(jax.tree.map(np.zeros_like, sums), LOSS, shape.config)
    assert empty["loss"] == 0 and empty["expected_accepted_length"] == 1
