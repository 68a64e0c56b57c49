"""What an engine does before every round: speculate or not, and how many drafts of which row.

The decisions themselves are the pure functions of schedulers.py; here they meet the few sizes that
the target's pass comes in (decoding/flat.py), and the switch that turns drafting off.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.core.errors import UserError, check_choice
from dspark_jax.scheduling import schedulers
from dspark_jax.scheduling.schedulers import CostTable

KINDS = ("off", "fixed", "threshold", "load", "hardware", "asynchronous")
BY_CONFIDENCE = ("threshold", "load", "hardware", "asynchronous")
BY_COSTS = ("hardware", "asynchronous")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Policy:
    """How many drafts are verified.

    Kinds: "off" never drafts; "fixed" verifies `length` of every row; "threshold" cuts a row at its
    first slot of less confidence than `threshold`; "load" keeps slots of a survival above a
    threshold that rises with the load from `threshold` to `highest`; "hardware" is the paper's
    Algorithm 1; "asynchronous" the same with the budget of two rounds before.
    """

    kind: str = dataclasses.field(default="off", metadata={"static": True})
    length: int = dataclasses.field(default=0, metadata={"static": True})
    threshold: float = dataclasses.field(default=0.5, metadata={"static": True})
    highest: float = dataclasses.field(default=0.9, metadata={"static": True})
    temperatures: Any = None  # f32[P] of the confidence, see calibration; None = 1
    offsets: Any = None  # f32[P], None = 0
    costs: CostTable | None = None  # of a round that drafts, by tokens of the target's pass
    plain: CostTable | None = None  # of one that does not; None = never switches off

    def __post_init__(self):
        """Refuses what cannot be decided by."""
        check_choice("policy", self.kind, KINDS)
        if self.kind == "fixed" and self.length < 1:
            raise UserError(f"policy fixed with length {self.length}: verify at least one draft")
        if not 0 <= self.threshold <= self.highest <= 1:
            raise UserError(
                f"policy: threshold {self.threshold} and highest {self.highest} must lie in 0..1, "
                "in this order"
            )

    @property
    def drafts(self) -> bool:
        """Whether it ever runs the drafter."""
        return self.kind != "off"

    @property
    def switches(self) -> bool:
        """Whether it stops drafting while that does not pay."""
        return self.kind in BY_COSTS and self.plain is not None

    def check(self, has_confidence: bool, proposals: int, measured_later: bool = False) -> None:
        """Refuses a policy that this drafter cannot follow, costs left out if they come later."""
        if self.kind in BY_CONFIDENCE and not has_confidence:
            raise UserError(
                f"policy {self.kind} needs a drafter with a confidence head, this one has none; "
                "use fixed or off"
            )
        if self.kind in BY_COSTS and self.costs is None and not measured_later:
            raise UserError(f"policy {self.kind} needs a table of costs; measure one first")
        if self.length > proposals:
            raise UserError(
                f"policy fixed with length {self.length}: the drafter proposes {proposals} tokens"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choice:
    """Of one round."""

    lengths: jax.Array  # i32[R], verified drafts
    survival: jax.Array  # f32[R, P], 0 where the drafter has no confidence
    budget: jax.Array  # i32[], that this round gives to the one after the next; asynchronous only


def choose(
    policy: Policy,
    confidence_logits: jax.Array | None,
    usable: jax.Array,
    running: jax.Array,
    budget: jax.Array,
    load: jax.Array,
    *,
    proposals: int,
    sizes: tuple[int, ...],
) -> Choice:
    """Lengths for one round.

    Args:
      confidence_logits: f32[R, P] of this round's drafts.
      usable: i32[R], as in `schedulers.survival`; running: i32[], rows that run.
      budget: i32[], the `Choice.budget` of two rounds before; load: f32[], `schedulers.load`.
      sizes: that a pass comes in, rising.
    """
    none = jnp.zeros((), jnp.int32)
    survival = jnp.zeros((usable.shape[0], proposals))
    if confidence_logits is not None:
        temperatures = 1.0 if policy.temperatures is None else jnp.asarray(policy.temperatures)
        offsets = 0.0 if policy.offsets is None else jnp.asarray(policy.offsets)
        confidence = schedulers.confidence(confidence_logits, temperatures, offsets)
        survival = schedulers.survival(confidence, usable)
    if policy.kind == "fixed":
        return Choice(schedulers.fixed_length(usable, policy.length), survival, none)
    if policy.kind == "threshold":
        lengths = schedulers.static_threshold(confidence, usable, policy.threshold)
    elif policy.kind == "load":
        lengths = schedulers.load_adaptive(survival, load, policy.threshold, policy.highest)
    elif policy.kind == "hardware":
        lengths = schedulers.hardware_aware(survival, running, policy.costs)
        lengths = filled(survival, lengths, running, sizes)
    else:
        lengths = schedulers.top(survival, budget)
        none = schedulers.budget(survival, running, policy.costs)
    return Choice(lengths, survival, none)


def filled(
    survival: jax.Array, lengths: jax.Array, running: jax.Array, sizes: tuple[int, ...]
) -> jax.Array:
    """Lengths that use up the size which `lengths` of `hardware_aware` need anyway: i32[R].

    Still lossless. Let the draft of rank m, by falling survival, be the one in question, and K the
    number that Algorithm 1 admits. It is verified if m < K or m < room(K), room never falling in K
    and at least K. Whether m < K depends on survivals of rank up to m, which have not seen this
    draft; if not, K depends on those alone, and room(K) with it.
    """
    known = jnp.asarray(sizes, jnp.int32)
    size = jnp.min(jnp.where(known >= running + jnp.sum(lengths), known, known[-1]))
    return schedulers.top(survival, size - running)


def size_for(tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of the rising `sizes` that holds so many tokens."""
    return next(size for size in sizes if size >= tokens)


def default_sizes(rows: int, proposals: int) -> tuple[int, ...]:
    """Sizes of the target's pass for up to `rows` rows: 1.5 times apart, and one for each row.

    Each is compiled once; padding wastes a fifth of a pass on average, before policies use it.
    Multiples of 4, which products of matrices come in on all devices, where that is not much more.
    """
    most = rows * (1 + proposals)
    sizes, size = {1, rows, most}, 1.0
    while size < most:
        whole = math.ceil(size) if size <= 2 else -(-math.ceil(size) // 4) * 4
        sizes.add(min(whole, most))
        size = max(size + 1, size * 1.5)
    return tuple(sorted(sizes))
