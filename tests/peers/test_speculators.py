"""speculators 0.9 loads what we export and drafts the same; we load what it saves."""

from pathlib import Path

import exports
import harness
import numpy as np
import pytest
from exports import KINDS, make_case, ours, random_inputs, real_inputs, tiny_config

from dspark_jax.data.opened import open_target
from dspark_jax.weights.compare import shape_differences
from dspark_jax.weights.importing import read_folder

TOLERANCE = 1e-4  # of logits, float32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
TEXT = "Name three rivers of Europe and the seas that they flow into."
REAL = {
    "smollm2": {},
    "smollm2 pruned": {"drafter.vocab_size": 12288},
    "smollm2 dflash": exports.DFLASH,
}


FILL_IN_RNN = {"drafter.sample_from_anchor": False, "drafter.markov_head": "rnn"}


@pytest.fixture(scope="module")
def cases(quick_compilation, tmp_path_factory):
    """Every export with its inputs and our answer."""
    folder = tmp_path_factory.mktemp("exports")
    made = {}

    def add(name, config, target, given=None, **options):
        case = make_case(folder / name.replace(" ", "_"), config, **options)
        given = given or random_inputs(case)
        made[name] = (case, given, ours(case, target.model.head, given))

    config = tiny_config(folder / "tiny", {})
    target = open_target(config.target, "float32")
    for name, changes in KINDS.items():
        add(name, tiny_config(folder / "tiny", changes), target)
    add("fill-in rnn", tiny_config(folder / "tiny", FILL_IN_RNN), target)
    for name, rope in {"llama3": LLAMA3, "yarn": YARN}.items():
        config = tiny_config(folder / name, {}, config={"rope_scaling": rope})
        add(name, config, open_target(config.target, "float32"))
    target = open_target("smollm2", "float32")
    taps = (1, 8, 15, 22, 27)
    given = real_inputs(target, taps, TEXT, anchors=(5, 17, 18, 30))
    for name, changes in REAL.items():
        fields = {"drafter.target_layer_ids": taps, "drafter.mask_token_id": 3}
        fields |= {"drafter.num_layers": 2, "drafter.markov_rank": 64, "drafter.block_size": 4}
        config = tiny_config(folder / "tiny", fields | {"target": "smollm2"} | changes)
        add(name, config, target, given)
    return made


@pytest.fixture(scope="module")
def peer(cases, tmp_path_factory):
    """What speculators answers, all cases in one process."""
    arrays = {}
    for name, (_, given, _) in cases.items():
        arrays |= {f"{name}/{key}": x for key, x in vars(given).items()}
    directories = {name: str(case.directory) for name, (case, _, _) in cases.items()}
    return harness.ask(
        "speculators",
        "speculators_drafts",
        tmp_path_factory.mktemp("speculators"),
        {"cases": directories},
        arrays,
    )


NAMES = [*KINDS, "llama3", "yarn", *REAL]


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_expected_and_none_is_missing(name, peer):
    found = peer[0][name]
    for problem in ("missing", "unexpected", "mismatched", "absent", "surplus"):
        assert found[problem] == [], problem


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_class_that_was_meant(name, cases, peer):
    dflash = cases[name][0].record.config.drafter
    bare = not dflash.markov_rank and not dflash.confidence_head
    wanted = "DFlashDraftModel" if bare and not dflash.sample_from_anchor else "DSparkDraftModel"
    assert peer[0][name]["class"] == wanted


@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_the_same(name, cases, peer, say):
    case, _, mine = cases[name]
    config = case.record.config.drafter
    first = config.block_size - config.num_proposals
    theirs = peer[1][f"{name}/logits"][:, first:]
    assert theirs.shape == mine["logits"].shape
    assert np.ptp(theirs, axis=-1).min() > 1, "logits too flat to tell anything"
    gap = np.abs(mine["logits"] - theirs).max()
    say(f"speculators, {name}: logits up to {np.abs(theirs).max():.1f} differ by {gap:.1e}")
    np.testing.assert_allclose(mine["logits"], theirs, atol=TOLERANCE, rtol=0)
    assert (f"{name}/confidence" in peer[1]) == config.confidence_head
    if config.confidence_head:
        theirs = peer[1][f"{name}/confidence"][:, first:]
        assert np.ptp(theirs) > 0.1
        np.testing.assert_allclose(mine["confidence"], theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_what_it_saves_it_and_we_read_back(name, cases, peer):
    case, found = cases[name][0], peer[0][name]
    assert found["reloaded"]
    saved = read_folder(Path(found["saved"]))
    assert shape_differences(saved.shape, case.record.shape) == []
    assert set(saved.arrays) == set(case.arrays)
    for key, array in case.arrays.items():
        assert np.array_equal(saved.arrays[key], array), key


@pytest.mark.parametrize("name", [name for name in NAMES if "pruned" in name])
def test_draft_ids_are_the_same(name, cases, peer):
    assert peer[0][name]["draft_ids"] == cases[name][0].arrays["draft_ids"].tolist()


def test_fill_in_rnn_starts_one_slot_later_with_us(cases, peer):
    """The one difference: who steps the recurrent state over slot 0, which proposes nothing.

    speculators 0.9 computes the bias of whole blocks and shows slot 0 the anchor as its previous
    token, so the anchor steps the state twice before the first proposal
    (speculators/models/dspark/core.py, `forward`; model_definitions.py, `block_bias`). In decoding
    the chain starts where the first token is proposed, and we train as we decode. No engine runs
    this combination: vLLM reads vanilla heads only.
    """
    case, given, mine = cases["fill-in rnn"]
    theirs = peer[1]["fill-in rnn/logits"][:, 1:]
    head = open_target(case.record.config.target, "float32").model.head
    same = ours(case, head, given, anchor_step=True)
    np.testing.assert_allclose(same["logits"], theirs, atol=TOLERANCE, rtol=0)
    assert np.abs(mine["logits"] - theirs).max() > 0.01
    confidence = peer[1]["fill-in rnn/confidence"][:, 1:]  # sees no state
    np.testing.assert_allclose(mine["confidence"], confidence, atol=TOLERANCE, rtol=0)
