"""Reading targets from files, names, and fingerprints: pytest tests/test_weights.py"""

import dataclasses
import functools
import json
import math
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from tiny_targets import model_config, random_tensors, write_model

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import abstract, make_mesh
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.target import Target, TargetConfig
from dspark_jax.weights import names
from dspark_jax.weights.fingerprint import Fingerprint, check_same_target, fingerprint
from dspark_jax.weights.safetensors import TensorFiles, load_target

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh()):
        yield


@pytest.fixture
def model(tmp_path):
    """A small Qwen3 in one file: (directory, config, tensors)."""
    config = model_config("qwen3", head_dim=16)
    tensors = random_tensors(config)
    return write_model(tmp_path / "model", config, tensors), config, tensors


def in_file(config, ours, array):
    """One of our arrays under its name and in its shape in the file."""
    theirs, rows = names.to_file(names.TARGET, ours)
    return theirs, np.asarray(array).reshape(names.file_shape(array.shape, rows))


# Names


def target_parameters(**changes):
    config = TargetConfig.from_hf(model_config(**changes), "float32")
    return named(abstract(lambda key: Target(config, rngs=nnx.Rngs(key)), jax.random.key(0)))


def drafter_parameters(**changes):
    target = TargetConfig.from_hf(model_config(), "float32")
    options = {"markov_head": "vanilla", "markov_rank": 4, "num_layers": 2} | changes
    config = DrafterConfig(target_layer_ids=(0, 1), mask_token_id=3, **options)
    shape = DrafterShape.of(config, target)
    return named(abstract(lambda key: Drafter(shape, rngs=nnx.Rngs(key)), jax.random.key(0)))


EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "num_hidden_layers": 2}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
VARIANTS = {
    "qwen3_moe": (
        names.TARGET,
        target_parameters,
        {"family": "qwen3_moe", "num_experts_per_tok": 2, "norm_topk_prob": True, **EXPERTS},
    ),
    "gemma4": (
        names.TARGET,
        target_parameters,
        {
            "family": "gemma4_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
            "sliding_window": 4,
            "hidden_size_per_layer_input": 8,
            "enable_moe_block": True,
            "top_k_experts": 2,
            **EXPERTS,
        },
    ),
    "llama": (names.TARGET, target_parameters, {}),
    "llama, tied": (names.TARGET, target_parameters, {"tie_word_embeddings": True}),
    "qwen3": (names.TARGET, target_parameters, {"family": "qwen3", "num_hidden_layers": 11}),
    "vanilla": (names.DRAFTER, drafter_parameters, {}),
    "gated": (names.DRAFTER, drafter_parameters, {"markov_head": "gated"}),
    "rnn": (names.DRAFTER, drafter_parameters, {"markov_head": "rnn"}),
    "dflash": (
        names.DRAFTER,
        drafter_parameters,
        {"markov_head": "none", "markov_rank": 0, "confidence_head": False},
    ),
}


@pytest.fixture(scope="module")
def parameters_of():
    """Variant -> its parameters by name, traced once."""

    @functools.cache
    def trace(variant):
        _, parameters, changes = VARIANTS[variant]
        with jax.set_mesh(make_mesh()):
            return parameters(**changes)

    return trace


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_are_one_to_one(variant, parameters_of):
    table, ours = VARIANTS[variant][0], parameters_of(variant)
    theirs = {name: names.to_file(table, name)[0] for name in ours}
    assert len(set(theirs.values())) == len(ours)
    assert {names.from_file(table, theirs[name]) for name in ours} == set(ours)
    assert all(names.from_file(table, theirs[name]) == name for name in ours)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_target_names_are_those_of_the_files(variant, parameters_of):
    ours = parameters_of(variant)
    files = random_tensors(model_config(**VARIANTS[variant][2]))
    found = {}
    for name, array in ours.items():
        theirs, rows = names.to_file(names.TARGET, name)
        found[theirs] = names.file_shape(array.shape, rows)
    assert found == {name: tensor.shape for name, tensor in files.items()}


def test_every_rule_is_used_by_some_model(parameters_of):
    used = {names.TARGET: set(), names.DRAFTER: set()}
    for variant, (table, _, _) in VARIANTS.items():
        for name in parameters_of(variant):
            layer = [part for part in name.split(".") if part.isdigit()]
            used[table].add(name.replace(layer[0], "{}", 1) if layer else name)
    for table, paths in used.items():
        assert {rule.ours for rule in table} == paths


def test_names_of_another_model():
    for wrong in ("model.layers.0.self_attn.q_proj.bias", "model.layers.x.mlp.up_proj.weight", ""):
        with pytest.raises(UserError, match="does not belong"):
            names.from_file(names.TARGET, wrong)
    with pytest.raises(KeyError):
        names.to_file(names.TARGET, "layers.0.attention.bias")


@pytest.mark.parametrize(
    ("shape", "rows", "index"),
    [
        ((2, 3, 4, 8), 3, (slice(1, 2), slice(None), slice(None), slice(4, 8))),  # q
        ((2, 4, 8), 2, (slice(0, 1), slice(0, 4), slice(2, 4))),  # k, v
        ((8, 2, 3, 4), 1, (slice(2, 4), slice(1, 2), slice(None), slice(None))),  # o
        ((6, 8), 0, (slice(3, 6), slice(None))),
        ((8,), 0, (slice(None),)),
    ],
)
def test_a_shard_is_a_slice_of_the_file(shape, rows, index):
    array = np.arange(math.prod(shape)).reshape(shape)
    part = array.reshape(names.file_shape(shape, rows))[names.file_slices(index, shape, rows)]
    np.testing.assert_array_equal(part.reshape(array[index].shape), array[index])


def test_folded_axes_cannot_be_cut():
    index = (slice(None), slice(0, 1), slice(None), slice(None))
    with pytest.raises(ValueError, match="cannot cut"):
        names.file_slices(index, (2, 3, 4, 8), 3)


# Files


@pytest.mark.parametrize("seed", [0, 1])
def test_shards_in_any_order(model, tmp_path, seed):
    """Which file holds what, and the order of the index, change nothing (R108)."""
    directory, config, tensors = model
    split = write_model(tmp_path / "split", config, tensors, files=3, seed=seed)
    index = json.loads((split / INDEX).read_text())["weight_map"]
    assert list(index) != sorted(index) and len(set(index.values())) == 3
    whole, parts = named(load_target(directory, "float32")), named(load_target(split, "float32"))
    assert set(whole) == set(parts) and len(whole) == len(tensors)
    for ours, array in whole.items():
        theirs, values = in_file(config, ours, array)
        np.testing.assert_array_equal(values, tensors[theirs], ours)
        np.testing.assert_array_equal(array, parts[ours], ours)


def test_each_device_reads_only_its_shard(model, tmp_path, monkeypatch):
    _, config, tensors = model
    split = write_model(tmp_path / "split", config, tensors, files=3)
    reads = {}

    class Counted:
        def __init__(self, name, lazy):
            self.name, self.lazy = name, lazy
            self.get_shape, self.get_dtype = lazy.get_shape, lazy.get_dtype

        def __getitem__(self, index):
            part = self.lazy[index]
            reads.setdefault(self.name, []).append(part.size)
            return part

    real = TensorFiles.slice
    monkeypatch.setattr(TensorFiles, "slice", lambda self, name: Counted(name, real(self, name)))
    with jax.set_mesh(make_mesh(4, 2)):
        target = load_target(split, "float32")
    assert set(reads) == set(tensors)
    for ours, array in named(target).items():
        theirs, _ = names.to_file(names.TARGET, ours)
        shards = {s.data.size for s in array.addressable_shards}
        assert set(reads[theirs]) == shards, ours
        matrix = tensors[theirs].ndim == 2
        assert shards == {array.size // 8 if matrix else array.size}, ours
        assert sum(reads[theirs]) == array.size  # no byte twice
        for shard in array.addressable_shards:
            whole = tensors[theirs].reshape(array.shape)
            np.testing.assert_array_equal(shard.data, whole[shard.index])


def drop_tensor(directory, name):
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors")


def change_tensor(directory, name, change):
    tensors = load_file(directory / "model.safetensors")
    tensors[name] = change(tensors.get(name))
    save_file(tensors, directory / "model.safetensors")


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


Q = "model.layers.1.self_attn.q_proj.weight"
DAMAGE = {
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json: no such file"),
    "config cut": (lambda d: os.truncate(d / "config.json", 20), "config.json: not readable"),
    "config a list": (lambda d: (d / "config.json").write_text("[]"), "must hold a JSON object"),
    "file cut": (lambda d: os.truncate(d / "model.safetensors", 5000), "model.safetensors: damag"),
    "file empty": (lambda d: os.truncate(d / "model.safetensors", 0), "model.safetensors: damag"),
    "head missing": (lambda d: drop_tensor(d, "lm_head.weight"), "'lm_head.weight' is missing"),
    "tensor missing": (lambda d: drop_tensor(d, Q), f"'{Q}' is missing"),
    "bias": (
        lambda d: change_tensor(d, Q.replace("weight", "bias"), lambda _: np.zeros(4, np.float32)),
        "q_proj.bias' has no place",
    ),
    "more layers": (lambda d: change_config(d, num_hidden_layers=2), "layers.2.* has no place"),
    "wrong shape": (
        lambda d: change_tensor(d, Q, lambda q: np.ascontiguousarray(q[:, :16])),
        rf"'{Q}' has shape \[64, 16\], config.json implies \[64, 32\]",
    ),
    "transposed": (
        lambda d: change_tensor(d, Q, lambda q: np.ascontiguousarray(q.T)),
        r"has shape \[32, 64\]",
    ),
    "integers": (lambda d: change_tensor(d, Q, lambda q: q.astype(np.int8)), "dtype I8"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_model(model, name):
    directory, _, _ = model
    damage, message = DAMAGE[name]
    damage(directory)
    with pytest.raises(UserError, match=message) as caught:
        load_target(directory, "float32")
    assert str(directory) in str(caught.value) and "\n" not in str(caught.value)


SHARD_2 = "model-00002-of-00003.safetensors"
DAMAGED_SHARDS = {
    "missing": (lambda d: (d / SHARD_2).unlink(), f"index names {SHARD_2}, which is missing"),
    "cut": (lambda d: os.truncate(d / SHARD_2, 3000), f"{SHARD_2}: damaged"),
    "exchanged": (
        lambda d: (d / SHARD_2).write_bytes((d / SHARD_2.replace("2", "1", 1)).read_bytes()),
        f"{SHARD_2}: tensor .* cannot be read",
    ),
    "index cut": (lambda d: os.truncate(d / INDEX, 100), f"{INDEX}: not readable"),
    "index empty": (lambda d: (d / INDEX).write_text("{}"), f"{INDEX}: has no weight_map"),
}


@pytest.mark.parametrize("name", DAMAGED_SHARDS)
def test_damaged_shards(model, tmp_path, name):
    _, config, tensors = model
    split = write_model(tmp_path / "split", config, tensors, files=3)
    damage, message = DAMAGED_SHARDS[name]
    damage(split)
    with pytest.raises(UserError, match=message) as caught:
        load_target(split, "float32")
    assert str(split) in str(caught.value) and "\n" not in str(caught.value)


def test_mesh_that_does_not_divide_the_target(model):
    directory, _, _ = model
    with (
        jax.set_mesh(make_mesh(1, 4)),
        pytest.raises(UserError, match="num_kv_heads=2 .* 4 parts.*mesh.tp"),
    ):
        load_target(directory, "float32")


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_stored_dtypes_are_converted_by_value(tmp_path, stored):
    """Never by their bits (R017, R111); a tied head's second copy in the file is not read."""
    config = model_config(tie_word_embeddings=True)
    tensors = {k: v.astype(stored) for k, v in random_tensors(config).items()}
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    directory = write_model(tmp_path, config, tensors | extra)
    for dtype in ("float32", "bfloat16"):
        for ours, array in named(load_target(directory, dtype)).items():
            theirs, values = in_file(config, ours, array)
            assert array.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(values, tensors[theirs].astype(dtype), ours)


def test_tied_head_follows_the_embedding(tmp_path):
    """One leaf, no alias that could go stale (R109)."""
    config = model_config(tie_word_embeddings=True, num_hidden_layers=1)
    target = load_target(write_model(tmp_path, config, random_tensors(config)), "float32")
    arrays = named(target)
    assert "lm_head" not in arrays
    swapped = np.random.default_rng(9).normal(size=arrays["embed"].shape).astype(np.float32)
    target = with_arrays(target, arrays | {"embed": jnp.asarray(swapped)})
    hidden = np.random.default_rng(8).normal(size=(1, 3, 32)).astype(np.float32)
    logits = target.head.logits(jnp.asarray(hidden))
    np.testing.assert_allclose(logits, hidden @ swapped.T, rtol=1e-4, atol=1e-4)
    rows = target.head.embeddings(jnp.asarray([[5, 7]]), jnp.float32)
    np.testing.assert_array_equal(rows[0], swapped[[5, 7]])


# Fingerprints


@pytest.fixture
def known(model):
    directory, _, _ = model
    (directory / "tokenizer.json").write_text('{"model": 1}')
    return directory, fingerprint(directory, "tiny")


def test_copies_of_a_target_have_one_fingerprint(model, known, tmp_path):
    _, config, tensors = model
    _, expected = known
    copy = write_model(tmp_path / "copy", config, tensors, files=4)
    (copy / "tokenizer.json").write_text('{"model": 1}')
    change_config(copy, _name_or_path="elsewhere", transformers_version="6", dtype="bfloat16")
    found = fingerprint(copy, "copy")
    assert expected.differences(found) == [] and found.name == "copy"
    check_same_target(expected, found, "the drafter")  # a name is only a label


CHANGES = {
    "config": lambda d: change_config(d, rope_theta=5e5),
    "tokenizer": lambda d: (d / "tokenizer.json").write_text('{"model": 2}'),
    "weights": lambda d: change_tensor(
        d, "model.embed_tokens.weight", lambda x: x + 0.01 * (np.arange(96) == 95)[:, None]
    ),
}


@pytest.mark.parametrize("part", CHANGES)
def test_another_target_has_another_fingerprint(known, part):
    directory, expected = known
    CHANGES[part](directory)
    found = fingerprint(directory, "other")
    assert expected.differences(found) == [part]
    with pytest.raises(UserError) as caught:
        check_same_target(expected, found, "the data in runs/a")
    message = str(caught.value)
    assert message.startswith("the data in runs/a was made with target 'tiny', but target 'other'")
    assert f"has another {part}:" in message and "\n" not in message


def test_final_norm_is_part_of_the_fingerprint(known):
    directory, expected = known
    change_tensor(directory, "model.norm.weight", lambda x: x * 1.01)
    assert expected.differences(fingerprint(directory, "tiny")) == ["weights"]


def test_fingerprints_name_every_difference():
    one = Fingerprint("a", "1", "2", "3")
    two = dataclasses.replace(one, config="x", weights="y")
    with pytest.raises(UserError, match="another config and weights"):
        check_same_target(one, two, "the drafter")


def test_a_fingerprint_reads_only_the_files_it_needs(model, tmp_path):
    """Two of four shards are garbage: embedding and norm are not in them (R119)."""
    _, config, tensors = model
    split = write_model(tmp_path / "split", config, tensors, files=4)
    expected = fingerprint(split, "tiny")
    index = json.loads((split / INDEX).read_text())["weight_map"]
    needed = {index["model.embed_tokens.weight"], index["model.norm.weight"]}
    spare = set(index.values()) - needed
    assert len(spare) >= 2
    for file in spare:
        (split / file).write_bytes(b"garbage")
    assert fingerprint(split, "tiny") == expected
    with pytest.raises(UserError, match="damaged"):
        load_target(split, "float32")
