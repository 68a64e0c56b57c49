"""The pictures of a run: how training went, how far drafts get, and when a step does what.

Needs matplotlib, which the commands can do without.
"""

import io
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import read_metrics, write_atomically

# Okabe and Ito's colours, told apart by all eyes; shapes and dashes say the same again in grey.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
LABELS = {
    "loss": "total",
    "loss_ce": "cross-entropy",
    "loss_l1": "L1 distance",
    "loss_tv": "total variation",
    "loss_confidence": "confidence",
    "expected_accepted_length": "sampling",
    "expected_accepted_length_t0": "greedy",
}


def training_curve(metrics_jsonl: str | os.PathLike, out_png: str | os.PathLike) -> None:
    """Draws loss terms, expected accepted length and learning rate over the steps.

    Reads `loss*`, `expected_accepted_length*` and `learning_rate`; the same names after
    `validation/` (or inside a `validation` object) are drawn as marks on a dashed line. What was
    not logged is left out.

    Raises:
        UserError: there is nothing to draw, the file cannot be read or written, or there is no
            matplotlib.
    """
    series = _series(read_metrics(metrics_jsonl))
    panels = [
        ("Loss terms", "", [name for name in series if name.startswith("loss")]),
        (
            "Expected accepted length",
            "tokens per round",
            [name for name in series if name.startswith("expected_accepted_length")],
        ),
        ("Learning rate", "", [name for name in series if name == "learning_rate"]),
    ]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        raise UserError(f"{metrics_jsonl} holds no losses to draw; train for a few steps first")
    figure = _figure(width=4.6 * len(panels), height=3.6)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, unit, names) in zip(axes, panels, strict=True):
        _style(axis, title, "step", unit)
        for colour, marker, name in zip(COLOURS, MARKERS, sorted(names), strict=False):
            label = LABELS.get(name, name.replace("_", " "))
            steps, values = series[name].get("training", ([], []))
            if len(steps) > 60 and name != "learning_rate":
                # The steps themselves, pale, behind their running mean.
                axis.plot(steps, values, color=colour, alpha=0.2, linewidth=0.8)
                values = _running_mean(values, len(steps) // 30)
            axis.plot(steps, values, color=colour, linewidth=1.6, label=label)
            steps, values = series[name].get("validation", ([], []))
            axis.plot(steps, values, color=colour, linewidth=1.2, linestyle="--",
                      marker=marker, markersize=5)  # fmt: skip
        if title == "Learning rate":
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        else:
            if any("validation" in series[name] for name in names):
                axis.plot([], [], color="grey", linewidth=1.2, linestyle="--", label="validation")
            axis.legend(frameon=False, fontsize=8)
    _save(figure, out_png)


def acceptance_per_slot(sets: Mapping[str, Mapping[str, Any]], out_png: str | os.PathLike) -> None:
    """Draws how slots fare, one line per prompt set: `report["sets"]` of an evaluation.

    Left, conditional acceptance: of the drafts whose earlier slots were all accepted, the share
    accepted at this slot. Right, prefix survival: of all drafts, the share accepted up to and
    including this slot.

    Args:
        sets: name of a prompt set to its `conditional_acceptance` and `survival`, [G] each; None or
            NaN where a slot was never reached.
        out_png: where the picture goes.

    Raises:
        UserError: `sets` is empty, the file cannot be written, or there is no matplotlib.
    """
    if not sets:
        raise UserError("no prompt sets to draw; the report has none")
    figure = _figure(width=9.2, height=3.9)
    axes = figure.subplots(1, 2, sharey=True)
    panels = [("Conditional acceptance", "conditional_acceptance"), ("Prefix survival", "survival")]
    for axis, (title, field) in zip(axes, panels, strict=True):
        _style(axis, title, "slot", "share of drafts" if field == "conditional_acceptance" else "")
        slots = max(len(report[field]) for report in sets.values())
        for index, (name, report) in enumerate(sets.items()):
            values = [math.nan if value is None else float(value) for value in report[field]]
            axis.plot(range(1, len(values) + 1), values, linewidth=1.6, markersize=5, label=name,
                      color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)],
                      linestyle=["-", "--", ":"][index // len(COLOURS) % 3])  # fmt: skip
        axis.set_xticks(range(1, slots + 1))
        axis.set_ylim(0, 1.03)
        axis.tick_params(labelleft=True)
    axes[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    _save(figure, out_png)


def timeline(
    rows: Mapping[str, Sequence[tuple[float, float]]], out_png: str | os.PathLike, title: str
) -> None:
    """Draws when each row was busy: name -> [(begin, end) in seconds], the first row on top.

    Raises:
        UserError: there is nothing to draw, the file cannot be written, or there is no matplotlib.
    """
    if not any(rows.values()):
        raise UserError("the trace holds none of the steps")
    figure = _figure(width=9.2, height=0.9 + 0.42 * len(rows))
    axis = figure.subplots()
    _style(axis, title, "seconds", "")
    for place, spans in enumerate(rows.values()):
        bars = [(begin, end - begin) for begin, end in spans]
        axis.broken_barh(bars, (place - 0.35, 0.7), facecolors=COLOURS[place % len(COLOURS)])
    axis.set_yticks(range(len(rows)), list(rows))
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    _save(figure, out_png)


def _series(lines: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, tuple[list, list]]]:
    """Numbers by name, then "training" or "validation": (steps, values), without gaps."""
    found: dict[str, dict[str, tuple[list, list]]] = {}
    for line in lines:
        for name, value in _numbers(line):
            kind = "training"
            for prefix in ("validation/", "validation_"):
                if name.startswith(prefix):
                    kind, name = "validation", name.removeprefix(prefix)
            steps, values = found.setdefault(name, {}).setdefault(kind, ([], []))
            steps.append(line["step"])
            values.append(value)
    return found


def _numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield prefix + name, float(value)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Means over up to `width` values to either side."""
    windows = [values[max(0, i - width) : i + width + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _figure(width: float, height: float) -> Any:
    """An empty figure of so many inches, apart from any that a notebook has open."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _style(axis: Any, title: str, x: str, y: str) -> None:
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: str | os.PathLike) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    write_atomically(path, picture.getvalue())
