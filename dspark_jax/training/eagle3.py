"""EAGLE-3 in training: where chains start, and the hidden states of their steps.

The chains are unrolled as decoding runs them (the papers' training-time test): each step is fed the
state of the step before it, and the data's token, not the one that it would have drawn, because the
target's distribution is known for the data's own prefix alone.

Positions are those of the blocks in anchors.py: step k at anchor a is given the token at a + k and
taught the target's distribution of the one at a + k + 1. Losses and metrics are those of losses.py.
DeepSpec and speculators unroll at every position of a row; here train.num_anchors bounds it as it
does for DSpark, and steps behind the first one that is not supervised do not count.
"""

import jax
import jax.numpy as jnp

from dspark_jax.features.source import Batch
from dspark_jax.models.eagle3 import Eagle3Drafter
from dspark_jax.models.target import TargetHead
from dspark_jax.training.anchors import Blocks


def may_start(loss_mask: jax.Array, documents: jax.Array) -> jax.Array:
    """`loss_mask` bool[B, S] without the first tokens of documents: no taps come before those."""
    first = (jnp.roll(documents, 1, axis=1) != documents).at[:, 0].set(True)
    return loss_mask & ~first


def chain_hidden(
    drafter: Eagle3Drafter, head: TargetHead, batch: Batch, blocks: Blocks
) -> jax.Array:
    """Hidden states [B, A, G, D] for the LM head of the steps of every chain of a micro-batch."""
    rows, anchors, steps = blocks.prev_index.shape
    padding = (batch.documents == 0)[..., None, None]
    features = drafter.features(jnp.where(padding, 0, batch.taps))
    following = jnp.roll(batch.tokens, -1, axis=1)  # behind a row's end nothing looks
    context = drafter.context(head, features, following, batch.positions)
    before = jnp.maximum(blocks.anchors - 1, 0)
    start = jax.vmap(lambda values, index: values[index])(features, before)
    tokens = jnp.take_along_axis(batch.tokens, blocks.prev_index.reshape(rows, -1), axis=1)
    positions = jnp.take_along_axis(batch.positions, blocks.anchors, axis=1) - 1
    tokens = tokens.reshape(rows, anchors, steps)
    visible = blocks.visible(batch.tokens.shape[1])
    return drafter.unroll(head, start, tokens, positions, context, visible)
