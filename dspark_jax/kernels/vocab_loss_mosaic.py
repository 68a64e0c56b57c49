"""The three stages of vocab_loss_xla.py as TPU kernels, tile by tile of the vocabulary.

Each stage is one pass. The first multiplies a tile of the LM head with all rows and positions of
the chunk, keeps the logits (of the chunk alone, as XLA does) and updates the running log-sum-exp;
the second reads them back for the sums; the third turns each tile into d_z, which never leaves
VMEM, and multiplies it with the same tile of head and W2. XLA's own fusions read and write the
chunk's [C, V] about three times as often.

Rows share the teacher's logits of their position by a product with ones and zeros, exact in
float32. The bias is computed by row: here sharing it would save no more than that product costs.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.kernels.vocab_loss_xla import Chunk, Logits, Options, Slopes, Sums

_VMEM = 12 * 2**20  # bytes for tiles, of the 16 MiB that a kernel has without asking


def most_rows(dims: int) -> int:
    """Rows of a chunk whose gradients, f32[C, D], stay in VMEM beside the tiles."""
    return max(16, _VMEM // 3 // (4 * max(dims, 128)) // 16 * 16)


def _tile(vocab: int, rows: int, dims: int, itemsize: int) -> int:
    """Width of a tile: its rows of head, and up to four float32 tiles of logits, twice each."""
    room = _VMEM // 2 // (2 * (dims * itemsize + 4 * 4 * rows))
    return min(vocab, max(128, min(1024, room) // 128 * 128))


def logits(
    chunk: Chunk, head: Array, w2: Array | None, options: Options, *, interpret=False
) -> Logits:
    """Stage 1."""
    (c, dims), p, vocab = chunk.hidden.shape, chunk.teacher.shape[0], head.shape[0]
    width = _tile(vocab, c + p, dims, head.dtype.itemsize)
    latent = _latent_rows(chunk)
    operands = [chunk.hidden, chunk.teacher, head]
    in_specs = [_whole(chunk.hidden), _whole(chunk.teacher), _rows_of(head, width)]
    if latent is not None:
        operands += [latent, w2]
        in_specs += [_whole(latent), _rows_of(w2, width)]
    tiles = [(c, jnp.float32), (p, jnp.float32), *[(c, jnp.float32)] * bool(options.softcap)]
    numbers = [(c, jnp.float32)] * 2 + [(p, jnp.float32)] * 2 + [(p, jnp.int32)]
    kernel = functools.partial(
        _logits_kernel, vocab=vocab, cap=options.softcap, biased=latent is not None
    )
    *tiles, top, total, top_t, total_t, best = _call(
        "logits", kernel, operands, in_specs, tiles, numbers, vocab, width, interpret
    )
    return Logits(
        z=tiles[0],
        zt=tiles[1],
        base=tiles[2] if options.softcap else None,
        top=top[:, 0],
        total=total[:, 0],
        teacher_top=top_t[:, 0],
        teacher_total=total_t[:, 0],
        teacher_best=best[:, 0],
    )


def _logits_kernel(hidden_ref, teacher_ref, head_ref, *refs, vocab, cap, biased):
    latent_ref, w2_ref = refs[:2] if biased else (None, None)
    refs = refs[2:] if biased else refs
    z_ref, zt_ref, *base_ref = refs[:-5]
    top_ref, total_ref, top_t_ref, total_t_ref, best_ref = refs[-5:]
    tile = pl.program_id(0)

    @pl.when(tile == 0)
    def start():
        for ref in (top_ref, top_t_ref):
            ref[...] = jnp.full(ref.shape, -jnp.inf)
        for ref in (total_ref, total_t_ref, best_ref):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    z = base = _capped(_dot(hidden_ref[...], head_ref[...], 1), cap)
    zt = _capped(_dot(teacher_ref[...], head_ref[...], 1), cap)
    if base_ref:
        base_ref[0][...] = base
    if biased:
        dtype = hidden_ref.dtype  # as XLA multiplies float32 on this chip beside bfloat16
        z = z + _dot(latent_ref[...].astype(dtype), w2_ref[...].astype(dtype), 1)
    z_ref[...], zt_ref[...] = z, zt
    width = z.shape[1]
    ids = tile * width + jax.lax.broadcasted_iota(jnp.int32, zt.shape, 1)
    if vocab % width:
        inside = tile * width + jax.lax.broadcasted_iota(jnp.int32, z.shape, 1) < vocab
        z = jnp.where(inside, z, -jnp.inf)
        zt = jnp.where(ids < vocab, zt, -jnp.inf)
    largest = zt.max(1, keepdims=True)
    here = jnp.where(zt == largest, ids, 2**30).min(1, keepdims=True)
    best_ref[...] = jnp.where(largest > top_t_ref[...], here, best_ref[...])
    for values, top, total in ((z, top_ref, total_ref), (zt, top_t_ref, total_t_ref)):
        higher = jnp.maximum(top[...], values.max(1, keepdims=True))
        part = jnp.exp(values - higher).sum(1, keepdims=True)
        total[...] = total[...] * jnp.exp(top[...] - higher) + part
        top[...] = higher


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
    c, vocab = found.z.shape
    p = found.zt.shape[0]
    width = _tile(vocab, c + p, 0, 0)
    columns = [chunk.spot, lse, lse_t, mass if options.renormalise else None]
    columns = [None if x is None else x[:, None] for x in columns]
    given = [x for x in columns if x is not None]
    kernel = functools.partial(
        _sums_kernel,
        vocab=vocab,
        shared=chunk.spot is not None,
        kl=bool(options.kl),
        renormalise=options.renormalise,
    )
    over_q, over_p, kl, kl_t, accept = _call(
        "sums",
        kernel,
        [found.z, found.zt, *given],
        [_column(c, width), _column(p, width), *map(_whole, given)],
        [],
        [(c, jnp.float32)] * 3 + [(p, jnp.float32), (c, jnp.float32)],
        vocab,
        width,
        interpret,
    )
    return Sums(
        over_q[:, 0],
        over_p[:, 0],
        chunk.expand(kl_t[:, 0]) - kl[:, 0] if options.kl else None,
        accept[:, 0] if options.renormalise else None,
    )


def _sums_kernel(z_ref, zt_ref, *refs, vocab, shared, kl, renormalise):
    spot_ref = refs[0] if shared else None
    lse_ref, lse_t_ref, *mass_ref = refs[shared : 2 + shared + renormalise]
    over_q_ref, over_p_ref, kl_ref, kl_t_ref, accept_ref = outs = refs[-5:]

    @pl.when(pl.program_id(0) == 0)
    def start():
        for ref in outs:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    z, zt = _inside(z_ref[...], vocab), _inside(zt_ref[...], vocab)
    q, p_t = jnp.exp(z - lse_ref[...]), jnp.exp(zt - lse_t_ref[...])
    p = _expand(spot_ref, p_t)
    over = q > p
    over_q_ref[...] += jnp.where(over, q, 0.0).sum(1, keepdims=True)
    over_p_ref[...] += jnp.where(over, p, 0.0).sum(1, keepdims=True)
    if kl:  # p is 0 outside the vocabulary, the logits are -inf there
        kl_ref[...] += jnp.where(p > 0, p * z, 0.0).sum(1, keepdims=True)
        kl_t_ref[...] += jnp.where(p_t > 0, p_t * zt, 0.0).sum(1, keepdims=True)
    if renormalise:
        whole = _expand(spot_ref, mass_ref[0][...] * p_t)
        accept_ref[...] += jnp.minimum(q, whole).sum(1, keepdims=True)


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
    (c, vocab), (p, dims) = found.z.shape, chunk.teacher.shape
    latent = _latent_rows(chunk)
    width = _tile(vocab, c + p, dims, head.dtype.itemsize)
    operands = [found.z, found.zt, head, lse[:, None], lse_t[:, None]]
    in_specs = [_column(c, width), _column(p, width), _rows_of(head, width)]
    in_specs += [_whole(x) for x in operands[3:]]
    numbers = (slopes.level, slopes.lean, slopes.kl, slopes.hit, slopes.label)
    extra = [x[:, None] for x in numbers]
    extra += [] if chunk.spot is None else [chunk.spot[:, None]]
    operands, in_specs = operands + extra, in_specs + [_whole(x) for x in extra]
    if options.softcap:
        operands, in_specs = [*operands, found.base], [*in_specs, _column(c, width)]
    aliases, outs, out_specs = {}, [(c, dims)], [_whole(chunk.hidden)]
    if latent is not None:
        aliases = {len(operands) + 2: 2}
        operands += [latent, w2, d_w2]
        in_specs += [_whole(latent), _rows_of(w2, width), _rows_of(d_w2, width)]
        outs, out_specs = [*outs, latent.shape, d_w2.shape], [*out_specs, *in_specs[-3::2]]
    kernel = functools.partial(
        _gradients_kernel,
        vocab=vocab,
        shared=chunk.spot is not None,
        kl=bool(options.kl),
        cap=options.softcap,
        biased=latent is not None,
        dtype=chunk.hidden.dtype,
    )
    d_hidden, *rest = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in outs],
        grid=(pl.cdiv(vocab, width),),
        in_specs=in_specs,
        out_specs=out_specs,
        input_output_aliases={} if interpret else aliases,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="vocab_loss_gradients",
    )(*operands)
    if latent is None:
        return d_hidden, None, None
    d_latent, d_w2 = rest
    if chunk.latent_at_spot:
        d_latent = jax.ops.segment_sum(d_latent, chunk.spot, chunk.latent.shape[0])
    return d_hidden, d_latent, d_w2


def _gradients_kernel(
    z_ref, zt_ref, head_ref, lse_ref, lse_t_ref, *refs, vocab, shared, kl, cap, biased, dtype
):
    level_ref, lean_ref, kl_ref, hit_ref, label_ref, *refs = refs
    spot_ref, *refs = refs if shared else (None, *refs)
    base_ref, *refs = refs if cap else (None, *refs)
    latent_ref, w2_ref, d_w2_ref, *outs = refs if biased else (None, None, None, *refs)
    tile, width = pl.program_id(0), z_ref.shape[1]

    @pl.when(tile == 0)
    def start():
        for ref in outs[:2]:
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    q = jnp.exp(_inside(z_ref[...], vocab) - lse_ref[...])
    p = _expand(spot_ref, jnp.exp(_inside(zt_ref[...], vocab) - lse_t_ref[...]))
    lean = lean_ref[...]
    d_z = q * (level_ref[...] + jnp.where(q > p, lean, -lean))
    if kl:
        d_z = d_z - kl_ref[...] * p
    ids = tile * width + jax.lax.broadcasted_iota(jnp.int32, q.shape, 1)
    d_z = d_z - jnp.where(ids == label_ref[...], hit_ref[...], 0.0)
    d_base = d_z
    if cap:
        d_base = d_z * (1.0 - jnp.square(_inside(base_ref[...], vocab, 0.0) / cap))

    def add(rows):
        """What lies behind the last row of a table may be anything, NaN too."""
        outs[0][...] += _dot(d_base.astype(dtype), rows(head_ref), 0)
        if biased:
            outs[1][...] += _dot(d_z.astype(dtype), rows(w2_ref).astype(dtype), 0)

    if biased:
        share = jax.lax.dot_general(
            d_z.astype(dtype),
            latent_ref[...].astype(dtype),
            (((0,), (0,)), ((), ())),
            _precision(dtype),
            jnp.float32,
        )
        outs[2][...] = d_w2_ref[...] + share
    if vocab % width == 0:
        add(lambda ref: ref[...])
        return

    def masked(ref):
        row = tile * width + jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        return jnp.where(row < vocab, ref[...], jnp.zeros((), ref.dtype))

    last = tile == pl.num_programs(0) - 1
    pl.when(last)(lambda: add(masked))
    pl.when(jnp.logical_not(last))(lambda: add(lambda ref: ref[...]))


def _call(name, kernel, operands, in_specs, tiles, numbers, vocab, width, interpret) -> list[Array]:
    """Over the tiles of the vocabulary in turn: outputs [rows, V] and then [rows, 1]."""
    return pl.pallas_call(
        kernel,
        out_shape=[
            *(jax.ShapeDtypeStruct((rows, vocab), dtype) for rows, dtype in tiles),
            *(jax.ShapeDtypeStruct((rows, 1), dtype) for rows, dtype in numbers),
        ],
        grid=(pl.cdiv(vocab, width),),
        in_specs=in_specs,
        out_specs=[
            *(_column(rows, width) for rows, _ in tiles),
            *(pl.BlockSpec((rows, 1), lambda j: (0, 0)) for rows, _ in numbers),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="vocab_loss_" + name,
    )(*operands)


def _latent_rows(chunk: Chunk) -> Array | None:
    return chunk.expand(chunk.latent) if chunk.latent_at_spot else chunk.latent


def _whole(x: Array) -> pl.BlockSpec:
    return pl.BlockSpec(x.shape, lambda j: (0, 0))


def _rows_of(table: Array, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((width, table.shape[1]), lambda j: (j, 0))


def _column(rows: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((rows, width), lambda j: (0, j))


def _inside(values: Array, vocab: int, other: float = -jnp.inf) -> Array:
    """A tile [rows, width] with `other` beyond the vocabulary."""
    width = values.shape[1]
    if vocab % width == 0:
        return values
    ids = pl.program_id(0) * width + jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    return jnp.where(ids < vocab, values, other)


def _expand(spot_ref, values: Array) -> Array:
    """[P, width] -> [C, width]: a product with ones and zeros, exact at this precision."""
    if spot_ref is None:
        return values
    places = jax.lax.broadcasted_iota(jnp.int32, (spot_ref.shape[0], values.shape[0]), 1)
    here = (places == spot_ref[...]).astype(jnp.float32)
    return _dot(here, values, 0)


def _precision(dtype) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def _dot(a: Array, b: Array, axis: int) -> Array:
    """a [M, K] times b over its `axis`, summed in float32; in full float32 if both are."""
    return jax.lax.dot_general(a, b, (((1,), (axis,)), ((), ())), _precision(b.dtype), jnp.float32)


def _capped(values: Array, cap: float) -> Array:
    return cap * jnp.tanh(values / cap) if cap else values
