"""The frozen target: a decoder-only LM with taps and a functional cache.

Families and their options are in target_config.py, the layers in decoder.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import gather_rows, param
from dspark_jax.models.cache import KVCache
from dspark_jax.models.decoder import DecoderLayer, GemmaLayer, PerLayerInputs, View
from dspark_jax.models.layers import mrope_angles, rms_norm, rope_angles
from dspark_jax.models.linear import linear
from dspark_jax.models.packing import Packing
from dspark_jax.models.target_config import TargetConfig


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """cap * tanh(logits / cap), as Gemma does with its logits; 0 = as they are."""
    return cap * jnp.tanh(logits / cap) if cap else logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetHead:
    """What a drafter borrows from the target, frozen: embedding and LM head.

    With Gemma's factor on the embedding and cap on the logits, so both sides have them.
    """

    embed: jax.Array  # [V, D]
    lm_head: jax.Array | None  # [V, D]; None = tied to `embed`
    embed_scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    softcap: float = dataclasses.field(default=0.0, metadata={"static": True})

    @property
    def weight(self) -> jax.Array:
        """The LM head [V, D]."""
        return self.embed if self.lm_head is None else self.lm_head

    def embeddings(self, tokens: jax.Array, dtype: Any) -> jax.Array:
        """Rows of the embedding, [B, T, D], times its factor in the embedding's own dtype."""
        rows = gather_rows(self.embed, tokens, ("batch", None, None))
        if self.embed_scale != 1.0:
            rows = rows * jnp.asarray(self.embed_scale, rows.dtype)
            kind = jnp.finfo(rows.dtype)  # or XLA would not round on the way to float32
            rows = jax.lax.reduce_precision(rows, kind.nexp, kind.nmant)
        return rows.astype(dtype)

    def logits(
        self, hidden: jax.Array, axes: tuple[str | None, str | None] = ("batch", None)
    ) -> jax.Array:
        """Post-norm hidden [B, T, D] -> logits [B, T, V], float32, capped; or with other `axes`."""
        found = linear(hidden, self.weight, None, "vocab", jnp.float32, axes)
        return soft_cap(found, self.softcap)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetOutput:
    """Result of a target pass."""

    hidden: jax.Array  # [B, T, D] last hidden, after the final norm
    taps: jax.Array | None  # [B, T, L, D] raw outputs of the tapped layers
    cache: KVCache | None  # written, not advanced


class Target(nnx.Module):
    """The verifier. Parameters only; everything else is an argument.

    `config` is static metadata of the pytree.
    """

    def __init__(self, config: TargetConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        init = nnx.initializers.normal(0.02)
        options = {"init": init, "dtype": dtype, "rngs": rngs}
        self.config = config
        table = (config.vocab_size, config.hidden_size)
        self.embed = param(init, rngs, table, ("vocab", "embed"), dtype)
        if config.gemma4 is not None and config.gemma4.per_layer_width:
            self.per_layer = PerLayerInputs(config, **options)
        layer = GemmaLayer if config.is_gemma else DecoderLayer
        self.layers = nnx.List([layer(config, i, **options) for i in range(config.num_layers)])
        plain = nnx.initializers.zeros if config.norm_offset else nnx.initializers.ones
        self.norm = param(plain, rngs, (config.hidden_size,), (None,), dtype)
        if not config.tie_embeddings:
            self.lm_head = param(init, rngs, table, ("vocab", "embed"), dtype)

    @property
    def head(self) -> TargetHead:
        """Embedding and LM head, for drafters."""
        lm_head = None if self.config.tie_embeddings else self.lm_head[...]
        return TargetHead(
            self.embed[...], lm_head, self.config.embed_scale, self.config.logit_softcap
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        taps: tuple[int, ...] = (),
        cache: KVCache | None = None,
        documents: jax.Array | None = None,
        positions: jax.Array | None = None,
        embeddings: jax.Array | None = None,
        deepstack: tuple[jax.Array, ...] = (),
        packing: Packing | None = None,
    ) -> TargetOutput:
        """Runs tokens i32[B, T] through all layers.

        Args:
          tokens: ids; every id must be < V (an embedding lookup would clamp silently).
          taps: layers whose raw outputs are returned, 0-based, -1 = the embedding output.
          cache: if given, the tokens continue each row at `cache.length`; the cache is written
            but its length is not advanced (the caller commits).
          documents: i32[B, T] ids of packed documents, 0 = padding; attention stays inside one.
            Only without a cache; None = one document.
          positions: of RoPE, i32[B, T] restarting per document or, for a vision-language target,
            i32[3, B, T] in time, height and width; None = 0.. or `cache.length`...
          embeddings: [B, T, D] in place of the tokens' own, images already merged into them.
          deepstack: [B, T, D] to add behind each of the first layers (Qwen3-VL: features of an
            image at its tokens, 0 elsewhere); not part of these layers' taps.
          packing: the tokens i32[1, N] are those of the R rows of `cache` in one flat list, with
            output as flat; slots of a row beyond its count leave keys behind that nothing sees.

        Returns:
          TargetOutput; logits are `target.head.logits(output.hidden)`.
        """
        cfg = self.config
        at = None if cache is None else cache.length
        views = self._views(tokens.shape, cache, documents, positions, packing)
        x = self.head.embeddings(tokens, jnp.dtype(cfg.dtype))
        if embeddings is not None:
            x = embeddings.astype(x.dtype)
        extra = self.per_layer(tokens, x) if hasattr(self, "per_layer") else None
        states, seen = {-1: x}, []
        for index, layer in enumerate(self.layers):
            source, inputs = cfg.kv_source(index), ()
            own = None if cache is None or source != index else cache.layers[index]
            if cfg.gemma4 is not None:
                borrowed = None if source == index else seen[source]
                inputs = (borrowed, None if extra is None else extra[:, :, index])
            with jax.named_scope(f"target_layer_{index}"):
                x, keys_values = layer(x, views[cfg.slides(index)], own, at, *inputs)
            states[index] = x
            seen.append(keys_values)
            if index < len(deepstack):
                x = x + deepstack[index].astype(x.dtype)
        if cache is not None:  # layers that borrow come last and have none
            cache = dataclasses.replace(cache, layers=tuple(seen[: len(cache.layers)]))
        tapped = jnp.stack([states[i] for i in taps], axis=2) if taps else None
        hidden = rms_norm(x, self.norm[...], cfg.rms_norm_eps, cfg.norm_offset)
        return TargetOutput(hidden, tapped, cache)

    def _views(
        self,
        shape: tuple[int, int],
        cache: KVCache | None,
        documents: jax.Array | None,
        positions: jax.Array | None,
        packing: Packing | None,
    ) -> dict[bool, View]:
        """What sliding layers (True) and the others (False) see."""
        width = shape[1] if packing is None else packing.width
        cfg, steps = self.config, jnp.arange(width)
        if cache is not None:
            queries = cache.length[:, None] + steps
            distance = queries[:, :, None] - jnp.arange(cache.capacity)
            mask = distance >= 0
        else:
            queries = jnp.broadcast_to(steps, shape)
            distance = jnp.broadcast_to(steps[:, None] - steps, (*shape, shape[1]))
            mask = distance >= 0
            if documents is not None:
                mask = mask & (documents[:, :, None] == documents[:, None, :])
        if packing is not None:
            queries = packing.flat(queries, ("batch", None))
        positions = queries if positions is None else positions
        if positions.ndim == 3:
            angles = mrope_angles(cfg.rope, cfg.head_dim, positions, cfg.mrope_section)
        else:
            dim = cfg.gemma4.global_head_dim if cfg.gemma4 else cfg.head_dim
            angles = rope_angles(cfg.rope, dim, positions)
        views = {False: View(*angles, mask, packing)}
        if cfg.sliding is not None:
            angles = rope_angles(cfg.sliding.rope, cfg.head_dim, positions)
            views[True] = View(*angles, mask & (distance < cfg.sliding.window), packing)
        return views

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """A cache for `batch` rows of `capacity` positions, in the target's dtype."""
        cfg = self.config
        own = [i for i in range(cfg.num_layers) if cfg.kv_source(i) == i]
        sizes = tuple(cfg.kv_size(i) for i in own)
        return KVCache.of(sizes, batch, capacity, jnp.dtype(cfg.dtype))


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
