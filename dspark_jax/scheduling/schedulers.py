"""How many drafts of each row the target verifies: one small pure function per policy.

The target's step gets slower with every token it verifies, so a draft is worth verifying only if
it is likely to survive. All policies keep the output distribution exactly the target's, because
whether slot k is verified depends only on drafts before slot k (and on other rows, the load and
earlier rounds), never on x_k or later: tests/test_schedulers.py enumerates it, and shows what
breaks where it does not hold. DSpark, arXiv 2607.05147, Algorithm 1.

Letters here: R rows of the engine, P proposals per row, B tokens of one step of the target (a
token for each running row and one for each verified draft). Survival a[r, k] is the probability
that slots 0..k of row r are all accepted: never rising in k, and 0 where a slot must not be
verified. All functions return verified lengths i32[R], 0..P; they can be jitted, and only shapes
are static.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from dspark_jax.core.errors import UserError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CostTable:
    """Seconds of one step by the number of tokens in it, for one device, model and context length.

    What a step includes is up to who measures it; the drafter's time belongs to a table for rounds
    that draft. Between two measured counts the seconds are interpolated linearly; below the first
    they are the first's; beyond the last they grow in proportion to the tokens. With `padded`
    steps exist only at the measured counts, others are filled up to the next one, and beyond the
    last there is none: 0 steps per second, which no policy that looks at the costs chooses.
    """

    tokens: Any  # i32[M], rising
    seconds: Any  # f32[M], never falling
    padded: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def make(
        cls, tokens: Sequence[int], steps_per_second: Sequence[float], *, padded: bool = False
    ) -> "CostTable":
        """A table of measurements, which noise may have put out of order.

        More tokens never take less time: neighbours that say so get their common mean (isotonic
        regression of the seconds). Otherwise noise of a per mille would invite more drafts.

        Raises:
            UserError: counts that are not rising from 1, or rates that are not positive.
        """
        counts, rates = np.asarray(tokens), np.asarray(steps_per_second, np.float64)
        if counts.ndim != 1 or counts.shape != rates.shape or not len(counts):
            raise UserError(
                f"cost table: {counts.shape} token counts and {rates.shape} steps per second; "
                "give as many of one as of the other, at least one"
            )
        if counts.dtype.kind not in "iu" or counts[0] < 1 or (np.diff(counts) <= 0).any():
            raise UserError(
                f"cost table: token counts {counts.tolist()}: give rising whole numbers from 1"
            )
        if not (np.isfinite(rates) & (rates > 0)).all():
            raise UserError(f"cost table: steps per second {rates.tolist()}: all must be positive")
        # Host arrays: they join whatever mesh is current when they are used.
        return cls(counts.astype(np.int32), _never_falling(1 / rates).astype(np.float32), padded)

    def step_seconds(self, tokens: jax.Array) -> jax.Array:
        """Seconds of a step with `tokens` i32[...]: f32[...]; infinite where there is none."""
        known, seconds = jnp.asarray(self.tokens), jnp.asarray(self.seconds)
        if self.padded:
            bucket = jnp.sum(tokens[..., None] > known, axis=-1)
            return jnp.append(seconds, jnp.inf)[bucket]
        beyond = jnp.maximum(tokens / known[-1], 1.0)
        return jnp.interp(tokens, known, seconds) * beyond

    def steps_per_second(self, tokens: jax.Array) -> jax.Array:
        """SPS(B) of the paper for `tokens` i32[...]: f32[...], never rising."""
        return 1.0 / self.step_seconds(tokens)


def confidence(
    logits: jax.Array, temperatures: jax.Array, offsets: jax.Array | float = 0.0
) -> jax.Array:
    """Calibrated probability of each slot to be accepted if all before it are: f32[R, P].

    Args:
        logits: f32[R, P] of the confidence head; NaN gives 0, a slot not worth verifying.
        temperatures, offsets: f32[P] or f32[], see `calibration`.
    """
    c = jax.nn.sigmoid(logits.astype(jnp.float32) / temperatures + offsets)
    return jnp.where(jnp.isnan(c), 0.0, c)


def survival(confidence: jax.Array, usable: jax.Array) -> jax.Array:
    """Probability of each slot and all before it to be accepted: f32[R, P], 0 beyond `usable`.

    Args:
        confidence: f32[R, P], of each slot if all before it are accepted.
        usable: i32[R], slots of each row that may be verified, 0..P; 0 for a row that is finished,
            no more than it has tokens left to say. Not a function of this round's drafts.
    """
    within = jnp.arange(confidence.shape[1]) < usable[:, None]
    return jnp.cumprod(jnp.where(within, confidence, 0.0), axis=1)


def fixed_length(usable: jax.Array, length: jax.Array | int) -> jax.Array:
    """The same for all rows, as far as `usable` (see `survival`) allows."""
    return jnp.minimum(usable, length).astype(jnp.int32)


def static_threshold(
    confidence: jax.Array, usable: jax.Array, threshold: jax.Array | float
) -> jax.Array:
    """Cuts each row at its first slot of less confidence than `threshold`.

    Args:
        confidence: f32[R, P], of each slot if all before it are accepted.
        usable: i32[R], see `survival`.
    """
    return jnp.minimum(_leading(confidence >= threshold), usable).astype(jnp.int32)


def load(
    queued: jax.Array, queue_limit: jax.Array, memory_used: jax.Array, memory: jax.Array
) -> jax.Array:
    """How busy the engine is, f32[] in 0..1: 0.6 of it the queue, 0.4 of it the memory."""
    queue, full = jnp.clip(queued / queue_limit, 0, 1), jnp.clip(memory_used / memory, 0, 1)
    return 0.6 * queue + 0.4 * full


def load_adaptive(
    survival: jax.Array,
    load: jax.Array,
    lowest: jax.Array | float,
    highest: jax.Array | float,
) -> jax.Array:
    """Keeps the longest prefix whose survival reaches a threshold that rises with the load.

    The threshold is `lowest` when the engine is idle and `highest` when it is full, with the
    square of the load in between.
    """
    threshold = lowest + (highest - lowest) * load**2
    return _leading((survival >= threshold) & (survival > 0))


def hardware_aware(survival: jax.Array, rows: jax.Array, costs: CostTable) -> jax.Array:
    """The paper's Algorithm 1: admits drafts by falling survival while that pays.

    The expected tokens per second of a step are Theta = (rows + sum of admitted survivals) *
    SPS(rows + admitted). The first draft that does not raise Theta ends it, even if later ones
    would: this early stop keeps the decision on x_k independent of x_k, which the confidence of
    slot k + 1 has seen. Where Theta has one peak, that is the best there is; where SPS falls in
    stairs (`CostTable.padded`) it stays on its stair, and `asynchronous` can look further.

    Args:
        survival: f32[R, P].
        rows: i32[], how many rows run in this step, verified drafts or not.
        costs: of the step that verifies.
    """
    ranked, _ = _ranked(survival)
    theta = _throughput(ranked, rows, costs)
    pays = (theta[1:] > theta[:-1]) & (ranked > 0)
    return top(survival, jnp.sum(jnp.cumprod(pays.astype(jnp.int32))))


def budget(survival: jax.Array, rows: jax.Array, costs: CostTable) -> jax.Array:
    """How many drafts of all rows together make Theta the highest, however it looks before: i32[].

    Never decide on the drafts that this survival has seen: the output would be biased. The drafts
    of later rounds are safe, see `asynchronous`. Arguments as for `hardware_aware`.
    """
    return jnp.argmax(_throughput(_ranked(survival)[0], rows, costs)).astype(jnp.int32)


def top(survival: jax.Array, budget: jax.Array) -> jax.Array:
    """Verifies the `budget` i32[] drafts that are likeliest to survive, over all rows.

    Fewer, where there are not so many of positive survival. Equals go to the row, then the slot,
    of the lower number.
    """
    flat, order = _ranked(survival)
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype))
    chosen = (rank < jnp.minimum(budget, jnp.sum(flat > 0))).reshape(survival.shape)
    return _like_rows(jnp.sum(chosen, axis=1, dtype=jnp.int32), survival)


def asynchronous(
    survival: jax.Array, earlier: jax.Array, earlier_rows: jax.Array, costs: CostTable
) -> jax.Array:
    """Algorithm 1 without waiting for this round: its budget comes from two rounds before.

    The host can so plan the shape of a step while the device still runs the one before. The
    budget cannot see the drafts it decides on, so it is the best over all, without early stop;
    which drafts get it is decided by this round's survival, best first. Rows may have come and
    gone in between.

    Args:
        survival: f32[R, P] of this round.
        earlier: f32[R', P] of two rounds before, and earlier_rows i32[] that ran then.
        costs: of the step that verifies.
    """
    return top(survival, budget(earlier, earlier_rows, costs))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Switch:
    """Whether to speculate at all, and what that rests on."""

    on: Any  # bool[]
    since: Any  # i32[], rounds since it was last switched
    tokens: Any  # f32[], that speculation should give each row, recent rounds weighing more
    plain_tokens: Any  # f32[], that plain decoding gives it in the same time, likewise
    survival: Any  # f32[P], mean over rows and recent rounds in which drafts were made

    @classmethod
    def start(cls, proposals: int, on: bool = True) -> "Switch":
        """Before the first round."""
        zero = np.zeros((), np.float32)
        return cls(np.bool_(on), np.int32(0), zero, zero, np.zeros(proposals, np.float32))


def switched(
    switch: Switch,
    survival: jax.Array,
    lengths: jax.Array,
    rows: jax.Array,
    costs: CostTable,
    plain: CostTable,
    *,
    patience: int = 32,
    margin: float = 0.02,
    probe_after: int = 4096,
) -> Switch:
    """The switch for the next round, after a round of `lengths` verified drafts.

    While it is on, it compares the tokens that the rounds of late were expected to make with those
    that plain decoding, which need not run the drafter, makes in the same time. While it is off
    there are no drafts to judge by; it asks which same length for all rows would be best now if
    drafts fared as they did when there were any. It rests at least `patience` rounds either way,
    and goes on again only for a gain of `margin`, so that it does not flutter. As text changes
    without being seen, it also goes on after `probe_after` rounds, to look.

    It is a function of rounds that are over, so the output stays the target's. The drafter's
    context must be kept up to date while it is off (`Drafter.extend`), or drafts after it are poor.

    Args:
        survival: f32[R, P] and lengths i32[R] of the round; ignored when it did not draft.
        rows: i32[] that ran; a round without rows changes nothing.
        costs, plain: of a step that drafts and verifies, and of one that decodes plainly.
        patience: also the number of rounds over which expectations are averaged.
    """
    survival, lengths = _whole(survival), _whole(lengths)
    slots = survival.shape[1]
    keep = 1 - 1 / patience
    on = jnp.asarray(switch.on)

    admitted = jnp.arange(slots) < lengths[:, None]
    made = 1 + jnp.sum(jnp.where(admitted, survival, 0.0)) / jnp.maximum(rows, 1)
    seconds = costs.step_seconds(rows + jnp.sum(lengths))
    mean = jnp.sum(survival, axis=0) / jnp.maximum(rows, 1)
    first = jnp.all(switch.survival == 0)  # nothing to average with
    mean = jnp.where(first, mean, keep * switch.survival + (1 - keep) * mean)
    mean = jnp.where(on, mean, switch.survival)

    same = jnp.arange(slots + 1)
    would = 1 + jnp.cumsum(jnp.pad(mean, (1, 0)))
    best = jnp.argmax(would * costs.steps_per_second(rows * (1 + same)))
    seconds = jnp.where(on, seconds, costs.step_seconds(rows * (1 + best)))

    tokens = keep * switch.tokens + jnp.where(on, made, would[best])
    plain_tokens = keep * switch.plain_tokens + plain.steps_per_second(rows) * seconds
    since = switch.since + 1
    loses = on & (tokens < plain_tokens)
    gains = ~on & ((tokens > (1 + margin) * plain_tokens) | (since >= probe_after))
    flip = (since >= patience) & (loses | gains)
    after = Switch(
        on=on ^ flip,
        since=jnp.where(flip, 0, since).astype(jnp.int32),
        tokens=jnp.where(flip, 0.0, tokens),
        plain_tokens=jnp.where(flip, 0.0, plain_tokens),
        survival=mean,
    )
    return jax.tree.map(lambda new, old: jnp.where(rows > 0, new, old), after, switch)


def _throughput(ranked: jax.Array, rows: jax.Array, costs: CostTable) -> jax.Array:
    """Theta after each of 0..R*P admitted drafts: f32[R*P+1]."""
    expected = rows + jnp.cumsum(jnp.pad(ranked, (1, 0)))
    return expected * costs.steps_per_second(rows + jnp.arange(len(ranked) + 1))


def _ranked(survival: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Survival of all slots, falling, f32[R*P], and their numbers r * P + k, i32[R*P].

    A slot comes after those before it in its row, also if survival is equal, NaN or, by a caller's
    fault, rising: a row's verified slots are then a prefix, and no slot's place depends on later
    ones.
    """
    survival = _whole(survival)
    survival = jnp.where(jnp.isnan(survival), 0.0, survival)
    flat = jax.lax.cummin(survival, axis=1).reshape(-1)
    order = jnp.argsort(-flat, stable=True).astype(jnp.int32)
    return flat[order], order


def _leading(good: jax.Array) -> jax.Array:
    """Length of the leading run of True in bool[R, P]: i32[R]."""
    return jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _whole(x: jax.Array) -> jax.Array:
    """Gathers what is sharded over rows, for decisions over all of them."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.sharding.reshard(x, PartitionSpec(*[None] * x.ndim))


def _like_rows(lengths: jax.Array, survival: jax.Array) -> jax.Array:
    """Puts i32[R] where the rows of `survival` live."""
    if jax.sharding.get_abstract_mesh().empty:
        return lengths
    return jax.sharding.reshard(lengths, PartitionSpec(*jax.typeof(survival).sharding.spec[:1]))


def _never_falling(values: np.ndarray) -> np.ndarray:
    """The closest never falling sequence in least squares: neighbours that fall are pooled."""
    pools: list[tuple[float, int]] = []  # mean and size
    for value in values:
        mean, size = float(value), 1
        while pools and pools[-1][0] > mean:
            before, count = pools.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        pools.append((mean, size))
    return np.concatenate([np.full(size, mean) for mean, size in pools])
