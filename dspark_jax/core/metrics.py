"""What a run leaves to read: metrics.jsonl, TensorBoard, JSON reports, tables, peak memory."""

import contextlib
import json
import math
import os
import pathlib
import resource
import sys
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from dspark_jax.core.errors import UserError


class MetricsWriter:
    """Appends one JSON object per logged step to WORKDIR/metrics.jsonl, and to TensorBoard.

    TensorBoard files go to WORKDIR/tensorboard if tensorboardX is installed. Only process 0 of a
    multi-process run writes; the others may call everything all the same.

    Args:
        workdir: folder of the run, made if missing.
        step: the step this run starts after. Lines of later steps, left by a run that went on after
            its last checkpoint, are dropped, so that no step is there twice; 0 starts anew.

    Raises:
        UserError: metrics.jsonl holds a line, other than a cut last one, that is no metrics line,
            or cannot be written.
    """

    def __init__(self, workdir: str | os.PathLike, step: int = 0):
        self._file = self._tensorboard = None
        if jax.process_index() != 0:
            return
        folder = pathlib.Path(workdir)
        path = folder / "metrics.jsonl"
        kept = (
            [line for line in read_metrics(path) if line["step"] <= step] if path.exists() else []
        )
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        try:
            from tensorboardX import SummaryWriter  # optional
        except ImportError:
            return
        self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: Mapping[str, object]) -> None:
        """Logs `values`: numbers, arrays whose entries are slots, or dicts of these.

        A slot array is a list in metrics.jsonl, and `NAME/slot_0`, `NAME/slot_1`, ... in
        TensorBoard. NaN and infinities become null. The line is on disk when this returns.
        """
        if self._file is None:
            return
        plain = {"step": int(step), **{name: to_json(value) for name, value in values.items()}}
        self._file.write(json.dumps(plain, allow_nan=False) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in plain.items():
                if name != "step":
                    self._add_scalars(name, value, int(step))

    def _add_scalars(self, name: str, value: object, step: int) -> None:
        if isinstance(value, dict):
            for key, entry in value.items():
                self._add_scalars(f"{name}/{key}", entry, step)
        elif isinstance(value, list):
            for slot, entry in enumerate(value):
                self._add_scalars(f"{name}/slot_{slot}", entry, step)
        elif isinstance(value, int | float):
            self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Ends the files; `write` must not be called afterwards."""
        for file in (self._file, self._tensorboard):
            if file is not None:
                file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The lines of a metrics.jsonl, without a last line that a killed run cut off.

    Raises:
        UserError: a line is no metrics line (a JSON object with an integer `step`).
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"cannot read metrics {path}: {error.strerror}") from error
    found = []
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or not isinstance(line.get("step"), int):
                raise ValueError("not an object with a step")
        except ValueError as error:
            if number == len(lines):  # no newline after it: cut while it was being written
                break
            raise UserError(
                f"{path} line {number} is no metrics line; remove that line or the file"
            ) from error
        found.append(line)
    return found


def to_json(value: object) -> object:
    """`value` in terms of JSON: arrays and numpy scalars become lists and numbers.

    NaN and infinities become None, since JSON has no word for them.

    Raises:
        TypeError: something in `value` has no JSON form.
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        if array.dtype.kind not in "biuSU":
            array = array.astype(np.float64)  # also what bfloat16 needs
        return to_json(array.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def write_json(path: str | os.PathLike, value: object, sort_keys: bool = False) -> None:
    """Writes a report: indented JSON in the given order, there as a whole or not at all.

    Numpy and jax values are converted, NaN becomes null (`to_json`). Missing folders are made.

    Raises:
        UserError: the file cannot be written.
    """
    text = json.dumps(to_json(value), indent=2, sort_keys=sort_keys, allow_nan=False) + "\n"
    write_atomically(path, text)


def write_atomically(path: str | os.PathLike, content: str | bytes) -> None:
    """Puts `content` at `path` under a temporary name in the same folder, then renames it.

    Raises:
        UserError: the file cannot be written.
    """
    path = pathlib.Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def table(rows: Sequence[Sequence[object]], columns: Sequence[str]) -> str:
    """A text table: names to the left, numbers to the right, one precision per column.

    None and NaN are shown as `-`. Every row has one cell per column.
    """
    cells = [list(row) for row in rows]
    texts = [[_text(row[index], [r[index] for r in cells]) for index in range(len(columns))]
             for row in cells]  # fmt: skip
    widths = [max([len(name), *(len(row[index]) for row in texts)])
              for index, name in enumerate(columns)]  # fmt: skip
    left = [any(isinstance(row[index], str) for row in cells) for index in range(len(columns))]

    def line(parts: Sequence[str]) -> str:
        aligned = [part.ljust(width) if is_left else part.rjust(width)
                   for part, width, is_left in zip(parts, widths, left, strict=True)]  # fmt: skip
        return "  ".join(aligned).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, texts)])


def _text(cell: object, column: Sequence[object]) -> str:
    """`cell` as text, with the decimals that the largest number of its column leaves room for."""
    if cell is None or (isinstance(cell, float | np.floating) and not math.isfinite(cell)):
        return "-"
    if isinstance(cell, bool | np.bool_):
        return "yes" if cell else "no"
    if isinstance(cell, int | np.integer):
        return f"{cell:,}"
    if isinstance(cell, float | np.floating):
        sizes = [abs(float(c)) for c in column
                 if isinstance(c, float | np.floating) and math.isfinite(c)]  # fmt: skip
        largest = max(sizes)
        if 0 < largest < 0.01:
            return f"{cell:.2e}"
        decimals = 3 if largest < 10 else 2 if largest < 100 else 1 if largest < 1000 else 0
        return f"{cell:,.{decimals}f}"
    return str(cell)


def peak_memory_bytes() -> int:
    """The most main memory this process has held at once, in bytes."""
    try:
        # Not ru_maxrss on Linux: that survives exec, so a small child shows its parent's peak.
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_device_bytes() -> int | None:
    """The most memory held at once on any one local accelerator, in bytes, or None if untold.

    The CPU backend tells nothing; there `peak_memory_bytes` is the answer.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use")
             for device in jax.local_devices()]  # fmt: skip
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None
