"""Which drafted tokens the target keeps, which token it adds, and where a request ends.

Pure functions on distributions and ids, lossless by construction: whatever the drafter proposes,
the emitted tokens are distributed as the target's own (Leviathan et al., arXiv 2211.17192).
tests/test_lossless.py enumerates all paths through the very functions used here.

Slot k of a round decides the token at absolute position `positions + k`; the target's row k is
its distribution for that same token, so it has one row more than there are drafts.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp

from dspark_jax.decoding import sampling
from dspark_jax.decoding.sampling import Purpose


class Reason(enum.IntEnum):
    """Why a row does not go on."""

    RUNNING = 0
    STOP = 1  # a stop id
    LENGTH = 2  # max_tokens
    ERROR = 3  # the target gave NaN or infinite logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class VerifyResult:
    """The outcome of one round."""

    accepted: jax.Array  # i32[B], drafts before the first rejection
    tokens: jax.Array  # i32[B, G+1], accepted drafts, the target's token, then 0 as filler
    count: jax.Array  # i32[B], accepted + 1


def verify(
    target_probs: jax.Array,
    draft_tokens: jax.Array,
    draft_probs: jax.Array | None,
    positions: jax.Array,
    seeds: jax.Array,
    *,
    lengths: jax.Array | None = None,
) -> VerifyResult:
    """Accepts drafts left to right and draws the target's own token after the last of them.

    A draft whose distribution is NaN is rejected and the token comes from the target. Target rows
    must be checked by the caller: see `truncate`'s `finite`.

    Args:
        target_probs: f32[B, G+1, V], row k for the token of slot k, filtered as the request asks.
        draft_tokens: i32[B, G].
        draft_probs: f32[B, G, V], what each draft was really drawn from; None for drafts that were
            not drawn but chosen: all of q is on the draft.
        positions: i32[B], absolute position of the token of slot 0 (the anchor's plus 1).
        seeds: u32[B], the requests' seeds.
        lengths: i32[B], verified slots of each row, 0..G; None verifies all. A row of 0 decodes
            plainly: the very token that plain decoding draws at that position.
    """
    slots = draft_tokens.shape[1]
    at = positions[:, None] + jnp.arange(slots, dtype=positions.dtype)
    uniforms = sampling.uniform(sampling.purpose_key(seeds[:, None], at, Purpose.ACCEPT))
    accepted = accepted_prefix(target_probs, draft_tokens, draft_probs, uniforms, lengths)
    own = sampling.draw(
        next_distribution(target_probs, draft_probs, accepted, lengths, draft_tokens),
        sampling.purpose_key(seeds, positions + accepted, Purpose.TARGET),
    )
    return _result(accepted, draft_tokens, own)


def verify_greedy(
    target_argmax: jax.Array, draft_tokens: jax.Array, lengths: jax.Array | None = None
) -> VerifyResult:
    """`verify` at temperature 0, without distributions or keys.

    Args:
        target_argmax: i32[B, G+1], the target's best token for each slot.
        draft_tokens: i32[B, G].
        lengths: i32[B] as for `verify`.
    """
    agrees = draft_tokens == target_argmax[:, :-1]
    accepted = _prefix_length(agrees, lengths)
    return _result(accepted, draft_tokens, at_slot(target_argmax, accepted))


def acceptance_probability(p: jax.Array, q: jax.Array) -> jax.Array:
    """min(1, p/q) for the target's and the drafter's probability of the drafted token.

    0 where q is 0: the drafter cannot have drawn that token, so it is a caller's fault to keep
    from the output.
    """
    return jnp.where(q > 0, jnp.minimum(p / jnp.where(q > 0, q, 1.0), 1.0), 0.0)


def residual(p: jax.Array, q: jax.Array) -> jax.Array:
    """What the target draws from after rejecting a draft: normalise(max(p - q, 0)), f32[..., V].

    With nothing left (p = q up to rounding, or NaN in q) it is p itself.
    """
    left = jnp.maximum(p - q, 0.0)
    total = jnp.sum(left, axis=-1, keepdims=True)
    return jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), p)


def accepted_prefix(
    target_probs: jax.Array,
    draft_tokens: jax.Array,
    draft_probs: jax.Array | None,
    uniforms: jax.Array,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Drafts before the first rejection, i32[B]; `uniforms` f32[B, G] lie in [0, 1).

    The comparison is strict: with `<=` a uniform of exactly 0 accepts a token the target cannot
    produce, while below 1 a strict comparison still accepts every ratio of 1.
    """
    slots = draft_tokens.shape[1]
    of_drafts = jax.vmap(at_slot)
    p = of_drafts(target_probs[:, :slots], draft_tokens)
    q = jnp.ones_like(p) if draft_probs is None else of_drafts(draft_probs, draft_tokens)
    return _prefix_length(uniforms < acceptance_probability(p, q), lengths)


def next_distribution(
    target_probs: jax.Array,
    draft_probs: jax.Array | None,
    accepted: jax.Array,
    lengths: jax.Array | None = None,
    draft_tokens: jax.Array | None = None,
) -> jax.Array:
    """Distribution of the token the target adds after `accepted` drafts: f32[B, V].

    The residual if a verified draft was rejected there, the target's own row otherwise. Where
    `draft_probs` is None, `draft_tokens` stand for them.
    """
    slots = target_probs.shape[1] - 1
    p = at_slot(target_probs, accepted)
    if slots == 0:
        return p
    verified = slots if lengths is None else lengths
    rejected = accepted < verified
    last = jnp.minimum(accepted, slots - 1)
    if draft_probs is None:
        chosen = at_slot(draft_tokens, last)[:, None]
        q = (chosen == jnp.arange(p.shape[-1])).astype(p.dtype)
    else:
        q = at_slot(draft_probs, last)
    return jnp.where(rejected[:, None], residual(p, q), p)


def truncate(
    result: VerifyResult,
    *,
    stop_ids: jax.Array,
    emitted: jax.Array,
    max_tokens: jax.Array,
    reason: jax.Array | None = None,
    finite: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many of a round's tokens a request keeps: as if they had come one at a time.

    Token by token the checks are: is there room, are the logits sound, keep the token, is it a
    stop id. So a stop id inside the limit wins over the limit, and nothing after it is counted.
    The stop id itself is counted.

    Args:
        result: the round's outcome.
        stop_ids: i32[K] for all rows or i32[B, K]; pad with -1.
        emitted: i32[B], tokens kept in earlier rounds.
        max_tokens: i32[B], the cap on all rounds together; 0 keeps none.
        reason: i32[B], `Reason` so far; rows that are not RUNNING keep nothing and their reason.
        finite: bool[B, G+1], `sampling.rows_finite` of the target's rows; a token decided by an
            unsound row is dropped and ends the request with ERROR.

    Returns:
        count i32[B] in 0..G+1, finished bool[B], reason i32[B].
    """
    stop_ids = jnp.asarray(stop_ids, jnp.int32)
    if stop_ids.ndim == 1:
        stop_ids = stop_ids[None]
    width = result.tokens.shape[1]
    room = jnp.maximum(max_tokens - emitted, 0)
    is_stop = jnp.any(result.tokens[:, :, None] == stop_ids[:, None, :], axis=-1)
    through_stop = _first(is_stop) + 1
    sound = width if finite is None else _first(~finite)
    count = jnp.minimum(jnp.minimum(result.count, room), jnp.minimum(through_stop, sound))
    ended = jnp.where(count == room, Reason.LENGTH, Reason.RUNNING)
    ended = jnp.where(
        (count == sound) & (count < result.count) & (count < room), Reason.ERROR, ended
    )
    ended = jnp.where(count == through_stop, Reason.STOP, ended)
    if reason is not None:
        running = reason == Reason.RUNNING
        count = jnp.where(running, count, 0)
        ended = jnp.where(running, ended, reason)
    ended = ended.astype(jnp.int32)
    return count.astype(jnp.int32), ended != Reason.RUNNING, ended


def at_slot(rows: jax.Array, slot: jax.Array) -> jax.Array:
    """rows[b, slot[b]] of rows [B, W, ...] and i32[B].

    Not take_along_axis: where B is 1, that cannot tell the sharding of its result.
    """

    def row(row: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(row, index, keepdims=False)

    return jax.vmap(row)(rows, slot)


def _prefix_length(good: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Length of the leading run of True in bool[B, G], at most `lengths`: i32[B]."""
    if lengths is not None:
        good = good & (jnp.arange(good.shape[1]) < lengths[:, None])

    def slot(carry, accepted):  # left to right: a slot counts while every one before it did
        alive, count = carry
        alive = alive & accepted
        return (alive, count + alive.astype(jnp.int32)), None

    row = jnp.zeros_like(good, jnp.int32).sum(axis=1, dtype=jnp.int32)  # sharded like the batch
    (_, count), _ = jax.lax.scan(slot, (row == 0, row), jnp.swapaxes(good, 0, 1))
    return count


def _first(flags: jax.Array) -> jax.Array:
    """Index of the first True of bool[B, W], W if there is none: i32[B]."""
    return jnp.sum(jnp.cumprod(1 - flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _result(accepted: jax.Array, draft_tokens: jax.Array, own: jax.Array) -> VerifyResult:
    slot = jnp.arange(draft_tokens.shape[1] + 1)
    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    tail = jnp.where(slot == accepted[:, None], own[:, None], 0)
    tokens = jnp.where(slot < accepted[:, None], drafts, tail).astype(jnp.int32)
    return VerifyResult(accepted, tokens, accepted + 1)
