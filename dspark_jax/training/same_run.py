"""The record of a run, and whether a config may go on with the run that a folder holds."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from dspark_jax.core.config import RunConfig
from dspark_jax.core.errors import UserError
from dspark_jax.data.opened import OpenedTarget
from dspark_jax.models.target_config import FAMILIES
from dspark_jax.training.checkpoint import RunRecord, read_record, step_folders
from dspark_jax.weights.compare import canonical


def record_of(config: RunConfig, target: OpenedTarget, workdir: Path) -> RunRecord:
    """The record of a run that begins or goes on."""
    named = json.loads((target.directory / "config.json").read_text()).get("architectures")
    model = target.model.config
    architectures = tuple(named or [FAMILIES[model.family]])
    directory = str(target.directory.resolve())
    made_with = target.fingerprint
    if step_folders(workdir):  # what it began with stays unrecorded if it was
        template = read_record(workdir).fingerprint.template
        made_with = dataclasses.replace(made_with, template=template)
    return RunRecord(config, made_with, directory, model, architectures)


def check_same_run(config: RunConfig, target: OpenedTarget, workdir: Path) -> None:
    """Refuses to go on with another target or drafter; says what else has changed.

    The mesh and the number of processes may: no result depends on them.
    """
    if not (workdir / "config.json").exists() or not step_folders(workdir):
        return
    old = read_record(workdir)
    other = f"{workdir} holds a run with another"
    remedy = "use another --workdir, or delete it to start anew"
    parts = old.fingerprint.differences(target.fingerprint)
    if parts or old.fingerprint.other_template(target.fingerprint):
        parts = parts or ["chat template"]
        raise UserError(f"{other} target ({', '.join(parts)} differ): {remedy}")
    changed = _differences(_explicit(old), _explicit(dataclasses.replace(old, config=config)))
    if old.imported:  # it starts from these weights, with what their files do not tell
        guesses = ("init=", "init_from=", "head_init=", "dtype=", "confidence_d", "eagle3.step")
        guesses = tuple(f"drafter.{guess}" for guess in guesses)
        changed = [text for text in changed if not text.startswith(guesses)]
    if drafter := [text for text in changed if text.startswith("drafter.")]:
        raise UserError(f"{other} drafter, {', '.join(drafter)}: {remedy}")
    if changed:
        print(f"{workdir}: goes on with {', '.join(changed)}")


def _explicit(record: RunRecord) -> RunConfig:
    """Its config with what follows from its target and its other fields written out."""
    sizes = canonical(record.shape).config
    drafter = dataclasses.replace(
        record.config.drafter,
        confidence_with_markov=sizes.confidence_with_markov,
        **{
            name: getattr(sizes, name)
            for name in ("vocab_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        },
    )
    return dataclasses.replace(record.config, drafter=drafter)


def _differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """["drafter.block_size=5 (there 7)", ...] of two configs."""
    found = []
    for field in dataclasses.fields(new):
        name, a, b = prefix + field.name, getattr(old, field.name), getattr(new, field.name)
        if dataclasses.is_dataclass(b):
            found += _differences(a, b, f"{name}.")
        elif a != b:
            found.append(f"{name}={b!r} (there {a!r})")
    return found
