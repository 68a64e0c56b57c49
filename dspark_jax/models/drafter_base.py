"""What drafters of every algorithm share: their options, and a vocabulary of their own.

With a pruned vocabulary a drafter holds `draft_ids` i32[V_d], the target ids of its draft ids,
ascending. Draft ids live between its V_d logits and the token drafted, nowhere else: whatever it is
given or returns (anchors, previous tokens, drafts) is in target ids.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.sharding import gather_rows, spec
from dspark_jax.models.target import TargetHead


class DrafterBase(nnx.Module):
    """A drafter has `shape`, and `draft_ids` where that is pruned."""

    @property
    def config(self) -> DrafterConfig:
        """The options it was built with."""
        return self.shape.config

    @property
    def dtype(self):
        """Compute dtype; parameters are float32."""
        return jnp.dtype(self.config.dtype)

    def head(self, target: TargetHead) -> TargetHead:
        """The target's embedding and the rows of its LM head that this drafter can propose.

        A copy of the rows where the vocabulary is pruned: take it once, outside of loops.
        """
        if not self.shape.pruned:
            return target
        rows = target.weight.at[self.draft_ids[...]].get(out_sharding=spec("vocab", "embed"))
        return dataclasses.replace(target, lm_head=rows)

    def to_target(self, draft: jax.Array) -> jax.Array:
        """Draft ids i32[B, ...] as target ids."""
        if not self.shape.pruned:
            return draft
        return gather_rows(self.draft_ids[...], draft, ("batch", *[None] * (draft.ndim - 1)))

    def to_draft(self, tokens: jax.Array) -> jax.Array:
        """Target ids i32[B, ...] as draft ids, -1 for those it cannot propose."""
        if not self.shape.pruned:
            return tokens
        ids = self.draft_ids[...]
        table = jnp.full(self.shape.vocab_size, -1, jnp.int32)
        table = table.at[ids].set(jnp.arange(len(ids), dtype=jnp.int32))
        return gather_rows(table, tokens, ("batch", *[None] * (tokens.ndim - 1)))

    def scatter(self, probs: jax.Array) -> jax.Array:
        """Probabilities f32[B, ..., V_d] over target ids, f32[B, ..., V]; 0 where it cannot go."""
        if not self.shape.pruned:
            return probs
        *leading, _ = probs.shape
        axes = ("batch", *[None] * len(leading))
        whole = (*leading, self.shape.vocab_size)
        zeros = jnp.zeros(whole, probs.dtype, out_sharding=spec(*axes))
        return zeros.at[..., self.draft_ids[...]].set(probs, out_sharding=spec(*axes))
