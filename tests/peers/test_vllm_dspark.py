"""vLLM's config classes and its DSpark model class on our exports."""

import harness
import numpy as np
import pytest
import tiny
from eagle3_reference import EAGLE3
from exports import DFLASH, KINDS, make_case, ours, random_inputs, tiny_config

from dspark_jax.data.opened import open_target
from dspark_jax.weights.layouts import algorithm_of, unservable

NAMES = ["vanilla", "fill-in", "no confidence", "confidence alone", "pruned", "deep", "flat"]
# In the DeepSpec layout, of which vLLM's config classes are asked only.
OTHERS = {
    "flat dflash": ("dflash", DFLASH),
    "flat eagle3": ("eagle3", {f"drafter.{name}": value for name, value in EAGLE3.items()}),
}
HEADS = {"drafter.head_dim": 32}  # as kernels for attention like it


@pytest.fixture(scope="module")
def cases(quick_compilation, tmp_path_factory):
    """DSpark exports that vLLM can run, with inputs and our answer."""
    folder = tmp_path_factory.mktemp("exports")
    target = open_target(tiny_config(folder / "tiny", {}).target, "float32")
    made = {}
    for name in NAMES:
        config = tiny_config(folder / "tiny", KINDS.get(name, {}) | HEADS)
        layout = "deepspec" if name == "flat" else "speculators"
        case = make_case(folder / name.replace(" ", "_"), config, layout=layout)
        assert algorithm_of(case.record.shape) == "dspark" and not unservable(case.record.shape)
        given = random_inputs(case)
        made[name] = (case, given, ours(case, target.model.head, given))
    return made


@pytest.fixture(scope="module")
def peer(cases, tmp_path_factory):
    """What vLLM answers, all cases in one process; slots [A, P] flattened."""
    arrays, folder = {}, tmp_path_factory.mktemp("vllm")
    flat, target = cases["flat"][0].record, cases["flat"][0].record.target_directory
    others = {}
    for name, (method, changes) in OTHERS.items():
        config = tiny_config(folder / "tiny", changes | HEADS)
        case = make_case(folder / method, config, layout="deepspec")
        proposals = case.record.config.drafter.num_proposals
        others[name] = (str(case.directory), target, method, proposals)
    for name, (case, given, mine) in cases.items():
        slots = np.arange(case.record.config.drafter.num_proposals)
        arrays[f"{name}/prev"] = given.tokens[given.anchors[:, None] + slots].reshape(-1)
        arrays[f"{name}/hidden"] = mine["hidden"].reshape(-1, tiny.HIDDEN)
    return harness.ask(
        "vllm",
        "vllm_dspark",
        folder,
        {
            "cases": {name: str(case.directory) for name, (case, _, _) in cases.items()},
            "flat": {"flat": (target, "dspark", flat.config.drafter.num_proposals)},
            "others": others,
        },
        arrays,
        VLLM_CPU_KVCACHE_SPACE="1",
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_directory_alone_says_everything(name, cases, peer):
    record = cases[name][0].record
    config, found = record.config.drafter, peer[0][name]
    wanted = {
        "target": record.target_directory,
        "method": "dspark",
        "class": "Qwen3DSparkForCausalLM",
        "proposals": config.num_proposals,
        "taps": [tap + 1 for tap in config.target_layer_ids],
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "sample_from_anchor": config.sample_from_anchor,
        "dspark_bonus_anchor": not config.sample_from_anchor,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_head and config.confidence_with_markov,
        "markov_rank": config.markov_rank,
        "draft_vocab_size": record.shape.draft_vocab,
        "vocab_size": record.shape.vocab_size,
        "num_hidden_layers": config.num_layers,
    }
    if name == "flat":  # these fields are of the other layout; absent, they mean the same here
        wanted |= {"draft_vocab_size": None, "dspark_bonus_anchor": None}
    assert {key: found[key] for key in wanted} == wanted


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_taken(name, peer):
    found = peer[0][name]
    assert found["not_taken"] == []
    # Not in the file: the target's own, and a placeholder that DSpark does not use.
    borrowed = {"model.mask_embedding"}
    if name != "flat":  # which has both tables in the file
        borrowed |= {"model.embed_tokens.weight"}
        borrowed |= set() if "pruned" in name else {"lm_head.weight"}
    assert set(found["unwritten"]) == borrowed


@pytest.mark.parametrize("name", NAMES)
def test_bias_and_confidence_are_the_same(name, cases, peer):
    case, _, mine = cases[name]
    config = case.record.config.drafter
    bias = (mine["logits"] - mine["base"]).reshape(-1, case.record.shape.draft_vocab)
    theirs = peer[1][f"{name}/bias"]
    assert np.ptp(theirs, axis=-1).min() > 0.3
    np.testing.assert_allclose(bias, theirs, atol=1e-4, rtol=0)
    assert (f"{name}/confidence" in peer[1]) == config.confidence_head
    if config.confidence_head:
        theirs = peer[1][f"{name}/confidence"]
        assert np.ptp(theirs) > 0.02
        probability = 1 / (1 + np.exp(-mine["confidence"].reshape(-1)))
        np.testing.assert_allclose(probability, theirs, atol=1e-4, rtol=0)


def test_a_pruned_vocabulary_is_mapped_alike(cases, peer):
    case, _, mine = cases["pruned"]
    assert np.array_equal(peer[1]["pruned/draft_ids"], case.arrays["draft_ids"])
    base = mine["base"].reshape(-1, case.record.shape.draft_vocab)
    np.testing.assert_allclose(base, peer[1]["pruned/base"], atol=1e-4, rtol=0)


def test_the_deepspec_layout_of_other_algorithms(peer):
    """What docs/peers.md says of it."""
    found = peer[0]["flat dflash"]
    assert found == {"method": "dflash", "class": "DFlashQwen3ForCausalLM", "taps": [1, 3]}
    assert "['Qwen3Eagle3Model'] are not supported for now" in peer[0]["flat eagle3"]["refusal"]


def test_only_its_gpu_runner_has_dspark(peer):
    """What docs/peers.md says of vLLM on the CPU; should this fail, DSpark can be served there."""
    assert "dspark" in peer[0]["refusal"]
