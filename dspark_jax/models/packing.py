"""Tokens of rows of different lengths as one flat list, so that short rows save work.

A batch [R, W] in which row r uses only its first counts[r] places is packed into N >= sum(counts)
places [1, N]: row 0's tokens, row 1's, and so on, then padding. Embeddings, norms, projections,
MLPs and the LM head treat tokens one by one and run on the flat list; only attention unpacks, as
it needs each row's own cache. N is static, so every N is one compiled program.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import RULES, spec
from dspark_jax.models.cache import LayerCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """Where the tokens of R rows, up to W each, are in a flat list of N places."""

    row: jax.Array  # i32[N], of the token at each place
    slot: jax.Array  # i32[N], its number within the row; padding repeats some other token
    place: jax.Array  # i32[R, W], of each row's slots; those beyond its count repeat its last

    @property
    def width(self) -> int:
        """W."""
        return self.place.shape[1]

    @classmethod
    def of(cls, counts: jax.Array, width: int, size: int) -> "Packing":
        """The packing of counts i32[R], 0..width each, into `size` places.

        The caller guarantees sum(counts) <= size: tokens beyond would be left out. Rows must not
        be sharded, as a row's tokens may be anywhere in the list (heads, MLP and vocabulary may).
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty:
            if mesh.shape[RULES["batch"]] > 1:
                raise ValueError("packed rows on a mesh whose batch axis has more than one device")
            counts = jax.sharding.reshard(counts, spec(None))
        rows = len(counts)
        ends = jnp.cumsum(counts)
        starts = ends - counts
        at = jnp.arange(size, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(at[:, None] >= ends, axis=1, dtype=jnp.int32), rows - 1)
        slot = jnp.clip(at - starts[row], 0, width - 1)
        last = jnp.maximum(counts - 1, 0)[:, None]
        place = starts[:, None] + jnp.minimum(jnp.arange(width), last)
        return cls(row, slot, jnp.minimum(place, size - 1))

    def flat(self, x: jax.Array, axes: tuple[str | None, ...], axis: int = 1) -> jax.Array:
        """[R, ..., W, ...] with W at `axis` -> [1, ..., N, ...]; `axes` of the result."""
        others = (None, *axes[1:axis], *axes[axis + 1 :])
        rows = jnp.moveaxis(x, axis, 1).at[self.row, self.slot].get(out_sharding=spec(*others))
        return jnp.moveaxis(rows, 0, axis - 1)[None]

    def rows(self, x: jax.Array, axes: tuple[str | None, ...], axis: int = 1) -> jax.Array:
        """[1, ..., N, ...] with N at `axis` -> [R, ..., W, ...]; `axes` of the result."""
        others = (axes[0], None, *axes[1:axis], *axes[axis + 1 :])
        tokens = jnp.moveaxis(x[0], axis - 1, 0)
        rows = tokens.at[self.place].get(out_sharding=spec(*others))
        return jnp.moveaxis(rows, 1, axis)

    def keys_values(self, tokens: LayerCache) -> LayerCache:
        """Keys [1, K, H, N] and values [1, K, N, H] -> [R, K, H, W] and [R, K, W, H]."""
        axes = ("batch", "heads", None, None)
        return LayerCache(self.rows(tokens.k, axes, 3), self.rows(tokens.v, axes, 2))
