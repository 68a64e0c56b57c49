"""The target against transformers, its cache, and its meshes: pytest tests/test_target.py"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_targets import model_config

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.models.cache import KVCache, LayerCache
from dspark_jax.models.layers import (
    RopeConfig,
    apply_rope,
    attend,
    attend_causally,
    inverse_frequencies,
    rope_angles,
)
from dspark_jax.models.rope_config import rope_from_hf
from dspark_jax.models.target import TargetConfig, check_taps
from dspark_jax.weights.safetensors import load_target

BATCH, LENGTH, CAPACITY = 4, 32, 40
TAPS = (-1, 0, 1, 2)  # of three layers: the last is refused by `check_taps`, not by the model
THETA = {"rope_theta": 10000.0}
ROPES = {
    "default": {"rope_type": "default", **THETA},
    "linear": {"rope_type": "linear", "factor": 4.0, **THETA},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        **THETA,
    },
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        **THETA,
    },
}
# family, tied, RoPE, head_dim, key/value heads
CASES = {
    "llama-tied": ("llama", True, "default", 8, 2),
    "llama": ("llama", False, "llama3", 8, 2),
    "llama-yarn": ("llama", False, "yarn", 8, 1),
    "llama-linear": ("llama", True, "linear", 8, 4),
    "qwen3-tied": ("qwen3", True, "default", 16, 2),
    "qwen3": ("qwen3", False, "yarn", 16, 2),
}
MESHES = {"1x1": (1, 1), "4x2": (4, 2)}


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(make_mesh()):
        yield


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Case name -> (directory, torch model), made once."""
    torch = pytest.importorskip("torch")
    import transformers

    @functools.cache
    def make(name):
        family, tied, rope, head_dim, kv_heads = CASES[name]
        config_class = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
        sizes = model_config(family, head_dim=head_dim, num_key_value_heads=kv_heads)
        del sizes["model_type"], sizes["rope_theta"]
        sizes |= {"tie_word_embeddings": tied, "rope_parameters": ROPES[rope]}
        # A wide init: with the default 0.02 neither attention nor RoPE would be visible.
        config = config_class[family](**sizes, initializer_range=0.2)
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.uniform_(0.5, 1.5)
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        return directory, model

    return make


def run_torch(model, tokens):
    """Logits, and the hidden states as transformers numbers them."""
    import torch

    with torch.no_grad():
        output = model(torch.tensor(tokens), output_hidden_states=True, use_cache=False)
    return output.logits.numpy(), [state.numpy() for state in output.hidden_states]


@functools.partial(jax.jit, static_argnames="taps")
def run_jit(target, tokens, taps, cache, documents, positions):
    output = target(tokens, taps=taps, cache=cache, documents=documents, positions=positions)
    return output, target.head.logits(output.hidden)


def run(target, tokens, *, taps=TAPS, cache=None, documents=None, positions=None):
    """(TargetOutput, logits); arrays are placed on the current mesh."""

    def rows(x):
        return None if x is None else place(np.asarray(x, np.int32), "batch", None)

    return run_jit(target, rows(tokens), taps, cache, rows(documents), rows(positions))


def streams(seed=0, batch=BATCH, length=LENGTH):
    return np.random.default_rng(seed).integers(0, 96, (batch, length))


def assert_close(ours, theirs, tolerance, what=""):
    """The largest difference, as a share of the largest value. (Slice on the host, before: every
    slice of a jax array is a program to compile.)"""
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    assert ours.shape == theirs.shape, what
    worst = np.abs(ours - theirs).max() / np.abs(theirs).max()
    assert worst <= tolerance, f"{what}: off by {worst:.1e}"


def check_against_torch(output, logits, torch_logits, states, taps, tolerance):
    output = jax.device_get(output)
    assert_close(logits, torch_logits, tolerance, "logits")
    assert_close(output.hidden, states[-1], tolerance, "last hidden, after the norm")
    for index, tap in enumerate(taps):
        if tap + 1 < len(states) - 1:  # transformers' last state has gone through the norm
            assert_close(output.taps[:, :, index], states[tap + 1], tolerance, f"tap {tap}")


# Against transformers


@pytest.mark.parametrize("name", CASES)
def test_equals_torch(saved, name):
    import torch

    directory, model = saved(name)
    target = load_target(directory, "float32")
    assert target.config.tie_embeddings == CASES[name][1]
    tokens = streams()
    torch_logits, states = run_torch(model, tokens)
    output, logits = run(target, tokens)
    assert logits.dtype == jnp.float32
    check_against_torch(output, logits, torch_logits, states, TAPS, 2e-4)

    # The comparison can tell RoPE kinds apart: other frequencies are far outside the tolerance.
    rotary = model.model.rotary_emb
    frequencies = rotary.inv_freq
    rotary.inv_freq = frequencies * torch.linspace(1.0, 0.5, len(frequencies))
    wrong, _ = run_torch(model, tokens)
    rotary.inv_freq = frequencies
    assert np.abs(wrong - torch_logits).max() > 0.01 * np.abs(torch_logits).max()


@pytest.mark.parametrize("name", ["llama", "qwen3-tied"])
def test_bfloat16_loads_and_runs(saved, name):
    directory, model = saved(name)
    target = load_target(directory, "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(target)} == {jnp.dtype("bfloat16")}
    tokens = streams()
    torch_logits, states = run_torch(model, tokens)
    output, logits = run(target, tokens)
    assert (output.taps.dtype, output.hidden.dtype) == (jnp.bfloat16, jnp.bfloat16)
    assert logits.dtype == jnp.float32  # acceptance tests compare probabilities, not bf16 steps
    check_against_torch(output, logits, torch_logits, states, TAPS, 0.1)
    error = np.asarray(logits) - torch_logits
    assert np.sqrt((error**2).mean()) < 0.03 * torch_logits.std()


def test_bundled_target_equals_torch(bundled_dir):
    """SmolLM2 itself: all 29 taps and the embeddings, on a chat prompt."""
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bundled_dir)
    messages = [{"role": "user", "content": "Add 17 and 2500, then name a river in Austria."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = np.asarray([tokenizer(text)["input_ids"]])
    assert 40 <= tokens.shape[1] <= 64
    torch_logits, states = run_torch(AutoModelForCausalLM.from_pretrained(bundled_dir), tokens)
    target = load_target(bundled_dir, "float32")
    taps = tuple(range(-1, target.config.num_layers - 1))
    output, logits = run(target, tokens, taps=taps)
    check_against_torch(output, logits, torch_logits, states, taps, 2e-4)
    # Token 0 has activations of thousands that hide the rest: the other positions by themselves.
    tapped = np.asarray(output.taps)
    for index, tap in enumerate(taps):
        assert_close(tapped[0, 1:, index], states[tap + 1][0, 1:], 2e-4, f"tap {tap}")


# The cache


@dataclasses.dataclass
class Decoding:
    """Rows of `tokens` decoded through the cache, each from its own length."""

    target: object
    tokens: np.ndarray
    cache: KVCache
    starts: np.ndarray  # [B], where the last block began

    @classmethod
    def prefill(cls, target, tokens, lengths):
        lengths = np.asarray(lengths)
        prompts = tokens[:, : lengths.max()].copy()
        for row, length in enumerate(lengths):
            prompts[row, length:] = 95 - row  # right padding: any id
        output, logits = run(target, prompts, cache=target.empty_cache(BATCH, CAPACITY))
        cache = output.cache.advance(place(lengths.astype(np.int32), "batch"))
        return cls(target, tokens, cache, np.zeros(BATCH, int)), output, logits

    def step(self, block, commit):
        """Runs `block` [B, T] and commits the first `commit` [B] tokens of each row."""
        self.starts = np.asarray(self.cache.length)
        output, logits = run(self.target, block, cache=self.cache)
        self.cache = output.cache.advance(place(np.asarray(commit, np.int32), "batch"))
        return output, logits

    def next_tokens(self, width):
        length = np.asarray(self.cache.length)
        return np.stack([row[n : n + width] for row, n in zip(self.tokens, length)])


def check_rows(output, logits, expected, starts, counts, tolerance):
    """The first counts[r] outputs of row r are those of `expected` from starts[r] on."""
    whole, whole_logits = expected
    pairs = (  # on the host: a row of a batch that is spread over devices is nowhere whole
        (np.asarray(logits), whole_logits, "logits"),
        (np.asarray(output.hidden), whole.hidden, "hidden"),
        (np.asarray(output.taps), whole.taps, "taps"),
    )
    for row, (start, count) in enumerate(zip(starts, counts)):
        there = slice(start, start + count)
        for ours, theirs, what in pairs:
            assert_close(ours[row, :count], theirs[row, there], tolerance, f"{what}, row {row}")


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_cached_equals_uncached_on_every_mesh(saved, name, mesh_name):
    """Prefill, single steps and blocks of 5, rows of different lengths; the uncached run on one
    device is the reference of both meshes."""
    directory, _ = saved(name)
    tokens, lengths = streams(1), [8, 5, 3, 1]
    expected = jax.device_get(run(load_target(directory, "float32"), tokens))
    with jax.set_mesh(make_mesh(*MESHES[mesh_name])):
        target = load_target(directory, "float32")
        if mesh_name != "1x1":
            spread = {len(x.sharding.device_set) for x in jax.tree.leaves(target)}
            assert spread == {8}
            output, logits = run(target, tokens)
            check_rows(output, logits, expected, [0] * BATCH, [LENGTH] * BATCH, 1e-4)
        state, output, logits = Decoding.prefill(target, tokens, lengths)
        check_rows(output, logits, expected, [0] * BATCH, lengths, 1e-4)
        for width in (1, 5, 1, 1, 5):
            output, logits = state.step(state.next_tokens(width), [width] * BATCH)
            check_rows(output, logits, expected, state.starts, [width] * BATCH, 1e-4)
        np.testing.assert_array_equal(state.cache.length, np.asarray(lengths) + 13)


def poison(cache, value):
    """Everything past each row's length becomes `value`."""
    past = np.arange(cache.capacity) >= np.asarray(cache.length)[:, None]

    def fill(x, mask):
        return place(np.where(mask, value, np.asarray(x)), "batch", "heads", None, None)

    layers = tuple(
        LayerCache(fill(layer.k, past[:, None, None, :]), fill(layer.v, past[:, None, :, None]))
        for layer in cache.layers
    )
    return dataclasses.replace(cache, layers=layers)


def test_rollback_after_rejections(saved):
    """Blocks of [anchor, 4 drafts] of which a scripted number is accepted (R087)."""
    directory, _ = saved("llama")
    target = load_target(directory, "float32")
    tokens, lengths = streams(2), [8, 5, 3, 1]
    expected = jax.device_get(run(target, tokens))
    fresh = run(target, tokens, cache=target.empty_cache(BATCH, CAPACITY))[0].cache
    fresh = jax.device_get(fresh.layers)
    accepted = np.asarray([[0, 3, 4, 1, 0], [4, 0, 1, 3, 2], [1, 1, 1, 1, 1], [0, 0, 4, 4, 0]]).T
    state, _, _ = Decoding.prefill(target, tokens, lengths)
    for counts in accepted:
        state.cache = poison(state.cache, 1e6)
        block = state.next_tokens(5)
        wrong = np.arange(5) > counts[:, None]
        block = np.where(wrong, (block + 7) % 96, block)
        output, logits = state.step(block, counts + 1)
        check_rows(output, logits, expected, state.starts, counts + 1, 1e-4)
        layers = jax.device_get(state.cache.layers)
        for row, length in enumerate(np.asarray(state.cache.length)):
            for ours, theirs in zip(layers, fresh):
                assert_close(ours.k[row, :, :, :length], theirs.k[row, :, :, :length], 1e-5)
                assert_close(ours.v[row, :, :length], theirs.v[row, :, :length], 1e-5)
    np.testing.assert_array_equal(state.cache.length, lengths + accepted.sum(0) + 5)

    # and the check can fail: a row that keeps one rejected draft answers differently
    start = np.asarray(state.cache.length)
    block = state.next_tokens(5)
    block[:, 1] = (block[:, 1] + 7) % 96
    state.step(block, [2] * BATCH)
    output, logits = state.step(state.next_tokens(5), [5] * BATCH)
    with pytest.raises(AssertionError, match="off by"):
        check_rows(output, logits, expected, start + 2, [1] * BATCH, 1e-3)


# Rows and documents


def test_packed_documents_equal_separate_runs(saved):
    directory, _ = saved("llama")
    target = load_target(directory, "float32")
    tokens = streams(3)
    whole, whole_logits = jax.device_get(run(target, tokens))
    sizes = [10, 7, 9]  # then 6 of padding
    packed, documents, positions = (np.zeros((BATCH, LENGTH), int) for _ in range(3))
    start = 0
    for row, size in enumerate(sizes):
        there = slice(start, start + size)
        packed[:, there] = tokens[row, :size]
        documents[:, there], positions[:, there] = row + 1, np.arange(size)
        start += size
    output, logits = jax.device_get(run(target, packed, documents=documents, positions=positions))
    assert np.isfinite(logits).all()
    crossed, _ = jax.device_get(
        run(target, packed, documents=np.ones_like(documents), positions=positions)
    )
    start = 0
    for row, size in enumerate(sizes):
        there = slice(start, start + size)
        assert_close(logits[0, there], whole_logits[row, :size], 1e-4, f"document {row}")
        assert_close(output.taps[0, there], whole.taps[row, :size], 1e-4, f"document {row}")
        if row:  # without document ids the second document would see the first
            with pytest.raises(AssertionError):
                assert_close(crossed.hidden[0, there], whole.hidden[row, :size], 1e-2)
        start += size


def test_rows_of_a_batch_do_not_know_each_other(saved):
    """Lengths 5, 1 and 9 in a batch, called twice, and one by one (R019)."""
    directory, _ = saved("llama")
    target = load_target(directory, "float32")
    tokens, lengths = streams(4), [5, 1, 9]
    first = jax.device_get(run(target, tokens))
    others = streams(5)
    for row, length in enumerate(lengths):
        mixed = others.copy()
        mixed[row, :length] = tokens[row, :length]
        again, again_logits = jax.device_get(run(target, mixed))
        np.testing.assert_array_equal(again_logits[row, :length], first[1][row, :length])
        np.testing.assert_array_equal(again.taps[row, :length], first[0].taps[row, :length])
        alone, alone_logits = jax.device_get(run(target, mixed[row : row + 1]))
        assert_close(alone_logits[0, :length], first[1][row, :length], 1e-5)
        assert_close(alone.taps[0, :length], first[0].taps[row, :length], 1e-5)


def test_attention_in_chunks_is_attention():
    """Chunks that do not divide the length, documents, and a query that sees nothing."""
    rng = np.random.default_rng(0)
    q, v = (rng.normal(size=(2, 2, *more, 11, 4)).astype(np.float32) for more in ((3,), ()))
    k = rng.normal(size=(2, 2, 4, 11)).astype(np.float32)
    documents = np.asarray([[1] * 6 + [2] * 5, [1] * 11])
    mask = np.tril(np.ones((11, 11), bool)) & (documents[:, :, None] == documents[:, None])
    mask[1, 7] = False
    whole = np.asarray(jax.jit(attend)(q, k, v, mask))
    in_chunks = jax.jit(attend_causally, static_argnames="chunk")
    for chunk in (4, 256):
        parts = in_chunks(q, k, v, mask, chunk=chunk)
        np.testing.assert_allclose(parts, whole, atol=1e-6)
    scores = np.einsum("bkqth,bkhs->bkqts", q, k) / 2
    weights = np.where(mask[:, None, None], np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    np.testing.assert_allclose(whole, np.einsum("bkqts,bksh->bkqth", weights, v), atol=1e-5)
    assert not whole[1, :, :, 7].any()


# RoPE


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_transformers(kind):
    """At the sizes of real targets, where float32 and rounding of the bounds matter."""
    pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = ROPES[kind] | {"rope_theta": 500000.0}
    if "original_max_position_embeddings" in rope:
        rope["original_max_position_embeddings"] = 8192
    config = LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=32768, rope_parameters=rope
    )
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    theirs, their_scale = compute(config)
    ours, scale = inverse_frequencies(rope_from_hf({"rope_parameters": rope}, "here"), 128)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-6)
    assert scale == pytest.approx(their_scale)


def test_rope_has_no_table_to_run_out_of():
    """Angles come from positions: exact far out, and no two positions are alike (R062)."""
    rope = RopeConfig(theta=10000.0)
    positions = np.asarray([15, 16, 511, 512, 8191, 8192, 100_000])
    cos, sin = rope_angles(rope, 64, jnp.asarray(positions))
    inv, _ = inverse_frequencies(rope, 64)
    angles = positions[:, None] * inv.astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-2)
    np.testing.assert_allclose(sin[:6], np.sin(angles[:6]), atol=1e-3)
    assert (np.abs(np.diff(np.asarray(sin), axis=0)).max(axis=1) > 0.05).all()


def test_partial_rotation_leaves_the_rest_alone():
    rope = RopeConfig(theta=100.0, partial_rotary_factor=0.25)
    x = jnp.arange(1.0, 17.0).reshape(1, 2, 8)
    cos, sin = rope_angles(rope, 8, jnp.asarray([[3, 4]]))
    assert cos.shape == (1, 2, 1)
    turned = apply_rope(x, cos, sin)
    np.testing.assert_array_equal(turned[..., 2:], x[..., 2:])
    assert not np.allclose(turned[..., :2], x[..., :2])


def test_rope_is_the_same_wherever_a_config_keeps_it():
    """Top level, rope_parameters, rope_scaling with the old name of the kind (R060)."""
    plain = model_config()
    del plain["rope_theta"]
    theta = {"rope_theta": 500000.0}
    scaling = {key: value for key, value in ROPES["llama3"].items() if key != "rope_theta"}
    old = {"type" if key == "rope_type" else key: value for key, value in scaling.items()}
    layouts = (
        theta | {"rope_scaling": scaling},
        theta | {"rope_scaling": old, "rope_parameters": None, "partial_rotary_factor": None},
        {"rope_parameters": scaling | theta},
        {"rope_scaling": scaling | theta},
        theta | {"rope_scaling": scaling, "rope_parameters": scaling | theta},
    )
    ropes = [TargetConfig.from_hf(plain | layout, "float32").rope for layout in layouts]
    assert set(ropes) == {ropes[0]}
    assert (ropes[0].kind, ropes[0].theta, ropes[0].original_max_position) == ("llama3", 5e5, 16)
    unscaled = [TargetConfig.from_hf(plain | x, "float32").rope for x in (theta, {
        "rope_parameters": {"rope_type": "default"} | theta
    })]  # fmt: skip
    assert unscaled[0] == unscaled[1] == RopeConfig(theta=5e5, original_max_position=128)


# What is refused


YARN, LLAMA3 = ROPES["yarn"], ROPES["llama3"]
REFUSED = {
    "family": ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported"),
    "no family": ({"model_type": None}, "model_type None"),
    "attention bias": ({"attention_bias": True}, "attention_bias=True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias=True"),
    "window": ({"use_sliding_window": True}, "use_sliding_window=True"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "partial, inside": (
        {"rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.5}},
        "partial_rotary_factor=0.5",
    ),
    "theta": ({"rope_parameters": {"rope_theta": 5e5}}, r"rope_theta is \[10000.0, 500000.0\]"),
    "two thetas": (
        {
            "rope_theta": None,
            "rope_parameters": {"rope_theta": 1e4},
            "rope_scaling": {"rope_theta": 1e6},
        },
        "rope_theta is",
    ),
    "no theta": ({"rope_theta": None}, "rope_theta is missing"),
    "kind": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
    "two factors": (
        {"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}},
        "factor is 2.0 in rope_scaling and 4.0 in rope_parameters",
    ),
    "no factor": ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs 'factor'"),
    "no low": (
        {"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}},
        "needs 'low_freq_factor'",
    ),
    "mscale": ({"rope_scaling": YARN | {"mscale": 0.7}}, "mscale=0.7"),
    "truncate": ({"rope_scaling": YARN | {"truncate": False}}, "truncate=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_config_that_would_be_misread(name):
    changes, message = REFUSED[name]
    config = model_config("qwen3")
    assert TargetConfig.from_hf(config, "float32").qk_norm
    with pytest.raises(UserError, match=message) as caught:
        TargetConfig.from_hf(config | changes, "float32", "models/x/config.json")
    assert str(caught.value).startswith("models/x/config.json: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_attention_heads"])
def test_config_without_a_size(field):
    config = model_config()
    del config[field]
    with pytest.raises(UserError, match=f"'{field}' is missing"):
        TargetConfig.from_hf(config, "float32")


def test_taps():
    for good in ((0,), (-1, 0, 2), (0, 1, 2)):
        check_taps(good, 4)
    for bad, message in (
        ((), "is empty"),
        ((0, 3), "3 is the target's last layer.*at most 2"),
        ((0, 4), "4 is out of range.*4 layers"),
        ((-2, 0), "-2 is out of range"),
        ((2, 1), "strictly increasing"),
        ((1, 1), "strictly increasing"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            check_taps(bad, 4, "config.drafter")
        assert str(caught.value).startswith("config.drafter.target_layer_ids")
