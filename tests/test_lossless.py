"""Speculation does not change what the target says: exact enumeration of all paths.

The enumeration multiplies out every draft block, every number of accepted drafts and every token
the target can add, with the very functions `verify` is made of. A rule that is slightly wrong
must fail the same check. tests/test_real_draws.py goes on with keys and random numbers.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.decoding import sampling, verify

# temperature, top_k, top_p
OPTIONS = [
    (0.0, 0, 1.0),
    (0.7, 0, 1.0),
    (1.0, 0, 1.0),
    (1.3, 2, 1.0),
    (1.0, 0, 0.6),
    (0.7, 3, 0.8),
]
WRONG, RIGHT = 1e-3, 1e-6  # a wrong rule is off by more than the first, a right one by less


jit = functools.cache(jax.jit)  # one compilation for each function and shape


@jax.jit
def run(p, drafts, q, positions, seeds, lengths):
    return verify.verify(p, drafts, q, positions, seeds, lengths=lengths)


class Tables:
    """A target and a drafter over a tiny vocabulary, both conditional on the whole prefix.

    `target[k]` is f32[V**k, V] for k = 0..G, `drafter[k]` likewise for k = 0..G-1: probabilities
    of token k given each prefix, prefixes numbered with the first token as the highest digit.
    """

    def __init__(self, vocab, slots, seed, target_options, draft_options):
        rng = np.random.default_rng(seed)
        self.vocab, self.slots = vocab, slots
        self.target_logits = [rng.normal(size=(vocab**k, vocab)) * 1.5 for k in range(slots + 1)]
        self.draft_logits = [rng.normal(size=(vocab**k, vocab)) * 1.5 for k in range(slots)]
        self.target = [probabilities(x, target_options) for x in self.target_logits]
        self.drafter = [probabilities(x, draft_options) for x in self.draft_logits]

    def blocks(self):
        """All draft blocks, i32[V**G, G], in the order of their prefix number."""
        return np.array(list(itertools.product(range(self.vocab), repeat=self.slots)), np.int32)

    def rows(self, tables, width):
        """Each block's conditional rows: f32[V**G, width, V]."""
        number = np.arange(self.vocab**self.slots)
        return np.stack(
            [tables[k][number // self.vocab ** (self.slots - k)] for k in range(width)], axis=1
        )

    def tail(self, start):
        """Target probability of tokens start..G of each full sequence, f64[V**(G+1)]."""
        number = np.arange(self.vocab ** (self.slots + 1))
        product = np.ones(len(number))
        for k in range(start, self.slots + 1):
            prefix = number // self.vocab ** (self.slots + 1 - k)
            token = number // self.vocab ** (self.slots - k) % self.vocab
            product *= self.target[k].astype(np.float64)[prefix, token]
        return product


def probabilities(logits, options):
    logits = jnp.asarray(logits, jnp.float32)
    return np.asarray(sampling.distribution(logits, *(jnp.asarray(x) for x in options)))


def emitted(tables, lengths, *, drawn_from=None, judged=None, rules=verify):
    """Joint distribution of the first G+1 tokens when one round verifies `lengths` drafts.

    What follows the round's tokens comes from the target. `drawn_from` are the tables the drafts
    are drawn from and `judged` the target's tables as verification sees them; both default to
    what they should be, the drafter's recorded and the target's own distribution.
    """
    vocab, slots = tables.vocab, tables.slots
    drafts = tables.blocks()
    drawn = tables.rows(drawn_from or tables.drafter, slots)
    q = tables.rows(tables.drafter, slots)
    p = tables.rows(judged or tables.target, slots + 1)

    def of(rows):  # the probability of each drafted token
        return np.take_along_axis(rows[:, :slots], drafts[..., None], axis=2)[..., 0]

    weight = of(drawn).astype(np.float64).prod(axis=1)
    accept = np.asarray(jit(rules.acceptance_probability)(of(p), of(q)), np.float64)
    joint = np.zeros(vocab ** (slots + 1))
    for accepted in range(lengths + 1):
        reaches = accept[:, :accepted].prod(axis=1)
        if accepted < lengths:
            reaches = reaches * (1 - accept[:, accepted])
        rows = np.full(len(drafts), accepted, np.int32)
        own = jit(rules.next_distribution)(p, q, rows, np.full_like(rows, lengths))
        mass = (weight * reaches)[:, None] * np.asarray(own, np.float64)
        prefix = np.arange(len(drafts)) // vocab ** (slots - accepted)
        ended = np.zeros((vocab**accepted, vocab))
        np.add.at(ended, prefix, mass)
        spread = np.repeat(ended.reshape(-1), vocab ** (slots - accepted))
        joint += spread * tables.tail(accepted + 1)
    return joint


def error(tables, **how):
    """Largest deviation from the target's own distribution over all verified lengths."""
    own = tables.tail(0)
    return max(
        np.abs(emitted(tables, lengths, **how) - own).max() for lengths in range(tables.slots + 1)
    )


@pytest.mark.parametrize("vocab,slots", [(2, 3), (3, 2), (4, 3)])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_path_adds_up_to_the_target(vocab, slots, options):
    for seed, draft_options in enumerate([options, (1.0, 0, 1.0), (0.0, 0, 1.0), (1.3, 2, 0.7)]):
        tables = Tables(vocab, slots, seed, options, draft_options)
        assert abs(tables.tail(0).sum() - 1) < RIGHT
        assert error(tables) < RIGHT


def test_perfect_and_hopeless_drafters():
    tables = Tables(3, 2, 0, (1.0, 0, 1.0), (1.0, 0, 1.0))
    tables.drafter = tables.target[:2]
    assert error(tables) < RIGHT
    tables.drafter = [np.full_like(table, np.nan) for table in tables.drafter]
    proposals = [np.full_like(table, 1 / 3) for table in tables.drafter]
    assert error(tables, drawn_from=proposals) < RIGHT  # NaN is rejected, the target steps in


class NoResidual:
    """Draws from p after a rejection."""

    acceptance_probability = staticmethod(verify.acceptance_probability)

    @staticmethod
    def next_distribution(p, q, accepted, lengths):
        return verify.next_distribution(p, q, accepted, jnp.zeros_like(lengths))


class ResidualAfterTheLastSlot:
    """Takes a slot that was never verified for a rejected one."""

    acceptance_probability = staticmethod(verify.acceptance_probability)

    @staticmethod
    def next_distribution(p, q, accepted, lengths):
        return verify.next_distribution(p, q, accepted, None)


class AcceptsTooEasily:
    """A margin on the ratio."""

    next_distribution = staticmethod(verify.next_distribution)

    @staticmethod
    def acceptance_probability(p, q):
        return jnp.minimum(1.0, p / q + 0.05)


@pytest.mark.parametrize("rules", [NoResidual, ResidualAfterTheLastSlot, AcceptsTooEasily])
def test_wrong_rules_are_caught(rules):
    tables = Tables(3, 2, 0, (1.0, 0, 1.0), (1.0, 0, 1.0))
    assert error(tables) < RIGHT
    assert error(tables, rules=rules) > WRONG


def test_greedy_drafts_against_a_softmax_are_caught():
    tables = Tables(3, 1, 0, (1.0, 0, 1.0), (1.0, 0, 1.0))
    tables.target[0] = np.array([[0.3, 0.5, 0.2]], np.float32)
    tables.drafter[0] = np.array([[0.4, 0.3, 0.3]], np.float32)
    argmax = [np.array([[1.0, 0.0, 0.0]], np.float32)]
    first = emitted(tables, 1, drawn_from=argmax).reshape(3, 3).sum(axis=1)
    np.testing.assert_allclose(first, [0.75, 0.25, 0], atol=1e-6)  # the fault, to the digit
    tables.drafter = argmax
    assert error(tables) < RIGHT


def test_recorded_temperature_must_be_the_drawn_one():
    tables = Tables(2, 1, 0, (1.0, 0, 1.0), (1.0, 0, 1.0))
    logits = np.array([[1.0, 0.0]])
    tables.target[0] = np.array([[0.5, 0.5]], np.float32)
    tables.drafter = [probabilities(logits, (0.5, 0, 1.0))]
    first = emitted(tables, 1, drawn_from=[probabilities(logits, (1.0, 0, 1.0))])
    np.testing.assert_allclose(first.reshape(2, 2).sum(axis=1), [0.415, 0.585], atol=5e-4)
    tables.drafter = [probabilities(logits, (1.0, 0, 1.0))]
    assert error(tables) < RIGHT


@pytest.mark.parametrize("options", [(1.0, 2, 1.0), (1.0, 0, 0.6), (0.7, 0, 1.0)])
def test_options_on_the_drafter_only_are_caught(options):
    tables = Tables(3, 2, 1, options, options)
    unfiltered = [probabilities(logits, (1.0, 0, 1.0)) for logits in tables.target_logits]
    assert error(tables) < RIGHT
    assert error(tables, judged=unfiltered) > WRONG


def test_filtered_target_never_emits_a_filtered_token():
    tables = Tables(3, 1, 0, (1.0, 0, 0.7), (1.0, 0, 1.0))
    tables.target[0] = probabilities(np.log([[0.5, 0.3, 0.2]]), (1.0, 0, 0.7))
    tables.drafter[0] = np.array([[0.2, 0.2, 0.6]], np.float32)
    first = emitted(tables, 1).reshape(3, 3).sum(axis=1)
    np.testing.assert_allclose(first, [0.625, 0.375, 0], atol=1e-6)
    assert first[2] == 0


def test_comparison_is_strict():
    # Ratios that are multiples of the spacing of the uniforms: counting is then integration.
    p = jnp.array([0.25, 0.5, 0.25, 0.0])
    q = jnp.array([0.5, 0.125, 0.25, 0.125])
    grid = np.arange(8, dtype=np.float32) / 8
    tokens = np.repeat(np.arange(4), 8).astype(np.int32)[:, None]
    rows = len(tokens)
    accepted = verify.accepted_prefix(
        jnp.broadcast_to(p, (rows, 2, 4)),
        jnp.asarray(tokens),
        jnp.broadcast_to(q, (rows, 1, 4)),
        jnp.asarray(np.tile(grid, 4)[:, None]),
    )
    rate = np.asarray(accepted).reshape(4, 8).mean(axis=1)
    np.testing.assert_array_equal(rate, [0.5, 1.0, 1.0, 0.0])
    loose = (grid <= np.asarray(verify.acceptance_probability(p, q))[:, None]).mean(axis=1)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(loose, rate)


def test_ends_of_the_uniform():
    probs = jnp.array([[[0.0, 1.0], [0.5, 0.5]], [[0.3, 0.7], [0.5, 0.5]]])
    draft = jnp.array([[[1.0, 0.0]], [[0.3, 0.7]]])
    uniforms = jnp.array([[0.0], [1 - 2.0**-24]])  # p = 0 with u = 0; ratio 1 with u below 1
    accepted = verify.accepted_prefix(probs, jnp.array([[0], [1]]), draft, uniforms)
    np.testing.assert_array_equal(accepted, [0, 1])


def test_accepted_prefix_matches_a_loop():
    rng = np.random.default_rng(0)
    batch, slots, vocab = 400, 3, 4
    p = rng.dirichlet(np.ones(vocab), (batch, slots + 1)).astype(np.float32)
    q = rng.dirichlet(np.ones(vocab), (batch, slots)).astype(np.float32)
    x = rng.integers(0, vocab, (batch, slots)).astype(np.int32)
    u = rng.random((batch, slots)).astype(np.float32)
    lengths = rng.integers(0, slots + 1, batch).astype(np.int32)
    wanted = []
    for b in range(batch):
        k = 0
        while k < lengths[b] and u[b, k] < p[b, k, x[b, k]] / q[b, k, x[b, k]]:
            k += 1
        wanted.append(k)
    got = verify.accepted_prefix(p, x, q, jnp.asarray(u), jnp.asarray(lengths))
    np.testing.assert_array_equal(got, wanted)
    assert set(wanted) == {0, 1, 2, 3}


def test_greedy_path_is_verify_on_one_hots():
    vocab, slots = 3, 2
    blocks = np.array(list(itertools.product(range(vocab), repeat=slots)), np.int32)
    truths = np.array(list(itertools.product(range(vocab), repeat=slots + 1)), np.int32)
    drafts, best, lengths = (
        np.concatenate(part)
        for part in zip(
            *(
                (np.repeat(blocks, len(truths), 0), np.tile(truths, (len(blocks), 1)), length)
                for length in (
                    np.full(len(blocks) * len(truths), n, np.int32) for n in range(slots + 1)
                )
            ),
            strict=True,
        )
    )
    rows = len(drafts)
    number = np.arange(rows, dtype=np.int32)
    one_hot = np.eye(vocab, dtype=np.float32)
    seeds = number.astype(np.uint32)
    general = run(one_hot[best], drafts, one_hot[drafts], number, seeds, lengths)
    greedy = jit(verify.verify_greedy)(best, drafts, lengths)
    general, greedy = jax.tree.map(np.asarray, (general, greedy))
    jax.tree.map(np.testing.assert_array_equal, general, greedy)
    for b in range(rows):  # what is emitted is what the target says, token by token
        count = int(greedy.count[b])
        np.testing.assert_array_equal(greedy.tokens[b, :count], best[b, :count])
        np.testing.assert_array_equal(greedy.tokens[b, count:], 0)
    assert set(np.asarray(greedy.accepted)) == {0, 1, 2}
