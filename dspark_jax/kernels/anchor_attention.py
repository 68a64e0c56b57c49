"""Attention of the drafter's blocks: each sees what lies between two bounds in the context, and,
both ways, itself. The cost grows with slots times the context used; no scores are kept.

`anchor_attention` is equivalent to these lines, for one row and one head (A blocks of G slots):

    seen = (first[:, None] <= arange(S)) & (arange(S) < stop[:, None])
    own = arange(A)[:, None] == repeat(arange(A), G)
    mask = repeat(concatenate([seen, own], axis=1), G, axis=0)
    weights = softmax(where(mask, q @ concatenate([context_k, k]).T / sqrt(H), -inf))
    return weights @ concatenate([context_v, v])

Blocks come in groups, the context in tiles. A list of the pairs that meet, made from the bounds at
run time, says what is computed: groups of sorted anchors meet few tiles that their blocks do not
see. Softmax goes tile by tile with a running maximum, and the backward pass makes the scores anew
(FlashAttention, arXiv 2205.14135 and 2307.08691). Letters: B rows, K key/value heads, Q queries
for each, A anchors, G slots, S context, H head dimension. Source: DFlash (arXiv 2602.06036).
"""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dspark_jax.core.sharding import platform
from dspark_jax.kernels import anchor_attention_gpu as gpu
from dspark_jax.kernels import anchor_attention_tpu as tpu
from dspark_jax.kernels.anchor_groups import NEVER, listed, meetings, obstacle

# Rows of a group of blocks (queries times slots) and positions of a tile: the fastest of several
# on two CPU cores.
_ROWS, _KEYS = 512, 128

# "dense" is the plain masked form, with all the scores of a row; "xla" goes tile by tile.
# "interpret" runs the Mosaic kernels as plain XLA on any machine.
Implementation = Literal["dense", "xla", "mosaic_tpu", "triton", "interpret"]


def anchor_attention(
    q: Array,
    context_k: Array,
    context_v: Array,
    k: Array,
    v: Array,
    first: Array,
    stop: Array,
    *,
    implementation: Implementation | None = None,
) -> Array:
    """Attention of block slots to context positions first <= j < stop and to their own block.

    Softmax is in float32, products in the operands' dtype (full float32 if that is float32) and
    summed in float32. Context that no block of its row sees may hold anything, NaN too. Any order
    of blocks is right; sorted ones are fast. Differentiable in all but the bounds.

    Under a mesh of explicit axes each device works on its rows and heads.

    Args:
      q: [B, K, Q, A*G, H]; k: [B, K, H, A*G]; v: [B, K, A*G, H].
      context_k: [B, K, H, S]; context_v: [B, K, S, H].
      first, stop: i32[B, A]. Equal bounds: the block sees itself alone. stop < first: there is no
        such block, its result is 0 and it sends no gradient.
      implementation: None takes "dense" for one block a row (decoding, where no other shares a
        tile), else the kernel of the default backend where it supports the operands, else "xla".

    Returns:
      [B, K, Q, A*G, H] in the dtype of v.

    Raises:
      NotImplementedError: if a kernel asked for by name does not support the operands.
      ValueError: if shapes do not fit.
    """
    batch, heads, queries, slots, dim = q.shape
    size, anchors = context_v.shape[2], first.shape[1]
    shapes = {
        "context_k": (context_k, (batch, heads, dim, size)),
        "context_v": (context_v, (batch, heads, size, dim)),
        "k": (k, (batch, heads, dim, slots)),
        "v": (v, (batch, heads, slots, dim)),
        "first": (first, (batch, anchors)),
        "stop": (stop, (batch, anchors)),
    }
    for name, (x, shape) in shapes.items():
        if x.shape != shape:
            raise ValueError(f"anchor attention of q {q.shape}: {name} {x.shape} is not {shape}")
    if slots % anchors:
        raise ValueError(f"anchor attention: {slots} slots are no {anchors} blocks")
    implementation = _choose(implementation, q, size, anchors)
    body = functools.partial(_on_device, implementation=implementation)
    operands = (q, context_k, context_v, k, v, first.astype(jnp.int32), stop.astype(jnp.int32))
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return body(*operands)
    row, head, *_ = jax.typeof(q).sharding.spec
    specs = tuple(P(row, *[head] * (x.ndim > 2), *[None] * (x.ndim - 2)) for x in operands[:5])
    specs += (P(row, None),) * 2
    operands = jax.reshard(operands, specs)
    return jax.shard_map(body, in_specs=specs, out_specs=specs[0], check_vma=False)(*operands)


def _choose(implementation: Implementation | None, q, size: int, anchors: int) -> Implementation:
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(f"implementation {implementation!r} is none of {get_args(Implementation)}")
    if implementation in ("dense", "xla"):
        return implementation
    backend = {"tpu": "mosaic_tpu", "gpu": "triton"}.get(platform(), "xla")
    axis_types = set(jax.sharding.get_abstract_mesh().axis_types)
    problem = obstacle(q, size, anchors, implementation or backend)
    if AxisType.Auto in axis_types or len(axis_types) > 1:
        problem = "the axes of the mesh must be explicit, or all manual (inside a shard_map)"
    if implementation is None:
        if anchors == 1:
            return "dense"
        return "xla" if problem else backend
    if problem:
        raise NotImplementedError(f"anchor attention by {implementation}: {problem}")
    return implementation


def _on_device(q, context_k, context_v, k, v, first, stop, *, implementation):
    size, block = context_v.shape[2], q.shape[3] // first.shape[1]
    used = _seen_by_any(first, stop, size)[:, None]
    context_k = jnp.where(used[:, :, None], context_k, 0)  # no 0 * NaN
    context_v = jnp.where(used[..., None], context_v, 0)
    q = q * q.shape[-1] ** -0.5
    operands = (q, context_k, context_v, k, v, first, stop)
    out = _dense(*operands) if implementation == "dense" else _attend(*operands, implementation)
    there = jnp.repeat(stop >= first, block, axis=1)
    return jnp.where(there[:, None, None, :, None], out, 0)


def _seen_by_any(first: Array, stop: Array, size: int) -> Array:
    """bool[B, S]: whether any block of the row sees the position."""
    stop = jnp.maximum(first, stop)

    def row(first, stop):
        edges = jnp.zeros(size + 1, jnp.int32).at[first].add(1).at[stop].add(-1)
        return jnp.cumsum(edges)[:size] > 0

    return jax.vmap(row)(first, stop)


# ---- Plain ------------------------------------------------------------------------------------


def _dense(q, context_k, context_v, k, v, first, stop):
    """The masked form: scores of all slots with all the context."""
    block = q.shape[3] // first.shape[1]
    position = jnp.arange(context_v.shape[2])
    seen = (first[..., None] <= position) & (position < stop[..., None])
    seen = jnp.repeat(seen, block, axis=1)[:, None, None]
    scores = _product("bkqth,bkhs->bkqts", q, context_k)
    scores = jnp.where(seen, scores, NEVER)
    own = _own_scores(q, k, block)
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(-1), own.max(-1)))[..., None]
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    own = jnp.exp(own - top)
    total = weights.sum(-1) + own.sum(-1)  # > 0: a slot sees its own block
    out = _product("bkqts,bksh->bkqth", weights.astype(v.dtype), context_v)
    return ((out + _own_mix(own, v)) / total[..., None]).astype(v.dtype)


def _product(equation: str, a: Array, b: Array) -> Array:
    """An einsum summed in float32; exact for float32 on every chip."""
    if platform() == "cpu":  # where XLA has no product of such a kind for every order of axes
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _own_scores(q, k, block):
    """f32[B, K, Q, A*G, G] of each slot with those of its block."""
    *lead, slots, dim = q.shape
    q = q.reshape(*lead, slots // block, block, dim)
    k = k.reshape(*k.shape[:3], slots // block, block)
    return _product("bkqagh,bkhac->bkqagc", q, k).reshape(*lead, slots, block)


def _own_mix(weights, v):
    """The values [B, K, A*G, H] of each slot's block, mixed by weights f32[B, K, Q, A*G, G]."""
    *lead, slots, block = weights.shape
    weights = weights.astype(v.dtype).reshape(*lead, slots // block, block, block)
    v = v.reshape(*v.shape[:2], slots // block, block, v.shape[-1])
    return _product("bkqagc,bkach->bkqagh", weights, v).reshape(*lead, slots, v.shape[-1])


# ---- Tile by tile -----------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attend(q, context_k, context_v, k, v, first, stop, implementation):
    return _attend_fwd(q, context_k, context_v, k, v, first, stop, implementation)[0]


def _attend_fwd(*operands_and_implementation):
    *operands, implementation = operands_and_implementation
    run = {"xla": _forward, "triton": gpu.forward, "mosaic_tpu": tpu.forward}
    run["interpret"] = functools.partial(tpu.forward, interpret=True)
    out, lse = run[implementation](*operands)
    return out, (*operands, out, lse)


def _attend_bwd(implementation, saved, g):
    run = {"xla": _backward, "triton": gpu.backward, "mosaic_tpu": tpu.backward}
    run["interpret"] = functools.partial(tpu.backward, interpret=True)
    return (*run[implementation](*saved, g), None, None)


_attend.defvjp(_attend_fwd, _attend_bwd)


class _Tiles:
    """Blocks in groups of C, padded to whole ones; the context in tiles of N positions."""

    def __init__(self, q, first, stop, size):
        (self.batch, _, queries, slots, self.dim), anchors = q.shape, first.shape[1]
        self.block = slots // anchors
        self.group = min(anchors, max(1, _ROWS // (queries * self.block)))
        self.tile = min(_KEYS, size)
        self.groups, self.tiles = -(-anchors // self.group), -(-size // self.tile)
        self.more_slots = (self.groups * self.group - anchors) * self.block
        self.more_keys = self.tiles * self.tile - size
        more = ((0, 0), (0, self.groups * self.group - anchors))
        self.first, self.stop = jnp.pad(first, more), jnp.pad(stop, more)
        shape = (self.batch, self.groups, self.group)
        bounds = self.first.reshape(shape), self.stop.reshape(shape)
        self.items, self.total = listed(meetings(*bounds, self.tile, self.tiles))

    def pad(self, x, axis, more):
        """`x` with so many zeros behind an axis."""
        return jnp.pad(x, [(0, more * (i == axis)) for i in range(x.ndim)]) if more else x

    def place(self, i):
        """Row, first slot and first position of item i, and which of its keys each slot sees."""
        item = self.items[i]
        tile, group = item % self.tiles, item // self.tiles
        row, group = group // self.groups, group % self.groups
        at, key = group * self.group, tile * self.tile
        position = key + jnp.arange(self.tile)
        first, stop = (
            jax.lax.dynamic_slice(x, (row, at), (1, self.group))[0] for x in (self.first, self.stop)
        )
        seen = (first[:, None] <= position) & (position < stop[:, None])
        return row, at * self.block, key, jnp.repeat(seen, self.block, axis=0)

    def slots(self, x, row, slot):
        """The group's part of x [B, K, Q, T, ...], without B."""
        size = (1, *x.shape[1:3], self.group * self.block, *x.shape[4:])
        return jax.lax.dynamic_slice(x, (row, 0, 0, slot, *[0] * (x.ndim - 4)), size)[0]

    def put_slots(self, x, row, slot, new):
        """x with the group's part replaced."""
        return jax.lax.dynamic_update_slice(x, new[None], (row, 0, 0, slot, *[0] * (x.ndim - 4)))

    def keys(self, x, row, key, axis):
        """The tile's part of x [B, K, ...] along an axis, without B."""
        size, at = list(x.shape), [0] * x.ndim
        size[0], size[axis], at[0], at[axis] = 1, self.tile, row, key
        return jax.lax.dynamic_slice(x, at, size)[0]

    def add_keys(self, x, row, key, axis, more):
        """x with the tile's part increased."""
        at = [0] * x.ndim
        at[0], at[axis] = row, key
        return jax.lax.dynamic_update_slice(x, (self.keys(x, row, key, axis) + more)[None], at)


def _forward(q, context_k, context_v, k, v, first, stop):
    """The result, and the log-sum-exp f32[B, K, Q, A*G] of its scores."""
    slots = q.shape[3]
    tiles = _Tiles(q, first, stop, context_v.shape[2])
    context_k = tiles.pad(context_k, 3, tiles.more_keys)
    context_v = tiles.pad(context_v, 2, tiles.more_keys)
    own = _own_scores(q, k, tiles.block)
    top = own.max(-1)
    weights = jnp.exp(own - top[..., None])
    state = (_own_mix(weights, v), top, weights.sum(-1))
    q, *state = (tiles.pad(x, 3, tiles.more_slots) for x in (q, *state))

    def visit(i, state):
        row, slot, key, seen = tiles.place(i)
        mixed, top, total = (tiles.slots(x, row, slot) for x in state)
        keys, values = (tiles.keys(x, row, key, d) for x, d in ((context_k, 3), (context_v, 2)))
        scores = _product("kqth,khs->kqts", tiles.slots(q, row, slot), keys)
        scores = jnp.where(seen, scores, NEVER)
        higher = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0.0)
        shrink = jnp.exp(top - higher)
        total = total * shrink + weights.sum(-1)
        mixed = mixed * shrink[..., None] + _product(
            "kqts,ksh->kqth", weights.astype(values.dtype), values
        )
        new = (mixed, higher, total)
        return tuple(tiles.put_slots(x, row, slot, y) for x, y in zip(state, new))

    state = jax.lax.fori_loop(0, tiles.total, visit, tuple(state))
    mixed, top, total = (x[:, :, :, :slots] for x in state)
    return (mixed / total[..., None]).astype(v.dtype), top + jnp.log(total)


def _backward(q, context_k, context_v, k, v, first, stop, out, lse, g):
    """Gradients of the first five operands."""
    slots, size, block = q.shape[3], context_v.shape[2], q.shape[3] // first.shape[1]
    tiles = _Tiles(q, first, stop, size)
    g = g.astype(v.dtype)
    delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    # The own blocks, all at once.
    def blocks(x):
        return x.reshape(*x.shape[:3], slots // block, block, x.shape[-1])

    weights = jnp.exp(_own_scores(q, k, block) - lse[..., None])
    toward = _own_scores(g, v.swapaxes(2, 3), block)
    d_scores = (weights * (toward - delta[..., None])).astype(k.dtype)
    weights = weights.astype(g.dtype)
    d_q = _own_mix(d_scores, k.swapaxes(2, 3))
    d_k = _product("bkqagc,bkqagh->bkhac", blocks(d_scores), blocks(q)).reshape(k.shape)
    d_v = _product("bkqagc,bkqagh->bkach", blocks(weights), blocks(g)).reshape(v.shape)

    # The context, tile by tile.
    context_k = tiles.pad(context_k, 3, tiles.more_keys)
    context_v = tiles.pad(context_v, 2, tiles.more_keys)
    q, g, lse, delta, d_q = (tiles.pad(x, 3, tiles.more_slots) for x in (q, g, lse, delta, d_q))
    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (context_k, context_v))

    def visit(i, state):
        d_q, d_keys, d_values = state
        row, slot, key, seen = tiles.place(i)
        queries, toward = tiles.slots(q, row, slot), tiles.slots(g, row, slot)
        keys, values = (tiles.keys(x, row, key, d) for x, d in ((context_k, 3), (context_v, 2)))
        scores = _product("kqth,khs->kqts", queries, keys)
        weights = jnp.exp(scores - tiles.slots(lse, row, slot)[..., None])
        weights = jnp.where(seen, weights, 0.0)
        d_weights = _product("kqth,ksh->kqts", toward, values)
        d_scores = weights * (d_weights - tiles.slots(delta, row, slot)[..., None])
        d_scores = d_scores.astype(keys.dtype)
        more = _product("kqts,khs->kqth", d_scores, keys)
        d_q = tiles.put_slots(d_q, row, slot, tiles.slots(d_q, row, slot) + more)
        more = _product("kqth,kqts->khs", queries, d_scores)
        d_keys = tiles.add_keys(d_keys, row, key, 3, more)
        more = _product("kqts,kqth->ksh", weights.astype(toward.dtype), toward)
        return d_q, d_keys, tiles.add_keys(d_values, row, key, 2, more)

    d_q, d_keys, d_values = jax.lax.fori_loop(0, tiles.total, visit, (d_q, *zeros))
    grads = (d_q[:, :, :, :slots], d_keys[..., :size], d_values[:, :, :size], d_k, d_v)
    return tuple(x.astype(y.dtype) for x, y in zip(grads, (q, context_k, context_v, k, v)))
