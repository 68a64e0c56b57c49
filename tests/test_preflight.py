"""Preflight: folders in which everything is right, and one folder for each thing that can be wrong.

No model is loaded or compiled: everything is config files, headers and a few rows.

pytest tests/test_preflight.py
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from eagle3_reference import EAGLE3
from safetensors.numpy import load_file, save_file

from dspark_jax import preflight as command
from dspark_jax.checks.facts import read_drafter
from dspark_jax.checks.preflight import backbone, preflight
from dspark_jax.checks.target import read_target
from dspark_jax.checks.weights import expected_tensors
from dspark_jax.core.config import DrafterConfig, Eagle3Config, to_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.weights import names
from dspark_jax.weights.compare import empty_drafter
from dspark_jax.weights.config_parts import Origin, Verifier
from dspark_jax.weights.drafter_file import DrafterFile
from dspark_jax.weights.fingerprint import fingerprint
from dspark_jax.weights.layouts import algorithm_of, format_of, read_config
from dspark_jax.weights.safetensors import target_config
from dspark_jax.weights.vocab_tables import tables_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = DrafterConfig(
    target_layer_ids=(0, 2), mask_token_id=tiny.MASK, block_size=3, num_layers=2, markov_rank=4
)
DFLASH = {
    "markov_head": "none",
    "markov_rank": 0,
    "confidence_head": False,
    "sample_from_anchor": False,
}
# EAGLE-3.
CHAINS = {
    "chain": EAGLE3,
    "llama chain": EAGLE3 | {"eagle3": Eagle3Config(qk_norm=False, norm_before_residual=True)},
    "pruned chain": EAGLE3 | {"vocab_size": 6, "eagle3": Eagle3Config(fc_norm=True)},
    "normed chain": EAGLE3 | {"eagle3": Eagle3Config(norm_before_fc=True, norm_output=True)},
}
DRAFTED = np.array([tiny.END, 5, 9, 40, 41, 70], np.int32)
WIDTH = tiny.HIDDEN


def write_drafter(
    folder: pathlib.Path, target: pathlib.Path, layout: str = "speculators", **changes
) -> pathlib.Path:
    """A drafter as convert writes it, without the probe that convert compiles."""
    config = dataclasses.replace(CONFIG, **changes)
    shape = DrafterShape.of(config, target_config(target, "float32"))
    folder.mkdir(parents=True)
    verifier = Verifier(str(target), ("LlamaForCausalLM",))
    recipe = {"drafter": to_mapping(config), "train": {"num_anchors": 4}}
    origin = Origin(1, recipe, fingerprint(target, "tiny"))
    described = format_of(layout, algorithm_of(shape), "here").config
    described = described(shape, verifier, "float32", origin)
    (folder / "config.json").write_text(json.dumps(described))
    record = {
        "step": 1,
        "config": origin.recipe,
        "target": dataclasses.asdict(origin.fingerprint),
    }
    (folder / "dspark_jax.json").write_text(json.dumps(record))
    rng, tensors = np.random.default_rng(0), {}
    for name, size in expected_tensors(read_drafter(folder)).items():
        tensors[name] = rng.standard_normal(size, np.float32)
    taps = len(config.target_layer_ids)
    tensors["fc.weight"] = rng.standard_normal((WIDTH, taps * WIDTH), np.float32)
    theirs = load_file(target / "model.safetensors")
    head = theirs["lm_head.weight"]
    if config.algorithm == "eagle3":
        tensors |= {"embed_tokens.weight": theirs["model.embed_tokens.weight"]}
        tensors |= {"lm_head.weight": head}
    if shape.pruned:
        tensors |= {"lm_head.weight": head[DRAFTED], **tables_of(DRAFTED, shape.vocab_size)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def flatten(folder: pathlib.Path) -> None:
    """Rewrites config.json in the DeepSpec layout."""
    value = read(folder / "config.json")
    layers = value.pop("transformer_layer_config")
    taps = [tap - 1 for tap in value.pop("aux_hidden_state_layer_ids")]
    for name in ("speculators_model_type", "speculators_version", "speculators_config"):
        del value[name]
    value |= layers | {"target_layer_ids": taps, "num_target_layers": tiny.LAYERS}
    value |= {"architectures": ["Qwen3DSparkModel"]}
    (folder / "config.json").write_text(json.dumps(value))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Folders in which everything is right."""
    folder = tmp_path_factory.mktemp("good")
    target = tiny.make_target(folder / "target")
    write_drafter(folder / "dspark", target)
    write_drafter(folder / "gated", target, markov_head="gated")
    write_drafter(folder / "rnn", target, markov_head="rnn", confidence_with_markov=False)
    write_drafter(folder / "pruned", target, vocab_size=len(DRAFTED))
    write_drafter(folder / "dflash", target, **DFLASH)
    flatten(write_drafter(folder / "deepspec", target))
    for name, options in CHAINS.items():
        write_drafter(folder / name, target, **options)
    write_drafter(folder / "flat chain", target, "deepspec", **EAGLE3)
    return folder


@pytest.fixture
def copy(good, tmp_path):
    """Makes copies that a test may damage; the verifier stays the good target."""

    def make(kind: str) -> tuple[pathlib.Path, pathlib.Path]:
        drafter = shutil.copytree(good / kind, tmp_path / "drafter")
        return drafter, shutil.copytree(good / "target", tmp_path / "target")

    return make


def read(path: pathlib.Path) -> dict:
    return json.loads(path.read_text())


MISSING = object()


def edit(folder: pathlib.Path, name: str = "config.json", **fields) -> None:
    """Sets fields of a JSON file; `a__b` is b in a, MISSING removes."""
    value = read(folder / name)
    for field, new in fields.items():
        *outer, last = field.split("__")
        inner = value
        for step in outer:
            inner = inner.setdefault(step, {})
        if new is MISSING:
            del inner[last]
        else:
            inner[last] = new
    (folder / name).write_text(json.dumps(value))


def retensor(folder: pathlib.Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def findings(drafter, target, engine, data=None):
    facts = read_target(target, "tiny")
    seen = command.read_data(data, facts) if data else None
    return preflight(read_drafter(drafter), facts, engine, seen)


@pytest.mark.parametrize(
    "kind, engine",
    [
        ("dspark", "vllm"),
        ("pruned", "vllm"),
        ("dflash", "vllm"),
        ("dflash", "tpu-inference"),
        ("deepspec", "vllm"),
        ("deepspec", "sglang"),
        *((name, "vllm") for name in CHAINS),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(good, kind, engine):
    assert findings(good / kind, good / "target", engine) == []


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tpu-inference"])
def test_a_right_chain_of_deepspec_is_refused_for_its_class_alone(good, engine):
    """No engine has it: DeepSpec runs it itself. In speculators' layout vLLM does, see above."""
    (finding,) = findings(good / "flat chain", good / "target", engine)
    assert (finding.severity, finding.what) == ("refuse", "layout")
    assert f"['Qwen3Eagle3Model']: {engine} has no class" in finding.why


# What docs/peers.md says: the engines in which a right export gives no finding.
FITS = [
    ("speculators", {}, {"vllm"}),
    ("speculators", {"vocab_size": 6}, {"vllm"}),
    ("speculators", {"markov_head": "gated"}, set()),
    ("speculators", {"markov_head": "rnn"}, set()),
    ("speculators", DFLASH, {"vllm", "tpu-inference"}),
    ("speculators", DFLASH | {"vocab_size": 6}, {"vllm"}),
    ("speculators", EAGLE3, {"vllm"}),
    ("speculators", CHAINS["llama chain"], {"vllm"}),
    ("deepspec", {}, {"vllm", "sglang"}),
    ("deepspec", {"markov_head": "gated"}, {"sglang"}),
    ("deepspec", {"markov_head": "rnn"}, {"sglang"}),
    ("deepspec", DFLASH, {"vllm", "sglang", "tpu-inference"}),
    ("deepspec", EAGLE3, set()),
]


def test_what_each_engine_takes_of_right_exports(good, tmp_path):
    for at, (layout, changes, fits) in enumerate(FITS):
        drafter = write_drafter(tmp_path / str(at), good / "target", layout, **changes)
        for engine in ("vllm", "sglang", "tpu-inference"):
            found = findings(drafter, good / "target", engine)
            assert (found == []) == (engine in fits), (layout, changes, engine, found)
            assert {finding.severity for finding in found} <= {"refuse"}


def test_what_is_not_of_eagle3_is_not_asked(good, tmp_path):
    """Mask token, block, heads and anchor flag: absent as they are, or anything at all."""
    odd = {"mask_token_id": tiny.PAD, "block_size": 0, "markov_rank": 0, "sample_from_anchor": True}
    target, drafter = good / "target", shutil.copytree(good / "chain", tmp_path / "drafter")
    for values in (odd, {"enable_confidence_head": True, "markov_head_type": "bigram"}):
        edit(drafter, **values)
        assert findings(drafter, target, "vllm") == []


def test_all_three_heads_are_served_by_sglang(copy):
    drafter, target = copy("rnn")
    flatten(drafter)
    assert findings(drafter, target, "sglang") == []


LAYERS = "transformer_layer_config__"
PROPOSALS = "speculators_config__proposal_methods"


def c(**fields):
    """A change of the drafter's config.json."""
    return lambda drafter, target: edit(drafter, **fields)


def t(change):
    """A change of the drafter's tensors."""
    return lambda drafter, target: retensor(drafter, change)


def proposals(number):
    return c(**{PROPOSALS: [{"proposal_type": "greedy", "speculative_tokens": number}]})


def absolute(tensors):
    tensors["d2t"] = tensors["d2t"] + np.arange(len(DRAFTED))


def half(tensors):
    for name in tensors:
        tensors[name] = tensors[name].astype(np.float16)


def other_target(**changes):
    """The served target made anew, the drafter's own left where it was."""

    def change(drafter, target):
        shutil.rmtree(target)
        tiny.make_target(target, **changes)

    return change


def tokenizer(drafter, target):
    path = target / "tokenizer.json"
    path.write_text(path.read_text() + "\n")


def shard(drafter, target):
    (drafter / "model.safetensors").rename(drafter / "a.safetensors")
    index = dict.fromkeys(load_file(drafter / "a.safetensors"), "a.safetensors")
    index["norm.weight"] = "b.safetensors"
    index_file = drafter / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": index}))


def own_template(drafter, target):
    (drafter / "chat_template.jinja").write_text("{{ messages }}")


def other_template(drafter, target):
    path = target / "chat_template.jinja"
    path.write_text(path.read_text() + "{# changed #}")


def own_tokenizer(drafter, target):
    (drafter / "tokenizer.json").write_text("{}")


def twice(drafter, target):
    retensor(drafter, lambda x: x.update({"model.norm.weight": x["norm.weight"] * 2}))


def embedding(rows):
    return t(lambda x: x.update({"embed_tokens.weight": np.ones((rows, WIDTH), np.float32)}))


SLIDING = {
    f"{LAYERS}layer_types": ["sliding_attention"] * 2,
    f"{LAYERS}sliding_window": 16,
}
MIXED = SLIDING | {f"{LAYERS}layer_types": ["sliding_attention", "full_attention"]}
FLAT_SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 16}
W1 = "markov_head.markov_w1.weight"
PROJ = "confidence_head.proj.weight"
Q = "layers.0.self_attn.q_proj.weight"
VERIFIER = "speculators_config__verifier__"

# drafter, engine, what is changed, the findings: severity and what, and a part of the first's text.
WRONG = [
    # The kind and the layout.
    ("dspark", "vllm", c(speculators_model_type="dsprak"), ["refuse kind of drafter"], "'dsprak'"),
    ("deepspec", "vllm", c(architectures=["LlamaForCausalLMEagle3"]),
     ["refuse kind of drafter"], "Qwen3Eagle3Model are judged here"),
    ("deepspec", "vllm", c(architectures=["MyDSpark"]), ["refuse layout"], "DeepSeek-V4"),
    ("dspark", "sglang", c(), ["refuse layout"], "speculators layout"),
    ("dspark", "tpu-inference", c(), ["refuse head not servable"], "it has no DSpark"),
    # The anchor flag and K.
    ("dspark", "vllm", c(sample_from_anchor=MISSING), ["refuse anchor flag"], "missing; vLLM"),
    ("dspark", "vllm", c(sample_from_anchor=False),
     ["refuse proposals", "refuse recipe"], "sample_from_anchor=False gives 2"),
    ("dspark", "vllm", proposals(4), ["refuse proposals"], "speculative_tokens=4"),
    ("dspark", "vllm", proposals(2), ["warn proposals"], "what fill-in gives"),
    ("dspark", "vllm", c(**{PROPOSALS: MISSING}), ["refuse proposals"], "speculative_tokens=None"),
    (
        "dflash",
        "vllm",
        lambda d, t: (edit(d, sample_from_anchor=True), edit(d, **{PROPOSALS: [
            {"speculative_tokens": 3}]})),
        ["refuse recipe", "refuse anchor flag"],
        "True, trained with False",
    ),
    ("dspark", "vllm", c(dspark_config={"block_size": 4}), ["refuse unreadable"], "keep one"),
    # The tapped layers.
    ("dspark", "vllm", c(aux_hidden_state_layer_ids=[0, 2]),
     ["refuse layer id offset", "warn layer id offset"], "trained with [0, 2]"),
    ("dspark", "vllm", c(target_layer_ids=[1, 3]),
     ["refuse layer id offset", "refuse layer id offset"], "they count from 1 and 0"),
    ("dspark", "vllm", c(aux_hidden_state_layer_ids=[1, 4]),
     ["refuse last layer", "refuse layer ids"], "3 (from 0) is the last"),
    ("dspark", "vllm", c(aux_hidden_state_layer_ids=[1, 9]),
     ["refuse layer ids", "refuse layer ids"], "[8] (from 0) of a target with layers 0 to 3"),
    ("dspark", "vllm", c(aux_hidden_state_layer_ids=[3, 1]),
     ["refuse layer ids", "refuse layer ids"], "strictly increasing"),
    ("dspark", "vllm", c(aux_hidden_state_layer_ids=[1, 2, 3]),
     ["refuse layer ids", "refuse layer ids"], "takes 2 taps, config.json lists 3"),
    ("dspark", "vllm", c(aux_hidden_state_layer_ids=MISSING), ["refuse layer ids"], "guess them"),
    ("dspark", "vllm", c(aux_hidden_state_layer_ids=MISSING, target_layer_ids=[0, 2]),
     ["refuse layer ids"], "this layout has its layer ids there"),
    ("deepspec", "sglang", c(target_layer_ids=MISSING, aux_hidden_state_layer_ids=[1, 3]),
     ["refuse layer ids"], "no target_layer_ids"),
    ("deepspec", "vllm", c(target_layer_ids=MISSING, aux_hidden_state_layer_ids=[1, 3]),
     ["refuse layer ids"], "default taps"),
    ("deepspec", "vllm", c(num_target_layers=36), ["refuse target depth"], "36, the target has 4"),
    ("deepspec", "sglang", c(target_layer_ids=[-1, 2]),
     ["refuse layer ids", "refuse layer ids"], "trained with [0, 2]"),
    # The mask token.
    ("dspark", "vllm", c(mask_token_id=MISSING), ["refuse missing field"], "mask_token_id"),
    ("dspark", "vllm", c(mask_token_id=272), ["refuse mask id", "refuse recipe"], "of 272 rows"),
    ("dspark", "vllm", c(mask_token_id=tiny.PAD), ["refuse mask id", "refuse recipe"], "pad token"),
    ("dspark", "vllm", c(mask_token_id=tiny.END), ["refuse mask id", "refuse recipe"], "eos token"),
    ("dspark", "vllm", c(mask_token_id=77), ["refuse recipe", "warn mask id"], "trained with 270"),
    # Heads and tensors.
    ("gated", "vllm", c(), ["refuse head not servable"], "vLLM reads only vanilla heads"),
    ("rnn", "vllm", c(), ["refuse head not servable"], "vLLM reads only vanilla heads"),
    ("gated", "vllm", c(markov_head_type="vanilla"),
     ["refuse Markov head", "refuse head not servable"], "the tensors are those of 'gated'"),
    ("dspark", "vllm", c(markov_head_type="bigram"), ["refuse Markov head"], "none of vanilla"),
    ("dspark", "vllm", c(markov_head_type=MISSING), ["refuse Markov head"], "missing"),
    ("deepspec", "sglang", lambda d, t: (
        edit(d, markov_rank=0, confidence_head_with_markov=False),
        retensor(d, lambda x: [x.pop(n) for n in list(x) if "markov" in n]),
        retensor(d, lambda x: x.update({PROJ: np.ones((1, WIDTH), np.float32)}))),
     ["refuse recipe", "refuse head not servable"], "0, trained with 4"),
    ("dspark", "vllm", c(enable_confidence_head=MISSING), ["refuse missing field"], "enable_conf"),
    ("dspark", "vllm", c(enable_confidence_head=False),
     ["refuse confidence head", "refuse recipe"], "dropped silently"),
    ("dspark", "vllm", c(confidence_head_with_markov=MISSING),
     ["refuse confidence head", "refuse tensor shape"], "vLLM takes that for false"),
    ("dspark", "vllm", c(confidence_head_with_markov=False), ["refuse tensor shape"], "[1, 36]"),
    ("dspark", "vllm", t(lambda x: x.pop("norm.weight")), ["refuse missing tensor"], "norm.weight"),
    ("dspark", "vllm", t(lambda x: x.pop(W1)), ["refuse missing tensor"], W1),
    ("dspark", "vllm", t(lambda x: x.update({"layers.7.x": x[Q]})), ["refuse unknown tensor"], "7"),
    ("dspark", "vllm", t(lambda x: x.update({Q: x[Q][:16].copy()})),
     ["refuse tensor shape"], "[16, 32], config.json implies [32, 32]"),
    ("dspark", "vllm", shard, ["refuse unreadable", "refuse missing tensor"], "b.safetensors"),
    ("dspark", "vllm", twice, ["refuse unreadable"], "are one tensor"),
    ("dspark", "vllm", lambda d, t: (d / "model.safetensors").unlink(),
     ["refuse unreadable"], "neither model.safetensors"),
    # Sizes, RoPE, dtypes.
    ("dspark", "vllm", c(**{f"{LAYERS}num_key_value_heads": MISSING}),
     ["refuse missing field"], "num_key_value_heads"),
    ("dspark", "vllm", c(target_hidden_size=64), ["refuse hidden size"], "64, the target's is 32"),
    ("dspark", "vllm", other_target(config={"hidden_size": 48}),
     ["refuse hidden size", "refuse target config", "refuse verifier"], "32, the target's is 48"),
    ("pruned", "vllm", c(**{f"{LAYERS}vocab_size": 6}),
     ["refuse vocabulary size", "refuse tensor shape", "refuse draft vocabulary"],
     "write the target's"),
    ("dspark", "vllm", c(rope_theta=1e6), ["refuse draft layers"], "keep one"),
    ("dspark", "vllm", c(**{"rope_theta": 1e4, f"{LAYERS}rope_parameters__rope_theta": 1e4}),
     ["warn RoPE"], "theta 10000.0 (target 100.0)"),
    ("deepspec", "sglang", c(rope_parameters__partial_rotary_factor=0.5),
     ["refuse RoPE", "warn RoPE"], "turns every dimension"),
    ("dflash", "tpu-inference", c(rope_theta=MISSING), ["warn RoPE"], "JAX servers"),
    ("dspark", "vllm", c(**{f"{LAYERS}attention_bias": True}),
     ["refuse draft layers"], "attention_bias=True"),
    ("dspark", "vllm", c(**{f"{LAYERS}max_position_embeddings": 64}),
     ["warn context length"], "64, the target's is 256"),
    ("dspark", "vllm", c(dtype="bfloat16"), ["warn dtype"], "the tensors are F32"),
    ("dspark", "vllm", lambda d, s: (retensor(d, half), edit(d, dtype="float16")),
     ["warn dtype"], "drafter in float16"),
    ("dspark", "vllm", t(lambda x: x.update({Q: x[Q].astype(np.int8)})), ["refuse dtype"], "I8 wi"),
    # Sliding layers and their causality.
    ("dspark", "vllm", c(**SLIDING, sliding_window_non_causal=True),
     ["refuse block causality"], "vllm runs the block causally in sliding layers [0, 1]"),
    ("dspark", "vllm", c(**SLIDING, sliding_window_non_causal=MISSING),
     ["warn block causality"], "right only if trained so"),
    ("dspark", "vllm", c(**SLIDING), [], None),
    ("dflash", "vllm", c(sliding_window_non_causal=False),
     ["refuse block causality"], "vllm runs the block causally in full-attention layers [0, 1]"),
    ("dflash", "vllm", c(**MIXED, sliding_window_non_causal=False),
     ["refuse block causality"], "full-attention layers [1]"),
    ("dflash", "vllm", c(**MIXED, sliding_window_non_causal=True), [], None),
    ("dflash", "tpu-inference", c(**SLIDING, sliding_window_non_causal=True),
     ["refuse sliding layers"], "the whole context"),
    ("deepspec", "sglang", c(**FLAT_SLIDING, sliding_window_non_causal=True),
     ["refuse block causality"], "sglang runs the block causally"),
    ("dspark", "vllm", c(**SLIDING | {f"{LAYERS}sliding_window": None}),
     ["refuse sliding layers"], "without a window size"),
    ("dspark", "vllm", c(**{f"{LAYERS}layer_types": ["full_attention"]}),
     ["refuse sliding layers"], "1 entries for 2"),
    ("dspark", "vllm", c(**{f"{LAYERS}layer_types": ["full_attention", "linear"]}),
     ["refuse sliding layers"], "'linear' is neither"),
    ("dspark", "vllm", c(**{f"{LAYERS}layer_types": MISSING, f"{LAYERS}use_sliding_window": True}),
     ["refuse sliding layers"], "left to a guess"),
    # The draft vocabulary, and the target's tables in the drafter's files.
    ("pruned", "vllm", t(absolute), ["refuse draft vocabulary"], "d2t holds target ids"),
    ("pruned", "vllm", t(lambda x: x.pop("d2t")),
     ["refuse draft vocabulary"], "draft ids would be target ids"),
    ("pruned", "vllm", t(lambda x: x.update({"d2t": x["d2t"].astype(ml_dtypes.bfloat16)})),
     ["refuse draft vocabulary"], "bfloat16[6]"),
    ("pruned", "vllm", t(lambda x: x.update({"t2d": ~x["t2d"]})),
     ["refuse draft vocabulary"], "t2d does not mark"),
    ("pruned", "vllm", t(lambda x: x.pop("lm_head.weight")),
     ["refuse draft vocabulary"], "the target's cannot be used"),
    ("pruned", "vllm", t(lambda x: x.update({"lm_head.weight": x["lm_head.weight"] * 2})),
     ["warn shared tensor"], "not the target's rows"),
    ("pruned", "vllm", c(draft_vocab_size=300),
     ["refuse tensor shape", "refuse draft vocabulary", "warn shared tensor"], "implies [300, 4]"),
    ("pruned", "vllm", lambda d, s: edit(s, "generation_config.json", eos_token_id=[0, 6]),
     ["warn draft vocabulary"], "token 6, which ends an answer"),
    ("pruned", "tpu-inference", c(),
     ["refuse head not servable", "refuse draft vocabulary"], "no DSpark"),
    ("dspark", "vllm", embedding(tiny.VOCAB), ["warn shared tensor"], "embed_tokens"),
    ("deepspec", "sglang", embedding(tiny.VOCAB), ["refuse shared tensor"], "SGLang uses"),
    # Another target.
    ("dspark", "vllm", other_target(seed=1),
     ["refuse target weights", "refuse verifier"], "a fine-tune, a cast or a quantisation"),
    ("dspark", "vllm", other_target(config={"rope_theta": 200.0}),
     ["refuse target config", "refuse verifier", "warn RoPE"], "has another config.json"),
    ("dspark", "vllm", tokenizer, ["refuse tokenizer", "refuse verifier"], "tokenizer.json"),
    ("dspark", "vllm", own_tokenizer, ["refuse tokenizer"], "not the target's"),
    ("dspark", "vllm", own_template, ["warn chat template"], "not the target's"),
    ("dspark", "vllm", other_template, ["warn chat template"], "has another chat template"),
    ("dspark", "vllm", lambda d, s: (edit(d, "dspark_jax.json", target__template=MISSING),
     other_template(d, s)), [], None),  # as older exports were written
    ("dspark", "vllm", lambda d, s: (d / "dspark_jax.json").unlink(),
     ["warn target identity"], "has no fingerprint"),
    ("dspark", "vllm", lambda d, s: (d / "dspark_jax.json").write_text("{"),
     ["refuse unreadable", "warn target identity"], "not readable as JSON"),
    ("dspark", "vllm", lambda d, s: (
        (d / "dspark_jax.json").unlink(),
        edit(s, quantization_config={"quant_method": "fp8"})),
     ["refuse verifier", "warn target identity", "warn target weights"], "another target (config)"),
    ("dspark", "vllm", c(**{f"{VERIFIER}name_or_path": MISSING}),
     ["refuse verifier"], "name_or_path is missing"),
    ("dspark", "vllm", c(**{f"{VERIFIER}name_or_path": "/gone"}), ["refuse verifier"], "not here"),
    ("dspark", "vllm", c(**{f"{VERIFIER}architectures": ["Qwen3ForCausalLM"]}),
     ["refuse verifier"], "the target's are ['LlamaForCausalLM']"),
    ("dflash", "tpu-inference", lambda d, s: edit(s, model_type="mistral"),
     ["refuse target config", "refuse verifier", "warn target family"], "another config.json"),
    # EAGLE-3: the layouts.
    ("chain", "sglang", c(), ["refuse layout"], "LlamaForCausalLMEagle3"),
    ("chain", "tpu-inference", c(), ["refuse layout", "refuse layer ids"], "Llama layers only"),
    ("normed chain", "tpu-inference", c(num_target_layers=36),
     ["refuse target depth", "refuse layout", "refuse layer ids", "refuse norm flag",
      "refuse norm flag"], "36, the target has 4"),
    ("llama chain", "tpu-inference", c(), ["refuse layout", "refuse layer ids"], "under midlayer"),
    ("flat chain", "vllm", c(ttt_length=MISSING), ["refuse missing field", "refuse layout"],
     "ttt_length"),
    ("flat chain", "sglang", c(ttt_length=9), ["refuse recipe", "refuse layout"],
     "9, trained with 3"),
    # EAGLE-3: its tapped layers.
    ("chain", "vllm", c(eagle_aux_hidden_state_layer_ids=[0, 2]),
     ["refuse layer id offset", "warn layer id offset"], "trained with [0, 2]"),
    ("chain", "vllm", c(eagle_aux_hidden_state_layer_ids=[1, 4]),
     ["refuse last layer", "refuse layer ids"], "3 (from 0) is the last"),
    ("chain", "vllm", c(eagle_aux_hidden_state_layer_ids=[1, 9]),
     ["refuse layer ids", "refuse layer ids"], "[8] (from 0) of a target with layers 0 to 3"),
    ("chain", "vllm", c(eagle_aux_hidden_state_layer_ids=[1, 2, 3]),
     ["refuse layer ids", "refuse layer ids", "refuse layer ids"],
     "takes 2 taps, config.json lists 3"),
    ("chain", "vllm", c(eagle_aux_hidden_state_layer_ids=MISSING), ["refuse layer ids"],
     "no usable eagle_aux_hidden_state_layer_ids"),
    ("chain", "vllm", c(eagle_aux_hidden_state_layer_ids=MISSING, target_layer_ids=[0, 2]),
     ["refuse layer ids"], "default taps"),
    ("llama chain", "vllm", c(**{f"{LAYERS}num_aux_hidden_states": MISSING}),
     ["refuse layer ids"], "missing: vLLM builds fc for 3 taps, config.json lists 2"),
    ("chain", "vllm", c(**{f"{LAYERS}num_aux_hidden_states": MISSING}), [], None),
    # EAGLE-3: sizes, norms, proposals.
    ("chain", "vllm", c(draft_vocab_size=MISSING), ["refuse missing field"], "draft_vocab_size"),
    ("chain", "vllm", c(**{f"{LAYERS}num_hidden_layers": 2,
        f"{LAYERS}layer_types": ["full_attention"] * 2}),
     ["refuse draft layers", "refuse missing tensor", "refuse recipe"],
     "only EAGLE-3 drafters of one layer"),
    ("chain", "vllm", c(**{f"{LAYERS}layer_types": ["sliding_attention"]}),
     ["refuse draft layers"], "'full_attention' is supported"),
    ("llama chain", "vllm", c(norm_before_residual=MISSING),
     ["refuse norm flag"], "speculators takes that for false, vLLM for true"),
    ("llama chain", "vllm", c(norm_before_residual=False), ["refuse recipe"], "trained with True"),
    ("chain", "vllm", lambda d, s: (
        edit(d, norm_before_residual=MISSING),
        edit(d, **{f"{LAYERS}norm_before_residual": False})),
     ["refuse norm flag"], "it would take True"),
    ("chain", "vllm", c(norm_before_residual="no"), ["refuse unreadable"], "which cannot be"),
    ("chain", "vllm", c(fc_norm=True), ["refuse missing tensor", "refuse recipe"], "fc_norm.0"),
    ("pruned chain", "vllm", c(fc_norm=False), ["refuse unknown tensor", "refuse recipe"],
     "fc_norm.0"),
    ("normed chain", "vllm", c(fc_norm=True),
     ["refuse draft layers", "refuse missing tensor", "refuse recipe"], "exclude each other"),
    ("chain", "vllm", c(**{f"{LAYERS}model_type": "llama"}),
     ["refuse unknown tensor", "refuse recipe"], "q_norm"),
    ("chain", "vllm", proposals(5), ["warn proposals"], "trained to unroll 3 steps"),
    ("chain", "vllm", proposals(0), ["refuse proposals"], "speculative_tokens=0"),
    ("chain", "vllm", c(**{PROPOSALS: MISSING}), ["refuse proposals"], "speculative_tokens=None"),
    ("chain", "vllm", c(**{"rope_theta": 1e4, f"{LAYERS}rope_parameters__rope_theta": 1e4}),
     ["warn RoPE"], "theta 10000.0 (target 100.0)"),
    ("chain", "vllm", c(dtype="bfloat16"), ["warn dtype"], "the tensors are F32"),
    # EAGLE-3: tensors, and the target's tables among them.
    ("chain", "vllm", t(lambda x: x.pop("layers.0.hidden_norm.weight")),
     ["refuse missing tensor"], "layers.0.hidden_norm.weight"),
    ("chain", "vllm", t(lambda x: x.update({"markov_head.markov_w2.weight": x[Q]})),
     ["refuse unknown tensor"], "markov_w2"),
    ("chain", "vllm", t(lambda x: x.update({Q: x[Q][:, :WIDTH].copy()})),
     ["refuse tensor shape"], "[32, 32], config.json implies [32, 64]"),
    ("chain", "vllm", t(lambda x: x.pop("embed_tokens.weight")),
     ["warn shared tensor"], "speculators drafts with an untrained embedding"),
    ("chain", "vllm", t(lambda x: x.pop("lm_head.weight")),
     ["warn shared tensor"], "an untrained LM head"),
    ("chain", "vllm", t(lambda x: x.update({"lm_head.weight": x["lm_head.weight"] * 2})),
     ["warn shared tensor"], "not the target's rows"),
    ("chain", "vllm", lambda d, s: (
        (d / "dspark_jax.json").unlink(),
        retensor(d, lambda x: x.update({"lm_head.weight": x["lm_head.weight"] * 2}))),
     ["warn target identity"], "has no fingerprint"),  # others train a head of its own
    ("chain", "vllm", lambda d, s: (
        edit(d, embed_requires_grad=True),
        retensor(d, lambda x: x.update({"embed_tokens.weight": x["embed_tokens.weight"] * 2}))),
     [], None),
    ("pruned chain", "vllm", t(absolute), ["refuse draft vocabulary"], "d2t holds target ids"),
    ("pruned chain", "vllm", t(lambda x: x.pop("d2t")),
     ["refuse draft vocabulary"], "draft ids would be target ids"),
    ("pruned chain", "vllm", t(lambda x: x.pop("lm_head.weight")),
     ["refuse draft vocabulary"], "the target's cannot be used"),
    # EAGLE-3: another target.
    ("chain", "vllm", other_target(seed=1),
     ["refuse target weights", "refuse verifier", "warn shared tensor", "warn shared tensor"],
     "a fine-tune, a cast or a quantisation"),
    ("chain", "vllm", tokenizer, ["refuse tokenizer", "refuse verifier"], "tokenizer.json"),
    ("chain", "vllm", other_template, ["warn chat template"], "has another chat template"),
    ("chain", "vllm", lambda d, s: edit(s, model_type="granite"),
     ["refuse target config", "refuse verifier", "warn target family"], "another config.json"),
]  # fmt: skip


@pytest.mark.parametrize(
    "kind, engine, change, expected, text",
    WRONG,
    ids=[f"{kind} in {engine}: {'; '.join(expected)}" for kind, engine, _, expected, _ in WRONG],
)
def test_each_wrong_folder_is_named(copy, kind, engine, change, expected, text):
    drafter, target = copy(kind)
    change(drafter, target)
    found = findings(drafter, target, engine)
    assert [f"{finding.severity} {finding.what}" for finding in found] == expected, found
    if text is not None:
        first = found[0]
        assert text in f"{first.where}: {first.why} -> {first.remedy}"
    for finding in found:
        for part in (finding.where, finding.why, finding.remedy):
            assert part and "\n" not in part and len(part) < 300
            assert str(drafter) not in part


def test_the_table_is_long_enough():
    assert len({finding for *_, expected, _ in WRONG for finding in expected}) >= 20


def test_a_flat_config_hides_mask_and_taps_from_tpu_inference(copy):
    drafter, target = copy("dflash")
    flatten(drafter)
    edit(drafter, architectures=["DFlashDraftModel"])
    found = findings(drafter, target, "tpu-inference")
    assert [finding.where.split(": ")[1] for finding in found] == [
        "dflash_config.mask_token_id",
        "dflash_config.target_layer_ids",
    ]
    edit(drafter, dflash_config={"mask_token_id": tiny.MASK, "target_layer_ids": [0, 2]})
    assert findings(drafter, target, "tpu-inference") == []


def test_everything_wrong_is_told_at_once(copy):
    drafter, target = copy("dspark")
    edit(drafter, sample_from_anchor=MISSING, mask_token_id=tiny.PAD, markov_head_type="rnn")
    edit(drafter, aux_hidden_state_layer_ids=[0, 4], dtype="bfloat16", target_hidden_size=1)
    retensor(drafter, lambda x: x.pop("hidden_norm.weight"))
    found = {finding.what for finding in findings(drafter, target, "vllm")}
    assert found >= {
        "anchor flag",
        "mask id",
        "Markov head",
        "head not servable",
        "last layer",
        "layer id offset",
        "dtype",
        "hidden size",
        "missing tensor",
    }


def test_training_data_tell_of_mask_target_and_template(good, tmp_path):
    target = good / "target"
    row = [*start_of(target), *range(20, 60)]
    fine = tiny.make_data(tmp_path / "fine", target, {"a": row, "b": row})
    assert findings(good / "dspark", target, "vllm", fine) == []

    used = tiny.make_data(tmp_path / "used", target, {"a": row, "b": [*row, tiny.MASK, 9]})
    (finding,) = findings(good / "dspark", target, "vllm", used)
    assert (finding.severity, finding.what) == ("refuse", "mask id")
    assert f"{tiny.MASK} occurs 1 times" in finding.why

    edit(shutil.copytree(good / "dspark", tmp_path / "drafter"), mask_token_id=77)
    (tmp_path / "drafter" / "dspark_jax.json").unlink()  # that mask id was not trained with
    found = findings(tmp_path / "drafter", target, "vllm", fine)
    assert [finding.what for finding in found] == ["target identity"]  # 77 does not occur

    changed = tiny.make_data(tmp_path / "changed", target, {"a": row[1:], "b": row[2:]})
    (finding,) = findings(good / "dspark", target, "vllm", changed)
    assert (finding.severity, finding.what) == ("warn", "chat template")

    other = tiny.make_target(tmp_path / "other", seed=3)
    theirs = tiny.make_data(tmp_path / "theirs", other, {"a": row})
    (finding,) = findings(good / "dspark", target, "vllm", theirs)
    assert (finding.severity, finding.what) == ("refuse", "target weights")


def start_of(target: pathlib.Path) -> list[int]:
    from dspark_jax.data.chat import empty_user_turn_ids
    from dspark_jax.data.opened import open_tokenizer

    return empty_user_turn_ids(open_tokenizer(target))


@pytest.mark.parametrize(
    "kind", ["dspark", "gated", "rnn", "pruned", "dflash", *CHAINS, "flat chain"]
)
def test_expected_tensors_are_those_of_the_importer(good, kind):
    facts = read_drafter(good / kind)
    layout, algorithm, shape = read_config(DrafterFile(good / kind / "config.json"))
    wanted = {"fc.weight": (WIDTH, 2 * WIDTH)}
    if "lm_head.weight" in facts.tensors and algorithm == "eagle3":
        wanted["lm_head.weight"] = (shape.draft_vocab, WIDTH)
    table = format_of(layout, algorithm, kind).tensors
    with jax.set_mesh(make_mesh()):
        for ours, leaf in named(empty_drafter(shape)).items():
            if ours != names.DRAFT_IDS:
                theirs, rows = names.to_file(table, ours)
                wanted[theirs] = names.file_shape(leaf.shape, rows)
    assert expected_tensors(facts) | {"fc.weight": (WIDTH, 2 * WIDTH)} == wanted
    assert backbone(facts).rope == shape.rope


def test_a_vision_language_config_is_read_by_its_text_part(good, copy):
    drafter, target = copy("dspark")
    config = read(target / "config.json")
    (target / "config.json").write_text(json.dumps({"text_config": config, "vision_config": {}}))
    facts = read_target(target, "tiny")
    assert (facts.layers, facts.rope.theta) == (tiny.LAYERS, 100.0)


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda folder: None, "no config.json there"),
        (lambda folder: folder.write_text("x"), "no config.json there"),
        (lambda folder: (folder.mkdir(), (folder / "config.json").write_text("[")), "readable as"),
        (
            lambda folder: (folder.mkdir(), (folder / "config.json").write_text(
                '{"fingerprint": {}, "target_config": {}}')),
            "a run, no export",
        ),
    ],
)  # fmt: skip
def test_a_drafter_that_cannot_be_read_is_one_line(tmp_path, make, expected):
    make(tmp_path / "drafter")
    with pytest.raises(UserError, match=expected):
        read_drafter(tmp_path / "drafter")


def test_a_target_without_sizes_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has no vocab_size"):
        read_target(tmp_path, "tiny")


def call(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "dspark_jax.preflight", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_command_ends_with_0_or_2(good, tmp_path):
    target = f"--target={good / 'target'}"
    fits = call(f"--drafter={good / 'dspark'}", target, "--engine=vllm")
    assert (fits.returncode, fits.stderr) == (0, "")
    assert fits.stdout.startswith("nothing found")

    report = tmp_path / "report.json"
    wrong = call(f"--drafter={good / 'rnn'}", target, "--engine=vllm", f"--json={report}")
    assert (wrong.returncode, wrong.stderr) == (2, "")
    assert "refuse  head not servable" in wrong.stdout and "-> serve with SGLang" in wrong.stdout
    assert all(len(line) <= 100 for line in wrong.stdout.splitlines()[:-1])
    assert read(report)["refused"] == 1
    assert read(report)["findings"][0]["what"] == "head not servable"

    gone = call(f"--drafter={tmp_path / 'gone'}", target, "--engine=vllm")
    assert gone.returncode == 2 and gone.stdout == ""
    assert gone.stderr.count("\n") == 1 and "no config.json there" in gone.stderr
