"""RoPE as Hugging Face configs say it, of which there are several ways."""

from collections.abc import Mapping
from typing import Any

from dspark_jax.core.errors import UserError
from dspark_jax.models.layers import RopeConfig

# RoPE kinds and the parameters that have no default.
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "proportional": (),
}


def ropes_from_hf(config: Mapping[str, Any], where: str) -> tuple[RopeConfig, RopeConfig | None]:
    """RoPE of the layers that see everything, and of sliding layers if the config has such.

    Gemma keeps two: `rope_parameters` by kind of layer, or in older files `rope_theta` with
    `rope_scaling` and `rope_local_base_freq`.
    """
    nested = config.get("rope_parameters") or {}
    if "full_attention" in nested or "sliding_attention" in nested:
        top = {key: x for key, x in config.items() if not key.startswith("rope_")}
        parts = [
            top | {"rope_parameters": nested.get(f"{x}_attention")} for x in ("full", "sliding")
        ]
        return rope_from_hf(parts[0], where), rope_from_hf(parts[1], where)
    if config.get("rope_local_base_freq") is None:
        return rope_from_hf(config, where), None
    positions = config.get("max_position_embeddings")
    local = {"rope_theta": config["rope_local_base_freq"], "max_position_embeddings": positions}
    return rope_from_hf(config, where), rope_from_hf(local, where)


def rope_from_hf(config: Mapping[str, Any], where: str) -> RopeConfig:
    """RoPE of a config, from whichever place its writer used.

    theta may stand at the top, in `rope_parameters` (transformers 5) or `rope_scaling`; values
    that disagree are an error, never a choice, and so is a parameter that would be ignored.
    """
    old, new = config.get("rope_scaling") or {}, config.get("rope_parameters") or {}
    nested = {**old, **new}
    sources = (config, old, new)
    thetas = {float(d["rope_theta"]) for d in sources if d.get("rope_theta") is not None}
    if len(thetas) != 1:
        raise UserError(f"{where}: rope_theta is {sorted(thetas) or 'missing'}; need one value")
    for key in sorted(set(old) & set(new) - {"rope_theta"}):
        if old[key] != new[key]:
            raise UserError(
                f"{where}: {key} is {old[key]!r} in rope_scaling and {new[key]!r} in "
                "rope_parameters; need one value"
            )
    kind = nested.get("rope_type") or nested.get("type") or "default"
    if kind not in _ROPE_NEEDS:
        raise UserError(f"{where}: rope_type {kind!r} is not supported")
    for key in _ROPE_NEEDS[kind]:
        if nested.get(key) is None:
            raise UserError(f"{where}: rope_type {kind!r} needs {key!r}, which is missing")
    for key, default in (("mscale", None), ("mscale_all_dim", None), ("truncate", True)):
        if nested.get(key, default) not in (default, None):
            raise UserError(f"{where}: RoPE parameter {key}={nested[key]!r} is not supported")
    original = nested.get("original_max_position_embeddings")
    original = original or config.get("original_max_position_embeddings")
    partial = nested.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    return RopeConfig(
        theta=thetas.pop(),
        kind=kind,
        factor=float(nested.get("factor") or 1.0),
        low_freq_factor=float(nested.get("low_freq_factor") or 1.0),
        high_freq_factor=float(nested.get("high_freq_factor") or 4.0),
        original_max_position=int(original or config.get("max_position_embeddings") or 0),
        beta_fast=float(nested.get("beta_fast") or 32.0),
        beta_slow=float(nested.get("beta_slow") or 1.0),
        attention_factor=float(nested.get("attention_factor") or 0.0),
        partial_rotary_factor=float(partial),
    )
