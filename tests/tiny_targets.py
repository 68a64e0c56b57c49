"""Tiny targets as Hugging Face directories, written without torch and without our own loader."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|mask|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LETTERS = "abcdefgh"  # all that the talking target ever says


def model_config(family: str = "llama", **changes) -> dict:
    """A config.json whose sizes a (4, 2) mesh divides."""
    config = {
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return config | changes


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    """Weights under their names in the file; large enough that every part of the model matters."""
    rng = np.random.default_rng(seed)
    d, h, f = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], d), "model.norm.weight": (d,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (d,),
            "self_attn.q_proj": (queries, d),
            "self_attn.k_proj": (keys, d),
            "self_attn.v_proj": (keys, d),
            "self_attn.o_proj": (d, queries),
            "post_attention_layernorm": (d,),
            "mlp.gate_proj": (f, d),
            "mlp.up_proj": (f, d),
            "mlp.down_proj": (d, f),
        }
        if config["model_type"] == "qwen3":
            layer |= {"self_attn.q_norm": (h,), "self_attn.k_norm": (h,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return rng.normal(0, 0.2, shape).astype(np.float32)

    return {name: draw(shape) for name, shape in shapes.items()}


def write_model(
    directory: Path, config: dict, tensors: dict[str, np.ndarray], files: int = 1, seed: int = 0
) -> Path:
    """config.json and the weights; several files get an index, all in an order of their own."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    rng = np.random.default_rng(seed)
    names = [str(name) for name in rng.permutation(sorted(tensors))]
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number::files]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    shuffled = {str(name): weight_map[name] for name in rng.permutation(names)}
    index = {"metadata": {}, "weight_map": shuffled}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def byte_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte, then the special tokens: any text has one encoding only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return tokenizer


def write_talker(directory: Path, template: str = CHATML, seed: int = 0) -> Path:
    """A chat target that says only the letters a to h, and now and then ends its turn.

    Dimension 0 of the residual stream is a constant that no layer writes to, so column 0 of the
    LM head is a bias: it forbids every other token.
    """
    tokenizer = byte_tokenizer(template)
    config = model_config(vocab_size=264, num_hidden_layers=2, max_position_embeddings=512)
    tensors = random_tensors(config, seed)
    tensors["model.embed_tokens.weight"] *= 5
    tensors["model.embed_tokens.weight"][:, 0] = 8.0
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
    head = tensors["lm_head.weight"]
    head[:, 0] = -50.0
    head[tokenizer.convert_tokens_to_ids([*LETTERS, "<|im_end|>"]), 0] = 0.0
    write_model(directory, config, tensors)
    tokenizer.save_pretrained(directory)
    return directory
