"""Where every array lives: the mesh, the logical axis names, and the helpers models use.

The mesh has explicit axis types: a sharding is part of an array's type, written once at the
parameter and at each contraction, and inherited by everything computed from it (optimizer state,
outputs of jit, restore targets). One device is the mesh (1, 1), same code.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.core.config import MeshConfig
from dspark_jax.core.errors import UserError

# Logical axis of an array -> axis of the device mesh. Axes not listed are replicated.
RULES = {
    "batch": "fsdp",
    "embed": "fsdp",
    "heads": "tp",
    "mlp": "tp",
    "experts": "tp",
    "vocab": "tp",
}
_AXES, _EXPLICIT = ("fsdp", "tp"), (AxisType.Explicit,) * 2


def make_mesh(fsdp: int = 1, tp: int = 1) -> jax.sharding.Mesh:
    """A mesh of fsdp x tp devices; fsdp = -1 takes all devices that tp leaves.

    Raises:
      UserError: if the machine has too few devices.
    """
    available = jax.device_count()
    if fsdp == -1:
        fsdp = available // tp if tp > 0 else 0
    if fsdp < 1 or tp < 1 or fsdp * tp > available:
        raise UserError(
            f"mesh (fsdp={fsdp}, tp={tp}) needs {fsdp * tp} devices, this machine has {available}: "
            "set --config.mesh.fsdp and --config.mesh.tp"
        )
    if jax.process_count() > 1 and fsdp * tp < available:
        raise UserError(
            f"mesh (fsdp={fsdp}, tp={tp}) takes {fsdp * tp} of {available} devices, but several "
            "processes have to take them all: set --config.mesh.fsdp=-1"
        )
    devices = jax.devices()[: fsdp * tp]
    return jax.make_mesh((fsdp, tp), _AXES, axis_types=_EXPLICIT, devices=devices)


def make_meshes(config: MeshConfig) -> tuple[Mesh, Mesh]:
    """(drafter's mesh, target's mesh): the same one, unless the target has devices of its own.

    With several processes each has the same number of both kinds of devices, and both meshes have
    one shape: then what the target gives to a shard of the drafter's mesh is in the same process.

    Raises:
      UserError: too few devices, or another shape.
    """
    if not config.target_fsdp:
        mesh = make_mesh(config.fsdp, config.tp)
        return mesh, mesh
    number, available = jax.process_count(), jax.device_count()
    own = config.target_fsdp * config.target_tp
    fsdp = (available - own) // config.tp if config.fsdp == -1 else config.fsdp
    needed = own + fsdp * config.tp
    sizes = f"mesh (fsdp={fsdp}, tp={config.tp}) and one of the target's own " + (
        f"(target_fsdp={config.target_fsdp}, target_tp={config.target_tp})"
    )
    if fsdp < 1 or needed > available:
        raise UserError(f"{sizes} need {needed} devices, there are {available}")
    same = (fsdp, config.tp) == (config.target_fsdp, config.target_tp)
    if number > 1 and not (same and needed == available and own % number == 0):
        raise UserError(
            f"{sizes}: {number} processes need two meshes of one shape that take all {available} "
            "devices, equal shares of every process"
        )
    groups = [jax.local_devices(process_index=index) for index in range(number)]
    split = fsdp * config.tp // number
    drafters = [device for group in groups for device in group[:split]]
    targets = [device for group in groups for device in group[split:]][:own]
    return _mesh(drafters, fsdp, config.tp), _mesh(targets, config.target_fsdp, config.target_tp)


def _mesh(devices: list, fsdp: int, tp: int) -> Mesh:
    return Mesh(np.array(devices).reshape(fsdp, tp), _AXES, axis_types=_EXPLICIT)


def move(tree: Any, mesh: Mesh) -> Any:
    """The arrays on another mesh with the same specs; those that are there stay as they are.

    A shard that both meshes have goes from device to device, and nothing waits: what computes it
    and what uses it may overlap. Where they cut an array otherwise (another fsdp, or tp) jax passes
    it through the host, which `make_meshes` allows in one process only.
    """

    def one(x: jax.Array) -> jax.Array:
        sharding = NamedSharding(mesh, x.sharding.spec)
        if x.sharding == sharding:
            return x
        here = {str(shard.index): shard.data for shard in x.addressable_shards}
        places = sharding.addressable_devices_indices_map(x.shape)
        if not {str(index) for index in places.values()} <= set(here):
            return jax.device_put(x, sharding)
        pieces = [jax.device_put(here[str(index)], device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)

    return jax.tree.map(one, tree)


def mesh_here(fsdp: int, tp: int) -> jax.sharding.Mesh:
    """A run's mesh for using it; one device where this machine has fewer: only speed changes."""
    if max(fsdp, 1) * tp > jax.device_count():
        return make_mesh()
    return make_mesh(fsdp, tp)


def platform() -> str:
    """Of the devices that the current mesh has, here or in a compiler's description of them."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return device.platform if device else jax.default_backend()


def spec(*axes: str | None) -> P:
    """PartitionSpec of logical axis names; a mesh axis may be used once."""
    mesh_axes = [RULES.get(axis) if axis else None for axis in axes]
    used = [axis for axis in mesh_axes if axis]
    if len(used) != len(set(used)):
        raise ValueError(f"logical axes {axes} map one mesh axis twice: {mesh_axes}")
    return P(*mesh_axes)


def place(x: Any, *axes: str | None) -> jax.Array:
    """Puts a host array, the same on every process, on the current mesh with these logical axes."""
    if jax.process_count() > 1:
        x = np.asarray(x)
        return place_parts(lambda index: x[index], x.shape, *axes)
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec(*axes)))


def place_parts(
    read: Callable[[tuple[slice, ...]], np.ndarray], shape: tuple[int, ...], *axes: str | None
) -> jax.Array:
    """An array of this shape on the current mesh; `read` is asked for this process's parts only."""
    sharding = NamedSharding(jax.sharding.get_mesh(), spec(*axes))
    return jax.make_array_from_callback(shape, sharding, read)


def to_host(tree: Any) -> Any:
    """Whole numpy arrays of arrays on the current mesh, on every process."""
    if jax.process_count() > 1:
        tree = jax.tree.map(lambda x: jax.sharding.reshard(x, P(*[None] * x.ndim)), tree)
    return jax.device_get(tree)


def param(
    init: Callable, rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], dtype: Any
) -> nnx.Param:
    """A parameter with its sharding written at the place where it is made."""
    return nnx.Param(init(rngs.params(), shape, dtype, out_sharding=spec(*axes)))


def einsum(equation: str, *operands: jax.Array, out: tuple[str | None, ...], **dtype: Any):
    """`jnp.einsum` that says where its result lives; this is where collectives appear."""
    return jnp.einsum(equation, *operands, out_sharding=spec(*out), **dtype)


def gather_rows(table: jax.Array, ids: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """`table[ids]` for a table that may be sharded over its rows; `axes` of the result."""
    return table.at[ids].get(out_sharding=spec(*axes))


def abstract(fn: Callable, *args: Any) -> Any:
    """Shapes, dtypes and shardings of `fn(*args)` on the current mesh, without computing it."""
    mesh = jax.sharding.get_mesh()

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, x.sharding.spec if x.sharding else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(describe, jax.eval_shape(fn, *args))
