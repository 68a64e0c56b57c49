"""The kernels of anchor_attention.py for TPU (Mosaic).

The grid walks along the list of groups and tiles that meet. Scores lie transposed, keys on sublanes
and rows on lanes: what there is one of for each row (bounds, maximum, sum) is then a [1, R] that
fills its lanes. The backward pass is two kernels, as in FlashAttention-2: one adds up group by
group, for the queries and the own blocks, one tile by tile for the context.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dspark_jax.kernels.anchor_groups import NEVER, Groups, dot, listed


def _call(kernel, groups, by_tile, products, operands, results, scratch, interpret):
    """A grid of heads times pairs, as many as meet: there is no step for any other.

    Args:
      by_tile: all groups that meet a tile follow each other, not all tiles that meet a group.
      products: of the rows of a group with the keys of a tile, in one step.
      operands, results: (what each has a part for, array): "group", "tile", or "bounds".
    """
    chosen = groups.chosen.swapaxes(1, 2) if by_tile else groups.chosen
    outers, inners = chosen.shape[1:]
    alone = ~chosen.any(-1)  # has its results all the same
    items, total = listed(chosen.at[..., 0].set(chosen[..., 0] | alone))
    items = jnp.pad(items, 1, constant_values=-1)

    def at(kind, h, i, outer, inner):
        row, here = jax.lax.div(outer[i + 1], outers), jax.lax.rem(outer[i + 1], outers)
        group, tile = (inner[i + 1], here) if by_tile else (here, inner[i + 1])
        if kind == "tile":
            return row, h, tile, 0
        group = row * groups.groups + group
        return (group, 0, 0) if kind == "bounds" else (group, h, 0, 0)

    def spec(kind, x):
        rows = groups.tile if kind == "tile" else x.shape[-2]
        lead = (1,) if kind == "bounds" else (1, 1)
        return pl.BlockSpec((*lead, rows, x.shape[-1]), functools.partial(at, kind))

    # At most: nobody knows before the run how many pairs meet.
    pairs = groups.heads * groups.batch * outers * inners
    work = pairs * groups.tile * groups.row_count
    moved = sum(2 * x.size * x.dtype.itemsize for _, x in (*operands, *results))
    costs = pl.CostEstimate(
        flops=2 * products * work * groups.wide, transcendentals=work, bytes_accessed=moved
    )
    return pl.pallas_call(
        functools.partial(kernel, groups.block, groups.tile, outers),
        out_shape=[x for _, x in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(groups.heads, total),
            in_specs=[spec(*x) for x in operands],
            out_specs=[spec(*x) for x in results],
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=costs,
        interpret=interpret,
        name="anchor_attention",
    )(items // inners, items % inners, *(x for _, x in operands))


def _float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def forward(*operands, interpret=False):
    """`anchor_attention` of scaled queries, and the log-sum-exp f32[B, K, Q, A*G] of the scores."""
    groups = Groups(*operands)
    lead, rows, wide = groups.q.shape[:2], groups.row_count, groups.wide
    inputs = [
        ("bounds", groups.bounds), ("group", groups.q), ("group", groups.k), ("group", groups.v),
        ("tile", groups.context_k), ("tile", groups.context_v),
    ]  # fmt: skip
    results = [("group", _float32(*lead, wide, rows)), ("group", _float32(*lead, 1, rows))]
    scratch = [(1, rows), (1, rows), (wide, rows)]
    out, lse = _call(_forward_kernel, groups, False, 2, inputs, results, scratch, interpret)
    out, lse = groups.slots(out.swapaxes(2, 3)), groups.slots(lse.swapaxes(2, 3))
    return out.astype(operands[4].dtype), lse[..., 0]


def _ends(outer_ref):
    """Whether this pair is the first and whether it is the last of its outer one."""
    i = pl.program_id(1)
    here = outer_ref[i + 1]
    return outer_ref[i] != here, outer_ref[i + 2] != here


def _seen(bounds_ref, start, shape):
    """bool[N, R]: which context positions, from `start` on, each row sees."""
    position = start + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (bounds_ref[0, 0:1] <= position) & (position < bounds_ref[0, 1:2])


def _own(bounds_ref, block, shape):
    """bool[O, R]: which of the group's own keys each row sees."""
    key = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (bounds_ref[0, 2:3] <= key) & (key < bounds_ref[0, 2:3] + block)


def _forward_kernel(
    block, tile, outers, outer_ref, inner_ref, bounds_ref, q_ref, own_k_ref, own_v_ref, k_ref,
    v_ref, out_ref, lse_ref, top_ref, total_ref, mixed_ref,
):  # fmt: skip
    first, last = _ends(outer_ref)
    q = q_ref[0, 0]

    @pl.when(first)
    def own_blocks():
        v = own_v_ref[0, 0]
        scores = dot(own_k_ref[0, 0], q, 1, 1)
        seen = _own(bounds_ref, block, scores.shape)
        scores = jnp.where(seen, scores, NEVER)
        top = jnp.max(scores, axis=0, keepdims=True)
        weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
        top_ref[...] = top
        total_ref[...] = jnp.sum(weights, axis=0, keepdims=True)
        mixed_ref[...] = dot(v, weights.astype(v.dtype), 0, 0)

    v = v_ref[0, 0]
    scores = dot(k_ref[0, 0], q, 1, 1)
    seen = _seen(bounds_ref, inner_ref[pl.program_id(1) + 1] * tile, scores.shape)
    scores = jnp.where(seen, scores, NEVER)
    top = jnp.maximum(top_ref[...], jnp.max(scores, axis=0, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    shrink = jnp.exp(top_ref[...] - top)
    top_ref[...] = top
    total_ref[...] = total_ref[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
    mixed_ref[...] = mixed_ref[...] * shrink + dot(v, weights.astype(v.dtype), 0, 0)

    @pl.when(last)
    def finish():
        out_ref[0, 0] = mixed_ref[...] / total_ref[...]
        lse_ref[0, 0] = top_ref[...] + jnp.log(total_ref[...])


def backward(*saved, interpret=False):
    """Gradients of the first five operands, from all of them, the results and their gradient."""
    *operands, out, lse, g = saved
    groups = Groups(*operands)
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    lse, delta = groups.numbers(lse), groups.numbers(delta)
    g = groups.rows(g.astype(operands[4].dtype), wide=True)
    lead, rows, wide = groups.q.shape[:2], groups.row_count, groups.wide
    common = [
        ("bounds", groups.bounds), ("group", groups.q), ("group", g), ("group", lse),
        ("group", delta), ("tile", groups.context_k), ("tile", groups.context_v),
    ]  # fmt: skip
    own = ("group", _float32(*groups.k.shape))
    d_q, d_k, d_v = _call(
        _group_kernel, groups, False, 3,
        [*common, ("group", groups.k), ("group", groups.v)],
        [("group", _float32(*lead, wide, rows)), own, own], [(wide, rows)], interpret,
    )  # fmt: skip
    keys = ("tile", _float32(*groups.context_k.shape))
    scratch = [(groups.tile, wide)] * 2
    d_keys, d_values = _call(
        _tile_kernel, groups, True, 4, common, [keys, keys], scratch, interpret
    )
    grads = groups.gradients(d_q.swapaxes(2, 3), d_keys, d_values, d_k, d_v)
    return tuple(x.astype(y.dtype) for x, y in zip(grads, operands))


def _weights(k, v, q_ref, g_ref, lse_ref, delta_ref, seen):
    """Weights and gradients of scores, f32[N, R], of keys [N, H]."""
    scores = dot(k, q_ref[0, 0], 1, 1)
    weights = jnp.where(seen, jnp.exp(scores - lse_ref[0, 0]), 0.0)
    toward = dot(v, g_ref[0, 0], 1, 1)
    return weights, weights * (toward - delta_ref[0, 0])


def _group_kernel(
    block, tile, outers, outer_ref, inner_ref, bounds_ref, q_ref, g_ref, lse_ref, delta_ref, k_ref,
    v_ref, own_k_ref, own_v_ref, d_q_ref, d_k_ref, d_v_ref, sum_ref,
):  # fmt: skip
    first, last = _ends(outer_ref)
    of_rows = q_ref, g_ref, lse_ref, delta_ref

    @pl.when(first)
    def own_blocks():
        k, g = own_k_ref[0, 0], g_ref[0, 0]
        seen = _own(bounds_ref, block, (k.shape[0], g.shape[0]))
        weights, d_scores = _weights(k, own_v_ref[0, 0], *of_rows, seen)
        d_scores = d_scores.astype(k.dtype)
        sum_ref[...] = dot(k, d_scores, 0, 0)
        d_k_ref[0, 0] = dot(d_scores, q_ref[0, 0], 1, 0)
        d_v_ref[0, 0] = dot(weights.astype(g.dtype), g, 1, 0)

    k = k_ref[0, 0]
    start = inner_ref[pl.program_id(1) + 1] * tile
    seen = _seen(bounds_ref, start, (tile, q_ref.shape[2]))
    _, d_scores = _weights(k, v_ref[0, 0], *of_rows, seen)
    sum_ref[...] += dot(k, d_scores.astype(k.dtype), 0, 0)

    @pl.when(last)
    def finish():
        d_q_ref[0, 0] = sum_ref[...]


def _tile_kernel(
    block, tile, outers, outer_ref, inner_ref, bounds_ref, q_ref, g_ref, lse_ref, delta_ref, k_ref,
    v_ref, d_k_ref, d_v_ref, sum_k_ref, sum_v_ref,
):  # fmt: skip
    first, last = _ends(outer_ref)

    @pl.when(first)
    def begin():
        sum_k_ref[...] = jnp.zeros_like(sum_k_ref)
        sum_v_ref[...] = jnp.zeros_like(sum_v_ref)

    q, g = q_ref[0, 0], g_ref[0, 0]
    start = jax.lax.rem(outer_ref[pl.program_id(1) + 1], outers) * tile
    seen = _seen(bounds_ref, start, (tile, q.shape[0]))
    of_rows = q_ref, g_ref, lse_ref, delta_ref
    weights, d_scores = _weights(k_ref[0, 0], v_ref[0, 0], *of_rows, seen)
    sum_k_ref[...] += dot(d_scores.astype(q.dtype), q, 1, 0)
    sum_v_ref[...] += dot(weights.astype(g.dtype), g, 1, 0)

    @pl.when(last)
    def finish():
        d_k_ref[0, 0] = sum_k_ref[...]
        d_v_ref[0, 0] = sum_v_ref[...]
