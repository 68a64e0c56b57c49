"""Modules as plain dictionaries of named arrays, the form that checkpoints and files hold.

An `nnx.List` inside a saved module makes a checkpoint that can never be loaded, so modules are
never saved as such.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def is_module(x: Any) -> bool:
    """Whether x is an nnx module."""
    return isinstance(x, nnx.Module)


def named(module: nnx.Module) -> dict[str, Any]:
    """{"layers.0.mlp.up": array}: the names on disk."""
    state = nnx.to_flat_state(nnx.state(module))
    values = {".".join(map(str, path)): variable.get_value() for path, variable in state}
    return {name: value for name, value in values.items() if value is not None}


def with_arrays(module: nnx.Module, arrays: dict[str, Any]) -> nnx.Module:
    """The module with its arrays replaced; exactly the same names are required."""
    graphdef, state = nnx.split(module)
    flat = nnx.to_flat_state(state)
    names = {".".join(map(str, path)) for path, var in flat if var.get_value() is not None}
    if names != set(arrays):
        raise ValueError(f"missing {sorted(names - set(arrays))}, extra {set(arrays) - names}")
    filled = [(path, var.replace(arrays.get(".".join(map(str, path))))) for path, var in flat]
    return nnx.merge(graphdef, nnx.from_flat_state(filled))


def trainable(module: nnx.Module) -> nnx.Module:
    """The module with None in place of every table of integers, which nothing trains."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, module)


def with_tables(module: nnx.Module, whole: nnx.Module) -> nnx.Module:
    """Inverse of `trainable`: the tables of `whole` put back."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, module, whole, is_leaf=lambda x: x is None
    )


def to_plain(tree: Any) -> Any:
    """Replaces every module in `tree` (also inside an optimizer state) by its named arrays."""
    return jax.tree.map(lambda x: named(x) if is_module(x) else x, tree, is_leaf=is_module)


def from_plain(template: Any, plain: Any) -> Any:
    """Inverse of `to_plain`; `template` supplies the modules."""

    def fill(x: Any, arrays: Any) -> Any:
        return with_arrays(x, arrays) if is_module(x) else arrays

    return jax.tree.map(fill, template, plain, is_leaf=is_module)
