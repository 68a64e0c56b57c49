"""The decoder layers of targets: Llama's and Qwen3's, and Gemma's with norms on both sides."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.sharding import einsum, gather_rows, param
from dspark_jax.models.cache import LayerCache, write
from dspark_jax.models.experts import GemmaMoe, Moe
from dspark_jax.models.layers import ACTIVATIONS, Attention, Mlp, attend, attend_causally, rms_norm
from dspark_jax.models.packing import Packing
from dspark_jax.models.target_config import TargetConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class View:
    """What layers of one kind see: their RoPE and their mask."""

    cos: jax.Array  # f32[B, T, rotary/2]
    sin: jax.Array
    mask: jax.Array  # bool[B, T, S]; of packed tokens bool[R, W, S]
    packing: Packing | None = None  # the tokens are R rows in one flat list: B = 1, T = N


def attended(
    attention: Attention,
    x: jax.Array,
    view: View,
    eps: float,
    own: LayerCache | None,
    at: jax.Array | None,
    seen: LayerCache | None = None,
) -> tuple[jax.Array, LayerCache]:
    """Attention of normed x [B, T, D], and the keys and values that were seen.

    Args:
      own: the layer's cache, written at `at` i32[B] onward and then seen; None = without a cache,
        when `at` is None as well, the T tokens see one another.
      seen: keys and values of another layer, in place of its own.
    """
    packing = view.packing
    if seen is None:
        seen = LayerCache(*attention.keys_values(x, view.cos, view.sin, eps))
        if packing is not None:
            seen = packing.keys_values(seen)
        if own is not None:
            seen = write(own, seen.k, seen.v, at)
    k, v = seen.k.astype(x.dtype), seen.v.astype(x.dtype)
    q = attention.queries(x, view.cos, view.sin, eps)
    axes = ("batch", "heads", None, None, None)
    if packing is not None:
        q = packing.rows(q, axes, 3)
    heads = (attend_causally if at is None else attend)(q, k, v, view.mask, attention.scale)
    if packing is not None:
        heads = packing.flat(heads, axes, 3)
    return attention.output(heads), seen


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP, or experts, with residuals."""

    def __init__(self, config: TargetConfig, index: int, *, init, dtype, rngs: nnx.Rngs):
        ones = nnx.initializers.ones
        d = config.hidden_size
        self.eps = config.rms_norm_eps
        options = {"init": init, "dtype": dtype, "rngs": rngs}
        self.input_norm = param(ones, rngs, (d,), (None,), dtype)
        self.attention = Attention(
            d,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qk_norm=config.qk_norm,
            **options,
        )
        self.post_norm = param(ones, rngs, (d,), (None,), dtype)
        if config.has_experts(index):
            self.mlp = Moe(config.experts, d, **options)
        else:
            self.mlp = Mlp(d, config.intermediate_size, **options)

    def __call__(
        self, x: jax.Array, view: View, own: LayerCache | None, at: jax.Array | None
    ) -> tuple[jax.Array, LayerCache]:
        """x [B, T, D] -> the same, and keys and values; `own` and `at` as in `attended`."""
        normed = rms_norm(x, self.input_norm[...], self.eps)
        mixed, seen = attended(self.attention, normed, view, self.eps, own, at)
        x = x + mixed
        return x + self.mlp(rms_norm(x, self.post_norm[...], self.eps)), seen


class GemmaLayer(nnx.Module):
    """Gemma 3 and 4: norms before and after attention and MLP.

    `post_norm` is named as in the files, post_attention_layernorm; here it comes after attention.
    """

    def __init__(self, config: TargetConfig, index: int, *, init, dtype, rngs: nnx.Rngs):
        plain = nnx.initializers.zeros if config.norm_offset else nnx.initializers.ones
        d, own = config.hidden_size, config.gemma4
        heads, head_dim = config.kv_size(index)
        borrows = config.kv_source(index) != index
        self.eps, self.offset = config.rms_norm_eps, config.norm_offset
        options = {"init": init, "dtype": dtype, "rngs": rngs}
        self.input_norm = param(plain, rngs, (d,), (None,), dtype)
        self.attention = Attention(
            d,
            config.num_heads,
            heads,
            head_dim,
            qk_norm=True,
            norm_offset=config.norm_offset,
            scale=config.query_scale,
            v_norm=own is not None,
            k_eq_v=own is not None and own.k_eq_v and not config.slides(index),
            own_kv=not borrows,
            **options,
        )
        self.post_norm = param(plain, rngs, (d,), (None,), dtype)
        self.pre_mlp_norm = param(plain, rngs, (d,), (None,), dtype)
        double = own is not None and own.double_wide_mlp and borrows
        self.mlp = Mlp(d, config.intermediate_size * (1 + double), activation="gelu", **options)
        self.post_mlp_norm = param(plain, rngs, (d,), (None,), dtype)
        if config.experts is not None:
            self.dense_norm = param(plain, rngs, (d,), (None,), dtype)
            self.moe = GemmaMoe(config.experts, d, **options)
        if own is not None:
            self.layer_scalar = param(nnx.initializers.ones, rngs, (1,), (None,), dtype)
        if own is not None and own.per_layer_width:
            width = own.per_layer_width
            self.extra_gate = param(init, rngs, (width, d), (None, "embed"), dtype)
            self.extra_out = param(init, rngs, (d, width), ("embed", None), dtype)
            self.extra_norm = param(plain, rngs, (d,), (None,), dtype)

    def __call__(
        self,
        x: jax.Array,
        view: View,
        own: LayerCache | None,
        at: jax.Array | None,
        seen: LayerCache | None = None,
        extra: jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """x [B, T, D] -> the same, and the keys and values seen.

        Args:
          own, at, seen: as in `attended`.
          extra: [B, T, P] this layer's own input of each token.
        """
        mixed, seen = attended(
            self.attention, self._norm(x, self.input_norm), view, self.eps, own, at, seen
        )
        x = x + self._norm(mixed, self.post_norm)
        mixed = self.mlp(self._norm(x, self.pre_mlp_norm))
        if hasattr(self, "moe"):
            mixed = self._norm(mixed, self.dense_norm) + self.moe(x, self.eps)
        x = x + self._norm(mixed, self.post_mlp_norm)
        if extra is not None:
            x = x + self._norm(self._gated(x, extra), self.extra_norm)
        if hasattr(self, "layer_scalar"):
            x = x * self.layer_scalar[...].astype(x.dtype)
        return x, seen

    def _norm(self, x: jax.Array, weight: nnx.Param) -> jax.Array:
        return rms_norm(x, weight[...], self.eps, self.offset)

    def _gated(self, x: jax.Array, extra: jax.Array) -> jax.Array:
        """The layer's own input, gated by x and projected to D."""
        out = ("batch", None, None)
        gate = einsum("btd,pd->btp", x, self.extra_gate[...].astype(x.dtype), out=out)
        gated = ACTIVATIONS["gelu"](gate) * extra
        return einsum("btp,dp->btd", gated, self.extra_out[...].astype(x.dtype), out=out)


class PerLayerInputs(nnx.Module):
    """Gemma 4: of every token one small vector for each layer, from its id and its embedding."""

    def __init__(self, config: TargetConfig, *, init, dtype, rngs: nnx.Rngs):
        self.num_layers, self.eps = config.num_layers, config.rms_norm_eps
        width = config.gemma4.per_layer_width
        wide = config.num_layers * width
        table = (config.gemma4.per_layer_vocab, wide)
        self.embed = param(init, rngs, table, ("vocab", "embed"), dtype)
        axes = (None, "embed")
        self.projection = param(init, rngs, (wide, config.hidden_size), axes, dtype)
        self.norm = param(nnx.initializers.ones, rngs, (width,), (None,), dtype)

    def __call__(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """tokens i32[B, T] and their (scaled) embeddings [B, T, D] -> [B, T, layers, P]."""
        out = ("batch", None, None)
        width = self.norm.shape[0]
        shape = (*tokens.shape, self.num_layers, width)
        rows = gather_rows(self.embed[...], tokens, out)
        of_id = (rows * jnp.asarray(width**0.5, rows.dtype)).astype(x.dtype)
        projected = einsum("btd,pd->btp", x, self.projection[...].astype(x.dtype), out=out)
        projected = projected * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        normed = rms_norm(projected.reshape(shape), self.norm[...], self.eps)
        return (normed + of_id.reshape(shape)) * jnp.asarray(2**-0.5, x.dtype)
