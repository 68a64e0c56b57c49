"""Where the time of a train step goes: parts measured alone, the loop as it runs, and a trace.

    python -m dspark_jax.train --config=... --workdir=W --config.profile=True

The first steps of the run are measured; they train like all others. Leaves in W/profile:

    profile.json    seconds of every part, model FLOPs, MFU on chips of core/chips.py
    timeline.png    a few steps of the loop: what the host does, and what the devices run
    plugins/        the trace itself, for TensorBoard's profile plugin or ui.perfetto.dev

A part alone is a program of its own, waited for: the target's forward, what tapping it adds, the
gradient of the drafter's backbone, that of the whole loss (what it takes more is the vocabulary
loss and the heads), the optimizer. In the loop the next batch is queued behind the step that runs,
so a loop that takes longer than features and step alone has gaps.
"""

import gzip
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dspark_jax.core.chips import chip_of
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.pictures import timeline
from dspark_jax.core.progress import progress
from dspark_jax.core.trees import trainable, with_tables
from dspark_jax.features.source import Batch, FeatureSource
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.models.target import Target, TargetHead
from dspark_jax.training.flops import StepSizes, drafter_flops, target_flops
from dspark_jax.training.losses import block_hidden, dspark_loss
from dspark_jax.training.step import Recipe, TrainState, all_blocks, train_step

WARMUP, TURNS, EACH, TRACED, REPEATS = 2, 3, 3, 3, 5
STEPS = WARMUP + 2 * TURNS * EACH + TRACED  # of the run that it takes
_NAMES = {"jit_add_features": "target", "jit_train_step": "train step"}


def profile(
    state: TrainState,
    target: Target,
    source: FeatureSource,
    first: int,
    workdir: Path,
    *,
    tx: optax.GradientTransformation,
    recipe: Recipe,
) -> tuple[TrainState, dict[str, Any]]:
    """Runs `STEPS` steps from step `first` on and measures them.

    Returns:
      The state after them, and the result of the last as `train_step` gives it.
    """
    folder, head = workdir / "profile", target.head
    folder.mkdir(parents=True, exist_ok=True)
    step, result = first, {}
    alone: dict[str, list[float]] = {"features": [], "step": []}
    loop: dict[str, list[float]] = {"step": [], "input_wait": []}

    def update(state: TrainState, batch: Batch) -> TrainState:
        nonlocal result, step
        state, result = train_step(state, head, batch, tx=tx, recipe=recipe)
        step += 1
        return state

    def as_in_training(state: TrainState, count: int) -> tuple[TrainState, float, float]:
        """The loop of train.py: seconds per step, and those that the host spent on input."""
        batch = source.batch(step)
        jax.block_until_ready((state, batch))
        began, waited = time.perf_counter(), 0.0
        for left in reversed(range(count)):
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
                state = update(state, batch)
            asked = time.perf_counter()
            with jax.profiler.TraceAnnotation("input"):
                batch = source.batch(step)  # the last one too: as many features as steps
            waited += time.perf_counter() - asked
            if not left:
                jax.block_until_ready((state, batch))
        return state, (time.perf_counter() - began) / count, waited / count

    with progress(total=STEPS, desc="profile", unit="step") as bar:
        for _ in range(WARMUP):
            state = update(state, source.batch(step))
            bar.update()
        for _ in range(TURNS):  # in turn, so that a slow spell of the machine hits both
            for _ in range(EACH):
                jax.block_until_ready(state)
                began = time.perf_counter()
                batch = jax.block_until_ready(source.batch(step))
                middle = time.perf_counter()
                state = jax.block_until_ready(update(state, batch))
                alone["features"].append(middle - began)
                alone["step"].append(time.perf_counter() - middle)
                bar.update()
            state, seconds, waited = as_in_training(state, EACH)
            loop["step"].append(seconds)
            loop["input_wait"].append(waited)
            bar.update(EACH)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            state, *_ = as_in_training(state, TRACED)
        bar.update(TRACED)
    batch = source.batch(step - 1)
    parts = _parts(state, target, batch, tx, recipe)
    report = _report(state.drafter, target, batch, recipe, alone, loop, parts)
    write_json(folder / "profile.json", report)
    print(_shown(report))
    try:
        timeline(_spans(folder), folder / "timeline.png", f"{TRACED} steps of the loop")
    except UserError as error:
        print(f"no picture of the trace: {error}")
    return state, result


def _parts(
    state: TrainState,
    target: Target,
    batch: Batch,
    tx: optax.GradientTransformation,
    recipe: Recipe,
) -> dict[str, float]:
    """Median seconds of each part alone, over a global batch; the parts take turns."""
    head, config = target.head, state.drafter.config
    params = trainable(state.drafter)
    blocks, weights = jax.jit(all_blocks, static_argnames=("config", "recipe"))(
        jax.random.key(0), batch, config, recipe
    )
    total = weights.unit.sum()

    @jax.jit
    def forward(target: Target, batch: Batch) -> jax.Array:
        def one(micro: tuple[jax.Array, ...]) -> jax.Array:
            tokens, documents, positions = micro
            return target(tokens, documents=documents, positions=positions).hidden

        return jax.lax.map(one, (batch.tokens, batch.documents, batch.positions))

    def over_micro_batches(value: Callable[..., jax.Array]) -> Callable[..., AnyDrafter]:
        @jax.jit
        def gradient(params: AnyDrafter, drafter: AnyDrafter, head: TargetHead, batch, *rest):
            def add(carry, micro):
                grads = jax.grad(lambda p: value(with_tables(p, drafter), head, *micro))(params)
                return jax.tree.map(jnp.add, carry, grads), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            return jax.lax.scan(add, zeros, (batch, *rest))[0]

        return gradient

    def hidden_states(drafter, head, batch, blocks):
        return jnp.square(block_hidden(drafter, head, batch, blocks).astype(jnp.float32)).mean()

    def loss(drafter, head, batch, blocks, weights):
        given = (batch, blocks, weights, total, recipe.loss, recipe.chunk)
        return dspark_loss(drafter, head, *given)[0]

    backbone, whole = over_micro_batches(hidden_states), over_micro_batches(loss)
    optimizer = jax.jit(
        lambda grads, old, params: optax.apply_updates(params, tx.update(grads, old, params)[0])
    )
    calls = {
        "target": lambda: forward(target, batch),
        "backbone": lambda: backbone(params, state.drafter, head, batch, blocks),
        "loss_and_gradient": lambda: whole(params, state.drafter, head, batch, blocks, weights),
        "optimizer": lambda: optimizer(params, state.opt_state, params),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(REPEATS + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            if repeat:  # the first call compiles
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _report(
    drafter: AnyDrafter,
    target: Target,
    batch: Batch,
    recipe: Recipe,
    alone: dict[str, list[float]],
    loop: dict[str, list[float]],
    parts: dict[str, float],
) -> dict[str, Any]:
    """profile.json: seconds of one step over the whole global batch."""
    features, step = (statistics.median(alone[name]) for name in ("features", "step"))
    devices = jax.sharding.get_mesh().devices.ravel()
    report: dict[str, Any] = {
        "target_seconds": parts["target"],
        "taps_seconds": features - parts["target"],
        "backbone_seconds": parts["backbone"],
        "vocabulary_loss_and_heads_seconds": parts["loss_and_gradient"] - parts["backbone"],
        "optimizer_seconds": parts["optimizer"],
        "rest_of_step_seconds": step - parts["loss_and_gradient"] - parts["optimizer"],
        "features_alone_seconds": features,
        "step_alone_seconds": step,
        "loop_seconds": statistics.median(loop["step"]),
        "loop_seconds_range": [min(loop["step"]), max(loop["step"])],
        "input_wait_seconds": statistics.median(loop["input_wait"]),
        "devices": len(devices),
        "device_kind": devices[0].device_kind,
    }
    report["loop_over_parts"] = report["loop_seconds"] / (features + step)
    if drafter.config.algorithm == "dspark":
        blocks, _ = all_blocks(jax.random.key(0), batch, drafter.config, recipe)
        flops = drafter_flops(drafter.shape, StepSizes.of(batch, blocks))
        flops += target_flops(target.config, batch, head=drafter.shape.pruned)
        report["model_flops"] = flops
        report["model_flops_per_second"] = flops / report["loop_seconds"]
        if chip := chip_of(devices[0]):
            peak = chip.flops_per_second * len(devices)
            report["mfu"] = report["model_flops_per_second"] / peak
    return report


def _shown(report: dict[str, Any]) -> str:
    """The table of a report."""
    names = ("target", "taps", "backbone", "vocabulary_loss_and_heads", "optimizer", "rest_of_step")
    whole = report["features_alone_seconds"] + report["step_alone_seconds"]
    rows = [(n.replace("_", " "), report[f"{n}_seconds"]) for n in names]
    rows += [("parts together", whole), ("a step in the loop", report["loop_seconds"])]
    rows += [("  of it the host on input", report["input_wait_seconds"])]
    shown = [(name, f"{1e3 * s:.1f}", f"{s / whole:.1%}") for name, s in rows]
    text = table(shown, ("a step's time", "ms", "of the parts"))
    if "model_flops" in report:
        text += f"\nmodel FLOPs {report['model_flops']:.3g}, in the loop "
        text += f"{report['model_flops_per_second']:.3g} per second"
        text += f", MFU {report['mfu']:.1%}" if "mfu" in report else ""
    return text


def _spans(folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Rows of the picture from the newest trace: name -> [(begin, end) in seconds].

    The host's annotations, and when the devices were in each of the two programs. XLA on CPUs
    records operations with the module they belong to, on TPUs and GPUs whole modules.
    """
    files = sorted(folder.glob("plugins/profile/*/*.trace.json.gz"))
    if not files:
        raise UserError(f"no trace in {folder}")
    with gzip.open(files[-1]) as file:
        events = json.load(file)["traceEvents"]
    threads = {
        (e["pid"], e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    found: dict[str, list[tuple[float, float]]] = {
        "host: dispatch": [],
        "host: input": [],
        "device: target": [],
        "device: train step": [],
    }
    for event in events:
        if event.get("ph") != "X":
            continue
        span = event["ts"] / 1e6, (event["ts"] + event.get("dur", 0)) / 1e6
        module = event.get("args", {}).get("hlo_module", "")
        if threads.get((event["pid"], event.get("tid"))) == "XLA Modules":
            module = event["name"]
        named = next((n for prefix, n in _NAMES.items() if module.startswith(prefix)), None)
        if named:
            found[f"device: {named}"].append(span)
        elif event["name"] in ("train", "input"):
            what = "dispatch" if event["name"] == "train" else "input"
            found[f"host: {what}"].append(span)
    first = min((begin for spans in found.values() for begin, _ in spans), default=0.0)
    return {
        name: [(begin - first, end - first) for begin, end in _joined(spans)]
        for name, spans in found.items()
    }


def _joined(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that overlap, or nearly touch, as one."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1] + 1e-4:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined
