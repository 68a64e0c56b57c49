"""A drafter that starts from the target's last layers instead of noise.

Not in the papers. A short run on little data gains most from it: values, output projections and
MLPs already speak the language of the LM head. Nothing else of the recipe changes.
"""

import jax
import jax.numpy as jnp

from dspark_jax.core.errors import UserError
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.linear import dequantised
from dspark_jax.models.target import Target, TargetConfig


def check_warm_start(shape: DrafterShape, target: TargetConfig) -> None:
    """Refuses a drafter whose layers are not shaped like the target's."""
    if target.is_gemma or target.experts:
        what = "norms on both sides and GELU" if target.is_gemma else "experts"
        raise UserError(
            f"drafter.init='target' needs a target with layers like the drafter's; those of "
            f"{target.family} have {what}: use 'normal'"
        )
    if shape.num_kv_heads % target.num_kv_heads:
        raise UserError(
            f"drafter.init='target' needs drafter.num_kv_heads={target.num_kv_heads}, the "
            f"target's, or a multiple of it, not {shape.num_kv_heads}"
        )
    for name in ("num_heads", "head_dim", "intermediate_size"):
        if getattr(shape, name) != getattr(target, name):
            raise UserError(
                f"drafter.init='target' needs drafter.{name}={getattr(target, name)}, the "
                f"target's, not {getattr(shape, name)}"
            )
    if shape.config.num_layers > target.num_layers:
        raise UserError(
            f"drafter.init='target': the target has only {target.num_layers} layers, the drafter "
            f"{shape.config.num_layers}"
        )


def warm_start(drafter: Drafter, target: Target) -> Drafter:
    """The drafter with its layers, last norm and `fc` taken from the target.

    Draft layer i is the target's layer N - n + i. The last tap passes through `fc` unchanged and
    the other taps faintly. Norm weights before q, k and v are folded into them, because the
    context has one norm for all layers. With more key/value heads than the target has, each of its
    own serves several alike at first: the same function, with room to learn more of the context in
    few layers. Where the target has no per-head norms, theirs are set to
    the size that q and k have on inputs of unit variance, so attention starts about as sharp.
    Heads (Markov, confidence) keep their own initialisation.
    """
    arrays = dict(named(drafter))
    source = dequantised(named(target))
    config = drafter.config
    like = {name: jax.typeof(value).sharding.spec for name, value in arrays.items()}

    def put(name: str, value: jax.Array) -> None:
        arrays[name] = jax.sharding.reshard(value.astype(jnp.float32), like[name])

    first = target.config.num_layers - config.num_layers
    for index in range(config.num_layers):
        ours, theirs = f"layers.{index}", f"layers.{first + index}"
        scale = source[f"{theirs}.input_norm"].astype(jnp.float32)
        for part in ("q", "k", "v"):
            weight = source[f"{theirs}.attention.{part}"].astype(jnp.float32) * scale
            put(f"{ours}.attention.{part}", _regrouped(weight, arrays[f"{ours}.attention.{part}"]))
            if part == "v":
                continue
            norm = f"attention.{part}_norm"
            if f"{theirs}.{norm}" in source:
                put(f"{ours}.{norm}", source[f"{theirs}.{norm}"])
            else:
                size = jnp.sqrt(jnp.mean(jnp.sum(jnp.square(weight), axis=-1)))
                put(f"{ours}.{norm}", jnp.full_like(arrays[f"{ours}.{norm}"], 1.0) * size)
        for part in ("attention.o", "post_norm", "mlp.gate", "mlp.up", "mlp.down"):
            put(f"{ours}.{part}", _regrouped(source[f"{theirs}.{part}"], arrays[f"{ours}.{part}"]))
    put("norm", source["norm"])
    hidden = drafter.shape.hidden_size
    last = hidden * (len(config.target_layer_ids) - 1)
    column = jnp.arange(arrays["fc"].shape[1])
    identity = (column - last == jnp.arange(hidden)[:, None]).astype(jnp.float32)
    put("fc", jnp.where(column < last, 0.1 * arrays["fc"], identity))
    return with_arrays(drafter, arrays)


def _regrouped(weight: jax.Array, ours: jax.Array) -> jax.Array:
    """A target's attention weight in the drafter's grouping of heads; others as they are.

    q [K, Q, H, D] and o [D, K, Q, H] keep their heads in order, k and v [K, H, D] repeat theirs.
    """
    if weight.shape == ours.shape:
        return weight
    whole = jax.sharding.reshard(weight, jax.sharding.PartitionSpec(*[None] * weight.ndim))
    if weight.ndim == 3:
        return jnp.repeat(whole, ours.shape[0] // weight.shape[0], axis=0)
    return whole.reshape(ours.shape)
