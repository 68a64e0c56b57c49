"""What is known of recorded rounds: the confidence of every draft, and what became of it."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from dspark_jax.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rounds:
    """Recorded rounds of N drafts with P slots.

    How many slots a round verifies must have been settled without a look at what became of them,
    as by every scheduler: slot k is then judged by the rounds that verified it, and only by those.
    (A round cut before slot k that was rejected even earlier is known to fail at k, but its like
    that was not rejected is unknown: to take the one and not the other would be a bias.) A draft
    with a stop id in it counts as verified up to that id, whether or not the target accepted it.
    """

    logits: np.ndarray  # f[N, P], of the confidence head
    accepted: np.ndarray  # i[N], drafts before the first rejection, at most `verified`
    verified: np.ndarray  # i[N], slots the target was asked about, 0..P

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or 0 in self.logits.shape:
            raise UserError(f"recorded rounds: logits {self.logits.shape}: give [rounds, slots]")
        rounds, slots = self.logits.shape
        for name in ("accepted", "verified"):
            counts = getattr(self, name)
            if counts.shape != (rounds,) or counts.dtype.kind not in "iu":
                raise UserError(
                    f"recorded rounds: {name} is {counts.dtype}{list(counts.shape)}; give a whole "
                    f"number for each of the {rounds} rounds"
                )
        self._require(~np.isfinite(self.logits).all(axis=1), "a confidence that is NaN or infinite")
        self._require(
            (self.verified < 0) | (self.verified > slots), f"not 0 to {slots} verified slots"
        )
        self._require(
            (self.accepted < 0) | (self.accepted > self.verified),
            "not 0 to all of its verified slots accepted",
        )

    @property
    def slots(self) -> int:
        """P."""
        return self.logits.shape[1]

    def take(self, rows: np.ndarray) -> "Rounds":
        """Some of the rounds, by index or bool[N]."""
        return Rounds(self.logits[rows], self.accepted[rows], self.verified[rows])

    def counts(self) -> tuple[int, ...]:
        """For each slot, the rounds that it can be judged by."""
        return tuple(int((self.verified > slot).sum()) for slot in range(self.slots))

    def check_every_slot(self, what: str) -> None:
        """Refuses rounds that say nothing of a slot; `what` they are for."""
        counts = self.counts()
        if 0 in counts:
            raise UserError(
                f"{what}: no recorded round verified slot {counts.index(0)} (counted from 0) of "
                f"{self.slots}; record rounds that verify whole blocks"
            )

    def _require(self, bad: np.ndarray, what: str) -> None:
        if bad.any():
            raise UserError(f"recorded rounds: round {int(bad.argmax())} has {what}")

    def judged(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Which rounds verified the slot, bool[N], and whether those accepted it and all before."""
        known = self.verified > slot
        return known, (self.accepted[known] > slot).astype(np.float64)

    def pairs(self, predicted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Slot by slot, the predictions f[N, P] that can be judged, and the outcomes."""
        for slot in range(self.slots):
            known, outcome = self.judged(slot)
            yield predicted[known, slot], outcome
