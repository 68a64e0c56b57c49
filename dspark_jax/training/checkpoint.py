"""Checkpoints of a run: plain named arrays in Orbax, latest N and the best, exact resume.

A run's data position and random keys are functions of its step, so drafter, optimizer state and
step are everything there is to save.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tensorstore
from orbax.checkpoint import v1 as ocp

from dspark_jax.core.config import RunConfig, from_mapping, to_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import write_json
from dspark_jax.core.sharding import abstract
from dspark_jax.core.trees import from_plain, named, to_plain, with_arrays
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafters import AnyDrafter, new_drafter
from dspark_jax.models.target_config import TargetConfig
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
    for folder in step_folders(workdir):
        if (folder / "metrics").is_dir() and _rank(folder) == -math.inf:
            logging.warning("checkpoint %s has lost its rank: it cannot be the best", folder.name)
            shutil.rmtree(folder / "metrics")  # orbax would not open any checkpoint
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
    metrics = None if expected_length is None else {BEST_METRIC: expected_length}
    run.save_checkpointables_async(step, items, metrics=metrics, overwrite=False)


def restore_latest(run: ocp.training.Checkpointer, init, *args: Any) -> tuple[TrainState, int]:
    """The newest complete checkpoint as a state on the current mesh, whatever mesh saved it.

    A checkpoint that cannot be read is passed over with a warning that names it, and put aside as
    damaged-STEP once an older one has been read. One that holds a drafter alone (an import) is
    taken with a fresh optimizer, whose schedule goes on from its step.

    Args:
      init, args: `init(*args)` would make a fresh state; only its shapes are used.

    Returns:
      State and step.

    Raises:
      UserError: there are checkpoints, but none can be read.
    """
    template = abstract(init, *args)
    wanted = {"drafter": named(template.drafter), "optimizer": to_plain(template.opt_state)}
    damaged: dict[int, str] = {}
    for checkpoint in reversed(run.checkpoints):
        step, folder = checkpoint.step, Path(run.directory) / str(checkpoint.step)
        try:
            alone = _is_drafter_alone(folder)
            for item in ["drafter"] if alone else wanted:
                _check_readable(folder / item)
            if not alone:
                with _quiet():
                    items = run.load_checkpointables(step, wanted)
        except Exception as error:  # orbax raises many kinds for damaged folders
            damaged[step] = _reason(error)
            continue
        if alone:
            arrays = load_arrays(Path(run.directory).parent, step)
            state = start_from(jax.jit(init)(*args), arrays, f"{folder}")
            drafter, opt_state = state.drafter, _scheduled_from(state.opt_state, step)
        else:
            drafter = with_arrays(template.drafter, items["drafter"])
            opt_state = from_plain(template.opt_state, items["optimizer"])
        at = jax.device_put(jnp.asarray(step, jnp.int32), template.step.sharding)
        for bad, reason in damaged.items():  # their step numbers will be written again
            logging.warning(
                "checkpoint %s cannot be read (%s); going on from %s", bad, reason, step
            )
            aside = folder.with_name(f"damaged-{bad}")
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(folder.with_name(str(bad)), aside)
        if damaged:
            run.reload()
        return TrainState(at, drafter, opt_state), step
    raise UserError(
        f"{run.directory}: none of the checkpoints {', '.join(map(str, damaged))} can be read "
        f"({damaged[max(damaged)]}); restore one or delete the folder to start anew"
    )


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

    Raises:
      UserError: the checkpoint is damaged.
    """
    path = workdir.absolute() / "checkpoints" / str(step)
    try:
        _check_readable(path / "drafter")
        with _quiet():
            saved = ocp.checkpointables_metadata(path).metadata["drafter"]
            host = jax.tree.map(lambda m: np.empty(m.shape, m.dtype), saved)
            arrays = ocp.load_checkpointables(path, {"drafter": host})["drafter"]
    except Exception as error:  # orbax raises many kinds for damaged folders
        raise UserError(
            f"{path}: damaged checkpoint ({_reason(error)}); use another --step"
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
    return dataclasses.replace(state, drafter=drafter)


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
            name: jax.device_put(arrays[name].astype(x.dtype, copy=False), x.sharding)
            for name, x in wanted.items()
        },
    )


def _scheduled_from(opt_state: Any, step: int) -> Any:
    """A fresh optimizer state whose learning rate is that of `step`; its moments stay fresh."""

    def at(x: Any) -> Any:
        if not isinstance(x, optax.ScaleByScheduleState):
            return x
        return x._replace(count=jax.device_put(jnp.asarray(step, x.count.dtype), x.count.sharding))

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


def _is_drafter_alone(folder: Path) -> bool:
    """Whether a checkpoint was saved without an optimizer, rather than lost it."""
    with _quiet():
        return ocp.checkpointables_metadata(folder).custom_metadata == _ALONE


def _rank(folder: Path) -> float:
    """The expected accepted length saved with a checkpoint; -inf if there is none."""
    try:
        rank = float(json.loads((folder / "metrics" / "metrics").read_text())[BEST_METRIC])
    except (OSError, ValueError, KeyError, TypeError):
        return -math.inf
    return rank if math.isfinite(rank) else -math.inf


def _check_readable(folder: Path) -> None:
    """Reads everything that one saved item consists of.

    Orbax tells of damage too, but with pages of tracebacks of its own on stderr.

    Raises:
      OSError, ValueError: something is missing, cut short or no JSON.
    """
    for path in (folder / "_METADATA", *folder.glob("array_metadatas/*")):
        json.loads(path.read_text())
    base = {"driver": "file", "path": f"{folder}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    keys = store.list().result()
    if not keys:
        raise ValueError("it holds no arrays")
    for key in keys:
        store.read(key).result()


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


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
