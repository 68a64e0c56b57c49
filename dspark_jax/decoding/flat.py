"""A round for rows that verify different lengths: the target's pass is as long as their sum.

rounds.py verifies all P drafts of all rows. Here row r verifies lengths[r] of them, and the anchors
and verified drafts of all rows go through the target as one flat list of N tokens
(models/packing.py), so a trimmed draft is work that is not done. N is static: the caller compiles a
few sizes and takes the smallest that holds the round.

Which size that is, the host decides between drafting and verifying. It reads one small array there;
the other way, one program with a `lax.switch` over sizes, would be a program of all sizes together,
compiled before the first token and again for every option of sampling, with the caches handed
through a conditional. Where the read costs (a TPU behind a busy host), `schedulers.asynchronous`
takes the budget of a round from two rounds before, and no read is needed: the host knows it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import spec
from dspark_jax.decoding.plain import prefill
from dspark_jax.decoding.rounds import Draft, propose
from dspark_jax.decoding.sampling import SamplingParams, rows_finite
from dspark_jax.decoding.shaping import Shaping
from dspark_jax.decoding.verify import Reason, at_slot, truncate, verify, verify_greedy
from dspark_jax.kernels.best_token import best_token
from dspark_jax.models.cache import KVCache
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.models.eagle3 import Eagle3State
from dspark_jax.models.packing import Packing
from dspark_jax.models.target import Target, TargetHead
from dspark_jax.scheduling.policy import Choice, Policy, choose


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Everything on the device between two rounds of R rows that come and go.

    A row whose reason is not RUNNING is free: its numbers mean nothing until `join`.
    """

    anchor: jax.Array  # i32[R], sampled, not yet run; its position is target_cache.length
    target_cache: KVCache
    draft_cache: KVCache | Eagle3State | None  # None = never speculates
    emitted: jax.Array  # i32[R], tokens given to the request so far
    limit: jax.Array  # i32[R], its max_tokens
    reason: jax.Array  # i32[R], verify.Reason
    shaping: Shaping | None = None  # None = no row has penalties, biases or min_tokens

    @property
    def running(self) -> jax.Array:
        """bool[R]."""
        return self.reason == Reason.RUNNING


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emitted:
    """What the host reads of a round, W = slots verified at most + 1."""

    tokens: jax.Array  # i32[R, W]
    count: jax.Array  # i32[R], how many of them the request gets; 0 where nothing runs
    accepted: jax.Array  # i32[R], drafts before the first rejection; of no meaning where count is 0
    reason: jax.Array  # i32[R]


def usable_slots(rows: Rows, live: jax.Array, proposals: int) -> jax.Array:
    """Drafts of each row worth verifying, i32[R] in 0..P, before anything is known of them.

    One token less than there is room for, as the target adds one; 0 for a row that does not run.
    """
    room = jnp.clip(rows.limit - rows.emitted - 1, 0, proposals)
    return jnp.where(rows.running & live, room, 0)


@functools.partial(jax.jit, static_argnames=("rows", "capacity"))
def empty_rows(target: Target, drafter: AnyDrafter | None, *, rows: int, capacity: int) -> Rows:
    """R free rows of `capacity` positions."""

    def column(value: int) -> jax.Array:
        return jnp.full((rows,), value, jnp.int32, out_sharding=spec("batch"))

    draft_cache = None if drafter is None else drafter.empty_cache(rows, capacity)
    cache = target.empty_cache(rows, capacity)
    return Rows(column(0), cache, draft_cache, column(0), column(0), column(Reason.LENGTH))


def shaped_rows(rows: Rows, vocab_size: int) -> Rows:
    """With room for requests that shape logits, which those that run do not."""
    count = len(rows.anchor)

    def zeros(dtype) -> jax.Array:
        return jnp.zeros((count, vocab_size), dtype, out_sharding=spec("batch", None))

    nothing = Shaping(zeros(bool), zeros(jnp.int32), zeros(jnp.float32), zeros(bool))
    return dataclasses.replace(rows, shaping=nothing)


@functools.partial(jax.jit, static_argnames="sizes")
def draft_rows(
    drafter: AnyDrafter,
    head: TargetHead,
    rows: Rows,
    live: jax.Array,
    params: SamplingParams,
    policy: Policy,
    budget: jax.Array,
    load: jax.Array,
    *,
    sizes: tuple[int, ...],
) -> tuple[Draft, Choice]:
    """The drafts of a round and how many of them to verify; arguments as below and of `choose`."""
    said = rows.shaping, rows.emitted
    draft = propose(drafter, head, rows.anchor, rows.draft_cache, params, *said)
    proposals = draft.tokens.shape[1]
    usable = usable_slots(rows, live, proposals)
    running = jnp.sum(rows.running & live, dtype=jnp.int32)
    options = {"proposals": proposals, "sizes": sizes}
    return draft, choose(policy, draft.confidence, usable, running, budget, load, **options)


@functools.partial(jax.jit, static_argnames="size", donate_argnames="rows")
def flat_round(
    target: Target,
    drafter: AnyDrafter | None,
    head: TargetHead | None,
    rows: Rows,
    draft: Draft | None,
    lengths: jax.Array,
    live: jax.Array,
    params: SamplingParams,
    stop_ids: jax.Array,
    *,
    size: int,
) -> tuple[Rows, Emitted]:
    """Verifies and commits one round; `rows` are donated.

    Args:
      head: `drafter.head` of the target's; None like the drafter.
      draft: of this round; None decodes plainly, and the drafter's context still follows.
      lengths: i32[R], verified drafts of each row, at most `usable_slots`.
      live: bool[R]; a running row that is not live ends here and emits nothing.
      size: N, at least the number of live running rows plus the sum of their lengths.
    """
    reason = jnp.where(live, rows.reason, jnp.maximum(rows.reason, Reason.LENGTH))
    running = reason == Reason.RUNNING
    drafts = rows.anchor[:, None][:, :0] if draft is None else draft.tokens
    block = jnp.concatenate([rows.anchor[:, None], drafts], axis=1)
    packing = Packing.of(jnp.where(running, 1 + lengths, 0), block.shape[1], size)

    # The target runs all tokens of all rows at once.
    taps = () if drafter is None else drafter.config.target_layer_ids
    tokens = packing.flat(block, ("batch", None))
    output = target(tokens, cache=rows.target_cache, taps=taps, packing=packing)
    logits = jax.sharding.reshard(target.head.logits(output.hidden), spec("batch", None, None))
    finite = packing.rows(rows_finite(logits), ("batch", None))
    shaping, whole = rows.shaping, ("batch", None, None)
    if shaping is not None:
        logits = shaping.logits(packing.rows(logits, whole), params, rows.emitted, drafts)
        finite = finite & rows_finite(logits)

    # Accept left to right; slot k decides the token at the anchor's position + 1 + k.
    if params.greedy:
        best = best_token(logits)
        best = packing.rows(best, ("batch", None)) if shaping is None else best
        result = verify_greedy(best, drafts, lengths)
    else:
        logits = packing.rows(logits, whole) if shaping is None else logits
        p, q = params.distribution(logits), None if draft is None else draft.probs
        result = verify(p, drafts, q, rows.target_cache.length + 1, params.seed, lengths=lengths)
    count, _, reason = truncate(
        result,
        stop_ids=stop_ids,
        emitted=rows.emitted,
        max_tokens=rows.limit,
        reason=reason,
        finite=finite,
    )

    # Commit: the anchor and the accepted tokens have run; the last kept token has not.
    draft_cache = rows.draft_cache
    if drafter is not None:
        given = draft_cache, output.taps, result.tokens, count
        draft_cache = drafter.commit(head, *given, packing=packing)
    last = at_slot(result.tokens, jnp.maximum(count - 1, 0))
    after = Rows(
        anchor=jnp.where(count > 0, last, rows.anchor),
        target_cache=output.cache.advance(count),
        draft_cache=draft_cache,
        emitted=rows.emitted + count,
        limit=rows.limit,
        reason=reason,
        shaping=None if shaping is None else shaping.said(result.tokens, count),
    )
    return after, Emitted(result.tokens, count, result.accepted, reason)


@functools.partial(jax.jit, donate_argnames="rows")
def join(
    target: Target,
    drafter: AnyDrafter | None,
    rows: Rows,
    row: jax.Array,
    prompt: jax.Array,
    length: jax.Array,
    params: SamplingParams,
    stop_ids: jax.Array,
    limit: jax.Array,
) -> tuple[Rows, Emitted]:
    """Runs a prompt, samples its first token and puts the request into row i32[]; donates `rows`.

    Whatever the row held is overwritten or lies behind its new length, where nothing looks.

    Args:
      prompt: i32[1, T], right-padded with any valid id; length: i32[1]. T is static and at most the
        capacity; it is all of the row that is written.
      params: of the one request; they shape logits exactly if the rows do.
      limit: i32[1], its max_tokens, at least 1.
    """
    width = prompt.shape[1]
    taps = () if drafter is None else drafter.config.target_layer_ids
    options = {"capacity": width, "out_size": 1, "taps": taps}
    first, taps = prefill(target, prompt, length, params, stop_ids, limit, **options)
    draft_cache = None
    if drafter is not None:
        at_end = jnp.arange(width) == length[:, None] - 1
        following = jnp.where(at_end, first.last[:, None], jnp.roll(prompt, -1, axis=1))
        draft_cache = drafter.begin(target.head, taps, following, length, width)
    out = first.out
    alone = Rows(first.last, first.cache, draft_cache, out.count, limit, out.reason, first.shaping)

    def put(whole: jax.Array, one: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, one, (row, *[0] * (whole.ndim - 1)))

    emitted = Emitted(out.tokens, out.count, jnp.zeros_like(out.count), out.reason)
    return jax.tree.map(put, rows, alone), emitted
