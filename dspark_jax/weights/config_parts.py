"""Parts of config.json that drafters of every algorithm share, and what they are told of."""

import dataclasses
from typing import Any

from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.weights.compare import ROPE_FIELDS
from dspark_jax.weights.fingerprint import Fingerprint


@dataclasses.dataclass(frozen=True)
class Verifier:
    """The target as engines are told of it: a hub id or an absolute folder, and its classes."""

    name_or_path: str
    architectures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the weights come from; kept in dspark_jax.json."""

    step: int
    recipe: dict[str, Any]  # the RunConfig as plain values
    fingerprint: Fingerprint  # of the target


def speculators_head(
    architecture: str, algorithm: str, proposals: int, verifier: Verifier
) -> dict[str, Any]:
    """How a config.json of the speculators layout begins: the drafter's kind and its target."""
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": "0.9.0",  # of the format
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": proposals,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
    }


def layer_config(shape: DrafterShape, model_type: str = "qwen3") -> dict[str, Any]:
    """The decoder layers, in the names of transformers' Qwen3Config."""
    config = shape.config
    return {
        "model_type": model_type,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": rope_parameters(shape.rope),
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab_size,  # the target's
        "attention_bias": False,
        "tie_word_embeddings": False,
        # Of a target that caps its logits (Gemma); readers without that field do not cap.
        **({"final_logit_softcapping": shape.logit_softcap} if shape.logit_softcap else {}),
    }


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """RoPE in the names of transformers: what this kind reads, and nothing it does not."""
    values = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.kind]}
    if "original_max_position" in values:
        values["original_max_position_embeddings"] = values.pop("original_max_position")
    if not values.get("attention_factor", True):
        del values["attention_factor"]  # 0 = follows from the factor
    if rope.partial_rotary_factor != 1.0:
        values["partial_rotary_factor"] = rope.partial_rotary_factor
    return {"rope_theta": rope.theta, "rope_type": rope.kind, **values}
