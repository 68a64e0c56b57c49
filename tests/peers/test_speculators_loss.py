"""The preset `speculators` is the loss of speculators 0.9: terms, gradients, anchors, first heads.

The same weights (by our export), the same batch and the same anchors, in float32.

pytest tests/peers/test_speculators_loss.py
"""

import dataclasses
import functools
import json

import harness
import jax
import numpy as np
import pytest
import tiny
from exports import PRUNED, make_case, tiny_config

from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.semantics import SEMANTICS
from dspark_jax.core.sharding import place
from dspark_jax.core.trees import named, trainable, with_tables
from dspark_jax.data.opened import open_target
from dspark_jax.features.source import Batch
from dspark_jax.training.anchors import make_blocks, sample_anchors, slot_weights
from dspark_jax.training.losses import dspark_loss
from dspark_jax.training.step import summarize
from dspark_jax.weights import names

TOLERANCE = 1e-4  # of the largest element
PRESET = {k.split(".")[1]: v for k, v in SEMANTICS["speculators"].items() if k[:5] == "loss."}
MIXED = {"ce": 0.1, "l1": 0.9, "kl": 0.5, "confidence": 0.7, "decay": 3.0}  # every term alone too
CASES = {
    "default": ({}, {}),
    "vanilla": ({}, MIXED),
    "gated": ({"drafter.markov_head": "gated"}, MIXED),
    "rnn": ({"drafter.markov_head": "rnn"}, MIXED),
    "pruned": (PRUNED, MIXED),
    "fill-in": ({"drafter.sample_from_anchor": False}, MIXED),
}
# 30 positions, blocks of 3: an answer over the seam of two documents, one with holes, one that ends
# two short of the row's end. The last anchor is none.
DOCUMENTS = np.repeat([1, 2], [13, 17])
GENERATED = [*range(4, 7), *range(8, 16), *range(18, 22), *range(24, 29)]
ANCHORS = np.int32([4, 6, 10, 11, 12, 13, 15, 19, 21, 26, 0])
FILLED = np.arange(11) < 10


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    mask = np.zeros(30, bool)
    mask[GENERATED] = True
    return {
        "tokens": rng.integers(0, tiny.VOCAB, 30).astype(np.int32),
        "loss_mask": mask,
        "documents": DOCUMENTS.astype(np.int32),
        "positions": np.concatenate([np.arange(13), np.arange(17)]).astype(np.int32),
        "taps": rng.standard_normal((30, 2, tiny.HIDDEN), np.float32),
        "states": rng.standard_normal((30, tiny.HIDDEN), np.float32),  # before the final norm
        "anchors": ANCHORS,
        "filled": FILLED,
    }


@functools.partial(jax.jit, static_argnames="loss")
def _ours(params, drafter, head, batch, blocks, weights, loss):
    def value(params):
        whole = with_tables(params, drafter)
        return dspark_loss(whole, head, batch, blocks, weights, weights.unit, loss, 8)

    return jax.value_and_grad(value, has_aux=True)(params)


def ours(case, head, loss: LossConfig):
    """Our loss, sums and gradients under the names and shapes of the file."""
    given, drafter = arrays(), case.drafter()
    states = given["states"].astype(np.float64)  # the tiny target's norm weighs 1 everywhere
    post = states / np.sqrt((states**2).mean(-1, keepdims=True) + 1e-5)
    logits = post @ np.asarray(head.weight, np.float64).T
    lse = np.log(np.exp(logits).sum(-1)).astype(np.float32)
    fields = [given[n] for n in ("tokens", "loss_mask", "documents", "positions")]
    fields += [np.int32(0), given["taps"], post.astype(np.float32)]
    if drafter.shape.pruned:
        fields += [lse, logits.argmax(-1).astype(np.int32)]
    batch = Batch(*(place(np.asarray(x)[None], "batch") for x in fields))
    chosen = (place(given[n][None], "batch") for n in ("anchors", "filled"))
    params = trainable(drafter)
    # Supervision is data, so that few options compile anew.
    blocks = make_blocks(*chosen, batch.loss_mask, batch.documents, drafter.config, loss)
    one = jax.tree.map(lambda x: x[None], blocks)
    weights = slot_weights(one, batch.loss_mask[None], drafter.config, loss)
    weights = jax.tree.map(lambda x: x[0], weights)
    kept = ("ce", "l1", "kl", "confidence", "distance", "ce_label", "teacher")
    compiled = LossConfig(**{name: getattr(loss, name) for name in kept})
    (value, sums), grads = _ours(params, drafter, head, batch, blocks, weights, loss=compiled)
    found = {}
    for name, grad in named(grads).items():
        theirs, rows = names.to_file(names.DRAFTER, name)
        found[theirs] = np.asarray(grad).reshape(names.file_shape(grad.shape, rows))
    return float(value), jax.device_get(sums), found


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """{case: (our value, sums, gradients, options and config)}, and what speculators answered."""
    folder = tmp_path_factory.mktemp("loss")
    made, asked = {}, {}
    target = open_target(tiny_config(folder / "tiny", {}).target, "float32")
    for name, (changes, weights) in CASES.items():
        case = make_case(folder / name, tiny_config(folder / "tiny", changes))
        loss = LossConfig(**PRESET | weights)
        config = case.record.config.drafter
        made[name] = (*ours(case, target.model.head, loss), loss, config)
        mix = json.dumps({"ce": loss.ce, "tv": loss.l1, "kl_div": loss.kl}) if weights else "kl_div"
        asked[name] = {"directory": str(case.directory), "loss_fn": mix}
        asked[name] |= {"confidence": loss.confidence, "decay": loss.decay}
    fresh = {name: asked[name]["directory"] for name in ("vanilla", "gated", "rnn")}
    values = {"cases": asked, "fresh": fresh}
    answer = harness.ask("speculators", "speculators_loss", folder / "q", values, arrays())
    return made, *answer


@pytest.mark.parametrize("case", CASES)
def test_loss_terms_are_equal(both, case):
    made, answers, _ = both
    value, sums, _, loss, config = made[case]
    theirs = answers[case]
    assert value == pytest.approx(theirs["loss"], rel=TOLERANCE)
    summary = summarize(sums, loss, config)
    pairs = {"loss_confidence": "confidence_loss"}
    if case != "default":
        pairs |= {"loss_ce": "ce_loss", "loss_tv": "tv_loss", "loss_kl": "kl_div_loss"}
    for mine, other in pairs.items():
        assert summary[mine] == pytest.approx(theirs[other], rel=TOLERANCE), mine
    if case != "pruned":  # there they count what the target says outside as accepted
        accepted = sums.accept.sum() / sums.slots.sum()
        assert accepted == pytest.approx(theirs["accept_rate"], rel=TOLERANCE)
    # And no two of the cases are one by chance, nor is the paper's loss this one.
    assert abs(value - theirs["loss"]) < min(
        abs(value - answers[other]["loss"]) for other in CASES if other != case
    )


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_equal(both, case):
    made, _, results = both
    grads = made[case][2]
    theirs = {k.split("/", 1)[1]: v for k, v in results.items() if k.startswith(f"{case}/")}
    assert set(grads) == set(theirs)
    for name, want in theirs.items():
        scale = np.abs(want).max()
        assert scale > 1e-5, name
        assert np.abs(grads[name] - want).max() <= TOLERANCE * scale, name


def test_each_option_of_the_preset_counts(both, tmp_path):
    """With one of them as in the paper, the loss is no longer theirs."""
    _, answers, _ = both
    case = make_case(tmp_path / "pruned", tiny_config(tmp_path / "tiny", PRUNED))
    head = open_target(case.record.config.target, "float32").model.head
    paper = LossConfig()
    for name, value in PRESET.items():
        # Anchors are given; weights are the mix; one row is the whole batch.
        if name in ("anchors", "average_over", *MIXED):
            continue
        loss = dataclasses.replace(LossConfig(**PRESET | MIXED), **{name: getattr(paper, name)})
        assert getattr(paper, name) != value
        assert abs(ours(case, head, loss)[0] / answers["pruned"]["loss"] - 1) > 1e-3, name


def test_candidates_are_equal(both):
    _, answers, _ = both
    given = arrays()
    key, rows = jax.random.key(0), np.zeros(1, np.int32)
    for case in CASES:
        room = both[0][case][4].block_size
        chosen, filled = sample_anchors(
            key, given["loss_mask"][None], given["documents"][None], rows, 30, room
        )
        assert np.asarray(chosen)[np.asarray(filled)].tolist() == answers[case]["candidates"]
        assert set(ANCHORS[FILLED].tolist()) <= set(answers[case]["candidates"])


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_first_heads_are_drawn_alike(both, head):
    """W1 by N(0, 0.01), all else of the heads uniform within 1 / sqrt(inputs); N(0, 0.02) below."""
    results, rank = both[2], 8
    wide = {"gate_proj": tiny.HIDDEN + rank, "joint_proj": tiny.HIDDEN + 2 * rank}
    wide |= {"proj": tiny.HIDDEN + rank, "markov_w2": rank}
    seen = 0
    for key, value in results.items():
        if not key.startswith(f"fresh/{head}/"):
            continue
        name = key.split("/", 2)[2]
        layer = name.split(".")[-2]
        if layer == "markov_w1":
            assert value.std() == pytest.approx(0.01, rel=0.1)
        elif layer in wide and not name.startswith("layers."):  # MLPs have a gate_proj as well
            bound = wide[layer] ** -0.5
            assert 0.5 * bound < np.abs(value).max() <= bound or value.size == 1, name
            seen += 1
        elif "norm" not in layer:
            assert value.std() == pytest.approx(0.02, rel=0.1), name
    assert seen == {"vanilla": 3, "gated": 5, "rnn": 5}[head]
