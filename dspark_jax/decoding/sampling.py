"""From logits to a token: one distribution, one draw and one way to make keys, for p and for q.

Speculative decoding is lossless only if the draft distribution q that enters the acceptance test
is the very distribution the draft was drawn from. So `sample` returns token and distribution
together, and drafter and target both go through `distribution`.
"""

import dataclasses
import enum
import functools
import secrets
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.errors import UserError

_BLOCK = 256  # tokens drawn from at a time, see `draw`


class Purpose(enum.IntEnum):
    """What a random number is for; part of its key."""

    PROPOSE = 0  # the drafter's token
    ACCEPT = 1  # the uniform of the acceptance test
    TARGET = 2  # the target's own token: residual, bonus or plain decoding, one per position


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How each row of a batch samples. Build it with `make`, which checks and broadcasts.

    The two static fields are promises about the whole batch that let the compiler drop work: a
    jitted function is compiled once for each of their values.
    """

    temperature: jax.Array  # f32[B], 0 = greedy
    top_k: jax.Array  # i32[B], 0 = off
    top_p: jax.Array  # f32[B], 1 = off
    seed: jax.Array  # u32[B], one per request
    greedy: bool = dataclasses.field(default=False, metadata={"static": True})
    filtered: bool = dataclasses.field(default=True, metadata={"static": True})

    @staticmethod
    def make(
        batch: int,
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        seeds: int | None | Sequence[int | None] = None,
    ) -> "SamplingParams":
        """Checks the options and broadcasts each scalar to `batch` rows.

        A seed of None is drawn from the operating system, so that unseeded requests differ. One
        number for `seeds` is the seed of every row: the same prompt then gives the same text.

        Raises:
            UserError: an option out of its range, or a sequence whose length is not `batch`.
        """
        if batch < 1:
            raise UserError(f"sampling: batch is {batch}, give at least one row")
        temperatures = _column("temperature", temperature, batch, np.float64)
        top_ks = _column("top_k", top_k, batch, np.int64)
        top_ps = _column("top_p", top_p, batch, np.float64)
        seeds = [seeds] * batch if seeds is None or np.ndim(seeds) == 0 else list(seeds)
        seeds = [secrets.randbits(32) if seed is None else seed for seed in seeds]
        seed_column = _column("seeds", seeds, batch, np.int64)
        _require("temperature", temperatures, (temperatures >= 0) & np.isfinite(temperatures),
                 "0 (greedy) or more, and finite")  # fmt: skip
        _require("top_k", top_ks, (top_ks >= 0) & (top_ks < 2**31), "0 (off) or a positive count")
        _require("top_p", top_ps, (top_ps > 0) & (top_ps <= 1), "above 0 and at most 1 (off)")
        _require("seeds", seed_column, (seed_column >= 0) & (seed_column < 2**32), "0 to 2**32-1")
        sampled = temperatures.astype(np.float32) > 0
        return SamplingParams(
            temperature=jnp.asarray(temperatures, jnp.float32),
            top_k=jnp.asarray(top_ks, jnp.int32),
            top_p=jnp.asarray(top_ps, jnp.float32),
            seed=jnp.asarray(seed_column, jnp.uint32),
            greedy=not sampled.any(),
            filtered=bool((sampled & ((top_ks > 0) | (top_ps < 1))).any()),
        )

    def distribution(self, logits: jax.Array) -> jax.Array:
        """`distribution` of logits [B, ..., V] under each row's options: f32[B, ..., V]."""
        options = (
            option.reshape(option.shape + (1,) * (logits.ndim - 2))
            for option in (self.temperature, self.top_k, self.top_p)
        )
        return distribution(logits, *options, greedy=self.greedy, filtered=self.filtered)


@functools.partial(jax.jit, static_argnames=("greedy", "filtered"))
def distribution(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    greedy: bool = False,
    filtered: bool = True,
) -> jax.Array:
    """The distribution that is sampled from: softmax(logits / temperature), filtered, float32.

    Order: temperature, then top-k, then top-p over what top-k left. Top-k keeps exactly k tokens
    and top-p the smallest prefix of the descending order whose mass reaches p, at least one
    token; ties go to the lowest id. Temperature 0 is all mass on the argmax.

    Args:
        logits: [..., V] of any float dtype; -inf is a token that must not be drawn. A row that is
            not `rows_finite` gives NaN, or some one-hot where the temperature is 0.
        temperature: f32[...], broadcast against the leading axes of the logits; 0 is greedy.
        top_k: i32[...], 0 is off.
        top_p: f32[...], 1 is off.
        greedy: static promise that every temperature is 0: no softmax.
        filtered: False is a static promise that no row uses top-k or top-p: no sort.

    Returns:
        f32[..., V].
    """
    logits = logits.astype(jnp.float32)
    one_hot = jnp.arange(logits.shape[-1]) == best_token(logits)[..., None]
    if greedy:
        return one_hot.astype(jnp.float32)
    temperature, top_k, top_p = (
        jnp.asarray(option)[..., None] for option in (temperature, top_k, top_p)
    )
    # Shifting before the division keeps a tiny temperature from overflowing to inf - inf.
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled = shifted / jnp.where(temperature > 0, temperature, 1.0)
    if filtered:
        sampled = temperature > 0
        kept = _leading(scaled, jnp.ones_like(scaled), top_k, sampled & (top_k > 0))
        mass = jnp.where(kept, jnp.exp(scaled), 0.0)
        wanted = top_p * jnp.sum(mass, axis=-1, keepdims=True)
        kept = kept & _leading(scaled, mass, wanted, sampled & (top_p < 1))
        scaled = jnp.where(kept, scaled, -jnp.inf)
    return jnp.where(temperature > 0, jax.nn.softmax(scaled, axis=-1), one_hot)


def best_token(logits: jax.Array) -> jax.Array:
    """The argmax of [..., V], lowest id among equals, i32[...]; V - 1 for a row with NaN.

    As a maximum and a minimum, which XLA vectorises; jnp.argmax is ten times slower on CPUs.
    """
    vocab = logits.shape[-1]
    at_best = logits == jnp.max(logits, axis=-1, keepdims=True)
    ids = jnp.where(at_best, jnp.arange(vocab, dtype=jnp.int32), vocab - 1)
    return jnp.min(ids, axis=-1)


def rows_finite(logits: jax.Array) -> jax.Array:
    """Whether a token may be drawn from each row: bool[...] of [..., V] logits or probabilities.

    False for a row with NaN or +inf in it and for one that is -inf throughout. NaN logits turn
    into ordinary-looking tokens everywhere downstream, so whoever runs a model checks this.
    """
    return jnp.isfinite(jnp.max(logits, axis=-1))  # the maximum carries NaN and +inf


@functools.partial(jax.jit, static_argnames="purpose")
def purpose_key(
    seed: jax.Array, position: jax.Array, purpose: Purpose, slot: jax.Array | int = 0
) -> jax.Array:
    """The random key for one decision of one request: keys[...], from broadcast arguments.

    Nothing but these values enters, so what a request gets does not depend on its row, on its
    neighbours or on how many rounds were run before.

    Args:
        seed: u32[...], the request's.
        position: i32[...], the absolute position of the token being decided. For PROPOSE the
            position of the round's anchor, with the slot beside it: a position that is drafted
            again after a rejection then gets fresh noise. With the old noise, a scheduler that
            looks at confidences of earlier rounds would have seen the token it is about to admit.
        purpose: what the key is for.
        slot: i32[...], the slot of the block, for PROPOSE only.
    """

    def key(seed, position, slot):
        # The generator is named, so that a changed jax default changes nobody's text.
        base = jax.random.key(seed, impl="threefry2x32")
        for part in (position, int(purpose), slot):
            base = jax.random.fold_in(base, part)
        return base

    seed, position, slot = jnp.broadcast_arrays(jnp.asarray(seed, jnp.uint32), position, slot)
    for _ in range(seed.ndim):
        key = jax.vmap(key)
    return key(seed, position, slot)


@jax.jit
def uniform(keys: jax.Array) -> jax.Array:
    """One uniform in [0, 1) per key, f32[...]: 0 possible, 1 not, resolved to 2**-46 near 0.

    jax's own uniform knows only multiples of 2**-23, which would accept a token of ratio 1e-10
    a thousand times too often.
    """

    def one(key):
        high, low = jax.random.uniform(key, (2,), jnp.float32)
        return jnp.minimum(high + low * 2.0**-23, 1 - 2.0**-24)

    for _ in range(keys.ndim):
        one = jax.vmap(one)
    return one(keys)


@jax.jit
def draw(probs: jax.Array, keys: jax.Array) -> jax.Array:
    """One token per row, i32[...], of probs f32[..., V] (need not sum to 1) and keys [...].

    Gumbel noise of the high range: with jax's default, tokens of probability below 1e-7 are never
    drawn at all. A token of probability 0 never is; a row of zeros or NaN gives some id of the
    vocabulary. First a block of tokens is drawn, then a token of the block, both exactly: that
    needs noise for V / 256 + 256 scores instead of V, and noise is what a draw costs.
    """
    vocab = probs.shape[-1]
    probs = probs.astype(jnp.float32)
    padding = -vocab % _BLOCK if vocab > _BLOCK else 0
    probs = jnp.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, padding)])

    def best(probs, noise):
        score = jnp.where(probs > 0, jnp.log(probs) + noise, -jnp.inf)
        return jnp.argmax(score).astype(jnp.int32)

    def one(probs, key):
        if vocab <= _BLOCK:
            return best(probs, jax.random.gumbel(key, (vocab,), jnp.float32, mode="high"))
        blocks = probs.reshape(-1, _BLOCK)
        noise = jax.random.gumbel(key, (len(blocks) + _BLOCK,), jnp.float32, mode="high")
        block = best(jnp.sum(blocks, axis=-1), noise[: len(blocks)])
        token = block * _BLOCK + best(blocks[block], noise[len(blocks) :])
        return jnp.minimum(token, vocab - 1)  # only a row of zeros or NaN gets there

    for _ in range(keys.ndim):
        one = jax.vmap(one)
    return one(probs, keys)


def sample(
    logits: jax.Array, params: SamplingParams, keys: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Draws a token per row and returns it with the distribution it was drawn from.

    Args:
        logits: [B, V], any float dtype.
        params: the rows' options.
        keys: [B], from `purpose_key`; unused by a purely greedy batch.

    Returns:
        tokens i32[B] and probs f32[B, V].
    """
    probs = params.distribution(logits)
    if params.greedy:
        return best_token(logits), probs
    return draw(probs, keys), probs


def _leading(
    scores: jax.Array, weights: jax.Array, wanted: jax.Array, active: jax.Array
) -> jax.Array:
    """The shortest prefix, in descending order of score, whose weight reaches `wanted`.

    Equal scores are taken in the order of their ids. Rows that are not `active` keep everything.
    Two searches by halving instead of a sort: a sort of 49152 scores takes 20 ms on a CPU, this
    about one, and nothing when no row is active.

    Args:
        scores: f32[..., V], none above 0.
        weights: f32[..., V], 0 or more.
        wanted: [..., 1]; at most the sum of the weights, else everything is kept.
        active: bool[..., 1].

    Returns:
        bool[..., V].
    """
    scores = jnp.where(scores == 0, 0.0, scores)  # -0.0 is no less than 0.0
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    rank = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats

    def reached(chosen):
        return jnp.sum(jnp.where(chosen, weights, 0.0), axis=-1, keepdims=True) >= wanted

    cut = _highest(rank, reached, active)
    above, equal = rank > cut, rank == cut
    order = jnp.where(equal, -jnp.arange(scores.shape[-1], dtype=jnp.int32), -scores.shape[-1])
    tied = active & (jnp.sum(equal, axis=-1, keepdims=True) > 1)
    last = _highest(order, lambda chosen: reached(above | (equal & chosen)), tied)
    return above | (equal & (order >= last)) | ~active


def _highest(keys: jax.Array, reached, active: jax.Array) -> jax.Array:
    """The highest t for which reached(keys >= t), the lowest key where not active: i32[..., 1]."""
    lowest = jnp.min(keys, axis=-1, keepdims=True)
    beyond = jnp.where(active, jnp.max(keys, axis=-1, keepdims=True) + 1, lowest + 1)

    def searching(bounds):
        low, high = bounds
        return jnp.any(high - low > 1)

    def halve(bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        good = reached(keys >= middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    return jax.lax.while_loop(searching, halve, (lowest, beyond))[0]


def _column(name: str, value, batch: int, dtype) -> np.ndarray:
    column = np.asarray(value)
    if column.ndim and column.shape != (batch,):
        raise UserError(f"sampling: {name} has shape {column.shape}, give one value or {batch}")
    try:
        exact = column.astype(dtype)
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"sampling: {name} is {value!r}, give numbers") from None
    if dtype is np.int64 and not np.array_equal(exact, column):
        raise UserError(f"sampling: {name} is {value!r}, give whole numbers")
    return np.broadcast_to(exact, (batch,))


def _require(name: str, column: np.ndarray, good: np.ndarray, wanted: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise UserError(f"sampling: {name} is {column[row]} in row {row}, give {wanted}")
