"""From logits to a token: one distribution, one draw and one way to make keys, for p and for q.

Speculative decoding is lossless only if the draft distribution q that enters the acceptance test
is the very distribution the draft was drawn from. So `sample` returns token and distribution
together, and drafter and target both go through `distribution`.
"""

import dataclasses
import enum
import functools
import secrets
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.decoding.distribution import distribution
from dspark_jax.kernels.best_token import best_token

NO_TOKEN = 2**31 - 1  # filler of `bias_ids`: beyond every vocabulary, where scatters drop it

# Of repetition penalties, lowest and highest: logits stay finite in float32 whatever they are.
PENALTIES = 1e-6, 1e6
_BLOCK = 256  # tokens drawn from at a time, see `draw`
_RANGES = {  # of each option: test, and what to give instead
    "temperature": (lambda x: (x >= 0) & np.isfinite(x), "0 (greedy) or more, and finite"),
    "top_k": (lambda x: (x >= 0) & (x < 2**31), "0 (off) or a positive count"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "above 0 and at most 1 (off)"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "0 (off) to 1"),
    "seeds": (lambda x: (x >= 0) & (x < 2**32), "0 to 2**32-1"),
    "repetition_penalty": (
        lambda x: (x >= PENALTIES[0]) & (x <= PENALTIES[1]),
        f"{PENALTIES[0]:g} to {PENALTIES[1]:g}, 1 is off",
    ),
    "presence_penalty": (lambda x: (x >= -2) & (x <= 2), "-2 to 2, 0 is off"),
    "frequency_penalty": (lambda x: (x >= -2) & (x <= 2), "-2 to 2, 0 is off"),
    "min_tokens": (lambda x: (x >= 0) & (x < 2**31), "0 (off) or a positive count"),
}


class Purpose(enum.IntEnum):
    """What a random number is for; part of its key."""

    PROPOSE = 0  # the drafter's token
    ACCEPT = 1  # the uniform of the acceptance test
    TARGET = 2  # the target's own token: residual, bonus or plain decoding, one per position


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How each row of a batch samples. Build it with `make`, which checks and broadcasts.

    The static fields are promises about the whole batch that let the compiler drop work, and the
    state that the work needs: a jitted function is compiled once for each of their values. The
    options after `seed` act on logits, see `shaping`.
    """

    temperature: jax.Array  # f32[B], 0 = greedy
    top_k: jax.Array  # i32[B], 0 = off
    top_p: jax.Array  # f32[B], 1 = off
    min_p: jax.Array  # f32[B], 0 = off
    seed: jax.Array  # u32[B], one per request
    repetition_penalty: jax.Array  # f32[B], 1 = off
    presence_penalty: jax.Array  # f32[B], 0 = off
    frequency_penalty: jax.Array  # f32[B], 0 = off
    min_tokens: jax.Array  # i32[B], no stop id before so many tokens
    bias_ids: jax.Array  # i32[B, M], tokens whose logits are raised, NO_TOKEN as filler
    bias: jax.Array  # f32[B, M], by how much
    greedy: bool = dataclasses.field(default=False, metadata={"static": True})
    filtered: bool = dataclasses.field(default=True, metadata={"static": True})
    penalised: bool = dataclasses.field(default=False, metadata={"static": True})
    biased: bool = dataclasses.field(default=False, metadata={"static": True})  # or min_tokens
    greedy_drafts: bool = dataclasses.field(default=False, metadata={"static": True})

    @staticmethod
    def make(
        batch: int,
        temperature: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
        seeds: int | None | Sequence[int | None] = None,
        *,
        min_p: float | Sequence[float] = 0.0,
        repetition_penalty: float | Sequence[float] = 1.0,
        presence_penalty: float | Sequence[float] = 0.0,
        frequency_penalty: float | Sequence[float] = 0.0,
        logit_bias: Mapping[int, float] | None | Sequence[Mapping[int, float] | None] = None,
        min_tokens: int | Sequence[int] = 0,
        vocab_size: int | None = None,
        greedy_drafts: bool = False,
    ) -> "SamplingParams":
        """Checks the options and broadcasts each scalar to `batch` rows.

        Ranges are those of the OpenAI API and of vLLM.

        Args:
            seeds: None is drawn from the operating system, so that unseeded requests differ. One
                number is the seed of every row: the same prompt then gives the same text.
            logit_bias: what is added to the logits of some tokens, by token id.
            vocab_size: of the target; needed with `logit_bias`.
            greedy_drafts: the drafter proposes its likeliest tokens also where the target samples.
                The target's distribution stays; fewer drafts may be accepted.

        Raises:
            UserError: an option out of its range, or a sequence whose length is not `batch`.
        """
        if batch < 1:
            raise UserError(f"sampling: batch is {batch}, give at least one row")
        seeds = [seeds] * batch if seeds is None or np.ndim(seeds) == 0 else list(seeds)
        seeds = [secrets.randbits(32) if seed is None else seed for seed in seeds]
        real, whole = np.float64, np.int64
        columns = {
            "temperature": _column("temperature", temperature, batch, real),
            "top_k": _column("top_k", top_k, batch, whole),
            "top_p": _column("top_p", top_p, batch, real),
            "min_p": _column("min_p", min_p, batch, real),
            "seeds": _column("seeds", seeds, batch, whole),
            "repetition_penalty": _column("repetition_penalty", repetition_penalty, batch, real),
            "presence_penalty": _column("presence_penalty", presence_penalty, batch, real),
            "frequency_penalty": _column("frequency_penalty", frequency_penalty, batch, real),
            "min_tokens": _column("min_tokens", min_tokens, batch, whole),
        }
        for name, (good, wanted) in _RANGES.items():
            _require(name, columns[name], good(columns[name]), wanted)
        bias_ids, bias = _biases(logit_bias, batch, vocab_size)
        fields = {
            name: jnp.asarray(column, jnp.float32 if column.dtype == real else jnp.int32)
            for name, column in columns.items()
            if name != "seeds"
        }
        sampled = np.asarray(columns["temperature"], np.float32) > 0
        filters = (columns["top_k"] > 0) | (columns["top_p"] < 1) | (columns["min_p"] > 0)
        penalties = (
            (columns["repetition_penalty"] != 1)
            | (columns["presence_penalty"] != 0)
            | (columns["frequency_penalty"] != 0)
        )
        return SamplingParams(
            **fields,
            seed=jnp.asarray(columns["seeds"], jnp.uint32),
            bias_ids=jnp.asarray(bias_ids),
            bias=jnp.asarray(bias),
            greedy=not sampled.any(),
            filtered=bool((sampled & filters).any()),
            penalised=bool(penalties.any()),
            biased=bool(bias_ids.size or columns["min_tokens"].any()),
            greedy_drafts=bool(greedy_drafts and sampled.any()),
        )

    @property
    def drafts_greedily(self) -> bool:
        """Whether a draft is the drafter's likeliest token: q is then all on that token."""
        return self.greedy or self.greedy_drafts

    def distribution(self, logits: jax.Array) -> jax.Array:
        """`distribution` of logits [B, ..., V] under each row's options: f32[B, ..., V]."""
        options = (
            option.reshape(option.shape + (1,) * (logits.ndim - 2))
            for option in (self.temperature, self.top_k, self.top_p, self.min_p)
        )
        return distribution(logits, *options, greedy=self.greedy, filtered=self.filtered)


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


def propose(
    logits: jax.Array, params: SamplingParams, keys: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """`sample` for a drafter: its token i32[B] and what it was drawn from, f32[B, V].

    None in place of the distribution where that is the token alone (`drafts_greedily`).
    """
    if params.drafts_greedily:
        return best_token(logits), None
    return sample(logits, params, keys)


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


def _biases(
    biases: Mapping[int, float] | None | Sequence[Mapping[int, float] | None],
    batch: int,
    vocab_size: int | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Ids i32[B, M] and biases f32[B, M]; M is 0 or a power of two, for few compilations."""
    if biases is None or isinstance(biases, Mapping):
        biases = [biases] * batch
    if len(biases) != batch:
        raise UserError(f"sampling: logit_bias for {len(biases)} rows, give one or {batch}")
    most = max(len(row or {}) for row in biases)
    size = 1 << (most - 1).bit_length() if most else 0
    ids, values = np.full((batch, size), NO_TOKEN, np.int32), np.zeros((batch, size), np.float32)
    for row, bias in enumerate(biases):
        where = f" in row {row}" if batch > 1 else ""
        for at, (token, value) in enumerate((bias or {}).items()):
            if vocab_size is None:
                raise ValueError("logit_bias: say of which vocab_size")
            if not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
                raise UserError(
                    f"sampling: logit_bias of token {token!r}{where}, the target has tokens 0 to "
                    f"{vocab_size - 1}"
                )
            if not isinstance(value, int | float) or not -100 <= value <= 100:
                raise UserError(
                    f"sampling: logit_bias of token {token} is {value!r}{where}, give -100 to 100"
                )
            ids[row, at], values[row, at] = token, value
    return ids, values


def _require(name: str, column: np.ndarray, good: np.ndarray, wanted: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        where = f" in row {row}" if good.any() else ""
        raise UserError(f"sampling: {name} is {column[row]}{where}, give {wanted}")
