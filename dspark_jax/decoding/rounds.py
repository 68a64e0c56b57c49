"""Speculative decoding: one round top to bottom, and the loop of rounds as one XLA program.

Between two rounds the target has run everything before the anchor; the anchor itself is sampled
but not run. A round drafts, verifies, commits and rolls back: rollback is not advancing the
length of a cache. `speculative_round` serves `lax.while_loop` and Python (streaming) alike.

A policy says how many drafts of each row count as verified. The pass over the block stays as long
as the longest that the policy allows (flat.py has one that is as long as what is verified).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import spec
from dspark_jax.decoding.chain import propose_chain
from dspark_jax.decoding.plain import Generated, prefill
from dspark_jax.decoding.sampling import SamplingParams, rows_finite
from dspark_jax.decoding.shaping import Shaping
from dspark_jax.decoding.slots import propose_slots
from dspark_jax.decoding.verify import Reason, at_slot, truncate, verify, verify_greedy
from dspark_jax.kernels.best_token import best_token
from dspark_jax.models.cache import KVCache
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.models.eagle3 import Eagle3Drafter, Eagle3State
from dspark_jax.models.target import Target, TargetHead
from dspark_jax.scheduling.policy import Choice, Policy, choose


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
    verified: jax.Array  # i32[B], drafts verified in those rounds

    @classmethod
    def zeros(cls, batch: int, proposals: int) -> "RoundStats":
        """Nothing counted yet."""

        def empty(*shape: int) -> jax.Array:
            axes = ("batch", *[None] * (len(shape) - 1))
            return jnp.zeros(shape, jnp.int32, out_sharding=spec(*axes))

        by_slot = empty(batch, proposals), empty(batch, proposals)
        return cls(empty(batch), empty(batch), *by_slot, empty(batch))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundState:
    """Everything between two rounds."""

    anchor: jax.Array  # i32[B], sampled, not yet run; its position is target_cache.length
    target_cache: KVCache
    draft_cache: KVCache | Eagle3State  # the drafter's context, as long as the target's
    out: Generated
    stats: RoundStats
    shaping: Shaping | None = None
    budgets: jax.Array | None = None  # i32[2], of this round and the next; asynchronous policies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draft:
    """The proposals of one round."""

    tokens: jax.Array  # i32[B, P]
    probs: jax.Array | None  # f32[B, P, V] they were drawn from; None: chosen
    confidence: jax.Array | None  # f32[B, P] logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What happened in one round, for those who learn from it; W proposals at most."""

    running: jax.Array  # bool[B], whether the row took part
    drafts: jax.Array  # i32[B, W]
    confidence: jax.Array | None  # f32[B, P] logits
    verified: jax.Array  # i32[B], drafts that the target was asked about
    accepted: jax.Array  # i32[B], of these, those before the first rejection


def start(
    target: Target,
    drafter: AnyDrafter,
    prompts: jax.Array,
    lengths: jax.Array,
    params: SamplingParams,
    stop_ids: jax.Array,
    max_tokens: jax.Array,
    policy: Policy | None = None,
    *,
    max_new: int,
) -> RoundState:
    """Runs the prompts through target and drafter context and samples the first anchor.

    Args:
      prompts: i32[B, P], right-padded; lengths: i32[B], at least 1.
      stop_ids: i32[K]; max_tokens: i32[B], at most max_new.
      policy: of the rounds that follow.
      max_new: static size of the output.

    Raises:
      UserError: a policy that this drafter cannot follow.
    """
    batch, width = prompts.shape
    proposals = drafter.config.num_proposals
    budgets = None
    if policy is not None:
        policy.check(drafter.config.confidence_head, proposals)
        if policy.kind == "asynchronous":  # nothing is known of rounds before: all may be verified
            budgets = jnp.full((2,), batch * proposals, jnp.int32)
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
    kept = state.out, stats, state.shaping, budgets
    return RoundState(state.last, state.cache, draft_cache, *kept)


def propose(
    drafter: AnyDrafter,
    head: TargetHead,
    anchor: jax.Array,
    cache: KVCache | Eagle3State,
    params: SamplingParams,
    shaping: Shaping | None = None,
    emitted: jax.Array | None = None,
) -> Draft:
    """One parallel backbone pass, then left to right with the sequential head; or a chain.

    Args:
      head: `drafter.head` of the target's.
      anchor: i32[B], the token at cache.length.
      shaping: of the target's logits, and emitted i32[B] tokens, the anchor among them.
    """
    if shaping is not None and drafter.shape.pruned:
        shaping = shaping.columns(drafter.draft_ids[...])
    if isinstance(drafter, Eagle3Drafter):
        chain = propose_chain(drafter, head, anchor, cache, params, shaping, emitted)
        return Draft(*chain, None)
    first = drafter.config.block_size - drafter.config.num_proposals  # 1 in fill-in mode
    hidden = drafter.draft_hidden(head, anchor, cache)[:, first:]
    by_slot = jnp.swapaxes(hidden, 0, 1)  # so that no slot's logits are copied
    base = head.logits(by_slot, (None, "batch"))
    said = shaping, emitted
    tokens, prev, probs = propose_slots(drafter, base, by_slot, anchor, cache.length, params, *said)
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
    policy: Policy | None = None,
) -> RoundState:
    """Draft, verify, commit. Finished rows run along and change nothing.

    `head` is drafter.head(target.head), which the caller takes once for all rounds; `policy` that
    of `start`, None verifies all drafts.
    """
    limits = stop_ids, max_tokens
    return recorded_round(target, drafter, head, state, params, *limits, policy)[0]


def recorded_round(
    target: Target,
    drafter: AnyDrafter,
    head: TargetHead,
    state: RoundState,
    params: SamplingParams,
    stop_ids: jax.Array,
    max_tokens: jax.Array,
    policy: Policy | None = None,
) -> tuple[RoundState, RoundRecord]:
    """`speculative_round` and what happened in it."""
    anchor_at = state.target_cache.length

    # 1. Draft, and decide how much of it to verify.
    said = state.shaping, state.out.count
    draft = propose(drafter, head, state.anchor, state.draft_cache, params, *said)
    confidence, running = draft.confidence, state.out.reason == Reason.RUNNING
    lengths, budgets = None, state.budgets
    if policy is not None:
        left = jnp.where(running, max_tokens - state.out.count, 0)
        choice = _choice(policy, draft, left, budgets)
        lengths = choice.lengths
        if policy.kind == "fixed":  # known before: the drafts beyond need not be in the pass
            draft = jax.tree.map(lambda x: x[:, : policy.length], draft)
        if policy.kind == "asynchronous":
            budgets = jnp.stack([budgets[1], choice.budget])

    # 2. The target runs [anchor, drafts] in one pass.
    block = jnp.concatenate([state.anchor[:, None], draft.tokens], axis=1)
    taps = drafter.config.target_layer_ids
    output = target(block, cache=state.target_cache, taps=taps)
    logits = _whole_vocabulary(target.head.logits(output.hidden))
    finite, shaping = rows_finite(logits), state.shaping
    if shaping is not None:
        logits = shaping.logits(logits, params, state.out.count, draft.tokens)
        finite = finite & rows_finite(logits)

    # 3. Accept left to right; slot k decides the token at anchor_at + 1 + k.
    if params.greedy:
        result = verify_greedy(best_token(logits), draft.tokens, lengths)
    else:
        p, at = params.distribution(logits), anchor_at + 1
        result = verify(p, draft.tokens, draft.probs, at, params.seed, lengths=lengths)
    count, _, reason = truncate(
        result,
        stop_ids=stop_ids,
        emitted=state.out.count,
        max_tokens=max_tokens,
        reason=state.out.reason,
        finite=finite,
    )

    # 4. Commit: the anchor and the accepted tokens have run; the last kept token has not.
    last = at_slot(result.tokens, jnp.maximum(count - 1, 0))
    if lengths is None:
        lengths = jnp.full_like(count, draft.tokens.shape[1])
    after = RoundState(
        anchor=jnp.where(count > 0, last, state.anchor),
        target_cache=output.cache.advance(count),
        draft_cache=drafter.commit(head, state.draft_cache, output.taps, result.tokens, count),
        out=_append(state.out, result.tokens, count, reason),
        stats=_count(state.stats, state.out, result, lengths, count, reason),
        shaping=None if shaping is None else shaping.said(result.tokens, count),
        budgets=budgets,
    )
    return after, RoundRecord(running, draft.tokens, confidence, lengths, result.accepted)


def _choice(policy: Policy, draft: Draft, left: jax.Array, budgets: jax.Array | None) -> Choice:
    """How many drafts of each row to verify; left: i32[B], tokens that it may still say."""
    rows, proposals = draft.tokens.shape
    nothing = jnp.zeros((), jnp.int32)
    return choose(
        policy,
        draft.confidence,
        jnp.clip(left, 0, proposals),
        jnp.sum(left > 0, dtype=jnp.int32),
        nothing if budgets is None else budgets[0],
        jnp.zeros(()),
        proposals=proposals,
        sizes=tuple(range(1, rows * (1 + proposals) + 1)),
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
    policy: Policy | None = None,
    *,
    max_new: int,
) -> tuple[Generated, RoundStats]:
    """The whole generation of a batch as one program; arguments as for `start`.

    Returns:
      What `generate_plain` returns, distributed exactly like it, and the counts.
    """
    request = prompts, lengths, params, stop_ids, max_tokens
    state = start(target, drafter, *request, policy, max_new=max_new)

    head = drafter.head(target.head)

    def going(state: RoundState) -> jax.Array:
        return jnp.any(state.out.reason == Reason.RUNNING)

    def body(state: RoundState) -> RoundState:
        return speculative_round(target, drafter, head, state, *request[2:], policy)

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


def _count(stats: RoundStats, before: Generated, result, lengths, count, reason) -> RoundStats:
    cut = (reason == Reason.LENGTH) & (count < result.count)
    counted = (before.reason == Reason.RUNNING) & ~cut
    slot = jnp.arange(stats.reached.shape[1])
    width = jnp.where(counted, count, 0)[:, None]
    lengths = jnp.where(counted, lengths, 0)[:, None]
    accepted = jnp.minimum(result.accepted[:, None], width)
    return RoundStats(
        rounds=stats.rounds + counted.astype(jnp.int32),
        tokens=stats.tokens + width[:, 0],
        reached=stats.reached + (slot < jnp.minimum(width, lengths)).astype(jnp.int32),
        survived=stats.survived + (slot < accepted).astype(jnp.int32),
        verified=stats.verified + lengths[:, 0],
    )
