"""The figures of an evaluation, from what became of each prompt and how long each batch took.

Ratios of sums throughout, never means of ratios; intervals by bootstrap.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

RESAMPLES = 1000


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one prompt; counts as in `rounds.RoundStats`."""

    id: str
    rounds: int
    tokens: int
    reached: np.ndarray  # i[P]
    survived: np.ndarray  # i[P]
    output: list[int]
    plain_output: list[int] | None
    verified: int = 0  # drafts that the target was asked about


@dataclasses.dataclass(frozen=True)
class Timing:
    """One batch: wall seconds, prefill included, and tokens of all its rows."""

    plain_seconds: float | None
    plain_tokens: int | None
    speculative_seconds: float
    speculative_tokens: int


@dataclasses.dataclass(frozen=True)
class SetResult:
    """What a prompt set showed; None is what it cannot say."""

    accepted_length: float | None  # tokens per round, the target's own included
    accepted_length_ci95: tuple[float, float] | None  # bootstrap over prompts
    conditional_acceptance: list[float | None]  # [P], of drafts whose earlier slots were accepted
    survival: list[float | None]  # [P], of all rounds: accepted up to and including the slot
    rounds: int
    tokens: int  # committed in those rounds
    prompts: int
    verified_per_round: float | None  # drafts


@dataclasses.dataclass(frozen=True)
class Speed:
    """Total tokens over total seconds; None where plain decoding was not run."""

    tokens_per_second_plain: float | None
    tokens_per_second_speculative: float
    speedup: float | None
    speedup_ci95: tuple[float, float] | None  # bootstrap over batches


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How many greedy outputs are, token for token, those of plain decoding."""

    equal: int
    compared: int
    first_difference: dict | None  # prompt, position and the two tokens (None = ended)


def set_result(outcomes: Sequence[Outcome], seed: int = 0) -> SetResult:
    """Figures of the prompts of one set together: ratios of sums, never means of ratios."""
    rounds = np.array([outcome.rounds for outcome in outcomes])
    tokens = np.array([outcome.tokens for outcome in outcomes])
    reached = np.sum([outcome.reached for outcome in outcomes], axis=0)
    survived = np.sum([outcome.survived for outcome in outcomes], axis=0)
    length = _ratio(tokens.sum(), rounds.sum())
    return SetResult(
        accepted_length=length,
        accepted_length_ci95=(
            None if length is None else _percentiles(_resampled(tokens, rounds, seed))
        ),
        conditional_acceptance=[_ratio(s, r) for s, r in zip(survived, reached, strict=True)],
        survival=[_ratio(s, rounds.sum()) for s in survived],
        rounds=int(rounds.sum()),
        tokens=int(tokens.sum()),
        prompts=len(outcomes),
        verified_per_round=_ratio(sum(one.verified for one in outcomes), rounds.sum()),
    )


def macro_length(
    sets: Sequence[Sequence[Outcome]], seed: int = 0
) -> tuple[float | None, tuple[float, float] | None]:
    """Mean over sets of their accepted lengths, each set weighing the same, and its interval.

    The prompts of every set are resampled within their set.
    """
    sums = []
    for number, outcomes in enumerate(sets):
        tokens = np.array([outcome.tokens for outcome in outcomes])
        rounds = np.array([outcome.rounds for outcome in outcomes])
        if not rounds.sum():
            continue
        sums.append((tokens.sum() / rounds.sum(), _resampled(tokens, rounds, (seed, number))))
    if not sums:
        return None, None
    lengths = [length for length, _ in sums]
    means = np.mean([resampled for _, resampled in sums], axis=0)
    return float(np.mean(lengths)), _percentiles(means)


def speed(timings: Sequence[Timing], seed: int = 0) -> Speed:
    """Tokens per second of both ways and their ratio."""
    fast = np.array([[t.speculative_tokens, t.speculative_seconds] for t in timings])
    speculative = float(fast[:, 0].sum() / fast[:, 1].sum())
    if any(t.plain_seconds is None for t in timings):
        return Speed(None, speculative, None, None)
    slow = np.array([[t.plain_tokens, t.plain_seconds] for t in timings])
    plain = float(slow[:, 0].sum() / slow[:, 1].sum())
    rows = np.random.default_rng(seed).integers(0, len(timings), (RESAMPLES, len(timings)))
    fast, slow = fast[rows].sum(1), slow[rows].sum(1)
    ratios = (fast[:, 0] / fast[:, 1]) / np.maximum(slow[:, 0] / slow[:, 1], 1e-9)
    return Speed(plain, speculative, _ratio(speculative, plain), _percentiles(ratios))


def agreement(outcomes: Sequence[Outcome]) -> Agreement | None:
    """Compares outputs with plain ones, token for token; None if there are none to compare."""
    compared = [outcome for outcome in outcomes if outcome.plain_output is not None]
    if not compared:
        return None
    different = [outcome for outcome in compared if outcome.output != outcome.plain_output]
    first = None
    if different:
        one = different[0]
        pairs = list(zip(one.output, one.plain_output, strict=False))
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        first = {
            "prompt": one.id,
            "position": at,
            "speculative": one.output[at] if at < len(one.output) else None,
            "plain": one.plain_output[at] if at < len(one.plain_output) else None,
        }
    return Agreement(len(compared) - len(different), len(compared), first)


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _resampled(parts: np.ndarray, wholes: np.ndarray, seed) -> np.ndarray:
    """sum(parts) / sum(wholes) of f[RESAMPLES] draws of prompts; NaN where a draw has no rounds."""
    rows = np.random.default_rng(seed).integers(0, len(parts), (RESAMPLES, len(parts)))
    numerators, denominators = parts[rows].sum(1), wholes[rows].sum(1)
    return np.where(denominators > 0, numerators / np.maximum(denominators, 1), np.nan)


def _percentiles(values: np.ndarray) -> tuple[float, float]:
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)
