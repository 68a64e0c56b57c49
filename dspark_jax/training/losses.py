"""The DSpark loss of one micro-batch and the sums that metrics are made of (paper section 3.3)."""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.core.loss_config import LossConfig
from dspark_jax.features.source import Batch
from dspark_jax.kernels.vocab_loss import Teacher, VocabTerms, vocab_loss
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.models.target import TargetHead
from dspark_jax.training.anchors import Blocks, SlotWeights
from dspark_jax.training.eagle3 import chain_hidden


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over supervised slots, added over micro-batches and divided only at the end.

    Per-slot arrays are f32[G] over the block's slots.
    """

    ce: jax.Array  # f32[], weighted by the slot weights, like l1, kl and bce
    l1: jax.Array  # sum |p_d - p_t|, whichever distance is trained
    kl: jax.Array
    bce: jax.Array
    weight: jax.Array  # f32[], what the four are divided by: SlotWeights.unit
    slots: jax.Array  # f32[G], supervised slots
    accept: jax.Array  # f32[G], sum of c* = acceptance probability at temperature 1
    match: jax.Array  # f32[G], slots whose arg-max is the target's (acceptance at temperature 0)
    survive: jax.Array  # f32[G], sum over blocks of the product of c* up to the slot
    survive_match: jax.Array  # f32[G], the same of match
    confidence_error: jax.Array  # f32[G], sum |c - c*|
    confidence_bias: jax.Array  # f32[G], sum (c - c*)
    cumulative_bias: jax.Array  # f32[G], sum of (product of c - product of c*)
    anchors: jax.Array  # f32[], filled anchors
    rows: jax.Array  # f32[], rows


def dspark_loss(
    drafter: AnyDrafter,
    head: TargetHead,
    batch: Batch,
    blocks: Blocks,
    weights: SlotWeights,
    total_weight: jax.Array,
    config: LossConfig,
    chunk: int,
    remat: str = "none",
) -> tuple[jax.Array, Sums]:
    """Loss of one micro-batch, already divided by the weight of the whole global batch.

    Args:
      head: the target's.
      batch: one micro-batch: arrays [B, S, ...] without the leading M.
      weights: of the micro-batch; total_weight: f32[], the sum of their units over the global
        batch.
      chunk: rows whose logits exist at a time.
      remat: what the backward pass computes again (models/remat.py).

    Returns:
      The micro-batch's share of the loss (shares add up to the loss) and its sums.
    """
    rows, slots = blocks.anchors.shape[0], weights.slots.shape[1:]
    take = jax.vmap(lambda values, index: values[index])
    hidden = block_hidden(drafter, head, batch, blocks, remat)
    prev = jnp.take_along_axis(batch.tokens, blocks.prev_index.reshape(rows, -1), axis=1)
    latent = w2 = prev_rows = None
    vanilla = drafter.config.markov_head == "vanilla"
    if drafter.config.markov_rank:
        w2 = drafter.markov.w2[...]
    if vanilla:
        latent = drafter.markov.rows(batch.tokens)  # of the token at each position
        prev_rows = take(latent, blocks.prev_index)
    elif drafter.config.markov_rank:
        prev_rows = drafter.markov.rows(prev).reshape(rows, *slots, -1)
        # As in decoding, the chain starts at the first slot that proposes a token.
        skip = drafter.config.block_size - drafter.config.num_proposals
        latent = drafter.markov.latents(prev_rows[:, :, skip:], hidden[:, :, skip:])
        latent = jnp.pad(latent, ((0, 0), (0, 0), (skip, 0), (0, 0)))
        latent = latent.reshape(rows, prev.shape[1], -1)
    label_index = blocks.label_index.reshape(rows, -1)
    labels = jnp.take_along_axis(batch.tokens, label_index, axis=1)
    lse = best = None
    if drafter.shape.pruned:
        lse, best = batch.teacher_lse, drafter.to_draft(batch.teacher_best)
    # A supervised slot's previous token is the one before its label, and what the target says
    # there is the distribution of that label.
    at = blocks.prev_index.reshape(rows, -1)
    most = slots[1]  # anchors differ, so a position is each slot of one block at most
    teacher = Teacher(batch.last_hidden.astype(hidden.dtype), lse, best, at, most)
    share = weights.slots / jnp.maximum(total_weight, 1e-20)
    loss, terms = vocab_loss(
        hidden.reshape(rows, prev.shape[1], -1),
        latent,
        w2,
        drafter.head(head).weight,
        teacher,
        None if config.ce_label == "target" else drafter.to_draft(labels),
        share.reshape(rows, -1),
        ce_weight=config.ce,
        l1_weight=config.distance_scale * config.l1,
        kl_weight=config.kl,
        softcap=head.softcap,
        renormalise=config.teacher == "draft",
        shared_latent=vanilla,
        chunk=chunk,
    )
    terms = jax.tree.map(lambda x: x.reshape(share.shape), terms)
    wanted = jnp.clip(1 - 0.5 * terms.l1, 0.0, 1.0)  # c*, no gradient
    supervised = blocks.supervised.astype(jnp.float32)
    bce = confidence = jnp.zeros_like(wanted)
    if drafter.config.confidence_head:
        logits = drafter.confidence_logits(hidden, prev_rows)
        bce = jnp.maximum(logits, 0) - logits * wanted + jnp.log1p(jnp.exp(-jnp.abs(logits)))
        bce = jnp.where(blocks.supervised, bce, 0.0)
        loss = loss + config.confidence * jnp.sum(share * bce)
        confidence = jax.nn.sigmoid(logits)
    silent = drafter.config.block_size - drafter.config.num_proposals
    return loss, jax.lax.stop_gradient(
        _sums(terms, bce, confidence, weights, supervised, blocks, silent)
    )


def block_hidden(
    drafter: AnyDrafter, head: TargetHead, batch: Batch, blocks: Blocks, remat: str = "none"
) -> jax.Array:
    """Hidden states of all slots of a micro-batch, [B, A, G, D]; 0 where nothing reaches the loss.

    Args:
      head: the target's.
      remat: what the backward pass computes again (models/remat.py).
    """
    anchor_tokens = jnp.take_along_axis(batch.tokens, blocks.anchors, axis=1)
    anchor_positions = jnp.take_along_axis(batch.positions, blocks.anchors, axis=1)
    if drafter.config.algorithm == "eagle3":
        hidden = chain_hidden(drafter, head, batch, blocks)
    else:
        padding = (batch.documents == 0)[..., None, None]
        context = drafter.context(jnp.where(padding, 0, batch.taps), batch.positions)
        hidden = drafter.backbone(
            head, anchor_tokens, anchor_positions, context, blocks.first, blocks.stop, remat
        )
    # Masked before use: whatever padding or a slot behind the last supervised one holds has no
    # influence, not even as 0 * NaN. The state of an rnn head passes through those before it.
    reached = jax.lax.cummax(blocks.supervised.astype(jnp.int32), axis=2, reverse=True)
    return jnp.where(reached[..., None] > 0, hidden, 0)


def _sums(
    terms: VocabTerms,
    bce: jax.Array,
    confidence: jax.Array,
    weights: SlotWeights,
    supervised: jax.Array,
    blocks: Blocks,
    silent: int,
) -> Sums:
    accept = jnp.clip(terms.accept, 0.0, 1.0)

    def per_slot(values: jax.Array) -> jax.Array:
        return jnp.sum(values * supervised, axis=(0, 1))

    # Slot 0 of fill-in blocks proposes nothing: it counts as certain in products. What lies behind
    # any other unsupervised slot is never reached.
    def survival(values: jax.Array) -> jax.Array:
        certain = jnp.arange(values.shape[-1]) < silent
        return jnp.cumprod(jnp.where(certain, 1.0, values * supervised), axis=-1)

    return Sums(
        ce=jnp.sum(weights.slots * terms.ce),
        l1=jnp.sum(weights.slots * terms.l1),
        kl=jnp.sum(weights.slots * terms.kl),
        bce=jnp.sum(weights.slots * bce),
        weight=weights.unit,
        slots=per_slot(jnp.ones_like(accept)),
        accept=per_slot(accept),
        match=per_slot(terms.match),
        survive=per_slot(survival(accept)),
        survive_match=per_slot(survival(terms.match)),
        confidence_error=per_slot(jnp.abs(confidence - accept)),
        confidence_bias=per_slot(confidence - accept),
        cumulative_bias=per_slot(survival(confidence) - survival(accept)),
        anchors=jnp.sum(blocks.filled.astype(jnp.float32)),
        rows=jnp.float32(blocks.filled.shape[0]),
    )
