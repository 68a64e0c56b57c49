"""The functional key/value cache: rows of one length each, rollback by not advancing it."""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import platform, spec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer.

    Heads come before positions and keys are stored transposed, so that neither product of
    attention transposes the cache (on a CPU the other layout is six times slower).
    """

    k: jax.Array  # [B, K, H, S]
    v: jax.Array  # [B, K, S, H]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """All layers and the valid length of every row; rows past it may hold anything."""

    layers: tuple[LayerCache, ...]
    length: jax.Array  # i32[B]

    @property
    def capacity(self) -> int:
        """Positions a row can hold."""
        return self.layers[0].v.shape[2]

    @classmethod
    def zeros(
        cls, num_layers: int, batch: int, capacity: int, num_kv_heads: int, head_dim: int, dtype
    ) -> "KVCache":
        """An empty cache on the current mesh."""
        return cls.of(((num_kv_heads, head_dim),) * num_layers, batch, capacity, dtype)

    @classmethod
    def of(cls, sizes: tuple[tuple[int, int], ...], batch: int, capacity: int, dtype) -> "KVCache":
        """An empty cache of layers with these (key/value heads, head dimension)."""

        def empty(*shape: int) -> jax.Array:
            return jnp.zeros(shape, dtype, out_sharding=spec("batch", "heads", None, None))

        layers = tuple(
            LayerCache(empty(batch, heads, dim, capacity), empty(batch, heads, capacity, dim))
            for heads, dim in sizes
        )
        return cls(layers, jnp.zeros((batch,), jnp.int32, out_sharding=spec("batch")))

    def advance(self, count: jax.Array) -> "KVCache":
        """Commits `count` i32[B] more positions of every row."""
        return dataclasses.replace(self, length=self.length + count)


def write(cache: LayerCache, k: jax.Array, v: jax.Array, at: jax.Array) -> LayerCache:
    """Writes keys [B, K, H, T] and values [B, K, T, H] at positions `at` i32[B] onward.

    The caller guarantees at + T <= capacity: dynamic_update_slice would silently move its start
    back and overwrite older rows.
    """

    def keys(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        at = (*[0] * (old.ndim - 1), start)
        return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), at)

    def values(old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        at = (*[0] * (old.ndim - 2), start, 0)
        return jax.lax.dynamic_update_slice(old, new.astype(old.dtype), at)

    if len(at) > 1:
        return LayerCache(jax.vmap(keys)(cache.k, k, at), jax.vmap(values)(cache.v, v, at))

    def one_row(_, old: LayerCache) -> LayerCache:  # vmap would make it a scatter
        return LayerCache(keys(old.k, k, at[0]), values(old.v, v, at[0]))

    if v.shape[2] > 1 or platform() != "cpu":
        return one_row(0, cache)
    # XLA:CPU takes the write of one position for so cheap that it fuses it into each reader, and
    # then copies the whole cache for each of them. A loop it leaves alone; it runs once.
    return jax.lax.fori_loop(0, (at[0] >= 0).astype(jnp.int32), one_row, cache)
