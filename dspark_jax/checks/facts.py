"""What a drafter's folder and its target say, right or wrong: the facts that preflight judges.

The readers of an import (drafter_file.py, importing.py) stop at the first problem. Here the same
rules are asked field by field, and what they refuse becomes a finding, so that one run names all.
Only config files, headers and a few rows are read.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.models.layers import RopeConfig
from dspark_jax.weights.drafter_file import DrafterFile
from dspark_jax.weights.fingerprint import Fingerprint
from dspark_jax.weights.importing import RECORD
from dspark_jax.weights.safetensors import TensorFiles, read_json
from dspark_jax.weights.vocab_tables import TABLES

REFUSE, WARN = "refuse", "warn"

# Everything that is read of a drafter's config.json, wherever its writer put it.
FIELDS = {
    "aux_hidden_state_layer_ids": list,
    "eagle_aux_hidden_state_layer_ids": list,
    "target_layer_ids": list,
    "num_target_layers": int,
    "target_hidden_size": int,
    "block_size": int,
    "mask_token_id": int,
    "sample_from_anchor": bool,
    "markov_rank": int,
    "markov_head_type": str,
    "enable_confidence_head": bool,
    "confidence_head_with_markov": bool,
    "vocab_size": int,
    "draft_vocab_size": int,
    "hidden_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "intermediate_size": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
    "layer_types": list,
    "sliding_window": int,
    "use_sliding_window": bool,
    "sliding_window_non_causal": bool,
    "is_causal": bool,
    "causal": bool,
    # EAGLE-3.
    "ttt_length": int,
    "norm_before_residual": bool,
    "norm_before_fc": bool,
    "fc_norm": bool,
    "norm_output": bool,
    "embed_requires_grad": bool,
}
# What no draft layer can be built without.
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
# The 0-based layer i under each name: files count layers, or layers that have run.
TAP_OFFSETS = {
    "aux_hidden_state_layer_ids": 1,
    "eagle_aux_hidden_state_layer_ids": 1,
    "target_layer_ids": 0,
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong (`severity` refuse) or may be (warn)."""

    severity: str
    what: str
    where: str
    why: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The header of one tensor."""

    stored: str  # its name in the file
    dtype: str  # as safetensors spells it: F32, BF16, ...
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class DrafterFacts:
    """What a drafter's folder says.

    Attributes:
      layout: speculators, or deepspec for a flat config.
      kind: dspark, dflash or eagle3; "" for anything else.
      said: the value of each of FIELDS; None if absent or unusable.
      tensors: headers by name without the prefix `model.`, which means nothing.
      tables: d2t and t2d, where there are.
      files: for reading rows; None without usable weights.
      record: dspark_jax.json as it is, or None.
      problems: what could not be read, and the fields in dispute.
    """

    file: DrafterFile
    layout: str
    kind: str
    said: dict[str, Any]
    tensors: dict[str, Tensor]
    tables: dict[str, np.ndarray]
    files: TensorFiles | None
    record: dict[str, Any] | None
    problems: tuple[Finding, ...]

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self.file.path.parent

    @property
    def anchor_first(self) -> bool | None:
        """sample_from_anchor as every reader of this layout takes it; None where they differ."""
        said = self.said["sample_from_anchor"]
        if said is None and self.layout == "deepspec":
            return self.kind == "dspark"  # such files have no such field
        return said

    @property
    def proposals(self) -> int | None:
        """Tokens that a block proposes."""
        block, anchor = self.said["block_size"], self.anchor_first
        return None if block is None or anchor is None else block if anchor else block - 1

    @property
    def drafted(self) -> int | None:
        """V_d, the tokens it can propose."""
        return self.said["draft_vocab_size"] or self.said["vocab_size"]

    @property
    def head(self) -> str | None:
        """none, vanilla, gated or rnn, or what else the config calls it; None if not said."""
        if not self.said["markov_rank"]:
            return "none" if self.said["markov_rank"] == 0 or self.kind != "dspark" else None
        return self.said["markov_head_type"]

    @property
    def taps(self) -> dict[str, list[int]]:
        """0-based layer ids by the name they stand under."""
        found = {}
        for name, offset in TAP_OFFSETS.items():
            ids = self.said[name]
            if ids and all(type(tap) is int for tap in ids):
                found[name] = [tap - offset for tap in ids]
        return found

    @property
    def family(self) -> Any:
        """The model_type of its layers."""
        return self.file.sections.get("transformer_layer_config.", self.file.value).get(
            "model_type", "qwen3"
        )

    @property
    def sliding(self) -> list[bool]:
        """Which of the layers have a sliding window, by layer_types."""
        count = self.said["num_hidden_layers"] or 0
        kinds = self.said["layer_types"] or ["full_attention"] * count
        return [kind == "sliding_attention" for kind in kinds]


@dataclasses.dataclass(frozen=True, eq=False)
class TargetFacts:
    """What a target's folder says.

    Attributes:
      config: of the text model.
      roles: {id: "eos" | "pad" | "bos"}.
      tokens: {id: text} of the tokens added to the vocabulary of the tokenizer.
      token_count: ids that the tokenizer can produce; 0 if unknown.
      template: the chat template; "" if none.
      embed_rows: rows of the embedding.
    """

    directory: Path
    name: str
    config: dict[str, Any]
    rope: RopeConfig | None
    roles: dict[int, str]
    tokens: dict[int, str]
    token_count: int
    template: str
    embed_rows: int
    embed_dtype: str
    files: TensorFiles | None
    fingerprint: Fingerprint | None
    problems: tuple[Finding, ...]

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.config["num_hidden_layers"]


@dataclasses.dataclass(frozen=True, eq=False)
class DataFacts:
    """What a prepared data set says: made by data/, judged in preflight.py.

    Attributes:
      counts: i64[V], how often each token occurs, prompts included.
      opened: documents that begin as the chat template begins a conversation; None if unknown.
    """

    directory: Path
    documents: int
    counts: np.ndarray
    opened: int | None
    made_by: Fingerprint


def read_drafter(folder: Path) -> DrafterFacts:
    """The facts of a drafter.

    Raises:
      UserError: no folder with a config.json that is a JSON object.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"drafter {folder}: no config.json there; give the folder of an export")
    file = DrafterFile(path)
    if {"fingerprint", "target_config"} <= set(file.value):
        raise UserError(f"drafter {folder}: a run, no export; run dspark_jax.convert first")
    said, problems = {}, []
    for name, kind in FIELDS.items():
        try:
            said[name] = file.find(name, kind)
        except UserError as error:
            said[name] = None
            problems.append(_unusable(f"config.json: {name}", error, path))
    files, tensors, tables, found = _read_tensors(folder)
    record = None
    if (folder / RECORD).is_file():
        try:
            record = read_json(folder / RECORD)
        except UserError as error:
            problems.append(_unusable(RECORD, error, folder / RECORD))
    return DrafterFacts(
        file=file,
        layout="speculators" if _is_speculators(file.value) else "deepspec",
        kind=_kind(file.value),
        said=said,
        tensors=tensors,
        tables=tables,
        files=files,
        record=record,
        problems=(*problems, *found),
    )


def sample_rows(files: TensorFiles, name: str, rows: np.ndarray) -> np.ndarray:
    """A few rows of a table."""
    table = files.slice(name)
    return np.concatenate([np.asarray(table[int(row) : int(row) + 1]) for row in rows])


def _read_tensors(
    folder: Path,
) -> tuple[TensorFiles | None, dict[str, Tensor], dict[str, np.ndarray], list[Finding]]:
    tensors: dict[str, Tensor] = {}
    tables: dict[str, np.ndarray] = {}
    problems: dict[str, Finding] = {}  # by message: a shard that is missing hides many tensors
    try:
        files = TensorFiles(folder)
    except UserError as error:
        return None, {}, {}, [_unusable("weights", error, folder)]
    for name in files.names():
        plain = name.removeprefix("model.")
        try:
            lazy = files.slice(name)
            if plain in tensors:
                twice = f"{tensors[plain].stored!r} and {name!r} are one tensor"
                raise UserError(twice)
            tensors[plain] = Tensor(name, lazy.get_dtype(), tuple(lazy.get_shape()))
            if plain in TABLES:
                tables[plain] = files.read(name)
        except UserError as error:
            problems.setdefault(str(error), _unusable("weights", error, folder))
    return files, tensors, tables, list(problems.values())


def _is_speculators(value: dict[str, Any]) -> bool:
    marks = ("speculators_model_type", "speculators_config", "transformer_layer_config")
    return any(mark in value for mark in marks)


def _kind(value: dict[str, Any]) -> str:
    said = value.get("speculators_model_type")
    if said is not None:
        return said if said in ("dspark", "dflash", "eagle3") else ""
    classes = value.get("architectures") or []
    if any(str(name).endswith("Eagle3Model") for name in classes):
        return "eagle3"
    return "dspark" if "DSpark" in str(classes) else "dflash" if "DFlash" in str(classes) else ""


def _unusable(where: str, error: UserError, path: Path) -> Finding:
    why = str(error).removeprefix(f"{path}: ")
    return Finding(REFUSE, "unreadable", where, why, "repair the file or export again")
