"""The DSpark drafter: a parallel backbone over tapped context, sequential heads on top.

Training (`blocks`, `latents`) and decoding (`extend`, `draft_hidden`) share the same layers and
the same attention; decoding is training with one anchor per row. DFlash is this drafter with
markov_head "none" and no confidence head.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import param, spec
from dspark_jax.kernels.anchor_attention import anchor_attention
from dspark_jax.models.cache import KVCache, LayerCache, write
from dspark_jax.models.drafter_base import DrafterBase
from dspark_jax.models.heads import ConfidenceHead, MarkovHead
from dspark_jax.models.layers import Attention, Mlp, RopeConfig, rms_norm, rope_angles
from dspark_jax.models.linear import linear
from dspark_jax.models.packing import Packing
from dspark_jax.models.remat import rematerialised
from dspark_jax.models.target import TargetConfig, TargetHead, check_taps


@dataclasses.dataclass(frozen=True)
class DrafterShape:
    """A drafter's configuration with everything that it takes over from its target."""

    config: DrafterConfig
    hidden_size: int
    vocab_size: int
    target_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    embed_scale: float = 1.0  # of the borrowed embedding and LM head, as in `TargetHead`
    logit_softcap: float = 0.0

    @classmethod
    def of(cls, config: DrafterConfig, target: TargetConfig) -> "DrafterShape":
        """Fills in the target's sizes; where first weights come from is no part of a shape.

        RoPE is that of the target's layers which see everything. Positions count tokens, also where
        the target's M-RoPE gives an image fewer.

        Raises:
          UserError: taps out of range or the last layer; a mask id without an embedding row.
        """
        config = dataclasses.replace(config, init_from="", init_new="")
        check_taps(config.target_layer_ids, target.num_layers)
        masked = config.algorithm == "dspark"
        if masked and not 0 <= config.mask_token_id < target.vocab_size:
            raise UserError(
                f"drafter.mask_token_id={config.mask_token_id} has no row in the target's "
                f"embedding ({target.vocab_size} rows): choose an unused id below that"
            )
        if not 0 <= config.vocab_size <= target.vocab_size:
            raise UserError(
                f"drafter.vocab_size={config.vocab_size}: the target's vocabulary has "
                f"{target.vocab_size} tokens; use 0 for all of them"
            )
        shape = cls(
            config=config,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            target_layers=target.num_layers,
            num_heads=config.num_heads or target.num_heads,
            num_kv_heads=config.num_kv_heads or target.num_kv_heads,
            head_dim=config.head_dim or target.head_dim,
            intermediate_size=config.intermediate_size or target.intermediate_size,
            rms_norm_eps=target.rms_norm_eps,
            rope=target.rope,
            max_positions=target.max_positions,
            embed_scale=target.embed_scale,
            logit_softcap=target.logit_softcap,
        )
        if shape.num_heads % shape.num_kv_heads:
            raise UserError(
                f"drafter.num_heads={shape.num_heads} is not a multiple of "
                f"drafter.num_kv_heads={shape.num_kv_heads}"
            )
        return shape

    @property
    def draft_vocab(self) -> int:
        """V_d, the tokens it can propose."""
        return self.config.vocab_size or self.vocab_size

    @property
    def pruned(self) -> bool:
        """Whether it proposes less than the target's vocabulary."""
        return self.draft_vocab < self.vocab_size


class DraftLayer(nnx.Module):
    """Qwen3-style decoder layer whose keys and values are [context ; block]."""

    def __init__(self, shape: DrafterShape, *, init, rngs: nnx.Rngs):
        ones = nnx.initializers.ones
        d = shape.hidden_size
        self.input_norm = param(ones, rngs, (d,), (None,), jnp.float32)
        self.attention = Attention(
            d,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            qk_norm=True,
            init=init,
            dtype=jnp.float32,
            rngs=rngs,
        )
        self.post_norm = param(ones, rngs, (d,), (None,), jnp.float32)
        self.mlp = Mlp(d, shape.intermediate_size, init=init, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x, cos, sin, context: LayerCache, first, stop, eps: float) -> jax.Array:
        """x [B, A*G, D]; the context is projected without input norm, the block with it."""
        normed = rms_norm(x, self.input_norm[...], eps)
        q = self.attention.queries(normed, cos, sin, eps)
        k, v = self.attention.keys_values(normed, cos, sin, eps)
        attended = anchor_attention(q, context.k, context.v, k, v, first, stop)
        x = x + self.attention.output(attended)
        return x + self.mlp(rms_norm(x, self.post_norm[...], eps))


class Drafter(DrafterBase):
    """Only what is trained; embedding and LM head are the target's and come as arguments.

    With a pruned vocabulary it also holds `draft_ids` i32[V_d] (models/drafter_base.py).
    """

    def __init__(self, shape: DrafterShape, *, rngs: nnx.Rngs):
        config, d = shape.config, shape.hidden_size
        init = nnx.initializers.normal(0.02)
        ones = nnx.initializers.ones
        self.shape = shape
        wide = len(config.target_layer_ids) * d
        self.fc = param(init, rngs, (d, wide), (None, "embed"), jnp.float32)
        self.hidden_norm = param(ones, rngs, (d,), (None,), jnp.float32)
        self.layers = nnx.List(
            [DraftLayer(shape, init=init, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm = param(ones, rngs, (d,), (None,), jnp.float32)
        rank = config.markov_rank
        if rank:
            self.markov = MarkovHead(
                config.markov_head,
                shape.vocab_size,
                rank,
                d,
                draft_vocab=shape.draft_vocab,
                init=config.head_init,
                rngs=rngs,
            )
        if shape.pruned:
            self.draft_ids = nnx.Variable(jnp.arange(shape.draft_vocab, dtype=jnp.int32))
        if config.confidence_head:
            seen = rank if config.confidence_with_markov else 0
            self.confidence = ConfidenceHead(d, seen, init=config.head_init, rngs=rngs)

    def context(self, taps: jax.Array, positions: jax.Array) -> tuple[LayerCache, ...]:
        """Keys and values of context tokens for every layer, projected once per token.

        Args:
          taps: [B, T, L, D] raw outputs of the tapped target layers.
          positions: i32[B, T].

        Returns:
          Per layer keys [B, K, H, T] and values [B, K, T, H].
        """
        shape, dtype = self.shape, self.dtype
        batch, length, layers, d = taps.shape
        joined = taps.astype(dtype).reshape(batch, length, layers * d)
        features = linear(joined, self.fc[...], None, None)
        features = rms_norm(features, self.hidden_norm[...], shape.rms_norm_eps)
        cos, sin = rope_angles(shape.rope, shape.head_dim, positions)
        return tuple(
            LayerCache(*layer.attention.keys_values(features, cos, sin, shape.rms_norm_eps))
            for layer in self.layers
        )

    def backbone(
        self,
        head: TargetHead,
        anchor_tokens: jax.Array,
        anchor_positions: jax.Array,
        context: tuple[LayerCache, ...],
        first: jax.Array,
        stop: jax.Array,
        remat: str = "none",
    ) -> jax.Array:
        """One parallel pass over the blocks [anchor, MASK, MASK, ...].

        Args:
          head: the target's embedding and LM head.
          anchor_tokens, anchor_positions: i32[B, A].
          context: per layer, from `context`.
          first, stop: i32[B, A], the context positions that each block sees: first <= j < stop
            (kernels/anchor_attention.py).
          remat: what the backward pass computes again (models/remat.py).

        Returns:
          Post-norm hidden states [B, A, G, D].
        """
        shape, config = self.shape, self.config
        batch, anchors = anchor_tokens.shape
        block = config.block_size
        slot = jnp.arange(block)
        tokens = jnp.where(slot == 0, anchor_tokens[..., None], config.mask_token_id)
        positions = anchor_positions[..., None] + slot
        x = head.embeddings(tokens.reshape(batch, anchors * block), self.dtype)
        cos, sin = rope_angles(
            shape.rope, shape.head_dim, positions.reshape(batch, anchors * block)
        )
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"draft_layer_{index}"):
                run = functools.partial(layer, eps=shape.rms_norm_eps)
                x = rematerialised(run, remat)(x, cos, sin, context[index], first, stop)
        x = rms_norm(x, self.norm[...], shape.rms_norm_eps)
        # Said outright: with one row and one anchor a reshape forgets which axis was sharded.
        split = (batch, anchors, block, shape.hidden_size)
        return jnp.reshape(x, split, out_sharding=spec("batch", None, None, None))

    def confidence_logits(self, hidden: jax.Array, rows: jax.Array | None) -> jax.Array:
        """f32[...] of hidden [..., D] and W1 rows [..., R] (ignored without Markov features)."""
        seen = rows if self.config.confidence_with_markov and self.config.markov_rank else None
        if self.config.confidence_detach:
            hidden = jax.lax.stop_gradient(hidden)
            seen = None if seen is None else jax.lax.stop_gradient(seen)
        return self.confidence(hidden, seen)

    def empty_cache(self, batch: int, capacity: int) -> KVCache:
        """The context cache of decoding."""
        shape = self.shape
        return KVCache.zeros(
            len(self.layers), batch, capacity, shape.num_kv_heads, shape.head_dim, self.dtype
        )

    def extend(self, cache: KVCache, taps: jax.Array, packing: Packing | None = None) -> KVCache:
        """Writes the context of tokens the target has just run; the caller advances the length.

        Args:
          taps: [B, T, L, D] of the tokens at positions cache.length ... + T - 1; with `packing`
            [1, N, L, D].
        """
        width = taps.shape[1] if packing is None else packing.width
        positions = cache.length[:, None] + jnp.arange(width)
        if packing is not None:
            positions = packing.flat(positions, ("batch", None))
        new = self.context(taps, positions)
        if packing is not None:
            new = tuple(packing.keys_values(layer) for layer in new)
        layers = tuple(
            write(old, layer.k, layer.v, cache.length)
            for old, layer in zip(cache.layers, new, strict=True)
        )
        return dataclasses.replace(cache, layers=layers)

    def begin(
        self, head: TargetHead, taps: jax.Array, following: jax.Array, lengths: jax.Array, size: int
    ) -> KVCache:
        """The context of prompts that the target has run, for `size` positions.

        Args:
          head: the target's.
          taps: [B, T, L, D], right-padded; lengths: i32[B], how many of them count.
          following: i32[B, T], the token after each position (of no interest to this drafter).
        """
        empty = self.empty_cache(taps.shape[0], size)
        return self.commit(head, empty, taps, following, lengths)

    def commit(
        self,
        head: TargetHead,
        state: KVCache,
        taps: jax.Array,
        following: jax.Array,
        count: jax.Array,
        packing: Packing | None = None,
    ) -> KVCache:
        """`state` and the first `count` i32[B] of the positions that the target has just run.

        Arguments as for `begin`; with `packing` the taps are those of its flat list, [1, N, L, D].
        """
        return self.extend(state, taps, packing).advance(count)

    def draft_hidden(self, head: TargetHead, anchor: jax.Array, cache: KVCache) -> jax.Array:
        """Hidden states [B, G, D] of one block per row.

        Args:
          anchor: i32[B], the token at position cache.length, not yet run by the target.
        """
        at = cache.length[:, None]
        hidden = self.backbone(head, anchor[:, None], at, cache.layers, jnp.zeros_like(at), at)
        return hidden[:, 0]
