"""What a test and a peer's script hand to each other: one folder, the same two files both ways.

    request.json, request.npz    from the test: plain values, arrays by name
    answer.json, answer.npz      from the script

Needs numpy and nothing else, so that it runs in every environment.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

Message = tuple[dict[str, Any], dict[str, np.ndarray]]


def write(folder: Path, name: str, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Writes one side's message."""
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", **arrays)
    (folder / f"{name}.json").write_text(json.dumps(values))


def read(folder: Path, name: str) -> Message:
    """Reads one side's message."""
    with np.load(folder / f"{name}.npz", allow_pickle=False) as file:
        arrays = dict(file)
    return json.loads((folder / f"{name}.json").read_text()), arrays


def serve(answer) -> None:
    """The main program of a script: `answer(values, arrays, folder)` returns the other side's."""
    folder = Path(sys.argv[1])
    values, arrays = answer(*read(folder, "request"), folder)
    write(folder, "answer", values, arrays)
