"""The likeliest token under the Markov bias: product, sum and arg-max in one pass over V.

`markov_best` is equivalent to these lines:

    bias = jnp.einsum("br,vr->bv", latent.astype(w2.dtype), w2, preferred_element_type=jnp.float32)
    return jnp.argmax(logits[slot].astype(jnp.float32) + bias, axis=-1)

It is the step that greedy drafting takes slot after slot. The kernels go through the vocabulary
tile by tile and keep each row's best so far: neither the bias nor the sum, each as large as the
logits of a slot, reaches memory, and the slot is read where it lies. A draft that is drawn needs
its distribution for the test of acceptance, and with it all logits: that is `markov_bias`.
Letters: G slots, B rows, V draft vocabulary, R Markov rank.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec as P

from dspark_jax.kernels.best_token import best_token
from dspark_jax.kernels.markov_bias import (
    Implementation,
    axis_names,
    choose,
    exact_dot,
    mesh_is_explicit,
)


def markov_best_reference(logits: Array, slot: Array, latent: Array, w2: Array) -> Array:
    """`markov_best` in plain jnp, for one device."""
    bias = exact_dot(latent.astype(w2.dtype), w2, 1, 1)
    return jnp.argmax(logits[slot].astype(jnp.float32) + bias, axis=-1).astype(jnp.int32)


def markov_best(
    logits: Array,
    slot: Array,
    latent: Array,
    w2: Array,
    *,
    implementation: Implementation | None = None,
) -> Array:
    """The argmax over V of `logits[slot] + latent @ w2.T`, lowest id among equals.

    Products are taken in the dtype of w2 (in full float32 if that is float32); sums and
    comparisons in float32. A row with NaN gets some id of the vocabulary.

    Under a mesh of explicit axes the logits may be sharded over B and over V. Each device finds
    the best of its part of V; then the devices exchange one number and one id per row. The other
    operands are resharded to fit, at no cost where they do.

    Args:
      logits: float [G, B, V], slots first: a slot is then one stretch of memory on every chip.
      slot: i32[], which of them.
      latent: float [B, R].
      w2: float [V, R].
      implementation: None takes the kernel of the default backend (CPU: "xla") where it supports
        the operands, else "xla".

    Returns:
      i32[B], sharded like the rows of the logits.

    Raises:
      NotImplementedError: if a kernel asked for by name does not support the operands.
      ValueError: if shapes do not fit.
    """
    if logits.ndim != 3 or latent.shape[:-1] != logits.shape[1:2]:
        raise ValueError(f"latent {latent.shape} has not the rows of logits {logits.shape}")
    implementation = choose(implementation, logits, latent, w2)
    slot = jnp.asarray(slot, jnp.int32)
    body = functools.partial(_best_on_device, implementation=implementation)
    if not mesh_is_explicit():
        return body(logits, slot, latent, w2)
    _, batch, v = jax.typeof(logits).sharding.spec
    specs = (P(None, batch, v), P(), P(batch, None), P(v, None))
    operands = jax.reshard((logits, slot, latent, w2), specs)
    body = functools.partial(body, axes=axis_names(v))
    return jax.shard_map(body, in_specs=specs, out_specs=P(batch), check_vma=False)(*operands)


def _best_on_device(logits, slot, latent, w2, *, implementation, axes=()):
    """Ids of the whole vocabulary, of which `axes` of the mesh hold parts."""
    if implementation == "xla":
        bias = exact_dot(latent.astype(w2.dtype), w2, 1, 1)
        chosen = jax.lax.dynamic_index_in_dim(logits, slot, 0, keepdims=False)
        scores = chosen.astype(jnp.float32) + bias
        best = best_token(scores)
        top = jnp.max(scores, axis=-1) if axes else None
    elif implementation == "triton":
        top, best = _triton(logits, slot, latent, w2)
    else:
        top, best = _mosaic(logits, slot, latent, w2, interpret=implementation == "interpret")
    if not axes:
        return best
    size = w2.shape[0]
    best = best + size * jax.lax.axis_index(axes)
    last = size * jax.lax.axis_size(axes) - 1
    return jax.lax.pmin(jnp.where(top == jax.lax.pmax(top, axes), best, last), axes)


def _best_of_tile(logits, bias, first, vocab):
    """Of one tile whose columns begin at `first`: f32[N, 1] scores and i32[N, 1] ids.

    What lies beyond the vocabulary is read as it may be and never wins.
    """
    ids = first + jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    scores = jnp.where(ids < vocab, logits.astype(jnp.float32) + bias, -jnp.inf)
    top = jnp.max(scores, axis=1, keepdims=True)
    return top, jnp.min(jnp.where(scores == top, ids, vocab - 1), axis=1, keepdims=True)


def _mosaic(logits, slot, latent, w2, *, interpret=False):
    """The TPU kernel: (f32[B], i32[B]). The tiles of V come one after the other, and the output
    of the rows, which stays in VMEM meanwhile, holds the best so far."""
    (_, n, v), r = logits.shape, w2.shape[1]
    rank = max(r, 128)  # in VMEM the last dim is padded to 128 lanes
    block_n = min(n, 512, max(16, 2**17 // rank // 16 * 16))
    block_v = min(v, max(128, min(2048, 2**19 // rank, 2**18 // block_n) // 128 * 128))
    w2_tile, w2_axis = pl.BlockSpec((block_v, r), lambda i, j, slot: (j, 0)), 1
    if r % 128:  # XLA stores these with V last, to fill the lanes: as they lie they are [R, V]
        w2, w2_tile, w2_axis = w2.T, pl.BlockSpec((r, block_v), lambda i, j, slot: (0, j)), 0
    column = pl.BlockSpec((block_n, 1), lambda i, j, slot: (i, 0))
    top, best = pl.pallas_call(
        functools.partial(_mosaic_kernel, w2_axis=w2_axis, vocab=v),
        out_shape=[jax.ShapeDtypeStruct((n, 1), kind) for kind in (jnp.float32, jnp.int32)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,  # the slot says which blocks of the logits are copied
            grid=(pl.cdiv(n, block_n), pl.cdiv(v, block_v)),
            in_specs=[
                pl.BlockSpec((None, block_n, block_v), lambda i, j, slot: (slot[0], i, j)),
                pl.BlockSpec((block_n, r), lambda i, j, slot: (i, 0)),
                w2_tile,
            ],
            out_specs=[column, column],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="markov_best",
    )(slot.reshape(1), logits, latent, w2)
    return top[:, 0], best[:, 0]


def _mosaic_kernel(_, logits_ref, latent_ref, w2_ref, top_ref, best_ref, *, w2_axis, vocab):
    tile = pl.program_id(1)

    @pl.when(tile == 0)
    def begin():
        top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
        best_ref[...] = jnp.zeros_like(best_ref)

    bias = exact_dot(latent_ref[...].astype(w2_ref.dtype), w2_ref[...], 1, w2_axis)
    top, best = _best_of_tile(logits_ref[...], bias, tile * logits_ref.shape[1], vocab)
    better = top > top_ref[...]  # not where equal: the earlier tile has the lower ids
    best_ref[...] = jnp.where(better, best, best_ref[...])
    top_ref[...] = jnp.where(better, top, top_ref[...])


def _triton(logits, slot, latent, w2, *, interpret=False):
    """The GPU kernel: (f32[B], i32[B]). All tiles of V at once, to fill the chip; each leaves its
    best, and XLA takes the best of these."""
    (_, n, v), r = logits.shape, w2.shape[1]
    block_n = min(64, max(16, pl.next_power_of_2(n)))
    block_v = min(128, max(16, pl.next_power_of_2(v)))
    block_r = min(128 // w2.dtype.itemsize, max(16, pl.next_power_of_2(r)))
    blocks = {"block_n": block_n, "block_v": block_v, "block_r": block_r}
    tiles = pl.cdiv(v, block_v)
    tops, ids = pl.pallas_call(
        functools.partial(_triton_kernel, **blocks),
        out_shape=[jax.ShapeDtypeStruct((tiles, n), kind) for kind in (jnp.float32, jnp.int32)],
        grid=(pl.cdiv(n, block_n), tiles),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="markov_best",
    )(slot.reshape(1), logits, latent, w2)
    top = jnp.max(tops, axis=0)
    return top, jnp.min(jnp.where(tops == top, ids, v - 1), axis=0)


def _triton_kernel(
    slot_ref, logits_ref, latent_ref, w2_ref, top_ref, best_ref, *, block_n, block_v, block_r
):
    (_, n, v), r = logits_ref.shape, w2_ref.shape[1]
    tile = pl.program_id(1)
    rows = pl.program_id(0) * block_n + jnp.arange(block_n)
    cols = tile * block_v + jnp.arange(block_v)

    def add(step, bias):
        rank = step * block_r + jnp.arange(block_r)
        inside = (rank < r)[None, :]
        at_latent, at_w2 = (rows[:, None], rank[None, :]), (cols[:, None], rank[None, :])
        latent = plgpu.load(latent_ref.at[at_latent], mask=(rows < n)[:, None] & inside, other=0)
        w2 = plgpu.load(w2_ref.at[at_w2], mask=(cols < v)[:, None] & inside, other=0)
        return bias + exact_dot(latent.astype(w2.dtype), w2, 1, 1)

    bias = jnp.zeros((block_n, block_v), jnp.float32)
    bias = jax.lax.fori_loop(0, pl.cdiv(r, block_r), add, bias)
    slot = jnp.full((block_n, block_v), slot_ref[0])
    mask = (rows < n)[:, None] & (cols < v)[None, :]
    at = (slot, rows[:, None], cols[None, :])
    logits = plgpu.load(logits_ref.at[at], mask=mask, other=0)
    top, best = _best_of_tile(logits, bias, tile * block_v, v)
    at = (jnp.full((block_n,), tile), rows)
    plgpu.store(top_ref.at[at], jnp.max(top, axis=1), mask=rows < n)
    plgpu.store(best_ref.at[at], jnp.min(best, axis=1), mask=rows < n)
