"""Train a DSpark drafter for a target.

    python -m dspark_jax.train --config=configs/smollm2.py --workdir=runs/a
    python -m dspark_jax.train --config=configs/smollm2.py --workdir=runs/a \\
        --config.train.learning_rate=1e-3 --config.drafter.block_size=5

The target runs in this process and its hidden states stream into the drafter. Data that is not
prepared yet is prepared first (see dspark_jax.prepare). Run the same command again after a kill
and it goes on from the last checkpoint, with the very losses of an uninterrupted run.

WORKDIR holds config.json, metrics.jsonl, TensorBoard events, checkpoints/STEP and
training_curve.png.
"""

import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from ml_collections import config_flags

from dspark_jax.core.command import run_main
from dspark_jax.core.config import RunConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import MetricsWriter
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.batches import pack, split
from dspark_jax.data.dataset import load_dataset
from dspark_jax.data.opened import OpenedTarget, open_target
from dspark_jax.decoding.responses import prepare_dataset
from dspark_jax.features.local import LocalSource, check_features
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.warm_start import check_warm_start
from dspark_jax.training.checkpoint import (
    RunRecord,
    open_checkpoints,
    read_record,
    restore_latest,
    save,
    write_record,
)
from dspark_jax.training.step import (
    Recipe,
    init_state,
    learning_rate,
    make_optimizer,
    summarize,
    train_step,
    validation_step,
)

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "The experiment file, with a variant as FILE:VARIANT.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints and metrics go.")


def run(config: RunConfig, workdir: Path) -> dict[str, Any]:
    """Trains (or goes on training) in `workdir`; returns the last validation metrics."""
    with jax.set_mesh(make_mesh(config.mesh.fsdp, config.mesh.tp)):
        target = open_target(config.target, config.target_dtype)
        shape = DrafterShape.of(config.drafter, target.model.config)
        if config.drafter.init == "target":
            check_warm_start(shape, target.model.config)
        _check_mask_token(config, target)
        _check_same_run(config, target, workdir)
        source = _open_source(config, target, workdir)
        return _train(config, target, shape, source, workdir)


def _train(
    config: RunConfig, target: OpenedTarget, shape: DrafterShape, source: LocalSource, workdir: Path
) -> dict[str, Any]:
    options = config.train
    num_steps = options.num_steps or -(-source.num_rows * options.num_epochs) // (
        options.global_batch_size
    )
    tx = make_optimizer(options, num_steps)
    rate = learning_rate(options, num_steps)
    recipe = Recipe(config.loss, options.num_anchors, options.loss_chunk, config.seed)
    init = functools.partial(init_state, shape=shape, tx=tx)
    head = target.model.head
    checkpoints = open_checkpoints(workdir, options.keep_checkpoints)
    if checkpoints.latest:
        state, start = restore_latest(checkpoints, init, jax.random.key(config.seed), target.model)
    else:
        state, start = jax.jit(init)(jax.random.key(config.seed), target.model), 0
    batch = source.batch(start)
    if problem := check_features(batch, config.drafter.target_layer_ids):
        raise UserError(f"step {start}: {problem}; check the target's weights and target_dtype")

    def validate(step: int) -> dict[str, Any]:
        sums = [
            validation_step(state.drafter, head, batch, recipe=recipe)
            for batch in source.validation()
        ]
        total = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *jax.device_get(sums))
        values = summarize(total, config.loss, config.drafter)
        metrics.write(step, {f"validation/{name}": value for name, value in values.items()})
        return values

    with (
        MetricsWriter(workdir, step=start) as metrics,
        progress(total=num_steps, desc="train", unit="step", initial=start) as bar,
    ):
        values: dict[str, Any] = {}
        pending = None  # metrics of the step before: reading them must not hold up dispatch
        began, logged = time.monotonic(), start
        for step in range(start, num_steps):
            state, result = train_step(state, head, batch, tx=tx, recipe=recipe)
            batch = source.batch(min(step + 1, num_steps - 1))  # queued behind the step
            _check_finite(pending, source)
            pending = (step, result)
            done = step + 1
            if done % options.log_every == 0 or done == num_steps:
                host = _check_finite(pending, source)
                now = time.monotonic()
                row = summarize(host["sums"], config.loss, config.drafter)
                row |= {"grad_norm": float(host["grad_norm"]), "learning_rate": float(rate(step))}
                row["seconds_per_step"] = (now - began) / (done - logged)
                row["tokens_per_second"] = source.tokens_per_step / row["seconds_per_step"]
                began, logged = now, done
                metrics.write(done, row)
                length = row["expected_accepted_length"]
                bar.note(f"loss {row['loss']:.3f}, expected accepted length {length:.2f}")
            if done % options.validate_every == 0 or done == num_steps:
                _check_finite(pending, source)
                values = validate(done)
            if done % options.checkpoint_every == 0 or done == num_steps:
                _check_finite(pending, source)  # never save what is not finite
                save(checkpoints, state, done, values.get("expected_accepted_length", 0.0))
            bar.update()
        if not values:
            values = validate(num_steps)
    checkpoints.close()
    _draw(workdir)
    return values


def _open_source(config: RunConfig, target: OpenedTarget, workdir: Path) -> LocalSource:
    """Loads (or first prepares) the data and packs it."""
    options = config.train
    directory = Path(config.data.path) if config.data.path else workdir / "data"
    if not (directory / "dataset").is_dir():
        prepare_dataset(config, target, directory)
    documents = load_dataset(directory, target.fingerprint)
    train, validation = split(documents, config.data.validation_fraction)
    for row in documents:
        if config.drafter.mask_token_id in row.ids:
            raise UserError(
                f"drafter.mask_token_id={config.drafter.mask_token_id} occurs in the training "
                f"data (row {row.id}): choose an id the target never uses"
            )
    length = config.data.sequence_length
    packed, held_out = pack(train, length), pack(validation, length)
    print(
        f"data: {len(train)} documents in {len(packed)} rows of {length} tokens, "
        f"{packed.padding:.1%} padding, {packed.truncated} cut, {packed.dropped} too short; "
        f"{len(validation)} for validation"
    )
    return LocalSource(
        target.model,
        config.drafter.target_layer_ids,
        packed,
        held_out,
        batch_size=options.global_batch_size,
        accumulation=options.accumulation,
        seed=config.seed,
        validation_rows=options.validation_rows,
        cache_bytes=int(options.feature_memory_gb * 2**30),
    )


def _check_finite(pending: tuple[int, dict] | None, source: LocalSource) -> dict | None:
    """Waits for a step's metrics and stops the run if its taps or loss were not finite."""
    if pending is None:
        return None
    step, result = pending
    host = jax.device_get(result)
    for part, good in host["finite"].items():
        if not good:
            names = ", ".join(source.names(step)[:8])
            raise UserError(
                f"step {step}: {part} not finite; the batch holds {names} ...; the last "
                "checkpoint is sound: lower --config.train.learning_rate or check target_dtype"
            )
    return host


def _check_mask_token(config: RunConfig, target: OpenedTarget) -> None:
    """Refuses ids that mean something to the target."""
    mask = config.drafter.mask_token_id
    special = {target.tokenizer.pad_token_id, target.tokenizer.bos_token_id, *target.stop_ids}
    if mask in special:
        raise UserError(
            f"drafter.mask_token_id={mask} is a pad, bos or stop token of the target: choose an "
            "unused id"
        )


def _check_same_run(config: RunConfig, target: OpenedTarget, workdir: Path) -> None:
    """Writes the run's record, or refuses to go on with another one."""
    architectures = json.loads((target.directory / "config.json").read_text())["architectures"]
    record = RunRecord(
        config,
        target.fingerprint,
        str(target.directory),
        target.model.config,
        tuple(architectures),
    )
    if (workdir / "config.json").exists():
        old = read_record(workdir)
        if old.fingerprint != target.fingerprint or old.config.drafter != config.drafter:
            what = "drafter" if old.config.drafter != config.drafter else "target"
            raise UserError(
                f"{workdir} holds a run with another {what}: use another --workdir or delete it"
            )
    write_record(workdir, record)


def _draw(workdir: Path) -> None:
    """The training curve, where matplotlib is installed."""
    try:
        from dspark_jax.core.pictures import training_curve
    except ImportError:
        return
    training_curve(workdir / "metrics.jsonl", workdir / "training_curve.png")


def main() -> None:
    """Entry point."""
    config = from_mapping(RunConfig, _CONFIG.value.to_dict())
    values = run(config, Path(_WORKDIR.value))
    print(
        f"validation: expected accepted length {values['expected_accepted_length']:.2f} at "
        f"temperature 1, {values['expected_accepted_length_t0']:.2f} at 0"
    )


if __name__ == "__main__":
    flags.mark_flags_as_required(["config", "workdir"])
    run_main(main)
