"""EAGLE-3 to files and back: every flag, every byte, both layouts, and what files can say wrongly.

pytest tests/test_eagle3_files.py
"""

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from eagle3_reference import EAGLE3
from safetensors.numpy import load_file, save_file

from dspark_jax.convert import convert
from dspark_jax.core.config import DrafterConfig, Eagle3Config
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import EAGLE3_LOSS
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
from dspark_jax.weights.compare import canonical, empty_drafter
from dspark_jax.weights.config_parts import Origin, Verifier
from dspark_jax.weights.export import export_drafter, same_bits
from dspark_jax.weights.fingerprint import Fingerprint, fingerprint
from dspark_jax.weights.importing import read_folder
from dspark_jax.weights.safetensors import target_config

TARGET = TargetConfig("qwen3", 24, 16, 6, 4, 2, 8, 32, 1e-5, RopeConfig(1e4), False, 64)
CONFIG = DrafterConfig(target_layer_ids=(0, 2, 4), block_size=5, **EAGLE3)
VERIFIER = Verifier("some/target", ("Qwen3ForCausalLM",))
ORIGIN = Origin(7, {"seed": 1}, Fingerprint("some/target", "a", "b", "c"))
DRAFT_IDS = np.array([0, 3, 4, 7, 8, 11, 15, 16, 20, 23], np.int32)
HEAD = np.random.default_rng(2).standard_normal((24, 16), np.float32)
EMBED = np.random.default_rng(3).standard_normal((24, 16), np.float32)
FLAGS = {
    "public": {},
    "residual": {"norm_before_residual": True, "fc_norm": True},
    "output": {"norm_output": True, "norm_before_fc": True},
    "llama": {"qk_norm": False},
}


@pytest.fixture(autouse=True, scope="module")
def mesh():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh()):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


def make_shape(flags=None, **changes) -> DrafterShape:
    config = dataclasses.replace(CONFIG, eagle3=Eagle3Config(**(flags or {})), **changes)
    return DrafterShape.of(config, TARGET)


def make_arrays(shape: DrafterShape) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        name: DRAFT_IDS if name == "draft_ids" else rng.standard_normal(x.shape, np.float32) * 0.4
        for name, x in named(empty_drafter(shape)).items()
    }


def export(directory, shape, layout="speculators", **options):
    arrays = make_arrays(shape)
    shared = {"lm_head.weight": HEAD[DRAFT_IDS] if shape.pruned else HEAD}
    shared["embed_tokens.weight"] = EMBED
    export_drafter(
        arrays, shape, VERIFIER, directory, ORIGIN, layout=layout, shared=shared, **options
    )
    return directory


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """One export of each layout that tests copy and damage."""
    folder = tmp_path_factory.mktemp("exports")
    return {
        "speculators": export(folder / "s", make_shape()),
        "deepspec": export(folder / "d", make_shape(), "deepspec"),
    }


def edit(folder, change) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


LAYER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "layer_types": ["full_attention"],
    "max_position_embeddings": 64,
    "vocab_size": 24,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def test_config_of_the_speculators_layout(exported):
    """Field by field what speculators 0.9 and vLLM 0.32 look for; the layers from 1."""
    assert json.loads((exported["speculators"] / "config.json").read_text()) == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": {"model_type": "qwen3", **LAYER, "num_aux_hidden_states": 3},
        "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        "draft_vocab_size": 24,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "rope_theta": 1e4,
    }


def test_config_of_the_deepspec_layout(exported):
    """The layers from 0, and the three fields that Qwen3Eagle3Model asks for."""
    assert json.loads((exported["deepspec"] / "config.json").read_text()) == {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        **LAYER,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "target_layer_ids": [0, 2, 4],
        "num_target_layers": 6,
        "ttt_length": 5,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "dtype": "float32",
        "rope_theta": 1e4,
    }


BACKBONE = {
    "fc.weight": (16, 48),
    "norm.weight": (16,),
    "layers.0.self_attn.q_proj.weight": (32, 32),
    "layers.0.self_attn.k_proj.weight": (16, 32),
    "layers.0.self_attn.v_proj.weight": (16, 32),
    "layers.0.self_attn.o_proj.weight": (16, 32),
    "layers.0.self_attn.q_norm.weight": (8,),
    "layers.0.self_attn.k_norm.weight": (8,),
    "layers.0.mlp.gate_proj.weight": (32, 16),
    "layers.0.mlp.up_proj.weight": (32, 16),
    "layers.0.mlp.down_proj.weight": (16, 32),
    "layers.0.input_layernorm.weight": (16,),
    "layers.0.hidden_norm.weight": (16,),
    "layers.0.post_attention_layernorm.weight": (16,),
}


def test_tensors_of_both_layouts(exported):
    found = {name: load_file(path / "model.safetensors") for name, path in exported.items()}
    shapes = {name: {k: x.shape for k, x in tensors.items()} for name, tensors in found.items()}
    borrowed = {"lm_head.weight": (24, 16), "embed_tokens.weight": (24, 16)}
    assert shapes["speculators"] == shapes["deepspec"] == BACKBONE | borrowed
    arrays = make_arrays(make_shape())
    for tensors in found.values():
        assert (tensors["lm_head.weight"] == HEAD).all()
        assert (tensors["embed_tokens.weight"] == EMBED).all()
        k = arrays["layers.0.attention.k"]  # [K, H, 2D]: the embedding's half comes first
        assert (tensors["layers.0.self_attn.k_proj.weight"] == k.reshape(16, 32)).all()


def test_a_pruned_vocabulary_has_its_tables_and_its_rows(tmp_path):
    shape = make_shape(vocab_size=10)
    folder = export(tmp_path / "pruned", shape)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    assert (tensors["d2t"] + np.arange(10) == DRAFT_IDS).all()
    assert (np.flatnonzero(tensors["t2d"]) == DRAFT_IDS).all() and len(tensors["t2d"]) == 24
    assert (tensors["lm_head.weight"] == HEAD[DRAFT_IDS]).all()
    assert (tensors["embed_tokens.weight"] == EMBED).all()
    config = json.loads((folder / "config.json").read_text())
    assert config["draft_vocab_size"] == 10
    assert config["transformer_layer_config"]["vocab_size"] == 24  # the target's (R116)
    assert same_bits(read_folder(folder).arrays["draft_ids"], DRAFT_IDS)


@pytest.mark.parametrize("case", FLAGS)
def test_every_flag_comes_back(case, tmp_path):
    """R113: in the layout that has it, and refused by name in the one that has not."""
    flags = FLAGS[case]
    shape = make_shape(flags, target_layer_ids=(-1, 1, 2, 3), block_size=3)
    found = read_folder(export(tmp_path / "s", shape))
    assert canonical(found.shape) == canonical(shape)
    assert found.layout == "speculators" and found.verifier == "some/target"
    for name, array in make_arrays(shape).items():
        assert same_bits(found.arrays[name], array), name
    if not flags:
        return
    with pytest.raises(UserError, match="|".join(f"drafter.eagle3.{name}" for name in flags)):
        export(tmp_path / "d", shape, "deepspec")
    assert not (tmp_path / "d").exists()


def test_the_decay_of_training_is_deepspecs_to_keep(tmp_path):
    shape = make_shape({"step_loss_decay": 0.7})
    found = read_folder(export(tmp_path / "d", shape, "deepspec"))
    assert found.shape.config.eagle3.step_loss_decay == 0.7
    assert found.shape.target_layers == 6 and found.layout == "deepspec"
    assert canonical(found.shape) == canonical(shape) == canonical(make_shape())


def test_deepspec_has_no_pruned_vocabulary(tmp_path):
    with pytest.raises(UserError, match="drafter.vocab_size=10"):
        export(tmp_path / "d", make_shape(vocab_size=10), "deepspec")


def test_bfloat16_is_kept_by_value(tmp_path):
    found = read_folder(export(tmp_path / "b", make_shape(), dtype="bfloat16"))
    for name, array in make_arrays(make_shape()).items():
        assert same_bits(found.arrays[name], array.astype(ml_dtypes.bfloat16)), name


def drop(name: str):
    return lambda c: (c if name in c else c["transformer_layer_config"]).pop(name)


def put(**values):
    return lambda c: c.update(values)


def layer(**values):
    return lambda c: c["transformer_layer_config"].update(values)


@pytest.mark.parametrize(
    "change, told",
    [
        (drop("norm_before_residual"), "norm_before_residual is missing"),
        (drop("eagle_aux_hidden_state_layer_ids"), "never guessed"),
        (drop("draft_vocab_size"), "draft_vocab_size is missing"),
        (put(draft_vocab_size=25), "draft_vocab_size=25, vocab_size=24"),
        (put(draft_vocab_size=12), "have no d2t"),
        (put(embed_requires_grad=True), "embed_requires_grad"),
        (put(norm_before_fc=True, fc_norm=True), "exclude each other"),
        (put(norm_output=1), "norm_output=1"),
        (put(target_hidden_size=8), "target_hidden_size=8"),
        (put(eagle_aux_hidden_state_layer_ids=[3, 1, 5]), "does not ascend"),
        (put(eagle_aux_hidden_state_layer_ids=[1, 3]), "takes 3 taps, config.json lists 2"),
        (layer(num_hidden_layers=2, layer_types=["full_attention"] * 2), "num_hidden_layers=2"),
        (layer(model_type="deepseek_v3"), "model_type='deepseek_v3'"),
        (layer(model_type="llama"), "unknown layers.0.self_attn.k_norm"),
        (put(speculators_config={}), "speculative_tokens=None"),
        (put(speculators_model_type="peagle"), "peagle"),
    ],
)
def test_what_speculators_files_can_say_wrongly(exported, tmp_path, change, told):
    folder = shutil.copytree(exported["speculators"], tmp_path / "x")
    edit(folder, change)
    with pytest.raises(UserError, match=told):
        read_folder(folder)


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda c: c.pop("ttt_length"), "ttt_length is missing"),
        (lambda c: c.pop("step_loss_decay"), "step_loss_decay is missing"),
        (put(step_loss_decay=0), "step_loss_decay=0"),
        (lambda c: c.pop("target_layer_ids"), "never guessed"),
        (put(architectures=["Gemma4Eagle3Model"], model_type="gemma4_text"), "gemma4_text"),
        (put(architectures=["Qwen3Eagle2Model"]), "Qwen3Eagle2Model"),
    ],
)
def test_what_deepspec_files_can_say_wrongly(exported, tmp_path, change, told):
    folder = shutil.copytree(exported["deepspec"], tmp_path / "x")
    edit(folder, change)
    with pytest.raises(UserError, match=told):
        read_folder(folder)


@pytest.mark.parametrize("name", ["layers.0.hidden_norm.weight", "fc.weight"])
def test_a_missing_or_foreign_tensor_is_named(exported, tmp_path, name):
    folder = shutil.copytree(exported["speculators"], tmp_path / "x")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"midlayer.{name}"] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"missing {name}; unknown midlayer.{name}"):
        read_folder(folder)


# The command, on a real target directory.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that holds an EAGLE-3 drafter with random weights, and its arrays."""
    folder = tmp_path_factory.mktemp("run")
    directory = tiny.make_target(folder / "target")
    changes = {f"drafter.{name}": value for name, value in EAGLE3.items()}
    config = tiny.make_config(directory, tiny.write_prompts(folder / "p.jsonl", 2), changes)
    config = dataclasses.replace(config, loss=EAGLE3_LOSS)
    shape = target_config(directory, "float32")
    found = fingerprint(directory, str(directory))
    record = RunRecord(config, found, str(directory), shape, ("LlamaForCausalLM",))
    write_record(folder / "run", record)
    arrays = make_arrays(record.shape)
    save_drafter(folder / "run", arrays, 3)
    return folder, record, arrays


def test_from_any_layout_to_any(run, tmp_path, capsys):
    """Run -> speculators -> DeepSpec -> run -> speculators: the same bits at the end."""
    folder, record, arrays = run
    convert(str(folder / "run"), "speculators", tmp_path / "s")
    assert f"vllm serve {tmp_path / 's'}" in capsys.readouterr().out
    convert(str(tmp_path / "s"), "deepspec", tmp_path / "d")
    assert "not for vLLM: vLLM does not know" in capsys.readouterr().out
    convert(str(tmp_path / "d"), "orbax", tmp_path / "o")
    convert(str(tmp_path / "o"), "speculators", tmp_path / "s2")
    back = load_arrays(tmp_path / "o", 3)
    assert set(back) == set(arrays) and all(same_bits(back[k], x) for k, x in arrays.items())
    assert read_record(tmp_path / "o").config.drafter == record.config.drafter
    for name in ("config.json", "model.safetensors"):
        first, last = ((tmp_path / s / name).read_bytes() for s in ("s", "s2"))
        assert first == last, name


def test_a_folder_without_our_record_becomes_a_run_that_trains_as_eagle3(run, tmp_path):
    """As the released directories are: no dspark_jax.json, and the target is to be named."""
    folder, record, arrays = run
    convert(str(folder / "run"), "deepspec", tmp_path / "d")
    (tmp_path / "d" / "dspark_jax.json").unlink()
    with pytest.raises(UserError, match="names no target"):
        convert(str(tmp_path / "d"), "orbax", tmp_path / "o")
    convert(str(tmp_path / "d"), "orbax", tmp_path / "o", target=str(folder / "target"))
    made = read_record(tmp_path / "o")
    assert made.config.loss == EAGLE3_LOSS
    assert canonical(made.shape) == canonical(record.shape)
    assert all(same_bits(load_arrays(tmp_path / "o", 0)[k], x) for k, x in arrays.items())
