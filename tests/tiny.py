"""A target directory, prompts and a configuration so small that a run trains in seconds.

The target is a real Hugging Face directory with random weights: config.json, model.safetensors and
a byte-level tokenizer with a ChatML template. Nothing is downloaded.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy
import tokenizers
from flax import nnx
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dspark_jax.core.config import RunConfig, from_mapping, to_mapping
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named
from dspark_jax.data.dataset import Row, save_dataset
from dspark_jax.data.opened import open_target
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.training.checkpoint import RunRecord, save_drafter, write_record
from dspark_jax.weights.fingerprint import fingerprint

SPECIAL = ("<|im_end|>", "<|im_start|>", "<|pad|>")
END, START, PAD = range(3)
LAST_TOKEN = 258  # of the tokenizer
VOCAB = 272  # some rows that no text uses
MASK = 270
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 4, 4, 2, 8, 48

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and three control tokens; ids 0 to 258."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL) + 256,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[END], pad_token=SPECIAL[PAD]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def make_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under the names of the file; text from them is far from uniform."""
    rng = np.random.default_rng(seed)

    def normal(rows: int, columns: int, scale: float) -> np.ndarray:
        return rng.normal(0, scale, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN, 1.0),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
        "lm_head.weight": normal(VOCAB, HIDDEN, 0.8),
    }
    weights["lm_head.weight"][LAST_TOKEN + 1 :] = 0  # never the likeliest
    wide, narrow = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        shapes = {
            "self_attn.q_proj": (wide, HIDDEN),
            "self_attn.k_proj": (narrow, HIDDEN),
            "self_attn.v_proj": (narrow, HIDDEN),
            "self_attn.o_proj": (HIDDEN, wide),
            "mlp.gate_proj": (MLP, HIDDEN),
            "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }
        for name, (rows, columns) in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = normal(rows, columns, columns**-0.5)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, np.float32)
    return weights


def make_target(
    directory: Path,
    *,
    seed: int = 0,
    change: Callable[[dict[str, np.ndarray]], None] = lambda weights: None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the target.

    Args:
        seed: of the weights.
        change: may alter the weights in place before they are written.
        config: fields of config.json that differ.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weights = make_weights(seed)
    change(weights)
    safetensors.numpy.save_file(weights, directory / "model.safetensors")
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": MLP,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": START,
        "eos_token_id": END,
    }
    (directory / "config.json").write_text(json.dumps(fields | dict(config or {})))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    make_tokenizer().save_pretrained(directory)
    return directory


def write_prompts(path: Path, number: int) -> Path:
    """A file of prompts that differ in a few characters."""
    words = ("sun", "rain", "wind", "snow", "fog")
    rows = [{"prompt": f"{words[i % len(words)]} {i}?"} for i in range(number)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mapping(target: Path, prompts: Path, changes: Mapping[str, Any] | None = None) -> dict:
    """The fields of a run as plain values; `changes` has dotted names: {"train.num_steps": 3}."""
    fields: dict[str, Any] = {
        "target": str(target),
        "target_dtype": "float32",
        "mesh": {"fsdp": 1, "tp": 1},
        "data": {
            "prompts": str(prompts),
            "max_prompt_tokens": 64,
            "max_new_tokens": 16,
            "generation_batch": 4,
            "sequence_length": 96,
            "validation_fraction": 0.3,
        },
        "drafter": {
            "target_layer_ids": (0, 2),
            "mask_token_id": MASK,
            "block_size": 3,
            "num_layers": 1,
            "markov_rank": 8,
            "dtype": "float32",
        },
        "train": {
            "global_batch_size": 2,
            "num_anchors": 8,
            "num_steps": 6,
            "learning_rate": 3e-3,
            "log_every": 1,
            "validate_every": 2,
            "checkpoint_every": 2,
            "validation_rows": 2,
            "loss_chunk": 64,
        },
    }
    for name, value in (changes or {}).items():
        *groups, field = name.split(".")
        place = fields
        for group in groups:
            place = place.setdefault(group, {})
        place[field] = value
    return fields


def make_config(target: Path, prompts: Path, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """The same as the dataclass that `train.run` takes."""
    return from_mapping(RunConfig, mapping(target, prompts, changes))


def write_config(path: Path, config: RunConfig) -> Path:
    """A config file for the commands."""
    path.write_text(
        "from ml_collections import config_dict\n\n\n"
        f"def get_config():\n    return config_dict.ConfigDict({to_mapping(config)!r})\n"
    )
    return path


def make_run(workdir: Path, config: RunConfig, step: int = 1) -> Path:
    """A run's folder as training leaves it, with a drafter that has learnt nothing."""
    with jax.set_mesh(make_mesh()):
        target = open_target(config.target, config.target_dtype)
        shape = DrafterShape.of(config.drafter, target.model.config)
        drafter = jax.jit(lambda key: Drafter(shape, rngs=nnx.Rngs(key)))(jax.random.key(1))
        write_record(
            workdir,
            RunRecord(
                config,
                target.fingerprint,
                str(target.directory),
                target.model.config,
                ("LlamaForCausalLM",),
            ),
        )
        save_drafter(workdir, jax.device_get(named(drafter)), step)
    return workdir


def make_data(directory: Path, target: Path, documents: Mapping[str, Sequence[int]]) -> Path:
    """A prepared data set of these documents; their tokens after the fourth are supervised."""
    rows = []
    for name, ids in documents.items():
        tokens = np.asarray(ids, np.int32)
        rows.append(Row(name, "test", tokens, np.arange(len(tokens)) >= 4))
    save_dataset(directory, rows, fingerprint(target, str(target)), 0)
    return directory
