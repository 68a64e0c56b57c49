"""Prompts from local files, hub data sets or the built-in generator, as `Conversation`s.

Assistant turns found in the input are dropped: the target writes every answer itself.
"""

import glob
import json
import os
import random
import re
from collections.abc import Sequence
from typing import Any

import pyarrow
import pyarrow.parquet

from dspark_jax.core.errors import UserError
from dspark_jax.data.conversation import Conversation, Message
from dspark_jax.data.generator import generate_prompts

# The columns that may hold a prompt; of several, the first that is not null counts.
COLUMNS = ("conversations", "messages", "prompt", "turns")
SUFFIXES = (".jsonl", ".json", ".parquet")
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def load_prompts(
    spec: str, *, split: str = "train", limit: int | None = None, seed: int = 0
) -> list[Conversation]:
    """The conversations that `spec` names, in order.

    Args:
        spec: one of these, or several separated by commas: a file (.jsonl, .json, .parquet), a
            folder of such files, a glob, a hub data set "org/name" or "org/name:config", or
            "generator:N" for N prompts of the built-in generator, "generator:N:K" for a small
            domain with K fillings for each blank.
        split: of hub data sets, and of the generator ("train" or "heldout"); files have none.
        limit: at most this many, drawn with `seed` and kept in order; None for all.
        seed: of the draw and of the generator.

    Ids are the file stem or data set name and the row, counted from 1 (in .jsonl the line); a name
    that occurs again gets "~2" and so on.

    Raises:
        UserError: nothing is found, or a row that is used holds no prompt: it names file and row.
    """
    if limit is not None and limit < 1:
        raise UserError(f"prompts: a limit of {limit} leaves nothing; use 1 or more, or no limit")
    tables = _open_all(spec, split, seed)
    chosen = range(sum(len(table) for table in tables))
    if limit is not None and limit < len(chosen):
        chosen = sorted(random.Random(f"{seed}/limit").sample(chosen, limit))
    conversations, first, position = [], 0, 0
    for table in tables:
        start = position
        while position < len(chosen) and chosen[position] < first + len(table):
            position += 1
        conversations += table.conversations([i - first for i in chosen[start:position]])
        first += len(table)
    return conversations


class _Generated:
    """Prompts of the generator, behind the two methods of `_Rows`."""

    def __init__(self, prompts: list[Conversation]):
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def conversations(self, indices: Sequence[int]) -> list[Conversation]:
        return [self._prompts[i] for i in indices]


class _Rows:
    """The rows of one file or hub data set; only those asked for are looked at."""

    def __init__(
        self,
        where: str,
        name: str,
        rows: Sequence[Any] | pyarrow.Table,
        numbers: Sequence[int] | None = None,
    ):
        self._where = where  # for messages
        self._name = name  # source, and first part of the ids
        self._rows = rows
        self._numbers = range(1, len(rows) + 1) if numbers is None else numbers
        self.id_prefix = name

    def __len__(self) -> int:
        return len(self._rows)

    def conversations(self, indices: Sequence[int]) -> list[Conversation]:
        if isinstance(self._rows, pyarrow.Table):
            rows = self._rows.take(pyarrow.array(indices, pyarrow.int64())).to_pylist()
        else:
            rows = [self._rows[i] for i in indices]
        found = []
        for index, row in zip(indices, rows, strict=True):
            number = self._numbers[index]
            where = f"{self._where}, row {number}"
            messages = _messages(row, where)
            source = row.get("source")
            source = source if isinstance(source, str) and source else self._name
            found.append(Conversation(f"{self.id_prefix}-{number}", source, messages))
        return found


def _open_all(spec: str, split: str, seed: int) -> list[_Rows | _Generated]:
    """One table for every file, data set or generator named, ids made distinct."""
    tables, names, opened = [], {}, set()
    for part in (part.strip() for part in spec.split(",")):
        if part.startswith("generator:"):
            count, fillings = _counts(part)
            found = [_Generated(generate_prompts(count, seed, split, fillings))]
            keys = ["generator"]
        elif paths := _paths(part):
            found = [_open_file(path) for path in paths]
            keys = [os.path.realpath(path) for path in paths]
        else:
            found = [_open_hub(part, split)]
            keys = [part]
        for key, table in zip(keys, found, strict=True):
            if key in opened:
                raise UserError(f"prompts: '{spec}' names {key} twice; name it once")
            opened.add(key)
            if isinstance(table, _Rows):
                times = names[table.id_prefix] = names.get(table.id_prefix, 0) + 1
                table.id_prefix += f"~{times}" if times > 1 else ""
        tables += found
    return tables


def _counts(part: str) -> tuple[int, int]:
    """How many prompts, and from how many fillings of each blank (0 = all)."""
    number, colon, fillings = part.removeprefix("generator:").partition(":")
    if not number.isdecimal() or int(number) < 1:
        raise UserError(f"prompts: '{part}' has no count; write generator:1000 for 1000 prompts")
    if colon and (not fillings.isdecimal() or int(fillings) < 2):
        raise UserError(
            f"prompts: '{part}': write generator:1000:4 for 1000 prompts of one small domain, with "
            "4 (at least 2) fillings for each blank"
        )
    return int(number), int(fillings) if colon else 0


def _paths(part: str) -> list[str]:
    """The files of a path, folder or glob, sorted; empty for what can only be a hub name."""
    path = os.path.expanduser(part)
    if os.path.isdir(path):
        found = sorted(f for f in os.listdir(path) if f.endswith(SUFFIXES))
        if not found:
            raise UserError(f"prompts: folder {part} holds no {', '.join(SUFFIXES)} file")
        return [os.path.join(path, f) for f in found]
    if os.path.exists(path):
        return [path]
    if glob.has_magic(path):
        found = sorted(f for f in glob.glob(path, recursive=True) if f.endswith(SUFFIXES))
        if not found:
            raise UserError(f"prompts: no {', '.join(SUFFIXES)} file matches {part}")
        return found
    if part.endswith(SUFFIXES) or not _HUB_NAME.fullmatch(part):
        raise UserError(
            f"prompts: '{part}' is no existing file or folder; give a path, a hub data set "
            f"'org/name[:config]', or 'generator:N'"
        )
    return []


def _open_file(path: str) -> _Rows:
    if not path.endswith(SUFFIXES):
        raise UserError(f"prompts: {path} is none of {', '.join(SUFFIXES)}; convert it first")
    name = os.path.splitext(os.path.basename(path))[0]
    if path.endswith(".parquet"):
        try:
            rows = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise UserError(f"prompts: {path} is not a readable parquet file: {error}") from error
        numbers = None
    else:
        # Read with json, not with the builder of `datasets`: it needs one type per column and
        # cannot say which row is at fault.
        try:
            with open(path, encoding="utf-8-sig") as file:
                numbers, rows = _json_rows(file.read(), path)
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"prompts: {path} cannot be read: {error}") from error
    if len(rows) == 0:
        raise UserError(f"prompts: {path} holds no rows")
    return _Rows(path, name, rows, numbers)


def _json_rows(text: str, path: str) -> tuple[Sequence[int], list[Any]]:
    """Numbers and rows of a JSON array, or of one JSON value a line; blank lines are skipped."""
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"prompts: {path} is not valid JSON: {error}") from error
        return range(1, len(rows) + 1), rows
    numbers, rows = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                where = f"{path}, row {number}"
                raise UserError(f"prompts: {where} is not valid JSON: {error}") from error
            numbers.append(number)
    return numbers, rows


def _open_hub(part: str, split: str) -> _Rows:
    import datasets  # a second to import, and files do not need it

    name, _, config = part.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"prompts: data set '{part}', split '{split}': {reason}") from error
    table = _Rows(f"data set {part}, split {split}", name, rows)
    table.id_prefix = f"{name.split('/')[-1]}-{split}"
    return table


def _messages(row: Any, where: str) -> tuple[Message, ...]:
    """The system and user messages of a row."""
    if not isinstance(row, dict):
        raise UserError(f"prompts: {where} is {_kind(row)}, not an object with a prompt")
    column = next((c for c in COLUMNS if row.get(c) is not None), None)
    if column is None:
        raise UserError(
            f"prompts: {where} has none of the columns {', '.join(COLUMNS)}; "
            f"found: {', '.join(sorted(map(str, row))) or 'nothing'}"
        )
    value, where = row[column], f"{where}, column '{column}'"
    if column == "prompt" and isinstance(value, str):
        value = [value]
        turns = [Message("user", text) for text in value]
    elif not isinstance(value, list):
        wanted = "a string or a list of messages" if column == "prompt" else "a list"
        raise UserError(f"prompts: {where} is {_kind(value)}, not {wanted}")
    elif column == "turns":
        turns = [Message("user", text) for text in value]
    else:
        turns = [_message(entry, f"{where}, message {i + 1}") for i, entry in enumerate(value)]
    kept = tuple(turn for turn in turns if turn.role != "assistant")
    for turn in kept:
        _check_content(turn, where)
    if not any(turn.role == "user" for turn in kept):
        raise UserError(f"prompts: {where} holds no user message")
    if any(turn.role == "system" for turn in kept[1:]):
        raise UserError(f"prompts: {where} has a system message that is not the first message")
    return kept


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise UserError(f"prompts: {where} is {_kind(entry)}, not an object with role and content")
    role = entry.get("role") if entry.get("role") is not None else entry.get("from")
    content = entry.get("content") if entry.get("content") is not None else entry.get("value")
    if not isinstance(role, str) or role not in _ROLES:
        raise UserError(f"prompts: {where} has the role {role!r}; known: {', '.join(_ROLES)}")
    return Message(_ROLES[role], content)


def _check_content(turn: Message, where: str) -> None:
    if seen := _not_text(turn.content):
        raise UserError(
            f"prompts: {where}: {turn.role} message holds {seen!r}; the commands take text only"
        )
    if not isinstance(turn.content, str):
        raise UserError(f"prompts: {where}: {turn.role} text is {_kind(turn.content)}, not text")
    if turn.role == "user" and not turn.content.strip():
        raise UserError(f"prompts: {where} has an empty user message")
    try:
        turn.content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"prompts: {where} holds a lone surrogate, not valid text") from error


def _not_text(content: Any) -> str:
    """The kind of the first part that is no text, in messages made of parts ("" if none)."""
    parts = content if isinstance(content, list) else []
    kinds = (str(part.get("type") or "text") for part in parts if isinstance(part, dict))
    return next((kind for kind in kinds if kind != "text"), "")


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
