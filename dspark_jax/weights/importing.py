"""Drafters out of folders of any layout: the inverse of export.py.

`drafter_file.py` reads what the config says; here the tensors are matched with it by name, whatever
file they are in, and every one that is missing, unknown or misshapen is an error. Nothing is cast.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.core.trees import named
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.weights import names
from dspark_jax.weights.compare import empty_drafter
from dspark_jax.weights.drafter_file import DrafterFile
from dspark_jax.weights.fingerprint import Fingerprint
from dspark_jax.weights.layouts import format_of, read_config
from dspark_jax.weights.names import EMBED, LM_HEAD
from dspark_jax.weights.safetensors import TensorFiles, read_json
from dspark_jax.weights.vocab_tables import TABLES, head_rows, ids_of

RECORD = "dspark_jax.json"
_FLOATS = ("F16", "BF16", "F32")
# The target's own tensors, which some writers put into the drafter's file as well.
_BORROWED = {EMBED: "embedding", LM_HEAD: "LM head"}


@dataclasses.dataclass(frozen=True)
class Record:
    """dspark_jax.json, where there is one."""

    step: int
    recipe: dict[str, Any]
    fingerprint: Fingerprint


@dataclasses.dataclass(frozen=True)
class ImportedDrafter:
    """What a folder says of its drafter, and the arrays."""

    directory: Path
    layout: str  # of LAYOUTS; "orbax" for a run's checkpoint
    shape: DrafterShape  # target_layers is 0 where the files do not tell
    arrays: dict[str, np.ndarray]  # in their stored dtypes, by our names
    verifier: str  # the target the files name; "" if none
    borrowed: dict[str, str]  # the target's tensors that are in the files too -> what they are
    tied: bool  # the files say that their LM head is their embedding
    num_anchors: int  # per row, that it was trained with; 0 if unknown
    record: Record | None
    notes: tuple[str, ...]  # what was filled in, for the user

    @property
    def step(self) -> int:
        """Updates made, as far as is known."""
        return self.record.step if self.record else 0

    @property
    def described(self) -> str:
        """Where it is, for the user."""
        if self.layout == "orbax":
            return f"step {self.step} of {self.directory}"
        return f"{self.directory} ({self.layout})"

    @property
    def compute_dtype(self) -> str:
        """bfloat16 where no tensor has more bits, else float32."""
        floats = [x.dtype.itemsize for x in self.arrays.values() if x.dtype.kind not in "biu"]
        return "bfloat16" if max(floats) == 2 else "float32"


def read_folder(directory: Path) -> ImportedDrafter:
    """Reads a drafter. Needs a current mesh, as all shapes do; the arrays stay on the host.

    Raises:
      UserError: damaged files; fields absent or in dispute; a drafter this package cannot express;
        tensors missing, unknown or of the wrong shape. By name.
    """
    file = DrafterFile(directory / "config.json")
    layout, algorithm, shape = read_config(file)
    files = TensorFiles(directory)
    stored = _by_plain_name(files)
    borrowed = {stored.pop(name): what for name, what in _BORROWED.items() if name in stored}
    tables = {name: files.read(stored.pop(name)) for name in TABLES if name in stored}
    arrays, notes = _arrays(files, stored, shape, format_of(layout, algorithm, file.path).tensors)
    arrays |= _draft_ids(directory, tables, shape)
    return ImportedDrafter(
        directory=directory,
        layout=layout,
        shape=shape,
        arrays=arrays,
        verifier=str(file.section("speculators_config", "verifier").get("name_or_path") or ""),
        borrowed=borrowed,
        # Of the flat layout only: in the other it is the target's own, and means nothing.
        tied=layout == "deepspec"
        and file.value.get("tie_word_embeddings") is True
        and "LM head" not in borrowed.values(),
        num_anchors=file.find("num_anchors", int) or 0,
        record=_read_record(directory / RECORD),
        notes=notes,
    )


def check_borrowed(drafter: ImportedDrafter, target_directory: Path) -> None:
    """Embedding or LM head in the drafter's files must be the target's: ours has none of its own.

    Raises:
      UserError: naming the one that differs.
    """
    if name := own_table(drafter, target_directory):
        raise UserError(
            f"{drafter.directory}: {name} of {target_directory}; drafters here share the target's, "
            "one with its own cannot be imported"
        )


def own_table(drafter: ImportedDrafter, target_directory: Path) -> str | None:
    """What the drafter's files hold in place of a table of the target, if it is another one.

    A copy in a shorter dtype counts as the same. In words: "'lm_head.weight' is not the LM head".
    """
    if not drafter.borrowed and not drafter.tied:
        return None
    own, target = TensorFiles(drafter.directory), TensorFiles(target_directory)
    ids = drafter.arrays.get(names.DRAFT_IDS)
    embed = target.slice(f"model.{EMBED}")
    head = target.slice(LM_HEAD) if LM_HEAD in target.files else embed  # a tied one
    if drafter.tied and not _same_table(head, embed):
        return "the embedding, which is its LM head (tie_word_embeddings=True), is not the LM head"
    for name, what in drafter.borrowed.items():
        if what == "LM head" and ids is not None:
            same = _equal_rounded(own.read(name), head_rows(target_directory, ids))
        else:
            same = _same_table(own.slice(name), embed if what == "embedding" else head)
        if not same:
            return f"{name!r} is not the {what}"
    return None


def _same_table(a: Any, b: Any, rows: int = 4096) -> bool:
    shape = a.get_shape()
    if shape != b.get_shape():
        return False
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        if not _equal_rounded(*(np.asarray(table[start:stop]) for table in (a, b))):
            return False
    return True


def _equal_rounded(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same in the shorter of their dtypes."""
    shorter = min((a.dtype, b.dtype), key=lambda dtype: dtype.itemsize)
    left, right = (x.astype(shorter).astype(np.float32) for x in (a, b))
    return np.array_equal(left, right)


def _by_plain_name(files: TensorFiles) -> dict[str, str]:
    """{name without `model.`, which means nothing: name in the files}."""
    stored: dict[str, str] = {}
    for name in files.names():
        plain = name.removeprefix("model.")
        if plain in stored:
            raise UserError(f"{files.directory}: {stored[plain]!r} and {name!r} are one tensor")
        stored[plain] = name
    return stored


def _arrays(
    files: TensorFiles, stored: dict[str, str], shape: DrafterShape, table: tuple[names.Rule, ...]
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """Our arrays as they are stored, and notes."""
    wanted = {}
    for ours, leaf in named(empty_drafter(shape)).items():
        if ours == names.DRAFT_IDS:
            continue
        theirs, rows = names.to_file(table, ours)
        wanted[theirs] = (ours, leaf.shape, names.file_shape(leaf.shape, rows))
    notes, missing = (), [name for name in wanted if name not in stored]
    if missing == ["confidence_head.proj.bias"]:  # left out by some writers, and then 0
        missing, notes = [], (f"{missing[0]} is not in the files: 0",)
    unknown = [name for plain, name in stored.items() if plain not in wanted]
    if missing or unknown:
        problems = [f"missing {_listed(missing)}"] if missing else []
        problems += [f"unknown {_listed(unknown)}"] if unknown else []
        raise UserError(
            f"{files.directory}: the tensors are not those of the drafter in config.json: "
            f"{'; '.join(problems)}"
        )
    arrays: dict[str, np.ndarray] = {}
    for theirs, (ours, our_shape, file_shape) in wanted.items():
        if theirs in stored:
            lazy = files.slice(stored[theirs])
            _check_tensor(files, theirs, lazy, file_shape, shape)
            arrays[ours] = np.ascontiguousarray(lazy[...]).reshape(our_shape)
    if notes:
        arrays["confidence.bias"] = np.zeros(1, arrays["confidence.weight"].dtype)
    return arrays, notes


def _check_tensor(
    files: TensorFiles, name: str, lazy: Any, wanted: tuple[int, ...], shape: DrafterShape
) -> None:
    found = tuple(lazy.get_shape())
    if name == "fc.weight" and found != wanted and found[:1] == wanted[:1]:
        raise UserError(  # never cut to fit: the config or the weights are of another drafter
            f"{files.directory}: fc.weight {list(found)} takes {found[1] / shape.hidden_size:g} "
            f"taps, config.json lists {len(shape.config.target_layer_ids)}"
        )
    if found != wanted:
        raise UserError(
            f"{files.directory}: tensor {name!r} has shape {list(found)}, config.json implies "
            f"{list(wanted)}"
        )
    if lazy.get_dtype() not in _FLOATS:
        raise UserError(
            f"{files.directory}: tensor {name!r} is {lazy.get_dtype()}, not one of "
            f"{', '.join(_FLOATS)}: quantised drafters cannot be imported, and nothing is cast"
        )


def _draft_ids(
    directory: Path, tables: dict[str, np.ndarray], shape: DrafterShape
) -> dict[str, np.ndarray]:
    """{"draft_ids": i32[V_d]} of a pruned vocabulary; tables of a whole one must say nothing."""
    if shape.pruned and "d2t" not in tables:
        raise UserError(
            f"{directory}: draft_vocab_size={shape.draft_vocab} of vocab_size={shape.vocab_size}, "
            "but the files have no d2t: which tokens these are is never guessed"
        )
    if shape.pruned:
        found = tables["d2t"], tables.get("t2d")
        ids = ids_of(directory, *found, shape.draft_vocab, shape.vocab_size)
        return {names.DRAFT_IDS: ids}
    for name, table in tables.items():
        if table.shape != (shape.vocab_size,) or (
            table.any() if name == "d2t" else not table.all()
        ):
            raise UserError(
                f"{directory}: {name} maps a pruned draft vocabulary, but draft_vocab_size in "
                f"config.json is the whole one ({shape.vocab_size})"
            )
    return {}


def _listed(items: list[str], most: int = 8) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(sorted(items)[:most]) + more


def _read_record(path: Path) -> Record | None:
    if not path.exists():
        return None
    value = read_json(path)
    try:
        return Record(value["step"], value["config"], Fingerprint(**value["target"]))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({error}); delete it to import without it") from None
