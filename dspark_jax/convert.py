"""Turn a run's drafter into a folder that vLLM serves, or such a folder into a run.

    python -m dspark_jax.convert --workdir=runs/a --to=speculators --out=exports/a
    python -m dspark_jax.convert --from=exports/a --workdir=runs/b

--to writes config.json, model.safetensors and dspark_jax.json. The folder appears only after its
files were read back: every tensor equal to the checkpoint's, and logits and confidence equal on a
fixed input. `vllm serve exports/a` then loads the target that config.json names. vLLM reads vanilla
Markov heads, and DSpark needs its GPU runner V2; a drafter without any head (markov_rank=0,
confidence_head=False, sample_from_anchor=False) is written as DFlash, which also serves on CPUs.

--from reads such a folder, or a released DeepSpec drafter, into a new run that evaluate, generate
and convert can use. Nothing is guessed: a missing or contradictory field and every tensor too many
or too few is named.
"""

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
from absl import flags

from dspark_jax.checks.runs import check_export, check_run, tell
from dspark_jax.checks.target import read_target
from dspark_jax.core.command import run_main
from dspark_jax.core.config import DataConfig, RunConfig, from_mapping, to_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table
from dspark_jax.core.sharding import make_mesh
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.target import FAMILIES
from dspark_jax.training.checkpoint import (
    RunRecord,
    choose_step,
    load_arrays,
    read_record,
    save_drafter,
    write_record,
)
from dspark_jax.weights.compare import build_drafter, shape_differences
from dspark_jax.weights.export import (
    DTYPES,
    Exported,
    Origin,
    Verifier,
    export_speculators,
    unservable,
)
from dspark_jax.weights.fingerprint import check_same_target, fingerprint
from dspark_jax.weights.importing import ImportedDrafter, check_borrowed, read_speculators
from dspark_jax.weights.names import DRAFT_IDS
from dspark_jax.weights.resolve import is_bundled, resolve_target
from dspark_jax.weights.safetensors import read_json, target_config
from dspark_jax.weights.vocab_tables import head_rows


def export_run(
    workdir: Path,
    out: Path,
    *,
    step: str = "best",
    dtype: str = "float32",
    target: str | None = None,
    force: bool = False,
) -> Exported:
    """Exports a checkpoint of the run in `workdir` to the folder `out`."""
    record = read_record(workdir)
    chosen = choose_step(workdir, step)
    verifier, directory = _verifier(record, target, workdir)
    origin = Origin(chosen, to_mapping(record.config), record.fingerprint)
    served = None
    if (directory / "config.json").is_file():
        served = read_target(directory, verifier.name_or_path)
        place = f"{workdir}/config.json: "
        tell(check_run(record.shape, served, record.fingerprint), place)
    arrays = load_arrays(workdir, chosen)
    head = None
    if record.shape.pruned:
        head = head_rows(directory, arrays[DRAFT_IDS])
    with jax.set_mesh(make_mesh()):
        exported = export_speculators(
            arrays,
            record.shape,
            verifier,
            out,
            origin,
            head=head,
            dtype=dtype,
            replace=force,
            allow_unservable=force,
        )
    rows = [
        ("folder", exported.directory),
        ("format", f"speculators {exported.kind}, {dtype}"),
        ("checkpoint", f"step {chosen} of {workdir}"),
        ("tensors", f"{exported.tensors}"),
        ("parameters", f"{exported.parameters:,}"),
        ("bytes", f"{exported.bytes:,}"),
        ("target", verifier.name_or_path),
        ("largest difference in logits, read back", f"{exported.difference:.3g}"),
    ]
    print(table([(name, str(value)) for name, value in rows], ("export", "")))
    reason = unservable(record.config.drafter)
    print(f"\nnot for vLLM: {reason}" if reason else f"\nvllm serve {exported.directory}")
    if served is not None:
        check_export(exported.directory, served)
    return exported


def import_run(source: Path, workdir: Path, *, target: str | None = None) -> RunRecord:
    """Makes `workdir` a run whose only checkpoint is the drafter in the folder `source`."""
    workdir = workdir.expanduser()
    if workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
        raise UserError(f"{workdir} is not empty: give a new --workdir to import into")
    with jax.set_mesh(make_mesh()):
        drafter = read_speculators(source.expanduser())
        record = _run_record(drafter, target)
        served = read_target(Path(record.target_directory), record.config.target)
        place = f"{source}/config.json: "
        tell(check_run(record.shape, served, record.fingerprint), place)
        build_drafter(record.shape, drafter.arrays)  # what evaluate and generate will do
    step = drafter.record.step if drafter.record else 0
    workdir = workdir.resolve()
    try:
        workdir.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{workdir.name}.partial-", dir=workdir.parent))
        try:
            fresh = work / "fresh"
            save_drafter(fresh, drafter.arrays, step)
            write_record(fresh, record)
            back = load_arrays(fresh, step)
            for name, array in drafter.arrays.items():
                if not np.array_equal(array, back[name], equal_nan=True):
                    raise UserError(f"read back, {name} differs from {source}: not imported")
            os.rename(fresh, workdir)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {workdir}: {error.strerror or error}") from error
    parameters = sum(array.size for array in drafter.arrays.values())
    config = record.config.drafter
    rows = [
        ("run", workdir),
        ("checkpoint", f"step {step}"),
        ("tensors", len(drafter.arrays)),
        ("parameters", f"{parameters:,}"),
        ("target", record.config.target),
        ("taps", ", ".join(map(str, config.target_layer_ids))),
        ("proposals per round", config.num_proposals),
        ("heads", f"Markov {config.markov_head}, confidence {config.confidence_head}"),
    ]
    print(table([(name, str(value)) for name, value in rows], ("import", "")))
    for note in drafter.notes:
        print(f"note: {note}")
    print(f'\npython -m dspark_jax.generate --workdir={workdir} --prompt="..."')
    return record


def _verifier(record: RunRecord, target: str | None, workdir: Path) -> tuple[Verifier, Path]:
    """The target as engines are told of it, after a look at whether it is the one trained with.

    And its folder here, which may no longer be there.
    """
    name = target or record.config.target
    recorded = Path(record.target_directory)
    if target or is_bundled(name):
        directory = resolve_target(name)
    elif _in_hub_cache(name, recorded):
        directory = recorded  # perhaps no longer there: engines download it themselves
    elif (recorded / "config.json").is_file():
        directory = recorded
    else:
        raise UserError(f"{workdir}: its target is no longer in {recorded}; give --target=FOLDER")
    if (directory / "config.json").is_file():
        check_same_target(record.fingerprint, fingerprint(directory, name), f"{workdir}")
    hub = _in_hub_cache(name, directory)
    verifier = Verifier(name if hub else str(directory.resolve()), record.architectures)
    return verifier, directory


def _in_hub_cache(name: str, directory: Path) -> bool:
    return f"models--{name.replace('/', '--')}" in directory.parts


def _run_record(drafter: ImportedDrafter, target: str | None) -> RunRecord:
    """The record of a run with an imported drafter; the files and their target must fit."""
    where, origin = drafter.directory, drafter.record
    recipe = None
    if origin:
        recipe = from_mapping(RunConfig, origin.recipe, f"{where / 'dspark_jax.json'}: config")
    # A path in a recipe is one of the machine that trained; the verifier's is absolute.
    name = target or (recipe.target if recipe and is_bundled(recipe.target) else drafter.verifier)
    if not name:
        raise UserError(f"{where}: config.json names no verifier; give --target=FOLDER_OR_HUB_ID")
    directory = resolve_target(name)
    found = fingerprint(directory, name)
    if origin:
        check_same_target(origin.fingerprint, found, f"{where}")
        found = origin.fingerprint
    check_borrowed(drafter, directory)
    described = read_json(directory / "config.json")
    own = described.get("dtype") or described.get("torch_dtype")
    target_dtype = own if own in DTYPES else "bfloat16"
    config = recipe or RunConfig(
        target=name,
        data=DataConfig(prompts=""),  # unknown to the files
        drafter=dataclasses.replace(drafter.shape.config, dtype=drafter.stored_dtype),
        target_dtype=target_dtype,
    )
    config = dataclasses.replace(config, target=name)
    shape = target_config(directory, config.target_dtype)
    for field, ours, theirs in shape_differences(
        DrafterShape.of(config.drafter, shape), drafter.shape
    ):
        if field != "max_positions":  # no table is made from it, so it changes nothing
            other = "dspark_jax.json with the target" if recipe else f"the target {name}"
            raise UserError(f"{where}: {field} is {theirs!r} in config.json, {ours!r} by {other}")
    classes = tuple(described.get("architectures") or [FAMILIES[shape.family]])
    return RunRecord(config, found, str(directory), shape, classes)


def main() -> None:
    """Entry point."""
    if (_TO.value is None) == (_FROM.value is None):
        raise UserError("give --to=speculators to export or --from=DIR to import; see --help")
    if _WORKDIR.value is None:
        raise UserError("--workdir is missing; see --help")
    if _FROM.value is not None:
        if _OUT.value is not None:
            raise UserError("--out belongs to --to; --from makes --workdir")
        import_run(Path(_FROM.value), Path(_WORKDIR.value), target=_TARGET.value)
        return
    if _OUT.value is None:
        raise UserError("--out is missing: the folder to export to")
    export_run(
        Path(_WORKDIR.value),
        Path(_OUT.value),
        step=_STEP.value,
        dtype=_DTYPE.value,
        target=_TARGET.value,
        force=_FORCE.value,
    )


if __name__ == "__main__":  # flags too: several commands may be imported into one program
    _TO = flags.DEFINE_enum("to", None, ["speculators"], "Export: the format to write.")
    _OUT = flags.DEFINE_string("out", None, "Export: the folder to make.")
    _FROM = flags.DEFINE_string("from", None, "Import: the folder of a drafter.")
    _WORKDIR = flags.DEFINE_string("workdir", None, "The run: read by --to, made by --from.")
    _STEP = flags.DEFINE_string(
        "step", "best", "Export: the checkpoint; best, latest or its number."
    )
    _DTYPE = flags.DEFINE_enum(
        "dtype", "float32", list(DTYPES), "Export: of the tensors in the file."
    )
    _TARGET = flags.DEFINE_string(
        "target", None, "Where the target is now, if it moved: a model folder or a hub id."
    )
    _FORCE = flags.DEFINE_bool(
        "force", False, "Export: replace a former export, and write drafters that vLLM cannot run."
    )
    run_main(main)
