"""Checkpoints of a run: plain named arrays in Orbax, latest N and the best, exact resume.

A run's data position and random keys are functions of its step, so drafter, optimizer state and
step are everything there is to save.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint import v1 as ocp

from dspark_jax.core.config import RunConfig, from_mapping, to_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import write_json
from dspark_jax.core.processes import barrier, first_says, is_first
from dspark_jax.core.sharding import abstract
from dspark_jax.core.trees import from_plain, named, to_plain, trainable, with_arrays
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafters import AnyDrafter, new_drafter
from dspark_jax.models.target_config import TargetConfig
from dspark_jax.training.damage import check_readable, reason, unreadable
from dspark_jax.training.step import TrainState
from dspark_jax.weights.fingerprint import Fingerprint
from dspark_jax.weights.safetensors import read_json

_ALONE = {"items": ["drafter"]}  # custom metadata of a checkpoint without optimizer
BEST_METRIC = "expected_accepted_length"


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """WORKDIR/config.json: everything needed to use a run's drafter."""

    config: RunConfig
    fingerprint: Fingerprint  # of the target
    target_directory: str
    target_config: TargetConfig
    architectures: tuple[str, ...]  # of the target, as its config names them
    # Where the weights were imported from, so that no optimizer is there and `config` may guess at
    # what only training knows (init, the compute dtype). "" once it was trained here.
    imported: str = dataclasses.field(default="", compare=False)

    @property
    def shape(self) -> DrafterShape:
        """The drafter's shape."""
        return DrafterShape.of(self.config.drafter, self.target_config)


def write_record(workdir: Path, record: RunRecord) -> None:
    """Writes WORKDIR/config.json."""
    workdir.mkdir(parents=True, exist_ok=True)
    value = dataclasses.asdict(record)
    value["config"] = to_mapping(record.config)
    write_json(workdir / "config.json", value)


def read_record(workdir: Path) -> RunRecord:
    """Reads WORKDIR/config.json.

    Raises:
      UserError: no run here, or a damaged record.
    """
    path = workdir / "config.json"
    if not path.exists():
        raise UserError(f"{workdir}: no run here (config.json is missing); train one first")
    value = read_json(path)
    if "config" not in value:
        raise UserError(
            f"{path} is not the record of a run, but of a model or an exported drafter: give the "
            "folder that train made, or make one with dspark_jax.convert --to=orbax"
        )
    try:
        return RunRecord(
            config=from_mapping(RunConfig, value["config"]),
            fingerprint=Fingerprint(**value["fingerprint"]),
            target_directory=value["target_directory"],
            target_config=TargetConfig.from_record(value["target_config"]),
            architectures=tuple(value["architectures"]),
            imported=value.get("imported", ""),
        )
    except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
        raise UserError(f"{path}: damaged ({error}); restore it or train again") from None


def step_folders(workdir: Path) -> list[Path]:
    """The folders of finished saves, damaged or not, without those being written."""
    return [path for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]


def open_checkpoints(workdir: Path, keep: int) -> ocp.training.Checkpointer:
    """The checkpoints of a run: the latest `keep` and the best by expected accepted length.

    Saving is decided by the caller; half-written folders of killed saves are removed. Leaving the
    context waits for the last save.
    """
    for folder in step_folders(workdir) if is_first() else ():
        if (folder / "metrics").is_dir() and _rank(folder) == -math.inf:
            logging.warning("checkpoint %s has lost its rank: it cannot be the best", folder.name)
            shutil.rmtree(folder / "metrics")  # orbax would not open any checkpoint
    barrier("checkpoints can be opened")
    policies = ocp.training.preservation_policies
    best = policies.BestN(
        get_metric_fn=lambda metrics: metrics[BEST_METRIC],
        n=1,
        keep_checkpoints_without_metrics=False,
    )
    return ocp.training.Checkpointer(
        workdir.absolute() / "checkpoints",
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        cleanup_tmp_directories=True,
    )


def save(
    run: ocp.training.Checkpointer, state: TrainState, step: int, expected_length: float | None
) -> None:
    """Starts an asynchronous save; the arrays are copied before this returns.

    Args:
      step: updates made, as a host integer (reading the state's would wait for the device).
      expected_length: expected accepted length on the validation split at this very step, which
        ranks the checkpoint; None if it was not validated: it then is never the best.
    """
    items = {"drafter": named(state.drafter), "optimizer": to_plain(state.opt_state)}
    if state.ema is not None:
        items["ema"] = named(state.served)
    metrics = None if expected_length is None else {BEST_METRIC: expected_length}
    run.save_checkpointables_async(
        step, items, metrics=metrics, overwrite=False, custom_metadata={"items": list(items)}
    )


def restore_latest(
    run: ocp.training.Checkpointer, template: TrainState, fresh: Callable[[], TrainState]
) -> tuple[TrainState, int]:
    """The newest complete checkpoint as a state on the current mesh, whatever mesh saved it.

    A checkpoint that cannot be read is passed over with a warning that names it, and put aside as
    damaged-STEP once an older one has been read. One that holds a drafter alone (an import) is
    taken with a fresh optimizer, whose schedule goes on from its step.

    Args:
      template: shapes and shardings of the state (core.sharding.abstract); with an average, if
        one is wanted.
      fresh: makes a state anew; called for an import alone.

    Returns:
      State and step.

    Raises:
      UserError: there are checkpoints, but none can be read.
    """
    damaged: dict[int, str] = {}
    average = template.ema is not None
    for checkpoint in reversed(run.checkpoints):
        step, folder = checkpoint.step, Path(run.directory) / str(checkpoint.step)
        items, problem = first_says(functools.partial(_look_at, folder, average))
        try:
            if problem is not None:
                raise ValueError(problem)
            if items == _ALONE["items"]:
                arrays = load_arrays(Path(run.directory).parent, step)
                state = start_from(fresh(), arrays, f"{folder}")
                state = dataclasses.replace(state, opt_state=_scheduled_from(state.opt_state, step))
            else:
                wanted = {item: named(template.drafter) for item in items}
                wanted["optimizer"] = to_plain(template.opt_state)
                with _quiet():
                    state = _filled_state(template, run.load_checkpointables(step, wanted))
        except Exception as error:  # orbax raises many kinds for damaged folders
            if problem is None and jax.process_count() > 1:  # the others may have read it
                raise
            damaged[step] = problem or reason(error)
            continue
        at = _put(np.asarray(step, np.int32), template.step.sharding)
        for bad, why in damaged.items():  # their step numbers will be written again
            if is_first():
                logging.warning(
                    "checkpoint %s cannot be read (%s); going on from %s", bad, why, step
                )
                aside = folder.with_name(f"damaged-{bad}")
                shutil.rmtree(aside, ignore_errors=True)
                os.replace(folder.with_name(str(bad)), aside)
        if damaged:
            barrier("damaged checkpoints are out of the way")
            run.reload()
        return dataclasses.replace(state, step=at), step
    raise UserError(
        f"{run.directory}: none of the checkpoints {', '.join(map(str, damaged))} can be read "
        f"({damaged[max(damaged)]}); restore one or delete the folder to start anew"
    )


def _look_at(folder: Path, average: bool) -> tuple[list[str], str | None]:
    """What to restore of a checkpoint, and why that cannot be done or None."""
    try:
        items = [item for item in _items(folder) if average or item != "ema"]
        return items, unreadable(folder, items)
    except Exception as error:  # orbax raises many kinds for damaged folders
        return [], reason(error)


def _filled_state(template: TrainState, items: dict[str, Any]) -> TrainState:
    drafter, ema = with_arrays(template.drafter, items["drafter"]), None
    if "ema" in items:
        ema = trainable(with_arrays(template.drafter, items["ema"]))
    elif template.ema is not None:  # it was not kept until now
        ema = _copy(trainable(drafter))
    opt_state = from_plain(template.opt_state, items["optimizer"])
    return TrainState(template.step, drafter, opt_state, ema)


def checkpoint_steps(workdir: Path) -> dict[int, float]:
    """Complete checkpoints of a run: {step: expected accepted length}, ascending.

    -inf for one that was not validated when it was saved.

    Raises:
      UserError: there is none.
    """
    # A save gets its plain name only when it is complete.
    folders = sorted(step_folders(workdir), key=lambda path: int(path.name))
    steps = {int(folder.name): _rank(folder) for folder in folders}
    if not steps:
        raise UserError(f"{workdir}: no finished checkpoint in checkpoints/; train first")
    return steps


def choose_step(workdir: Path, which: str) -> int:
    """The step meant by "best" (the latest of those ranked equal), "latest" or a number."""
    steps = checkpoint_steps(workdir)
    if which == "best":
        return max(steps, key=lambda step: (steps[step], step))
    if which == "latest":
        return max(steps)
    if not which.isdigit() or int(which) not in steps:
        raise UserError(
            f"{workdir}: no checkpoint {which!r}; there are best, latest, "
            f"{', '.join(map(str, steps))}"
        )
    return int(which)


def load_arrays(workdir: Path, step: int) -> dict[str, np.ndarray]:
    """The drafter's arrays of a checkpoint as numpy: no model, no mesh, any machine.

    Those of the moving average, if the run kept one.

    Raises:
      UserError: the checkpoint is damaged.
    """
    path = workdir.absolute() / "checkpoints" / str(step)
    try:
        item = "ema" if "ema" in _items(path) else "drafter"
        check_readable(path / item)
        with _quiet():
            saved = ocp.checkpointables_metadata(path).metadata[item]
            host = jax.tree.map(lambda m: np.empty(m.shape, m.dtype), saved)
            arrays = ocp.load_checkpointables(path, {item: host})[item]
    except Exception as error:  # orbax raises many kinds for damaged folders
        raise UserError(
            f"{path}: damaged checkpoint ({reason(error)}); use another --step"
        ) from None
    return dict(arrays)


def load_drafter(record: RunRecord, workdir: Path, step: int) -> AnyDrafter:
    """The drafter of a checkpoint on the current mesh."""
    where = f"{workdir}: checkpoint {step} does not fit config.json"
    return _filled(abstract_drafter(record.shape), load_arrays(workdir, step), where)


def start_from(state: TrainState, arrays: dict[str, np.ndarray], where: str) -> TrainState:
    """The state with these weights in place of its drafter's; the optimizer stays as it is.

    Raises:
      UserError: they are not of its drafter.
    """
    drafter = _filled(state.drafter, arrays, f"{where} does not fit the drafter of the config")
    ema = None if state.ema is None else _copy(trainable(drafter))
    return dataclasses.replace(state, drafter=drafter, ema=ema)


def _copy(tree: Any) -> Any:
    """Buffers of its own: a state is donated as a whole, and none of it twice."""
    return jax.tree.map(jnp.copy, tree)


def _filled(template: AnyDrafter, arrays: dict[str, np.ndarray], where: str) -> AnyDrafter:
    """The drafter with host arrays where `template` has its own; shorter floats become longer."""
    wanted = named(template)
    if other := sorted(set(wanted) ^ set(arrays)):
        raise UserError(f"{where} ({other[0]} is in one of them only)")
    for name, array in wanted.items():
        if arrays[name].shape != array.shape:
            shapes = f"{list(arrays[name].shape)}, not {list(array.shape)}"
            raise UserError(f"{where} ({name} has shape {shapes})")
    return with_arrays(
        template,
        {
            name: _put(arrays[name].astype(x.dtype, copy=False), x.sharding)
            for name, x in wanted.items()
        },
    )


def _put(x: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A host array, the same on every process, where it belongs."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _scheduled_from(opt_state: Any, step: int) -> Any:
    """A fresh optimizer state whose learning rate is that of `step`; its moments stay fresh."""

    def at(x: Any) -> Any:
        if not isinstance(x, optax.ScaleByScheduleState):
            return x
        return x._replace(count=_put(np.asarray(step, x.count.dtype), x.count.sharding))

    return jax.tree.map(at, opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByScheduleState))


def abstract_drafter(shape: DrafterShape) -> AnyDrafter:
    """Shapes and shardings of a drafter on the current mesh."""
    from flax import nnx

    return abstract(lambda key: new_drafter(shape, rngs=nnx.Rngs(key)), jax.random.key(0))


def save_drafter(workdir: Path, arrays: dict[str, np.ndarray], step: int = 0) -> None:
    """Writes a checkpoint that holds a drafter only (an import), in the dtypes of its arrays."""
    with _quiet(), ocp.training.Checkpointer(workdir.absolute() / "checkpoints") as run:
        run.save_checkpointables(
            step,
            {"drafter": dict(arrays)},
            metrics={BEST_METRIC: 0.0},
            force=True,
            custom_metadata=_ALONE,
        )


def _items(folder: Path) -> list[str]:
    """What a checkpoint was saved with, lost or not."""
    with _quiet():
        custom = ocp.checkpointables_metadata(folder).custom_metadata
    return custom["items"] if custom else ["drafter", "optimizer"]


def _rank(folder: Path) -> float:
    """The expected accepted length saved with a checkpoint; -inf if there is none."""
    try:
        rank = float(json.loads((folder / "metrics" / "metrics").read_text())[BEST_METRIC])
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf
    return rank if math.isfinite(rank) else -math.inf


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns of things that are meant this way."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
