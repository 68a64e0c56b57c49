"""Drafters in every layout: DeepSpec's, written here by hand, against loops; any to any, exactly.

pytest tests/test_formats.py
"""

import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_convert import make_target

from dspark_jax.convert import convert
from dspark_jax.core.config import DataConfig, DrafterConfig, RunConfig, TrainConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named
from dspark_jax.models.target import TargetHead
from dspark_jax.training.checkpoint import (
    RunRecord,
    load_arrays,
    load_drafter,
    read_record,
    save_drafter,
    write_record,
)
from dspark_jax.training.drafters import open_drafter
from dspark_jax.weights.compare import (
    Probe,
    build_drafter,
    canonical,
    draft_outputs,
    empty_drafter,
)
from dspark_jax.weights.fingerprint import fingerprint
from dspark_jax.weights.importing import read_folder
from dspark_jax.weights.safetensors import target_config

SLOW = pytest.mark.slow
BF16 = ml_dtypes.bfloat16
D, V, HEADS, KV, DIM, MLP, RANK, BLOCK, MASK = 16, 24, 4, 2, 4, 32, 4, 3, 5
TAPS, THETA, EPS = (0, 3), 1e4, 1e-5


@pytest.fixture(autouse=True, scope="module")
def mesh():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh()):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("targets") / "target", tied=False)


# ---------------------------------------------------------------------------------------------
# DeepSpec's layout, from its public names: no writer of ours has touched these files.


def deepspec_config(head: str, confidence: str, layers: int = 1) -> dict:
    """`confidence`: none, hidden or markov, by what the head is shown."""
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": BLOCK,
        "bos_token_id": 1,
        "enable_confidence_head": confidence != "none",
        "head_dim": DIM,
        "hidden_act": "silu",
        "hidden_size": D,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "layer_types": ["full_attention"] * layers,
        "markov_rank": 0 if head == "none" else RANK,
        "mask_token_id": MASK,
        "max_position_embeddings": 64,
        "max_window_layers": 6,
        "model_type": "qwen3",
        "num_anchors": 8,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV,
        "num_target_layers": 6,
        "rms_norm_eps": EPS,
        "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        "sliding_window": None,
        "target_layer_ids": list(TAPS),
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": V,
    }
    if head != "none":
        config["markov_head_type"] = head
    if confidence != "none":
        config["confidence_head_with_markov"] = confidence == "markov"
    return config


def deepspec_tensors(head: str, confidence: str, layers: int = 1) -> dict[str, np.ndarray]:
    shapes = {"fc": (D, len(TAPS) * D), "hidden_norm": (D,), "norm": (D,)}
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * DIM, D),
                "self_attn.k_proj": (KV * DIM, D),
                "self_attn.v_proj": (KV * DIM, D),
                "self_attn.o_proj": (D, HEADS * DIM),
                "self_attn.q_norm": (DIM,),
                "self_attn.k_norm": (DIM,),
                "mlp.gate_proj": (MLP, D),
                "mlp.up_proj": (MLP, D),
                "mlp.down_proj": (D, MLP),
                "input_layernorm": (D,),
                "post_attention_layernorm": (D,),
            }.items()
        }
    shapes = {f"{name}.weight": shape for name, shape in shapes.items()}
    if head != "none":
        shapes["markov_head.markov_w1.weight"] = shapes["markov_head.markov_w2.weight"] = (V, RANK)
    if head == "gated":
        shapes["markov_head.gate_proj.weight"] = (RANK, D + RANK)
        shapes["markov_head.gate_proj.bias"] = (RANK,)
    if head == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + D)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    if confidence != "none":
        wide = D + (RANK if confidence == "markov" else 0)
        shapes["confidence_head.proj.weight"] = (1, wide)
        shapes["confidence_head.proj.bias"] = (1,)
    rng = np.random.default_rng(5)
    return {
        name: (rng.standard_normal(shape) * 0.4 + ("norm" in name)).astype(np.float32)
        for name, shape in shapes.items()
    }


def tables(target) -> dict[str, np.ndarray]:
    stored = load_file(target / "model.safetensors")
    embed = stored["model.embed_tokens.weight"]
    return {"embed_tokens.weight": embed, "lm_head.weight": stored.get("lm_head.weight", embed)}


def write(directory, config: dict, tensors: dict[str, np.ndarray], files: int = 1):
    """Several files get an index, as transformers shards them."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    where = {}
    for number in range(files):
        name = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = list(tensors)[number::files]
        save_file({key: tensors[key] for key in part}, directory / name)
        where |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def cast(tensors: dict[str, np.ndarray], dtype) -> dict[str, np.ndarray]:
    return {name: tensor.astype(dtype) for name, tensor in tensors.items()}


def make_deepspec(directory, target, head="vanilla", confidence="markov", dtype=np.float32, **how):
    tensors = cast(deepspec_tensors(head, confidence) | tables(target), dtype)
    return write(directory, deepspec_config(head, confidence), tensors, **how)


class Loops:
    """DeepSpec's forward pass on the tensors of its files, float64, one number at a time."""

    def __init__(self, config: dict, tensors: dict[str, np.ndarray]):
        self.config = config
        self.w = {name: np.asarray(x, np.float64) for name, x in tensors.items()}

    def norm(self, x, name):
        return x / math.sqrt(float(x @ x) / len(x) + EPS) * self.w[f"{name}.weight"]

    def heads(self, x, name, count, position=None):
        """[count][DIM] of one token; with a position normed and rotated."""
        out = (self.w[f"{name}_proj.weight"] @ x).reshape(count, DIM)
        if position is None:
            return out
        turned = []
        for one in out:
            one, half = self.norm(one, f"{name}_norm"), DIM // 2
            angles = [position * THETA ** (-2 * i / DIM) for i in range(half)]
            cos, sin = np.cos(angles), np.sin(angles)
            low, high = one[:half], one[half:]
            turned.append(np.concatenate([low * cos - high * sin, high * cos + low * sin]))
        return turned

    def hidden(self, taps, anchor: int):
        """Post-norm states of the block at position len(taps)."""
        w, length = self.w, len(taps)
        context = [self.norm(w["fc.weight"] @ np.concatenate(list(tap)), "hidden_norm")
                   for tap in taps]  # fmt: skip
        xs = [w["embed_tokens.weight"][t] for t in [anchor] + [MASK] * (BLOCK - 1)]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"layers.{layer}."
            normed = [self.norm(x, at + "input_layernorm") for x in xs]
            seen = [*context, *normed]  # positions 0, 1, 2, ...
            keys = [self.heads(x, at + "self_attn.k", KV, p) for p, x in enumerate(seen)]
            values = [self.heads(x, at + "self_attn.v", KV) for x in seen]
            out = []
            for slot, x in enumerate(xs):
                queries = self.heads(normed[slot], at + "self_attn.q", HEADS, length + slot)
                mixed = []
                for head, query in enumerate(queries):
                    group = head // (HEADS // KV)
                    scores = np.exp([query @ key[group] / math.sqrt(DIM) for key in keys])
                    mixed.append(sum(s * v[group] for s, v in zip(scores / scores.sum(), values)))
                x = x + w[at + "self_attn.o_proj.weight"] @ np.concatenate(mixed)
                inner = self.norm(x, at + "post_attention_layernorm")
                gate, up = (w[f"{at}mlp.{n}_proj.weight"] @ inner for n in ("gate", "up"))
                x = x + w[at + "mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
                out.append(x)
            xs = out
        return [self.norm(x, "norm") for x in xs]

    def bias(self, h, e, state):
        """Of the Markov head, and its next state."""
        w, kind = self.w, self.config.get("markov_head_type")
        if kind == "gated":
            gate = w["markov_head.gate_proj.weight"] @ np.concatenate([h, e])
            e = e / (1 + np.exp(-gate - w["markov_head.gate_proj.bias"]))
        if kind == "rnn":
            z = w["markov_head.joint_proj.weight"] @ np.concatenate([state, e, h])
            g, c, o = np.split(z + w["markov_head.joint_proj.bias"], 3)
            g = 1 / (1 + np.exp(-g))
            state, e = g * state + (1 - g) * np.tanh(c), np.tanh(o)
        return w["markov_head.markov_w2.weight"] @ e, state

    def __call__(self, taps, tokens):
        """Logits [BLOCK][V] and confidence logits, where tokens[k] is the token before slot k's."""
        w, logits, sure, state = self.w, [], [], np.zeros(RANK)
        for h, token in zip(self.hidden(taps, tokens[0]), tokens):
            z, seen = w["lm_head.weight"] @ h, h
            if self.config["markov_rank"]:
                e = w["markov_head.markov_w1.weight"][token]
                bias, state = self.bias(h, e, state)
                z = z + bias
                if self.config.get("confidence_head_with_markov"):
                    seen = np.concatenate([h, e])
            logits.append(z)
            if self.config["enable_confidence_head"]:
                sure.append(
                    w["confidence_head.proj.weight"][0] @ seen + w["confidence_head.proj.bias"][0]
                )
        return np.array(logits), np.array(sure)


def answers(shape, arrays, shared: dict[str, np.ndarray]):
    """Our drafter's logits and confidence on a fixed input, and that input."""
    rng = np.random.default_rng(3)
    taps = rng.standard_normal((2, 4, len(TAPS), D)).astype(np.float32)
    tokens = rng.integers(0, V, (2, BLOCK)).astype(np.int32)
    embed, head = (place(x.astype(np.float32), "vocab", "embed") for x in shared.values())
    probe = Probe(
        TargetHead(embed, head),
        place(taps, "batch", None, None, None),
        place(tokens, "batch", None),
        place(np.zeros((2, 4), np.int32), "batch", None),
    )
    return *draft_outputs(build_drafter(canonical(shape), arrays), probe), taps, tokens


@pytest.mark.parametrize(
    "head, confidence, dtype",
    [
        ("vanilla", "markov", BF16),
        ("gated", "hidden", np.float32),
        ("rnn", "markov", np.float32),
        ("none", "none", BF16),  # DeepSpec's DFlash: the same class, rank 0
        ("vanilla", "none", np.float32),
    ],
)
def test_a_deepspec_folder_gives_what_its_loops_give(head, confidence, dtype, target, tmp_path):
    config = deepspec_config(head, confidence, layers=2)
    shared = cast(tables(target), dtype)
    tensors = cast(deepspec_tensors(head, confidence, layers=2), dtype)
    found = read_folder(write(tmp_path / "a", config, tensors | shared, files=3))
    logits, sure, taps, tokens = answers(found.shape, found.arrays, shared)
    loops = Loops(config, tensors | shared)
    assert (sure is None) == (confidence == "none")
    for row in range(2):
        wanted, wanted_sure = loops(taps[row], tokens[row])
        np.testing.assert_allclose(logits[row], wanted, rtol=2e-4, atol=2e-4)
        if sure is not None:
            np.testing.assert_allclose(sure[row], wanted_sure, rtol=2e-4, atol=2e-4)
    assert {x.dtype for x in found.arrays.values()} == {np.dtype(dtype)}  # as stored
    assert found.layout == "deepspec" and found.shape.target_layers == 6


# ---------------------------------------------------------------------------------------------
# Any to any.


def make_run(workdir, target, dtypes, **changes):
    """A run of an import, with a checkpoint at step 7; dtypes[i % n] for the i-th array."""
    drafter = {"target_layer_ids": TAPS, "mask_token_id": MASK, "block_size": BLOCK,
               "num_layers": 1, "markov_rank": RANK, **changes}  # fmt: skip
    config = RunConfig(
        target=str(target),
        data=DataConfig("generator:8"),
        drafter=DrafterConfig(**drafter),
        target_dtype="float32",
        train=TrainConfig(num_anchors=8),
    )
    shape = target_config(target, "float32")
    record = RunRecord(
        config, fingerprint(target, str(target)), str(target), shape, ("LlamaForCausalLM",)
    )
    write_record(workdir, record)
    rng = np.random.default_rng(1)
    arrays = {}
    for number, (name, leaf) in enumerate(named(empty_drafter(record.shape)).items()):
        dtype = dtypes[number % len(dtypes)]
        arrays[name] = (rng.standard_normal(leaf.shape) * 0.4).astype(dtype)
    if record.shape.pruned:
        size = record.shape.draft_vocab
        arrays["draft_ids"] = np.sort(rng.choice(V, size, replace=False)).astype(np.int32)
    save_drafter(workdir, arrays, 7)
    return arrays


def content(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def same_arrays(a, b) -> bool:
    return set(a) == set(b) and all(
        (a[n].dtype, a[n].shape, a[n].tobytes()) == (b[n].dtype, b[n].shape, b[n].tobytes())
        for n in a
    )


BARE = {"markov_head": "none", "markov_rank": 0, "confidence_head": False}
ROUND = {
    "vanilla bf16": ([BF16], {}),
    "gated mixed": ([np.float32, BF16], {"markov_head": "gated", "confidence_with_markov": False}),
    "rnn": ([np.float32], {"markov_head": "rnn", "confidence_head": False}),
    "deepspec's dflash": ([BF16], BARE),
    "dflash": ([np.float32], {**BARE, "sample_from_anchor": False}),
    "confidence alone f16": ([np.float16], {**BARE, "confidence_head": True}),
}


@pytest.mark.parametrize("case", [*list(ROUND)[:-1], pytest.param(list(ROUND)[-1], marks=SLOW)])
def test_run_deepspec_speculators_and_back(case, target, tmp_path, capsys):
    dtypes, changes = ROUND[case]
    arrays = make_run(tmp_path / "run", target, dtypes, **changes)
    source = str(tmp_path / "run")
    hops = ["deepspec", "speculators", "orbax", "speculators", "deepspec"]
    for number, layout in enumerate(hops):
        out = tmp_path / f"{number}"
        convert(source, layout, out, force=layout == "speculators")
        source = str(out)
    assert content(tmp_path / "0") == content(tmp_path / "4")
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert same_arrays(load_arrays(tmp_path / "2", 7), arrays)
    assert read_record(tmp_path / "2") == read_record(tmp_path / "run")
    drafter = load_drafter(read_record(tmp_path / "2"), tmp_path / "2", 7)  # as evaluate does
    assert all(
        np.array_equal(x, arrays[name].astype(np.float32)) for name, x in named(drafter).items()
    )
    stored = load_file(tmp_path / "0" / "model.safetensors")
    flat = json.loads((tmp_path / "0" / "config.json").read_text())
    fill_in = case == "dflash"
    assert flat["architectures"] == ["DFlashDraftModel" if fill_in else "Qwen3DSparkModel"]
    assert flat["sample_from_anchor"] is not fill_in
    assert flat["target_layer_ids"] == list(TAPS) and flat["num_target_layers"] == 6
    if fill_in:  # that class has no embedding and no head
        assert flat["dflash_config"] == {"mask_token_id": MASK, "target_layer_ids": list(TAPS)}
        assert not set(stored) & set(tables(target))
    else:
        assert flat["num_anchors"] == 8
        for name, table in tables(target).items():
            assert stored[name].tobytes() == table.tobytes()
        keys = set(deepspec_config(flat["markov_head_type"], "markov"))
        assert {"target_layer_ids", "markov_rank", "rope_parameters"} < keys & set(flat)
    said = capsys.readouterr().out
    assert "as stored" in said and "largest difference in logits, read back" in said


def test_a_pruned_vocabulary_has_no_place_in_deepspec(target, tmp_path):
    arrays = make_run(tmp_path / "run", target, [BF16], vocab_size=10)
    with pytest.raises(UserError, match=r"drafter\.vocab_size=10.*write speculators"):
        convert(str(tmp_path / "run"), "deepspec", tmp_path / "out", force=True)
    convert(str(tmp_path / "run"), "speculators", tmp_path / "a")
    convert(str(tmp_path / "a"), "orbax", tmp_path / "b")
    assert same_arrays(load_arrays(tmp_path / "b", 7), arrays)
    convert(str(tmp_path / "b"), "speculators", tmp_path / "c")
    assert content(tmp_path / "a") == content(tmp_path / "c")
    head = load_file(tmp_path / "a" / "model.safetensors")["lm_head.weight"]
    assert head.tobytes() == tables(target)["lm_head.weight"][arrays["draft_ids"]].tobytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c", "run"]


def test_heads_and_fill_in_have_no_place_in_deepspec(target, tmp_path):
    make_run(tmp_path / "run", target, [np.float32], sample_from_anchor=False)
    with pytest.raises(UserError, match=r"sample_from_anchor=False with markov_rank=4"):
        convert(str(tmp_path / "run"), "deepspec", tmp_path / "out", force=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("files", [1, 3])
def test_a_strangers_deepspec_folder_goes_everywhere(files, target, tmp_path, capsys):
    """No dspark_jax.json: the target is told, and nothing else is lost."""
    folder = make_deepspec(tmp_path / "a", target, dtype=BF16, files=files)
    with pytest.raises(UserError, match=r"names no target \(the deepspec layout.*--target"):
        convert(str(folder), "speculators", tmp_path / "b")
    convert(str(folder), "speculators", tmp_path / "b", target=str(target))
    convert(str(folder), "orbax", tmp_path / "c", target=str(target))
    record = read_record(tmp_path / "c")
    assert record.imported == str(folder) and record.config.train.num_anchors == 8
    convert(str(tmp_path / "b"), "deepspec", tmp_path / "d", dtype="bfloat16")
    again, source = (load_file(tmp_path / "d" / "model.safetensors"), deepspec_tensors(
        "vanilla", "markov") | tables(target))  # fmt: skip
    assert same_arrays(again, cast(source, BF16))
    flat, theirs = (
        json.loads((tmp_path / "d" / "config.json").read_text()),
        json.loads((folder / "config.json").read_text()),
    )
    assert {name: flat[name] for name in theirs if name in flat} == {
        name: theirs[name] for name in theirs if name in flat
    }
    assert flat["dtype"] == "bfloat16"
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["aux_hidden_state_layer_ids"] == [tap + 1 for tap in TAPS]
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(target)
    assert not set(load_file(tmp_path / "b" / "model.safetensors")) & set(tables(target))
    said = capsys.readouterr().out
    assert "bfloat16 as stored" in said and "bfloat16 by --dtype" in said


def test_nothing_is_cast_unless_asked(target, tmp_path, capsys):
    arrays = make_run(tmp_path / "run", target, [np.float32])
    convert(str(tmp_path / "run"), "deepspec", tmp_path / "a")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    assert {x.dtype for x in tensors.values()} == {np.dtype(np.float32)}
    for layout in ("deepspec", "speculators"):
        convert(str(tmp_path / "run"), layout, tmp_path / layout, dtype="bfloat16")
        tensors = load_file(tmp_path / layout / "model.safetensors")
        assert {x.dtype for x in tensors.values()} == {np.dtype(BF16)}
    convert(str(tmp_path / "run"), "orbax", tmp_path / "b", dtype="bfloat16")
    assert same_arrays(load_arrays(tmp_path / "b", 7), cast(arrays, BF16))
    assert capsys.readouterr().out.count("bfloat16 by --dtype") == 2


def test_embeddings_tied_omitted_and_present(target, tmp_path):
    """Present ones must be the target's, whether it ties them or not; absent ones are."""
    tied = make_target(tmp_path / "tied", tied=True)  # the embedding of `target`
    make_run(tmp_path / "run", tied, [np.float32])
    convert(str(tmp_path / "run"), "deepspec", tmp_path / "both")
    both = load_file(tmp_path / "both" / "model.safetensors")
    embed = tables(tied)["embed_tokens.weight"]
    assert all(both[name].tobytes() == embed.tobytes() for name in tables(tied))
    convert(str(tmp_path / "run"), "deepspec", tmp_path / "none", embeddings=False)
    none = load_file(tmp_path / "none" / "model.safetensors")
    assert set(both) - set(none) == set(tables(tied))
    with pytest.raises(UserError, match="--noembeddings belongs to --to=deepspec"):
        convert(str(tmp_path / "run"), "speculators", tmp_path / "x", embeddings=False)

    config = deepspec_config("vanilla", "markov") | {"tie_word_embeddings": True}
    tensors = deepspec_tensors("vanilla", "markov")
    for name, shared in (("one", ["embed_tokens.weight"]), ("neither", [])):
        folder = write(tmp_path / name, config, tensors | dict.fromkeys(shared, embed))
        convert(str(folder), "orbax", tmp_path / f"{name}-run", target=str(tied))
        with pytest.raises(UserError, match="tie_word_embeddings=True.*not the LM head"):
            convert(str(folder), "orbax", tmp_path / "x", target=str(target))
    own = write(tmp_path / "own", config, tensors | {"embed_tokens.weight": embed + 1})
    with pytest.raises(UserError, match="'embed_tokens.weight' is not the embedding"):
        convert(str(own), "orbax", tmp_path / "x", target=str(tied))
    shutil.rmtree(tied)
    with pytest.raises(UserError, match="target is no longer in .*--target"):
        convert(str(tmp_path / "run"), "deepspec", tmp_path / "x")
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------------------------------------
# By hub id, and what is no drafter.


def test_a_released_drafter_by_its_hub_id(target, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name = "deepseek-ai/dspark_qwen3_4b_block7"
    with pytest.raises(UserError, match=f"drafter '{name}': no such local folder.*hub") as caught:
        convert(name, "orbax", tmp_path / "run", target=str(target))
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()
    repo = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("1" * 40)
    make_deepspec(repo / "snapshots" / ("1" * 40), target, dtype=BF16, files=2)
    convert(name, "orbax", tmp_path / "run", target=str(target))
    record = read_record(tmp_path / "run")
    assert record.config.drafter.dtype == "bfloat16"
    wanted = cast(deepspec_tensors("vanilla", "markov"), BF16)["fc.weight"]
    assert load_arrays(tmp_path / "run", 0)["fc"].tobytes() == wanted.tobytes()
    opened = open_drafter(str(tmp_path / "run" / "checkpoints" / "0"))
    assert opened.layout == "orbax" and opened.step == 0


def config_with(**values):
    return lambda folder: (folder / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | values)
    )


def tensors_with(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


def lose_a_shard(folder):
    tensors = load_file(folder / "model.safetensors")
    shutil.rmtree(folder)
    write(folder, deepspec_config("vanilla", "markov"), tensors, files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()


WRONG = {
    "missing tensor": (tensors_with(lambda t: t.pop("fc.weight")), "missing fc.weight"),
    "extra tensor": (
        tensors_with(lambda t: t.update({"layers.1.mlp.up_proj.weight": t["fc.weight"]})),
        "unknown layers.1.mlp.up_proj.weight",
    ),
    "wrong shape": (
        tensors_with(lambda t: t.update({"norm.weight": np.ones(8, np.float32)})),
        r"'norm.weight' has shape \[8\], config.json implies \[16\]",
    ),
    "too precise": (
        tensors_with(lambda t: t.update({"norm.weight": np.ones(16)})),
        "'norm.weight' is F64.*nothing is cast",
    ),
    "missing shard": (lose_a_shard, "index names model-00002-of-00003.safetensors, which is miss"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "unknown head": (config_with(markov_head_type="gru"), "markov_head_type='gru': must be one of"),
    "no such layer": (config_with(target_layer_ids=[0, 6]), r"\[0, 6\], but num_target_layers=6"),
    "last layer": (config_with(target_layer_ids=[0, 5]), "5 is the target's last layer"),
    "not ascending": (config_with(target_layer_ids=[3, 0]), r"target_layer_ids=\[3, 0\] does not"),
    "negative layer": (config_with(target_layer_ids=[-2, 3]), "which cannot be"),
    "other target": (config_with(num_target_layers=8), "num_target_layers=8 in config.json, 6 by"),
    "a target": (config_with(architectures=["Qwen3ForCausalLM"]), "no drafter: neither a specul"),
    "another kind": (config_with(architectures=["DFlash2DraftModel"]), "no drafter: neither"),
    "half speculators": (config_with(speculators_config={}), "speculators_model_type is missing"),
    "sliding": (config_with(layer_types=["sliding_attention"]), "layer_types="),
    "own head": (
        tensors_with(lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1})),
        "'lm_head.weight' is not the LM head",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "neither a run nor a drafter"),
    "no folder": (shutil.rmtree, "no such folder; give a run, a folder or a hub id"),
}


@pytest.mark.parametrize("fault", WRONG)
@pytest.mark.parametrize("to", ["orbax", "speculators"])
def test_a_wrong_folder_is_one_line_and_leaves_nothing(fault, to, target, tmp_path):
    change, message = WRONG[fault]
    folder = make_deepspec(tmp_path / "in" / "drafter", target)
    change(folder)
    with pytest.raises(UserError, match=message) as caught:
        convert(str(folder), to, tmp_path / "out", target=str(target))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
