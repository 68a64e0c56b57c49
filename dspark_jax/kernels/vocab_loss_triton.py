"""The three stages of vocab_loss_xla.py on a GPU: XLA's products, and one Triton pass for each.

The products of a chunk are left to XLA, which calls the vendor's. Around them every row is one
program that walks along the vocabulary in tiles, with running numbers in registers: a stage reads
the chunk's [C, V] once. The softmax and the bias of a position are read where its rows need them,
never copied for them. Triton does not keep what goes beyond a row's end inside: masks do.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dspark_jax.kernels.vocab_loss_xla import (
    Chunk,
    Logits,
    Options,
    Slopes,
    Sums,
    multiply_back,
    raw_logits,
)

_TILE = 2048
_LOWEST = -1e30  # below any logit; unlike -inf, differences of two are numbers


def logits(
    chunk: Chunk, head: Array, w2: Array | None, options: Options, *, interpret=False
) -> Logits:
    """Stage 1."""
    base, zt, bias = raw_logits(chunk, head, w2, options)
    top_t, total_t, best = _each_row(_softmax_kernel, [zt], [], zt, "ffi", interpret)
    z = base
    if bias is None:
        top, total, _ = _each_row(_softmax_kernel, [z], [], z, "ffi", interpret)
    else:
        place = jnp.arange(z.shape[0]) if not chunk.latent_at_spot else chunk.spot
        kernel = functools.partial(_softmax_kernel, biased=True)
        z, top, total, _ = _each_row(kernel, [z, bias], [place], z, "zffi", interpret)
    return Logits(
        z=z,
        zt=zt,
        base=base if options.softcap else None,
        top=top,
        total=total,
        teacher_top=top_t,
        teacher_total=total_t,
        teacher_best=best,
    )


def _softmax_kernel(z_ref, *refs, width, biased=False):
    """Largest logit, sum of exp(z - largest) and arg-max of a row; with a bias, z + bias too."""
    top_ref, total_ref, best_ref = refs[-3:]
    bias_ref, place_ref, out_ref = refs[:3] if biased else (None, None, None)
    row, vocab = pl.program_id(0), z_ref.shape[1]
    place = plgpu.load(place_ref.at[row]) if biased else 0

    def step(tile, carry):
        top, total, best = carry
        ids = tile * width + jnp.arange(width)
        inside = ids < vocab
        z = plgpu.load(z_ref.at[row, ids], mask=inside, other=_LOWEST)
        if biased:
            z = z + plgpu.load(bias_ref.at[place, ids], mask=inside, other=0.0)
            plgpu.store(out_ref.at[row, ids], z, mask=inside)
        higher = jnp.maximum(top, z)
        part = jnp.where(inside, jnp.exp(z - higher), 0.0)
        return higher, total * jnp.exp(top - higher) + part, jnp.where(z > top, ids, best)

    lanes = jnp.full(width, _LOWEST), jnp.zeros(width), jnp.zeros(width, jnp.int32)
    top, total, best = jax.lax.fori_loop(0, pl.cdiv(vocab, width), step, lanes)
    highest = jnp.max(top)
    plgpu.store(top_ref.at[row], highest)
    plgpu.store(total_ref.at[row], jnp.sum(total * jnp.exp(top - highest)))
    plgpu.store(best_ref.at[row], jnp.min(jnp.where(top == highest, best, vocab)))


def sums(
    found: Logits,
    chunk: Chunk,
    lse: Array,
    lse_t: Array,
    mass: Array,
    options: Options,
    *,
    interpret=False,
) -> Sums:
    """Stage 2."""
    numbers = [_places(chunk), lse, chunk.expand(lse_t), chunk.expand(mass)]
    kernel = functools.partial(_sums_kernel, extra=bool(options.kl) or options.renormalise)
    found_sums = _each_row(kernel, [found.z, found.zt], numbers, found.z, "ffff", interpret)
    over_q, over_p, kl, accept = found_sums
    return Sums(over_q, over_p, kl if options.kl else None, accept if options.renormalise else None)


def _sums_kernel(z_ref, zt_ref, place_ref, lse_ref, lse_t_ref, mass_ref, *outs, width, extra):
    row, vocab = pl.program_id(0), z_ref.shape[1]
    numbers = (place_ref, lse_ref, lse_t_ref, mass_ref)
    place, lse, lse_t, mass = (plgpu.load(ref.at[row]) for ref in numbers)

    def step(tile, carry):
        over_q, over_p, kl, accept = carry
        ids = tile * width + jnp.arange(width)
        inside = ids < vocab
        z = plgpu.load(z_ref.at[row, ids], mask=inside, other=0.0)
        zt = plgpu.load(zt_ref.at[place, ids], mask=inside, other=0.0)
        q = jnp.where(inside, jnp.exp(z - lse), 0.0)
        p = jnp.where(inside, jnp.exp(zt - lse_t), 0.0)
        over = q > p
        over_q, over_p = over_q + jnp.where(over, q, 0.0), over_p + jnp.where(over, p, 0.0)
        if extra:
            kl, accept = kl + p * (zt - z), accept + jnp.minimum(q, mass * p)
        return over_q, over_p, kl, accept

    lanes = (jnp.zeros(width),) * 4
    lanes = jax.lax.fori_loop(0, pl.cdiv(vocab, width), step, lanes)
    for ref, values in zip(outs, lanes):
        plgpu.store(ref.at[row], jnp.sum(values))


def gradients(
    found: Logits,
    chunk: Chunk,
    head: Array,
    w2: Array | None,
    d_w2: Array | None,
    lse: Array,
    lse_t: Array,
    slopes: Slopes,
    options: Options,
    *,
    interpret=False,
) -> tuple[Array, Array | None, Array | None]:
    """Stage 3."""
    numbers = [_places(chunk), lse, chunk.expand(lse_t), slopes.level, slopes.lean, slopes.kl]
    numbers += [slopes.hit, slopes.label]
    big = [found.z, found.zt] + ([found.base] if options.softcap else [])
    like = jax.ShapeDtypeStruct(found.z.shape, chunk.hidden.dtype)
    kernel = functools.partial(_gradients_kernel, cap=options.softcap)
    out = _each_row(kernel, big, numbers, like, "zz" if options.softcap else "z", interpret)
    return multiply_back(chunk, head, w2, d_w2, out[-1], out[0])


def _gradients_kernel(z_ref, zt_ref, *refs, width, cap):
    base_ref, *refs = refs if cap else (None, *refs)
    numbers, outs = refs[:8], refs[8:]
    row, vocab = pl.program_id(0), z_ref.shape[1]
    place, lse, lse_t, level, lean, kl, hit, label = (plgpu.load(ref.at[row]) for ref in numbers)

    def step(tile, _):
        ids = tile * width + jnp.arange(width)
        inside = ids < vocab
        z = plgpu.load(z_ref.at[row, ids], mask=inside, other=0.0)
        zt = plgpu.load(zt_ref.at[place, ids], mask=inside, other=0.0)
        q, p = jnp.exp(z - lse), jnp.exp(zt - lse_t)
        d_z = q * (level + jnp.where(q > p, lean, -lean)) - kl * p
        d_z = d_z - jnp.where(ids == label, hit, 0.0)
        plgpu.store(outs[0].at[row, ids], d_z.astype(outs[0].dtype), mask=inside)
        if cap:
            base = plgpu.load(base_ref.at[row, ids], mask=inside, other=0.0)
            d_base = d_z * (1.0 - (base / cap) * (base / cap))
            plgpu.store(outs[1].at[row, ids], d_base.astype(outs[1].dtype), mask=inside)
        return _

    jax.lax.fori_loop(0, pl.cdiv(vocab, width), step, 0)


def _places(chunk: Chunk) -> Array:
    return jnp.arange(chunk.hidden.shape[0]) if chunk.spot is None else chunk.spot


def _each_row(kernel, big, numbers, like, outs: str, interpret: bool) -> list[Array]:
    """One program a row of `like`; outputs: z = as large as `like`, f and i = a number a row."""
    rows, vocab = like.shape
    kinds = {"z": like, "f": ((rows,), jnp.float32), "i": ((rows,), jnp.int32)}
    shapes = [kinds[x] if x == "z" else jax.ShapeDtypeStruct(*kinds[x]) for x in outs]
    width = min(_TILE, max(16, pl.next_power_of_2(vocab)))
    return pl.pallas_call(
        functools.partial(kernel, width=width),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in shapes],
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
        name="vocab_loss_" + getattr(kernel, "func", kernel).__name__.strip("_"),
    )(*big, *numbers)
