"""Drafters to files and back: every flag, every byte, and every way in which files can be wrong."""

import dataclasses
import json
import shutil
import struct
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.convert import export_run, import_run
from dspark_jax.core.config import DataConfig, DrafterConfig, RunConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target import TargetConfig
from dspark_jax.training.checkpoint import (
    RunRecord,
    load_arrays,
    read_record,
    save_drafter,
    write_record,
)
from dspark_jax.weights import export as export_module
from dspark_jax.weights.compare import (
    Probe,
    build_drafter,
    canonical,
    draft_outputs,
    empty_drafter,
    largest_difference,
    shape_differences,
)
from dspark_jax.weights.config_parts import Origin, Verifier, rope_parameters
from dspark_jax.weights.drafter_file import DrafterFile, read_shape
from dspark_jax.weights.export import export_drafter
from dspark_jax.weights.fingerprint import Fingerprint, fingerprint
from dspark_jax.weights.importing import check_borrowed, read_folder
from dspark_jax.weights.layouts import speculators_config, unservable
from dspark_jax.weights.safetensors import target_config
from dspark_jax.weights.vocab_tables import head_rows

TARGET = TargetConfig("llama", 24, 16, 6, 4, 2, 4, 32, 1e-5, RopeConfig(1e4), True, 64)
CONFIG = DrafterConfig(
    target_layer_ids=(0, 3), mask_token_id=5, block_size=3, num_layers=1, markov_rank=4
)
VERIFIER = Verifier("some/target", ("LlamaForCausalLM",))
ORIGIN = Origin(7, {"seed": 1}, Fingerprint("some/target", "a", "b", "c"))
PRUNED = {"vocab_size": 10}
DRAFT_IDS = np.array([0, 3, 4, 7, 8, 11, 15, 16, 20, 23], np.int32)
NO_HEADS = {"markov_head": "none", "markov_rank": 0, "confidence_head": False}


@pytest.fixture(autouse=True, scope="module")
def mesh():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh()):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_shape(rope: RopeConfig = TARGET.rope, **changes) -> DrafterShape:
    target = dataclasses.replace(TARGET, rope=rope)
    return DrafterShape.of(dataclasses.replace(CONFIG, **changes), target)


def make_arrays(shape: DrafterShape) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    leaves = named(empty_drafter(shape))
    ids = {name: DRAFT_IDS for name in leaves if name == "draft_ids"}
    return ids | {
        name: rng.standard_normal(x.shape, np.float32) * 0.4
        for name, x in leaves.items()
        if name not in ids
    }


def head_of(arrays) -> np.ndarray:
    """Rows of a target's LM head, for drafters of a pruned vocabulary."""
    head = np.random.default_rng(2).standard_normal((24, 16), np.float32)
    return head[arrays["draft_ids"]]


def export(directory, shape=None, arrays=None, **options):
    shape = shape or make_shape()
    arrays = arrays or make_arrays(shape)
    options = {"allow_unservable": True, **options}
    if shape.pruned:
        options = {"shared": {"lm_head.weight": head_of(arrays)}, **options}
    export_drafter(arrays, shape, VERIFIER, directory, ORIGIN, **options)
    return directory


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """One export that tests copy and damage."""
    return export(tmp_path_factory.mktemp("exports") / "plain")


@pytest.fixture
def folder(exported, tmp_path):
    return shutil.copytree(exported, tmp_path / "drafter")


@pytest.fixture(scope="module")
def exported_pruned(tmp_path_factory):
    return export(tmp_path_factory.mktemp("exports") / "pruned", make_shape(**PRUNED))


@pytest.fixture
def pruned(exported_pruned, tmp_path):
    """An export of a drafter with a pruned vocabulary."""
    return shutil.copytree(exported_pruned, tmp_path / "pruned")


def edit(folder, change) -> None:
    """Applies `change` to config.json."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# ---------------------------------------------------------------------------------------------
# The files, byte for byte.


def test_config_is_the_format():
    assert speculators_config(make_shape(), VERIFIER, "float32") == {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 4,
            "intermediate_size": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
            "layer_types": ["full_attention"],
            "max_position_embeddings": 64,
            "vocab_size": 24,
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
        "aux_hidden_state_layer_ids": [1, 4],
        "block_size": 3,
        "draft_vocab_size": 24,
        "mask_token_id": 5,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "rope_theta": 1e4,
    }


@pytest.mark.parametrize(
    "changes, kind, proposals",
    [
        ({}, "dspark", 3),
        ({"sample_from_anchor": False}, "dspark", 2),
        ({**NO_HEADS, "sample_from_anchor": False}, "dflash", 2),
        ({**NO_HEADS}, "dspark", 3),
        ({**NO_HEADS, "sample_from_anchor": False, "confidence_head": True}, "dspark", 2),
    ],
)
def test_kind_and_number_of_proposals(changes, kind, proposals):
    config = speculators_config(make_shape(**changes), VERIFIER, "float32")
    speculators = config["speculators_config"]
    assert config["speculators_model_type"] == speculators["algorithm"] == kind
    assert config["architectures"] == [
        {"dspark": "DSpark", "dflash": "DFlash"}[kind] + "DraftModel"
    ]
    assert speculators["proposal_methods"][0]["speculative_tokens"] == proposals
    # Readers take an absent flag for true or for false: always there, and of this type.
    flags = ("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov")
    assert all(isinstance(config[flag], bool) for flag in flags)
    assert config["confidence_head_with_markov"] <= (config["markov_rank"] > 0)
    assert config["markov_head_type"] in ("vanilla", "gated", "rnn")  # speculators knows no other
    # vLLM makes the blocks of a "dflash" drafter causal in every layer where this is False.
    assert config["sliding_window_non_causal"] == (kind == "dflash")


def read_by_hand(path) -> dict[str, np.ndarray]:
    """A safetensors file read with nothing but struct."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    dtypes = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "I64": np.int64, "BOOL": bool}
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], dtypes[entry["dtype"]]).reshape(
            entry["shape"]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_tensors_by_hand(tmp_path):
    shape = make_shape()
    arrays = make_arrays(shape)
    # The writer scrambles views that are not C-contiguous; square ones would pass a shape check.
    arrays = {name: np.asfortranarray(array) for name, array in arrays.items()}
    arrays["markov.w1"] = np.ascontiguousarray(arrays["markov.w1"].T).T
    arrays["hidden_norm"] = np.repeat(arrays["hidden_norm"], 2)[::2]
    tensors = read_by_hand(export(tmp_path / "a", shape, arrays) / "model.safetensors")
    layer = "layers.0."
    assert set(tensors) == {
        "fc.weight", "hidden_norm.weight", "norm.weight",
        f"{layer}self_attn.q_proj.weight", f"{layer}self_attn.k_proj.weight",
        f"{layer}self_attn.v_proj.weight", f"{layer}self_attn.o_proj.weight",
        f"{layer}self_attn.q_norm.weight", f"{layer}self_attn.k_norm.weight",
        f"{layer}mlp.gate_proj.weight", f"{layer}mlp.up_proj.weight",
        f"{layer}mlp.down_proj.weight", f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight", "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight", "confidence_head.proj.weight", "confidence_head.proj.bias",
    }  # fmt: skip
    assert tensors["fc.weight"].shape == (16, 2 * 16)
    assert tensors["confidence_head.proj.weight"].shape == (1, 16 + 4)
    assert tensors["confidence_head.proj.bias"].shape == (1,)
    for ours, theirs in (
        ("fc", "fc.weight"),
        ("hidden_norm", "hidden_norm.weight"),
        ("markov.w1", "markov_head.markov_w1.weight"),
        ("markov.w2", "markov_head.markov_w2.weight"),
        ("layers.0.mlp.down", f"{layer}mlp.down_proj.weight"),
    ):
        assert np.array_equal(tensors[theirs], arrays[ours]), theirs
    q, o, k = (tensors[f"{layer}self_attn.{x}_proj.weight"] for x in "qok")
    for kv in range(2):
        for query in range(2):
            for dim in range(4):
                row = (kv * 2 + query) * 4 + dim  # heads of one key/value head are neighbours
                assert np.array_equal(q[row], arrays["layers.0.attention.q"][kv, query, dim])
                assert np.array_equal(o[:, row], arrays["layers.0.attention.o"][:, kv, query, dim])
        assert np.array_equal(k[kv * 4 + 1], arrays["layers.0.attention.k"][kv, 1])


def test_bfloat16_is_by_value_and_tables_keep_their_type(tmp_path):
    shape = make_shape()
    arrays = make_arrays(shape)
    arrays["markov.w1"].reshape(-1)[:4] = [1.0, -2.5, 3.140625, 1 + 2**-10]
    folder = export(tmp_path / "a", shape, arrays, dtype="bfloat16")
    tensors = read_by_hand(folder / "model.safetensors")
    assert {tensor.dtype.name for tensor in tensors.values()} == {"bfloat16"}
    stored = tensors["markov_head.markov_w1.weight"].reshape(-1)[:4].astype(np.float32)
    assert stored.tolist() == [1.0, -2.5, 3.140625, 1.0]
    found = read_folder(folder)
    assert found.arrays["markov.w1"].dtype == ml_dtypes.bfloat16
    assert found.compute_dtype == "bfloat16"
    assert found.arrays["markov.w1"].reshape(-1)[:4].tolist() == [1.0, -2.5, 3.140625, 1.0]
    again = tmp_path / "b"
    export(again, shape, found.arrays)  # kept as stored
    assert same_bytes(folder, again)
    ids = np.array([1, 255, 257, 383, 151645, 151669])
    assert np.array_equal(export_module.cast(ids, "bfloat16"), ids)  # bfloat16 has 8 bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pruned_vocabulary_by_hand(dtype, tmp_path):
    """Offsets, marks and the target's rows: engines know by them which tokens are meant (R025)."""
    shape = make_shape(**PRUNED)
    arrays = make_arrays(shape)
    folder = export(tmp_path / "a", shape, arrays, dtype=dtype)
    tensors = read_by_hand(folder / "model.safetensors")
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    assert (d2t.dtype, d2t.shape, t2d.dtype, t2d.shape) == (np.int64, (10,), bool, (24,))
    assert [i + int(offset) for i, offset in enumerate(d2t)] == DRAFT_IDS.tolist()
    assert [token for token, drafted in enumerate(t2d) if drafted] == DRAFT_IDS.tolist()
    floats = {name: x for name, x in tensors.items() if name not in ("d2t", "t2d")}
    assert {x.dtype.name for x in floats.values()} == {dtype}
    rounded = head_of(arrays).astype(export_module.DTYPES[dtype])
    assert np.array_equal(tensors["lm_head.weight"], rounded)
    assert tensors["markov_head.markov_w1.weight"].shape == (24, 4)
    assert tensors["markov_head.markov_w2.weight"].shape == (10, 4)
    assert "draft_ids" not in tensors and "embed_tokens.weight" not in tensors
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == 10
    assert config["transformer_layer_config"]["vocab_size"] == 24
    found = read_folder(folder)
    assert np.array_equal(found.arrays["draft_ids"], DRAFT_IDS)
    assert found.arrays["draft_ids"].dtype == np.int32
    again = export(tmp_path / "b", shape, found.arrays, shared={"lm_head.weight": rounded})
    assert same_bytes(folder, again)


def same_bytes(a, b) -> bool:
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir()) == [
        "config.json", "dspark_jax.json", "model.safetensors"
    ]  # fmt: skip
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


# ---------------------------------------------------------------------------------------------
# Every flag goes there and back.

LLAMA3 = RopeConfig(5e5, "llama3", 8.0, 1.5, 3.0, 32)
YARN = RopeConfig(1e6, "yarn", 4.0, original_max_position=32, beta_fast=16.0, beta_slow=2.0)
FLIPS = {
    "gated": {"markov_head": "gated"},
    "rnn": {"markov_head": "rnn"},
    "rank": {"markov_rank": 6},
    "rank 0": {"markov_head": "none", "markov_rank": 0},
    "no confidence": {"confidence_head": False},
    "confidence without markov": {"confidence_with_markov": False},
    "fill-in": {"sample_from_anchor": False},
    "dflash": {**NO_HEADS, "sample_from_anchor": False},
    "block": {"block_size": 5},
    "pruned": PRUNED,
    "taps": {"target_layer_ids": (1, 2, 4)},
    "embedding tap": {"target_layer_ids": (-1, 3)},
    "mask": {"mask_token_id": 0},
    "layers": {"num_layers": 3},
    "mlp": {"intermediate_size": 24},
    "heads": {"num_heads": 8},
    "kv heads": {"num_kv_heads": 1},
    "head dim": {"head_dim": 8},
    "theta": {"rope": RopeConfig(1e6)},
    "partial": {"rope": RopeConfig(1e4, partial_rotary_factor=0.5)},
    "linear": {"rope": RopeConfig(1e4, "linear", 2.0)},
    "llama3": {"rope": LLAMA3},
    "yarn": {"rope": YARN},
    "yarn attention factor": {"rope": dataclasses.replace(YARN, attention_factor=1.25)},
}


@pytest.mark.parametrize("flip", FLIPS)
def test_every_flag_is_in_the_config(flip, tmp_path):
    shape, plain = make_shape(**FLIPS[flip]), make_shape()
    config = speculators_config(shape, VERIFIER, "float32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read_shape(DrafterFile(tmp_path / "config.json"))
    assert shape_differences(shape, found) == []
    assert shape_differences(plain, found) != []  # so the flag did move, and the check can see it


# Several flips each: what is slow is to compile the comparison of logits.
MIXES = {
    "gated": {"markov_head": "gated", "block_size": 4, "target_layer_ids": (-1, 2, 4)},
    "rnn": {"markov_head": "rnn", "markov_rank": 6, "num_layers": 2, "rope": LLAMA3},
    "fill-in": {"sample_from_anchor": False, "confidence_with_markov": False, "rope": YARN},
    "rank 0": {"markov_head": "none", "markov_rank": 0, "head_dim": 8, "num_kv_heads": 1},
    "dflash": {**FLIPS["dflash"], "num_heads": 2, "intermediate_size": 24, **FLIPS["partial"]},
    "pruned dflash": {**FLIPS["dflash"], **PRUNED},
}


@pytest.mark.parametrize("mix", MIXES)
def test_round_trip_is_bit_exact(mix, tmp_path):
    shape = make_shape(**MIXES[mix])
    arrays = make_arrays(shape)
    first = export(tmp_path / "a", shape, arrays)
    found = read_folder(first)
    assert canonical(found.shape) == canonical(shape)
    assert set(found.arrays) == set(arrays)
    assert all(array.size for array in found.arrays.values())  # rank 0 makes no empty tables
    assert all(np.array_equal(found.arrays[name], arrays[name]) for name in arrays)
    second = export(tmp_path / "b", found.shape, found.arrays)
    assert same_bytes(first, second)


@pytest.mark.parametrize("changes", [{}, PRUNED], ids=["whole", "pruned"])
def test_logits_and_confidence_see_every_tensor(changes):
    shape = make_shape(**changes)
    arrays = make_arrays(shape)
    drafter, probe = build_drafter(canonical(shape), arrays), Probe.of(shape)
    logits, confidence = draft_outputs(drafter, probe)
    assert logits.shape == (2, 3, shape.draft_vocab) and confidence.shape == (2, 3)
    assert largest_difference(drafter, build_drafter(canonical(shape), arrays), probe) == 0.0
    for name in arrays:
        other = arrays[name] * 1.5 + 0.1 if name != "draft_ids" else np.roll(arrays[name], 1)
        changed = {**arrays, name: other}
        other = build_drafter(canonical(shape), changed)
        assert largest_difference(drafter, other, probe) > 1e-4, name
    broken = {**arrays, "norm": np.full_like(arrays["norm"], np.nan)}
    other = build_drafter(canonical(shape), broken)
    assert largest_difference(drafter, other, probe) == float("inf")


# ---------------------------------------------------------------------------------------------
# The same drafter in other layouts.


def deepspec(config: dict) -> dict:
    """A speculators config as the flat layout of the released DeepSeek drafters."""
    flat = dict(config["transformer_layer_config"])
    for key in ("block_size", "mask_token_id", "markov_rank", "markov_head_type"):
        flat[key] = config[key]
    flat |= {key: config[key] for key in ("enable_confidence_head", "confidence_head_with_markov")}
    flat["target_layer_ids"] = [tap - 1 for tap in config["aux_hidden_state_layer_ids"]]
    return flat | {"architectures": ["Qwen3DSparkModel"], "num_target_layers": 6, "num_anchors": 8}


def nested(section: str):
    def move(config: dict) -> dict:
        flat = deepspec(config)
        keys = ("block_size", "mask_token_id", "target_layer_ids")
        return flat | dict.fromkeys(keys) | {section: {key: flat[key] for key in keys}}

    return move


@pytest.mark.parametrize(
    "layout", [deepspec, nested("dflash_config"), nested("dspark_config")],
    ids=["deepspec", "dflash_config", "dspark_config"],
)  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "model."])
def test_four_layouts_are_one_drafter(layout, prefix, folder):
    plain = read_folder(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(layout(config)))
    tensors = load_file(folder / "model.safetensors")
    save_file({prefix + n: t for n, t in tensors.items()}, folder / "model.safetensors")
    found = read_folder(folder)
    assert canonical(found.shape) == canonical(plain.shape)
    assert all(np.array_equal(found.arrays[n], plain.arrays[n]) for n in plain.arrays)


def test_rank_decides_not_the_name_of_the_class(folder):
    """DeepSpec's DFlash drafters carry the DSpark class and rank 0."""
    config = deepspec(json.loads((folder / "config.json").read_text()))
    config |= {"markov_rank": 0, "enable_confidence_head": False}
    (folder / "config.json").write_text(json.dumps(config))
    edit_tensors(folder, lambda t: [t.pop(n) for n in list(t) if "markov" in n or "confid" in n])
    found = read_folder(folder)
    assert found.shape.config.markov_head == "none" and "markov.w1" not in found.arrays
    assert found.shape.config.sample_from_anchor and not found.shape.config.confidence_head


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("reverse", [False, True])
def test_shards_and_the_order_of_their_index_do_not_matter(first, reverse, folder):
    plain = read_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    where = {n: files[(("markov" in n) + first) % 2] for n in sorted(tensors, reverse=reverse)}
    for file in files:
        save_file({n: t for n, t in tensors.items() if where[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = read_folder(folder)
    assert all(np.array_equal(found.arrays[n], plain.arrays[n]) for n in plain.arrays)
    (folder / files[0]).unlink()
    with pytest.raises(UserError, match=files[0]):
        read_folder(folder)


@pytest.mark.parametrize(
    "place",
    [
        lambda c, rope: c["transformer_layer_config"].update(rope_parameters=rope),
        lambda c, rope: c["transformer_layer_config"].update(
            rope_parameters=None, rope_scaling=rope
        ),
        lambda c, rope: c["transformer_layer_config"].update(
            rope_parameters=None,
            rope_theta=rope["rope_theta"],
            rope_scaling={k: v for k, v in rope.items() if k != "rope_theta"},
        ),
    ],
    ids=["rope_parameters", "rope_scaling", "theta apart"],
)
def test_rope_is_found_where_its_writer_put_it(place, folder):
    shape = make_shape(rope=LLAMA3)
    rope = rope_parameters(LLAMA3)

    def change(config):
        config["rope_theta"] = rope["rope_theta"]
        place(config, rope)

    edit(folder, change)
    found = read_shape(DrafterFile(folder / "config.json"))
    assert shape_differences(shape, found) == []


def test_full_vocabulary_tables_and_a_missing_bias_say_nothing(folder):
    plain = read_folder(folder)

    def change(tensors):
        tensors["d2t"], tensors["t2d"] = np.zeros(24, np.int64), np.ones(24, bool)
        del tensors["confidence_head.proj.bias"]

    edit_tensors(folder, change)
    found = read_folder(folder)
    assert found.arrays["confidence.bias"].tolist() == [0.0]
    assert "confidence_head.proj.bias" in found.notes[0] and not plain.notes
    assert set(found.arrays) == set(plain.arrays)


# ---------------------------------------------------------------------------------------------
# Files that are wrong.


def layer(**values):
    return lambda config: config["transformer_layer_config"].update(values)


def top(**values):
    return lambda config: config.update(values)


def without(name):
    return lambda c: (c if name in c else c["transformer_layer_config"]).pop(name)


MANDATORY = (
    "mask_token_id block_size aux_hidden_state_layer_ids sample_from_anchor markov_rank "
    "markov_head_type enable_confidence_head confidence_head_with_markov hidden_size vocab_size "
    "num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "rms_norm_eps max_position_embeddings"
)


@pytest.mark.parametrize("name", MANDATORY.split())
def test_no_field_is_guessed(name, folder):
    edit(folder, without(name))
    with pytest.raises(UserError, match=f"{name} is missing"):
        read_folder(folder)


@pytest.mark.parametrize(
    "change, wanted",
    [
        (layer(block_size=2), ["block_size=3", "transformer_layer_config.block_size=2"]),
        (top(dflash_config={"mask_token_id": 6}), ["mask_token_id=5", "dflash_config.mask_token"]),
        (top(target_layer_ids=[1, 4]), ["aux_hidden_state_layer_ids", "target_layer_ids"]),
        (top(rope_theta=5e5), ["rope_theta=500000.0", "rope_parameters.rope_theta=10000.0"]),
        (top(rope_scaling={"rope_type": "linear", "factor": 2.0}), ["rope_scaling", "linear"]),
        (layer(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}), ["needs a factor"]),
        (layer(rope_parameters={"rope_theta": 1e4, "mscale": 2.0}), ["mscale"]),
        (top(draft_vocab_size=12), ["markov_w2.weight", "[24, 4]", "[12, 4]"]),
        (top(draft_vocab_size=25), ["draft_vocab_size=25", "24"]),
        (top(target_hidden_size=32), ["target_hidden_size=32"]),
        (layer(layer_types=["sliding_attention"]), ["sliding_attention"]),
        (layer(layer_types=["full_attention"] * 2), ["num_hidden_layers"]),
        (layer(attention_bias=True), ["attention_bias=True"]),
        (layer(model_type="llama"), ["llama"]),
        (top(speculators_model_type="eagle3"), ["norm_before_residual"]),
        (top(mask_token_id=24), ["mask_token_id=24", "24"]),
        (top(block_size="3"), ["block_size='3'"]),
        (top(markov_rank=-1), ["markov_rank=-1"]),
        (top(markov_head_type="gru"), ["gru"]),
        (top(block_size=2), ["speculative_tokens=3", "block_size=2"]),
        (top(sample_from_anchor=False), ["speculative_tokens=3", "sample_from_anchor=False"]),
        (top(aux_hidden_state_layer_ids=[1, 3, 4]), ["2 taps", "lists 3"]),  # never cut to fit
        (top(aux_hidden_state_layer_ids=[1]), ["2 taps", "lists 1"]),
        (layer(num_hidden_layers=2, layer_types=None), ["missing layers.1.input_layernorm"]),
        (top(enable_confidence_head=False), ["unknown confidence_head.proj.bias, confidence"]),
        (top(confidence_head_with_markov=False), ["confidence_head.proj.weight", "20", "16"]),
        (top(markov_head_type="gated"), ["missing markov_head.gate_proj.bias, markov_head.gate"]),
        (layer(num_key_value_heads=4), ["k_proj.weight", "[8, 16]", "[16, 16]"]),
        (top(transformer_layer_config=3), ["transformer_layer_config", "object"]),
    ],
)
def test_a_wrong_config_is_named(change, wanted, folder):
    edit(folder, change)
    with pytest.raises(UserError) as caught:
        read_folder(folder)
    for part in (str(folder), *wanted):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fewer_proposals_than_the_block_gives_are_fine(folder):
    edit(folder, lambda c: c["speculators_config"]["proposal_methods"][0].update(
        speculative_tokens=2))  # fmt: skip
    assert read_folder(folder).shape.config.num_proposals == 3


@pytest.mark.parametrize(
    "change, wanted",
    [
        (lambda t: t.pop("norm.weight"), "missing norm.weight"),
        (lambda t: t.update(extra=np.zeros(2, np.float32)), "unknown extra"),
        (lambda t: t.update({"model.norm.weight": t["norm.weight"]}), "are one tensor"),
        (lambda t: t.update({"norm.weight": t["norm.weight"].astype(np.int8)}), "quantised"),
        (lambda t: t.update(d2t=np.arange(12)), "pruned"),
        (lambda t: t.update(t2d=np.arange(24) % 2 == 0), "pruned"),
        (lambda t: t.update({"norm.weight": np.ones(8, np.float32)}), r"norm.weight.*\[8\]"),
    ],
)
def test_wrong_tensors_are_named(change, wanted, folder):
    edit_tensors(folder, change)
    with pytest.raises(UserError, match=wanted):
        read_folder(folder)


def d2t_of(*ids: int) -> np.ndarray:
    return np.array(ids) - np.arange(len(ids))


def marks_of(*ids: int) -> np.ndarray:
    return np.isin(np.arange(24), ids)


MARKOV_W2 = "markov_head.markov_w2.weight"
OTHER_IDS = (1, *DRAFT_IDS[1:])
UNSORTED = (3, 0, *DRAFT_IDS[2:])


@pytest.mark.parametrize(
    "change, wanted",
    [
        (lambda t: t.pop("d2t"), r"draft_vocab_size=10 of vocab_size=24.*no d2t.*never guessed"),
        (lambda t: [t.pop("d2t"), t.pop("t2d")], "no d2t"),
        (lambda t: t.update(d2t=DRAFT_IDS.astype(np.int64)), "d2t holds target ids.*offsets"),
        (lambda t: t.update(d2t=DRAFT_IDS) or t.pop("t2d"), "d2t holds target ids.*offsets"),
        (lambda t: t.update(d2t=d2t_of(*OTHER_IDS)), "t2d does not mark the ids of d2t"),
        (lambda t: t.update(t2d=marks_of(*OTHER_IDS)), "t2d does not mark the ids of d2t"),
        (lambda t: t.update(t2d=np.ones(24, bool)), "t2d does not mark the ids of d2t"),
        (lambda t: t.update(t2d=marks_of(*DRAFT_IDS)[:20]), "t2d does not mark"),
        (lambda t: t.update(d2t=d2t_of(*UNSORTED)), "t2d does not mark"),
        (lambda t: t.update(d2t=d2t_of(0, *DRAFT_IDS[:-1])), "one twice"),
        (lambda t: t.update(d2t=d2t_of(0, *DRAFT_IDS[:-1])) or t.pop("t2d"), "one twice"),
        (lambda t: t.update(d2t=d2t_of(*DRAFT_IDS[:-1], 24)), "outside 0..23"),
        (lambda t: t.update(d2t=d2t_of(-1, *DRAFT_IDS[1:])), "outside 0..23"),
        (lambda t: t.update(d2t=t["d2t"][:-1]), r"d2t is int64\[9\], .* implies int64\[10\]"),
        (lambda t: t.update(d2t=t["d2t"].astype(np.float32)), r"d2t is float32\[10\]"),
        (lambda t: t.update({MARKOV_W2: np.zeros((24, 4), np.float32)}), r"markov_w2.*\[10, 4\]"),
    ],
)
def test_wrong_tables_are_named(change, wanted, pruned):
    edit_tensors(pruned, change)
    with pytest.raises(UserError, match=wanted) as caught:
        read_folder(pruned)
    assert str(pruned) in str(caught.value) and "\n" not in str(caught.value)


def test_tables_that_say_the_same_are_taken(pruned):
    """t2d repeats d2t, and d2t may be stored in fewer bits."""
    plain = read_folder(pruned)
    edit_tensors(pruned, lambda t: t.update(d2t=t["d2t"].astype(np.int32)))
    assert np.array_equal(read_folder(pruned).arrays["draft_ids"], DRAFT_IDS)
    edit_tensors(pruned, lambda t: t.pop("t2d"))
    found = read_folder(pruned)
    assert set(found.arrays) == set(plain.arrays)
    assert all(np.array_equal(found.arrays[n], plain.arrays[n]) for n in plain.arrays)


def test_a_table_without_a_size_is_not_passed_over(pruned):
    """A config that says nothing means the whole vocabulary, which the table denies."""
    edit(pruned, top(draft_vocab_size=24))
    edit_tensors(pruned, lambda t: t.update({MARKOV_W2: np.ones((24, 4), np.float32)}))
    with pytest.raises(UserError, match="d2t maps a pruned.*draft_vocab_size .*whole one"):
        read_folder(pruned)
    edit_tensors(pruned, lambda t: t.pop("d2t"))
    with pytest.raises(UserError, match="t2d maps a pruned"):
        read_folder(pruned)


def test_damaged_files_are_one_line(folder):
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (whole[:-100], whole[:20], b""):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match=r"model.safetensors: damaged") as caught:
            read_folder(folder)
        assert "\n" not in str(caught.value)
    (folder / "model.safetensors").write_bytes(whole)
    read_folder(folder)
    for name in ("dspark_jax.json", "config.json"):
        (folder / name).write_text('{"step": 1')
        with pytest.raises(UserError, match=name):
            read_folder(folder)
        (folder / name).unlink()
    with pytest.raises(UserError, match=r"config.json: no such file"):
        read_folder(folder)


# ---------------------------------------------------------------------------------------------
# What is not exported, and what is left then.


@pytest.mark.parametrize(
    "changes, wanted",
    [
        ({"markov_head": "gated"}, "markov_head='gated'"),
        ({"markov_head": "rnn"}, "markov_head='rnn'"),
        ({"markov_head": "none", "markov_rank": 0, "confidence_head": False}, "markov_rank=0"),
        (
            {"markov_head": "none", "markov_rank": 0, "sample_from_anchor": False},
            "confidence_head=True",
        ),
    ],
)
def test_what_vllm_cannot_run_is_refused_by_the_flag(changes, wanted, tmp_path):
    with pytest.raises(UserError, match=wanted):
        export(tmp_path / "a", make_shape(**changes), allow_unservable=False)
    assert list(tmp_path.iterdir()) == []
    assert unservable(make_shape()) is None
    assert unservable(make_shape(**FLIPS["dflash"])) is None
    assert unservable(make_shape(**FLIPS["fill-in"])) is None


def test_a_taken_place_is_respected(folder, tmp_path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match="not empty.*--force"):
        export(folder)
    (folder / "thesis.txt").write_text("do not delete")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        export(folder, replace=True)
    assert before.items() <= {path.name: path.read_bytes() for path in folder.iterdir()}.items()
    (folder / "thesis.txt").unlink()
    (folder / "calibration.json").write_text("{}")  # of the former drafter: goes with it
    export(folder, make_shape(), dtype="bfloat16", replace=True)
    assert "calibration.json" not in {path.name for path in folder.iterdir()}
    assert read_folder(folder).compute_dtype == "bfloat16"
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        export(tmp_path / "file", replace=True)
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


@pytest.mark.parametrize("fault", ["bits", "scrambled", "lost", "disk", "head", "table"])
def test_a_file_that_reads_back_otherwise_is_not_exported(fault, tmp_path, monkeypatch):
    """The disk or a library may do anything: what does not read back does not appear."""
    shape = make_shape(**(PRUNED if fault in ("head", "table") else {}))

    def save(tensors, path, metadata):
        tensors = dict(tensors)
        if fault == "bits":  # one bit of a row that no probe would look up
            tensors["markov_head.markov_w1.weight"][23, 3] += 1e-7
        if fault == "scrambled":
            weight = tensors["layers.0.self_attn.q_proj.weight"]
            tensors["layers.0.self_attn.q_proj.weight"] = np.ascontiguousarray(weight.T)
        if fault == "lost":
            del tensors["norm.weight"]
        if fault == "head":  # engines draft with these rows
            tensors["lm_head.weight"][9, 3] += 1e-3
        if fault == "table":
            tensors["d2t"], tensors["t2d"] = d2t_of(*OTHER_IDS), marks_of(*OTHER_IDS)
        if fault == "disk":
            raise OSError(28, "No space left on device")
        save_file(tensors, path, metadata)

    monkeypatch.setattr(export_module, "save_file", save)
    with pytest.raises(UserError, match="differs|missing|No space left"):
        export(tmp_path / "a", shape)
    assert list(tmp_path.iterdir()) == []


def test_arrays_that_do_not_fit_are_named(tmp_path):
    arrays = make_arrays(make_shape())
    for change, wanted in (
        ({"norm": arrays["norm"][:8]}, r"norm is \[8\] instead of \[16\]"),
        ({"norm": arrays["norm"] * np.nan}, "norm holds NaN"),
        ({"embed": arrays["norm"]}, "embed does not belong"),
    ):
        with pytest.raises(UserError, match=wanted):
            export(tmp_path / "a", arrays={**arrays, **change})
    with pytest.raises(UserError, match="norm is missing"):
        export(tmp_path / "a", arrays={n: a for n, a in arrays.items() if n != "norm"})
    with pytest.raises(UserError, match="dtype='float16'"):
        export(tmp_path / "a", dtype="float16")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------
# The command: runs and targets.


def make_target(directory, tied: bool, seed: int = 3):
    """What convert reads of a target: its config, embedding, head and final norm."""
    directory.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": 16,
        "vocab_size": 24,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
    }
    (directory / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(seed)
    names = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    tensors = {name: rng.standard_normal((24, 16), np.float32) for name in names}
    tensors["model.norm.weight"] = np.ones(16, np.float32)
    save_file(tensors, directory / "model.safetensors")
    return directory


def make_run(workdir, target, **changes):
    """A run as train leaves it, with two checkpoints."""
    config = RunConfig(
        target=str(target), data=DataConfig("generator:8"), drafter=dataclasses.replace(
            CONFIG, **changes), target_dtype="float32",
    )  # fmt: skip
    shape = target_config(target, "float32")
    record = RunRecord(
        config, fingerprint(target, str(target)), str(target), shape, ("LlamaForCausalLM",)
    )
    write_record(workdir, record)
    arrays = make_arrays(record.shape)
    save_drafter(workdir, arrays, 40)
    other = {name: array + (name != "draft_ids") for name, array in arrays.items()}
    save_drafter(workdir, other, 80)
    return arrays


@pytest.mark.parametrize("tied", [True, False])
def test_run_to_folder_to_run_to_folder(tied, tmp_path, capsys):
    target = make_target(tmp_path / "target", tied)
    arrays = make_run(tmp_path / "a", target)
    exported = export_run(tmp_path / "a", tmp_path / "out" / "a", step="40")
    said = capsys.readouterr().out
    assert exported.difference == 0.0 and exported.tensors == len(arrays)
    assert f"vllm serve {tmp_path / 'out' / 'a'}" in said and str(target) in said
    config = json.loads((exported.directory / "config.json").read_text())
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]}
    record = json.loads((exported.directory / "dspark_jax.json").read_text())
    assert record["step"] == 40 and record["config"]["drafter"]["block_size"] == 3
    assert record["target"] == dataclasses.asdict(fingerprint(target, str(target)))
    assert set(record["versions"]) == {"dspark_jax", "jax", "flax"}

    imported = import_run(exported.directory, tmp_path / "b")
    assert imported == read_record(tmp_path / "b") == read_record(tmp_path / "a")
    again = export_run(tmp_path / "b", tmp_path / "again")
    assert same_bytes(exported.directory, again.directory)
    latest = export_run(tmp_path / "a", tmp_path / "latest", step="latest")
    assert not same_bytes(exported.directory, latest.directory)
    with pytest.raises(UserError, match="not empty"):
        import_run(exported.directory, tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a", "again", "b", "latest", "out", "target"
    ]  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
def test_a_pruned_run_takes_its_head_from_the_target(tied, tmp_path):
    """There and back; the rows are those of the very target, or the drafter is not imported."""
    target = make_target(tmp_path / "target", tied)
    arrays = make_run(tmp_path / "a", target, **PRUNED)
    exported = export_run(tmp_path / "a", tmp_path / "out", step="40")
    assert exported.difference == 0.0 and exported.tensors == len(arrays) + 2
    tables = load_file(target / "model.safetensors")
    head = tables["model.embed_tokens.weight" if tied else "lm_head.weight"]
    stored = load_file(exported.directory / "model.safetensors")
    assert np.array_equal(stored["lm_head.weight"], head[DRAFT_IDS])

    imported = import_run(exported.directory, tmp_path / "b")
    assert imported == read_record(tmp_path / "a")
    back = load_arrays(tmp_path / "b", 40)
    assert np.array_equal(back["draft_ids"], DRAFT_IDS) and set(back) == set(arrays)
    assert same_bytes(exported.directory, export_run(tmp_path / "b", tmp_path / "again").directory)

    # Without our record: a stranger's drafter, of which only the rows tell the target.
    (exported.directory / "dspark_jax.json").unlink()
    record = import_run(exported.directory, tmp_path / "c", target=str(target))
    assert record.config.drafter.vocab_size == 10
    other = make_target(tmp_path / "other", tied, seed=4)
    with pytest.raises(UserError, match="'lm_head.weight' is not the LM head"):
        import_run(exported.directory, tmp_path / "d", target=str(other))
    short = head[DRAFT_IDS].astype(ml_dtypes.bfloat16)  # a shorter copy is still the same
    edit_tensors(exported.directory, lambda t: t.update({"lm_head.weight": short}))
    check_borrowed(read_folder(exported.directory), target)
    edit_tensors(exported.directory, lambda t: t.update({"lm_head.weight": short[::-1].copy()}))
    with pytest.raises(UserError, match="is not the LM head"):
        check_borrowed(read_folder(exported.directory), target)
    assert not (tmp_path / "d").exists()


def test_draft_ids_in_another_order_keep_their_rows(tmp_path):
    """Files without t2d may list the ids in any order: refused, or each with its own row."""
    target = make_target(tmp_path / "target", False)
    make_run(tmp_path / "a", target, **PRUNED)
    folder = export_run(tmp_path / "a", tmp_path / "out").directory
    head = load_file(target / "model.safetensors")["lm_head.weight"]

    def reorder(tensors):
        del tensors["t2d"]
        tensors["d2t"], tensors["lm_head.weight"] = d2t_of(*UNSORTED), head[list(UNSORTED)]

    edit_tensors(folder, reorder)
    try:
        found = read_folder(folder)
    except UserError as error:
        assert "ascending" in str(error)
    else:
        assert found.arrays["draft_ids"].tolist() == list(UNSORTED)
        check_borrowed(found, target)


@pytest.mark.parametrize("ids", [[5], [0, 23], [7, 8, 9], range(24)])
def test_head_rows_reads_the_rows_of_any_ids(ids, tmp_path):
    target = make_target(tmp_path / "target", False)
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    assert np.array_equal(head_rows(target, np.array(ids, np.int32)), head[list(ids)])


def test_head_rows_of_a_large_vocabulary(tmp_path):
    """Cut into ranges of the file, ids at their ends included."""
    tables = {"lm_head.weight": np.arange(20_000, dtype=np.float32)[:, None]}
    save_file(tables, tmp_path / "model.safetensors")
    ids = np.array([0, 8191, 8192, 8193, 16383, 16384, 19_999], np.int32)
    assert head_rows(tmp_path, ids)[:, 0].tolist() == ids.tolist()
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(20_000, 500, replace=False)).astype(np.int32)
    assert head_rows(tmp_path, ids)[:, 0].tolist() == ids.tolist()


def test_another_target_is_refused_in_both_directions(tmp_path):
    target = make_target(tmp_path / "target", True)
    other = make_target(tmp_path / "other", True, seed=4)
    make_run(tmp_path / "a", target)
    with pytest.raises(UserError, match="another weights"):
        export_run(tmp_path / "a", tmp_path / "out", target=str(other))
    folder = export_run(tmp_path / "a", tmp_path / "out").directory
    with pytest.raises(UserError, match="another weights"):
        import_run(folder, tmp_path / "b", target=str(other))
    # A moved target is the same target.
    shutil.move(target, tmp_path / "moved")
    with pytest.raises(UserError, match="--target"):
        export_run(tmp_path / "a", tmp_path / "out2")
    export_run(tmp_path / "a", tmp_path / "out2", target=str(tmp_path / "moved"))
    import_run(folder, tmp_path / "b", target=str(tmp_path / "moved"))
    # Two descriptions of one drafter in a folder must agree.
    recipe = json.loads((folder / "dspark_jax.json").read_text())
    recipe["config"]["drafter"]["block_size"] = 4
    (folder / "dspark_jax.json").write_text(json.dumps(recipe))
    with pytest.raises(UserError, match=r"config.block_size is 3 in config.json, 4 by dspark_jax"):
        import_run(folder, tmp_path / "c", target=str(tmp_path / "moved"))
    assert not (tmp_path / "c").exists()


def test_foreign_folders_need_no_record_and_share_the_targets_tables(folder, tmp_path):
    target = make_target(tmp_path / "target", False)
    (folder / "dspark_jax.json").unlink()
    tables = load_file(target / "model.safetensors")
    embed = tables["model.embed_tokens.weight"]
    bf16 = tables["lm_head.weight"].astype(ml_dtypes.bfloat16)  # a shorter copy is still the same
    edit_tensors(folder, lambda t: t.update({"embed_tokens.weight": embed, "lm_head.weight": bf16}))
    record = import_run(folder, tmp_path / "b", target=str(target))
    assert record.config.target == str(target) and record.config.drafter.block_size == 3
    assert record.fingerprint == fingerprint(target, str(target))
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": embed}))
    with pytest.raises(UserError, match="'lm_head.weight' is not the LM head"):
        import_run(folder, tmp_path / "c", target=str(target))
    tied = make_target(tmp_path / "tied", True)  # the same embedding, and it is the head
    check_borrowed(read_folder(folder), tied)
    for change, wanted in (
        (layer(rms_norm_eps=1e-6), "rms_norm_eps is 1e-06 in config.json, 1e-05 by the target"),
        (
            lambda c: (layer(rope_parameters={"rope_theta": 5e5})(c), top(rope_theta=5e5)(c)),
            "rope.theta",
        ),
        (top(aux_hidden_state_layer_ids=[1, 6]), "last layer"),
    ):
        broken = shutil.copytree(folder, tmp_path / "broken")
        edit(broken, change)
        with pytest.raises(UserError, match=wanted):
            import_run(broken, tmp_path / "c", target=str(tied))
        shutil.rmtree(broken)
    assert not (tmp_path / "c").exists()


def test_hub_targets_keep_their_name(tmp_path):
    """Engines get the id, not the folder of this machine's cache."""
    snapshot = tmp_path / "hub" / "models--some--target" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    target = make_target(snapshot, True)
    make_run(tmp_path / "a", target)
    record = read_record(tmp_path / "a")
    config = dataclasses.replace(record.config, target="some/target")
    write_record(tmp_path / "a", dataclasses.replace(record, config=config))
    folder = export_run(tmp_path / "a", tmp_path / "out").directory
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"


def test_a_forced_export_does_not_claim_to_be_for_vllm(tmp_path, capsys):
    make_run(tmp_path / "a", make_target(tmp_path / "target", True), markov_head="gated")
    with pytest.raises(UserError, match="markov_head='gated'.*--force"):
        export_run(tmp_path / "a", tmp_path / "out")
    export_run(tmp_path / "a", tmp_path / "out", force=True)
    said = capsys.readouterr().out
    assert "vllm serve" not in said and "not for vLLM" in said


def command(*args):
    run = [sys.executable, "-m", "dspark_jax.convert", *map(str, args)]
    return subprocess.run(run, capture_output=True, text=True, timeout=300)


def test_the_command_teaches_and_fails_in_one_line(tmp_path):
    shown = command("--help")
    assert shown.returncode == 0
    for part in ("--to=speculators", "--from=", "vllm serve", "--step=", "force", "best"):
        assert part in shown.stdout
    failed = command("--workdir", tmp_path / "none", "--to=speculators", "--out", tmp_path / "out")
    assert failed.returncode == 2 and failed.stdout == ""
    assert failed.stderr.count("\n") == 1 and "no run here" in failed.stderr
    failed = command("--from", tmp_path / "none", "--to=deepspec", "--workdir", tmp_path / "out")
    assert failed.returncode == 2 and failed.stdout == ""
    assert failed.stderr.count("\n") == 1 and "--workdir beside --from" in failed.stderr
    assert list(tmp_path.iterdir()) == []
