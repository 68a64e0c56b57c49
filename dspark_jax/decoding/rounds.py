"""Speculative decoding: one round top to bottom, and the loop of rounds as one XLA program.

Between two rounds the target has run everything before the anchor; the anchor itself is sampled
but not run. A round drafts, verifies, commits and rolls back: rollback is not advancing the
length of a cache. `speculative_round` serves `lax.while_loop` and Python (streaming) alike.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import spec
from dspark_jax.decoding.chain import propose_chain
from dspark_jax.decoding.plain import Generated, prefill
from dspark_jax.decoding.sampling import (
    Purpose,
    SamplingParams,
    purpose_key,
    rows_finite,
    sample,
)
from dspark_jax.decoding.verify import Reason, at_slot, truncate, verify, verify_greedy
from dspark_jax.models.cache import KVCache
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.models.eagle3 import Eagle3Drafter, Eagle3State
from dspark_jax.models.target import Target, TargetHead


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundStats:
    """Counts per row over the rounds of a generation; P proposals per round.

    A round that max_tokens cut short is left out: how far it would have gone is not known to the
    request. Tokens after a stop id were never part of it and are not counted either.
    """

    rounds: jax.Array  # i32[B]
    tokens: jax.Array  # i32[B], tokens committed in those rounds: tau = tokens / rounds
    reached: jax.Array  # i32[B, P], rounds in which slot k was decided: all before it accepted
    survived: jax.Array  # i32[B, P], rounds in which slots 0..k were accepted

    @classmethod
    def zeros(cls, batch: int, proposals: int) -> "RoundStats":
        """Nothing counted yet."""

        def empty(*shape: int) -> jax.Array:
            axes = ("batch", *[None] * (len(shape) - 1))
            return jnp.zeros(shape, jnp.int32, out_sharding=spec(*axes))

        counts = empty(batch), empty(batch)
        return cls(*counts, empty(batch, proposals), empty(batch, proposals))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundState:
    """Everything between two rounds."""

    anchor: jax.Array  # i32[B], sampled, not yet run; its position is target_cache.length
    target_cache: KVCache
    draft_cache: KVCache | Eagle3State  # the drafter's context, as long as the target's
    out: Generated
    stats: RoundStats


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """The proposals of one round."""

    tokens: jax.Array  # i32[B, P]
    probs: jax.Array | None  # f32[B, P, V] they were drawn from; None in a greedy batch
    confidence: jax.Array | None  # f32[B, P] logits


def start(
    target: Target,
    drafter: AnyDrafter,
    prompts: jax.Array,
    lengths: jax.Array,
    params: SamplingParams,
    stop_ids: jax.Array,
    max_tokens: jax.Array,
    *,
    max_new: int,
) -> RoundState:
    """Runs the prompts through target and drafter context and samples the first anchor.

    Args:
      prompts: i32[B, P], right-padded; lengths: i32[B], at least 1.
      stop_ids: i32[K]; max_tokens: i32[B], at most max_new.
      max_new: static size of the output.
    """
    batch, width = prompts.shape
    proposals = drafter.config.num_proposals
    capacity = width + max_new + proposals + 1  # a whole block fits behind the last token
    state, taps = prefill(
        target,
        prompts,
        lengths,
        params,
        stop_ids,
        max_tokens,
        capacity=capacity,
        out_size=max_new + proposals + 1,
        taps=drafter.config.target_layer_ids,
    )
    last = jnp.arange(width) == lengths[:, None] - 1
    following = jnp.where(last, state.last[:, None], jnp.roll(prompts, -1, axis=1))
    draft_cache = drafter.begin(target.head, taps, following, lengths, capacity)
    stats = RoundStats.zeros(batch, proposals)
    return RoundState(state.last, state.cache, draft_cache, state.out, stats)


def propose(
    drafter: AnyDrafter,
    head: TargetHead,
    anchor: jax.Array,
    cache: KVCache | Eagle3State,
    params: SamplingParams,
) -> Draft:
    """One parallel backbone pass, then left to right with the sequential head; or a chain.

    Args:
      head: `drafter.head` of the target's.
      anchor: i32[B], the token at cache.length.
    """
    if isinstance(drafter, Eagle3Drafter):
        return Draft(*propose_chain(drafter, head, anchor, cache, params), None)
    first = drafter.config.block_size - drafter.config.num_proposals  # 1 in fill-in mode
    hidden = drafter.draft_hidden(head, anchor, cache)[:, first:]
    base = _whole_vocabulary(head.logits(hidden))
    keys = purpose_key(
        params.seed[:, None],
        cache.length[:, None],
        Purpose.PROPOSE,
        jnp.arange(hidden.shape[1]),
    )

    def slot(carry, xs):
        prev, state = carry
        logits, hidden, key = xs
        if drafter.config.markov_rank:
            logits, state = drafter.markov.biased(logits, prev, hidden, state)
        token, probs = sample(logits, params, key)
        token = drafter.to_target(token)
        return (token, state), (token, prev, None if params.greedy else drafter.scatter(probs))

    state = None
    if drafter.config.markov_rank:
        state = drafter.markov.state(anchor.shape[0])
    by_slot = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (base, hidden, keys))
    _, outputs = jax.lax.scan(slot, (anchor, state), by_slot)
    tokens, prev, probs = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs)
    confidence = None
    if drafter.config.confidence_head:
        rows = drafter.markov.rows(prev) if drafter.config.markov_rank else None
        confidence = drafter.confidence_logits(hidden, rows)
    return Draft(tokens, probs, confidence)


@jax.jit
def draft_head(target: Target, drafter: AnyDrafter) -> TargetHead:
    """The head that `propose` and `speculative_round` take, for rounds driven from Python."""
    return drafter.head(target.head)


def speculative_round(
    target: Target,
    drafter: AnyDrafter,
    head: TargetHead,
    state: RoundState,
    params: SamplingParams,
    stop_ids: jax.Array,
    max_tokens: jax.Array,
) -> RoundState:
    """Draft, verify, commit. Finished rows run along and change nothing.

    `head` is drafter.head(target.head), which the caller takes once for all rounds.
    """
    anchor_at = state.target_cache.length

    # 1. Draft.
    draft = propose(drafter, head, state.anchor, state.draft_cache, params)

    # 2. The target runs [anchor, drafts] in one pass.
    block = jnp.concatenate([state.anchor[:, None], draft.tokens], axis=1)
    taps = drafter.config.target_layer_ids
    output = target(block, cache=state.target_cache, taps=taps)
    logits = _whole_vocabulary(target.head.logits(output.hidden))

    # 3. Accept left to right; slot k decides the token at anchor_at + 1 + k.
    if params.greedy:
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        result = verify_greedy(best, draft.tokens)
    else:
        result = verify(
            params.distribution(logits), draft.tokens, draft.probs, anchor_at + 1, params.seed
        )
    count, _, reason = truncate(
        result,
        stop_ids=stop_ids,
        emitted=state.out.count,
        max_tokens=max_tokens,
        reason=state.out.reason,
        finite=rows_finite(logits),
    )

    # 4. Commit: the anchor and the accepted tokens have run; the last kept token has not.
    last = at_slot(result.tokens, jnp.maximum(count - 1, 0))
    return RoundState(
        anchor=jnp.where(count > 0, last, state.anchor),
        target_cache=output.cache.advance(count),
        draft_cache=drafter.commit(head, state.draft_cache, output.taps, result.tokens, count),
        out=_append(state.out, result.tokens, count, reason),
        stats=_count(state.stats, state.out, result, count, reason),
    )


@functools.partial(jax.jit, static_argnames="max_new")
def generate_speculative(
    target: Target,
    drafter: AnyDrafter,
    prompts: jax.Array,
    lengths: jax.Array,
    params: SamplingParams,
    stop_ids: jax.Array,
    max_tokens: jax.Array,
    *,
    max_new: int,
) -> tuple[Generated, RoundStats]:
    """The whole generation of a batch as one program; arguments as for `start`.

    Returns:
      What `generate_plain` returns, distributed exactly like it, and the counts.
    """
    state = start(target, drafter, prompts, lengths, params, stop_ids, max_tokens, max_new=max_new)

    head = drafter.head(target.head)

    def going(state: RoundState) -> jax.Array:
        return jnp.any(state.out.reason == Reason.RUNNING)

    def body(state: RoundState) -> RoundState:
        return speculative_round(target, drafter, head, state, params, stop_ids, max_tokens)

    state = jax.lax.while_loop(going, body, state)
    out = dataclasses.replace(state.out, tokens=state.out.tokens[:, :max_new])
    return out, state.stats


def _whole_vocabulary(logits: jax.Array) -> jax.Array:
    """Gathers a vocabulary that tp has sharded: sampling looks at all of it."""
    return jax.sharding.reshard(logits, spec("batch", *[None] * (logits.ndim - 1)))


def _append(out: Generated, tokens: jax.Array, count: jax.Array, reason: jax.Array) -> Generated:
    """Writes the first `count` of `tokens` [B, W] behind each row's output."""
    slot = jnp.arange(tokens.shape[1])
    kept = jnp.where(slot < count[:, None], tokens, 0)

    def row(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, new, (at,))

    return Generated(jax.vmap(row)(out.tokens, kept, out.count), out.count + count, reason)


def _count(stats: RoundStats, before: Generated, result, count, reason) -> RoundStats:
    cut = (reason == Reason.LENGTH) & (count < result.count)
    counted = (before.reason == Reason.RUNNING) & ~cut
    slot = jnp.arange(stats.reached.shape[1])
    width = jnp.where(counted, count, 0)[:, None]
    accepted = jnp.minimum(result.accepted[:, None], width)
    return RoundStats(
        rounds=stats.rounds + counted.astype(jnp.int32),
        tokens=stats.tokens + width[:, 0],
        reached=stats.reached + (slot < width).astype(jnp.int32),
        survived=stats.survived + (slot < accepted).astype(jnp.int32),
    )
