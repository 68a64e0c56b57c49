"""What the kernels of anchor_attention.py for TPU and GPU share: operands in groups of blocks.

The rows (queries of all slots of C blocks) that belong to one key/value head lie together,
[B * n, K, R, H], padded to R, and so do the blocks' own O keys and values; the context is padded to
whole tiles. What a kernel computes is a list of the groups and tiles that meet.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

NEVER = jnp.finfo(jnp.float32).min  # finite: the difference of two of them is no NaN
# Rows of a group at most, where a single block has not more; positions of a tile.
_TPU_ROWS, _TPU_KEYS = 256, 256
_GPU_ROWS, _GPU_KEYS = 128, 64
_MAX_PAIRS = 2**16  # of groups and tiles: two numbers for each lie in the scalar memory of a TPU
_MAX_ROWS = 256  # of one group on a GPU


def meetings(first: Array, stop: Array, tile: int, tiles: int) -> Array:
    """bool[B, n, T]: whether a block of each group sees something of each tile.

    Args:
      first, stop: i32[B, n, C], bounds of the blocks of n groups.
    """
    start = jnp.arange(tiles) * tile
    first, stop = first[..., None], stop[..., None]
    return ((first < start + tile) & (stop > start) & (first < stop)).any(2)


def listed(chosen: Array) -> tuple[Array, Array]:
    """Flat indices of the true entries i32[size], in order, -1 behind them; and their number."""
    (items,) = jnp.nonzero(chosen.ravel(), size=chosen.size, fill_value=-1)
    return items.astype(jnp.int32), chosen.sum(dtype=jnp.int32)


def obstacle(q: Array, size: int, anchors: int, implementation: str) -> str | None:
    """Why the kernels do not take such operands, or None."""
    batch, heads, queries, slots, dim = q.shape
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"float32 and bfloat16 only, not {q.dtype}"
    sizes = _sizes(queries, slots // anchors, anchors, dim, size, implementation == "triton")
    pairs = batch * -(-anchors // sizes["group"]) * -(-size // sizes["tile"])
    if implementation == "triton" and max(sizes["rows"], sizes["wide"]) > _MAX_ROWS:
        return f"{queries} queries of {slots // anchors} slots with {dim} numbers are too many"
    if implementation != "triton" and pairs > _MAX_PAIRS:
        return f"{pairs} pairs of groups and tiles on a device are more than {_MAX_PAIRS}"
    return None


def _sizes(queries: int, block: int, anchors: int, dim: int, size: int, triton: bool) -> dict:
    """Blocks of a group, its rows and own keys, positions of a tile and the padded H."""
    each = queries * block
    if triton:  # everything a power of two, 16 at least
        group = min(anchors, max(1, _GPU_ROWS // each))
        whole = [max(16, pl.next_power_of_2(x)) for x in (group * each, group * block, dim)]
        rows, own, wide = whole
        return {"group": group, "rows": rows, "own": own, "tile": _GPU_KEYS, "wide": wide}
    # Rows fill lanes, keys sublanes.
    group = min(anchors, max(1, _TPU_ROWS // each))
    rows, own = -(-group * each // 128) * 128, -(-group * block // 16) * 16
    tile = min(_TPU_KEYS, -(-size // 16) * 16)
    return {"group": group, "rows": rows, "own": own, "tile": tile, "wide": dim}


class Groups:
    """The operands as the kernels take them, and the way back."""

    def __init__(self, q, context_k, context_v, k, v, first, stop, *, triton=False):
        self.batch, self.heads, self.queries, self.count, self.dim = q.shape
        self.size, anchors = context_v.shape[2], first.shape[1]
        self.block = self.count // anchors
        sizes = _sizes(self.queries, self.block, anchors, self.dim, self.size, triton)
        self.group, self.row_count, self.own_count = sizes["group"], sizes["rows"], sizes["own"]
        self.tile, self.wide = sizes["tile"], sizes["wide"]
        self.groups, self.tiles = -(-anchors // self.group), -(-self.size // self.tile)
        more = self.groups * self.group - anchors
        shape = (self.batch, self.groups, self.group)
        first, stop = (jnp.pad(x, ((0, 0), (0, more))).reshape(shape) for x in (first, stop))
        self.chosen = meetings(first, stop, self.tile, self.tiles)
        # Of each row: the bounds of its context, and where its block begins among the own keys.
        own = jnp.broadcast_to(jnp.arange(self.group) * self.block, shape)
        bounds = jnp.stack([first, stop, own], axis=2)[:, :, :, None, :, None]
        shape = (self.batch, self.groups, 3, self.queries, self.group, self.block)
        bounds = jnp.broadcast_to(bounds, shape)
        bounds = bounds.reshape(self.batch * self.groups, 3, -1).astype(jnp.int32)
        spare = self.row_count - bounds.shape[-1]
        self.bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, spare)))
        self.q = self.rows(q, wide=True)
        self.k, self.v = self.own(k.swapaxes(2, 3)), self.own(v)
        self.context_k, self.context_v = self.keys(context_k.swapaxes(2, 3)), self.keys(context_v)

    def rows(self, x, wide=False):
        """[B, K, Q, A*G, H] -> [B*n, K, R, H]; H padded too if `wide`."""
        each = self.group * self.block
        x = _padded(x, 3, self.groups * each)
        x = x.reshape(*x.shape[:3], self.groups, each, x.shape[-1]).transpose(0, 3, 1, 2, 4, 5)
        x = x.reshape(self.batch * self.groups, self.heads, self.queries * each, x.shape[-1])
        x = _padded(x, 2, self.row_count)
        return _padded(x, 3, self.wide) if wide else x

    def slots(self, x):
        """[B*n, K, R, H] -> [B, K, Q, A*G, H]."""
        each = self.group * self.block
        x = x[:, :, : self.queries * each, : self.dim]
        shape = (self.batch, self.groups, self.heads, self.queries, each, x.shape[-1])
        x = x.reshape(shape).transpose(0, 2, 3, 1, 4, 5)
        return x.reshape(*x.shape[:3], self.groups * each, x.shape[-1])[:, :, :, : self.count]

    def numbers(self, x):
        """[B, K, Q, A*G] -> [B*n, K, 1, R]."""
        return self.rows(x[..., None])[..., 0][:, :, None]

    def own(self, x):
        """[B, K, A*G, H] -> [B*n, K, O, H]."""
        each = self.group * self.block
        x = _padded(x, 2, self.groups * each)
        x = x.reshape(*x.shape[:2], self.groups, each, x.shape[-1]).swapaxes(1, 2)
        x = x.reshape(self.batch * self.groups, self.heads, each, x.shape[-1])
        return _padded(_padded(x, 2, self.own_count), 3, self.wide)

    def blocks(self, x):
        """[B*n, K, O, H] -> [B, K, A*G, H]."""
        each = self.group * self.block
        x = x[:, :, :each, : self.dim]
        x = x.reshape(self.batch, self.groups, self.heads, each, x.shape[-1]).swapaxes(1, 2)
        return x.reshape(*x.shape[:2], self.groups * each, x.shape[-1])[:, :, : self.count]

    def keys(self, x):
        """[B, K, S, H], padded to whole tiles."""
        return _padded(_padded(x, 2, self.tiles * self.tile), 3, self.wide)

    def context(self, x):
        """The way back."""
        return x[:, :, : self.size, : self.dim]

    def gradients(self, d_q, d_keys, d_values, d_k, d_v):
        """As the operands lay."""
        return (
            self.slots(d_q),
            self.context(d_keys).swapaxes(2, 3),
            self.context(d_values),
            self.blocks(d_k).swapaxes(2, 3),
            self.blocks(d_v),
        )


def _padded(x, axis, size):
    more = size - x.shape[axis]
    return jnp.pad(x, [(0, more * (i == axis)) for i in range(x.ndim)]) if more else x


def dot(a, b, a_axis, b_axis):
    """The product over one axis of each, summed in float32; exact for float32 on every chip."""
    precision = jax.lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return jax.lax.dot_general(a, b, contract, precision, jnp.float32)
