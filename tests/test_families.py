"""Qwen3-MoE, Gemma 3 and 4, and Qwen3-VL's text model against transformers, cached and sharded.

pytest tests/test_families.py
"""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named
from dspark_jax.models.target import Target
from dspark_jax.models.target_config import FAMILIES, TargetConfig
from dspark_jax.weights.fingerprint import fingerprint
from dspark_jax.weights.safetensors import load_target

BATCH, LENGTH, CAPACITY, WINDOW = 4, 20, 24, 5
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # a wide one: with 0.02 neither attention nor RoPE would be visible
}
SLIDING, FULL = "sliding_attention", "full_attention"
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "patch_size": 4,
    "num_position_embeddings": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
# Class of the config and what is not in SIZES.
CASES = {
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_hidden_layers": 2, "num_experts_per_tok": 2, "mlp_only_layers": [1], **EXPERTS}
        | {"norm_topk_prob": True},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 12,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                FULL: {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
            },
        },
    ),
    "gemma4_moe": (  # keys give the values, fewer and larger heads in full layers, experts
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 2,
            "layer_types": [SLIDING, FULL],
            "sliding_window": WINDOW,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "global_head_dim": 16,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "final_logit_softcapping": 5.0,
            **EXPERTS,
        },
    ),
    "gemma4": (  # inputs for each layer, and layers without keys of their own
        "Gemma4TextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "sliding_window": WINDOW,
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 5.0,
        },
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {"num_hidden_layers": 3, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
    ),
}
SLOW = pytest.mark.slow
MESHED = ["qwen3_moe", "gemma4", *(pytest.param(x, marks=SLOW) for x in ("gemma3", "gemma4_moe"))]


@pytest.fixture(autouse=True, scope="module")
def mesh():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh()):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Case name -> (directory, torch model), made once."""
    torch = pytest.importorskip("torch")
    import transformers

    @functools.cache
    def make(name):
        config_class, options = CASES[name]
        config_class = getattr(transformers, config_class)
        torch.manual_seed(0)
        if name == "qwen3_vl":
            config = config_class(text_config=SIZES | options, vision_config=VISION)
            config._attn_implementation = "eager"
            model = transformers.Qwen3VLForConditionalGeneration(config).eval()
        else:
            config = config_class(**(SIZES | options))
            config._attn_implementation = "eager"
            model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    low = -0.5 if name == "gemma3" else 0.5  # Gemma 3 stores norms less 1
                    parameter.uniform_(low, low + 1)
                elif key.endswith("mlp.gate.weight"):  # a router of zeros would choose the first
                    parameter.normal_()
            for key, buffer in model.named_buffers():
                if key.endswith("layer_scalar"):
                    buffer.uniform_(0.5, 1.5)
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        return directory, model

    return make


def streams(seed=0):
    return np.random.default_rng(seed).integers(0, 96, (BATCH, LENGTH)).astype(np.int32)


@functools.cache
def torch_run(saved, name):
    """Tokens, logits and hidden states as transformers numbers them."""
    import torch

    tokens = streams()
    with torch.no_grad():
        output = saved(name)[1](torch.tensor(tokens), output_hidden_states=True, use_cache=False)
    return tokens, output.logits.numpy(), [state.numpy() for state in output.hidden_states]


@functools.partial(jax.jit, static_argnames="taps")
def run_jit(target, tokens, taps, cache, positions, embeddings, deepstack):
    output = target(
        tokens,
        taps=taps,
        cache=cache,
        positions=positions,
        embeddings=embeddings,
        deepstack=deepstack,
    )
    return output, target.head.logits(output.hidden)


def run(target, tokens, cache=None, positions=None, embeddings=None, deepstack=()):
    """(TargetOutput, logits), taps of all layers but the last."""
    taps = tuple(range(-1, target.config.num_layers - 1))
    if positions is not None:
        positions = place(positions.astype(np.int32), None, "batch", None)
    more = tuple(place(x, "batch", None, None) for x in deepstack)
    if embeddings is not None:
        embeddings = place(embeddings, "batch", None, None)
    tokens = place(np.asarray(tokens, np.int32), "batch", None)
    return run_jit(target, tokens, taps, cache, positions, embeddings, more)


def assert_close(ours, theirs, tolerance, what=""):
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert ours.shape == theirs.shape, what
    worst = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert worst <= tolerance, f"{what}: off by {worst:.1e}"


def check_against_torch(output, logits, torch_logits, states, rows=slice(None), at=slice(None)):
    """Logits, last hidden and every tap, of the positions `at` of torch's."""
    taps = np.asarray(output.taps)
    assert_close(np.asarray(logits)[rows], torch_logits[rows, at], 2e-4, "logits")
    assert_close(np.asarray(output.hidden)[rows], states[-1][rows, at], 2e-4, "last hidden")
    assert taps.shape[2] == len(states) - 1
    for index, state in enumerate(states[:-1]):  # the embeddings first
        assert_close(taps[rows, :, index], state[rows, at], 2e-4, f"tap {index - 1}")


# ---- Against transformers ----------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(saved, name):
    target = load_target(saved(name)[0], "float32")
    tokens, torch_logits, states = torch_run(saved, name)
    output, logits = run(target, tokens)
    check_against_torch(output, logits, torch_logits, states)
    if cap := target.config.logit_softcap:
        assert 0.5 * cap < np.abs(torch_logits).max() < cap  # the cap is felt


@pytest.mark.parametrize("name", MESHED)
def test_cached_on_a_mesh_equals_torch(saved, name):
    """Rows of different lengths, two blocks of 5 of which the first is rolled back to 2."""
    tokens, torch_logits, states = torch_run(saved, name)
    lengths = np.asarray([9, 6, 3, 8])
    with jax.set_mesh(make_mesh(4, 2)):
        target = load_target(saved(name)[0], "float32")
        assert {len(x.sharding.device_set) for x in jax.tree.leaves(target)} == {8}
        for key, x in named(target).items():  # half of the experts on each side of tp
            if ".experts." in key:
                assert x.sharding.shard_shape(x.shape)[0] == x.shape[0] // 2
        cache = target.empty_cache(BATCH, CAPACITY)
        output, logits = run(target, tokens[:, : lengths.max()], cache)
        for row, length in enumerate(lengths):
            part = slice(row, row + 1), slice(0, length)
            assert_close(np.asarray(logits)[part], torch_logits[part], 2e-4, f"row {row}")
        cache = output.cache.advance(place(lengths.astype(np.int32), "batch"))
        for accepted in (2, 5):
            at = np.asarray(cache.length)
            block = np.stack([row[n : n + 5] for row, n in zip(tokens, at)])
            block[:, accepted:] = (block[:, accepted:] + 7) % 96  # drafts that are rejected
            output, logits = run(target, block, cache)
            host = jax.device_get(output), np.asarray(logits)
            for row, n in enumerate(at):
                one = slice(row, row + 1)
                cut = dataclasses.replace(
                    host[0],
                    hidden=host[0].hidden[:, :accepted],
                    taps=host[0].taps[:, :accepted],
                )
                check_against_torch(
                    cut, host[1][:, :accepted], torch_logits, states, one, slice(n, n + accepted)
                )
            cache = output.cache.advance(place(np.full(BATCH, accepted, np.int32), "batch"))


def test_bfloat16_runs(saved):
    """Also Gemma's embedding factor, which transformers rounds to the embedding's dtype."""
    import torch

    directory, model = saved("gemma4_moe")
    target = load_target(directory, "bfloat16")
    tokens = streams()
    rows = jax.jit(lambda head, ids: head.embeddings(ids, jnp.float32))(
        target.head, place(tokens, "batch", None)
    )
    embed = type(model.model.embed_tokens)(96, 32, 0, 32**0.5)
    embed.load_state_dict(model.model.embed_tokens.state_dict())
    wanted = embed.to(torch.bfloat16)(torch.tensor(tokens)).float()
    np.testing.assert_array_equal(rows, wanted.detach().numpy())
    assert {x.dtype for x in jax.tree.leaves(target)} == {jnp.dtype("bfloat16")}


# ---- Experts -----------------------------------------------------------------------------------


def fused(tensors, prefix="model.layers.0.mlp.experts"):
    """One tensor for all gates and ups, one for all downs, as transformers 5 holds them."""
    each = {
        part: np.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(4)])
        for part in ("gate", "up", "down")
    }
    tensors[f"{prefix}.gate_up_proj"] = np.concatenate([each["gate"], each["up"]], axis=1)
    tensors[f"{prefix}.down_proj"] = each["down"]


def test_both_layouts_of_experts(saved, tmp_path):
    directory, model = saved("qwen3_moe")
    tensors = load_file(directory / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    fused(tensors)
    held = model.model.layers[0].mlp.experts.gate_up_proj.detach().numpy()
    np.testing.assert_array_equal(tensors["model.layers.0.mlp.experts.gate_up_proj"], held)
    save_file(tensors, tmp_path / "model.safetensors")
    with jax.set_mesh(make_mesh(4, 2)):
        ours, theirs = (named(load_target(d, "float32")) for d in (directory, tmp_path))
        assert set(ours) == set(theirs)
        for name, array in ours.items():
            np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    np.testing.assert_array_equal(ours["layers.0.mlp.experts.up"], held[:, 16:])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t, x: t.pop(f"{x}.3.up_proj.weight"), "experts.3.up_proj.weight' is missing"),
        (
            lambda t, x: t.update({f"{x}.2.down_proj.weight": np.zeros((32, 8), np.float32)}),
            r"has shape \[4, 32, 8\], config.json implies \[4, 32, 16\]",
        ),
        (
            lambda t, x: t.update({f"{x}.4.up_proj.weight": np.zeros((16, 32), np.float32)}),
            "experts.4.up_proj.weight' has no place",
        ),
    ],
)
def test_experts_that_do_not_fit(saved, tmp_path, change, message):
    directory, _ = saved("qwen3_moe")
    tensors = load_file(directory / "model.safetensors")
    change(tensors, "model.layers.0.mlp.experts")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        load_target(tmp_path, "float32")


def test_experts_cannot_be_cut_unevenly(saved):
    with jax.set_mesh(make_mesh(1, 8)), pytest.raises(UserError, match="num_kv_heads=2|num_expert"):
        load_target(saved("qwen3_moe")[0], "float32")


# ---- The sliding window ------------------------------------------------------------------------


def test_a_window_ends_where_it_ends():
    """Two sliding layers of 4 reach 2 * 3 tokens back: one more has no influence, to the bit."""
    changes = {"num_hidden_layers": 2, "layer_types": [SLIDING] * 2, "sliding_window": 4}
    config = TargetConfig.from_hf(hf_config("gemma3", **changes), "float32")
    target = nnx.jit(lambda: Target(config, rngs=nnx.Rngs(0)))()
    target = jax.tree.map(lambda x: x * 10, target)  # so that every token matters
    tokens = streams(3)
    other = tokens.copy()
    other[:, 5] = (other[:, 5] + 1) % 96
    for cached in (False, True):
        cache = target.empty_cache(BATCH, CAPACITY) if cached else None
        (ours, _), (theirs, _) = (jax.device_get(run(target, x, cache)) for x in (tokens, other))
        changed = (ours.hidden != theirs.hidden).any(-1)
        assert changed[:, 5:12].all() and not changed[:, :5].any() and not changed[:, 12:].any()
    # A block on top of the cache: its first slot is at 12, so 5 is out of its reach, and 6 is not.
    lengths = place(np.full(BATCH, 12, np.int32), "batch")
    before = run(target, tokens, target.empty_cache(BATCH, CAPACITY))[0].cache.advance(lengths)
    after = run(target, other, target.empty_cache(BATCH, CAPACITY))[0].cache.advance(lengths)
    a, b = (np.asarray(run(target, tokens[:, 12:16], c)[0].hidden) for c in (before, after))
    np.testing.assert_array_equal(a, b)
    other[:, 6] = (other[:, 6] + 1) % 96
    after = run(target, other, target.empty_cache(BATCH, CAPACITY))[0].cache.advance(lengths)
    b = np.asarray(run(target, tokens[:, 12:16], after)[0].hidden)
    assert (a != b).any(-1)[:, 0].all() and not (a != b).any(-1)[:, 1:].any()


# ---- Qwen3-VL: embeddings with images merged, positions in time, height and width ---------------


def test_merged_embeddings_equal_torch(saved):
    """An image of 2 x 3 at tokens 4 to 9, its features behind the first two layers as well."""
    import torch

    directory, model = saved("qwen3_vl")
    target, tokens = load_target(directory, "float32"), streams(5)
    rng = np.random.default_rng(5)
    image = np.zeros(LENGTH, bool)
    image[4:10] = True
    merged = np.asarray(target.embed[...])[tokens]
    merged[:, image] = rng.normal(size=(BATCH, 6, 32))
    features = np.zeros((2, BATCH, LENGTH, 32), np.float32)
    features[:, :, image] = rng.normal(size=(2, BATCH, 6, 32))
    time = np.concatenate([np.arange(4), np.full(6, 4), np.arange(7, 17)])
    height, width = time.copy(), time.copy()
    height[4:10], width[4:10] = 4 + np.arange(6) // 3, 4 + np.arange(6) % 3
    positions = np.broadcast_to(np.stack([time, height, width])[:, None], (3, BATCH, LENGTH))
    with torch.no_grad():
        theirs = model.model.language_model(
            inputs_embeds=torch.tensor(merged),
            position_ids=torch.tensor(positions.copy()),
            visual_pos_masks=torch.tensor(np.broadcast_to(image, (BATCH, LENGTH)).copy()),
            deepstack_visual_embeds=[torch.tensor(x[:, image].reshape(-1, 32)) for x in features],
            output_hidden_states=True,
            use_cache=False,
        )
        torch_logits = model.lm_head(theirs.last_hidden_state).numpy()
    states = [state.numpy() for state in theirs.hidden_states]
    whole = run(target, tokens, None, positions, merged, tuple(features))
    check_against_torch(*whole, torch_logits, states)

    # Through the cache: the image in the prompt, then a block of text with positions of its own.
    cache = target.empty_cache(BATCH, CAPACITY)
    head = (positions[:, :, :14], merged[:, :14], tuple(features[:, :, :14]))
    output, _ = run(target, tokens[:, :14], cache, *head)
    cache = output.cache.advance(place(np.full(BATCH, 14, np.int32), "batch"))
    block = run(target, tokens[:, 14:19], cache, positions[:, :, 14:19])
    check_against_torch(*block, torch_logits, states, at=slice(14, 19))
    wrong, _ = run(target, tokens[:, 14:19], cache)  # without, the text would lie further on
    with pytest.raises(AssertionError, match="off by"):
        assert_close(wrong.hidden, states[-1][:, 14:19], 1e-3)


def test_text_alone_is_the_plain_path(saved):
    target, tokens = load_target(saved("qwen3_vl")[0], "float32"), streams()
    _, torch_logits, _ = torch_run(saved, "qwen3_vl")
    rows = np.broadcast_to(np.arange(LENGTH), (3, BATCH, LENGTH))
    _, logits = run(target, tokens, None, rows, np.asarray(target.embed[...])[tokens])
    assert_close(logits, torch_logits, 2e-4)


# ---- Composite models, configs and records -----------------------------------------------------


def hf_config(name, **changes):
    """config.json of a case as its saved model has it, without torch."""
    common = {key: value for key, value in SIZES.items() if key != "initializer_range"}
    kind = {"gemma4_moe": "gemma4_text", "gemma4": "gemma4_text", "gemma3": "gemma3_text"}
    config = {"model_type": kind.get(name, name), **common, **CASES[name][1]}
    config.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": 1e4})
    if name.startswith("gemma4"):
        config["rope_parameters"] = {
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        }
    if name == "qwen3_vl":
        config = {"model_type": name, "text_config": config | {"model_type": "qwen3_vl_text"}}
        config["text_config"] |= changes
        return config
    return config | changes


@pytest.mark.parametrize("name", CASES)
def test_config_is_what_torch_saves(saved, name):
    """And it survives the trip through a run's record."""
    described = json.loads((saved(name)[0] / "config.json").read_text())
    config = TargetConfig.from_hf(described, "float32")
    assert config == TargetConfig.from_hf(hf_config(name), "float32")
    assert TargetConfig.from_record(json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert hash(config) and described["architectures"] == [FAMILIES[config.family]]


@pytest.mark.parametrize(
    "name, composite, prefix",
    [
        ("gemma3", "gemma3", "language_model.model."),
        ("gemma4", "gemma4", "model.language_model."),
        ("gemma4", "gemma4_unified", "model.language_model."),
    ],
)
def test_the_text_model_inside_a_composite_one(saved, tmp_path, name, composite, prefix):
    """The same arrays under other names, beside tensors that see; named as the whole model."""
    directory, _ = saved(name)
    described = json.loads((directory / "config.json").read_text())
    if composite == "gemma3":
        described["final_logit_softcapping"] = None
    text = TargetConfig.from_hf(described, "float32")
    whole = {"model_type": composite, "text_config": described, "tie_word_embeddings": True}
    whole["architectures"] = [FAMILIES[composite]]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(directory / "model.safetensors")
    renamed = {prefix + key.removeprefix("model."): x for key, x in tensors.items()}
    renamed["model.vision_tower.patch.weight"] = np.ones((2, 2), np.float32)
    save_file(renamed, tmp_path / "model.safetensors")
    target = load_target(tmp_path, "float32")
    assert target.config == dataclasses.replace(text, family=composite)
    for key, array in named(load_target(directory, "float32")).items():
        np.testing.assert_array_equal(array, named(target)[key], err_msg=key)
    assert fingerprint(tmp_path, "x").weights == fingerprint(directory, "x").weights


def test_what_released_gemma3_configs_leave_out():
    """google/gemma-3-4b-it says little more than this of its text model."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = TargetConfig.from_hf({"model_type": "gemma3", "text_config": text}, "bfloat16")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads) == (262208, 8, 4)
    assert (config.head_dim, config.query_scale, config.tie_embeddings) == (256, 1 / 16, True)
    assert (config.rope.theta, config.rope.factor, config.rope.kind) == (1e6, 8.0, "linear")
    assert (config.sliding.rope.theta, config.sliding.rope.kind) == (1e4, "default")
    assert config.sliding.layers == tuple((i + 1) % 6 != 0 for i in range(34))


REFUSED = {
    "experts": ("qwen3_moe", {"num_experts": None}, "'num_experts' is missing"),
    "top-k": ("qwen3_moe", {"norm_topk_prob": None}, "'norm_topk_prob' is missing"),
    "moe window": ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=True"),
    "attention cap": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    "bidirectional": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_att"),
    "activation": ("gemma3", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
    "kinds": ("gemma3", {"layer_types": [SLIDING, FULL]}, "layer_types="),
    "kind": ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "layer_types="),
    "all": ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
    "last": ("gemma4", {"layer_types": [SLIDING, FULL, FULL, SLIDING]}, "layer_types: the last"),
    "shared": ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers=3"),
    "ids": ("gemma4", {"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input=64"),
    "layers": ("gemma4", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config="),
    "unlike": (
        "gemma4",
        {"per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 8}}},
        "per_layer_config=",
    ),
    "moe": ("gemma4", {"enable_moe_block": True}, "'num_experts' is missing"),
    "mrope": ("qwen3_vl", {"rope_parameters": MROPE}, "mrope_interleaved=None"),
    "sections": (
        "qwen3_vl",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True, "mrope_section": [2, 2, 2]}},
        "mrope_section=",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_config_that_would_be_misread(name):
    case, changes, message = REFUSED[name]
    assert TargetConfig.from_hf(hf_config(case), "float32")
    with pytest.raises(UserError, match=message) as caught:
        TargetConfig.from_hf(hf_config(case, **changes), "float32", "x/config.json")
    assert str(caught.value).startswith("x/config.json: ") and "\n" not in str(caught.value)


def test_a_cap_that_readers_disagree_on():
    text = hf_config("gemma3")
    with pytest.raises(UserError, match="final_logit_softcapping=3.0 beside a vision model"):
        TargetConfig.from_hf({"model_type": "gemma3", "text_config": text}, "float32")
    with pytest.raises(UserError, match="'text_config' is missing"):
        TargetConfig.from_hf({"model_type": "gemma4", "vocab_size": 5}, "float32")
