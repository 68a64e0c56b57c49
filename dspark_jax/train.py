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

SIGTERM saves before it ends the run, with exit code 143. Several processes are started alike, on
one shared WORKDIR, with --distributed or --coordinator (docs/scale.md); they end together.

WORKDIR holds config.json, metrics.jsonl, TensorBoard events, checkpoints/STEP and
training_curve.png.
"""

import functools
import hashlib
import math
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import flags
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import config_flags

from dspark_jax.core.allocator import keep_freed_memory
from dspark_jax.core.command import run_main
from dspark_jax.core.config import RunConfig, from_mapping
from dspark_jax.core.errors import Terminated, UserError
from dspark_jax.core.metrics import MetricsWriter
from dspark_jax.core.pictures import training_curve
from dspark_jax.core.processes import (
    barrier,
    check_same,
    define_flags,
    first_says,
    is_first,
    sigterm,
)
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import abstract, make_meshes, move
from dspark_jax.core.trees import named
from dspark_jax.data.batches import bucket_widths, pack, split
from dspark_jax.data.dataset import load_dataset
from dspark_jax.data.draft_vocab import draft_vocabulary
from dspark_jax.data.opened import OpenedTarget, check_drafter, open_target
from dspark_jax.decoding.responses import prepare_dataset
from dspark_jax.features.local import LocalSource, check_features
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.target import Target
from dspark_jax.models.warm_start import check_warm_start
from dspark_jax.training import profile
from dspark_jax.training.checkpoint import (
    open_checkpoints,
    restore_latest,
    save,
    start_from,
    step_folders,
    write_record,
)
from dspark_jax.training.drafters import weights_to_start
from dspark_jax.training.same_run import check_same_run, record_of
from dspark_jax.training.step import (
    Recipe,
    TrainState,
    init_drafter,
    init_state,
    learning_rate,
    make_optimizer,
    state_of,
    summarize,
    train_step,
    validation_step,
)

# The same object for the same recipe: another run in this process compiles nothing anew.
_optimizer = functools.cache(make_optimizer)


def run(config: RunConfig, workdir: Path) -> dict[str, Any]:
    """Trains (or goes on training) in `workdir`; returns the last validation metrics."""
    check_same("config", repr(config), "give every process the same files and flags")
    mesh, target_mesh = make_meshes(config.mesh)
    with jax.set_mesh(mesh):
        with jax.set_mesh(target_mesh):
            target = open_target(
                config.target, config.target_dtype, config.drafter, config.target_weights
            )
        check_same("target", repr(target.fingerprint), "give every process the same model files")
        shape = DrafterShape.of(config.drafter, target.model.config)
        if config.drafter.init == "target":
            check_warm_start(shape, target.model.config)
        check_drafter(shape, target, "config.drafter.")
        _check_mesh(config, shape, target_mesh)
        check_same_run(config, target, workdir)
        given = None
        if config.drafter.init_from and not step_folders(workdir):
            given, lines = weights_to_start(config, shape, target.fingerprint, target.directory)
            print("\n".join(f"init_from: {line}" for line in lines))
        source, draft_ids = _open_source(config, target, shape, workdir, target_mesh)
        record = record_of(config, target, workdir)
        barrier("every process has read what was there")
        if is_first():  # and not before: a mistake binds to nothing
            write_record(workdir, record)
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
    recipe = Recipe(
        config.loss,
        options.num_anchors,
        options.loss_chunk,
        config.seed,
        options.remat,
        options.ema,
    )
    key, mesh = jax.random.key(config.seed), jax.sharding.get_mesh()
    head = move(target.model.head, mesh)
    fresh = functools.partial(
        _fresh_state, key, target.model, draft_ids, shape=shape, tx=tx, ema=options.ema > 0
    )

    def validate() -> dict[str, Any]:
        served = state.served
        sums = [
            validation_step(served, head, batch, recipe=recipe) for batch in source.validation()
        ]
        total = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *jax.device_get(sums))
        return summarize(total, config.loss, config.drafter)

    with open_checkpoints(workdir, options.keep_checkpoints) as checkpoints:  # waits for saves
        if checkpoints.latest:
            # Its draft vocabulary is the checkpoint's, whatever the data would give now.
            like = jax.tree.map(functools.partial(_as_on, mesh), target.model)
            init = functools.partial(init_state, shape=shape, tx=tx, ema=options.ema > 0)
            state, start = restore_latest(checkpoints, abstract(init, key, like, draft_ids), fresh)
        else:
            state, start = fresh(), 0
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
            sigterm() as asked,
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
                        "padding": source.padding(step),
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
                stop = asked(done) and done < num_steps
                if done % options.checkpoint_every == 0 or done == num_steps or stop:
                    _check_finite(pending, source)  # never save what is not finite
                    save(checkpoints, state, done, rank)
                bar.update()
                if stop:
                    raise Terminated(
                        f"SIGTERM: step {done} of {num_steps} is saved in {workdir}; the same "
                        "command goes on from there, on any mesh"
                    )
    if is_first():
        _draw(workdir)
    return values


def _fresh_state(
    key: jax.Array,
    target: Target,
    draft_ids: np.ndarray | None,
    *,
    shape: DrafterShape,
    tx: optax.GradientTransformation,
    ema: bool,
) -> TrainState:
    """`init_state` on the current mesh, of a target that may be on another one."""
    mesh, target_mesh = jax.sharding.get_mesh(), target.norm[...].sharding.mesh
    if mesh == target_mesh:
        init = functools.partial(init_state, shape=shape, tx=tx, ema=ema)
        return jax.jit(init)(key, target, draft_ids)
    with jax.set_mesh(target_mesh):  # it may take over layers
        drafter = jax.jit(functools.partial(init_drafter, shape=shape))(key, target, draft_ids)
    return jax.jit(functools.partial(state_of, tx=tx, ema=ema))(move(drafter, mesh))


def _as_on(mesh: Mesh, x: jax.Array) -> jax.ShapeDtypeStruct:
    """Something like x, of which only the shape matters."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))


def _open_source(
    config: RunConfig,
    target: OpenedTarget,
    shape: DrafterShape,
    workdir: Path,
    target_mesh: Mesh,
) -> tuple[LocalSource, np.ndarray | None]:
    """Loads (or first prepares) the data and packs it; the draft vocabulary if it is pruned."""
    options = config.train
    directory = Path(config.data.path) if config.data.path else workdir / "data"
    if not first_says((directory / "dataset").is_dir):
        with jax.set_mesh(target_mesh):
            prepare_dataset(config, target, directory)
    documents = load_dataset(directory, target.fingerprint)
    train, validation = split(documents, config.data.validation_fraction)
    for row in documents:
        if config.drafter.mask_token_id in row.ids:
            raise UserError(
                f"drafter.mask_token_id={config.drafter.mask_token_id} occurs in the training "
                f"data (row {row.id}): choose an id the target never uses"
            )
    if jax.process_count() > 1:
        digests = [
            hashlib.sha256(x.tobytes()).hexdigest()
            for row in documents
            for x in (row.ids, row.loss_mask)
        ]
        check_same("data set", "".join(digests), f"{directory} has to be a folder that all share")
    length = config.data.sequence_length
    buckets = () if config.data.packing else bucket_widths(documents, length)
    packed, held_out = pack(train, length, buckets), pack(validation, length, buckets)
    print(
        f"data: {len(train)} documents in {len(packed)} rows of {packed.described}, "
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
        mesh=target_mesh,
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


def _check_mesh(config: RunConfig, shape: DrafterShape, target_mesh: Mesh) -> None:
    """Refuses meshes whose axes do not divide the batch or the drafter."""
    mesh, options = jax.sharding.get_mesh().shape, config.train
    rows = options.global_batch_size // options.accumulation
    for axis, parts, name, size in (
        ("fsdp", mesh["fsdp"], "train.global_batch_size / train.accumulation", rows),
        ("target_fsdp", target_mesh.shape["fsdp"], "train.global_batch_size / accumulation", rows),
        ("tp", mesh["tp"], "drafter.num_kv_heads", shape.num_kv_heads),
        ("tp", mesh["tp"], "drafter.intermediate_size", shape.intermediate_size),
        ("tp", mesh["tp"], "drafter.vocab_size", shape.draft_vocab),
        ("tp", mesh["tp"], "the target's vocab_size", shape.vocab_size),
        ("fsdp", mesh["fsdp"], "the target's hidden_size", shape.hidden_size),
    ):
        if size % parts:
            raise UserError(
                f"{name}={size} cannot be cut into the {parts} parts of mesh axis {axis!r}; "
                f"change one of them or --config.mesh.{axis}"
            )
    if config.profile and (jax.process_count() > 1 or target_mesh != jax.sharding.get_mesh()):
        raise UserError("profile=True measures one process whose target and drafter share a mesh")
    if options.feature_memory_gb and jax.process_count() > 1:
        raise UserError(
            f"train.feature_memory_gb={options.feature_memory_gb}: the features of a row are kept "
            "in one process, and the next epoch has it in another one; set it to 0"
        )


def _draw(workdir: Path) -> None:
    """The training curve; a run does not fail for want of matplotlib."""
    try:
        training_curve(workdir / "metrics.jsonl", workdir / "training_curve.png")
    except UserError as error:
        print(f"no picture of the training: {error}")


def main() -> None:
    """Entry point."""
    keep_freed_memory()
    _JOIN()
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
    _JOIN = define_flags()
    flags.mark_flags_as_required(["config", "workdir"])
    run_main(main)
