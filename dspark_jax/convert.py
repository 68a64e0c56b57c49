"""Turn a drafter from the layout it is kept in into another: run, speculators, DeepSpec.

    python -m dspark_jax.convert --from=runs/a --to=speculators --out=exports/a
    python -m dspark_jax.convert --from=deepseek-ai/dspark_qwen3_8b_block7 --to=orbax \\
        --out=runs/b --target=Qwen/Qwen3-8B
    python -m dspark_jax.convert --from=exports/a --to=deepspec --out=exports/b

--from is a run, one of its checkpoints/STEP, a folder in the speculators or the DeepSpec layout, or
the hub id of such a folder; which of them is seen from its files. --to:

    speculators  what `vllm serve DIR` reads, together with the target that config.json names. vLLM
                 reads vanilla Markov heads, and DSpark needs its GPU runner V2; a drafter without
                 any head (markov_rank=0, confidence_head=False, sample_from_anchor=False) is
                 written as DFlash, which also serves on CPUs
    deepspec     what DeepSpec and SGLang read, and vLLM beside a target: all three Markov heads,
                 the whole vocabulary; with the target's embedding and LM head unless --noembeddings
    orbax        a run that train goes on from and that evaluate, generate and convert can use

Nothing is guessed: a missing or contradictory field and every tensor too many or too few is named.
Every tensor keeps the dtype that it is stored in unless --dtype asks for another. The result
appears only after it was read back: every tensor equal bit for bit, and logits and confidence equal
on a fixed input. --target says where the target is, when the files do not.

Where calibration.json lies in the run (see calibrate), the confidence head is written divided by
its single temperature, plus its single offset, for engines that know neither; --nocalibrated leaves
the head as trained.

In short, `--workdir=RUN --to=... --out=DIR` exports a run, and `--from=DIR --workdir=RUN` imports.
"""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from absl import flags

from dspark_jax.checks.facts import TargetFacts
from dspark_jax.checks.runs import check_export, check_run, tell
from dspark_jax.checks.target import read_target
from dspark_jax.core.command import run_main
from dspark_jax.core.config import to_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table
from dspark_jax.core.sharding import make_mesh
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.scheduling import calibration
from dspark_jax.scheduling.calibration import Calibration
from dspark_jax.training.checkpoint import (
    RunRecord,
    load_arrays,
    read_record,
    save_drafter,
    write_record,
)
from dspark_jax.training.drafters import open_drafter, run_of
from dspark_jax.weights.compare import Probe, build_drafter, canonical, largest_difference
from dspark_jax.weights.config_parts import Origin
from dspark_jax.weights.export import (
    DTYPES,
    Exported,
    cast,
    export_drafter,
    new_folder,
    same_bits,
)
from dspark_jax.weights.fingerprint import arrays_hash
from dspark_jax.weights.importing import ImportedDrafter
from dspark_jax.weights.layouts import LAYOUTS, algorithm_of, format_of
from dspark_jax.weights.names import DRAFT_IDS, EMBED
from dspark_jax.weights.vocab_tables import head_rows, scaled_embedding, target_table


def convert(
    source: str,
    to: str,
    out: Path,
    *,
    step: str = "best",
    dtype: str | None = None,
    target: str | None = None,
    embeddings: bool = True,
    force: bool = False,
    calibrated: bool | None = None,
) -> Exported | RunRecord:
    """Writes the drafter at `source` to the folder `out` in another layout; see the docstring.

    Args:
      source: see `open_drafter`; step: of a run.
      to: speculators, deepspec or orbax.
      dtype: float32 or bfloat16; None keeps every tensor as it is stored.
      target: where it is, if it moved or the files do not name it.
      embeddings: deepspec: also write the target's embedding and LM head.
      force: replace a former export; write what vLLM cannot run.
      calibrated: fold the run's single temperature and offset into the confidence head; None does
        if calibration.json is there and of these weights, True demands it.

    Raises:
      UserError: nothing was written.
    """
    if calibrated and to == "orbax":
        raise UserError("--calibrated belongs to exports for engines, not to --to=orbax")
    if not embeddings and to != "deepspec":
        raise UserError(f"--noembeddings belongs to --to=deepspec, not to {to}")
    with jax.set_mesh(make_mesh()):
        drafter = open_drafter(source, step)
        if to == "orbax":
            return _write_run(drafter, out, dtype, target)
        drafter, made = (drafter, None) if calibrated is False else _folded(drafter, calibrated)
        record, verifier, directory = run_of(drafter, target)
        served = _checked(record, directory, drafter)
        shape = record.shape
        wanted = format_of(to, algorithm_of(shape), source).shared(shape) if embeddings else ()
        if wanted and not (directory / "config.json").is_file():
            raise UserError(
                f"{source}: {' and '.join(wanted)} are the target's, which is not in {directory}; "
                "give --target=FOLDER_OR_HUB_ID"
            )
        if (scale := shape.embed_scale) != 1.0 and not embeddings:
            raise UserError(
                f"{source}: --noembeddings, but the target multiplies its embedding by "
                f"{scale:.4g}, which no reader does: the scaled one belongs into the file"
            )
        ids = drafter.arrays.get(DRAFT_IDS)
        exported = export_drafter(
            drafter.arrays,
            shape,
            verifier,
            out,
            Origin(drafter.step, to_mapping(record.config), record.fingerprint),
            layout=to,
            shared={
                name: scaled_embedding(directory, scale, record.config.target_dtype)
                if name == EMBED and scale != 1.0
                else target_table(directory, name)
                if name == EMBED or ids is None
                else head_rows(directory, ids)
                for name in wanted
            },
            dtype=dtype,
            replace=force,
            allow_unservable=force,
        )
    if made is not None:
        made.write(exported.directory / calibration.FILE)
    how = "as stored" if dtype is None else "by --dtype"
    lines = [
        ("folder", exported.directory),
        ("format", f"{to} {exported.kind}, {' and '.join(exported.dtypes)} {how}"),
        ("from", drafter.described),
        ("tensors", exported.tensors),
        ("parameters", f"{exported.parameters:,}"),
        ("bytes", f"{exported.bytes:,}"),
        ("target", verifier.name_or_path),
        ("confidence", _confidence(shape, made)),
        ("largest difference in logits, read back", f"{exported.difference:.3g}"),
    ]
    print(table([(name, str(value)) for name, value in lines], ("export", "")))
    for note in drafter.notes:
        print(f"note: {note}")
    reason = format_of(to, exported.kind, source).unservable(shape)
    print(f"\nnot for vLLM: {reason}" if reason else f"\n{exported.serve}")
    if served is not None:
        check_export(
            exported.directory, served, "sglang" if reason and to == "deepspec" else "vllm"
        )
    return exported


def _checked(record: RunRecord, directory: Path, drafter: ImportedDrafter) -> TargetFacts | None:
    """What the target's files say, once they were seen to suit the drafter; None if not here."""
    if not (directory / "config.json").is_file():
        return None
    served = read_target(directory, record.config.target)
    place = f"{drafter.directory}/config.json: "
    tell(check_run(record.shape, served, record.fingerprint), place)
    return served


def _folded(
    drafter: ImportedDrafter, demanded: bool | None
) -> tuple[ImportedDrafter, Calibration | None]:
    """A run's drafter, its confidence with the one temperature and offset found for all slots."""
    path = drafter.directory / calibration.FILE
    if drafter.layout != "orbax" or not path.is_file():
        if demanded:
            raise UserError(f"--calibrated: no {path}; make it with python -m dspark_jax.calibrate")
        return drafter, None
    made = Calibration.read(path)
    if made.recorded.drafter_hash != arrays_hash(drafter.arrays):
        what = f"{path} is of step {made.recorded.step} and other weights than those of step "
        if demanded:
            raise UserError(f"--calibrated: {what}{drafter.step}; calibrate again")
        note = f"{what}{drafter.step}: the confidence is exported as trained"
        return dataclasses.replace(drafter, notes=(*drafter.notes, note)), None
    arrays = dict(drafter.arrays)
    for name in ("confidence.weight", "confidence.bias"):
        exact = np.asarray(arrays[name], np.float64) / made.single_temperature
        if name.endswith("bias"):
            exact += made.single_offset
        arrays[name] = exact.astype(arrays[name].dtype)
    return dataclasses.replace(drafter, arrays=arrays), made


def _confidence(shape: DrafterShape, made: Calibration | None) -> str:
    """What the export says of the confidence head."""
    if not shape.config.confidence_head:
        return "no head"
    if made is None:
        return "as trained, not calibrated"
    return (
        f"divided by the temperature {made.single_temperature:.3g}, plus {made.single_offset:.3g}, "
        f"of {calibration.FILE}"
    )


def _write_run(
    drafter: ImportedDrafter, workdir: Path, dtype: str | None, target: str | None
) -> RunRecord:
    """Makes `workdir` a run whose only checkpoint is this drafter."""
    workdir = workdir.expanduser().resolve()
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise UserError(f"{workdir} is not empty: give a new folder for the run")
    record, _, directory = run_of(drafter, target)
    _checked(record, directory, drafter)
    record = dataclasses.replace(record, imported=str(drafter.directory))
    arrays = {name: cast(array, dtype) for name, array in drafter.arrays.items()}
    with new_folder(workdir) as fresh:
        save_drafter(fresh, arrays, drafter.step)
        write_record(fresh, record)
        back = load_arrays(fresh, drafter.step)
        for name, array in arrays.items():
            if not same_bits(array, back.get(name)):
                raise UserError(f"read back, {name} differs from {drafter.directory}: not imported")
        shape = canonical(record.shape)  # what evaluate and generate will build
        ours, theirs = build_drafter(shape, back), build_drafter(canonical(drafter.shape), arrays)
        gap = largest_difference(theirs, ours, Probe.of(shape))
        if gap != 0.0:
            raise UserError(f"read back, logits differ by up to {gap:.3g}: not imported")
    config = record.config.drafter
    floats = sorted(
        {array.dtype.name for array in arrays.values() if array.dtype.kind not in "biu"}
    )
    lines = [
        ("run", workdir),
        ("checkpoint", f"step {drafter.step}, {' and '.join(floats)}"),
        ("from", drafter.described),
        ("tensors", len(arrays)),
        ("parameters", f"{sum(array.size for array in arrays.values()):,}"),
        ("target", record.config.target),
        ("taps", ", ".join(map(str, config.target_layer_ids))),
        ("proposals per round", config.num_proposals),
        ("heads", f"Markov {config.markov_head}, confidence {config.confidence_head}"),
        ("largest difference in logits, read back", f"{gap:.3g}"),
    ]
    print(table([(name, str(value)) for name, value in lines], ("import", "")))
    for note in drafter.notes:
        print(f"note: {note}")
    print(f'\npython -m dspark_jax.generate --workdir={workdir} --prompt="..."')
    return record


def export_run(
    workdir: Path,
    out: Path,
    *,
    step: str = "best",
    dtype: str | None = None,
    target: str | None = None,
    force: bool = False,
) -> Exported:
    """Exports a checkpoint of the run in `workdir` to the folder `out`, for vLLM."""
    read_record(workdir)  # a run and nothing else
    return convert(
        str(workdir), "speculators", out, step=step, dtype=dtype, target=target, force=force
    )


def import_run(source: Path, workdir: Path, *, target: str | None = None) -> RunRecord:
    """Makes `workdir` a run whose only checkpoint is the drafter in the folder `source`."""
    return convert(str(source), "orbax", workdir, target=target)


def main() -> None:
    """Entry point."""
    source, workdir, to, out = _FROM.value, _WORKDIR.value, _TO.value, _OUT.value
    if source is None and to is None:
        raise UserError("give --from=DIR --to=LAYOUT --out=DIR; see --help")
    if source is None:
        if workdir is None:
            raise UserError("--from is missing: the drafter to convert; see --help")
        read_record(Path(workdir).expanduser())  # a run and nothing else
        source = workdir
    elif workdir is not None:
        if out is not None or to not in (None, "orbax"):
            raise UserError("--workdir beside --from is the run to make: no --to or --out with it")
        to, out = "orbax", workdir
    if to is None:
        raise UserError("--to is missing: the layout to write; see --help")
    if out is None:
        raise UserError("--out is missing: the folder to make")
    convert(
        source,
        to,
        Path(out),
        step=_STEP.value,
        dtype=_DTYPE.value,
        target=_TARGET.value,
        embeddings=_EMBEDDINGS.value,
        force=_FORCE.value,
        calibrated=_CALIBRATED.value,
    )


if __name__ == "__main__":  # flags too: several commands may be imported into one program
    _TO = flags.DEFINE_enum("to", None, [*LAYOUTS, "orbax"], "The layout to write.")
    _OUT = flags.DEFINE_string("out", None, "The folder to make.")
    _FROM = flags.DEFINE_string(
        "from", None, "The drafter: a run, its checkpoints/STEP, a folder or a hub id."
    )
    _WORKDIR = flags.DEFINE_string(
        "workdir", None, "A run: in place of --from the one to export, or after it the one to make."
    )
    _STEP = flags.DEFINE_string("step", "best", "Of a run: best, latest or its number.")
    _DTYPE = flags.DEFINE_enum(
        "dtype", None, list(DTYPES), "To cast every float to; default: each as it is stored."
    )
    _TARGET = flags.DEFINE_string(
        "target", None, "The target, if it moved or the files do not name it: a folder or a hub id."
    )
    _EMBEDDINGS = flags.DEFINE_bool(
        "embeddings", True, "deepspec: also write the target's embedding and LM head."
    )
    _FORCE = flags.DEFINE_bool(
        "force", False, "Replace a former export, and write speculators that vLLM cannot run."
    )
    _CALIBRATED = flags.DEFINE_bool(
        "calibrated",
        None,
        "Fold calibration.json in, see above; default: where there is one.",
    )
    run_main(main)
