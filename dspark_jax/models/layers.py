"""What the target and the drafters have in common: norm, RoPE, attention, MLP.

Weights are stored [out, in], the layout of the checkpoint files, with heads unfolded
([K, Q, H, D] instead of [N*H, D]): reading and writing files is a reshape, never a transpose.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.core.sharding import param, spec
from dspark_jax.models.linear import linear, matrix, scales


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base, scaling kind and its parameters (names of transformers)."""

    theta: float = 10000.0
    kind: str = "default"  # default, linear, llama3, yarn, proportional
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0  # 0 = derived from the factor (yarn)
    partial_rotary_factor: float = 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies f32[rotary/2] and the factor on cos and sin.

    Computed in float64 on the host and kept in float32: bf16-rounded frequencies are 0.6 rad off
    at distance 512 (a fault of a public trainer). Formulas: transformers modeling_rope_utils.
    """
    if rope.kind == "proportional":  # Gemma 4: the last frequencies are 0, they turn nothing
        turned = int(rope.partial_rotary_factor * head_dim // 2)
        inv = 1.0 / rope.theta ** (np.arange(0, 2 * turned, 2, dtype=np.float64) / head_dim)
        inv = np.pad(inv / rope.factor, (0, head_dim // 2 - turned))
        return inv.astype(np.float32), 1.0
    dim = int(head_dim * rope.partial_rotary_factor)
    inv = 1.0 / rope.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    scale = 1.0
    if rope.kind == "linear":
        inv = inv / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / inv
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - smooth) * inv / rope.factor + smooth * inv
        inv = np.where(
            wavelength > low, inv / rope.factor, np.where(wavelength < high, inv, blended)
        )
    elif rope.kind == "yarn":

        def dimension(rotations: float) -> float:
            ratio = rope.original_max_position / (rotations * 2 * math.pi)
            return dim * math.log(ratio) / (2 * math.log(rope.theta))

        first = max(math.floor(dimension(rope.beta_fast)), 0)
        last = min(math.ceil(dimension(rope.beta_slow)), dim - 1)
        last = last + 0.001 if first == last else last
        ramp = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
        inv = inv / rope.factor * ramp + inv * (1 - ramp)
        scale = rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0
    elif rope.kind != "default":
        raise ValueError(f"unknown rope kind {rope.kind!r}")
    return inv.astype(np.float32), scale


def rope_angles(
    rope: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[..., rotary/2], of integer positions of any shape (no table, no clamp)."""
    inv, scale = inverse_frequencies(rope, head_dim)
    angles = positions[..., None].astype(jnp.float32) * inv
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def mrope_angles(
    rope: RopeConfig, head_dim: int, positions: jax.Array, section: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """`rope_angles` of positions i32[3, ...] in time, height and width (interleaved M-RoPE).

    Frequency i belongs to height if i % 3 is 1, to width if it is 2, each as far as its section
    goes, and else to time (transformers, Qwen3VLTextRotaryEmbedding). Three equal rows give
    `rope_angles`.
    """
    inv, scale = inverse_frequencies(rope, head_dim)
    index = np.arange(len(inv))
    time, height, width = positions[..., None].astype(jnp.float32)
    at = jnp.where((index % 3 == 1) & (index < 3 * section[1]), height, time)
    angles = jnp.where((index % 3 == 2) & (index < 3 * section[2]), width, at) * inv
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first dimensions of heads x [..., T, H]; cos, sin [..., T, rotary/2]."""
    half = cos.shape[-1]
    x32 = x.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float, offset: float = 0.0) -> jax.Array:
    """RMSNorm over the last axis in float32, result in the dtype of x.

    The factor is `offset + weight` (Gemma 3 stores its weights less 1); None = no factor.
    """
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    if weight is not None:
        weight = weight.astype(jnp.float32)
        x32 = x32 * (offset + weight if offset else weight)
    return x32.astype(x.dtype)


def masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis in float32; a row with no allowed entry is 0, never NaN."""
    scores = jnp.where(mask, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    scores = scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores), 0.0)
    return weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float = 0.0
) -> jax.Array:
    """Grouped-query attention.

    Args:
      q: [B, K, Q, T, H] (already rotated and normalised).
      k: [B, K, H, S]; v: [B, K, S, H] (the layout of the cache).
      mask: bool[B, T, S], True where the query may see the key.
      scale: of the scores; 0 = H ** -0.5.

    Returns:
      [B, K, Q, T, H].
    """
    scale = scale or q.shape[-1] ** -0.5
    scores = jnp.einsum("bkqth,bkhs->bkqts", q * scale, k, preferred_element_type=jnp.float32)
    weights = masked_softmax(scores, mask[:, None, None]).astype(v.dtype)
    return jnp.einsum("bkqts,bksh->bkqth", weights, v)


def attend_causally(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    scale: float = 0.0,
    chunk: int = 256,
) -> jax.Array:
    """`attend` where key i belongs to query i and no query sees a later key.

    Queries go in chunks that meet only the keys up to their own end: about half the work and the
    memory of the whole square.

    Args:
      q: [B, K, Q, S, H]; k: [B, K, H, S]; v: [B, K, S, H].
      mask: bool[B, S, S], False above the diagonal; scale: as in `attend`.
    """
    length = q.shape[3]
    parts = []
    for first in range(0, length, chunk):
        end = min(first + chunk, length)
        seen = k[..., :end], v[:, :, :end], mask[:, first:end, :end]
        parts.append(attend(q[:, :, :, first:end], *seen, scale))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=3)


class Attention(nnx.Module):
    """Projections of grouped-query attention, with optional per-head norms (Qwen3, Gemma)."""

    def __init__(
        self,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qk_norm: bool,
        init,
        dtype,
        rngs: nnx.Rngs,
        norm_offset: float = 0.0,
        scale: float = 0.0,
        v_norm: bool = False,
        k_eq_v: bool = False,
        own_kv: bool = True,
        inputs: int = 0,
    ):
        """The last of the flags are Gemma 4's.

        Args:
          norm_offset: of the per-head norms; scale: of the scores, both as below.
          v_norm: values are normalised per head, without a factor.
          k_eq_v: the projection of keys gives the values too.
          own_kv: False = the layer sees keys and values of another one.
          inputs: width of what it reads; 0 = hidden, the width of what it writes.
        """
        group, inputs = num_heads // num_kv_heads, inputs or hidden
        heads = (num_kv_heads, group, head_dim)
        ones = nnx.initializers.ones if not norm_offset else nnx.initializers.zeros
        self.norm_offset, self.scale, self.v_norm = norm_offset, scale, v_norm
        self.q = param(init, rngs, (*heads, inputs), ("heads", None, None, "embed"), dtype)
        kv_shape, kv_axes = (num_kv_heads, head_dim, inputs), ("heads", None, "embed")
        if own_kv:
            self.k = param(init, rngs, kv_shape, kv_axes, dtype)
        if own_kv and not k_eq_v:
            self.v = param(init, rngs, kv_shape, kv_axes, dtype)
        self.o = param(init, rngs, (hidden, *heads), ("embed", "heads", None, None), dtype)
        if qk_norm:
            self.q_norm = param(ones, rngs, (head_dim,), (None,), dtype)
        if qk_norm and own_kv:
            self.k_norm = param(ones, rngs, (head_dim,), (None,), dtype)

    def queries(self, x: jax.Array, cos: jax.Array, sin: jax.Array, eps: float) -> jax.Array:
        """[B, T, D] -> [B, K, Q, T, H], normalised and rotated (cos, sin [B, T, rotary/2])."""
        q = self._heads("q", x, 3).transpose(0, 2, 3, 1, 4)
        if hasattr(self, "q_norm"):
            q = rms_norm(q, self.q_norm[...], eps, self.norm_offset)
        return apply_rope(q, cos[:, None, None], sin[:, None, None])

    def keys_values(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """[B, T, D] -> keys [B, K, H, T] and values [B, K, T, H]."""
        k = self._heads("k", x, 2).transpose(0, 2, 1, 3)
        v = self._heads("v", x, 2).transpose(0, 2, 1, 3) if hasattr(self, "v") else k
        if self.v_norm:
            v = rms_norm(v, None, eps)
        if hasattr(self, "k_norm"):
            k = rms_norm(k, self.k_norm[...], eps, self.norm_offset)
        return apply_rope(k, cos[:, None], sin[:, None]).swapaxes(-1, -2), v

    def output(self, heads: jax.Array) -> jax.Array:
        """[B, K, Q, T, H] -> [B, T, D]."""
        batch, kv_heads, group, length, dim = heads.shape
        flat = (batch, length, kv_heads * group * dim)
        heads = heads.transpose(0, 3, 1, 2, 4)
        heads = jnp.reshape(heads, flat, out_sharding=spec("batch", None, "heads"))
        return linear(heads, matrix(self.o, 1, "embed", "heads"), scales(self, "o"), None)

    def _heads(self, name: str, x: jax.Array, rows: int) -> jax.Array:
        """[B, T, D] -> [B, T, K, (Q,) H], as a product of matrices.

        Given the heads one by one, XLA:CPU transposes weights at every call.
        """
        weight = getattr(self, name)
        scale = scales(self, name)
        if scale is not None:
            scale = jnp.reshape(scale, -1, out_sharding=spec("heads"))
        flat = linear(x, matrix(weight, rows, "heads", "embed"), scale, "heads")
        axes = ("batch", None, "heads", *[None] * (rows - 1))
        shape = (*x.shape[:2], *weight.shape[:rows])
        return jnp.reshape(flat, shape, out_sharding=spec(*axes))


ACTIVATIONS = {"silu": jax.nn.silu, "gelu": functools.partial(jax.nn.gelu, approximate=True)}


class Mlp(nnx.Module):
    """A gated MLP: SwiGLU, or Gemma's with the tanh approximation of GELU."""

    def __init__(self, hidden: int, width: int, *, init, dtype, rngs: nnx.Rngs, activation="silu"):
        self.activation = activation
        self.gate = param(init, rngs, (width, hidden), ("mlp", "embed"), dtype)
        self.up = param(init, rngs, (width, hidden), ("mlp", "embed"), dtype)
        self.down = param(init, rngs, (hidden, width), ("embed", "mlp"), dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        gate = linear(x, self.gate[...], scales(self, "gate"), "mlp")
        up = linear(x, self.up[...], scales(self, "up"), "mlp")
        hidden = ACTIVATIONS[self.activation](gate) * up
        return linear(hidden, self.down[...], scales(self, "down"), None)
