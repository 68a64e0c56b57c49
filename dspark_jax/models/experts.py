"""Mixtures of experts: every token goes through the few that its router chooses.

Experts are spread over the mesh axis `tp`. Each device sorts the tokens of its part of the batch by
expert, takes its own experts' rows through grouped products (`jax.lax.ragged_dot`), and the parts
are summed. Shapes are static and no token is ever dropped.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.sharding import RULES, einsum, gather_rows, param, spec
from dspark_jax.models.layers import ACTIVATIONS, rms_norm
from dspark_jax.models.target_config import ExpertsConfig


class Experts(nnx.Module):
    """The gated MLPs [E, ...], without a router."""

    def __init__(
        self, config: ExpertsConfig, hidden: int, *, activation: str, init, dtype, rngs: nnx.Rngs
    ):
        wide = (config.count, config.width, hidden)
        self.activation = activation
        self.gate = param(init, rngs, wide, ("experts", None, "embed"), dtype)
        self.up = param(init, rngs, wide, ("experts", None, "embed"), dtype)
        down = (config.count, hidden, config.width)
        self.down = param(init, rngs, down, ("experts", "embed", None), dtype)

    def __call__(self, x: jax.Array, weights: jax.Array, chosen: jax.Array) -> jax.Array:
        """Sum of each token's experts.

        Args:
          x: [B, T, D]; weights: f32[B, T, C] of the chosen experts; chosen: i32[B, T, C].

        Returns:
          [B, T, D].
        """
        rows = spec("batch", None, None)
        inner, outer = spec("experts", None, "embed"), spec("experts", "embed", None)
        per_device = jax.shard_map(
            self._local,
            in_specs=(rows, rows, rows, inner, inner, outer),
            out_specs=rows,
            check_vma=False,
        )
        parts = (self.gate[...], self.up[...], self.down[...])
        return per_device(x, weights, chosen, *(part.astype(x.dtype) for part in parts))

    def _local(self, x, weights, chosen, gate, up, down) -> jax.Array:
        """One device's tokens and experts; the axes are `RULES`."""
        gate, up = (jax.lax.all_gather(w, RULES["embed"], axis=2, tiled=True) for w in (gate, up))
        down = jax.lax.all_gather(down, RULES["embed"], axis=1, tiled=True)
        count, each, size = gate.shape[0], chosen.shape[-1], x.shape[-1]
        expert = chosen.reshape(-1) - jax.lax.axis_index(RULES["experts"]) * count
        expert = jnp.where((expert >= 0) & (expert < count), expert, count)  # of others: last
        order = jnp.argsort(expert)
        sizes = jnp.sum(expert[:, None] == jnp.arange(count), axis=0, dtype=jnp.int32)
        token = order // each
        rows = x.reshape(-1, size)[token]
        wide = ACTIVATIONS[self.activation](jax.lax.ragged_dot(rows, gate.swapaxes(1, 2), sizes))
        wide = wide * jax.lax.ragged_dot(rows, up.swapaxes(1, 2), sizes)
        f32 = {"preferred_element_type": jnp.float32}
        out = jax.lax.ragged_dot(wide, down.swapaxes(1, 2), sizes, **f32)
        # Rows of other devices' experts lie behind the groups, where a kernel may leave anything.
        mine = (expert < count)[order]
        out = jnp.where(mine[:, None], out * weights.reshape(-1)[order][:, None], 0.0)
        total = jnp.zeros((x.shape[0] * x.shape[1], size), jnp.float32).at[token].add(out)
        return jax.lax.psum(total, RULES["experts"]).astype(x.dtype).reshape(x.shape)


def choose(scores: jax.Array, config: ExpertsConfig) -> tuple[jax.Array, jax.Array]:
    """Weights f32[B, T, C] and numbers i32[B, T, C] of the experts with the highest scores."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), config.per_token)
    if config.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights, chosen


def _scores(x: jax.Array, router: jax.Array) -> jax.Array:
    """f32[B, T, E]; in float32 whatever the dtype of x, so that close ones keep their order."""
    x, router = x.astype(jnp.float32), router.astype(jnp.float32)
    return einsum("btd,ed->bte", x, router, out=("batch", None, None))


class Moe(nnx.Module):
    """Qwen3-MoE: experts in place of the MLP."""

    def __init__(self, config: ExpertsConfig, hidden: int, *, init, dtype, rngs: nnx.Rngs):
        self.config = config
        self.router = param(init, rngs, (config.count, hidden), (None, "embed"), dtype)
        options = {"init": init, "dtype": dtype, "rngs": rngs}
        self.experts = Experts(config, hidden, activation="silu", **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        return self.experts(x, *choose(_scores(x, self.router[...]), self.config))


class GemmaMoe(nnx.Module):
    """Gemma 4: experts beside the MLP, with norms and a router of their own."""

    def __init__(self, config: ExpertsConfig, hidden: int, *, init, dtype, rngs: nnx.Rngs):
        ones = nnx.initializers.ones
        self.config = config
        self.router = param(init, rngs, (config.count, hidden), (None, "embed"), dtype)
        self.router_scale = param(ones, rngs, (hidden,), (None,), dtype)
        self.expert_scale = param(ones, rngs, (config.count,), (None,), dtype)
        self.input_norm = param(ones, rngs, (hidden,), (None,), dtype)
        options = {"init": init, "dtype": dtype, "rngs": rngs}
        self.experts = Experts(config, hidden, activation="gelu", **options)
        self.output_norm = param(ones, rngs, (hidden,), (None,), dtype)

    def __call__(self, x: jax.Array, eps: float) -> jax.Array:
        """[B, T, D] -> [B, T, D]; x before any norm."""
        routed = rms_norm(x, None, eps) * self.router_scale[...].astype(x.dtype)
        routed = routed * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        weights, chosen = choose(_scores(routed, self.router[...]), self.config)
        factors = gather_rows(self.expert_scale[...], chosen, ("batch", None, None))
        mixed = self.experts(
            rms_norm(x, self.input_norm[...], eps), weights * factors.astype(jnp.float32), chosen
        )
        return rms_norm(mixed, self.output_norm[...], eps)
