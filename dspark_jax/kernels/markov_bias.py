"""The Markov bias of DSpark: a low-rank row of W1 W2, picked by the previous token, on the logits.

`markov_bias` is equivalent to these lines, `latent_bias` to the last two:

    latent = w1[prev]
    bias = jnp.einsum("nr,vr->nv", latent.astype(w2.dtype), w2, preferred_element_type=jnp.float32)
    return (logits.astype(jnp.float32) + bias).astype(logits.dtype)

The kernels gather the rows, multiply and add in one pass over the logits: the bias, as large as
the logits, never reaches memory. Letters: N rows (all leading dims), V draft vocabulary, Vt target
vocabulary, R Markov rank. Source: DSpark (arXiv 2607.05147), the sequential heads.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dspark_jax.core.sharding import platform

# "interpret" runs the Mosaic kernel, its copies of rows included, as plain XLA on any machine.
Implementation = Literal["xla", "mosaic_tpu", "triton", "interpret"]

_MAX_RANK = 4096  # up to here the smallest tiles of the Mosaic kernel fit into 16 MiB of VMEM


def markov_bias_reference(logits: Array, prev: Array, w1: Array, w2: Array) -> Array:
    """`markov_bias` in plain jnp, for one device."""
    return latent_bias_reference(logits, _rows(w1, prev), w2)


def latent_bias_reference(logits: Array, latent: Array, w2: Array) -> Array:
    """`latent_bias` in plain jnp, for one device."""
    bias = exact_dot(latent.astype(w2.dtype), w2, latent.ndim - 1, 1)
    return (logits.astype(jnp.float32) + bias).astype(logits.dtype)


def markov_bias(
    logits: Array,
    prev: Array,
    w1: Array,
    w2: Array,
    *,
    implementation: Implementation | None = None,
) -> Array:
    """Adds `w1[prev] @ w2.T` to the logits. Differentiable in logits, w1 and w2.

    Products are taken in the dtype of w2 (in full float32 if that is float32) and summed in
    float32; so are the gradients, over rows, repeated ids and devices. A float32 w1 beside a
    bfloat16 w2 is welcome: only the gathered rows are rounded.

    Under a mesh of explicit axes each device works on its part of the logits, whose sharding the
    result has: any axes on the leading dims, any on V. (A V that its axis does not divide is no
    sharded array at all in JAX: pad an odd vocabulary, or leave it whole.) The other operands are
    resharded to fit, at no cost where they do: prev like the leading dims, w2 along V. From a
    replicated w1 the kernel itself gathers. A w1 sharded over R is gathered where it lies and the
    latents are exchanged, not the table. One sharded over its rows is first copied to all: avoid.

    On a TPU an R that 128 divides (the public models: 256) is the good case: XLA stores narrower
    tables transposed, so that a gather of rows, its own as well, first takes a copy of w1.

    Args:
      logits: float [..., V].
      prev: i32 [...], previous tokens in ids of the *target* vocabulary, clipped to [0, Vt).
      w1: float [Vt, R].
      w2: float [V, R].
      implementation: None takes the kernel of the default backend (CPU: "xla") where it supports
        the operands, else "xla".

    Returns:
      [..., V] in the dtype of logits.

    Raises:
      NotImplementedError: if a kernel asked for by name does not support the operands.
      ValueError: if shapes do not fit.
    """
    if prev.shape != logits.shape[:-1]:
        raise ValueError(f"prev {prev.shape} is not the leading shape of logits {logits.shape}")
    implementation = choose(implementation, logits, w1, w2)
    rank = jax.typeof(w1).sharding.spec[1] if mesh_is_explicit() else None
    if rank is None:
        return _place_and_add(logits, prev, w1, w2, implementation)
    # Each device looks up its columns, for all the rows of whose latents it will have a part; in
    # float32, so that the gradient sums repeated ids in float32.
    *batch, _ = jax.typeof(logits).sharding.spec
    ids = P(*[None] * prev.ndim) if set(axis_names(rank)) & set(axis_names(*batch)) else P(*batch)
    lookup = jax.shard_map(_rows, in_specs=(P(None, rank), ids), out_specs=P(*ids, rank))
    latent = lookup(jax.reshard(w1, P(None, rank)).astype(jnp.float32), jax.reshard(prev, ids))
    return _place_and_add(logits, None, latent, w2, implementation)


def latent_bias(
    logits: Array, latent: Array, w2: Array, *, implementation: Implementation | None = None
) -> Array:
    """Adds `latent @ w2.T` to the logits: `markov_bias` for heads that compute their latents.

    Args:
      logits: float [..., V].
      latent: float [..., R].
      w2: float [V, R].
      implementation: as in `markov_bias`; dtypes, shardings and errors too.

    Returns:
      [..., V] in the dtype of logits. Differentiable in all three operands.
    """
    if latent.shape[:-1] != logits.shape[:-1]:
        raise ValueError(f"latent {latent.shape} and logits {logits.shape} differ in leading dims")
    implementation = choose(implementation, logits, latent, w2)
    return _place_and_add(logits, None, latent, w2, implementation)


def choose(implementation: Implementation | None, logits, source, w2) -> Implementation:
    """The implementation to run; source is what holds the latents, w1 or [..., R]."""
    if w2.shape != (logits.shape[-1], source.shape[-1]):
        raise ValueError(f"w2 {w2.shape} is not [V, R] = {(logits.shape[-1], source.shape[-1])}")
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation {implementation!r} is none of {get_args(Implementation)}")
    backend = {"tpu": "mosaic_tpu", "gpu": "triton"}.get(platform(), "xla")
    axis_types = set(jax.sharding.get_abstract_mesh().axis_types)
    obstacle = None
    if any(x.dtype not in (jnp.float32, jnp.bfloat16) for x in (logits, source, w2)):
        obstacle = f"float32 and bfloat16 only, not {logits.dtype}, {source.dtype}, {w2.dtype}"
    elif 0 in (logits.size, source.size, w2.size):
        obstacle = f"nothing to do for logits {logits.shape} and w2 {w2.shape}"
    elif w2.shape[1] > _MAX_RANK:
        obstacle = f"rank {w2.shape[1]} is above {_MAX_RANK}"
    elif AxisType.Auto in axis_types or len(axis_types) > 1:
        obstacle = "the axes of the mesh must be explicit, or all manual (inside a shard_map)"
    if obstacle is None or implementation == "xla":
        return implementation or backend
    if implementation is None:
        return "xla"
    raise NotImplementedError(f"Markov bias by {implementation}: {obstacle}")


# ---- Sharding and gradients -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Where the operands live, as the logits want it. None without a mesh of explicit axes."""

    logits: P | None = None
    prev: P | None = None
    source: P | None = None  # w1 or the latents
    w2: P | None = None
    batch_axes: tuple[str, ...] = ()
    vocab_axes: tuple[str, ...] = ()

    def per_device(self, body: Callable, in_specs: tuple, out_specs: P | tuple) -> Callable:
        """`body` on each device's part; the collectives are those that `body` names."""
        if self.logits is None:
            return body
        return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def mesh_is_explicit() -> bool:
    """Whether arrays say on which devices their parts lie."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def axis_names(*spec: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in a part of a PartitionSpec."""
    return tuple(jax.tree.leaves(spec))


def _place_and_add(logits, prev, source, w2, implementation):
    """`_bias` of operands that are first resharded to lie where the logits want them."""
    if not mesh_is_explicit():
        return _bias(logits, prev, source, w2, implementation, _Layout())
    *batch, v = spec = jax.typeof(logits).sharding.spec
    specs = (P(*batch), P(*batch, None) if prev is None else P(None, None), P(v, None))
    operands = jax.reshard((prev, source, w2), specs)
    layout = _Layout(spec, *specs, batch_axes=axis_names(*batch), vocab_axes=axis_names(v))
    return _bias(logits, *operands, implementation, layout)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _bias(logits, prev, source, w2, implementation, layout):
    """logits + w1[prev] @ w2.T, source being w1; or, without prev, with source as the latents."""
    in_specs = (layout.logits, layout.prev, layout.source, layout.w2)
    body = functools.partial(_bias_on_device, implementation=implementation)
    return layout.per_device(body, in_specs, layout.logits)(logits, prev, source, w2)


def _bias_fwd(logits, prev, source, w2, implementation, layout):
    return _bias(logits, prev, source, w2, implementation, layout), (prev, source, w2)


def _bias_bwd(implementation, layout, saved, g):
    # Plain products over a whole [N, V]: XLA does these well, so there is no kernel for them.
    def body(prev, source, w2, g):
        latent = source if prev is None else _rows(source, prev)
        flat_g = g.reshape(-1, g.shape[-1]).astype(w2.dtype)
        flat_latent = latent.reshape(-1, latent.shape[-1]).astype(w2.dtype)
        d_w2 = jax.lax.psum(exact_dot(flat_g, flat_latent, 0, 0), layout.batch_axes)
        d_source = jax.lax.psum(exact_dot(flat_g, w2, 1, 0), layout.vocab_axes).reshape(
            latent.shape
        )
        if prev is not None:
            d_source = jax.lax.psum(_add_rows(source, prev, d_source), layout.batch_axes)
        return d_source.astype(source.dtype), d_w2.astype(w2.dtype)

    in_specs = (layout.prev, layout.source, layout.w2, layout.logits)
    d_source, d_w2 = layout.per_device(body, in_specs, (layout.source, layout.w2))(*saved, g)
    return g, None, d_source, d_w2


_bias.defvjp(_bias_fwd, _bias_bwd)


def _rows(w1, prev):
    return jnp.take(w1, prev, axis=0, mode="clip")


def _add_rows(w1, prev, g):
    """The float32 table, shaped like w1, in which row i is the sum of the g whose prev is i."""
    prev = jnp.clip(prev, 0, w1.shape[0] - 1)
    return jnp.zeros(w1.shape, jnp.float32).at[prev].add(g.astype(jnp.float32))


def exact_dot(a, b, a_axis, b_axis):
    """The product over one axis of each, summed in float32; exact for float32 on every chip."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision, jnp.float32)


# ---- One device -------------------------------------------------------------------------------


def _bias_on_device(logits, prev, source, w2, *, implementation):
    if implementation == "xla":
        if prev is None:
            return latent_bias_reference(logits, source, w2)
        return markov_bias_reference(logits, prev, source, w2)
    flat = logits.reshape(-1, logits.shape[-1])
    if prev is None:
        source = source.reshape(-1, source.shape[-1])
    else:
        prev = jnp.clip(prev.reshape(-1).astype(jnp.int32), 0, source.shape[0] - 1)
    if implementation == "triton":
        out = _triton(flat, prev, source, w2)
    else:
        out = _mosaic(flat, prev, source, w2, interpret=implementation == "interpret")
    return out.reshape(logits.shape)


def _mosaic(logits, prev, source, w2, *, interpret=False):
    """The TPU kernel on [N, V]. Its ragged edges need no masks: Mosaic drops what is written
    outside, and what is read there reaches only what is outside."""
    (n, v), r = logits.shape, w2.shape[1]
    rank = max(r, 128)  # in VMEM the last dim is padded to 128 lanes
    block_n = min(n, 512, max(16, 2**17 // rank // 16 * 16))
    block_v = min(v, max(128, min(2048, 2**19 // rank, 2**18 // block_n) // 128 * 128))
    tile = pl.BlockSpec((block_n, block_v), lambda i, j: (i, j))
    w2_tile, w2_axis, scratch = pl.BlockSpec((block_v, r), lambda i, j: (j, 0)), 1, []
    if r % 128:  # XLA stores these with V last, to fill the lanes: as they lie they are [R, V]
        w2, w2_tile, w2_axis = w2.T, pl.BlockSpec((r, block_v), lambda i, j: (0, j)), 0
    if prev is None:
        kernel, operands = _mosaic_latent_kernel, (logits, source, w2)
        in_specs = [tile, pl.BlockSpec((block_n, r), lambda i, j: (i, 0)), w2_tile]
    else:
        # HBM holds whole tiles of rows, which a copy cannot split: 8 of float32, 16 of bfloat16.
        group = 32 // source.dtype.itemsize
        if source.shape[0] % group:  # no real vocabulary; a copy of the table
            source = jnp.pad(source, ((0, -source.shape[0] % group), (0, 0)))
        prev = jnp.pad(prev, (0, -n % block_n)).reshape(-1, 1, block_n)
        kernel, operands = _mosaic_markov_kernel, (logits, prev, source, w2)
        ids = pl.BlockSpec((1, 1, block_n), lambda i, j: (i, 0, 0), memory_space=pltpu.SMEM)
        in_specs = [tile, ids, pl.BlockSpec(memory_space=pltpu.HBM), w2_tile]
        scratch = [
            pltpu.VMEM((block_n, r), jnp.float32),
            pltpu.VMEM((block_n, group, r), source.dtype),
            pltpu.SemaphoreType.DMA,
        ]
    return pl.pallas_call(
        functools.partial(kernel, w2_axis=w2_axis),
        out_shape=jax.ShapeDtypeStruct((n, v), logits.dtype),
        grid=(pl.cdiv(n, block_n), pl.cdiv(v, block_v)),
        in_specs=in_specs,
        out_specs=tile,
        scratch_shapes=scratch,
        input_output_aliases={} if interpret else {0: 0},  # the TPU interpreter fails at it
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="markov_bias",
    )(*operands)


def _mosaic_latent_kernel(logits_ref, latent_ref, w2_ref, out_ref, *, w2_axis):
    bias = exact_dot(latent_ref[...].astype(w2_ref.dtype), w2_ref[...], 1, w2_axis)
    out_ref[...] = (logits_ref[...].astype(jnp.float32) + bias).astype(out_ref.dtype)


def _mosaic_markov_kernel(
    logits_ref, prev_ref, w1_ref, w2_ref, out_ref, latent_ref, group_ref, semaphore, *, w2_axis
):
    block_n, group, _ = group_ref.shape

    def copy(k):
        start = pl.multiple_of(prev_ref[0, 0, k] & -group, group)
        return pltpu.make_async_copy(w1_ref.at[pl.ds(start, group)], group_ref.at[k], semaphore)

    def pick(k):
        rows, wanted = group_ref[k].astype(jnp.float32), prev_ref[0, 0, k] & (group - 1)
        here = jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) == wanted
        latent_ref[pl.ds(k, 1), :] = jnp.sum(jnp.where(here, rows, 0.0), 0, keepdims=True)

    @pl.when(pl.program_id(1) == 0)  # once for all tiles of V
    def gather():
        pl.loop(0, block_n)(lambda k: copy(k).start())
        pl.loop(0, block_n)(lambda k: copy(k).wait())
        pl.loop(0, block_n)(pick)

    _mosaic_latent_kernel(logits_ref, latent_ref, w2_ref, out_ref, w2_axis=w2_axis)


def _triton(logits, prev, source, w2, *, interpret=False):
    """The GPU kernel on [N, V]: tiles of powers of two whose loads and stores are masked."""
    (n, v), r = logits.shape, w2.shape[1]
    if prev is None:
        prev = jnp.arange(n, dtype=jnp.int32)  # latents are a table in which row n asks for row n
    block_n = min(64, max(16, pl.next_power_of_2(n)))
    block_v = min(128, max(16, pl.next_power_of_2(v)))
    block_r = min(128 // w2.dtype.itemsize, max(16, pl.next_power_of_2(r)))
    return pl.pallas_call(
        functools.partial(_triton_kernel, block_n=block_n, block_v=block_v, block_r=block_r),
        out_shape=jax.ShapeDtypeStruct((n, v), logits.dtype),
        grid=(pl.cdiv(n, block_n), pl.cdiv(v, block_v)),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="markov_bias",
    )(logits, prev, source, w2)


def _triton_kernel(logits_ref, prev_ref, w1_ref, w2_ref, out_ref, *, block_n, block_v, block_r):
    (n, v), r = logits_ref.shape, w2_ref.shape[1]
    rows = pl.program_id(0) * block_n + jnp.arange(block_n)
    cols = pl.program_id(1) * block_v + jnp.arange(block_v)
    ids = plgpu.load(prev_ref.at[rows], mask=rows < n, other=0)

    def add(step, bias):
        rank = step * block_r + jnp.arange(block_r)
        inside = (rank < r)[None, :]
        at_w1, at_w2 = (ids[:, None], rank[None, :]), (cols[:, None], rank[None, :])
        latent = plgpu.load(w1_ref.at[at_w1], mask=(rows < n)[:, None] & inside, other=0)
        w2 = plgpu.load(w2_ref.at[at_w2], mask=(cols < v)[:, None] & inside, other=0)
        return bias + exact_dot(latent.astype(w2.dtype), w2, 1, 1)

    bias = jnp.zeros((block_n, block_v), jnp.float32)
    bias = jax.lax.fori_loop(0, pl.cdiv(r, block_r), add, bias)
    at = (rows[:, None], cols[None, :])
    mask = (rows < n)[:, None] & (cols < v)[None, :]
    out = plgpu.load(logits_ref.at[at], mask=mask, other=0).astype(jnp.float32) + bias
    plgpu.store(out_ref.at[at], out.astype(out_ref.dtype), mask=mask)
