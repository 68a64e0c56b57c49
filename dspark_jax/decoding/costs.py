"""What each part of a speculative round costs on this machine, and the accepted length that pays.

Speculation wins where tokens per round exceed round / plain step. The parts say where a round's
time goes; they are separate programs, so they need not add up to the round, which is one.
"""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.sharding import place, spec
from dspark_jax.decoding.plain import PlainState, plain_step
from dspark_jax.decoding.rounds import RoundState, draft_head, speculative_round, start
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.slots import propose_slots
from dspark_jax.decoding.verify import verify, verify_greedy
from dspark_jax.kernels.best_token import best_token
from dspark_jax.models.cache import KVCache
from dspark_jax.models.drafter import Drafter
from dspark_jax.models.target import Target, TargetHead


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """Median seconds of one call, for `batch` rows that each have `context` tokens behind them."""

    plain_step_seconds: float  # the target runs one token and the next is sampled
    draft_backbone_seconds: float  # one pass over the slots of the block
    draft_head_seconds: float  # the LM head (its rows that the drafter uses) on the proposing slots
    draft_chain_seconds: float  # Markov bias and a draw, slot after slot
    verify_seconds: float  # the target runs anchor and drafts; accept or reject
    extend_seconds: float  # taps of anchor and drafts into the drafter's context
    round_seconds: float  # all of it as the one program that decoding runs
    proposals: int
    batch: int
    context: int
    repeats: int
    temperature: float

    @property
    def break_even_accepted_length(self) -> float:
        """Tokens per round above which speculation is faster than plain decoding."""
        return self.round_seconds / self.plain_step_seconds


def round_costs(
    target: Target,
    drafter: Drafter,
    batch: int = 1,
    context: int = 256,
    repeats: int = 20,
    temperature: float = 0.0,
    seed: int = 0,
) -> RoundCosts:
    """Measures the parts of a round on the real arrays.

    Each part is its own jitted function. Those that write a cache get it donated and hand it
    back, as the loop of decoding does: nothing is copied. Lengths are put back after every call,
    so the context stays `context` tokens. The parts take turns, so that a slow spell of the
    machine hits all alike; compiling and the first call are left out.

    Args:
      batch: rows; a multiple of the mesh's fsdp axis.
      context: tokens already in both caches; their ids are random, which costs the same.
      repeats: calls of each part, of which the median counts.
    """
    proposals = drafter.config.num_proposals
    vocab, size = target.config.vocab_size, target.config.hidden_size
    ids = np.random.default_rng(seed).integers(0, vocab, (batch, context)).astype(np.int32)
    params = SamplingParams.make(batch, temperature, seeds=list(range(batch)))
    params = jax.tree.map(lambda x: place(x, "batch"), params)
    lengths = place(np.full(batch, context, np.int32), "batch")
    # Nothing ends: no stop id, and a limit that one round does not reach.
    limits = jnp.full((1,), -1, jnp.int32), place(np.full(batch, proposals + 2, np.int32), "batch")
    begin = jax.jit(start, static_argnames="max_new")
    prompts = place(ids, "batch", None)
    state = begin(target, drafter, prompts, lengths, params, *limits, max_new=proposals + 2)
    taps = np.zeros((batch, proposals + 1, len(drafter.config.target_layer_ids), size), np.float32)
    taps = place(taps, "batch", None, None, None).astype(jnp.dtype(target.config.dtype))
    head = draft_head(target, drafter)
    hidden = _backbone(drafter, head, state.anchor, state.draft_cache)
    base = _base_logits(head, hidden)
    drafts, probs = _chain(drafter, base, hidden, state.anchor, lengths, params)

    # Each part takes the state and returns it with its result; what it does not write it hands on.
    def plain(s: RoundState):
        after = _plain_step(target, PlainState(s.anchor, s.target_cache, s.out), params, *limits)
        return dataclasses.replace(s, anchor=after.last, target_cache=after.cache, out=after.out), 0

    def check(s: RoundState):
        cache, result = _verify(target, drafter, s.target_cache, s.anchor, drafts, probs, params)
        return dataclasses.replace(s, target_cache=cache), result

    def extend(s: RoundState):
        return dataclasses.replace(s, draft_cache=_extend(drafter, s.draft_cache, taps)), 0

    parts: dict[str, Callable[[RoundState], tuple[RoundState, Any]]] = {
        "plain_step": plain,
        "draft_backbone": lambda s: (s, _backbone(drafter, head, s.anchor, s.draft_cache)),
        "draft_head": lambda s: (s, _base_logits(head, hidden)),
        "draft_chain": lambda s: (s, _chain(drafter, base, hidden, s.anchor, lengths, params)),
        "verify": check,
        "extend": extend,
        "round": lambda s: (rewound_round(target, drafter, head, s, params, *limits), 0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(repeats + 1):
        for name, part in parts.items():
            jax.block_until_ready(state)
            began = time.perf_counter()
            state, result = part(state)
            jax.block_until_ready((state, result))
            if repeat:  # the first call compiles
                seconds[name].append(time.perf_counter() - began)
    medians = {f"{name}_seconds": statistics.median(times) for name, times in seconds.items()}
    return RoundCosts(
        **medians,
        proposals=proposals,
        batch=batch,
        context=context,
        repeats=repeats,
        temperature=temperature,
    )


@functools.partial(jax.jit, donate_argnames="state")
def _plain_step(target: Target, state: PlainState, params, stop_ids, max_tokens) -> PlainState:
    after = plain_step(target, state, params, stop_ids, max_tokens)
    cache = _rewound(after.cache, state.cache)
    out = dataclasses.replace(after.out, count=state.out.count, reason=state.out.reason)
    return PlainState(after.last, cache, out)


@jax.jit
def _backbone(drafter: Drafter, head: TargetHead, anchor: jax.Array, cache: KVCache) -> jax.Array:
    first = drafter.config.block_size - drafter.config.num_proposals
    return jnp.swapaxes(drafter.draft_hidden(head, anchor, cache)[:, first:], 0, 1)


@jax.jit
def _base_logits(head: TargetHead, hidden: jax.Array) -> jax.Array:
    return head.logits(hidden, (None, "batch"))


@jax.jit
def _chain(drafter: Drafter, base, hidden, anchor, lengths, params: SamplingParams):
    drafts, _, probs = propose_slots(drafter, base, hidden, anchor, lengths, params)
    return drafts, probs


@functools.partial(jax.jit, donate_argnames="cache")
def _verify(target: Target, drafter: Drafter, cache: KVCache, anchor, drafts, probs, params):
    block = jnp.concatenate([anchor[:, None], drafts], axis=1)
    output = target(block, cache=cache, taps=drafter.config.target_layer_ids)
    logits = _whole(target.head.logits(output.hidden))
    if params.greedy:
        result = verify_greedy(best_token(logits), drafts)
    else:
        p = params.distribution(logits)
        result = verify(p, drafts, probs, cache.length + 1, params.seed)
    return output.cache, (result, output.taps)


@functools.partial(jax.jit, donate_argnames="cache")
def _extend(drafter: Drafter, cache: KVCache, taps: jax.Array) -> KVCache:
    return drafter.extend(cache, taps)


@functools.partial(jax.jit, donate_argnames="state")
def rewound_round(
    target: Target, drafter: Drafter, head, state: RoundState, params, stop_ids, max_tokens
) -> RoundState:
    """`speculative_round` with the lengths put back, so that it may be repeated for timing."""
    after = speculative_round(target, drafter, head, state, params, stop_ids, max_tokens)
    return dataclasses.replace(
        after,
        target_cache=_rewound(after.target_cache, state.target_cache),
        draft_cache=_rewound(after.draft_cache, state.draft_cache),
        out=dataclasses.replace(after.out, count=state.out.count, reason=state.out.reason),
    )


def _rewound(cache: KVCache, before: KVCache) -> KVCache:
    return dataclasses.replace(cache, length=before.length)


def _whole(logits: jax.Array) -> jax.Array:
    return jax.sharding.reshard(logits, spec("batch", *[None] * (logits.ndim - 1)))
