"""Verification with real keys: many seeds against exact odds, and the same request anywhere.

tests/test_lossless.py proves the rules; here keys, uniforms and draws are put to the test, and
deliberately correlated keys must be seen.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.decoding import sampling, verify
from dspark_jax.decoding.sampling import Purpose, SamplingParams

VOCAB, SLOTS, TOKENS, SEEDS = 3, 2, 4, 20_000


RULES = ("full", "position", "stale")
TABLES = np.random.default_rng(3).normal(size=(2, TOKENS + SLOTS + 1, VOCAB, VOCAB))


@functools.partial(jax.jit, static_argnames="purpose")
def speculate(params, rule, fresh, *, purpose=Purpose.PROPOSE):
    """The first TOKENS tokens of each row, decoded in rounds against first-order tables.

    `rule` numbers the RULES for how many drafts are verified: all, some by position, or all only
    if the round before had drafted token 0 for the position that is now drafted again. `fresh`
    False makes the proposal's noise depend on the position alone.
    """
    target, drafter = jnp.asarray(TABLES, jnp.float32)

    def one_round(state, _):
        anchor, last, stale, out = state  # i32[B] positions, i32[B], i32[B], i32[B, ...]
        tokens, probs, previous = [], [], last
        for k in range(SLOTS):
            keys = sampling.purpose_key(
                params.seed, jnp.where(fresh, anchor, anchor + k), purpose, jnp.where(fresh, k, 0)
            )
            previous, q = sampling.sample(drafter[anchor + k, previous], params, keys)
            tokens.append(previous)
            probs.append(q)
        drafts = jnp.stack(tokens, axis=1)
        inputs = jnp.concatenate([last[:, None], drafts], axis=1)
        p = params.distribution(target[anchor[:, None] + jnp.arange(SLOTS + 1), inputs])
        lengths = jnp.stack(
            [
                jnp.full_like(anchor, SLOTS),
                anchor % (SLOTS + 1),
                jnp.where(stale == 0, SLOTS, 0),
            ]
        )[rule]
        q = jnp.stack(probs, axis=1)
        result = verify.verify(p, drafts, q, anchor, params.seed, lengths=lengths)
        out = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(
            out, result.tokens, anchor
        )
        after = jnp.minimum(anchor + result.count, TOKENS)
        own = jnp.take_along_axis(result.tokens, result.accepted[:, None], axis=1)[:, 0]
        again = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=1)
        stale = jnp.take_along_axis(again, result.count[:, None], axis=1, mode="clip")[:, 0]
        return (after, own, stale, out), None

    zero = jnp.zeros_like(params.top_k)
    out = jnp.zeros((len(zero), TOKENS + SLOTS + 1), jnp.int32)
    state, _ = jax.lax.scan(one_round, (zero, zero, zero + 1, out), None, length=TOKENS)
    return state[3][:, :TOKENS]


def decode(*, rule="full", fresh=True, **purpose):
    """Tokens i32[SEEDS, TOKENS] and the exact probability of every sequence."""
    params = SamplingParams.make(SEEDS, 1.0, seeds=np.arange(SEEDS))
    tokens = np.asarray(speculate(params, RULES.index(rule), fresh, **purpose))
    own = np.asarray(jax.nn.softmax(TABLES[0], axis=-1), np.float64)
    exact = np.zeros((VOCAB,) * TOKENS)
    for sequence in itertools.product(range(VOCAB), repeat=TOKENS):
        steps = zip((0, *sequence), sequence)
        exact[sequence] = np.prod([own[k, a, b] for k, (a, b) in enumerate(steps)])
    return tokens, exact.reshape(-1)


def surprise(tokens, exact):
    """Chi-square of the counts against the exact distribution, in standard deviations."""
    number = np.ravel_multi_index(tuple(tokens.T), (VOCAB,) * TOKENS)
    counts = np.bincount(number, minlength=len(exact))
    wanted = exact * len(tokens)
    freedom = len(exact) - 1
    return (((counts - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("rule", RULES)
def test_real_draws_follow_the_target(rule):
    assert surprise(*decode(rule=rule)) < 5


def test_correlated_keys_are_caught():
    # One noise for proposal and acceptance.
    assert surprise(*decode(purpose=Purpose.ACCEPT, fresh=False)) > 20
    # Noise by position only, and a scheduler that saw what the last round drafted there.
    assert surprise(*decode(fresh=False, rule="stale")) > 20


@jax.jit
def run(p, drafts, q, positions, seeds, lengths):
    return verify.verify(p, drafts, q, positions, seeds, lengths=lengths)


def requests(batch, seed=0, slots=3, vocab=5):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.ones(vocab), (batch, slots + 1)).astype(np.float32)
    q = rng.dirichlet(np.ones(vocab), (batch, slots)).astype(np.float32)
    q = (q + 2 * p[:, :slots]) / 3  # close enough for several acceptances
    x = rng.integers(0, vocab, (batch, slots)).astype(np.int32)
    positions = rng.integers(0, 900, batch).astype(np.int32)
    seeds = rng.integers(0, 2**32, batch).astype(np.uint32)
    lengths = np.arange(batch, dtype=np.int32) % (slots + 1)
    return p, x, q, positions, seeds, lengths


def test_same_request_alone_in_a_batch_and_in_another_row():
    args = requests(16)
    together = jax.tree.map(np.asarray, run(*args))
    assert len(set(together.accepted)) > 2
    order = np.random.default_rng(1).permutation(16)
    moved = jax.tree.map(np.asarray, run(*(a[order] for a in args)))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[order], b), together, moved)
    for row in (1, 2, 3, 7):
        alone = run(*(a[row : row + 1] for a in args))
        there = jax.tree.map(lambda a: a[row : row + 1], together)  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, there, alone)
    compiled = run._cache_size()
    quiet = list(args)
    quiet[5] = np.where(np.arange(16) == 3, args[5], 0).astype(
        np.int32
    )  # neighbours without drafts
    result = run(*quiet)
    np.testing.assert_array_equal(result.tokens[3], together.tokens[3])
    np.testing.assert_array_equal(result.count, np.where(np.arange(16) == 3, together.count, 1))
    assert run._cache_size() == compiled  # lengths cost no compilation


def test_row_without_drafts_is_plain_decoding():
    p, x, q, positions, seeds, _ = requests(16)
    none = run(p, x, q, positions, seeds, np.zeros(16, np.int32))
    empty = jax.jit(verify.verify)(p[:, :1], x[:, :0], q[:, :0], positions, seeds)
    plain = sampling.draw(p[:, 0], sampling.purpose_key(seeds, positions, Purpose.TARGET))
    np.testing.assert_array_equal(none.tokens[:, 0], plain)
    np.testing.assert_array_equal(empty.tokens[:, 0], plain)
    np.testing.assert_array_equal(none.count, 1)


@jax.jit
def finish(*args):
    result = verify.verify(*args[:5], lengths=args[5])
    cap = jnp.full_like(result.count, 3)
    ended = verify.truncate(result, stop_ids=jnp.array([4]), emitted=cap - 2, max_tokens=cap)
    greedy = verify.verify_greedy(sampling.best_token(args[0]), args[1], args[5])
    return result, ended, greedy


@pytest.mark.parametrize("fsdp,tp", [(1, 1), (4, 2)])
def test_sharded_batch_gives_the_same_tokens(fsdp, tp):
    args = requests(8)

    alone = finish(*args)
    with jax.set_mesh(make_mesh(fsdp, tp)):
        placed = [place(a, "batch", *[None] * (a.ndim - 1)) for a in args]
        sharded = finish(*placed)
    assert sharded[0].tokens.sharding.spec[0] == "fsdp"
    jax.tree.map(np.testing.assert_array_equal, alone, sharded)


def test_one_row_on_a_mesh():
    args = requests(1)
    with jax.set_mesh(make_mesh(1, 1)):
        result = run(*[place(a, "batch", *[None] * (a.ndim - 1)) for a in args])
    jax.tree.map(np.testing.assert_array_equal, result, run(*args))


def test_no_id_outside_the_vocabulary_even_from_nan():
    p, x, q, positions, seeds, lengths = requests(16)
    p = p.copy()
    p[::2] = np.nan
    result = run(p, x, q, positions, seeds, lengths)
    tokens = np.asarray(result.tokens)
    assert tokens.min() >= 0 and tokens.max() < 5
    np.testing.assert_array_equal(result.accepted[::2], 0)
    filler = np.arange(4) >= np.asarray(result.count)[:, None]
    assert not tokens[filler].any()
