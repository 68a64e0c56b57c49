"""A drafter's own vocabulary: between its V_d logits and the target's V tokens.

`ids` i32[V_d] are the target ids of the draft ids, ascending; None = the whole vocabulary, and
nothing is to be done. Draft ids live between a drafter's logits and the token drafted, nowhere
else: whatever a drafter is given or returns is in target ids.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import gather_rows, spec
from dspark_jax.models.target import TargetHead


def head(target: TargetHead, ids: jax.Array | None) -> TargetHead:
    """The target's embedding and the rows of its LM head that can be proposed."""
    if ids is None:
        return target
    rows = target.weight.at[ids].get(out_sharding=spec("vocab", "embed"))
    return dataclasses.replace(target, lm_head=rows)


def to_target(draft: jax.Array, ids: jax.Array | None) -> jax.Array:
    """Draft ids i32[B, ...] as target ids."""
    if ids is None:
        return draft
    return gather_rows(ids, draft, ("batch", *[None] * (draft.ndim - 1)))


def to_draft(tokens: jax.Array, ids: jax.Array | None, vocab: int) -> jax.Array:
    """Target ids i32[B, ...] as draft ids, -1 for those that cannot be proposed."""
    if ids is None:
        return tokens
    table = jnp.full(vocab, -1, jnp.int32)
    table = table.at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))
    return gather_rows(table, tokens, ("batch", *[None] * (tokens.ndim - 1)))


def scatter(probs: jax.Array, ids: jax.Array | None, vocab: int) -> jax.Array:
    """Probabilities f32[B, ..., V_d] over target ids, f32[B, ..., V]; 0 where it cannot go."""
    if ids is None:
        return probs
    *leading, _ = probs.shape
    axes = ("batch", *[None] * len(leading))
    whole = jnp.zeros((*leading, vocab), probs.dtype, out_sharding=spec(*axes))
    return whole.at[..., ids].set(probs, out_sharding=spec(*axes))
