"""Decoding without a drafter: the baseline, and how responses are regenerated for training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import spec
from dspark_jax.decoding.sampling import Purpose, SamplingParams, purpose_key, rows_finite, sample
from dspark_jax.decoding.shaping import Shaping, begin_shaping
from dspark_jax.decoding.verify import Reason, at_slot
from dspark_jax.models.cache import KVCache
from dspark_jax.models.target import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Generated:
    """What a batch of requests produced."""

    tokens: jax.Array  # i32[B, max_new], 0 after `count`
    count: jax.Array  # i32[B], a stop id is counted
    reason: jax.Array  # i32[B], verify.Reason


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainState:
    """Between two steps: `last` is sampled, not yet run."""

    last: jax.Array  # i32[B]
    cache: KVCache
    out: Generated
    shaping: Shaping | None = None


@functools.partial(jax.jit, static_argnames="max_new")
def generate_plain(
    target: Target,
    prompts: jax.Array,
    lengths: jax.Array,
    params: SamplingParams,
    stop_ids: jax.Array,
    max_tokens: jax.Array,
    *,
    max_new: int,
) -> Generated:
    """Decodes every row until a stop id or its limit, one token per target pass.

    Args:
      prompts: i32[B, P], right-padded with any valid id; lengths: i32[B].
      stop_ids: i32[K].
      max_tokens: i32[B], at most max_new.
      max_new: static size of the output.
    """
    state, _ = prefill(
        target,
        prompts,
        lengths,
        params,
        stop_ids,
        max_tokens,
        capacity=prompts.shape[1] + max_new,
        out_size=max_new,
    )

    def going(state: PlainState) -> jax.Array:
        return jnp.any(state.out.reason == Reason.RUNNING)

    def step(state: PlainState) -> PlainState:
        return plain_step(target, state, params, stop_ids, max_tokens)

    return jax.lax.while_loop(going, step, state).out


def plain_step(
    target: Target,
    state: PlainState,
    params: SamplingParams,
    stop_ids: jax.Array,
    max_tokens: jax.Array,
) -> PlainState:
    """One token for every row, in the loop above or driven from Python. Finished rows wait."""
    output = target(state.last[:, None], cache=state.cache)
    running = (state.out.reason == Reason.RUNNING).astype(jnp.int32)
    cache = output.cache.advance(running)
    limits = stop_ids, max_tokens
    return _emit(target, output.hidden, cache, state.out, params, *limits, state.shaping)


def prefill(
    target: Target,
    prompts: jax.Array,
    lengths: jax.Array,
    params: SamplingParams,
    stop_ids: jax.Array,
    max_tokens: jax.Array,
    *,
    capacity: int,
    out_size: int,
    taps: tuple[int, ...] = (),
) -> tuple[PlainState, jax.Array | None]:
    """Runs the prompts and samples the first token of every row.

    Args:
      capacity: positions of the cache; out_size: of the output; others as `generate_plain`.

    Returns:
      The state before the first step, and the prompts' taps [B, P, L, D].
    """
    batch = prompts.shape[0]
    output = target(prompts, cache=target.empty_cache(batch, capacity), taps=taps)
    hidden = at_slot(output.hidden, lengths - 1)[:, None]
    empty = Generated(
        tokens=jnp.zeros((batch, out_size), jnp.int32, out_sharding=spec("batch", None)),
        count=jnp.zeros((batch,), jnp.int32, out_sharding=spec("batch")),
        reason=jnp.where(max_tokens > 0, Reason.RUNNING, Reason.LENGTH).astype(jnp.int32),
    )
    cache = output.cache.advance(lengths)
    shape = begin_shaping(params, prompts, lengths, stop_ids, target.config.vocab_size)
    state = _emit(target, hidden, cache, empty, params, stop_ids, max_tokens, shape)
    return state, output.taps


def _emit(target, hidden, cache, out: Generated, params, stop_ids, max_tokens, shape) -> PlainState:
    """Samples the token after the last run position of every row and books it."""
    logits = jax.sharding.reshard(target.head.logits(hidden), spec("batch", None, None))[:, 0]
    sound = rows_finite(logits)
    if shape is not None:
        logits = shape.logits(logits[:, None], params, out.count)[:, 0]
        sound = sound & rows_finite(logits)
    keys = purpose_key(params.seed, cache.length, Purpose.TARGET)
    token, _ = sample(logits, params, keys)
    running = out.reason == Reason.RUNNING
    kept = running & sound
    row = jnp.arange(out.tokens.shape[1]) == out.count[:, None]
    tokens = jnp.where(row & kept[:, None], token[:, None], out.tokens)
    count = out.count + kept.astype(jnp.int32)
    ended = jnp.where(count >= max_tokens, Reason.LENGTH, Reason.RUNNING)
    ended = jnp.where(jnp.isin(token, stop_ids), Reason.STOP, ended)
    ended = jnp.where(sound, ended, Reason.ERROR)
    reason = jnp.where(running, ended, out.reason).astype(jnp.int32)
    if shape is not None:
        shape = shape.said(token[:, None], kept.astype(jnp.int32))
    return PlainState(token, cache, Generated(tokens, count, reason), shape)
