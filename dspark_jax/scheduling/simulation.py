"""What a policy would give at any number of concurrent requests, from a trace and a cost table.

A trace holds, for every position of greedy answers, how sure the drafter is of each slot and how
many of its drafts the target would accept there. At temperature 0 both depend on the position
alone, so every policy can be replayed on it exactly, token for token; only time is modelled, by the
costs of a round. Prompts cost nothing here.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.scheduling.policy import Policy, choose
from dspark_jax.scheduling.schedulers import CostTable, Switch, switched


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Answers, one after another."""

    lengths: np.ndarray  # i32[A], tokens of each answer
    confidence: np.ndarray  # f32[N, P] logits, N the sum of `lengths`; at every token as the anchor
    accepted: np.ndarray  # i32[N], drafts of that position that the answer goes on with

    def __post_init__(self):
        """Refuses what is no trace."""
        number = int(self.lengths.sum())
        if self.confidence.shape[:1] != (number,) or self.accepted.shape != (number,):
            raise UserError(
                f"trace: answers of {number} tokens, confidence {self.confidence.shape} and "
                f"accepted {self.accepted.shape}"
            )
        if not len(self.lengths) or self.lengths.min() < 1:
            raise UserError("trace: there must be answers, of a token at least")

    @property
    def proposals(self) -> int:
        """P."""
        return self.confidence.shape[1]

    def write(self, path: str | os.PathLike) -> None:
        """As .npz."""
        np.savez(path, **dataclasses.asdict(self))

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Trace":
        """What `write` wrote."""
        try:
            with np.load(path) as arrays:
                return cls(**{name: arrays[name] for name in arrays.files})
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: no trace ({error}); record one anew") from None


def accepted_drafts(answer: list[int], drafts: np.ndarray) -> np.ndarray:
    """For each token of an answer as the anchor, its drafts before the first wrong one: i32[T].

    Args:
      drafts: i32[T, P]; what would lie behind the end of the answer is wrong.
    """
    length, slots = drafts.shape
    padded = np.concatenate([answer, np.full(slots + 1, -1)]).astype(np.int64)
    following = padded[np.arange(length)[:, None] + 1 + np.arange(slots)]
    return np.cumprod(drafts == following, axis=1).sum(axis=1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Simulated:
    """What a policy gives."""

    tokens_per_second: float
    tokens_per_second_per_user: float
    verified_per_request: float  # drafts of a row and round, 0 in rounds without drafts
    accepted_length: float  # tokens of a row and round
    drafting: float  # share of rounds that drafted


def simulate(
    trace: Trace,
    policy: Policy,
    concurrency: int,
    costs: CostTable,
    plain: CostTable,
    *,
    rounds: int = 400,
    warm_up: int = 100,
    sizes: tuple[int, ...] = (),
    seed: int = 0,
) -> Simulated:
    """Replays a policy with `concurrency` requests at all times.

    Args:
      policy: its own tables are what it decides by; None where it asks for none.
      costs, plain: what rounds with drafts and without really take, by tokens of the pass.
      rounds: that count, after those of `warm_up`.
      sizes: that a pass comes in; () = every number of tokens.
    """
    rng, slots = np.random.default_rng(seed), trace.proposals
    starts = np.cumsum(trace.lengths) - trace.lengths
    answer = rng.integers(0, len(starts), concurrency)
    # In the middle of something, as rows of a busy engine are.
    emitted = 1 + (rng.random(concurrency) * (trace.lengths[answer] - 1)).astype(np.int64)
    seconds = tokens = verified = drafting = 0.0
    switch, on, budgets = Switch.start(slots), policy.drafts, [0, 0]
    known = np.asarray(sizes or np.arange(1, concurrency * (slots + 1) + 1))
    decide = _decider(policy.kind, slots, tuple(int(size) for size in sizes) or None)
    for number in range(warm_up + rounds):
        room = trace.lengths[answer] - emitted
        at = starts[answer] + emitted - 1
        usable = np.clip(room - 1, 0, slots).astype(np.int32)
        lengths, survival = np.zeros(concurrency, np.int32), np.zeros((concurrency, slots))
        if on and policy.kind == "fixed":
            lengths = np.minimum(usable, policy.length)
        elif on:
            found = decide(policy, trace.confidence[at], usable, np.int32(budgets[0]))
            lengths, survival = np.asarray(found.lengths), found.survival
            budgets = [budgets[1], int(found.budget)]
        total = concurrency + int(lengths.sum())
        size = int(known[np.searchsorted(known, total)])
        took = float(_seconds(costs if on else plain, size))
        count = np.minimum(np.minimum(trace.accepted[at], lengths) + 1, room)
        if number >= warm_up:
            seconds, tokens = seconds + took, tokens + count.sum()
            verified, drafting = verified + lengths.sum(), drafting + on
        if policy.switches:
            given = survival, lengths, np.int32(concurrency), policy.costs, policy.plain
            switch = _next_switch(switch, *given)
            on = bool(switch.on)
        emitted = emitted + count
        over = emitted >= trace.lengths[answer]
        answer = np.where(over, rng.integers(0, len(starts), concurrency), answer)
        emitted = np.where(over, 1, emitted)
    return Simulated(
        tokens_per_second=tokens / seconds,
        tokens_per_second_per_user=tokens / seconds / concurrency,
        verified_per_request=verified / rounds / concurrency,
        accepted_length=tokens / rounds / concurrency,
        drafting=drafting / rounds,
    )


def _seconds(costs: CostTable, tokens: int) -> float:
    """`CostTable.step_seconds` of a host number, which a device need not be asked for."""
    known, seconds = np.asarray(costs.tokens), np.asarray(costs.seconds)
    return np.interp(tokens, known, seconds) * max(tokens / known[-1], 1.0)


@functools.cache
def _decider(kind: str, slots: int, sizes: tuple[int, ...] | None):
    """The jitted decision of one kind of policy, with an idle queue."""

    @jax.jit
    def decide(policy, logits, usable, budget):
        running = jnp.int32(usable.shape[0])
        every = sizes or tuple(range(1, usable.shape[0] * (slots + 1) + 1))
        options = {"proposals": slots, "sizes": every}
        return choose(policy, logits, usable, running, budget, jnp.float32(0), **options)

    return decide


_next_switch = jax.jit(switched)
