"""The export, top to bottom: a drafter as a folder in one of the layouts of layouts.py.

    config.json         the drafter's shape and flags, and in the speculators layout its target
    model.safetensors   exactly the arrays of the checkpoint. Speculators: embedding and LM head are
                        the target's and not in it (of a pruned vocabulary: its rows of that head,
                        and the tables d2t and t2d; of a target that scales its embedding: the
                        scaled one, as no engine scales). DeepSpec: both are, as its own readers
                        expect
    dspark_jax.json     our own record: step, recipe, fingerprint of the target, versions

A drafter with Markov or confidence head is written as "dspark". Without either it is a DFlash
drafter: written as "dflash" in the fill-in layout, and as "dspark" of rank 0 when it is
anchor-first, because "dflash" means fill-in to engines (vLLM's GPU runner refuses the other, its
CPU runner overlooks the flag), and DeepSpec's own DFlash drafters are DSpark ones of rank 0.
`importing.py` is the inverse, and every export goes through it before it appears.
"""

import contextlib
import dataclasses
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

import dspark_jax
from dspark_jax.core.errors import UserError, check_choice
from dspark_jax.core.metrics import write_json
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.weights import names
from dspark_jax.weights.compare import (
    Probe,
    build_drafter,
    canonical,
    largest_difference,
    shape_differences,
)
from dspark_jax.weights.config_parts import Origin, Verifier
from dspark_jax.weights.importing import RECORD, read_folder
from dspark_jax.weights.layouts import Format, algorithm_of, format_of
from dspark_jax.weights.safetensors import TensorFiles
from dspark_jax.weights.vocab_tables import tables_of

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
# What a folder may hold that --force replaces: nothing but a former export.
EXPORT_FILES = ("config.json", "model.safetensors", RECORD, "calibration.json")


@dataclasses.dataclass(frozen=True)
class Exported:
    """What was written and what reading it back showed."""

    directory: Path
    layout: str
    kind: str  # dspark, dflash, ...
    dtypes: tuple[str, ...]  # of the tensors, tables of integers apart
    tensors: int
    parameters: int
    bytes: int  # of model.safetensors
    difference: float  # largest, in logits, between the files and the checkpoint; uncast: 0
    serve: str  # the command that serves it


def export_drafter(
    arrays: dict[str, np.ndarray],
    shape: DrafterShape,
    verifier: Verifier,
    directory: Path,
    origin: Origin,
    *,
    layout: str = "speculators",
    shared: Mapping[str, np.ndarray] | None = None,
    dtype: str | None = None,
    replace: bool = False,
    allow_unservable: bool = False,
) -> Exported:
    """Writes a drafter as a folder in `layout` and reads it back. On the current mesh.

    The folder appears in one step, after the files were found to hold every array bit for bit and
    to give the checkpoint's logits and confidence; a failed export leaves nothing.

    Args:
      arrays: of the drafter by our names, as they are to be stored.
      directory: the new folder; an empty one may exist.
      shared: the target's tables by the files' names, such as the layout holds (`Format.shared`);
        of a pruned vocabulary the LM head's rows [V_d, D] at its ids.
      dtype: float32 or bfloat16 to cast every float to, by value; None leaves each as it is.
      replace: take the place of a former export.
      allow_unservable: also write drafters that vLLM cannot run in its own layout.

    Raises:
      UserError: the layout cannot hold it or vLLM not run it, arrays that do not fit, a place that
        is taken, a full disk.
    """
    # 1. Can it be written, here and at all?
    shared, kind = dict(shared or {}), algorithm_of(shape)
    if dtype is not None:
        check_choice("dtype", dtype, tuple(DTYPES))
    form = format_of(layout, kind, directory)
    if reason := form.inexpressible(shape):
        raise UserError(reason)
    if form.for_vllm and not allow_unservable and (reason := form.unservable(shape)):
        raise UserError(f"{reason}; --force writes it all the same")
    original = build_drafter(canonical(shape), arrays)  # everything is there, and nothing else
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise UserError(f"{name} holds NaN or infinity: export another step")
    _check_shared(shared, form, shape)
    directory = directory.expanduser().resolve()
    _check_place(directory, replace)

    with new_folder(directory, replace) as fresh:
        # 2. Write beside the place.
        fresh.mkdir()
        tensors = file_tensors(arrays, dtype, form.tensors) | _tables(arrays, shape)
        tensors |= {name: cast(table, dtype) for name, table in shared.items()}
        floats = dtype or arrays["fc"].dtype.name
        write_json(fresh / "config.json", form.config(shape, verifier, floats, origin))
        write_json(fresh / RECORD, _record(origin, floats))
        save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
        # The writer makes a file that only its owner can read.
        shutil.copymode(fresh / "config.json", fresh / "model.safetensors")

        # 3. Read it back, as a drafter.
        found = read_folder(fresh)
        if changed := shape_differences(shape, found.shape):
            name, ours, theirs = changed[0]
            raise UserError(f"read back, {name} is {theirs!r} instead of {ours!r}: not exported")
        stored = {name: cast(array, dtype) for name, array in arrays.items()}
        for name, array in stored.items():  # a probe sees only a few rows of the Markov tables
            if not same_bits(array, found.arrays.get(name)):
                raise UserError(f"read back, {name} differs from the checkpoint: not exported")
        for name, table in shared.items():
            if not same_bits(cast(table, dtype), TensorFiles(fresh).read(name)):
                raise UserError(f"read back, {name} differs from the target's: not exported")
        probe = Probe.of(shape)
        read = build_drafter(canonical(found.shape), found.arrays)
        kept = all(stored[name].dtype == array.dtype for name, array in arrays.items())
        rounded = original if kept else build_drafter(canonical(shape), stored)
        gap = largest_difference(rounded, read, probe)
        if gap != 0.0:
            raise UserError(f"read back, logits differ by up to {gap:.3g}: not exported")
        rounding = gap if kept else largest_difference(original, read, probe)

        # 4. Let it appear, once the weights are on the disk.
        with (fresh / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())
    return Exported(
        directory=directory,
        layout=layout,
        kind=kind,
        dtypes=tuple(sorted({x.dtype.name for x in tensors.values() if x.dtype.kind not in "biu"})),
        tensors=len(tensors),
        parameters=sum(array.size for array in tensors.values()),
        bytes=(directory / "model.safetensors").stat().st_size,
        difference=rounding,
        serve=form.serve.format(
            target=verifier.name_or_path, folder=directory, proposals=shape.config.num_proposals
        ),
    )


def file_tensors(
    arrays: dict[str, np.ndarray], dtype: str | None, table: tuple[names.Rule, ...]
) -> dict[str, np.ndarray]:
    """The tensors of the file by its names, from arrays by ours."""
    tensors = {}
    for ours, array in arrays.items():
        if ours != names.DRAFT_IDS:
            theirs, rows = names.to_file(table, ours)
            tensors[theirs] = cast(array, dtype).reshape(names.file_shape(array.shape, rows))
    return tensors


def _tables(arrays: dict[str, np.ndarray], shape: DrafterShape) -> dict[str, np.ndarray]:
    return tables_of(arrays[names.DRAFT_IDS], shape.vocab_size) if shape.pruned else {}


def _check_shared(shared: Mapping[str, np.ndarray], form: Format, shape: DrafterShape) -> None:
    """Whether these tables of the target belong into the file. The caller's mistake if not."""
    allowed = form.shared(shape)
    rows = {names.EMBED: shape.vocab_size, names.LM_HEAD: shape.draft_vocab}
    wrong = [x for name, x in shared.items() if x.shape != (rows.get(name), shape.hidden_size)]
    if not set(shared) <= set(allowed) or wrong:
        raise ValueError(f"{sorted(shared)} do not belong into this file, which takes {allowed}")
    if shape.pruned and names.LM_HEAD not in shared:
        raise ValueError("a pruned vocabulary needs the target's LM head at its ids")
    if shape.embed_scale != 1.0 and names.EMBED not in shared:
        raise ValueError("a target that scales its embedding needs the scaled one in the file")


def same_bits(a: np.ndarray, b: np.ndarray | None) -> bool:
    """Whether b has the dtype, the shape and every bit of a."""
    return b is not None and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def cast(array: np.ndarray, dtype: str | None) -> np.ndarray:
    """A C-contiguous copy in the file's dtype, by value; tables of integers keep theirs.

    The safetensors writer takes a view's memory as it lies and would scramble it.
    """
    array = np.asarray(array)
    keeps = dtype is None or array.dtype.kind in "biu"
    return np.array(array if keeps else array.astype(DTYPES[dtype]), order="C", copy=True)


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


@contextlib.contextmanager
def new_folder(directory: Path, replace: bool = False) -> Iterator[Path]:
    """Gives a path to make a folder at, which takes its place when all went well, and only then.

    Args:
      replace: what is in the place already goes away, or comes back should the renaming fail.

    Raises:
      UserError: the disk.
    """
    work = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.partial-", dir=directory.parent))
        fresh, former = work / "fresh", work / "former"  # mkdtemp's own would be closed to others
        yield fresh
        if replace and directory.exists():
            os.rename(directory, former)
        try:
            os.rename(fresh, directory)
        except OSError:
            if former.exists():
                os.rename(former, directory)
            raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write {directory}: {reason}") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


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
