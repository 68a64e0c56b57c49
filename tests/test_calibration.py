"""Calibration against plain loops, and on rounds whose true probabilities are known.

Made-up rounds: the true confidence of slot k is sigmoid(z) for a random z, acceptance is drawn from
it slot by slot, and the recorded logits are z times the temperature that has to be found.
"""

import dataclasses
import json
import math

import numpy as np
import pytest

from dspark_jax.core import pictures
from dspark_jax.core.errors import UserError
from dspark_jax.scheduling import calibration
from dspark_jax.scheduling.calibration import Calibration, Rounds

TRUE = np.array([1.7, 0.8, 1.4, 2.5, 1.2])  # temperatures, one per slot
MANY = 20_000


def made_up(seed, rounds=MANY, temperatures=TRUE, cut=None):
    """Rounds, and the true survival of their slots f64[N, P]; `cut` maps it to verified lengths."""
    rng = np.random.default_rng(seed)
    slots = len(temperatures)
    z = rng.normal(1.5, 1.5, (rounds, 1)) + rng.normal(0, 1.0, (rounds, slots))
    true = 1 / (1 + np.exp(-z))
    verified = np.full(rounds, slots) if cut is None else cut(np.cumprod(true, axis=1))
    good = np.cumprod(rng.random((rounds, slots)) < true, axis=1).sum(axis=1)
    logits = (z * temperatures).astype(np.float32)
    return Rounds(logits, np.minimum(good, verified), verified), np.cumprod(true, axis=1)


def rounds_of(logits, accepted, verified=None):
    logits = np.asarray(logits, np.float32)
    verified = np.full(len(logits), logits.shape[1]) if verified is None else np.array(verified)
    return Rounds(logits, np.array(accepted), verified)


@pytest.fixture(scope="module")
def found():
    fit, _ = made_up(0)
    heldout, _ = made_up(1)
    return calibration.calibrate(fit, heldout)


# Plain loops.


def slow_survival(logits, temperatures):
    out = []
    for row in logits:
        product, values = 1.0, []
        for z, number in zip(row, temperatures, strict=True):
            temperature, offset = number if isinstance(number, tuple) else (number, 0.0)
            product *= 1 / (1 + math.exp(-float(z) / temperature - offset))
            values.append(product)
        out.append(values)
    return out


def slow_error(predicted, outcome, bins):
    total = 0.0
    for b in range(bins):
        inside = [
            i
            for i, p in enumerate(predicted)
            if b / bins <= p and (p < (b + 1) / bins or b == bins - 1)
        ]
        if inside:
            mean = sum(predicted[i] for i in inside) / len(inside)
            share = sum(outcome[i] for i in inside) / len(inside)
            total += len(inside) / len(predicted) * abs(mean - share)
    return total


def slow_auc(predicted, outcome):
    wins = pairs = 0
    for p, good in zip(predicted, outcome, strict=True):
        for q, bad in zip(predicted, outcome, strict=True):
            if good and not bad:
                pairs += 1
                wins += 1 if p > q else 0.5 if p == q else 0
    return wins / pairs if pairs else None


def slow_pairs(rounds, temperatures, slot):
    predicted, outcome = [], []
    rows = slow_survival(rounds.logits, temperatures)
    for row, accepted, verified in zip(rows, rounds.accepted, rounds.verified, strict=True):
        if slot < verified:
            predicted.append(row[slot])
            outcome.append(1 if accepted > slot else 0)
    return predicted, outcome


def reached(rounds, found, slot):
    """Survival of the rounds that verified a slot."""
    rows = slow_survival(rounds.logits, found)
    return [row for row, verified in zip(rows, rounds.verified, strict=True) if slot < verified]


def best_offset(rounds, found, temperature, slot):
    """What makes the mean prediction of a slot right, by halving."""
    low, high = -20.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        tried = found[:slot] + [(temperature, middle)] + [(1.0, 0.0)] * (len(found) - slot - 1)
        predicted, outcome = slow_pairs(rounds, tried, slot)
        low, high = (middle, high) if sum(predicted) < sum(outcome) else (low, middle)
    return (low + high) / 2


def some_rounds(seed, count=80, slots=3):
    """A few rounds with cut lengths and tied logits."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0.5, 1.5, (count, slots)), 1)
    verified = rng.integers(0, slots + 1, count)
    accepted = np.minimum(rng.integers(0, slots + 1, count), verified)
    return rounds_of(logits, accepted, verified)


@pytest.mark.parametrize("seed", range(3))
def test_measures_match_plain_loops(seed):
    rounds, temperatures = some_rounds(seed), np.array([1.3, 0.7, 2.0])
    quality = calibration.quality(rounds, temperatures, bins=7)
    for slot in range(3):
        predicted, outcome = slow_pairs(rounds, temperatures, slot)
        assert quality.ece[slot] == pytest.approx(slow_error(predicted, outcome, 7), abs=1e-9)
        assert quality.auc[slot] == pytest.approx(slow_auc(predicted, outcome), abs=1e-9)
        squares = [(p - y) ** 2 for p, y in zip(predicted, outcome, strict=True)]
        assert quality.brier[slot] == pytest.approx(sum(squares) / len(squares), abs=1e-9)
    assert quality.mean_ece == pytest.approx(sum(quality.ece) / 3)


@pytest.mark.parametrize("seed", range(3))
def test_fits_match_brute_force(seed):
    rounds, grid = some_rounds(seed, count=40), np.array([0.3, 0.5, 0.8, 1.0, 1.3, 2.0, 4.0])
    chosen = []
    for slot in range(3):
        errors = {}
        for temperature in grid:
            tried = [*chosen, temperature, *[1.0] * (2 - slot)]
            errors[temperature] = slow_error(*slow_pairs(rounds, tried, slot), 5)
        chosen.append(min(errors, key=errors.get))
    np.testing.assert_array_equal(calibration.fit_temperatures(rounds, grid, 5), chosen)
    means = {
        temperature: sum(
            slow_error(*slow_pairs(rounds, [temperature] * 3, slot), 5) for slot in range(3)
        )
        for temperature in grid
    }
    single = calibration.fit_single(rounds, grid, 5)
    error = sum(slow_error(*slow_pairs(rounds, [single] * 3, slot), 5) for slot in range(3))
    assert error <= min(means.values()) + 1e-9
    # With offsets: the mean prediction of every slot is right, and no temperature is better.
    temperatures, offsets = calibration.fit_with_offsets(rounds, grid, 5)
    found = list(zip(temperatures, offsets, strict=True))
    for slot in range(3):
        predicted, outcome = slow_pairs(rounds, found, slot)
        before = (
            1 if slot == 0 else np.mean([row[slot - 1] for row in reached(rounds, found, slot)])
        )
        if before > np.mean(outcome):  # else no offset is enough
            assert np.mean(predicted) == pytest.approx(np.mean(outcome), abs=1e-6)
        errors = []
        for temperature in grid:
            tried = found[:slot] + [(temperature, best_offset(rounds, found, temperature, slot))]
            tried += [(1.0, 0.0)] * (2 - slot)
            errors.append(slow_error(*slow_pairs(rounds, tried, slot), 5))
        assert slow_error(predicted, outcome, 5) == pytest.approx(min(errors), abs=1e-6)


def test_bins_are_closed_below_and_one_is_in_the_last():
    predicted = np.array([0.0, 0.1, 0.5, 1.0])  # 0.1 shares no bin of width 0.1 with 0.0
    mean, share, sizes = calibration.reliability(predicted, np.array([1.0, 0, 0, 0]), 10)
    np.testing.assert_array_equal(sizes, [1, 1, 1, 1])
    np.testing.assert_array_equal(mean, predicted)
    np.testing.assert_array_equal(share, [1, 0, 0, 0])
    error = calibration.expected_calibration_error(predicted, np.array([1.0, 0, 0, 0]), 10)
    assert error == pytest.approx((1 + 0.1 + 0.5 + 1) / 4)
    mean, share, sizes = calibration.reliability(np.array([0.9, 1.0]), np.array([1.0, 0.0]), 10)
    assert (mean, share, sizes) == (pytest.approx([0.95]), pytest.approx([0.5]), 2)


# Known truth.


def test_the_temperatures_are_recovered(found):
    np.testing.assert_allclose(found.sts_temperatures, TRUE, rtol=0.12)
    np.testing.assert_allclose(found.temperatures, TRUE, rtol=0.2)
    assert max(map(abs, found.offsets)) < 0.3
    assert found.at_limit == ()


def test_calibrated_survival_is_true_on_rounds_not_seen(found):
    assert found.before.mean_ece > 0.03
    assert found.after.mean_ece <= 0.01
    assert found.after.mean_ece < found.after_single.mean_ece < found.before.mean_ece
    assert found.fit_rounds == found.heldout_rounds == (MANY,) * 5
    assert all(a <= b + 1e-3 for a, b in zip(found.after.brier, found.before.brier, strict=True))
    # Without the noise of outcomes: against the true probabilities.
    heldout, true = made_up(2)
    mended = found.temperatures, found.offsets
    for numbers, low, high in ((mended, 0, 0.006), ((np.ones(5),), 0.03, 1)):
        predicted = calibration.survival(heldout.logits, *numbers)
        errors = [
            calibration.expected_calibration_error(predicted[:, k], true[:, k]) for k in range(5)
        ]
        assert low <= np.mean(errors) <= high


def test_the_error_that_chance_alone_gives():
    measured = [
        calibration.quality(made_up(seed, 1000)[0], TRUE, bins=bins)
        for seed in range(60)
        for bins in (5, 20)
    ]
    for bins in (0, 1):  # 5 and 20 of them
        errors = np.mean([quality.ece for quality in measured[bins::2]], axis=0)
        perfect = np.mean([quality.ece_of_perfect for quality in measured[bins::2]], axis=0)
        np.testing.assert_allclose(errors, perfect, rtol=0.15)


def test_a_single_wrong_temperature_is_recovered_whole():
    fit, _ = made_up(3, temperatures=np.full(4, 2.0))
    heldout, _ = made_up(4, temperatures=np.full(4, 2.0))
    found = calibration.calibrate(fit, heldout)
    assert found.single_temperature == pytest.approx(2.0, rel=0.15)
    assert abs(found.single_offset) < 0.2
    assert found.after_single.mean_ece <= 0.01 < found.before.mean_ece


def test_a_head_that_is_too_sure_needs_the_offset():
    """As one whose drafter knows its training answers better than others."""
    rounds, truth = zip(*(made_up(seed, temperatures=np.array([1.3, 0.8, 1.5])) for seed in (7, 8)))
    sure = [dataclasses.replace(one, logits=one.logits + np.float32(1.2)) for one in rounds]
    found = calibration.calibrate(*sure)
    assert found.before.mean_ece > 0.05 and found.after_sts.mean_ece > 0.02
    assert found.after.mean_ece <= 0.012
    assert found.after_single.mean_ece < found.after_sts.mean_ece
    predicted = calibration.survival(sure[1].logits, found.temperatures, found.offsets)
    assert np.abs(predicted - truth[1]).mean() < 0.02


def cut_by_survival(true):
    """As a scheduler does: the slots of enough survival, less of them on a busy engine."""
    busy = np.random.default_rng(9).random((len(true), 1)) < 0.5
    return (true >= np.where(busy, 0.6, 0.2)).sum(axis=1)


def test_cut_rounds_are_judged_only_where_they_were_verified():
    fit, _ = made_up(5, 3 * MANY, cut=cut_by_survival)
    heldout, _ = made_up(6, 3 * MANY, cut=cut_by_survival)
    assert fit.counts()[0] > 2 * fit.counts()[-1] > MANY
    assert fit.counts() == tuple(int((fit.verified >= k).sum()) for k in range(1, 6))
    temperatures = calibration.fit_temperatures(fit)
    np.testing.assert_allclose(temperatures, TRUE, rtol=0.15)
    assert calibration.quality(heldout, 1.0).mean_ece > 0.03
    assert calibration.quality(heldout, temperatures).mean_ece <= 0.01
    last = len(TRUE) - 1
    # Two ways to be dishonest, which the true temperatures show up: taking what was not verified
    # for rejected, and taking only those cut rounds whose fate an earlier rejection has settled.
    predicted = calibration.survival(heldout.logits, TRUE)[:, last]
    outcome = (heldout.accepted > last).astype(float)
    assert calibration.expected_calibration_error(predicted, outcome) > 0.03
    settled = (heldout.verified > last) | (heldout.accepted < heldout.verified)
    wrong = calibration.expected_calibration_error(predicted[settled], outcome[settled])
    assert wrong > 0.02
    honest = calibration.quality(heldout, TRUE)
    assert honest.ece[last] < 0.01
    # What lies in a slot that was not verified has no say.
    noise = heldout.logits.copy()
    noise[np.arange(5) >= heldout.verified[:, None]] = 7.0
    noisy = dataclasses.replace(heldout, logits=noise)
    assert calibration.quality(noisy, TRUE) == honest


# Ends and faults.


def test_nothing_accepted():
    rng = np.random.default_rng(0)
    rounds = rounds_of(rng.normal(-1, 1, (500, 2)), np.zeros(500, int))
    found = calibration.calibrate(rounds, rounds)
    assert found.after.auc == (None, None)
    assert found.after.mean_ece < found.before.mean_ece
    assert all(math.isfinite(value) for value in found.temperatures)


def test_everything_accepted_goes_to_the_end_of_the_grid_and_says_so():
    rounds = rounds_of(np.full((50, 2), 0.5), np.full(50, 2))
    found = calibration.calibrate(rounds, rounds)
    assert found.sts_temperatures == (calibration.GRID[0],) * 2 and found.at_limit == (0, 1)
    assert found.before.auc == (None, None)


def test_constant_confidences():
    accepted = np.array([1] * 30 + [0] * 10)  # 0.75 is sigmoid(log 3)
    rounds = rounds_of(np.full((40, 1), 2 * math.log(3)), accepted)
    found = calibration.calibrate(rounds, rounds)
    assert found.sts_temperatures[0] == pytest.approx(2.0, rel=0.02)
    assert found.temperatures == (1.0,) and found.offsets[0] == pytest.approx(-math.log(3))
    assert found.after.ece[0] < 0.005 and found.after.auc == (0.5,)
    zero = rounds_of(np.zeros((40, 1)), accepted)  # no temperature changes anything
    assert calibration.fit_temperatures(zero) == [1.0]
    assert calibration.fit_single(zero) == (1.0, pytest.approx(math.log(3), abs=1e-5))


def test_extreme_logits_do_not_overflow():
    with np.errstate(all="raise"):
        predicted = calibration.survival(np.array([[1e4, -1e4, 3e38]], np.float32), 0.1)
    np.testing.assert_array_equal(predicted, [[1, 0, 0]])


@pytest.mark.parametrize(
    "logits, accepted, verified, said",
    [
        ([[0, 0], [0, np.nan]], [0, 0], [2, 1], "round 1 has a confidence that is NaN"),
        ([[np.inf, 0]], [0], [2], "round 0 has a confidence that is NaN or infinite"),
        ([[0, 0]], [2], [1], "round 0 has not 0 to all of its verified slots accepted"),
        ([[0, 0]], [-1], [1], "not 0 to all"),
        ([[0, 0]], [0], [3], "not 0 to 2 verified"),
        ([[0, 0]], [0, 0], [2, 2], "a whole number for each of the 1 rounds"),
        ([[0, 0]], [0.5], [2], "accepted is float64"),
        (np.zeros((0, 2)), [], [], "give .rounds, slots."),
        ([0, 0], [0], [2], "give .rounds, slots."),
    ],
)
def test_bad_rounds_are_refused(logits, accepted, verified, said):
    with pytest.raises(UserError, match=said):
        Rounds(np.asarray(logits, np.float32), np.array(accepted), np.array(verified))


def test_slots_that_nobody_verified_are_refused():
    whole = rounds_of(np.zeros((4, 2)), [0, 1, 2, 0])
    cut = rounds_of(np.zeros((4, 2)), [0, 1, 1, 0], [1, 1, 1, 1])
    for fit, heldout in ((whole, cut), (cut, whole)):
        with pytest.raises(UserError, match="no recorded round verified slot 1"):
            calibration.calibrate(fit, heldout)
    with pytest.raises(UserError, match="of 2 slots and of 3"):
        calibration.calibrate(whole, rounds_of(np.zeros((4, 3)), [0, 1, 2, 0]))
    assert cut.take(np.array([True, False, True, False])).accepted.tolist() == [0, 1]


# The file and the picture.


def test_the_file_comes_back_as_it_was(tmp_path, found):
    path = tmp_path / "calibration.json"
    found.write(path)
    assert Calibration.read(path) == found == Calibration.read(path, slots=5)
    value = json.loads(path.read_text())
    assert value["temperatures"] == list(found.temperatures)
    assert value["after"]["ece"] == list(found.after.ece)
    nothing = dataclasses.replace(found, after=dataclasses.replace(found.after, auc=(None,) * 5))
    nothing.write(path)
    assert Calibration.read(path) == nothing


def spoilt(value, where, what):
    *path, last = where.split(".")
    group = value
    for name in path:
        group = group[name]
    if what is KeyError:
        del group[last]
    else:
        group[last] = what


@pytest.mark.parametrize(
    "where, what, said",
    [
        ("version", 3, "version 3, this program reads 2"),
        ("version", KeyError, "version None"),
        ("temperatures", KeyError, "has no temperatures; calibrate anew"),
        ("before.auc", KeyError, "before has no auc"),
        ("extra", 1, "extra: no such field"),
        ("after.extra", 1, "after.extra: no such field"),
        ("single_temperature", "1.0", "single_temperature='1.0': must be float"),
        ("single_temperature", 0.0, "temperature 0.0: must be positive"),
        ("offsets", [0.0], "one entry for each slot"),
        ("single_offset", float("inf"), "offset inf"),
        ("temperatures", [1.0, 1.0, float("nan"), 1.0, 1.0], "temperature nan"),
        ("temperatures", [1.0], "one entry for each slot"),
        ("temperatures", [], "one entry for each slot"),
        ("after.ece", [0.1, 0.1], "one entry for each slot"),
        ("after.ece", [0.1, 0.1, 0.1, 0.1, -1.0], "must lie in 0..1"),
        ("before.brier", [0.1, 0.1, 0.1, 0.1, float("nan")], "must lie in 0..1"),
        ("fit_rounds", [1, 1, 1, 1, 0], "at least 1"),
        ("fit_rounds", [1, 1, 1, 1, 1.5], "fit_rounds"),
        ("bins", 0, "at least 1"),
        ("after", 3, "must be a group"),
    ],
)
def test_a_spoilt_file_is_refused(tmp_path, found, where, what, said):
    path = tmp_path / "calibration.json"
    found.write(path)
    value = json.loads(path.read_text())
    spoilt(value, where, what)
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match=said):
        Calibration.read(path)


def test_other_files_are_refused(tmp_path, found):
    path = tmp_path / "calibration.json"
    with pytest.raises(UserError, match="no such file"):
        Calibration.read(path)
    found.write(path)
    with pytest.raises(UserError, match="of 5 slots, this one has 7; calibrate it anew"):
        Calibration.read(path, slots=7)
    path.write_text(path.read_text()[:40])
    with pytest.raises(UserError, match="not readable as JSON"):
        Calibration.read(path)


def test_reliability_diagram(tmp_path, found, monkeypatch):
    pytest.importorskip("matplotlib")
    figures, save = [], pictures._save
    monkeypatch.setattr(
        pictures, "_save", lambda figure, path: (figures.append(figure), save(figure, path))
    )
    heldout, _ = made_up(1)
    path = tmp_path / "reliability.png"
    calibration.reliability_diagram(heldout, found, path)
    before, after = figures[0].axes
    assert before.get_title(loc="left") == (
        f"Before: calibration error {100 * found.before.mean_ece:.1f} %"
    )
    assert after.get_title(loc="left") == (
        f"After: calibration error {100 * found.after.mean_ece:.1f} %"
    )
    for axis, numbers in ((before, (1.0,)), (after, (found.temperatures, found.offsets))):
        lines = {line.get_label(): line for line in axis.get_lines()}
        predicted = calibration.survival(heldout.logits, *numbers)[:, 4]
        x, y, _ = calibration.reliability(predicted, (heldout.accepted > 4).astype(float))
        np.testing.assert_array_equal(lines["slot 5"].get_xdata(), x)
        np.testing.assert_array_equal(lines["slot 5"].get_ydata(), y)
    names = [text.get_text() for text in after.get_legend().get_texts()]
    assert names == [f"slot {slot}" for slot in range(1, 6)]
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(UserError, match="rounds of 1 slots with a calibration of 5"):
        calibration.reliability_diagram(rounds_of([[0.0]], [0]), found, path)
