"""The train step, top to bottom: anchors, global weight, loss and gradient, update.

The target's features come in with the batch and its head as an argument: frozen, outside the
gradient, never in the state, so nothing of it can be trained, decayed or saved by accident.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from dspark_jax.core.config import DrafterConfig, TrainConfig
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.trees import trainable, with_tables
from dspark_jax.features.source import Batch
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafters import AnyDrafter, new_drafter
from dspark_jax.models.target import Target, TargetHead
from dspark_jax.models.warm_start import warm_start
from dspark_jax.training.anchors import (
    Blocks,
    SlotWeights,
    make_blocks,
    sample_anchors,
    slot_weights,
)
from dspark_jax.training.eagle3 import may_start
from dspark_jax.training.losses import Sums, dspark_loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything an update changes; donated to the step."""

    step: jax.Array  # i32[], updates made
    drafter: AnyDrafter
    opt_state: optax.OptState
    ema: AnyDrafter | None = None  # average of the trained arrays, if train.ema asks for one

    @property
    def served(self) -> AnyDrafter:
        """The drafter to validate, evaluate and export: the average if there is one."""
        return self.drafter if self.ema is None else with_tables(self.ema, self.drafter)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The static options of a step; hashable."""

    loss: LossConfig
    num_anchors: int
    chunk: int
    seed: int
    remat: str = "none"
    ema: float = 0.0


def make_optimizer(config: TrainConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW with linear warm-up, cosine to 0 and clipping by global norm (the public recipe)."""
    schedule = learning_rate(config, num_steps)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule, b1=config.adam_b1, b2=config.adam_b2, weight_decay=config.weight_decay
        ),
    )


def learning_rate(config: TrainConfig, num_steps: int) -> optax.Schedule:
    """The schedule over optimizer steps."""
    warmup = max(round(config.warmup_fraction * num_steps), 1)
    return optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, warmup, max(num_steps, warmup + 1)
    )


def init_state(
    key: jax.Array,
    target: Target,
    draft_ids: jax.Array | None = None,
    *,
    shape: DrafterShape,
    tx: optax.GradientTransformation,
    ema: bool = False,
) -> TrainState:
    """A fresh drafter and its optimizer state; jit it to make both where they will live.

    Args:
      draft_ids: i32[V_d] ascending, where the drafter's vocabulary is pruned.
      ema: whether an average of the weights is kept; it starts as these.
    """
    return state_of(init_drafter(key, target, draft_ids, shape=shape), tx=tx, ema=ema)


def init_drafter(
    key: jax.Array, target: Target, draft_ids: jax.Array | None = None, *, shape: DrafterShape
) -> AnyDrafter:
    """A fresh drafter, perhaps with layers of the target; arguments as for `init_state`."""
    drafter = new_drafter(shape, rngs=nnx.Rngs(key))
    if shape.config.init == "target":
        drafter = warm_start(drafter, target)
    if shape.pruned:
        drafter.draft_ids.set_value(draft_ids)
    return drafter


def state_of(
    drafter: AnyDrafter, *, tx: optax.GradientTransformation, ema: bool = False
) -> TrainState:
    """The state before the first update of a drafter."""
    params = trainable(drafter)
    average = jax.tree.map(jnp.copy, params) if ema else None
    return TrainState(jnp.zeros((), jnp.int32), drafter, tx.init(params), average)


@functools.partial(jax.jit, static_argnames=("tx", "recipe"), donate_argnames="state")
def train_step(
    state: TrainState,
    head: TargetHead,
    batch: Batch,
    *,
    tx: optax.GradientTransformation,
    recipe: Recipe,
) -> tuple[TrainState, dict[str, Any]]:
    """One update on a global batch of M micro-batches.

    Every loss term is a sum over all slots of the global batch divided by the weight of the whole
    global batch: it does not matter on which device or in which micro-batch a slot lies, unless
    `loss.average_over` says so.

    Returns:
      The next state, and {"sums", "loss", "grad_norm", "finite"}: finite says whether taps and
      loss were; if not, the state is left as it was. A batch without any supervised slot counts
      as a step and changes nothing else.
    """
    config: DrafterConfig = state.drafter.config
    # 1. Anchors of all rows, and the weight of the whole batch.
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    blocks, weights = all_blocks(key, batch, config, recipe)
    total = weights.unit.sum()

    # 2. Loss and gradient: shares of micro-batches add up.
    def share(params: AnyDrafter, micro) -> tuple[jax.Array, Sums]:
        batch, blocks, weights = micro
        drafter = with_tables(params, state.drafter)
        options = (recipe.loss, recipe.chunk, recipe.remat)
        return dspark_loss(drafter, head, batch, blocks, weights, total, *options)

    def accumulate(carry, micro):
        (loss, sums), grads = jax.value_and_grad(share, has_aux=True)(params, micro)
        return jax.tree.map(jnp.add, carry, (loss, sums, grads)), None

    params = trainable(state.drafter)
    first, rest = _split_first((batch, blocks, weights))
    (loss, sums), grads = jax.value_and_grad(share, has_aux=True)(params, first)
    (loss, sums, grads), _ = jax.lax.scan(accumulate, (loss, sums, grads), rest)

    # 3. Update, unless something is not finite: the caller stops and names the batch.
    taps_finite = jnp.isfinite(jnp.where((batch.documents > 0)[..., None, None], batch.taps, 0))
    grad_norm = optax.tree.norm(grads)
    finite = {"taps": taps_finite.all(), "loss": jnp.isfinite(loss) & jnp.isfinite(grad_norm)}
    updates, opt_state = tx.update(grads, state.opt_state, params)
    new_params = optax.apply_updates(params, updates)
    sound = finite["taps"] & finite["loss"]
    # Without any supervised slot there is no decay or momentum either.
    useful = sound & blocks.supervised.any()
    ema = _average(state.ema, new_params, recipe.ema, state.step) if recipe.ema else None
    params, opt_state, ema = jax.tree.map(
        lambda new, old: jnp.where(useful, new, old),
        (new_params, opt_state, ema),
        (params, state.opt_state, state.ema),
    )
    drafter = with_tables(params, state.drafter)
    new = TrainState(state.step + sound.astype(jnp.int32), drafter, opt_state, ema)
    return new, {"sums": sums, "loss": loss, "grad_norm": grad_norm, "finite": finite}


def _average(ema: AnyDrafter, params: AnyDrafter, decay: float, step: jax.Array) -> AnyDrafter:
    """The moving average after one more update; young ones forget faster."""
    decay = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda old, new: old + (1 - decay) * (new - old), ema, params)


@functools.partial(jax.jit, static_argnames="recipe")
def validation_step(drafter: AnyDrafter, head: TargetHead, batch: Batch, *, recipe: Recipe) -> Sums:
    """Sums over one batch with fixed anchors; uses no training randomness."""
    blocks, weights = all_blocks(jax.random.key(0), batch, drafter.config, recipe)
    micro, _ = _split_first((batch, blocks, weights))
    _, sums = dspark_loss(drafter, head, *micro, weights.unit.sum(), recipe.loss, recipe.chunk)
    return sums


def all_blocks(
    key: jax.Array, batch: Batch, config: DrafterConfig, recipe: Recipe
) -> tuple[Blocks, SlotWeights]:
    """Blocks and slot weights of all micro-batches, arrays [M, B, ...]."""
    room = config.block_size if recipe.loss.anchors == "block" else None

    def one(loss_mask, documents, rows):
        starts = may_start(loss_mask, documents) if config.algorithm == "eagle3" else loss_mask
        chosen = sample_anchors(key, starts, documents, rows, recipe.num_anchors, room)
        return make_blocks(*chosen, loss_mask, documents, config, recipe.loss)

    blocks = jax.lax.map(lambda x: one(*x), (batch.loss_mask, batch.documents, batch.rows))
    return blocks, slot_weights(blocks, batch.loss_mask, config, recipe.loss)


def _split_first(tree: Any) -> tuple[Any, Any]:
    first = jax.tree.map(lambda x: x[0], tree)
    return first, jax.tree.map(lambda x: x[1:], tree)


def summarize(sums: Sums, loss: LossConfig, config: DrafterConfig) -> dict[str, Any]:
    """Metrics of a step or of a validation pass, from sums on the host (numpy)."""
    skip = 0 if config.sample_from_anchor else 1  # slots that propose nothing

    def per_slot(values) -> list[float]:
        pairs = zip(values[skip:], sums.slots[skip:], strict=True)
        return [float(v / max(n, 1.0)) for v, n in pairs]

    weight = max(float(sums.weight), 1e-20)
    ce, l1, kl, bce = (float(x) / weight for x in (sums.ce, sums.l1, sums.kl, sums.bce))
    distance = loss.distance_scale * l1
    survival, survival_match = per_slot(sums.survive), per_slot(sums.survive_match)
    return {
        "loss": loss.ce * ce + loss.l1 * distance + loss.kl * kl + loss.confidence * bce,
        "loss_ce": ce,
        f"loss_{loss.distance}": distance,
        **({"loss_kl": kl} if loss.kl else {}),
        "loss_confidence": bce,
        "acceptance": per_slot(sums.accept),
        "acceptance_t0": per_slot(sums.match),
        "expected_accepted_length": 1 + sum(survival),
        "expected_accepted_length_t0": 1 + sum(survival_match),
        "confidence_error": per_slot(sums.confidence_error),
        "confidence_bias": per_slot(sums.confidence_bias),
        "confidence_cumulative_bias": per_slot(sums.cumulative_bias),
        "anchors_per_row": float(sums.anchors) / max(float(sums.rows), 1.0),
    }
