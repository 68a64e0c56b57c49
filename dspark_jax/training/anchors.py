"""Which blocks a row trains on, what each slot is supervised with and how much it weighs."""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.loss_config import LossConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A blocks of G slots per row; indices point into the row's S positions."""

    anchors: jax.Array  # i32[B, A], sorted; 0 where unfilled
    filled: jax.Array  # bool[B, A]
    first: jax.Array  # i32[B, A], the context a block sees: first <= j < stop, from the start of
    stop: jax.Array  # its document to its anchor; 0 and -1 where unfilled
    label_index: jax.Array  # i32[B, A, G], position of the token each slot predicts
    prev_index: jax.Array  # i32[B, A, G], position of the token before it
    supervised: jax.Array  # bool[B, A, G]

    def visible(self, length: int) -> jax.Array:
        """bool[B, A, length], the context as a mask."""
        position = jnp.arange(length)
        return (self.first[..., None] <= position) & (position < self.stop[..., None])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotWeights:
    """What a slot's loss weighs; the loss is the weighted sum divided by the sum of `unit`."""

    slots: jax.Array  # f32[M, B, A, G], 0 where unsupervised
    unit: jax.Array  # f32[M], each micro-batch's part of the divisor


def sample_anchors(
    key: jax.Array,
    loss_mask: jax.Array,
    documents: jax.Array,
    rows: jax.Array,
    num_anchors: int,
    room: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Anchors drawn uniformly without replacement from the generated tokens that may be one.

    The draw depends on the key and the row's number alone, not on its place in a batch.

    Args:
      loss_mask: bool[B, S]; documents: i32[B, S]; rows: i32[B].
      room: None = a candidate a has loss_mask[a], loss_mask[a + 1] and both in one document (the
        policy of DeepSpec); else it has loss_mask[a] and so many positions behind it in the row,
        whatever they hold (that of speculators, where they are a block's).

    Returns:
      anchors i32[B, A], sorted, 0 where unfilled, and filled bool[B, A].
    """
    batch, length = loss_mask.shape
    position = jnp.arange(length)
    if room is None:
        following = jnp.roll(loss_mask, -1, axis=1) & (jnp.roll(documents, -1, 1) == documents)
        good = following & (position < length - 1)
    else:
        good = position < length - room
    candidate = loss_mask & good & (documents > 0)
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    score = jax.vmap(lambda key: jax.random.uniform(key, (length,)))(keys)
    score = jnp.where(candidate, score, -1.0)
    width = min(num_anchors, length)
    best, index = jax.lax.top_k(score, width)
    filled = best >= 0
    order = jnp.argsort(jnp.where(filled, index, length), axis=1)
    anchors = jnp.take_along_axis(jnp.where(filled, index, 0), order, axis=1)
    return anchors.astype(jnp.int32), jnp.take_along_axis(filled, order, axis=1)


def make_blocks(
    anchors: jax.Array,
    filled: jax.Array,
    loss_mask: jax.Array,
    documents: jax.Array,
    config: DrafterConfig,
    loss: LossConfig,
) -> Blocks:
    """What each slot of each block sees and is supervised with (paper section 3.3).

    anchor-first: slot k predicts the token at a+k+1. fill-in: slot k predicts a+k, slot 0 nothing.
    Supervised: label inside the row, in the anchor's document, on a generated token, and every
    earlier slot supervised too (a running product); `loss.supervision`, `mask_at` and
    `cross_documents` each change one of these.
    """
    length = loss_mask.shape[1]
    slot = jnp.arange(config.block_size)
    offset = 1 if config.sample_from_anchor else 0
    wanted = anchors[..., None] + slot + offset
    label_index = jnp.minimum(wanted, length - 1)
    prev_index = jnp.clip(wanted - 1, 0, length - 1)

    def at(values: jax.Array, index: jax.Array) -> jax.Array:
        batch, anchors, slots = index.shape
        flat = jnp.take_along_axis(values, index.reshape(batch, anchors * slots), axis=1)
        return flat.reshape(index.shape)

    document = jnp.take_along_axis(documents, anchors, axis=1)
    judged = label_index
    if loss.mask_at == "slot":
        judged = jnp.minimum(anchors[..., None] + slot, length - 1)
    good = (wanted < length) & filled[..., None] & at(loss_mask, judged)
    if not loss.cross_documents:
        good = good & (at(documents, label_index) == document[..., None])
    if not config.sample_from_anchor:
        good = good | ((slot == 0) & filled[..., None])  # slot 0 restates the anchor
    if loss.supervision == "prefix":
        good = jnp.cumprod(good.astype(jnp.int32), axis=-1).astype(bool)
    if not config.sample_from_anchor:
        good = good & (slot > 0)
    position = jnp.arange(length, dtype=jnp.int32)
    begins = (jnp.roll(documents, 1, axis=1) != documents) | (position == 0)
    begin = jax.lax.cummax(jnp.where(begins, position, 0), axis=1)
    first = jnp.where(filled, jnp.take_along_axis(begin, anchors, axis=1), 0)
    stop = jnp.where(filled, anchors, -1)
    return Blocks(anchors, filled, first, stop, label_index, prev_index, good)


def slot_weights(
    blocks: Blocks, loss_mask: jax.Array, config: DrafterConfig, loss: LossConfig
) -> SlotWeights:
    """exp(-k / decay) of the k-th proposal on supervised slots, 0 elsewhere, normalised.

    Of EAGLE-3 it is step_loss_decay ** k, as its public recipes have it.
    Over the global batch nothing is divided here: sums of any part of it add up. Otherwise each
    micro-batch or row counts as 1 in the average, rows without a generated token left out.

    Args:
      blocks: of all micro-batches, arrays [M, B, ...]; loss_mask: bool[M, B, S].
    """
    slot = jnp.arange(config.block_size, dtype=jnp.float32)
    proposal = slot if config.sample_from_anchor else slot - 1
    decayed = jnp.exp(-proposal / loss.decay) if loss.decay else jnp.ones_like(slot)
    if config.algorithm == "eagle3":
        decayed = config.eagle3.step_loss_decay**proposal
    weights = jnp.where(blocks.supervised, decayed, 0.0)
    counted = weights if loss.denominator == "weights" else blocks.supervised.astype(jnp.float32)
    if loss.average_over == "batch":
        return SlotWeights(weights, counted.sum((1, 2, 3)))
    rows = loss_mask.any(-1).astype(jnp.float32).sum(1)
    by_row = loss.average_over == "row"
    divisor = counted.sum((2, 3) if by_row else (1, 2, 3), keepdims=True)
    unit = rows if by_row else (rows > 0).astype(jnp.float32)
    return SlotWeights(weights / jnp.maximum(divisor, 1e-20), unit)
