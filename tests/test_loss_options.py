"""Every option in which public implementations of the loss differ: terms and gradients by loops.

The reference is numpy in float64, slot by slot (reference.py); gradients are compared with its
differences along a random direction of all arrays together.

pytest tests/test_loss_options.py
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from reference import candidates, total_loss
from tiny_drafter import (
    first_micro,
    make_batch,
    make_drafter,
    make_head,
    make_reference,
    make_row,
    make_shape,
    packed_rows,
    random_weights,
)

from dspark_jax.core.config import from_mapping
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.semantics import SEMANTICS
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named, trainable, with_tables
from dspark_jax.training.anchors import make_blocks, slot_weights
from dspark_jax.training.losses import dspark_loss
from dspark_jax.training.step import summarize

BASE = {"ce": 0.1, "l1": 0.9, "kl": 0.2, "confidence": 0.5, "decay": 3.0}
# Blocks that meet the end of an answer, of a document and of the row, and the hole in a mask.
ANCHORS = np.array([[3, 6, 13, 0], [5, 8, 12, 15]], np.int32)
FILLED = np.array([[True, True, True, False], [True] * 4])


def rows():
    """As `packed_rows`, but the answer of the first document ends in the second."""
    return [make_row((6, 11), [*range(3, 9), *range(12, 17)], seed=1), packed_rows()[1]]


def of_preset(name: str) -> dict:
    return {k.split(".")[1]: v for k, v in SEMANTICS[name].items() if k.startswith("loss.")}


CASES: dict[str, tuple[str, dict]] = {
    "distance": ("whole", {"distance": "tv"}),
    "ce_label": ("whole", {"ce_label": "target"}),
    "supervision": ("whole", {"supervision": "slot"}),
    "supervision, rnn": ("rnn", {"supervision": "slot"}),  # its state passes unsupervised slots
    "mask_at": ("whole", {"mask_at": "slot"}),
    "cross_documents": ("whole", {"cross_documents": True}),
    "denominator": ("whole", {"denominator": "slots"}),
    "average_over": ("whole", {"average_over": "row"}),
    "decay": ("whole", {"decay": 0.0}),
    "teacher": ("pruned", {"teacher": "draft"}),
    "speculators": ("pruned", of_preset("speculators") | {"ce": 0.1, "l1": 0.9}),
}
SHAPES = {
    "whole": {"num_layers": 1},
    "rnn": {"num_layers": 1, "markov_head": "rnn"},
    "pruned": {"num_layers": 1, "vocab_size": 24},
}


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


@functools.cache
def drafter_of(kind: str):
    shape = make_shape(**SHAPES[kind])
    weights = random_weights(shape, seed=5)
    return shape, weights, make_drafter(shape, weights)


@functools.partial(jax.jit, static_argnames="options")
def _loss(params, drafter, head, batch, blocks, weights, options):
    def loss(params):
        whole = with_tables(params, drafter)
        return dspark_loss(whole, head, batch, blocks, weights, weights.unit, options, 16)

    return jax.value_and_grad(loss, has_aux=True)(params)


@functools.cache
def run(kind: str, options: LossConfig):
    """Loss, sums and gradients by name. Supervision is data: few of the options compile anew."""
    drafter = drafter_of(kind)[2]
    batch = first_micro(make_batch(rows(), pruned=drafter.shape.pruned))
    chosen, mask = (place(ANCHORS, "batch"), place(FILLED, "batch")), batch.loss_mask
    blocks = make_blocks(*chosen, mask, batch.documents, drafter.config, options)
    one = jax.tree.map(lambda x: x[None], blocks)
    weights = slot_weights(one, mask[None], drafter.config, options)
    weights = jax.tree.map(lambda x: x[0], weights)
    names = ("distance", "ce_label", "teacher", *BASE)
    compiled = LossConfig(**{name: getattr(options, name) for name in names} | {"decay": 1.0})
    params = trainable(drafter)
    (value, sums), grads = _loss(params, drafter, make_head(), batch, blocks, weights, compiled)
    return jax.device_get((value, sums, named(grads)))


def terms_by_loops(kind: str, options: LossConfig, moved=None):
    shape, weights, _ = drafter_of(kind)
    anchors = [list(row[on]) for row, on in zip(ANCHORS, FILLED)]
    return make_reference(shape, moved or weights).terms(rows(), anchors, options)


def groups_of(options: LossConfig):
    return [[0], [1]] if options.average_over == "row" else None


# Each of these compiles a loss of its own, for a part that another case has as well.
SLOW = ("supervision, rnn", "teacher")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES],
)
def test_terms_and_gradients_match_the_loops(case):
    kind, changes = CASES[case]
    options = LossConfig(**BASE | changes)
    groups = groups_of(options)
    value, sums, grads = run(kind, options)
    terms = terms_by_loops(kind, options)
    assert value == pytest.approx(total_loss(terms, options, groups=groups), rel=1e-5)
    for name in ("accept", "match", "slots"):
        want = np.zeros(4)
        for term in terms:
            want[term.slot] += 1 if name == "slots" else getattr(term, name)
        np.testing.assert_allclose(getattr(sums, name), want, rtol=1e-5, err_msg=name)
    # What is logged is the loss, term by term.
    summary = summarize(sums, options, drafter_of(kind)[0].config)
    assert summary["loss"] == pytest.approx(float(value), rel=1e-5)
    for name, weighed in (("ce", "ce"), (options.distance, "l1"), ("confidence", "confidence")):
        off = {"ce": 0.0, "l1": 0.0, "kl": 0.0, "confidence": 0.0} | {weighed: 1.0}
        alone = total_loss(terms, dataclasses.replace(options, **off), groups=groups)
        assert summary[f"loss_{name}"] == pytest.approx(alone, rel=1e-5), name
    # The option is one: the default gives another loss.
    default = LossConfig(**BASE)
    assert abs(total_loss(terms_by_loops(kind, default), default) - value) > 1e-4

    weights, wanted = drafter_of(kind)[1], [term.wanted for term in terms]
    rng, ends = np.random.default_rng(1), []
    ways = {name: rng.standard_normal(grad.shape) for name, grad in grads.items()}
    for step in (1e-6, -1e-6):
        moved = weights | {name: weights[name] + step * way for name, way in ways.items()}
        loops = terms_by_loops(kind, options, moved)
        ends.append(total_loss(loops, options, wanted, groups=groups))
    slope = sum(float((grads[name] * way).sum()) for name, way in ways.items())
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-3, abs=2e-5)


def test_survival_ends_at_a_slot_that_is_not_supervised():
    """Row 1 has no mask at 10 and 11: of the block at 8, only the slot before them is reached."""
    options = LossConfig(**BASE | {"supervision": "slot"})
    _, sums, _ = run("whole", options)
    terms = terms_by_loops("whole", options)
    holes = [t for t in terms if (t.row, t.anchor) in ((1, 0), (1, 1))]
    assert {(t.anchor, t.slot) for t in holes} == {(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 3)}
    want, reached = np.zeros(4), {}
    for term in terms:
        before = reached.get((term.row, term.anchor, term.slot - 1), float(term.slot == 0))
        reached[term.row, term.anchor, term.slot] = before * term.accept
        want[term.slot] += before * term.accept
    np.testing.assert_allclose(sums.survive, want, rtol=1e-5)


def test_candidates_of_speculators_leave_room_for_a_block():
    """A row of 20, blocks of 4: the last anchor is 15, whatever is behind it."""
    row = rows()[1]
    assert candidates(row.loss_mask, row.documents, 4) == [4, 5, 6, 7, 8, 9, 12, 13, 14, 15]
    assert candidates(row.loss_mask, row.documents) == [4, 5, 6, 7, 8, *range(12, 19)]


def test_a_preset_is_a_loss_config():
    for name in SEMANTICS:
        assert from_mapping(LossConfig, of_preset(name)) == LossConfig(**of_preset(name))
