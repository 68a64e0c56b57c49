"""The frozen target: a decoder-only LM (Llama, dense Qwen3) with taps and a functional cache."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import einsum, gather_rows, param
from dspark_jax.models.cache import KVCache, LayerCache, write
from dspark_jax.models.layers import (
    Attention,
    Mlp,
    RopeConfig,
    attend,
    attend_causally,
    rms_norm,
    rope_angles,
)

FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# RoPE kinds and the parameters that have no default.
_ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Shape of a target; hashable, so it may be a static argument."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    max_positions: int
    dtype: str = "float32"

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises queries and keys per head."""
        return self.family == "qwen3"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], dtype: str, where: str = "config.json"):
        """Reads the fields of a Hugging Face config.

        Raises:
          UserError: if the model family, an activation, a bias or a RoPE kind is not covered.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise UserError(
                f"{where}: model_type {family!r} is not supported; targets are "
                f"{', '.join(FAMILIES)}"
            )
        for key, wanted in (
            ("attention_bias", False),
            ("mlp_bias", False),
            ("use_sliding_window", False),
            ("hidden_act", "silu"),
            ("quantization_config", None),
        ):
            if config.get(key, wanted) not in (wanted, None):
                raise UserError(f"{where}: {key}={config[key]!r} is not supported")
        missing = [k for k in ("vocab_size", "hidden_size", "num_hidden_layers") if k not in config]
        missing += [k for k in ("num_attention_heads", "intermediate_size") if k not in config]
        if missing:
            raise UserError(f"{where}: field {missing[0]!r} is missing; is this a model's config?")
        heads = config["num_attention_heads"]
        rope = rope_from_hf(config, where)
        if rope.partial_rotary_factor != 1.0:  # engines disagree on it for these families
            factor = rope.partial_rotary_factor
            raise UserError(f"{where}: partial_rotary_factor={factor} is not supported")
        return cls(
            family=family,
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope,
            tie_embeddings=config.get("tie_word_embeddings", False),
            max_positions=config.get("max_position_embeddings", 2048),
            dtype=dtype,
        )


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetHead:
    """What a drafter borrows from the target, frozen: embedding and LM head."""

    embed: jax.Array  # [V, D]
    lm_head: jax.Array | None  # [V, D]; None = tied to `embed`

    @property
    def weight(self) -> jax.Array:
        """The LM head [V, D]."""
        return self.embed if self.lm_head is None else self.lm_head

    def embeddings(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        """Rows of the embedding, [B, T, D]."""
        return gather_rows(self.embed, tokens, ("batch", None, None)).astype(dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Post-norm hidden [B, T, D] -> logits [B, T, V], float32."""
        weight = self.weight.astype(hidden.dtype)
        out = ("batch", None, "vocab")
        return einsum("btd,vd->btv", hidden, weight, out=out, preferred_element_type=jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """Result of a target pass."""

    hidden: jax.Array  # [B, T, D] last hidden, after the final norm
    taps: jax.Array | None  # [B, T, L, D] raw outputs of the tapped layers
    cache: KVCache | None  # written, not advanced


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: TargetConfig, *, init, dtype, rngs: nnx.Rngs):
        ones = nnx.initializers.ones
        d = config.hidden_size
        self.input_norm = param(ones, rngs, (d,), (None,), dtype)
        self.attention = Attention(
            d,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qk_norm=config.qk_norm,
            init=init,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_norm = param(ones, rngs, (d,), (None,), dtype)
        self.mlp = Mlp(d, config.intermediate_size, init=init, dtype=dtype, rngs=rngs)

    def __call__(self, x, cos, sin, mask, eps: float, cache: LayerCache | None, at):
        """One layer; with a cache, keys and values are written at `at` and read from it."""
        normed = rms_norm(x, self.input_norm[...], eps)
        k, v = self.attention.keys_values(normed, cos, sin, eps)
        if cache is not None:
            cache = write(cache, k, v, at)
            k, v = cache.k.astype(x.dtype), cache.v.astype(x.dtype)
        q = self.attention.queries(normed, cos, sin, eps)
        attention = attend_causally if cache is None else attend
        x = x + self.attention.output(attention(q, k, v, mask))
        return x + self.mlp(rms_norm(x, self.post_norm[...], eps)), cache


class Target(nnx.Module):
    """The verifier. Parameters only; everything else is an argument.

    `config` is static metadata of the pytree.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        init = nnx.initializers.normal(0.02)
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        self.embed = param(init, rngs, table, ("vocab", "embed"), dtype)
        self.layers = nnx.List(
            [
                DecoderLayer(config, init=init, dtype=dtype, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )
        self.norm = param(nnx.initializers.ones, rngs, (config.hidden_size,), (None,), dtype)
        if not config.tie_embeddings:
            self.lm_head = param(init, rngs, table, ("vocab", "embed"), dtype)

    @property
    def head(self) -> TargetHead:
        """Embedding and LM head, for drafters."""
        lm_head = None if self.config.tie_embeddings else self.lm_head[...]
        return TargetHead(self.embed[...], lm_head)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        taps: tuple[int, ...] = (),
        cache: KVCache | None = None,
        documents: jax.Array | None = None,
        positions: jax.Array | None = None,
    ) -> TargetOutput:
        """Runs tokens i32[B, T] through all layers.

        Args:
          tokens: ids; every id must be < V (an embedding lookup would clamp silently).
          taps: layers whose raw outputs are returned, 0-based, -1 = the embedding output.
          cache: if given, the tokens continue each row at `cache.length`; the cache is written
            but its length is not advanced (the caller commits).
          documents: i32[B, T] ids of packed documents, 0 = padding; attention stays inside one.
            Only without a cache; None = one document.
          positions: i32[B, T] restarting per document; None = 0.. or `cache.length`...

        Returns:
          TargetOutput; logits are `target.head.logits(output.hidden)`.
        """
        batch, length = tokens.shape
        cfg = self.config
        steps = jnp.arange(length)
        if cache is not None:
            at = cache.length
            positions = at[:, None] + steps
            mask = jnp.arange(cache.capacity) <= positions[:, :, None]
        else:
            at = None
            mask = jnp.broadcast_to(steps[:, None] >= steps, (batch, length, length))
            if documents is not None:
                mask = mask & (documents[:, :, None] == documents[:, None, :])
            if positions is None:
                positions = jnp.broadcast_to(steps, (batch, length))
        cos, sin = rope_angles(cfg.rope, cfg.head_dim, positions)
        x = self.head.embeddings(tokens, jnp.dtype(cfg.dtype))
        states = {-1: x}
        new_layers = []
        for index, layer in enumerate(self.layers):
            layer_cache = None if cache is None else cache.layers[index]
            with jax.named_scope(f"target_layer_{index}"):
                x, layer_cache = layer(x, cos, sin, mask, cfg.rms_norm_eps, layer_cache, at)
            states[index] = x
            new_layers.append(layer_cache)
        if cache is not None:
            cache = dataclasses.replace(cache, layers=tuple(new_layers))
        tapped = jnp.stack([states[i] for i in taps], axis=2) if taps else None
        return TargetOutput(rms_norm(x, self.norm[...], cfg.rms_norm_eps), tapped, cache)

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache for `batch` rows of `capacity` positions, in the target's dtype."""
        cfg = self.config
        dtype = jnp.dtype(cfg.dtype)
        return KVCache.zeros(cfg.num_layers, batch, capacity, cfg.num_kv_heads, cfg.head_dim, dtype)


def check_taps(taps: tuple[int, ...], num_layers: int, where: str = "drafter") -> None:
    """Refuses taps that are out of range, unordered or the last layer.

    The last layer's output is ambiguous between engines (before or after the final norm).
    """
    if not taps:
        raise UserError(f"{where}.target_layer_ids is empty: name at least one target layer")
    for tap in taps:
        if tap == num_layers - 1:
            raise UserError(
                f"{where}.target_layer_ids: {tap} is the target's last layer; its output is "
                f"ambiguous (before or after the final norm), use at most {num_layers - 2}"
            )
        if not -1 <= tap < num_layers:
            raise UserError(
                f"{where}.target_layer_ids: {tap} is out of range for a target of {num_layers} "
                f"layers, use -1 (embeddings) to {num_layers - 2}"
            )
    if list(taps) != sorted(set(taps)):
        raise UserError(f"{where}.target_layer_ids={taps}: must be strictly increasing")
