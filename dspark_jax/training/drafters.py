"""Drafters from wherever they are kept: runs, speculators and DeepSpec folders, the hub.

`open_drafter` reads any of them into one form, `run_of` adds the target that it belongs to, and
`weights_to_start` checks one against the config of a run that is to go on training it.
"""

import dataclasses
from pathlib import Path

import numpy as np

from dspark_jax.core.config import (
    DataConfig,
    DrafterConfig,
    RunConfig,
    TrainConfig,
    from_mapping,
    to_mapping,
)
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import EAGLE3_LOSS, LossConfig
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.target_config import FAMILIES
from dspark_jax.training.checkpoint import RunRecord, choose_step, load_arrays, read_record
from dspark_jax.weights.compare import check_fit, shape_differences
from dspark_jax.weights.config_parts import Verifier
from dspark_jax.weights.export import DTYPES
from dspark_jax.weights.fingerprint import Fingerprint, check_same_target, fingerprint
from dspark_jax.weights.importing import (
    ImportedDrafter,
    Record,
    check_borrowed,
    own_table,
    read_folder,
)
from dspark_jax.weights.resolve import is_bundled, resolve_drafter, resolve_target
from dspark_jax.weights.safetensors import read_json, target_config

# What the config says of each head that drafter.init_new may name.
_HEADS = {
    "confidence": ("confidence_head", "confidence_with_markov"),
    "markov": ("markov_head", "markov_rank"),
}


def open_drafter(source: str, step: str = "best") -> ImportedDrafter:
    """Reads the drafter at `source`. Needs a current mesh; the arrays stay on the host.

    Args:
      source: a run, one of its checkpoints/STEP, a folder in the speculators or DeepSpec layout, or
        the hub id of such a folder.
      step: of a run: best, latest or a number.

    Raises:
      UserError: nothing of the kind there, or damaged.
    """
    folder = resolve_drafter(source)
    if folder.parent.name == "checkpoints" and folder.name.isdigit():
        folder, step = folder.parent.parent, folder.name
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"{folder}: no config.json there: neither a run nor a drafter in the speculators or "
            "DeepSpec layout"
        )
    if not {"fingerprint", "target_config"} <= set(read_json(path)):
        if step != "best":
            raise UserError(f"{folder} is no run: there is no step {step!r} to choose")
        return read_folder(folder)
    record, chosen = read_record(folder), choose_step(folder, step)
    arrays = load_arrays(folder, chosen)
    check_fit(record.shape, arrays)
    return ImportedDrafter(
        directory=folder,
        layout="orbax",
        shape=record.shape,
        arrays=arrays,
        verifier=record.config.target,
        borrowed={},
        tied=False,
        num_anchors=record.config.train.num_anchors,
        record=Record(chosen, to_mapping(record.config), record.fingerprint),
        notes=(),
    )


def run_of(drafter: ImportedDrafter, target: str | None) -> tuple[RunRecord, Verifier, Path]:
    """The run that it is or would be, its target as engines are told of it, and that one's folder.

    Files and target must fit. The folder of a run's own target may no longer be there.

    Args:
      target: where it is now, if it moved or the files do not name it: a model folder or a hub id.

    Raises:
      UserError: no target named or found, or another one than it was made with.
    """
    where = drafter.directory
    if drafter.layout != "orbax":
        record = _record_of_folder(drafter, target)
        return record, _verifier(record, Path(record.target_directory)), _folder(record)
    record = read_record(where)
    name, recorded = target or record.config.target, _folder(record)
    if target or is_bundled(name):
        directory = resolve_target(name)
    elif _in_hub_cache(name, recorded) or (recorded / "config.json").is_file():
        directory = recorded  # of the hub's, perhaps no longer there: engines download it again
    else:
        raise UserError(f"{where}: its target is no longer in {recorded}; give --target=FOLDER")
    if (directory / "config.json").is_file():
        check_same_target(record.fingerprint, fingerprint(directory, name), f"{where}")
    if target:
        config = dataclasses.replace(record.config, target=target)
        place = str(directory.resolve())
        record = dataclasses.replace(record, config=config, target_directory=place)
    return record, _verifier(record, directory), directory


def weights_to_start(
    config: RunConfig, shape: DrafterShape, target: Fingerprint, target_directory: Path
) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of drafter.init_from for a run of this config, and what the user should know.

    Those of the heads named in drafter.init_new are not among them.

    Raises:
      UserError: naming every field in which the drafter there contradicts the config.
    """
    wanted, source = config.drafter, config.drafter.init_from
    drafter = open_drafter(source)
    parts = list(filter(None, wanted.init_new.split("+")))
    for part in parts:
        if _has(drafter.shape.config, part) or not _has(wanted, part):
            which = "the config has no" if not _has(wanted, part) else f"{source} already has a"
            raise UserError(f"drafter.init_new={wanted.init_new!r}: {which} {part} head")
    new = {name: getattr(wanted, name) for part in parts for name in _HEADS[part]}
    grown = dataclasses.replace(drafter.shape.config, **new)
    wrong = [
        f"{name.replace('config.', 'drafter.')}={ours!r} (there {theirs!r})"
        for name, ours, theirs in shape_differences(
            shape, dataclasses.replace(drafter.shape, config=grown)
        )
        if name != "max_positions"  # no table is made from it, so it changes nothing
    ]
    if wrong:
        missing = [part for part in _HEADS if _has(wanted, part) and not _has(grown, part)]
        anew = f", or drafter.init_new={'+'.join([*parts, *missing])!r} to start that head anew"
        raise UserError(
            f"drafter.init_from={source}: another drafter than the config's, {', '.join(wrong)}: "
            f"set what it has{anew if missing else ''}"
        )
    floats = sorted({x.dtype.name for x in drafter.arrays.values() if x.dtype.kind not in "biu"})
    held = "" if floats == ["float32"] else ", held as float32 from here on"
    lines = [f"{drafter.described}, stored as {' and '.join(floats)}{held}", *drafter.notes]
    lines += [f"it has no {part} head: that starts anew" for part in parts]
    if drafter.record and (other := drafter.record.fingerprint.differences(target)):
        lines.append(
            f"it was made with target {drafter.record.fingerprint.name!r}, which has another "
            f"{' and '.join(other)}"
        )
    if other := own_table(drafter, target_directory):
        lines.append(f"{other} of the target, whose own is used")
    return drafter.arrays, lines


def _has(config: DrafterConfig, part: str) -> bool:
    return config.confidence_head if part == "confidence" else config.markov_rank > 0


def _folder(record: RunRecord) -> Path:
    return Path(record.target_directory)


def _verifier(record: RunRecord, directory: Path) -> Verifier:
    name = record.config.target
    hub = _in_hub_cache(name, directory)
    return Verifier(name if hub else str(directory.resolve()), record.architectures)


def _in_hub_cache(name: str, directory: Path) -> bool:
    return f"models--{name.replace('/', '--')}" in directory.parts


def _record_of_folder(drafter: ImportedDrafter, target: str | None) -> RunRecord:
    """The record of a run with an imported drafter."""
    where, origin = drafter.directory, drafter.record
    recipe = None
    if origin:
        recipe = from_mapping(RunConfig, origin.recipe, f"{where / 'dspark_jax.json'}: config")
    # A path in a recipe is one of the machine that trained; the verifier's is absolute.
    name = target or (recipe.target if recipe and is_bundled(recipe.target) else drafter.verifier)
    name = name or (recipe.target if recipe else "")
    if not name:
        raise UserError(
            f"{where}: config.json names no target (the {drafter.layout} layout need not); give "
            "--target=FOLDER_OR_HUB_ID"
        )
    directory = resolve_target(name)
    found = fingerprint(directory, name, origin.fingerprint.target_weights if origin else "")
    if origin:
        check_same_target(origin.fingerprint, found, f"{where}")
        found = origin.fingerprint
    check_borrowed(drafter, directory)
    described = read_json(directory / "config.json")
    own = described.get("dtype") or described.get("torch_dtype")
    target_dtype = own if own in DTYPES else "bfloat16"
    taught = EAGLE3_LOSS if drafter.shape.config.algorithm == "eagle3" else LossConfig()
    config = recipe or RunConfig(
        target=name,
        loss=taught,
        data=DataConfig(prompts=""),  # unknown to the files
        drafter=dataclasses.replace(drafter.shape.config, dtype=drafter.compute_dtype),
        target_dtype=target_dtype,
        train=TrainConfig(num_anchors=drafter.num_anchors or TrainConfig.num_anchors),
    )
    config = dataclasses.replace(config, target=name)
    shape = target_config(directory, config.target_dtype)
    layers = drafter.shape.target_layers
    if layers not in (0, shape.num_layers):
        raise UserError(
            f"{where}: num_target_layers={layers} in config.json, {shape.num_layers} by {name}"
        )
    for field, ours, theirs in shape_differences(
        DrafterShape.of(config.drafter, shape), drafter.shape
    ):
        if field != "max_positions":  # no table is made from it, so it changes nothing
            other = "dspark_jax.json with the target" if recipe else f"the target {name}"
            raise UserError(f"{where}: {field} is {theirs!r} in config.json, {ours!r} by {other}")
    classes = tuple(described.get("architectures") or [FAMILIES[shape.family]])
    return RunRecord(config, found, str(directory.resolve()), shape, classes)
