"""Speculation does not change what the target says: exact enumeration, then the real draws.

The enumeration multiplies out every draft block, every number of accepted drafts and every token
the target can add, with the very functions `verify` is made of. A rule that is slightly wrong
must fail the same check.
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


# The real draws: keys, uniforms and categorical draws together, over many seeds.

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
    empty = jit(verify.verify)(p[:, :1], x[:, :0], q[:, :0], positions, seeds)
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


# Where a request ends.


truncate = jax.jit(verify.truncate)


def ended(rows, stop_ids, max_tokens, emitted=None, counts=None, **more):
    tokens = jnp.asarray(rows, jnp.int32)
    batch, width = tokens.shape
    count = jnp.full(batch, width, jnp.int32) if counts is None else jnp.asarray(counts, jnp.int32)
    emitted = jnp.zeros(batch, jnp.int32) if emitted is None else jnp.asarray(emitted, jnp.int32)
    count, finished, reason = truncate(
        verify.VerifyResult(count - 1, tokens, count),
        stop_ids=jnp.asarray(stop_ids, jnp.int32),
        emitted=emitted,
        max_tokens=jnp.broadcast_to(jnp.asarray(max_tokens, jnp.int32), (batch,)),
        **more,
    )
    np.testing.assert_array_equal(finished, np.asarray(reason) != verify.Reason.RUNNING)
    return np.asarray(count).tolist(), np.asarray(reason).tolist()


def test_stop_id_and_limit():
    eos, other = 2, 9
    run_, stop, length = verify.Reason.RUNNING, verify.Reason.STOP, verify.Reason.LENGTH
    assert ended([[5, eos, 7, 7]], [eos], 100) == ([2], [stop])
    assert ended([[eos, 5, 7, 7]], [eos], 100) == ([1], [stop])
    assert ended([[5, 6, 7, eos]], [eos], 100) == ([4], [stop])  # as the bonus token
    assert ended([[5, other, eos, 7]], [eos, other], 100) == ([2], [stop])
    assert ended([[5, 6, 7, eos]], [eos], 100, counts=[3]) == ([3], [run_])  # filler is no stop
    assert ended([[10, 11, eos, 20, 21, 22]], [eos], 5) == ([3], [stop])
    assert ended([[10, 11, 12, 13, 14, eos]], [eos], 5) == ([5], [length])
    assert ended([[10, 11, 12, 13, eos, 20]], [eos], 5) == ([5], [stop])  # both at once
    assert ended([[5, 6]], [eos], 0) == ([0], [length])
    assert ended([[eos, 6]], [eos], 0) == ([0], [length])
    assert ended([[5, 6]], [eos], 1) == ([1], [length])
    assert ended([[5, 6]], [], 9) == ([2], [run_])
    assert ended([[5, 6], [5, 6]], [[5, -1], [6, 7]], 9) == ([1, 2], [stop, stop])  # by row
    assert ended([[0, 0]], [[-1, -1]], 9) == ([2], [run_])
    assert ended([[5, 6]], [eos], 3, emitted=[5]) == ([0], [length])


def test_finished_rows_stay_as_they_are():
    reason = jnp.array([verify.Reason.STOP, verify.Reason.RUNNING, verify.Reason.LENGTH])
    got = ended([[5, 6]] * 3, [6], 9, reason=reason)
    assert got == ([0, 2, 0], [verify.Reason.STOP, verify.Reason.STOP, verify.Reason.LENGTH])


def test_unsound_logits_end_the_request_before_their_token():
    error, stop, length = verify.Reason.ERROR, verify.Reason.STOP, verify.Reason.LENGTH
    finite = jnp.array([[True, False, True]])
    assert ended([[5, 6, 7]], [2], 9, finite=finite) == ([1], [error])
    assert ended([[5, 6, 7]], [5], 9, finite=finite) == ([1], [stop])
    assert ended([[5, 6, 7]], [2], 1, finite=finite) == ([1], [length])
    assert ended([[5, 6, 7]], [2], 9, finite=~finite) == ([0], [error])
    assert ended([[5, 0, 0]], [2], 9, counts=[1], finite=finite) == ([1], [0])  # row never used
    assert ended([[5, 0, 0]], [2], 0, finite=~finite) == ([0], [length])


@pytest.mark.parametrize("width", range(1, 9))
def test_blocks_end_where_single_tokens_do(width):
    rng = np.random.default_rng(width)
    batch = 300
    rows = rng.integers(0, 12, (batch, width))
    counts = rng.integers(1, width + 1, batch)
    emitted, caps = rng.integers(0, 6, batch), rng.integers(0, 12, batch)
    finite = rng.random((batch, width)) > 0.1
    wanted = []
    for b in range(batch):
        kept, reason = 0, verify.Reason.RUNNING
        while reason == verify.Reason.RUNNING:
            if emitted[b] + kept >= caps[b]:
                reason = verify.Reason.LENGTH
            elif kept == counts[b]:
                break
            elif not finite[b, kept]:
                reason = verify.Reason.ERROR
            else:
                kept += 1
                if rows[b, kept - 1] in (3, 7):
                    reason = verify.Reason.STOP
        wanted.append((kept, int(reason)))
    got = ended(rows, [3, 7], caps, emitted, counts, finite=jnp.asarray(finite))
    assert list(zip(*got, strict=True)) == wanted
    assert len({reason for _, reason in wanted}) == 4
