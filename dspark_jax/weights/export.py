"""The export, top to bottom: a drafter in the speculators format, which `vllm serve DIR` reads.

    config.json         the drafter's shape and flags, and the target it belongs to
    model.safetensors   exactly the arrays of the checkpoint; embedding and LM head are the target's
                        (of a pruned vocabulary: its rows of that head, and the tables d2t and t2d)
    dspark_jax.json     our own record: step, recipe, fingerprint of the target, versions

A drafter with Markov or confidence head is written as "dspark". Without either it is a DFlash
drafter: written as "dflash" in the fill-in layout, and as "dspark" of rank 0 when it is
anchor-first, because "dflash" means fill-in to engines (vLLM's GPU runner refuses the other, its
CPU runner overlooks the flag). `importing.py` is the inverse, and every export goes through it
before it appears.
"""

import dataclasses
import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

import dspark_jax
from dspark_jax.core.config import DrafterConfig, check_choice
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import write_json
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.weights import names
from dspark_jax.weights.compare import (
    ROPE_FIELDS,
    Probe,
    build_drafter,
    canonical,
    largest_difference,
    sees_markov,
    shape_differences,
)
from dspark_jax.weights.fingerprint import Fingerprint
from dspark_jax.weights.importing import RECORD, read_speculators
from dspark_jax.weights.safetensors import TensorFiles
from dspark_jax.weights.vocab_tables import tables_of

SPECULATORS_VERSION = "0.9.0"  # of the format
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# What a folder may hold that --force replaces: nothing but a former export.
EXPORT_FILES = ("config.json", "model.safetensors", RECORD, "calibration.json")


@dataclasses.dataclass(frozen=True)
class Verifier:
    """The target as engines are told of it: a hub id or an absolute folder, and its classes."""

    name_or_path: str
    architectures: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where the weights come from; kept in dspark_jax.json."""

    step: int
    recipe: dict[str, Any]  # the RunConfig as plain values
    fingerprint: Fingerprint  # of the target


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written and what reading it back showed."""

    directory: Path
    kind: str  # dspark or dflash
    tensors: int
    parameters: int
    bytes: int  # of model.safetensors
    difference: float  # largest, in logits, between the files and the checkpoint; float32: 0


def export_speculators(
    arrays: dict[str, np.ndarray],
    shape: DrafterShape,
    verifier: Verifier,
    directory: Path,
    origin: Origin,
    *,
    head: np.ndarray | None = None,
    dtype: str = "float32",
    replace: bool = False,
    allow_unservable: bool = False,
) -> Exported:
    """Writes a drafter as a folder that vLLM serves, and reads it back. On the current mesh.

    The folder appears in one step, after the files were found to hold every array bit for bit and
    to give the checkpoint's logits and confidence; a failed export leaves nothing.

    Args:
      arrays: float32 arrays of the drafter by our names.
      directory: the new folder; an empty one may exist.
      head: [V_d, D] the target's LM head at the drafter's ids, if its vocabulary is pruned.
      dtype: of the tensors in the file; bfloat16 rounds by value.
      replace: take the place of a former export.
      allow_unservable: also write drafters that vLLM cannot run.

    Raises:
      UserError: vLLM cannot run it, arrays that do not fit, a place that is taken, a full disk.
    """
    # 1. Can it be written, here and at all?
    check_choice("dtype", dtype, tuple(DTYPES))
    if not allow_unservable and (reason := unservable(shape.config)):
        raise UserError(f"{reason}; --force writes it all the same")
    original = build_drafter(canonical(shape), arrays)  # everything is there, and nothing else
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise UserError(f"{name} holds NaN or infinity: export another step")
    directory = directory.expanduser().resolve()
    _check_place(directory, replace)

    work = None
    try:
        # 2. Write beside the place.
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
        fresh = work / "fresh"  # mkdtemp's own folder would be closed to other users
        fresh.mkdir()
        tensors = file_tensors(arrays, dtype) | _vocabulary(arrays, shape, head, dtype)
        write_json(fresh / "config.json", speculators_config(shape, verifier, dtype))
        write_json(fresh / RECORD, _record(origin, dtype))
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        # The writer makes a file that only its owner can read.
        shutil.copymode(fresh / "config.json", fresh / "model.safetensors")

        # 3. Read it back, as a drafter.
        found = read_speculators(fresh)
        if changed := shape_differences(shape, found.shape):
            name, ours, theirs = changed[0]
            raise UserError(f"read back, {name} is {theirs!r} instead of {ours!r}: not exported")
        stored = {name: _read_as(_stored(array, dtype)) for name, array in arrays.items()}
        for name, array in stored.items():  # a probe sees only a few rows of the Markov tables
            if not np.array_equal(array, found.arrays.get(name)):
                raise UserError(f"read back, {name} differs from the checkpoint: not exported")
        if shape.pruned and not np.array_equal(
            TensorFiles(fresh).read("lm_head.weight"), _stored(head, dtype)
        ):
            raise UserError("read back, lm_head.weight differs from the target's: not exported")
        probe = Probe.of(shape)
        read = build_drafter(canonical(found.shape), found.arrays)
        rounded = original if dtype == "float32" else build_drafter(canonical(shape), stored)
        gap = largest_difference(rounded, read, probe)
        if gap != 0.0:
            raise UserError(f"read back, logits differ by up to {gap:.3g}: not exported")
        rounding = gap if dtype == "float32" else largest_difference(original, read, probe)

        # 4. Let it appear.
        with (fresh / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())  # the rename must not reach the disk before the weights do
        _appear(fresh, directory, work / "former" if replace else None)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {directory}: {reason}") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    return Exported(
        directory=directory,
        kind=kind(shape.config),
        tensors=len(tensors),
        parameters=sum(array.size for array in tensors.values()),
        bytes=(directory / "model.safetensors").stat().st_size,
        difference=rounding,
    )


def kind(config: DrafterConfig) -> str:
    """The speculators type: "dflash" for a bare backbone in the fill-in layout, else "dspark"."""
    bare = not config.markov_rank and not config.confidence_head
    return "dflash" if bare and not config.sample_from_anchor else "dspark"


def unservable(config: DrafterConfig) -> str | None:
    """Why vLLM (0.32) cannot run such a drafter, naming the flag, or None."""
    if config.markov_head in ("gated", "rnn"):
        return (
            f"drafter.markov_head={config.markov_head!r}: vLLM reads only vanilla heads and would "
            "draft wrongly (SGLang reads all three)"
        )
    if not config.markov_rank and kind(config) == "dspark":
        return (
            f"drafter.markov_rank=0 with sample_from_anchor={config.sample_from_anchor} and "
            f"confidence_head={config.confidence_head}: vLLM runs rank 0 only as DFlash, fill-in "
            "and without confidence head (speculators reads it)"
        )
    return None


def speculators_config(shape: DrafterShape, verifier: Verifier, dtype: str) -> dict[str, Any]:
    """config.json. Every flag is written: readers do not agree on what an absent one means."""
    config, rope = shape.config, rope_parameters(shape.rope)
    return {
        "architectures": ["DFlashDraftModel" if kind(config) == "dflash" else "DSparkDraftModel"],
        "speculators_model_type": kind(config),
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind(config),
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_proposals,
                    "accept_tolerance": 0.0,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {
                "name_or_path": verifier.name_or_path,
                "architectures": list(verifier.architectures),
            },
        },
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": shape.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "intermediate_size": shape.intermediate_size,
            "hidden_act": "silu",
            "rms_norm_eps": shape.rms_norm_eps,
            "rope_parameters": rope,
            "layer_types": ["full_attention"] * config.num_layers,
            "max_position_embeddings": shape.max_positions,
            "vocab_size": shape.vocab_size,  # the target's
            "attention_bias": False,
            "tie_word_embeddings": False,
        },
        # Engines count layers that have run: the output of layer i is i + 1.
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": shape.draft_vocab,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head if config.markov_rank else "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": sees_markov(shape),
        "sample_from_anchor": config.sample_from_anchor,
        # vLLM takes False to mean causal blocks in every layer of a "dflash" drafter, not only in
        # sliding ones (vLLM 0.32, configs/speculators/algos.py); it reads it for no other kind.
        "sliding_window_non_causal": kind(config) == "dflash",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "rope_theta": shape.rope.theta,  # where the JAX servers look
    }


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """RoPE in the names of transformers: what this kind reads, and nothing it does not."""
    values = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.kind]}
    if "original_max_position" in values:
        values["original_max_position_embeddings"] = values.pop("original_max_position")
    if not values.get("attention_factor", True):
        del values["attention_factor"]  # 0 = follows from the factor
    if rope.partial_rotary_factor != 1.0:
        values["partial_rotary_factor"] = rope.partial_rotary_factor
    return {"rope_theta": rope.theta, "rope_type": rope.kind, **values}


def file_tensors(arrays: dict[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    """The tensors of the file by its names, from arrays by ours."""
    tensors = {}
    for ours, array in arrays.items():
        if ours == names.DRAFT_IDS:
            continue
        theirs, rows = names.to_file(names.DRAFTER, ours)
        tensors[theirs] = _stored(array, dtype).reshape(names.file_shape(array.shape, rows))
    return tensors


def _vocabulary(
    arrays: dict[str, np.ndarray], shape: DrafterShape, head: np.ndarray | None, dtype: str
) -> dict[str, np.ndarray]:
    """What the file of a drafter with a pruned vocabulary has besides."""
    if not shape.pruned:
        return {}
    if head is None or head.shape != (shape.draft_vocab, shape.hidden_size):
        raise ValueError("a pruned vocabulary needs the target's LM head at its ids")
    tables = tables_of(arrays[names.DRAFT_IDS], shape.vocab_size)
    return {"lm_head.weight": _stored(head, dtype), **tables}


def _read_as(array: np.ndarray) -> np.ndarray:
    return array if array.dtype.kind in "biu" else array.astype(np.float32)


def _stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """A C-contiguous copy in the file's dtype, by value; tables of integers keep theirs.

    The safetensors writer takes a view's memory as it lies and would scramble it.
    """
    array = np.asarray(array)
    cast = array if array.dtype.kind in "biu" else array.astype(DTYPES[dtype])
    return np.array(cast, order="C", copy=True)


def _record(origin: Origin, dtype: str) -> dict[str, Any]:
    return {
        "step": origin.step,
        "dtype": dtype,
        "config": origin.recipe,
        "target": dataclasses.asdict(origin.fingerprint),
        "versions": {
            "dspark_jax": dspark_jax.__version__,
            "jax": importlib.metadata.version("jax"),
            "flax": importlib.metadata.version("flax"),
        },
    }


def _appear(fresh: Path, directory: Path, aside: Path | None) -> None:
    """Renames `fresh`; a former export goes `aside`, and comes back should the renaming fail."""
    moved = aside is not None and directory.exists()
    if moved:
        os.rename(directory, aside)
    try:
        os.rename(fresh, directory)
    except OSError:
        if moved:
            os.rename(aside, directory)
        raise


def _check_place(directory: Path, replace: bool) -> None:
    """Refuses a place that holds something, and never lets --force delete what is no export."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise UserError(f"{directory} is a file; give a folder to --out")
    held = sorted(path.name for path in directory.iterdir())
    if held and not replace:
        raise UserError(f"{directory} is not empty: give another --out, or --force to replace it")
    if others := [name for name in held if name not in EXPORT_FILES]:
        raise UserError(
            f"{directory} holds {others[0]!r}, which no export writes: give another --out (--force "
            "replaces only a former export)"
        )
