"""The EAGLE-3 drafter (arXiv 2503.01840): one layer that drafts a chain, token after token.

Entry j joins what the target knew at position j, its fused taps, with the token at j + 1. It gives
a hidden state that says what comes at j + 2, and stands in for the taps at j + 1 when the chain
goes on. So a chain at an anchor a starts at entry a - 1; its step k is given the token at a + k and
proposes the one at a + k + 1. It sees the entries up to a - 1, made of taps, and its own steps.

Training unrolls the chains at many anchors (`unroll`, the papers' training-time test), decoding
takes the same `step` at one per row. Shapes as in drafter.py: A anchors, G steps.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.sharding import einsum, param, spec
from dspark_jax.models.cache import KVCache, LayerCache, write
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafter_base import DrafterBase
from dspark_jax.models.layers import Attention, Mlp, masked_softmax, rms_norm, rope_angles
from dspark_jax.models.packing import Packing
from dspark_jax.models.target import TargetHead


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Eagle3State:
    """What decoding keeps between rounds; all of it comes from the target's own taps."""

    cache: KVCache  # entries 0 .. length - 1: the last one has the anchor as its token
    features: jax.Array  # [B, D], fused taps of the last entry, from which the chain starts

    @property
    def length(self) -> jax.Array:
        """i32[B], the position of the anchor."""
        return self.cache.length


def attend_chain(
    q: jax.Array, context: LayerCache, own: LayerCache, visible: jax.Array, live: jax.Array
) -> jax.Array:
    """Attention of one step of every chain to entries of the context and to its own steps.

    Args:
      q: [B, K, Q, A, H].
      context: keys [B, K, H, S] and values [B, K, S, H].
      own: keys [B, K, H, A, G] and values [B, K, A, G, H] of the chains.
      visible: bool[B, A, S], the entries that each chain may see; none is fine.
      live: bool[G], the steps that are there.

    Returns:
      [B, K, Q, A, H].
    """
    size = context.k.shape[-1]
    f32 = {"preferred_element_type": jnp.float32}
    q = q * q.shape[-1] ** -0.5
    scores = jnp.concatenate(
        [
            jnp.einsum("bkqah,bkhs->bkqas", q, context.k, **f32),
            jnp.einsum("bkqah,bkhag->bkqag", q, own.k, **f32),
        ],
        axis=-1,
    )
    live = jnp.ones_like(visible[..., :1]) & live  # [B, A, G], sharded like `visible`
    mask = jnp.concatenate([visible, live], axis=-1)[:, None, None]
    weights = masked_softmax(scores, mask).astype(q.dtype)
    from_context = jnp.einsum("bkqas,bksh->bkqah", weights[..., :size], context.v)
    return from_context + jnp.einsum("bkqag,bkagh->bkqah", weights[..., size:], own.v)


class Eagle3Layer(nnx.Module):
    """A decoder layer whose attention reads [norm(embedding) ; norm(hidden)]."""

    def __init__(self, shape: DrafterShape, *, init, rngs: nnx.Rngs):
        ones, d = nnx.initializers.ones, shape.hidden_size
        self.input_norm = param(ones, rngs, (d,), (None,), jnp.float32)
        self.hidden_norm = param(ones, rngs, (d,), (None,), jnp.float32)
        self.attention = Attention(
            d,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            qk_norm=shape.config.eagle3.qk_norm,
            init=init,
            dtype=jnp.float32,
            rngs=rngs,
            inputs=2 * d,
        )
        self.post_norm = param(ones, rngs, (d,), (None,), jnp.float32)
        self.mlp = Mlp(d, shape.intermediate_size, init=init, dtype=jnp.float32, rngs=rngs)

    def join(self, embeddings: jax.Array, hidden: jax.Array, eps: float) -> tuple:
        """What attention reads, [B, T, 2D], and the normalised hidden states [B, T, D]."""
        normed = rms_norm(hidden, self.hidden_norm[...], eps)
        embeddings = rms_norm(embeddings, self.input_norm[...], eps)
        return jnp.concatenate([embeddings, normed], axis=-1), normed

    def finish(self, residual: jax.Array, attended: jax.Array, eps: float) -> jax.Array:
        """The layer's output [B, T, D] from its residual and what its heads [B, K, Q, T, H] saw."""
        x = residual + self.attention.output(attended)
        return x + self.mlp(rms_norm(x, self.post_norm[...], eps))


class Eagle3Drafter(DrafterBase):
    """Only what is trained; embedding and LM head are the target's and come as arguments.

    With a pruned vocabulary it also holds `draft_ids` i32[V_d] (models/drafter_base.py).
    """

    def __init__(self, shape: DrafterShape, *, rngs: nnx.Rngs):
        config, d = shape.config, shape.hidden_size
        init, ones = nnx.initializers.normal(0.02), nnx.initializers.ones
        self.shape = shape
        count = len(config.target_layer_ids)
        self.fc = param(init, rngs, (d, count * d), (None, "embed"), jnp.float32)
        if config.eagle3.norm_before_fc:
            self.input_norm = param(ones, rngs, (count * d,), (None,), jnp.float32)
        if config.eagle3.fc_norm:
            self.fc_norm = nnx.List(
                [param(ones, rngs, (d,), (None,), jnp.float32) for _ in range(count)]
            )
        self.layers = nnx.List([Eagle3Layer(shape, init=init, rngs=rngs)])
        self.norm = param(ones, rngs, (d,), (None,), jnp.float32)
        if shape.pruned:
            self.draft_ids = nnx.Variable(jnp.arange(shape.draft_vocab, dtype=jnp.int32))

    def features(self, taps: jax.Array) -> jax.Array:
        """Taps [B, T, L, D] of the target fused to [B, T, D]."""
        batch, length, layers, d = taps.shape
        eps, dtype = self.shape.rms_norm_eps, self.dtype
        taps = taps.astype(dtype)
        if self.config.eagle3.fc_norm:
            normed = [rms_norm(taps[:, :, i], w[...], eps) for i, w in enumerate(self.fc_norm)]
            taps = jnp.stack(normed, axis=2)
        joined = taps.reshape(batch, length, layers * d)
        if self.config.eagle3.norm_before_fc:
            joined = rms_norm(joined, self.input_norm[...], eps)
        out = ("batch", None, None)
        return einsum("bti,di->btd", joined, self.fc[...].astype(dtype), out=out)

    def context(
        self, head: TargetHead, features: jax.Array, following: jax.Array, positions: jax.Array
    ) -> LayerCache:
        """Keys [B, K, H, T] and values [B, K, T, H] of entries.

        Args:
          features: [B, T, D]; following: i32[B, T], the token after each of them.
          positions: i32[B, T], of the features.
        """
        shape, layer = self.shape, self.layers[0]
        embeddings = head.embeddings(following, self.dtype)
        x, _ = layer.join(embeddings, features, shape.rms_norm_eps)
        cos, sin = rope_angles(shape.rope, shape.head_dim, positions)
        return LayerCache(*layer.attention.keys_values(x, cos, sin, shape.rms_norm_eps))

    def chain(self, batch: int, anchors: int) -> LayerCache:
        """Room for the keys and values of the steps of A chains per row."""
        shape, steps = self.shape, self.config.block_size
        heads, axes = (batch, shape.num_kv_heads), spec("batch", "heads", None, None, None)
        keys, values = (shape.head_dim, anchors, steps), (anchors, steps, shape.head_dim)
        return LayerCache(
            jnp.zeros((*heads, *keys), self.dtype, out_sharding=axes),
            jnp.zeros((*heads, *values), self.dtype, out_sharding=axes),
        )

    def step(
        self,
        head: TargetHead,
        hidden: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        index: jax.Array,
        context: LayerCache,
        visible: jax.Array,
        own: LayerCache,
    ) -> tuple[jax.Array, LayerCache]:
        """Step `index` i32[] of every chain.

        Args:
          hidden: [B, A, D], the fused taps before the anchor in step 0, then the last step's.
          tokens: i32[B, A], the anchor in step 0, then the last token of the chain.
          positions: i32[B, A], of the entry that the chain starts from: the anchor's less 1.
          context, visible: entries, and bool[B, A, S] which of them come before the anchor.
          own: the chains' earlier steps.

        Returns:
          What the next step is given, [B, A, D], and `own` with this step.
        """
        shape, layer, eps = self.shape, self.layers[0], self.shape.rms_norm_eps
        x, normed = layer.join(head.embeddings(tokens, self.dtype), hidden, eps)
        residual = normed if self.config.eagle3.norm_before_residual else hidden
        cos, sin = rope_angles(shape.rope, shape.head_dim, positions + index)
        q = layer.attention.queries(x, cos, sin, eps)
        k, v = layer.attention.keys_values(x, cos, sin, eps)
        own = LayerCache(
            jax.lax.dynamic_update_index_in_dim(own.k, k.astype(own.k.dtype), index, 4),
            jax.lax.dynamic_update_index_in_dim(own.v, v.astype(own.v.dtype), index, 3),
        )
        steps = jnp.arange(own.v.shape[3])
        live = (steps > 0) & (steps <= index)  # step 0 is an entry of the context
        hidden = layer.finish(residual, attend_chain(q, context, own, visible, live), eps)
        if self.config.eagle3.norm_output:
            hidden = rms_norm(hidden, self.norm[...], eps)
        return hidden, own

    def normed(self, hidden: jax.Array) -> jax.Array:
        """What the LM head is given of a step's hidden states."""
        if self.config.eagle3.norm_output:
            return hidden
        return rms_norm(hidden, self.norm[...], self.shape.rms_norm_eps)

    def unroll(
        self,
        head: TargetHead,
        start: jax.Array,
        tokens: jax.Array,
        positions: jax.Array,
        context: LayerCache,
        visible: jax.Array,
    ) -> jax.Array:
        """Chains that are given their tokens: hidden states [B, A, G, D] for the LM head.

        Args:
          start: [B, A, D], fused taps at the position before each anchor.
          tokens: i32[B, A, G], the anchor and what follows it.
          positions, context, visible: as for `step`.
        """

        @jax.checkpoint  # the weights of attention are made anew in the backward pass
        def step(carry, xs):
            hidden, own = carry
            token, index = xs
            carry = self.step(head, hidden, token, positions, index, context, visible, own)
            return carry, self.normed(carry[0])

        steps = jnp.arange(tokens.shape[2])
        start = (start, self.chain(*tokens.shape[:2]))
        _, hidden = jax.lax.scan(step, start, (jnp.moveaxis(tokens, 2, 0), steps))
        return jnp.moveaxis(hidden, 0, 2)

    def empty_cache(self, batch: int, capacity: int) -> Eagle3State:
        """What decoding starts from."""
        shape = self.shape
        cache = KVCache.zeros(1, batch, capacity, shape.num_kv_heads, shape.head_dim, self.dtype)
        nothing = jnp.zeros(
            (batch, shape.hidden_size), self.dtype, out_sharding=spec("batch", None)
        )
        return Eagle3State(cache, nothing)

    def begin(
        self, head: TargetHead, taps: jax.Array, following: jax.Array, lengths: jax.Array, size: int
    ) -> Eagle3State:
        """The entries of prompts that the target has run, with room for `size` of them.

        Args:
          head: the target's.
          taps: [B, T, L, D], right-padded; lengths: i32[B], how many of them count.
          following: i32[B, T], the token after each position: that of the last one is the anchor.
        """
        empty = self.empty_cache(taps.shape[0], size)
        return self.commit(head, empty, taps, following, lengths)

    def commit(
        self,
        head: TargetHead,
        state: Eagle3State,
        taps: jax.Array,
        following: jax.Array,
        count: jax.Array,
        packing: Packing | None = None,
    ) -> Eagle3State:
        """`state` and the first `count` i32[B] of the positions that the target has just run.

        Arguments as for `begin`; with `packing` the taps are those of its flat list, [1, N, L, D].
        """
        cache, features = state.cache, self.features(taps)
        positions = cache.length[:, None] + jnp.arange(following.shape[1])
        if packing is not None:
            following, positions = (
                packing.flat(x, ("batch", None)) for x in (following, positions)
            )
        new = self.context(head, features, following, positions)
        if packing is not None:
            new = packing.keys_values(new)
            features = packing.rows(features, ("batch", None, None))
        layer = write(cache.layers[0], new.k, new.v, cache.length)
        last = jax.vmap(lambda rows, at: jax.lax.dynamic_index_in_dim(rows, at, keepdims=False))(
            features, jnp.maximum(count - 1, 0)
        )
        last = jnp.where((count > 0)[:, None], last, state.features)
        return Eagle3State(dataclasses.replace(cache, layers=(layer,)).advance(count), last)
