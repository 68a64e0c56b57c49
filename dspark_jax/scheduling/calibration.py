"""Makes the confidence head's numbers true: sequential temperature scaling (STS), and its measure.

The head's logit z_k stands for the probability that slot k is accepted if all before it are. The
schedulers live on products of these, the survival of a prefix, and small errors multiply. STS gives
each slot its own temperature, left to right (DSpark, arXiv 2607.05147). In numpy throughout; what
serves while decoding is `schedulers.survival`.
"""

import dataclasses
import json
import math
import os
import pathlib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dspark_jax.core import pictures
from dspark_jax.core.config import from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import write_atomically
from dspark_jax.scheduling.reliability import (
    BINS,
    auc,
    error_of_perfect,
    expected_calibration_error,
    reliability,
)
from dspark_jax.weights.safetensors import read_json

FILE = "calibration.json"
VERSION = 1
GRID = np.geomspace(0.1, 10.0, 301)  # temperatures 1.5 % apart, 1.0 among them


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


@dataclasses.dataclass(frozen=True)
class Quality:
    """How good predicted survival is, slot by slot: [P] each.

    Attributes:
        ece: expected calibration error, see `expected_calibration_error`.
        ece_of_perfect: what predictions without fault would be expected to show on so many rounds.
        auc: chance that an accepted prefix has a higher prediction than a rejected one; None where
            all fared alike.
        brier: mean squared error.
    """

    ece: tuple[float, ...]
    ece_of_perfect: tuple[float, ...]
    auc: tuple[float | None, ...]
    brier: tuple[float, ...]

    @property
    def mean_ece(self) -> float:
        """Over slots, each weighing the same."""
        return float(np.mean(self.ece))


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Where the rounds of a calibration come from."""

    drafter: str = ""  # the run
    step: int = 0
    drafter_hash: str = ""  # of the weights, `fingerprint.arrays_hash`
    target: str = ""
    target_hash: str = ""  # of its weights, as in the run's fingerprint
    prompts: str = ""
    fit_prompts: int = 0
    heldout_prompts: int = 0
    rounds: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 0
    seed: int = 0
    device: str = ""
    jax: str = ""
    dspark_jax: str = ""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Temperatures of one drafter and what they do, on rounds not used for finding them.

    Attributes:
        temperatures: [P]; slot k is accepted, if all before it are, with sigmoid(z_k / T_k).
        single_temperature: the best that is the same for all slots, for engines that know no
            temperature: divide the head's weight and bias by it.
        fit_rounds, heldout_rounds: [P], rounds that verified each slot.
        bins: of the calibration error, of equal width.
        before, after, after_single: with temperature 1, `temperatures`, `single_temperature`.
        recorded: drafter, target, data and versions.
    """

    temperatures: tuple[float, ...]
    single_temperature: float
    fit_rounds: tuple[int, ...]
    heldout_rounds: tuple[int, ...]
    bins: int
    before: Quality
    after: Quality
    after_single: Quality
    recorded: Recorded = Recorded()

    @property
    def at_limit(self) -> tuple[int, ...]:
        """Slots whose temperature is the first or last of GRID: the best one lies beyond."""
        ends = (float(GRID[0]), float(GRID[-1]))
        return tuple(slot for slot, value in enumerate(self.temperatures) if value in ends)

    def write(self, path: str | os.PathLike) -> None:
        """Writes calibration.json."""
        value = {"version": VERSION, **dataclasses.asdict(self)}
        write_atomically(path, json.dumps(value, indent=1, allow_nan=False) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike, slots: int | None = None) -> "Calibration":
        """Reads calibration.json; with `slots`, only that of a drafter with so many proposals.

        Raises:
            UserError: no such file, not exactly what `write` writes, or another number of slots.
        """
        value = read_json(pathlib.Path(path))
        version = value.pop("version", None)
        if version != VERSION:
            raise UserError(f"{path}: version {version!r}, this program reads {VERSION}")
        _check_complete(cls, value, str(path))
        self = from_mapping(cls, value, str(path))
        self._check(str(path))
        if slots not in (None, len(self.temperatures)):
            raise UserError(
                f"{path} is for a drafter of {len(self.temperatures)} slots, this one has {slots}; "
                "calibrate it anew"
            )
        return self

    def _check(self, where: str) -> None:
        slots = len(self.temperatures)
        qualities = (self.before, self.after, self.after_single)
        lists = [self.fit_rounds, self.heldout_rounds]
        lists += [values for quality in qualities for values in dataclasses.astuple(quality)]
        if not slots or any(len(values) != slots for values in lists):
            raise UserError(f"{where}: the lists must have one entry for each slot")
        for value in (*self.temperatures, self.single_temperature):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{where}: temperature {value}: must be positive")
        if self.bins < 1 or min(self.fit_rounds + self.heldout_rounds) < 1:
            raise UserError(f"{where}: bins and rounds must be at least 1")
        for values in lists[2:]:
            if not all(value is None or 0 <= value <= 1 for value in values):
                raise UserError(f"{where}: errors and areas must lie in 0..1")


def survival(logits: np.ndarray, temperatures: np.ndarray | Sequence[float] | float) -> np.ndarray:
    """Predicted probability that slots 0..k are all accepted: f64[N, P]."""
    return np.cumprod(_sigmoid(np.asarray(logits, np.float64) / temperatures), axis=1)


def fit_temperatures(rounds: Rounds, grid: np.ndarray = GRID, bins: int = BINS) -> np.ndarray:
    """STS: f64[P], each the value of `grid` that makes its slot's calibration error least.

    From left to right: slot k's error is that of the survival up to k, with the temperatures before
    it as they have been found. Of equals the one closest to 1 is taken.

    Raises:
        UserError: there is a slot that no round verified.
    """
    rounds.check_every_slot("calibration")
    before = np.ones(len(rounds.logits))
    temperatures = np.ones(rounds.slots)
    for slot in range(rounds.slots):
        known, outcome = _judged(rounds, slot)
        z, so_far = rounds.logits[known, slot].astype(np.float64), before[known]
        errors = [
            expected_calibration_error(so_far * _sigmoid(z / value), outcome, bins)
            for value in grid
        ]
        temperatures[slot] = _least(errors, grid)
        before = before * _sigmoid(rounds.logits[:, slot].astype(np.float64) / temperatures[slot])
    return temperatures


def fit_single_temperature(rounds: Rounds, grid: np.ndarray = GRID, bins: int = BINS) -> float:
    """The one temperature for all slots that makes the mean of their calibration errors least."""
    rounds.check_every_slot("calibration")
    return float(_least([_mean_error(rounds, value, bins) for value in grid], grid))


def calibrate(fit: Rounds, heldout: Rounds, bins: int = BINS) -> Calibration:
    """Finds temperatures on some rounds and measures them on others, of other prompts.

    Raises:
        UserError: there is a slot that no round verified, or the rounds are of two drafters.
    """
    if fit.slots != heldout.slots:
        raise UserError(f"calibration: rounds of {fit.slots} slots and of {heldout.slots}")
    heldout.check_every_slot("calibration, held-out rounds")
    temperatures = fit_temperatures(fit, bins=bins)
    single = fit_single_temperature(fit, bins=bins)
    return Calibration(
        temperatures=tuple(temperatures.tolist()),
        single_temperature=single,
        fit_rounds=fit.counts(),
        heldout_rounds=heldout.counts(),
        bins=bins,
        before=quality(heldout, 1.0, bins),
        after=quality(heldout, temperatures, bins),
        after_single=quality(heldout, single, bins),
    )


def quality(rounds: Rounds, temperatures: np.ndarray | float, bins: int = BINS) -> Quality:
    """Measures the survival that these temperatures predict, each slot on rounds that verified it.

    Raises:
        UserError: there is a slot that no round verified.
    """
    rounds.check_every_slot("measuring the calibration")
    predicted = survival(rounds.logits, temperatures)
    pairs = list(_pairs(rounds, predicted))
    return Quality(
        ece=tuple(expected_calibration_error(*pair, bins) for pair in pairs),
        ece_of_perfect=tuple(error_of_perfect(p, bins) for p, _ in pairs),
        auc=tuple(auc(*pair) for pair in pairs),
        brier=tuple(float(np.mean((p - outcome) ** 2)) for p, outcome in pairs),
    )


def reliability_diagram(
    rounds: Rounds, calibration: Calibration, out_png: str | os.PathLike
) -> None:
    """Draws predicted survival against what came true: as the head says it, and calibrated.

    One line per slot, one mark per bin, of an area that grows with its rounds. True predictions lie
    on the diagonal.

    Raises:
        UserError: the rounds are not of this drafter or leave a slot out, the file cannot be
            written, or there is no matplotlib.
    """
    if rounds.slots != len(calibration.temperatures):
        raise UserError(
            f"reliability diagram: rounds of {rounds.slots} slots with a calibration of "
            f"{len(calibration.temperatures)}"
        )
    rounds.check_every_slot("reliability diagram")
    figure = pictures._figure(width=9.2, height=4.2)
    axes = figure.subplots(1, 2, sharey=True)
    panels = [("Before", 1.0), ("After", calibration.temperatures)]
    for axis, (title, temperatures) in zip(axes, panels, strict=True):
        error = _mean_error(rounds, temperatures, calibration.bins)
        title = f"{title}: calibration error {100 * error:.1f} %"
        share = "share accepted" if axis is axes[0] else ""
        pictures._style(axis, title, "predicted survival", share)
        axis.plot([0, 1], [0, 1], color="grey", linewidth=1.0, linestyle="--")
        pairs = _pairs(rounds, survival(rounds.logits, temperatures))
        for slot, pair in enumerate(pairs):
            x, y, sizes = reliability(*pair, calibration.bins)
            colour = pictures.COLOURS[slot % len(pictures.COLOURS)]
            marker = pictures.MARKERS[slot % len(pictures.MARKERS)]
            style = ["-", "--", ":"][slot // len(pictures.COLOURS) % 3]
            axis.plot(x, y, color=colour, linewidth=1.2, linestyle=style, marker=marker,
                      markersize=3, label=f"slot {slot + 1}")  # fmt: skip
            area = 400 * sizes / sizes.sum()
            axis.scatter(x, y, s=area, color=colour, marker=marker, alpha=0.5, linewidth=0)
        axis.set(xlim=(0, 1.03), ylim=(0, 1.03))
        axis.tick_params(labelleft=True)
    axes[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    pictures._save(figure, out_png)


def _judged(rounds: Rounds, slot: int) -> tuple[np.ndarray, np.ndarray]:
    """Which rounds verified the slot, bool[N], and whether those accepted it and all before."""
    known = rounds.verified > slot
    return known, (rounds.accepted[known] > slot).astype(np.float64)


def _pairs(rounds: Rounds, predicted: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Slot by slot, the predictions f[N, P] that can be judged, and the outcomes."""
    for slot in range(rounds.slots):
        known, outcome = _judged(rounds, slot)
        yield predicted[known, slot], outcome


def _mean_error(
    rounds: Rounds, temperatures: np.ndarray | Sequence[float] | float, bins: int
) -> float:
    """Mean over slots of the calibration error."""
    pairs = _pairs(rounds, survival(rounds.logits, temperatures))
    return float(np.mean([expected_calibration_error(*pair, bins) for pair in pairs]))


def _least(errors: Sequence[float], grid: np.ndarray) -> float:
    errors = np.asarray(errors)
    best = grid[errors <= errors.min() + 1e-12]
    return best[np.abs(np.log(best)).argmin()]


def _sigmoid(z: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * z))  # does not overflow


def _check_complete(cls: type, value: dict[str, Any], where: str) -> None:
    """Refuses a group without one of the fields of `cls`, or of the groups in it."""
    for name, kind in typing.get_type_hints(cls).items():
        if name not in value:
            raise UserError(f"{where} has no {name}; calibrate anew")
        if dataclasses.is_dataclass(kind) and isinstance(value[name], dict):
            _check_complete(kind, value[name], f"{where}: {name}")
