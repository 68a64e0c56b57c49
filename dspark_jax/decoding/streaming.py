"""One request at a time, its tokens read by the host after every round."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.sharding import place
from dspark_jax.data.opened import OpenedTarget
from dspark_jax.decoding.plain import generate_plain, plain_step, prefill
from dspark_jax.decoding.rounds import draft_head, speculative_round, start
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.verify import Reason
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.scheduling.policy import Policy

PROMPT_BUCKET = 32  # prompts are padded to a multiple of this


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the host reads after each round."""

    tokens: np.ndarray  # i32[count], the answer so far
    reason: int
    rounds: int
    complete_rounds: int = 0  # without one that the token limit cut
    complete_tokens: int = 0
    complete_verified: int = 0


class Streaming:
    """The compiled programs for prompts of up to one length.

    Row 0 of the batch is the request; the mesh may ask for more rows, which generate nothing.
    """

    def __init__(
        self,
        target: OpenedTarget,
        drafter: AnyDrafter | None,
        params: SamplingParams,
        max_new: int,
        longest: int,
        policy: Policy | None = None,
    ):
        self._params = jax.tree.map(lambda x: place(x, "batch"), params)
        self._rows = params.seed.shape[0]
        self._width = -(-longest // PROMPT_BUCKET) * PROMPT_BUCKET
        self._limits = (jnp.asarray(target.stop_ids, jnp.int32), self._row(max_new, 0))
        models = (target.model,) if drafter is None else (target.model, drafter)
        begin, go_on = _PLAIN if drafter is None else _SPECULATIVE
        arguments = (*self._prompt([0]), self._params, *self._limits)
        # Compiled ahead, so that no time below includes it.
        more = () if drafter is None else (policy,)
        begin = begin.lower(*models, *arguments, *more, max_new=max_new).compile()
        state, _ = begin(*models, *arguments, *more)
        self._begin = functools.partial(begin, *models)
        if drafter is not None:
            models += (draft_head(*models),)
        self._go_on = functools.partial(
            go_on.lower(*models, state, self._params, *self._limits, *more).compile(), *models
        )
        self._more = more
        self._plain = None
        if drafter is not None:
            lowered = generate_plain.lower(target.model, *arguments, max_new=max_new)
            self._plain = functools.partial(lowered.compile(), target.model)

    def progress(self, ids: Sequence[int]) -> Iterator[Progress]:
        """What is there after the prompt and after each round; one read of the device for each."""
        state, seen = self._begin(*self._prompt(ids), self._params, *self._limits, *self._more)
        for rounds in itertools.count():
            tokens, count, reason, *counts = (x[0] for x in jax.device_get(seen))
            yield Progress(tokens[:count], int(reason), rounds, *map(int, counts))
            if reason != Reason.RUNNING:
                return
            state, seen = self._go_on(state, self._params, *self._limits, *self._more)

    def plain(self, ids: Sequence[int]) -> tuple[list[int], float]:
        """The prompt's answer by plain decoding, and the seconds it took; with a drafter only."""
        began = time.perf_counter()
        result = self._plain(*self._prompt(ids), self._params, *self._limits)
        tokens, count = jax.device_get((result.tokens, result.count))
        return tokens[0, : count[0]].tolist(), time.perf_counter() - began

    def _prompt(self, ids: Sequence[int]) -> tuple[jax.Array, jax.Array]:
        padded = np.zeros((self._rows, self._width), np.int32)
        padded[0, : len(ids)] = ids
        return place(padded, "batch", None), self._row(len(ids), 1)

    def _row(self, value: int, others: int) -> jax.Array:
        """i32[B] with `value` for the request."""
        column = np.full((self._rows,), others, np.int32)
        column[0] = value
        return place(column, "batch")


# Programs return the state and, apart from it, what the host reads: the state is donated to the
# next round, and a buffer that the host looks at cannot be.


def _start(target, drafter, prompts, lengths, params, stop_ids, max_tokens, policy, *, max_new):
    limits = stop_ids, max_tokens
    state = start(target, drafter, prompts, lengths, params, *limits, policy, max_new=max_new)
    return state, _seen(state.out)


def _round(target, drafter, head, state, params, stop_ids, max_tokens, policy):
    state = speculative_round(target, drafter, head, state, params, stop_ids, max_tokens, policy)
    stats = state.stats
    return state, (*_seen(state.out), stats.rounds, stats.tokens, stats.verified)


def _start_plain(target, prompts, lengths, params, stop_ids, max_tokens, *, max_new):
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
    return state, _seen(state.out)


def _step_plain(target, state, params, stop_ids, max_tokens):
    state = plain_step(target, state, params, stop_ids, max_tokens)
    return state, _seen(state.out)


def _seen(out) -> tuple[jax.Array, ...]:
    return out.tokens, out.count, out.reason


_SPECULATIVE = (
    jax.jit(_start, static_argnames="max_new"),
    jax.jit(_round, donate_argnames="state"),
)
_PLAIN = (
    jax.jit(_start_plain, static_argnames="max_new"),
    jax.jit(_step_plain, donate_argnames="state"),
)
