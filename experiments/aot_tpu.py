"""Does a config fit a TPU slice, and what would bound its step? Compiled for real, without a TPU.

    python experiments/aot_tpu.py --config=configs/qwen3_4b.py --topology=v5e:4x4
    python experiments/aot_tpu.py --config=configs/qwen3_8b.py:gated --topology=v5p:2x2x4,v6e:4x4
    python experiments/aot_tpu.py --config=configs/qwen3_4b.py --topology=cuda

Needs libtpu (pip install libtpu), but no chip and no weights. The programs are those that training
and decoding run: the target's features, the train step, one speculative round. Of each it prints

  program  HBM of a chip while it runs: arguments, results, temporaries, code
  beside   what else lives there then: the target's layers and the next batch beside a train step,
           the drafter, its optimizer and the batch before beside the features
  FLOPs    of all products, from the jaxpr, loops multiplied out, divided by the chips
  HBM, links  traffic of a chip, from the compiled program, loops multiplied out (program_costs.py)
  floor    the longest of the times that arithmetic, HBM and links would need at their peaks
           (core/chips.py): no measurement, and no step is faster

A program that does not fit is a line with the compiler's own figure. A line is printed as soon as
it is there, and kept in --out: the same program for the same chips and compiler is not compiled
again. cuda is lowered only, not compiled: no compiler for GPUs runs without one.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Compiles beside the CPU backend, on machines that are no TPU hosts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
import jax.numpy as jnp
import program_costs
from absl import flags
from flax import nnx
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import config_flags

from dspark_jax.core.chips import Chip, chip_named
from dspark_jax.core.command import run_main
from dspark_jax.core.config import MeshConfig, RunConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import spec
from dspark_jax.decoding.rounds import speculative_round, start
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.features.local import add_features
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafters import new_drafter
from dspark_jax.models.linear import with_int8
from dspark_jax.models.target import Target, TargetConfig
from dspark_jax.training.step import Recipe, init_state, make_optimizer, train_step
from dspark_jax.weights.resolve import is_bundled, resolve_target
from dspark_jax.weights.safetensors import read_json

SHAPES = Path(__file__).resolve().parent / "target_shapes.json"
# What libtpu's compiler has of a chip's HBM: "exceeds available HBM (15.75G)".
USABLE_HBM = {"v5e": 15.75 * 2**30, "v5p": 95.74 * 2**30, "v6e": 31.25 * 2**30}
AXES = ("fsdp", "tp")
EXPLICIT = (AxisType.Explicit,) * len(AXES)


@dataclasses.dataclass(frozen=True)
class Program:
    """A program to compile, and the bytes per chip of what lives beside its own arrays."""

    trace: Callable[[], Any]  # -> jax.stages.Traced
    beside_bytes: int


# ---- The programs of a config -----------------------------------------------------------------


def programs(
    config: RunConfig, target_shape: TargetConfig, requests: int, context: int
) -> dict[str, Program]:
    """The programs of training and decoding on the current mesh, from shapes alone.

    Args:
      requests: rows of the round; context: tokens behind each of them.
    """
    target = _described(functools.partial(_target, target_shape, config.target_weights))
    head = _described(lambda target: target.head, target)
    shape = DrafterShape.of(config.drafter, target_shape)
    ids = _array((shape.draft_vocab,), jnp.int32) if shape.pruned else None
    options = config.train
    tx = make_optimizer(options, max(options.num_steps, 2))
    init = functools.partial(init_state, shape=shape, tx=tx, ema=options.ema > 0)
    state = _described(init, jax.eval_shape(jax.random.key, 0), target, ids)
    micro = (options.accumulation, options.global_batch_size // options.accumulation)
    tokens = _array((*micro, config.data.sequence_length), jnp.int32, None, "batch")
    mask = _array(tokens.shape, jnp.bool_, None, "batch")
    rows = _array(micro, jnp.int32, None, "batch")
    given = target, tokens, mask, tokens, tokens, rows
    static = {"taps": config.drafter.target_layer_ids, "whole": shape.pruned}
    batch = _described(functools.partial(add_features, **static), *given)
    numbers = options.num_anchors, options.loss_chunk, config.seed
    recipe = Recipe(config.loss, *numbers, options.remat, options.ema)
    size = program_costs.shard_bytes
    return {
        "features": Program(
            functools.partial(add_features.trace, *given, **static), size(state) + size(batch)
        ),
        "train step": Program(
            functools.partial(train_step.trace, state, head, batch, tx=tx, recipe=recipe),
            size(target) - size(head) + size(batch),
        ),
        "round": Program(functools.partial(_trace_round, target, shape, requests, context, ids), 0),
    }


def _target(shape: TargetConfig, weights: str) -> Target:
    target = Target(shape, rngs=nnx.Rngs(0))
    if weights:
        with_int8(target.layers)
    return target


def _trace_round(target: Any, shape: DrafterShape, requests: int, context: int, ids: Any) -> Any:
    """One round at temperature 1 of rows in the middle of their answers."""

    def make(ids):
        drafter = new_drafter(shape, rngs=nnx.Rngs(0))
        if ids is not None:
            drafter.draft_ids.set_value(ids)
        return drafter

    drafter = _described(make, ids)
    options = jax.eval_shape(lambda: SamplingParams.make(1, 1.0, seeds=[0]))
    params = jax.tree.map(lambda x: _array((requests,), x.dtype, "batch"), options)
    limit, stop = _array((requests,), jnp.int32, "batch"), _array((1,), jnp.int32)
    prompts = _array((requests, context), jnp.int32, "batch")
    begin = functools.partial(start, max_new=shape.config.num_proposals + 1)
    state = _described(begin, target, drafter, prompts, limit, params, stop, limit)
    head = _described(lambda drafter, target: drafter.head(target.head), drafter, target)
    run = jax.jit(speculative_round, donate_argnums=3)
    return run.trace(target, drafter, head, state, params, stop, limit)


def _mesh() -> Any:
    """The current mesh, of devices or of their description alone."""
    mesh = jax.sharding.get_mesh()
    return jax.sharding.get_abstract_mesh() if mesh.empty else mesh


def _array(shape: tuple[int, ...], dtype: Any, *axes: str | None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(_mesh(), spec(*axes)))


def _described(fn: Callable, *args: Any) -> Any:
    """Shapes, dtypes and shardings of `fn(*args)`, also on a mesh without devices."""

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(_mesh(), x.sharding.spec if x.sharding else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(describe, jax.eval_shape(fn, *args))


# ---- Compiling --------------------------------------------------------------------------------


def mesh_of(config: MeshConfig, topology: str) -> tuple[Any, Chip | None]:
    """The config's mesh on the chips of a topology, and what such a chip can do.

    "cuda" is one GPU that is only described: enough to lower for, not to compile.

    Raises:
      UserError: unknown chips, a mesh that they do not make, no libtpu.
    """
    if topology == "cuda":
        gpu = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
        return AbstractMesh((1, 1), AXES, axis_types=EXPLICIT, abstract_device=gpu), None
    kind = topology.partition(":")[0]
    if kind not in USABLE_HBM:
        raise UserError(f"--topology={topology}: {', '.join(USABLE_HBM)} as in v5e:4x4, or cuda")
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    except Exception as error:  # libtpu missing, or a topology that it does not know
        reason = str(error).strip().splitlines()[0][:200]
        raise UserError(
            f"--topology={topology}: {reason}; needs libtpu (pip install libtpu) and a slice that "
            "it knows, such as v5e:4x4, v5p:2x2x4, v6e:4x4"
        ) from None
    devices = found.devices
    tp = config.tp
    fsdp = len(devices) // tp if config.fsdp == -1 else config.fsdp
    if fsdp < 1 or fsdp * tp > len(devices):
        raise UserError(
            f"mesh (fsdp={fsdp}, tp={tp}) needs {fsdp * tp} chips, {topology} has {len(devices)}: "
            "set --config.mesh.fsdp and --config.mesh.tp"
        )
    devices = devices[: fsdp * tp]
    mesh = jax.make_mesh((fsdp, tp), AXES, axis_types=EXPLICIT, devices=devices)
    return mesh, chip_named(kind)


def run(
    config: RunConfig,
    target: TargetConfig,
    topology: str,
    requests: int,
    context: int,
    known: Mapping[str, Any] | None = None,
    on_row: Callable[[str, dict[str, Any]], None] = lambda name, row: None,
) -> dict[str, Any]:
    """Compiles (or, for cuda, lowers) the programs of a config.

    Args:
      known: rows of an earlier run; a row whose program, chips and compiler are these is kept.
      on_row: called with every program's name and row once it is there.

    Returns:
      {program: row}, each with units in the names.
    """
    mesh, chip = mesh_of(config.mesh, topology)
    enter = jax.sharding.use_abstract_mesh if chip is None else jax.set_mesh
    rows = {}
    with enter(mesh):
        todo = programs(config, target, requests, context)
        for name, program in progress(list(todo.items()), desc=topology, unit="program"):
            traced = program.trace()
            row = {"topology": topology, "mesh": dict(mesh.shape), "jax": jax.__version__}
            if chip is None:
                text = traced.lower(lowering_platforms=("cuda",)).as_text()
                row |= {"lowered_bytes": len(text), "kernels": _kernels(text)}
            else:
                row |= _compiled(traced, program, chip, (known or {}).get(name))
            rows[name] = row
            on_row(name, row)
    return rows


def _compiled(
    traced: Any, program: Program, chip: Chip, known: Mapping[str, Any] | None
) -> dict[str, Any]:
    lowered = traced.lower()
    version = importlib.metadata.version("libtpu")
    content = f"{chip.name} {version} {program.beside_bytes} {lowered.as_text()}"
    same = {"program": hashlib.sha256(content.encode()).hexdigest()[:16], "libtpu": version}
    if known and same.items() <= known.items():
        return dict(known)
    chips, began = _mesh().size, time.monotonic()
    row = same | {
        "flops": program_costs.flops(traced.jaxpr) / chips,
        "beside_bytes": program.beside_bytes,
        "usable_hbm_bytes": USABLE_HBM[chip.name],
    }
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found = re.search(r"Used ([\d.]+)G of|\(([\d.]+)G\) exceeds", str(error))
        needed = float(found[1] or found[2]) * 2**30 if found else None
        needed = needed and needed + program.beside_bytes
        return row | {"fits": False, "refused": True, "total_bytes": needed}
    memory = compiled.memory_analysis()
    own = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.generated_code_size_in_bytes
    )
    total = own + program.beside_bytes
    moved = program_costs.traffic(compiled.as_text())
    seconds = {
        "arithmetic": row["flops"] / chip.flops_per_second,
        "hbm": moved.hbm_bytes / chip.hbm_bytes_per_second,
        "links": moved.link_bytes / chip.link_bytes_per_second,
    }
    cost = compiled.cost_analysis()
    return row | {
        "fits": total <= USABLE_HBM[chip.name],
        "program_bytes": own,
        "temporary_bytes": memory.temp_size_in_bytes,
        "total_bytes": total,
        "hbm_traffic_bytes": moved.hbm_bytes,
        "link_bytes": moved.link_bytes,
        "collective_bytes": moved.collectives,
        "uncounted_loops": moved.uncounted_loops,
        "xla_flops_loops_once": cost["flops"],
        "xla_bytes_accessed_loops_once": cost["bytes accessed"],
        "seconds": seconds,
        "bound_by": max(seconds, key=seconds.__getitem__),
        "floor_seconds": max(seconds.values()),
        "compile_seconds": time.monotonic() - began,
    }


def _kernels(text: str) -> dict[str, int]:
    """Custom calls of a lowered program by target."""
    found = re.findall(r"custom_call @([\w$.]+)", text)
    return {name: found.count(name) for name in sorted(set(found))}


# ---- Printing ---------------------------------------------------------------------------------

COLUMNS = (
    "config", "topology", "mesh", "program", "fits", "program GiB", "beside GiB", "of HBM",
    "TFLOPs", "HBM GB", "links GB", "arith. ms", "HBM ms", "links ms", "floor ms", "bound by",
)  # fmt: skip


def line(config: str, name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    """The cells of a program's row under `COLUMNS`."""
    mesh = "x".join(str(x) for x in row["mesh"].values())
    head = (config, row["topology"], mesh, name)
    if "lowered_bytes" in row:
        size, calls = row["lowered_bytes"] / 1e6, row["kernels"].get("__gpu$xla.gpu.triton", 0)
        return (*head, f"lowered, not compiled: {size:.1f} MB, {calls} Triton kernels")
    needed, usable, gib = row["total_bytes"], row["usable_hbm_bytes"], 2**30
    share = f"{needed / usable:.0%}" if needed else "?"
    flops = f"{row['flops'] / 1e12:.3g}"
    beside = f"{row['beside_bytes'] / gib:.2f}"
    if row.get("refused"):
        own = f"{(needed - row['beside_bytes']) / gib:.2f}" if needed else "?"
        return (*head, "no", own, beside, share, flops, *["-"] * 6, "refused by the compiler")
    return (
        *head,
        "yes" if row["fits"] else "no",
        f"{row['program_bytes'] / gib:.2f}",
        beside,
        share,
        flops,
        f"{row['hbm_traffic_bytes'] / 1e9:.3g}",
        f"{row['link_bytes'] / 1e9:.3g}",
        *(f"{row['seconds'][x] * 1e3:.3g}" for x in ("arithmetic", "hbm", "links")),
        f"{row['floor_seconds'] * 1e3:.3g}",
        row["bound_by"],
    )


def summary(report: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A table of {"CONFIG TOPOLOGY": {program: row}}."""
    lines = [line(k.split()[0], n, row) for k, rows in report.items() for n, row in rows.items()]
    return table([(*x, *[""] * (len(COLUMNS) - len(x))) for x in lines], COLUMNS)


# ---- The command ------------------------------------------------------------------------------


def target_fields(target: str, folder: str | None) -> tuple[Mapping[str, Any], str]:
    """The fields of a target's config.json, and where they stand.

    From --target_config, the bundled target, a folder, the hub, or, where that cannot be reached,
    the few numbers of the public config.json files that target_shapes.json repeats.
    """
    if folder or is_bundled(target) or Path(target).exists():
        path = (Path(folder) if folder else resolve_target(target)) / "config.json"
        return read_json(path), str(path)
    from huggingface_hub import hf_hub_download

    try:
        path = Path(hf_hub_download(target, "config.json", etag_timeout=5))
        return read_json(path), str(path)
    except Exception as error:  # whatever the network or the hub answers
        known = read_json(SHAPES)
        if target not in known:
            reason = f"not on the hub now ({type(error).__name__}), nor in {SHAPES.name}"
            raise UserError(
                f"{target}: {reason}; give --target_config=DIR with its config.json"
            ) from None
        return known[target], f"{SHAPES.name} ({target}, from its public config.json)"


def main() -> None:
    """Entry point."""
    given = flags.FLAGS
    config = from_mapping(RunConfig, given.config.to_dict())
    fields, where = target_fields(config.target, given.target_config)
    target = TargetConfig.from_hf(fields, config.target_dtype, where)
    print(f"target: {where}")
    overrides = given["config"].override_values
    label = Path(given["config"].config_filename).name.replace(".py", "")
    label = " ".join([label, *(f"{k}={v}" for k, v in sorted(overrides.items()))])
    out = Path(given.out)
    report = dict(read_json(out)) if out.exists() else {}
    for topology in given.topology:
        key = f"{label} {topology}"
        known, fresh = report.get(key, {}), {}

        def keep(name: str, row: dict[str, Any], key=key, known=known, fresh=fresh) -> None:
            fresh[name] = row
            print(" | ".join(line(key, name, row)), flush=True)
            report[key] = known | fresh
            write_json(out, report)

        run(config, target, topology, given.requests, given.context, known, keep)
    print(summary(report))
    print(json.dumps({"written": str(out)}))


if __name__ == "__main__":  # flags too: tests import this file beside the commands
    config_flags.DEFINE_config_file(
        "config", None, "The experiment file, with a variant as FILE:VARIANT.", lock_config=True
    )
    flags.DEFINE_list("topology", ["v5e:4x4"], "Chips as libtpu names them, or cuda; some by ','.")
    flags.DEFINE_string("target_config", None, "A folder with the target's config.json.")
    flags.DEFINE_integer("requests", 32, "Rows of the decode round, a multiple of the axis fsdp.")
    flags.DEFINE_integer("context", 1024, "Tokens of context behind each row.")
    flags.DEFINE_string("out", "runs/aot/report.json", "The JSON file that rows are kept in.")
    flags.mark_flag_as_required("config")
    run_main(main)
