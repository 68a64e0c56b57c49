"""Products with weights [out, in]: of the compute dtype, or int8 with a scale per output channel.

8-bit weights are symmetric: W = scale[:, None] * int8, the scale such that the largest entry of a
row is 127. Only the matrices of attention and MLP are stored so; norms, embedding and LM head keep
the target's dtype, and with them what a drafter borrows.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from dspark_jax.core.sharding import einsum, platform, spec

# The matrices that may be int8, by the last part of their name -> leading axes that form the rows.
ROWS = {"q": 3, "k": 2, "v": 2, "o": 1, "gate": 1, "up": 1, "down": 1}
_FEW_ROWS = 64  # up to so many rows the order of a product matters to XLA:CPU
_DIGIT_ROWS = 64  # up to so many rows XLA:CPU multiplies int8 faster than what it converts


def linear(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array | None,
    out: str | None,
    dtype=None,
    leading: tuple[str | None, str | None] = ("batch", None),
) -> jax.Array:
    """x [B, T, I] @ weight [O, I].T -> [B, T, O]; `out` = logical axis of O.

    Args:
      scale: f32[O] of an int8 weight; None = the weight is a float.
      dtype: of the result, as which a product with floats is summed; None = that of x.
      leading: logical axes of the first two dimensions.
    """
    axes = (*leading, out)
    rows = x.shape[0] * x.shape[1]
    on_cpu = platform() == "cpu"
    if scale is None:
        weight = weight.astype(x.dtype)
        kind = {"preferred_element_type": dtype or x.dtype}
        if on_cpu and x.dtype == jnp.float32 and 1 < rows <= _FEW_ROWS:
            return _weight_first(x, weight, axes)
        if rows == 1 and x.dtype == jnp.bfloat16 and on_cpu:
            # XLA:CPU has kernels for matrices of bfloat16 and none for a vector: it would convert
            # the weight to float32 first, every time.
            x = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
            return einsum("bti,oi->bto", x, weight, out=axes, **kind)[:, :1]
        return einsum("bti,oi->bto", x, weight, out=axes, **kind)
    if on_cpu and rows <= _DIGIT_ROWS:
        products = _by_digits(x, weight, axes)
    else:  # the conversion is part of the product's loads
        f32 = {"preferred_element_type": jnp.float32}
        products = einsum("bti,oi->bto", x, weight.astype(x.dtype), out=axes, **f32)
    return (products * jax.sharding.reshard(scale, spec(out))).astype(x.dtype)


def _weight_first(x: jax.Array, weight: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """x @ weight.T as (weight @ x.T).T, with rows of zeros up to a multiple of 4 where few do.

    XLA:CPU's product packs its right-hand side first: as such the weight costs twice its reading.
    """
    batch, length, _ = x.shape
    free = 0 if axes[0] is None else 1  # a dimension that no mesh axis cuts
    size, others = x.shape[free], x.shape[1 - free]
    padded = -(-size // (step := 4 // math.gcd(others, 4))) * step
    if others * (padded - size) < 4:
        x = jnp.pad(x, [(0, padded - size if axis == free else 0) for axis in range(3)])
    found = einsum("oi,bti->obt", weight, x, out=(axes[2], *axes[:2]))
    return found.transpose(1, 2, 0)[:batch, :length]


def _by_digits(x: jax.Array, weight: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """x @ weight.T in float32 through products of int8, exact but for the rounding of x.

    Every row of x becomes two int8 digits, 127ths of its largest entry and 254ths of those: an
    error of at most 1/64516 of that entry. No float copy of the weight is ever made.
    """
    length = x.shape[1]
    x = x.astype(jnp.float32)
    unit = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127, 1e-30)
    high = jnp.round(x / unit)
    low = jnp.round((x / unit - high) * 254)
    digits = jnp.concatenate([high, low], axis=1).astype(jnp.int8)
    sums = einsum("bti,oi->bto", digits, weight, out=axes, preferred_element_type=jnp.int32)
    sums = sums.astype(jnp.float32)
    return (sums[:, :length] + sums[:, length:] / 254) * unit


def matrix(weight: nnx.Param, rows: int, out: str | None, inner: str | None) -> jax.Array:
    """A weight with heads unfolded as the matrix [O, I]; `out` and `inner` = its logical axes."""
    shape = (int(np.prod(weight.shape[:rows])), -1)
    return jnp.reshape(weight[...], shape, out_sharding=spec(out, inner))


def scales(module: nnx.Module, name: str) -> jax.Array | None:
    """Of the int8 parameter `name`; None where it is a float."""
    return getattr(module, f"{name}_scale")[...] if hasattr(module, f"{name}_scale") else None


def quantise_rows(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int8 [O, I] and scales f32[O] of a float matrix; a row of zeros has scale 1."""
    weight = np.asarray(weight, np.float32)
    largest = np.abs(weight).max(axis=1)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    return np.round(weight / scale[:, None]).astype(np.int8), scale


def dequantised(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """A target's parameters by name, float32 in place of int8 matrices and their scales."""
    floats = {}
    for name, value in arrays.items():
        if value.dtype == jnp.int8:
            scale = arrays[f"{name}_scale"]
            shape = (*scale.shape, *[1] * (value.ndim - scale.ndim))
            floats[name] = value.astype(jnp.float32) * scale.reshape(shape)
        elif arrays.get(name.removesuffix("_scale"), value).dtype != jnp.int8:
            floats[name] = value
    return floats


def with_int8(layers: nnx.List) -> None:
    """Makes the matrices of these layers' attention and MLP int8 parameters beside their scales.

    For the abstract target of a loader: of values it makes none, they come from the files.
    """
    for layer in layers:
        for module in (layer.attention, layer.mlp):
            for name, rows in ROWS.items():
                if not hasattr(module, name):
                    continue
                weight = getattr(module, name)[...]
                axes = jax.typeof(weight).sharding.spec
                scales = jnp.ones(weight.shape[:rows], jnp.float32, out_sharding=P(*axes[:rows]))
                setattr(module, name, nnx.Param(weight.astype(jnp.int8)))
                setattr(module, f"{name}_scale", nnx.Param(scales))
