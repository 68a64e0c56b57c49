"""The likeliest token of each row, in one pass over its logits."""

import math

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import platform

_BLOCK = 256  # tokens whose largest logit is taken together
_LEAST = 32  # below, a vocabulary is no multiple of anything worth a block


def best_token(logits: jax.Array) -> jax.Array:
    """The argmax of [..., V], lowest id among equals, i32[...]; some id for a row with NaN.

    By maxima and minima, which XLA vectorises; jnp.argmax is ten times slower on CPUs. There the
    largest of every block of tokens is taken first, and only the first block that has the largest
    of all is looked at again: logits that are sums of two arrays are then added up once. On other
    chips a row of blocks would be another layout, and a copy.
    """
    vocab = logits.shape[-1]
    block = math.gcd(vocab, _BLOCK)
    if platform() != "cpu" or block < _LEAST or block == vocab or _sharded(logits):
        return _first_best(logits, jnp.max(logits, axis=-1, keepdims=True))
    blocks = logits.reshape(*logits.shape[:-1], vocab // block, block)
    tops = jnp.max(blocks, axis=-1)
    best = jnp.max(tops, axis=-1, keepdims=True)
    at = _first_best(tops, best)
    pick = jax.lax.dynamic_index_in_dim
    for _ in at.shape:  # not take_along_axis, which cannot tell the sharding where B is 1
        pick = jax.vmap(pick, in_axes=(0, 0, None, None))
    return at * block + _first_best(pick(blocks, at, 0, False), best)


def _first_best(scores: jax.Array, best: jax.Array) -> jax.Array:
    """The first place in [..., N] that holds `best` [..., 1], i32[...]; N - 1 if none does."""
    places = scores.shape[-1]
    ids = jnp.where(scores == best, jnp.arange(places, dtype=jnp.int32), places - 1)
    return jnp.min(ids, axis=-1)


def _sharded(logits: jax.Array) -> bool:
    """Whether the vocabulary lies on several devices."""
    spec = jax.typeof(logits).sharding.spec
    return len(spec) == logits.ndim and spec[-1] is not None
