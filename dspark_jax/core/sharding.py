"""Where every array lives: the mesh, the logical axis names, and the helpers models use.

The mesh has explicit axis types: a sharding is part of an array's type, written once at the
parameter and at each contraction, and inherited by everything computed from it (optimizer state,
outputs of jit, restore targets). One device is the mesh (1, 1), same code.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

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


def make_mesh(fsdp: int = 1, tp: int = 1) -> jax.sharding.Mesh:
    """A mesh of fsdp x tp devices; fsdp = -1 takes all devices that tp leaves.

    Raises:
      UserError: if the machine has too few devices.
    """
    available = jax.device_count()
    if fsdp == -1:
        fsdp = available // tp
    if fsdp < 1 or tp < 1 or fsdp * tp > available:
        raise UserError(
            f"mesh (fsdp={fsdp}, tp={tp}) needs {fsdp * tp} devices, this machine has {available}: "
            "set --config.mesh.fsdp and --config.mesh.tp"
        )
    devices = jax.devices()[: fsdp * tp]
    return jax.make_mesh(
        (fsdp, tp), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2, devices=devices
    )


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
    """Puts a host array on the current mesh with the given logical axes."""
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec(*axes)))


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
