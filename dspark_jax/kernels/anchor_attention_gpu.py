"""The kernels of anchor_attention.py for GPUs (Triton).

One program per group of blocks and head walks along the tiles that its group meets; in the second
kernel of the backward pass one per tile walks along the groups. Sizes are powers of two and padded
outside, so no load or store needs a mask.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dspark_jax.kernels.anchor_groups import NEVER, Groups, dot, listed


def forward(*operands):
    """`anchor_attention` of scaled queries, and the log-sum-exp f32[B, K, Q, A*G] of the scores."""
    groups = Groups(*operands, triton=True)
    inputs = [
        ("bounds", groups.bounds), ("group", groups.q), ("group", groups.k), ("group", groups.v),
        ("tile", groups.context_k), ("tile", groups.context_v),
    ]  # fmt: skip
    lead, rows = groups.q.shape[:2], groups.row_count
    results = [("group", groups.q.shape), ("group", (*lead, 1, rows))]
    out, lse = _call(_forward_kernel, groups, False, inputs, results)
    out, lse = groups.slots(out), groups.slots(lse.swapaxes(2, 3))
    return out.astype(operands[4].dtype), lse[..., 0]


def backward(*saved):
    """Gradients of the first five operands, from all of them, the results and their gradient."""
    *operands, out, lse, g = saved
    groups = Groups(*operands, triton=True)
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    g = groups.rows(g.astype(operands[4].dtype), wide=True)
    common = [
        ("bounds", groups.bounds), ("group", groups.q), ("group", g),
        ("group", groups.numbers(lse)), ("group", groups.numbers(delta)),
        ("tile", groups.context_k), ("tile", groups.context_v),
    ]  # fmt: skip
    own = ("group", groups.k.shape)
    inputs = [*common, ("group", groups.k), ("group", groups.v)]
    d_q, d_k, d_v = _call(
        _group_kernel, groups, False, inputs, [("group", groups.q.shape), own, own]
    )
    keys = ("tile", groups.context_k.shape)
    d_keys, d_values = _call(_tile_kernel, groups, True, common, [keys, keys])
    grads = groups.gradients(d_q, d_keys, d_values, d_k, d_v)
    return tuple(x.astype(y.dtype) for x, y in zip(grads, operands))


def _call(kernel, groups, by_tile, operands, results):
    """One program per group, or tile, and head.

    Args:
      operands: (what each has a part for, array): "group", "tile", or "bounds". A program has its
        own group, or tile, and all of the others in its row to walk along.
      results: (the same, shape).
    """
    chosen = groups.chosen.swapaxes(1, 2) if by_tile else groups.chosen
    outers, inners = chosen.shape[1:]
    items, _ = listed(chosen)
    ends = jnp.cumsum(chosen.sum(-1, dtype=jnp.int32).ravel())
    begins = jnp.pad(ends, (1, 0))

    def spec(kind, shape):
        if kind == "bounds":
            shape = (groups.batch, groups.groups, *shape[1:])
            if by_tile:
                return pl.BlockSpec((None, *shape[1:]), lambda o, h: (o // outers, 0, 0, 0))
            return pl.BlockSpec(
                (None, None, *shape[2:]), lambda o, h: (o // outers, o % outers, 0, 0)
            )
        if kind == "group" and by_tile:
            lead = (None, groups.groups, None)
            return pl.BlockSpec((*lead, *shape[2:]), lambda o, h: (o // outers, 0, h, 0, 0))
        if kind == "group":
            return pl.BlockSpec((None, None, *shape[2:]), lambda o, h: (o, h, 0, 0))
        if by_tile:
            part = (None, None, groups.tile, shape[-1])
            return pl.BlockSpec(part, lambda o, h: (o // outers, h, o % outers, 0))
        return pl.BlockSpec((None, None, *shape[2:]), lambda o, h: (o // outers, h, 0, 0))

    def whole(kind, x):
        """An operand of which a program may be given all groups of a row."""
        if kind == "bounds" or (kind == "group" and by_tile):
            return x.reshape(groups.batch, groups.groups, *x.shape[1:])
        return x

    return pl.pallas_call(
        functools.partial(kernel, groups.block, groups.tile, outers),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for _, shape in results],
        grid=(groups.batch * outers, groups.heads),
        in_specs=[pl.no_block_spec] * 2 + [spec(kind, x.shape) for kind, x in operands],
        out_specs=[spec(*x) for x in results],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="anchor_attention",
    )(begins, items % inners, *(whole(*x) for x in operands))


def _walk(begins_ref, inner_ref, visit, state):
    """`visit(inner, state)` for all that this program's outer one meets."""
    outer = pl.program_id(0)
    return jax.lax.fori_loop(
        begins_ref[outer],
        begins_ref[outer + 1],
        lambda i, state: visit(inner_ref[i], state),
        state,
    )


def _seen(low, high, start, count):
    """bool[R, count]: which keys from `start` on lie within a row's bounds."""
    position = start + jnp.arange(count, dtype=jnp.int32)[None]
    return (low[:, None] <= position) & (position < high[:, None])


def _forward_kernel(
    block, tile, outers, begins_ref, tiles_ref, bounds_ref, q_ref, own_k_ref, own_v_ref, k_ref,
    v_ref, out_ref, lse_ref,
):  # fmt: skip
    q, first, stop, own = q_ref[...], *(bounds_ref[i, :] for i in range(3))

    def visit(tile_index, state):
        keys = pl.ds(tile_index * tile, tile)
        seen = _seen(first, stop, tile_index * tile, tile)
        return _more(q, k_ref[keys, :], v_ref[keys, :], seen, state)

    rows, wide = q.shape
    nothing = jnp.full(rows, NEVER), jnp.zeros(rows), jnp.zeros((rows, wide))
    seen = _seen(own, own + block, 0, own_k_ref.shape[0])
    state = _more(q, own_k_ref[...], own_v_ref[...], seen, nothing)
    top, total, mixed = _walk(begins_ref, tiles_ref, visit, state)
    out_ref[...] = mixed / total[:, None]
    lse_ref[0, :] = top + jnp.log(total)


def _more(q, k, v, seen, state):
    """The running maximum, sum and mixed values with more keys [N, H] and values [N, H]."""
    top, total, mixed = state
    scores = jnp.where(seen, dot(q, k, 1, 1), NEVER)
    higher = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.where(seen, jnp.exp(scores - higher[:, None]), 0.0)
    shrink = jnp.exp(top - higher)
    total = total * shrink + jnp.sum(weights, axis=1)
    return higher, total, mixed * shrink[:, None] + dot(weights.astype(v.dtype), v, 1, 0)


def _weights(q, g, lse, delta, k, v, seen):
    """Weights and gradients of scores, f32[R, N]."""
    weights = jnp.where(seen, jnp.exp(dot(q, k, 1, 1) - lse[:, None]), 0.0)
    return weights, weights * (dot(g, v, 1, 1) - delta[:, None])


def _group_kernel(
    block, tile, outers, begins_ref, tiles_ref, bounds_ref, q_ref, g_ref, lse_ref, delta_ref, k_ref,
    v_ref, own_k_ref, own_v_ref, d_q_ref, d_k_ref, d_v_ref,
):  # fmt: skip
    q, g, lse, delta = q_ref[...], g_ref[...], lse_ref[0, :], delta_ref[0, :]
    first, stop, own = (bounds_ref[i, :] for i in range(3))
    k = own_k_ref[...]
    seen = _seen(own, own + block, 0, k.shape[0])
    weights, d_scores = _weights(q, g, lse, delta, k, own_v_ref[...], seen)
    d_scores = d_scores.astype(q.dtype)
    d_k_ref[...] = dot(d_scores, q, 0, 0)
    d_v_ref[...] = dot(weights.astype(g.dtype), g, 0, 0)

    def visit(tile_index, d_q):
        keys = pl.ds(tile_index * tile, tile)
        k, v = k_ref[keys, :], v_ref[keys, :]
        seen = _seen(first, stop, tile_index * tile, tile)
        _, d_scores = _weights(q, g, lse, delta, k, v, seen)
        return d_q + dot(d_scores.astype(k.dtype), k, 1, 0)

    d_q_ref[...] = _walk(begins_ref, tiles_ref, visit, dot(d_scores, k, 1, 0))


def _tile_kernel(
    block, tile, outers, begins_ref, groups_ref, bounds_ref, q_ref, g_ref, lse_ref, delta_ref,
    k_ref, v_ref, d_k_ref, d_v_ref,
):  # fmt: skip
    k, v = k_ref[...], v_ref[...]
    start = pl.program_id(0) % outers * tile

    def visit(group, state):
        d_k, d_v = state
        q, g = q_ref[group], g_ref[group]
        lse, delta = lse_ref[group, 0, :], delta_ref[group, 0, :]
        seen = _seen(bounds_ref[group, 0, :], bounds_ref[group, 1, :], start, tile)
        weights, d_scores = _weights(q, g, lse, delta, k, v, seen)
        d_k = d_k + dot(d_scores.astype(q.dtype), q, 0, 0)
        return d_k, d_v + dot(weights.astype(g.dtype), g, 0, 0)

    zeros = jnp.zeros(k.shape), jnp.zeros(v.shape)
    d_k_ref[...], d_v_ref[...] = _walk(begins_ref, groups_ref, visit, zeros)
