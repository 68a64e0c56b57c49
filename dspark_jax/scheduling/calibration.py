"""Makes the confidence head's numbers true: sequential temperature scaling (STS), and its measure.

The head's logit z_k stands for the probability that slot k is accepted if all before it are. The
schedulers live on products of these, the survival of a prefix, and small errors multiply. STS gives
each slot its own temperature, left to right (DSpark, arXiv 2607.05147). A temperature cannot mend a
head that is too sure on the whole, as one is whose drafter knows its training answers better than
others; so each slot also has an offset: sigmoid(z_k / T_k + b_k). STS alone is measured beside it.
In numpy throughout; what serves while decoding is `schedulers.survival`.
"""

import dataclasses
import json
import math
import os
import pathlib
import typing
from collections.abc import Sequence
from typing import Any

import numpy as np

from dspark_jax.core import pictures
from dspark_jax.core.config import from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import write_atomically
from dspark_jax.scheduling.recorded import Rounds
from dspark_jax.scheduling.reliability import (
    BINS,
    auc,
    error_of_perfect,
    expected_calibration_error,
    reliability,
)
from dspark_jax.weights.safetensors import read_json

FILE = "calibration.json"
VERSION = 2
GRID = np.geomspace(0.1, 10.0, 301)  # temperatures 1.5 % apart, 1.0 among them
FARTHEST = 20.0  # offset that is tried


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
        temperatures, offsets: [P]; slot k is accepted, if all before it are, with
            sigmoid(z_k / T_k + b_k).
        single_temperature, single_offset: the best that are the same for all slots, for engines
            that know neither: divide the head's weight and bias by the one, add the other.
        sts_temperatures: [P], the best without offsets.
        fit_rounds, heldout_rounds: [P], rounds that verified each slot.
        bins: of the calibration error, of equal width.
        before, after, after_sts, after_single: as the head says it, and with each of these.
        recorded: drafter, target, data and versions.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    single_temperature: float
    single_offset: float
    sts_temperatures: tuple[float, ...]
    fit_rounds: tuple[int, ...]
    heldout_rounds: tuple[int, ...]
    bins: int
    before: Quality
    after: Quality
    after_sts: Quality
    after_single: Quality
    recorded: Recorded = Recorded()

    @property
    def at_limit(self) -> tuple[int, ...]:
        """Slots whose temperature or offset is the last that was tried: the best lies beyond."""
        ends = (float(GRID[0]), float(GRID[-1]))
        found = enumerate(zip(self.temperatures, self.offsets, strict=True))
        return tuple(
            slot for slot, (value, shift) in found if value in ends or abs(shift) > 0.99 * FARTHEST
        )

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
        qualities = (self.before, self.after, self.after_sts, self.after_single)
        numbers = [self.offsets, self.sts_temperatures]
        lists = [self.fit_rounds, self.heldout_rounds]
        lists += [values for quality in qualities for values in dataclasses.astuple(quality)]
        if not slots or any(len(values) != slots for values in numbers + lists):
            raise UserError(f"{where}: the lists must have one entry for each slot")
        for value in (*self.temperatures, *self.sts_temperatures, self.single_temperature):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{where}: temperature {value}: must be positive")
        for value in (*self.offsets, self.single_offset):
            if not math.isfinite(value):
                raise UserError(f"{where}: offset {value}: must be finite")
        if self.bins < 1 or min(self.fit_rounds + self.heldout_rounds) < 1:
            raise UserError(f"{where}: bins and rounds must be at least 1")
        for values in lists[2:]:
            if not all(value is None or 0 <= value <= 1 for value in values):
                raise UserError(f"{where}: errors and areas must lie in 0..1")


Numbers = np.ndarray | Sequence[float] | float


def survival(logits: np.ndarray, temperatures: Numbers, offsets: Numbers = 0.0) -> np.ndarray:
    """Predicted probability that slots 0..k are all accepted: f64[N, P]."""
    return np.cumprod(_sigmoid(np.asarray(logits, np.float64) / temperatures + offsets), axis=1)


def fit_temperatures(rounds: Rounds, grid: np.ndarray = GRID, bins: int = BINS) -> np.ndarray:
    """STS: f64[P], each the value of `grid` that makes its slot's calibration error least.

    From left to right: slot k's error is that of the survival up to k, with the temperatures before
    it as they have been found. Of equals the one closest to 1 is taken.

    Raises:
        UserError: there is a slot that no round verified.
    """
    return _fit_slots(rounds, grid, bins, shifted=False)[0]


def fit_with_offsets(
    rounds: Rounds, grid: np.ndarray = GRID, bins: int = BINS
) -> tuple[np.ndarray, np.ndarray]:
    """Temperatures and offsets, f64[P] each: STS where every temperature is tried with the offset
    that makes the mean of the slot's predictions the share that was accepted.

    Raises:
        UserError: there is a slot that no round verified.
    """
    return _fit_slots(rounds, grid, bins, shifted=True)


def _fit_slots(rounds: Rounds, grid: np.ndarray, bins: int, shifted: bool):
    rounds.check_every_slot("calibration")
    before = np.ones(len(rounds.logits))
    temperatures, offsets = np.ones(rounds.slots), np.zeros(rounds.slots)
    for slot in range(rounds.slots):
        known, outcome = rounds.judged(slot)
        logits = rounds.logits[:, slot].astype(np.float64)
        z, so_far = logits[known], before[known]
        shifts = np.zeros(len(grid))
        if shifted:
            shifts = np.array([_offset(z / value, so_far, outcome.mean()) for value in grid])
        errors = [
            expected_calibration_error(so_far * _sigmoid(z / value + shift), outcome, bins)
            for value, shift in zip(grid, shifts, strict=True)
        ]
        temperatures[slot] = _least(errors, grid)
        offsets[slot] = shifts[np.flatnonzero(grid == temperatures[slot])[0]]
        before = before * _sigmoid(logits / temperatures[slot] + offsets[slot])
    return temperatures, offsets


def _offset(z: np.ndarray, so_far: np.ndarray, share: float) -> float:
    """b such that the mean of so_far * sigmoid(z + b) is `share`, if in reach; Newton's method."""
    offset = 0.0
    for _ in range(40):
        each = _sigmoid(z + offset)
        missing = share - np.mean(so_far * each)
        slope = np.mean(so_far * each * (1 - each))
        if abs(missing) < 1e-11 or abs(offset) == FARTHEST:
            break
        step = np.clip(missing / max(slope, 1e-9), -2.0, 2.0)  # it is no parabola
        offset = float(np.clip(offset + step, -FARTHEST, FARTHEST))
    return offset


def fit_single(rounds: Rounds, grid: np.ndarray = GRID, bins: int = BINS) -> tuple[float, float]:
    """The one temperature and offset for all slots that make the mean calibration error least.

    Each temperature is tried with offset 0 and with the one that makes the mean length accepted
    right; only the better of both can be worse than none.
    """
    rounds.check_every_slot("calibration")
    best = None
    wanted = sum(rounds.judged(slot)[1].mean() for slot in range(rounds.slots))
    for value in sorted(grid, key=lambda value: abs(math.log(value))):
        for offset in (0.0, _common_offset(rounds, value, wanted)):
            error = _mean_error(rounds, value, offset, bins)
            if best is None or error < best[0] - 1e-12:
                best = error, float(value), float(offset)
    return best[1:]


def _common_offset(rounds: Rounds, temperature: float, wanted: float) -> float:
    low, high = -FARTHEST, FARTHEST
    for _ in range(24):
        middle = (low + high) / 2
        predicted = survival(rounds.logits, temperature, middle)
        found = sum(p.mean() for p, _ in rounds.pairs(predicted))
        low, high = (middle, high) if found < wanted else (low, middle)
    return (low + high) / 2


def calibrate(fit: Rounds, heldout: Rounds, bins: int = BINS) -> Calibration:
    """Finds temperatures on some rounds and measures them on others, of other prompts.

    Raises:
        UserError: there is a slot that no round verified, or the rounds are of two drafters.
    """
    if fit.slots != heldout.slots:
        raise UserError(f"calibration: rounds of {fit.slots} slots and of {heldout.slots}")
    heldout.check_every_slot("calibration, held-out rounds")
    temperatures, offsets = fit_with_offsets(fit, GRID[::3], bins)
    alone, single = fit_temperatures(fit, bins=bins), fit_single(fit, GRID[::6], bins)
    return Calibration(
        temperatures=tuple(temperatures.tolist()),
        offsets=tuple(offsets.tolist()),
        single_temperature=single[0],
        single_offset=single[1],
        sts_temperatures=tuple(alone.tolist()),
        fit_rounds=fit.counts(),
        heldout_rounds=heldout.counts(),
        bins=bins,
        before=quality(heldout, 1.0, bins=bins),
        after=quality(heldout, temperatures, offsets, bins),
        after_sts=quality(heldout, alone, bins=bins),
        after_single=quality(heldout, *single, bins),
    )


def quality(
    rounds: Rounds, temperatures: Numbers, offsets: Numbers = 0.0, bins: int = BINS
) -> Quality:
    """Measures the survival that these predict, each slot on rounds that verified it.

    Raises:
        UserError: there is a slot that no round verified.
    """
    rounds.check_every_slot("measuring the calibration")
    predicted = survival(rounds.logits, temperatures, offsets)
    pairs = list(rounds.pairs(predicted))
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
    panels = [("Before", 1.0, 0.0), ("After", calibration.temperatures, calibration.offsets)]
    for axis, (title, *found) in zip(axes, panels, strict=True):
        error = _mean_error(rounds, *found, calibration.bins)
        title = f"{title}: calibration error {100 * error:.1f} %"
        share = "share accepted" if axis is axes[0] else ""
        pictures._style(axis, title, "predicted survival", share)
        axis.plot([0, 1], [0, 1], color="grey", linewidth=1.0, linestyle="--")
        pairs = rounds.pairs(survival(rounds.logits, *found))
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


def _mean_error(rounds: Rounds, temperatures: Numbers, offsets: Numbers, bins: int) -> float:
    """Mean over slots of the calibration error."""
    pairs = rounds.pairs(survival(rounds.logits, temperatures, offsets))
    return float(np.mean([expected_calibration_error(*pair, bins) for pair in pairs]))


def _least(errors: Sequence[float], grid: np.ndarray) -> float:
    errors = np.asarray(errors)
    best = grid[errors <= errors.min() + 1e-8]
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
