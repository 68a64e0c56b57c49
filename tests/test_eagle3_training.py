"""EAGLE-3 in training: every term and the gradient against loops, and the train command.

pytest tests/test_eagle3_training.py
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from eagle3_reference import EAGLE3, ReferenceEagle3
from reference import Term, block_slots, softmax, total_loss
from tiny_drafter import (
    first_micro,
    head_arrays,
    make_batch,
    make_drafter,
    make_head,
    make_row,
    make_shape,
    packed_rows,
    random_weights,
)

from dspark_jax.convert import convert
from dspark_jax.core.config import RunConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named, trainable, with_tables
from dspark_jax.evaluate import Request
from dspark_jax.evaluate import run as evaluate
from dspark_jax.train import run as train
from dspark_jax.training.anchors import make_blocks, slot_weights
from dspark_jax.training.checkpoint import load_arrays, read_record
from dspark_jax.training.eagle3 import may_start
from dspark_jax.training.losses import dspark_loss
from dspark_jax.training.step import Recipe, TrainState, summarize, train_step

LOSS = LossConfig(ce=0.1, l1=0.3, kl=1.0, confidence=0.0)
# Row 0: chains that end with the answer, with the document, and an unfilled one; row 1: full ones,
# cut by the hole in the mask and by the end of the row.
ANCHORS = np.array([[3, 6, 13, 0], [5, 8, 12, 18]], np.int32)
FILLED = np.array([[True, True, True, False], [True] * 4])
CASES = {"whole": {}, "pruned": {"vocab_size": 24}}


@pytest.fixture(autouse=True, scope="module")
def mesh():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh(1, 1)):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def drafter_of(case: str):
    """Shape, weights and drafter."""
    shape = make_shape(**EAGLE3, block_size=4, **CASES[case])
    weights = random_weights(shape, seed=5)
    return shape, weights, make_drafter(shape, weights)


@jax.jit
def _run(drafter, head, batch, anchors, filled):
    config = drafter.config
    blocks = make_blocks(anchors, filled, batch.loss_mask, batch.documents, config, LOSS)
    one = jax.tree.map(lambda x: x[None], blocks)  # one micro-batch
    weights = slot_weights(one, batch.loss_mask[None], config, LOSS)
    weights = jax.tree.map(lambda x: x[0], weights)

    def loss(params, taps):
        micro = dataclasses.replace(batch, taps=taps)
        total, whole = weights.unit, with_tables(params, drafter)
        return dspark_loss(whole, head, micro, blocks, weights, total, LOSS, 16)

    grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (value, sums), (grads, d_taps) = grad(trainable(drafter), batch.taps)
    return value, sums, named(grads), d_taps


def run(drafter, rows=None):
    """Loss, sums, gradients by name and gradient of the taps."""
    batch = first_micro(make_batch(rows or packed_rows(), pruned=drafter.shape.pruned))
    chosen = place(ANCHORS, "batch"), place(FILLED, "batch")
    return jax.device_get(_run(drafter, make_head(), batch, *chosen))


def terms_of(shape, weights) -> list[Term]:
    """Every supervised step of the chains, by the loops."""
    reference, found = ReferenceEagle3(weights, *head_arrays(), shape), []
    decay, ids = shape.config.eagle3.step_loss_decay, reference.draft_ids
    for number, row in enumerate(packed_rows()):
        for index in np.flatnonzero(FILLED[number]):
            anchor = int(ANCHORS[number, index])
            slots = block_slots(anchor, row.loss_mask, row.documents, 4, True, LOSS)
            live = [k for k, slot in enumerate(slots) if slot.supervised]
            for k, z in zip(live, reference.chain(row, anchor, len(live))):
                label = anchor + k + 1
                zt = reference.lm_head @ np.asarray(row.last_hidden[label - 1], np.float64)
                p, q = softmax(zt), np.zeros(len(zt))  # over all the target can say
                q[ids] = softmax(z)
                kl = sum(p[v] * np.log(p[v] / q[v]) for v in ids)
                said = int(row.tokens[label])
                ce = -np.log(q[said]) if said in ids else 0.0
                l1, accept = float(np.abs(q - p).sum()), float(np.minimum(p, q).sum())
                match = float(ids[z.argmax()] == zt.argmax())
                where = (number, int(index), k, decay**k)
                found.append(Term(*where, ce, l1, kl, accept, match, 0.0, 0.0, accept))
    return found


@pytest.mark.parametrize("case", CASES)
def test_terms_metrics_and_loss_match_the_loops(case):
    shape, weights, drafter = drafter_of(case)
    value, sums, *_ = run(drafter)
    terms = terms_of(shape, weights)
    np.testing.assert_allclose(value, total_loss(terms, LOSS), rtol=2e-5)
    assert float(sums.weight) == pytest.approx(sum(t.weight for t in terms), rel=1e-6)
    for k in range(4):
        at = [t for t in terms if t.slot == k]
        assert sums.slots[k] == len(at) and len(at) > 0
        np.testing.assert_allclose(sums.accept[k], sum(t.accept for t in at), rtol=2e-5)
        assert sums.match[k] == sum(t.match for t in at)
    metrics = summarize(sums, LOSS, shape.config)
    survive = 1.0
    for k in range(4):
        alive = [t for t in terms if t.slot == k]
        product = [
            np.prod([u.accept for u in terms if (u.row, u.anchor) == (t.row, t.anchor)
                     and u.slot <= k]) for t in alive
        ]  # fmt: skip
        survive += sum(product) / len(alive)
    assert metrics["expected_accepted_length"] == pytest.approx(survive, rel=2e-5)
    assert metrics["loss"] == pytest.approx(float(value), rel=2e-5)


def test_gradients_match_differences_of_the_loops():
    """Along a random direction of every array, in float64."""
    shape, weights, drafter = drafter_of("whole")
    *_, grads, _ = run(drafter)
    rng, size = np.random.default_rng(0), 1e-5
    assert set(grads) == set(weights)
    for name, array in weights.items():
        way = rng.standard_normal(array.shape)
        ends = [
            total_loss(terms_of(shape, weights | {name: array + sign * size * way}), LOSS)
            for sign in (1, -1)
        ]
        want = (ends[0] - ends[1]) / (2 * size)
        got = float((np.asarray(grads[name], np.float64) * way).sum())
        assert got == pytest.approx(want, rel=2e-4, abs=2e-6), name


def test_what_is_not_taught_has_no_influence():
    """Padding, and taps at or behind every anchor of their document; the others have some."""
    _, _, drafter = drafter_of("whole")
    value, sums, grads, d_taps = run(drafter)
    rows = packed_rows()
    for row in rows:
        row.taps[row.documents == 0] = np.nan
        row.last_hidden[row.documents == 0] = np.nan
    other = run(drafter, rows)
    for x, y in zip(jax.tree.leaves((value, sums, grads)), jax.tree.leaves(other[:3])):
        np.testing.assert_array_equal(x, y)
    reached = [np.flatnonzero((d != 0).any((1, 2))).tolist() for d in d_taps]
    # Document 2 of row 0 begins at 9 and its only anchor is 13; the unfilled one reaches nothing.
    assert reached[0] == [*range(6), *range(9, 13)]
    assert max(reached[1]) <= 17


def test_no_chain_starts_where_no_taps_are():
    mask = np.array([[1, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 1]], bool)
    documents = np.array([[1, 1, 2, 2, 2, 2], [1, 1, 1, 2, 2, 0]], np.int32)
    got = may_start(*(place(x, "batch") for x in (mask, documents)))
    assert np.asarray(got).astype(int).tolist() == [[0, 1, 0, 1, 0, 1], [0, 0, 1, 0, 1, 0]]


RECIPE = Recipe(LossConfig(ce=0.0, l1=0.0, kl=1.0, confidence=0.0), 6, 64, 3)


def new_state(tx, seed: int = 5) -> TrainState:
    shape = make_shape(**EAGLE3, block_size=3)
    drafter = make_drafter(shape, random_weights(shape, seed))
    return TrainState(jnp.zeros((), jnp.int32), drafter, jax.jit(tx.init)(trainable(drafter)))


@pytest.mark.slow
def test_one_step_is_the_same_however_the_batch_is_cut():
    """One division by the weight of the whole batch: rows with many steps, few and none (R046)."""
    sizes = [range(2, 12), (6, 7), (), range(4, 9)]
    rows = [make_row((12,), said, seed, 12) for seed, said in enumerate(sizes)]
    tx, after = optax.sgd(1.0), []
    for micro in (1, 2, 4):
        batch = make_batch(rows, micro)
        state, result = train_step(new_state(tx), make_head(), batch, tx=tx, recipe=RECIPE)
        after.append(jax.device_get((named(state.drafter), result["loss"])))
    start = named(new_state(tx).drafter)
    for arrays, loss in after[1:]:
        assert loss == pytest.approx(float(after[0][1]), rel=1e-5)
        for name, array in arrays.items():
            np.testing.assert_allclose(array, after[0][0][name], rtol=1e-4, atol=1e-6)
    assert all((np.asarray(start[name]) != x).any() for name, x in after[0][0].items())


@pytest.mark.slow
def test_a_repeated_row_is_learnt():
    tx = optax.adam(1e-2)
    state, batch = new_state(tx), make_batch([make_row((12,), range(2, 12), 1, 12)])
    lengths = []
    for _ in range(60):
        state, result = train_step(state, make_head(), batch, tx=tx, recipe=RECIPE)
        sums = jax.device_get(result["sums"])
        lengths.append(summarize(sums, RECIPE.loss, state.drafter.config))
    assert lengths[-1]["loss"] < 0.1 * lengths[0]["loss"]
    first, last = (x["expected_accepted_length"] for x in (lengths[0], lengths[-1]))
    assert last > first + 0.5 and last <= 4


# The commands.


def config_of(target, prompts, **changes) -> RunConfig:
    fields = {f"drafter.{name}": value for name, value in EAGLE3.items()}
    fields |= {"loss.ce": 0.0, "loss.l1": 0.0, "loss.kl": 1.0, "loss.confidence": 0.0}
    fields |= {"train.num_steps": 2, "data.max_new_tokens": 8}
    return from_mapping(RunConfig, tiny.mapping(target, prompts, fields | changes))


@pytest.mark.parametrize(
    "name, value",
    [
        ("semantics", "speculators"),
        ("semantics", "paper"),
        ("loss.anchors", "block"),
        ("loss.supervision", "slot"),
        ("loss.mask_at", "slot"),
        ("loss.cross_documents", True),
        ("drafter.head_init", "uniform"),
    ],
)
def test_what_is_defined_for_blocks_alone_is_refused(name, value, tmp_path):
    with pytest.raises(UserError, match=f"{name}={value!r}.*EAGLE-3"):
        config_of(tmp_path, tmp_path, **{name: value})


def test_other_divisors_are_those_of_dspark():
    """loss.denominator and average_over concern steps as they concern slots."""
    shape, batch = drafter_of("whole")[0], first_micro(make_batch(packed_rows()))
    chosen = place(ANCHORS, "batch"), place(FILLED, "batch")
    for options in ({"denominator": "slots"}, {"average_over": "row"}):
        loss = dataclasses.replace(LOSS, **options)
        blocks = make_blocks(*chosen, batch.loss_mask, batch.documents, shape.config, loss)
        one = jax.tree.map(lambda x: x[None], blocks)
        got = slot_weights(one, batch.loss_mask[None], shape.config, loss)
        on = np.asarray(blocks.supervised)
        decayed = on * shape.config.eagle3.step_loss_decay ** np.arange(4)
        if "average_over" in options:
            decayed, total = decayed / decayed.sum((1, 2), keepdims=True), 2.0
        else:
            total = on.sum()
        np.testing.assert_allclose(got.slots[0], decayed, rtol=1e-6)
        assert got.unit[0] == total


@pytest.mark.slow
def test_train_evaluate_export_and_fine_tune(tmp_path, capsys):
    """The same commands as for DSpark; fine-tuning starts from the folder's weights."""
    target = tiny.make_target(tmp_path / "target")
    prompts = tiny.write_prompts(tmp_path / "prompts.jsonl", 6)
    config = config_of(target, prompts)
    train(config, tmp_path / "a")
    assert read_record(tmp_path / "a").config == config
    convert(str(tmp_path / "a"), "speculators", tmp_path / "s", step="latest")
    assert "dspark_jax:" not in capsys.readouterr().err  # no warning of what it is not
    again = {"drafter.init_from": str(tmp_path / "s"), "train.learning_rate": 0.0}
    again |= {"data.path": str(tmp_path / "a" / "data")}
    train(config_of(target, prompts, **again), tmp_path / "b")
    first, second = (load_arrays(tmp_path / name, 2) for name in "ab")
    assert set(first) == set(second)
    assert all((first[name] == second[name]).all() for name in first)
    wrong = again | {"drafter.eagle3.norm_output": True}
    with pytest.raises(UserError, match="eagle3.norm_output=True"):
        train(config_of(target, prompts, **wrong), tmp_path / "c")
    request = Request(tasks=str(prompts), prompts_per_set=2, max_new_tokens=6, temperature=0.0)
    capsys.readouterr()
    report = evaluate(request, tmp_path / "a", tmp_path / "report.json")
    assert "DSpark and DFlash drafters only" in capsys.readouterr().out
    (values,) = report["sets"].values()
    assert len(values["conditional_acceptance"]) == 3 and 1 <= values["accepted_length"] <= 4
    assert json.loads((tmp_path / "report.json").read_text())["round_costs"] is None
