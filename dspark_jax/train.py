"""Train a DSpark drafter for a target.

    python -m dspark_jax.train --config=configs/smollm2.py --workdir=runs/a
    python -m dspark_jax.train --config=configs/smollm2.py --workdir=runs/a \\
        --config.train.learning_rate=1e-3 --config.drafter.block_size=5
    python -m dspark_jax.train --config=configs/qwen3_8b.py --workdir=runs/b \\
        --config.drafter.init_from=deepseek-ai/dspark_qwen3_8b_block7

The target runs in this process and its hidden states stream into the drafter. Data that is not
prepared yet is prepared first (see dspark_jax.prepare). Run the same command again after a kill
and it goes on from the last checkpoint, with the very losses of an uninterrupted run.
drafter.init_from starts from the drafter of another run, of a speculators or DeepSpec folder or of
the hub, which must be the one that the config describes.

--config.profile=True measures where the time of a step goes and leaves a trace in WORKDIR/profile.

WORKDIR holds config.json, metrics.jsonl, TensorBoard events, checkpoints/STEP and
training_curve.png.
"""

import dataclasses
import functools
import json
import math
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
from dspark_jax.core.pictures import training_curve
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named
from dspark_jax.data.batches import pack, split
from dspark_jax.data.dataset import load_dataset
from dspark_jax.data.draft_vocab import draft_vocabulary
from dspark_jax.data.opened import OpenedTarget, check_drafter, open_target
from dspark_jax.decoding.responses import prepare_dataset
from dspark_jax.features.local import LocalSource, check_features
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.target_config import FAMILIES
from dspark_jax.models.warm_start import check_warm_start
from dspark_jax.training import profile
from dspark_jax.training.checkpoint import (
    RunRecord,
    open_checkpoints,
    read_record,
    restore_latest,
    save,
    start_from,
    step_folders,
    write_record,
)
from dspark_jax.training.drafters import weights_to_start
from dspark_jax.training.step import (
    Recipe,
    init_state,
    learning_rate,
    make_optimizer,
    summarize,
    train_step,
    validation_step,
)
from dspark_jax.weights.compare import canonical

# The same object for the same recipe: another run in this process compiles nothing anew.
_optimizer = functools.cache(make_optimizer)


def run(config: RunConfig, workdir: Path) -> dict[str, Any]:
    """Trains (or goes on training) in `workdir`; returns the last validation metrics."""
    with jax.set_mesh(make_mesh(config.mesh.fsdp, config.mesh.tp)):
        target = open_target(config.target, config.target_dtype, config.drafter)
        shape = DrafterShape.of(config.drafter, target.model.config)
        if config.drafter.init == "target":
            check_warm_start(shape, target.model.config)
        check_drafter(shape, target, "config.drafter.")
        _check_mesh(config, shape)
        _check_same_run(config, target, workdir)
        given = None
        if config.drafter.init_from and not step_folders(workdir):
            given, lines = weights_to_start(config, shape, target.fingerprint, target.directory)
            print("\n".join(f"init_from: {line}" for line in lines))
        source, draft_ids = _open_source(config, target, shape, workdir)
        # Not before: a mistake binds to nothing.
        write_record(workdir, _record(config, target, workdir))
        return _train(config, target, shape, source, draft_ids, given, workdir)


def _train(
    config: RunConfig,
    target: OpenedTarget,
    shape: DrafterShape,
    source: LocalSource,
    draft_ids: np.ndarray | None,
    given: dict[str, np.ndarray] | None,
    workdir: Path,
) -> dict[str, Any]:
    options = config.train
    num_steps = options.num_steps or -(
        -source.num_rows * options.num_epochs // options.global_batch_size
    )
    tx = _optimizer(options, num_steps)
    rate = learning_rate(options, num_steps)
    recipe = Recipe(config.loss, options.num_anchors, options.loss_chunk, config.seed)
    init = functools.partial(init_state, shape=shape, tx=tx)
    key, head = jax.random.key(config.seed), target.model.head

    def validate() -> dict[str, Any]:
        sums = [
            validation_step(state.drafter, head, batch, recipe=recipe)
            for batch in source.validation()
        ]
        total = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *jax.device_get(sums))
        return summarize(total, config.loss, config.drafter)

    with open_checkpoints(workdir, options.keep_checkpoints) as checkpoints:  # waits for saves
        if checkpoints.latest:
            # Its draft vocabulary is the checkpoint's, whatever the data would give now.
            state, start = restore_latest(checkpoints, init, key, target.model, draft_ids)
        else:
            state, start = jax.jit(init)(key, target.model, draft_ids), 0
            if given is not None:  # its draft vocabulary as well
                given = named(state.drafter) | given
                state = start_from(state, given, f"drafter.init_from={config.drafter.init_from}")
        if start >= num_steps:
            return validate()
        if config.profile:
            if num_steps - start <= profile.STEPS:
                raise UserError(
                    f"profile=True takes {profile.STEPS} steps and then goes on, but there are "
                    f"{num_steps - start} to go: raise --config.train.num_steps"
                )
            state, result = profile.profile(
                state, target.model, source, start, workdir, tx=tx, recipe=recipe
            )
            start += profile.STEPS
            _check_finite((start - 1, result), source)
        batch = source.batch(start)
        if check_features(batch, config.drafter.target_layer_ids):
            raise UserError(
                f"step {start + 1}: {source.blame(start)}; check the target's weights and dtype"
            )
        with (
            MetricsWriter(workdir, step=start) as metrics,
            progress(total=num_steps, desc="train", unit="step", initial=start) as bar,
        ):
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
                    row |= {
                        "grad_norm": float(host["grad_norm"]),
                        "learning_rate": float(rate(step)),
                    }
                    row["seconds_per_step"] = (now - began) / (done - logged)
                    row["tokens_per_second"] = source.tokens_per_step / row["seconds_per_step"]
                    began, logged = now, done
                    metrics.write(done, row)
                    length = row["expected_accepted_length"]
                    bar.note(f"loss {row['loss']:.3f}, expected accepted length {length:.2f}")
                rank = None
                if done % options.validate_every == 0 or done == num_steps:
                    _check_finite(pending, source)
                    values = validate()
                    rank = values["expected_accepted_length"]
                    if not math.isfinite(values["loss"]):
                        raise UserError(
                            f"validation after step {done}: the loss is not finite; the target "
                            "gives NaN on a validation document: check its weights and dtype"
                        )
                    metrics.write(done, {f"validation/{k}": v for k, v in values.items()})
                if done % options.checkpoint_every == 0 or done == num_steps:
                    _check_finite(pending, source)  # never save what is not finite
                    save(checkpoints, state, done, rank)
                bar.update()
    _draw(workdir)
    return values


def _open_source(
    config: RunConfig, target: OpenedTarget, shape: DrafterShape, workdir: Path
) -> tuple[LocalSource, np.ndarray | None]:
    """Loads (or first prepares) the data and packs it; the draft vocabulary if it is pruned."""
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
    draft_ids = None
    if shape.pruned:
        draft_ids, line = draft_vocabulary(
            train, validation, shape.vocab_size, shape.draft_vocab, target.stop_ids
        )
        # Else the checkpoint or the drafter it starts from has its own, chosen when that began.
        if not step_folders(workdir) and not config.drafter.init_from:
            print(line)
    source = LocalSource(
        target.model,
        config.drafter.target_layer_ids,
        packed,
        held_out,
        batch_size=options.global_batch_size,
        accumulation=options.accumulation,
        seed=config.seed,
        validation_rows=options.validation_rows,
        cache_bytes=int(options.feature_memory_gb * 2**30),
        whole_vocabulary=shape.pruned,
    )
    return source, draft_ids


def _check_finite(pending: tuple[int, dict] | None, source: LocalSource) -> dict | None:
    """Waits for a step's metrics and stops the run if its taps or loss were not finite."""
    if pending is None:
        return None
    step, result = pending
    host = jax.device_get(result)
    if not all(host["finite"].values()):
        raise UserError(
            f"step {step + 1}: {source.blame(step)}; nothing of it was saved: check the target's "
            "weights and dtype, or lower --config.train.learning_rate"
        )
    return host


def _check_mesh(config: RunConfig, shape: DrafterShape) -> None:
    """Refuses a mesh whose axes do not divide the batch or the drafter."""
    mesh, options = jax.sharding.get_mesh().shape, config.train
    rows = options.global_batch_size // options.accumulation
    for axis, name, size in (
        ("fsdp", "train.global_batch_size / train.accumulation", rows),
        ("tp", "drafter.num_kv_heads", shape.num_kv_heads),
        ("tp", "drafter.intermediate_size", shape.intermediate_size),
        ("tp", "drafter.vocab_size", shape.draft_vocab),
    ):
        if size % mesh[axis]:
            raise UserError(
                f"{name}={size} cannot be cut into the {mesh[axis]} parts of mesh axis {axis!r}; "
                f"change one of them or --config.mesh.{axis}"
            )


def _record(config: RunConfig, target: OpenedTarget, workdir: Path) -> RunRecord:
    named = json.loads((target.directory / "config.json").read_text()).get("architectures")
    model = target.model.config
    architectures = tuple(named or [FAMILIES[model.family]])
    directory = str(target.directory.resolve())
    made_with = target.fingerprint
    if step_folders(workdir):  # what it began with stays unrecorded if it was
        template = read_record(workdir).fingerprint.template
        made_with = dataclasses.replace(made_with, template=template)
    return RunRecord(config, made_with, directory, model, architectures)


def _check_same_run(config: RunConfig, target: OpenedTarget, workdir: Path) -> None:
    """Refuses to go on with another target or drafter; says what else has changed."""
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


def _draw(workdir: Path) -> None:
    """The training curve; a run does not fail for want of matplotlib."""
    try:
        training_curve(workdir / "metrics.jsonl", workdir / "training_curve.png")
    except UserError as error:
        print(f"no picture of the training: {error}")


def main() -> None:
    """Entry point."""
    config = from_mapping(RunConfig, _CONFIG.value.to_dict())
    values = run(config, Path(_WORKDIR.value))
    print(
        f"validation: expected accepted length {values['expected_accepted_length']:.2f} at "
        f"temperature 1, {values['expected_accepted_length_t0']:.2f} at 0"
    )


if __name__ == "__main__":  # flags too: several commands may be imported into one program
    _CONFIG = config_flags.DEFINE_config_file(
        "config", None, "The experiment file, with a variant as FILE:VARIANT.", lock_config=True
    )
    _WORKDIR = flags.DEFINE_string("workdir", None, "Where checkpoints and metrics go.")
    flags.mark_flags_as_required(["config", "workdir"])
    run_main(main)
