"""The train step: one global normalisation, a frozen target, donated state, one compilation.

pytest tests/test_step.py
"""

import dataclasses
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import total_loss
from tiny_drafter import (
    HIDDEN,
    VOCAB,
    head_arrays,
    make_batch,
    make_drafter,
    make_head,
    make_reference,
    make_row,
    make_shape,
    random_weights,
)

from dspark_jax.core.config import TrainConfig
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named, to_plain, trainable, with_tables
from dspark_jax.training.anchors import sample_anchors
from dspark_jax.training.step import (
    Recipe,
    TrainState,
    make_optimizer,
    train_step,
    validation_step,
)

LOSS = LossConfig(ce=0.1, l1=0.9, confidence=0.5, decay=3.0)
RECIPE = Recipe(LOSS, num_anchors=3, chunk=16, seed=11)
LENGTH = 12
PRUNED = 24  # tokens of a pruned vocabulary


def recorder() -> optax.GradientTransformation:
    """Keeps the gradient of the step in the optimizer state and passes it on."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda grads, *_: (grads, grads)
    )


OPTIONS = TrainConfig(learning_rate=1e-2, weight_decay=0.1, warmup_fraction=0.04)
STEPS = 100
RECORD = optax.chain(recorder(), optax.set_to_zero())
TX = optax.chain(recorder(), make_optimizer(OPTIONS, STEPS))


@functools.cache
def shape_and_weights(vocab: int = 0):
    shape = make_shape(num_layers=1, block_size=3, vocab_size=vocab)
    return shape, random_weights(shape)


def eight_rows():
    """Rows with many, few and no supervised slots; every second pair of rows has none at all."""
    generated = [range(1, 12), (4, 5), (), (), range(2, 12), (11,), (), range(6, 9)]
    documents = [(12,), (12,), (12,), (5, 7), (6, 6), (12,), (4,), (9, 3)]
    return [
        make_row(sizes, positions, seed, LENGTH)
        for seed, (sizes, positions) in enumerate(zip(documents, generated))
    ]


def new_state(tx=TX, vocab: int = 0) -> TrainState:
    drafter = make_drafter(*shape_and_weights(vocab))
    return TrainState(jnp.zeros((), jnp.int32), drafter, jax.jit(tx.init)(trainable(drafter)))


@dataclasses.dataclass
class Result:
    """What a step has given, on the host."""

    loss: float
    grads: dict
    metrics: dict


def step_on(
    fsdp: int, tp: int, accumulation: int, order=range(8), tx=RECORD, vocab=0, recipe=None
) -> Result:
    """The first step on a mesh, with the rows in an order."""
    rows = eight_rows()
    with jax.set_mesh(make_mesh(fsdp, tp)):
        batch = make_batch([rows[i] for i in order], accumulation, list(order), bool(vocab))
        start = new_state(tx, vocab)
        options = recipe or RECIPE
        state, metrics = train_step(start, make_head(), batch, tx=tx, recipe=options)
        state, metrics = jax.device_get((to_plain(state), metrics))
    return Result(metrics["loss"], state.opt_state[0], metrics)


@pytest.fixture(scope="module")
def whole() -> Result:
    return step_on(1, 1, 1)


# One normalisation over the global batch (R046, R129).


def terms_by_the_loops(vocab: int = 0):
    """Of the first step, and how many anchors each row has."""
    rows = eight_rows()
    masks, documents = (
        np.stack([getattr(row, name) for row in rows]) for name in ("loss_mask", "documents")
    )
    key = jax.random.fold_in(jax.random.key(RECIPE.seed), 0)
    anchors, filled = sample_anchors(key, masks, documents, np.arange(8), RECIPE.num_anchors)
    kept = [list(a[on]) for a, on in zip(np.asarray(anchors), np.asarray(filled))]
    reference = make_reference(*shape_and_weights(vocab))
    return reference.terms(rows, kept, LOSS), [len(a) for a in kept]


def test_the_loss_is_the_loops_loss_over_all_rows(whole):
    terms, anchors = terms_by_the_loops()
    assert anchors == [3, 1, 0, 0, 3, 0, 0, 2]
    assert whole.loss == pytest.approx(total_loss(terms, LOSS), rel=1e-5)
    assert whole.metrics["sums"].slots.sum() == len(terms)
    # A mean of the rows' means would be something else.
    means = [total_loss([t for t in terms if t.row == b], LOSS) for b in (0, 1, 4, 7)]
    assert abs(np.mean(means) - whole.loss) > 1e-2 * whole.loss


@pytest.mark.parametrize(
    "fsdp, tp, accumulation",
    [
        pytest.param(1, 1, 4, marks=pytest.mark.slow),
        pytest.param(8, 1, 1, marks=pytest.mark.slow),
        (4, 2, 2),
    ],
)
def test_neither_mesh_nor_accumulation_matters(whole, fsdp, tp, accumulation):
    """Micro-batches 2 and 3 of 4, and some devices, have no supervised slot."""
    check(step_on(fsdp, tp, accumulation), whole)


@pytest.mark.slow
def test_nor_do_they_with_a_pruned_vocabulary():
    """The loss is that of the loops, and the ids of the vocabulary have no gradient."""
    got, want = step_on(4, 2, 2, vocab=PRUNED), step_on(1, 1, 1, vocab=PRUNED)
    terms, _ = terms_by_the_loops(PRUNED)
    assert want.loss == pytest.approx(total_loss(terms, LOSS), rel=1e-5)
    assert "draft_ids" not in want.grads and want.grads["markov.w2"].shape[0] == PRUNED
    check(got, want)


@pytest.mark.slow
def test_nor_do_the_places_of_the_rows(whole):
    """Two micro-batches: all supervised rows in the first of them, or spread, or as they come."""
    check(step_on(1, 1, 2, range(8), TX), whole)
    check(step_on(1, 1, 2, [0, 1, 4, 7, 2, 3, 5, 6], TX), whole)
    check(step_on(1, 1, 2, [6, 0, 5, 4, 3, 1, 2, 7], TX), whole)


@pytest.mark.parametrize(
    "average_over, order, groups",
    [
        ("micro_batch", range(8), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        pytest.param("row", range(8), [[0], [1], [4], [5], [7]], marks=pytest.mark.slow),
    ],
)
def test_averages_of_parts_are_those_of_the_loops(whole, average_over, order, groups):
    """As DeepSpec and speculators divide: of four micro-batches, and of rows with an answer."""
    loss = dataclasses.replace(LOSS, average_over=average_over)
    recipe = dataclasses.replace(RECIPE, loss=loss)
    result = step_on(1, 1, 4, order, recipe=recipe)
    terms, _ = terms_by_the_loops()
    if average_over == "micro_batch":  # one without any answer does not count
        groups = [group for group in groups if any(eight_rows()[b].loss_mask.any() for b in group)]
    assert result.loss == pytest.approx(total_loss(terms, LOSS, groups=groups), rel=1e-5)
    assert abs(result.loss - whole.loss) > 1e-2 * whole.loss
    weight = result.metrics["sums"].weight
    assert weight == len(groups)


def check(got: Result, want: Result):
    assert got.loss == pytest.approx(float(want.loss), rel=1e-6)
    for name, grad in want.grads.items():
        np.testing.assert_allclose(
            got.grads[name], grad, rtol=1e-5, atol=3e-6 * np.abs(grad).max(), err_msg=name
        )
    np.testing.assert_allclose(got.metrics["grad_norm"], want.metrics["grad_norm"], rtol=1e-6)
    for x, y in zip(jax.tree.leaves(got.metrics["sums"]), jax.tree.leaves(want.metrics["sums"])):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    for x in got.metrics["finite"].values():
        assert x


def test_neither_do_processes(whole, tmp_path):
    """Two of four devices each; the second one has no valid anchor (R127, R129)."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        address = f"localhost:{found.getsockname()[1]}"
    tests = pathlib.Path(__file__).resolve().parent
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "4"}
    environment["PYTHONPATH"] = f"{tests.parent}:{tests}"
    flags = [f"--coordinator={address}", "--num_processes=2"]
    running = [
        subprocess.Popen(
            [sys.executable, tests / "step_worker.py", *flags, f"--process_id={i}", tmp_path / "0"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, errors
    got = json.loads((tmp_path / "0").read_text())
    assert got["loss"] == pytest.approx(float(whole.loss), rel=1e-6)
    assert got["weight"] == pytest.approx(float(whole.metrics["sums"].weight))
    for name, grad in whole.grads.items():
        np.testing.assert_allclose(
            got["grads"][name], grad, rtol=1e-5, atol=3e-6 * np.abs(grad).max(), err_msg=name
        )


def test_the_gradient_norm_is_of_the_trained_arrays(whole):
    norm = np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in whole.grads.values()))
    assert whole.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 1e-2


# The state.


@pytest.fixture(scope="module")
def one_device():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


def test_three_steps(one_device):
    """Frozen target, donated state, one compilation, anchors and arrays that change (R053)."""
    head, batch, state = make_head(), make_batch(eight_rows(), 2), new_state()
    first = state.drafter.fc[...]
    losses, seen = [], []
    before = None
    for _ in range(3):
        state, metrics = train_step(state, head, batch, tx=TX, recipe=RECIPE)
        before = before or train_step._cache_size()
        losses.append(float(metrics["loss"]))
        seen.append(jax.device_get(named(state.drafter)))
    assert train_step._cache_size() == before
    assert int(state.step) == 3
    assert first.is_deleted()
    for array, kept in zip((head.embed, head.lm_head), head_arrays()):
        np.testing.assert_array_equal(array, kept)
    # The optimizer knows the drafter's arrays and no others.
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 3 * len(seen[0])
    assert not [leaf for leaf in moments if leaf.shape == (VOCAB, HIDDEN)]
    for name in seen[0]:
        assert (seen[2][name] != seen[1][name]).any(), name
    assert len(set(losses)) == 3  # the anchors of a step are its own


@pytest.mark.slow
def test_ids_of_a_pruned_vocabulary_stay_what_they_are(one_device):
    """No step, decay or moment touches the table; what is trained changes as ever."""
    batch, state = make_batch(eight_rows(), 2, pruned=True), new_state(TX, PRUNED)
    _, weights = shape_and_weights(PRUNED)
    for _ in range(3):
        state, metrics = train_step(state, make_head(), batch, tx=TX, recipe=RECIPE)
    after = jax.device_get(named(state.drafter))
    assert set(after) == set(weights)
    for name, array in after.items():
        assert array.dtype == weights[name].dtype, name
        assert np.array_equal(array, weights[name]) == (name == "draft_ids"), name
    floats = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(floats) == 3 * (len(weights) - 1)
    assert metrics["finite"]["loss"]


def test_tables_leave_a_drafter_and_come_back(one_device):
    drafter = make_drafter(*shape_and_weights(PRUNED))
    params = trainable(drafter)
    assert set(named(drafter)) - set(named(params)) == {"draft_ids"}
    back = with_tables(jax.tree.map(lambda x: x + 1, params), drafter)
    assert jax.tree.structure(back) == jax.tree.structure(drafter)
    np.testing.assert_array_equal(back.draft_ids[...], drafter.draft_ids[...])
    np.testing.assert_array_equal(back.norm[...], drafter.norm[...] + 1)
    plain = make_drafter(*shape_and_weights())
    assert set(named(trainable(plain))) == set(named(plain))


def test_it_learns_its_batch(one_device):
    """The same eight rows again and again: what the target would accept grows (R039)."""
    head, batch, state = make_head(), make_batch(eight_rows(), 2), new_state()
    seen = []
    for _ in range(STEPS):
        state, metrics = train_step(state, head, batch, tx=TX, recipe=RECIPE)
        seen.append(metrics)
    losses = [float(metrics["loss"]) for metrics in seen]
    assert np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    accept = [float(m["sums"].accept.sum() / m["sums"].slots.sum()) for m in seen]
    assert np.mean(accept[-5:]) > np.mean(accept[:5]) + 0.15


def test_a_step_is_a_function_of_its_inputs(one_device, whole):
    """The same state and batch give the same bits."""
    again = step_on(1, 1, 1)
    jax.tree.map(np.testing.assert_array_equal, again.grads, whole.grads)


def advanced() -> TrainState:
    """A state whose optimizer has seen a step."""
    batch = make_batch(eight_rows(), 2)
    return train_step(new_state(), make_head(), batch, tx=TX, recipe=RECIPE)[0]


def assert_same(state, kept, but=()):
    got = jax.device_get(to_plain(state))
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(kept), strict=True):
        if jax.tree_util.keystr(path) not in but:
            np.testing.assert_array_equal(x, y, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_batch_that_is_not_finite_leaves_the_state_alone(one_device, value):
    state = advanced()
    kept = jax.device_get(to_plain(state))
    rows = eight_rows()
    rows[3].taps[4, 1, 2] = value
    batch = make_batch(rows, 2)
    state, metrics = train_step(state, make_head(), batch, tx=TX, recipe=RECIPE)
    assert not metrics["finite"]["taps"]
    assert_same(state, kept)


def test_a_teacher_that_is_not_finite_is_reported(one_device):
    state = advanced()
    kept = jax.device_get(to_plain(state))
    rows = eight_rows()
    rows[0].last_hidden[:] = np.nan
    state, metrics = train_step(state, make_head(), make_batch(rows, 2), tx=TX, recipe=RECIPE)
    assert metrics["finite"]["taps"] and not metrics["finite"]["loss"]
    assert_same(state, kept)


def test_padding_may_hold_anything(one_device):
    """It is no part of the data: the step is the same to the bit (R044)."""
    want = jax.device_get(to_plain(advanced()))
    rows = eight_rows()
    for row in rows:
        row.taps[row.documents == 0] = np.nan
        row.last_hidden[row.documents == 0] = np.inf
    batch = make_batch(rows, 2)
    state, metrics = train_step(new_state(), make_head(), batch, tx=TX, recipe=RECIPE)
    assert metrics["finite"]["taps"] and metrics["finite"]["loss"]
    assert_same(state, want)


def test_a_batch_without_supervision_is_skipped(one_device):
    """Loss 0, no decay, no momentum; only the step counts (R129)."""
    state = advanced()
    kept = jax.device_get(to_plain(state))
    rows = eight_rows()
    for row in rows:
        row.loss_mask[:] = False
    state, metrics = train_step(state, make_head(), make_batch(rows, 2), tx=TX, recipe=RECIPE)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["sums"].weight == 0
    assert metrics["finite"]["taps"] and metrics["finite"]["loss"]
    assert int(state.step) == 2
    assert_same(state, kept, but=(".step",))


def test_validation_changes_nothing_and_repeats(one_device):
    """The same sums each time, of the same slots whatever the step."""
    shape, weights = shape_and_weights()
    drafter, head = make_drafter(shape, weights), make_head()
    batch = make_batch(eight_rows())
    first, second = (
        jax.device_get(validation_step(drafter, head, batch, recipe=RECIPE)) for _ in range(2)
    )
    jax.tree.map(np.testing.assert_array_equal, first, second)
    assert first.weight > 0
    for name, array in jax.device_get(named(drafter)).items():
        np.testing.assert_array_equal(array, weights[name])
