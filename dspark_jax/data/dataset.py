"""The prepared data set on disk: token ids and loss mask per row, in Arrow, with its target."""

import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dspark_jax.checks.runs import tell
from dspark_jax.checks.target import check_template
from dspark_jax.core.errors import UserError
from dspark_jax.data.chat import Turn, assemble
from dspark_jax.data.conversation import Conversation
from dspark_jax.weights.fingerprint import Fingerprint, check_same_target
from dspark_jax.weights.safetensors import read_json

FOLDER = "dataset"


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One document to train on."""

    id: str
    source: str
    ids: np.ndarray  # i32[S]
    loss_mask: np.ndarray  # bool[S], true on the tokens the target generated

    @classmethod
    def of(cls, conversation: Conversation, sample: int, turn: int, turns: Sequence[Turn]) -> "Row":
        """A row from answered turns that continue one another."""
        name = f"{conversation.id}#{sample}.{turn}"
        tokens = assemble(turns, row=name)
        return cls(name, conversation.source, tokens.ids, tokens.loss_mask)


def save_dataset(
    directory: Path, rows: Sequence[Row], fingerprint: Fingerprint, dropped: int
) -> Path:
    """Writes the rows as an Arrow data set into `directory`/dataset, all or nothing.

    Args:
      dropped: prompts left out because they were too long, for the record.
    """
    import datasets

    datasets.disable_progress_bars()
    table = datasets.Dataset.from_dict(
        {
            "id": [row.id for row in rows],
            "source": [row.source for row in rows],
            "ids": [row.ids for row in rows],
            "loss_mask": [row.loss_mask for row in rows],
        },
        features=datasets.Features(
            {
                "id": datasets.Value("string"),
                "source": datasets.Value("string"),
                "ids": datasets.List(datasets.Value("int32")),
                "loss_mask": datasets.List(datasets.Value("bool")),
            }
        ),
    )
    final = directory / FOLDER
    temporary = directory / f".{FOLDER}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    table.save_to_disk(temporary)
    record = {
        "target": dataclasses.asdict(fingerprint),
        "rows": len(rows),
        "tokens": int(sum(len(row.ids) for row in rows)),
        "supervised_tokens": int(sum(row.loss_mask.sum() for row in rows)),
        "dropped_prompts": dropped,
    }
    (temporary / "dspark_jax.json").write_text(json.dumps(record, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    return final


def load_dataset(directory: Path, fingerprint: Fingerprint | None = None) -> list[Row]:
    """The rows of a prepared data set.

    Args:
      fingerprint: of the target in use; None to skip the check.

    Raises:
      UserError: nothing prepared here, damaged, or made by another target.
    """
    import datasets

    folder = directory / FOLDER
    if not folder.is_dir():
        raise UserError(
            f"{directory}: no prepared data; run python -m dspark_jax.prepare with this config"
        )
    record = read_json(folder / "dspark_jax.json")
    try:
        made_by, count = Fingerprint(**record["target"]), record["rows"]
        table = datasets.load_from_disk(folder).with_format("numpy")
        rows = [
            Row(
                row["id"], row["source"], row["ids"].astype(np.int32), row["loss_mask"].astype(bool)
            )
            for row in table
        ]
        if len(rows) != count:
            raise ValueError(f"{len(rows)} rows of {count}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder}: damaged ({type(error).__name__}: {' '.join(str(error).split())}); delete "
            "it and run prepare again"
        ) from None
    if fingerprint is not None:
        check_same_target(made_by, fingerprint, f"the data in {directory}")
        tell(list(check_template(made_by, fingerprint, str(directory))), "")
    return rows
