"""Which blocks a row trains on, what each slot is supervised with and how much it weighs."""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.core.config import DrafterConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Blocks:
    """A blocks of G slots per row; indices point into the row's S positions."""

    anchors: jax.Array  # i32[B, A], sorted; 0 where unfilled
    filled: jax.Array  # bool[B, A]
    visible: jax.Array  # bool[B, A, S], context a block may see
    label_index: jax.Array  # i32[B, A, G], position of the token each slot predicts
    prev_index: jax.Array  # i32[B, A, G], position of the token before it
    supervised: jax.Array  # bool[B, A, G]


def sample_anchors(
    key: jax.Array, loss_mask: jax.Array, documents: jax.Array, rows: jax.Array, num_anchors: int
) -> tuple[jax.Array, jax.Array]:
    """Anchors drawn uniformly without replacement from those with a supervised next token.

    A candidate a has loss_mask[a], loss_mask[a + 1] and both in one document (the policy of
    DeepSpec). The draw depends on the key and the row's number alone, not on its place in a batch.

    Args:
      loss_mask: bool[B, S]; documents: i32[B, S]; rows: i32[B].

    Returns:
      anchors i32[B, A], sorted, 0 where unfilled, and filled bool[B, A].
    """
    batch, length = loss_mask.shape
    following = jnp.roll(loss_mask, -1, axis=1) & (jnp.roll(documents, -1, 1) == documents)
    candidate = loss_mask & following & (jnp.arange(length) < length - 1) & (documents > 0)
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
) -> Blocks:
    """What each slot of each block sees and is supervised with (paper section 3.3).

    anchor-first: slot k predicts the token at a+k+1. fill-in: slot k predicts a+k, slot 0 nothing.
    Supervised: label inside the row, in the anchor's document, on a generated token, and every
    earlier slot supervised too (a running product).
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
    good = (wanted < length) & filled[..., None] & at(loss_mask, label_index)
    good = good & (at(documents, label_index) == document[..., None])
    if not config.sample_from_anchor:
        good = good | ((slot == 0) & filled[..., None])  # slot 0 restates the anchor
    good = jnp.cumprod(good.astype(jnp.int32), axis=-1).astype(bool)
    if not config.sample_from_anchor:
        good = good & (slot > 0)
    before = jnp.arange(length) < anchors[..., None]
    visible = before & (documents[:, None, :] == document[..., None]) & filled[..., None]
    return Blocks(anchors, filled, visible, label_index, prev_index, good)


def slot_weights(blocks: Blocks, config: DrafterConfig, decay: float) -> jax.Array:
    """exp(-k / decay) of the k-th proposal on supervised slots, 0 elsewhere: f32[B, A, G]."""
    slot = jnp.arange(config.block_size, dtype=jnp.float32)
    proposal = slot if config.sample_from_anchor else slot - 1
    return jnp.where(blocks.supervised, jnp.exp(-proposal / decay), 0.0)
