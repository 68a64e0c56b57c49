"""Do two drafters compute the same? Their shapes as functions, and their outputs on a fixed input.

Verification hides a wrong drafter: the text stays right and only acceptance falls. So whatever
moves weights or flags between files ends here, not at "it loads".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dspark_jax.core.config import Eagle3Config
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import abstract, place
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafters import AnyDrafter, new_drafter
from dspark_jax.models.eagle3 import Eagle3Drafter
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target import TargetHead

# What each kind of RoPE reads besides theta and the partial factor; the rest has no influence.
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position"),
    "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "attention_factor"),
    "proportional": ("factor",),
}


def canonical(shape: DrafterShape) -> DrafterShape:
    """`shape` with everything that does not change the float32 function at one fixed value.

    Two drafters with equal canonical shapes and equal arrays draft alike. Sizes taken over from the
    target become explicit; what matters only in training, the compute dtype and the target's depth
    are left out. A new option counts until it is left out here, and an export that lacks it fails.
    """
    config, rope = shape.config, shape.rope
    used = {name: getattr(rope, name) for name in ROPE_FIELDS[rope.kind]}
    config = dataclasses.replace(
        config,
        confidence_with_markov=sees_markov(shape),
        confidence_detach=False,
        init="normal",
        head_init="normal",
        eagle3=dataclasses.replace(config.eagle3, step_loss_decay=Eagle3Config.step_loss_decay),
        vocab_size=shape.draft_vocab if shape.pruned else 0,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype="float32",
    )
    partial = rope.partial_rotary_factor
    rope = RopeConfig(theta=rope.theta, kind=rope.kind, partial_rotary_factor=partial, **used)
    return dataclasses.replace(shape, config=config, rope=rope, target_layers=0)


def sees_markov(shape: DrafterShape) -> bool:
    """Whether there is a confidence head that is shown the Markov row of the previous token."""
    config = shape.config
    return config.confidence_head and config.confidence_with_markov and config.markov_rank > 0


def shape_differences(a: DrafterShape, b: DrafterShape) -> list[tuple[str, Any, Any]]:
    """(field, in a, in b) for every field in which two canonical shapes differ."""
    flat_a, flat_b = (_flat(dataclasses.asdict(canonical(shape))) for shape in (a, b))
    return [(name, flat_a[name], flat_b[name]) for name in flat_a if flat_a[name] != flat_b[name]]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def empty_drafter(shape: DrafterShape) -> AnyDrafter:
    """Shapes and shardings of a drafter on the current mesh; no arrays."""
    return abstract(lambda key: new_drafter(shape, rngs=nnx.Rngs(key)), jax.random.key(0))


def build_drafter(shape: DrafterShape, arrays: dict[str, np.ndarray]) -> AnyDrafter:
    """A drafter on the current mesh from host arrays by name; shorter floats become float32.

    Raises:
      UserError: naming what is missing, left over or of another shape than `shape` implies.
    """
    template = empty_drafter(shape)
    wanted = check_fit(shape, arrays)
    return with_arrays(
        template,
        {
            name: jax.device_put(arrays[name].astype(leaf.dtype, copy=False), leaf.sharding)
            for name, leaf in wanted.items()
        },
    )


def check_fit(
    shape: DrafterShape, arrays: dict[str, np.ndarray]
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a drafter of this shape by name, when `arrays` are just those.

    Raises:
      UserError: naming what is missing, left over or of another shape than `shape` implies.
    """
    wanted = named(empty_drafter(shape))
    problems = [f"{name} is missing" for name in wanted if name not in arrays]
    problems += [f"{name} does not belong to it" for name in arrays if name not in wanted]
    problems += [
        f"{name} is {list(arrays[name].shape)} instead of {list(wanted[name].shape)}"
        for name in wanted
        if name in arrays and arrays[name].shape != wanted[name].shape
    ]
    if problems:
        raise UserError(f"the weights do not fit the drafter's config: {', '.join(problems[:6])}")
    return wanted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Probe:
    """A fixed random input: a target's head, the taps of a short context, and a block's tokens."""

    head: TargetHead
    taps: jax.Array  # f32[B, T, L, D]
    tokens: jax.Array  # i32[B, P], the anchor and the tokens drafted after it but the last
    before: jax.Array  # i32[B, T], the tokens of the context

    @classmethod
    def of(cls, shape: DrafterShape, seed: int = 0) -> "Probe":
        """An input for drafters of this shape, always the same."""
        batch, length, d = 2, 12, shape.hidden_size
        rng = np.random.default_rng(seed)
        taps = (batch, length, len(shape.config.target_layer_ids), d)
        tokens = rng.integers(0, shape.vocab_size, (batch, shape.config.num_proposals))
        embed = rng.standard_normal((shape.vocab_size, d), np.float32) / np.float32(d**0.5)
        return cls(
            TargetHead(
                place(embed, "vocab", "embed"), None, shape.embed_scale, shape.logit_softcap
            ),
            place(rng.standard_normal(taps, np.float32), "batch", None, None, None),
            place(tokens.astype(np.int32), "batch", None),
            place(rng.integers(0, shape.vocab_size, taps[:2], np.int32), "batch", None),
        )


@jax.jit
def draft_outputs(drafter: AnyDrafter, probe: Probe) -> tuple[jax.Array, jax.Array | None]:
    """What a drafter answers when its own tokens are given, slot by slot as in decoding.

    Returns:
      Logits f32[B, P, V_d] with the Markov bias, of the P slots that propose, and confidence
      logits f32[B, P] or None.
    """
    config, tokens = drafter.config, probe.tokens
    batch, length = probe.taps.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    anchor_at = jnp.full((batch, 1), length)
    if isinstance(drafter, Eagle3Drafter):
        following = jnp.concatenate([probe.before[:, 1:], tokens[:, :1]], axis=1)
        features = drafter.features(probe.taps)
        context = drafter.context(probe.head, features, following, positions)
        visible = jnp.ones((batch, 1, length), bool)
        hidden = drafter.unroll(
            probe.head, features[:, -1:], tokens[:, None], anchor_at - 1, context, visible
        )
        return drafter.head(probe.head).logits(hidden[:, 0]), None
    context = drafter.context(probe.taps, positions)
    start = jnp.zeros_like(anchor_at)
    hidden = drafter.backbone(probe.head, tokens[:, :1], anchor_at, context, start, anchor_at)[:, 0]
    hidden = hidden[:, config.block_size - config.num_proposals :]  # fill-in: slot 0 is silent
    logits, rows = drafter.head(probe.head).logits(hidden), None
    if config.markov_rank:
        state, biased = drafter.markov.state(batch), []
        for slot in range(config.num_proposals):
            one, state = drafter.markov.biased(
                logits[:, slot], tokens[:, slot], hidden[:, slot], state
            )
            biased.append(one)
        logits, rows = jnp.stack(biased, axis=1), drafter.markov.rows(tokens)
    return logits, drafter.confidence_logits(hidden, rows) if config.confidence_head else None


def largest_difference(drafter: AnyDrafter, other: AnyDrafter, probe: Probe) -> float:
    """The largest difference in logits or confidence logits on one input; NaN never agrees."""
    answers = [jax.device_get(draft_outputs(one, probe)) for one in (drafter, other)]
    largest = 0.0
    for a, b in zip(*answers, strict=True):
        if (a is None) != (b is None):
            return float("inf")
        if a is not None:
            gap = float(np.max(np.abs(a - b)))
            largest = max(largest, gap if np.isfinite(gap) else float("inf"))
    return largest
