"""Pictures show the numbers they were given, under the names a reader looks for."""

import math

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from dspark_jax.core import pictures
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import MetricsWriter


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved, which are written as well."""
    kept, save = [], pictures._save
    monkeypatch.setattr(pictures, "_save", lambda figure, path: (kept.append(figure),
                                                                 save(figure, path)))  # fmt: skip
    return kept


def drawn(axis):
    """What an axis shows: label to values, without the entries that only explain."""
    lines = [line for line in axis.get_lines() if len(line.get_xdata())]
    return {line.get_label(): np.asarray(line.get_ydata(), float) for line in lines}


def is_png(path):
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


def test_training_curve(tmp_path, figures):
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2, 3):
            values = {"loss": 4.0 - step, "expected_accepted_length": 1.0 + step}
            writer.write(step, {**values, "learning_rate": 1e-3 * step, "acceptance": [0.5, 0.25]})
        writer.write(3, {"validation": {"loss": 2.5}})
    pictures.training_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    (figure,) = figures
    loss, length, rate = figure.axes
    assert [axis.get_title(loc="left") for axis in figure.axes] == [
        "Loss terms",
        "Expected accepted length",
        "Learning rate",
    ]
    assert list(drawn(loss)["total"]) == [3, 2, 1]
    (validation,) = [values for label, values in drawn(loss).items() if label.startswith("_")]
    assert list(validation) == [2.5]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["total", "validation"]
    assert list(drawn(length)["sampling"]) == [2, 3, 4]
    assert drawn(rate)["learning rate"] == pytest.approx([1e-3, 2e-3, 3e-3])
    assert is_png(tmp_path / "curve.png")


def test_a_long_curve_is_smoothed_but_keeps_its_steps(tmp_path, figures):
    losses = [1.0 + step % 2 for step in range(120)]
    with MetricsWriter(tmp_path) as writer:
        for step, loss in enumerate(losses, start=1):
            writer.write(step, {"loss": loss})
    pictures.training_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png")
    (axis,) = figures[0].axes
    shown = drawn(axis)
    assert np.ptp(shown.pop("total")[10:-10]) < 0.2
    (raw,) = shown.values()
    assert list(raw) == losses


def test_acceptance_per_slot(tmp_path, figures):
    sets = {
        "gsm8k": {"conditional_acceptance": [0.8, 0.5], "survival": [0.8, 0.4], "rounds": 9},
        "mbpp": {"conditional_acceptance": [0.0, None], "survival": [0.0, 0.0], "rounds": 9},
    }
    pictures.acceptance_per_slot(sets, tmp_path / "slots.png")
    conditional, survival = figures[0].axes
    assert conditional.get_title(loc="left") == "Conditional acceptance"
    assert survival.get_title(loc="left") == "Prefix survival"
    assert list(drawn(conditional)["gsm8k"]) == [0.8, 0.5]
    assert drawn(conditional)["mbpp"][0] == 0 and math.isnan(drawn(conditional)["mbpp"][1])
    assert list(drawn(survival)["gsm8k"]) == [0.8, 0.4]
    assert list(survival.get_lines()[0].get_xdata()) == [1, 2]
    assert [text.get_text() for text in survival.get_legend().get_texts()] == ["gsm8k", "mbpp"]
    assert is_png(tmp_path / "slots.png")


def test_lines_differ_in_more_than_their_colour(tmp_path, figures):
    sets = {str(i): {"conditional_acceptance": [0.5], "survival": [0.5]} for i in range(12)}
    pictures.acceptance_per_slot(sets, tmp_path / "slots.png")
    lines = figures[0].axes[0].get_lines()
    assert len({(line.get_marker(), line.get_linestyle()) for line in lines}) == 12


def test_nothing_to_draw_is_said_and_leaves_no_file(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"tokens": 3})
    with pytest.raises(UserError, match="holds no losses to draw"):
        pictures.training_curve(tmp_path / "metrics.jsonl", tmp_path / "out.png")
    with pytest.raises(UserError, match="no prompt sets"):
        pictures.acceptance_per_slot({}, tmp_path / "out.png")
    with pytest.raises(UserError, match="cannot read metrics"):
        pictures.training_curve(tmp_path / "absent.jsonl", tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()
