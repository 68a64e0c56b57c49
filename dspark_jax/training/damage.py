"""Whether a saved checkpoint can be read, found out before Orbax tries."""

import json
from pathlib import Path

import tensorstore


def unreadable(folder: Path, items: list[str]) -> str | None:
    """Why one of the items of a checkpoint cannot be read, or None."""
    try:
        for item in items:
            check_readable(folder / item)
    except (OSError, ValueError) as error:
        return reason(error)
    return None


def check_readable(folder: Path) -> None:
    """Reads everything that one saved item consists of.

    Orbax tells of damage too, but with pages of tracebacks of its own on stderr.

    Raises:
      OSError, ValueError: something is missing, cut short or no JSON.
    """
    for path in (folder / "_METADATA", *folder.glob("array_metadatas/*")):
        json.loads(path.read_text())
    base = {"driver": "file", "path": f"{folder}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = store.list().result()
    if not keys:
        raise ValueError("it holds no arrays")
    for key in keys:
        store.read(key).result()


def reason(error: Exception) -> str:
    """An error in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
