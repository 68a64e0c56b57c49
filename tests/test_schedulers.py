"""Schedulers against brute force, and what they must not do: look at the draft they decide on.

The enumerations multiply out all draft blocks, the lengths a scheduler gives them and all tokens
the target can add, through the functions of decoding/verify.py. A scheduler that sees a little too
much must fail the same checks.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_lossless import RIGHT, WRONG, Tables

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.decoding import verify
from dspark_jax.scheduling import calibration, schedulers
from dspark_jax.scheduling.schedulers import CostTable, Switch

jit = functools.cache(jax.jit)


def table(rates, **how):
    """SPS(1), SPS(2), ..."""
    return CostTable.make(range(1, len(rates) + 1), rates, **how)


def falling(rng, most, step):
    """Steps per second of 1..most tokens: most tokens cost little more, a few a lot."""
    return 1 / (1 + np.cumsum(rng.random(most) ** 5 * 3 * step))


def random_survival(rng, *shape):
    return np.cumprod(rng.random(shape) ** 0.5, axis=-1).astype(np.float32)


# What a step costs.


def test_costs_between_and_beyond_what_was_measured():
    costs = CostTable.make([2, 4, 8], [1.0, 0.5, 0.25])
    tokens = jnp.array([0, 1, 2, 3, 6, 8, 16])
    seconds = jit(CostTable.step_seconds)(costs, tokens)
    np.testing.assert_allclose(seconds, [1, 1, 1, 1.5, 3, 4, 8], rtol=1e-6)
    padded = CostTable.make([2, 4, 8], [1.0, 0.5, 0.25], padded=True)
    rates = jit(CostTable.steps_per_second)(padded, jnp.array([[1, 2, 3], [4, 8, 9]]))
    np.testing.assert_allclose(rates, [[1, 1, 0.5], [0.5, 0.25, 0]], rtol=1e-6)


def test_noise_in_the_measurements_is_pooled():
    costs = CostTable.make([1, 2, 3, 4], [1.0, 0.4, 0.5, 0.2])  # seconds 1, 2.5, 2, 5
    np.testing.assert_allclose(costs.seconds, [1, 2.25, 2.25, 5], rtol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(20):
        seconds = rng.random(6) + 0.1
        tried = []  # means of neighbours, all ways to group them
        for cuts in itertools.chain(*(itertools.combinations(range(1, 6), n) for n in range(6))):
            parts = np.split(seconds, cuts)
            tried.append(np.concatenate([np.full(len(part), part.mean()) for part in parts]))
        best = min(
            (x for x in tried if (np.diff(x) >= 0).all()), key=lambda x: sum((x - seconds) ** 2)
        )
        fitted = CostTable.make(range(1, 7), 1 / seconds).seconds
        np.testing.assert_allclose(fitted, best, rtol=1e-6)


@pytest.mark.parametrize(
    "tokens, rates, said",
    [
        ([], [], "at least one"),
        ([1, 2], [1.0], "as many"),
        ([2, 2], [1.0, 0.5], "rising"),
        ([0, 1], [1.0, 0.5], "from 1"),
        ([1.0, 2.0], [1.0, 0.5], "whole numbers"),
        ([1, 2], [1.0, 0.0], "positive"),
        ([1, 2], [1.0, float("nan")], "positive"),
    ],
)
def test_bad_cost_tables_are_refused(tokens, rates, said):
    with pytest.raises(UserError, match=said):
        CostTable.make(tokens, rates)


# Each policy against the slow way.


def test_confidence_and_survival():
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (5, 4)).astype(np.float32)
    temperatures = np.array([0.5, 1.0, 2.0, 3.0], np.float32)
    confidence, survival = jit(schedulers.confidence), jit(schedulers.survival)
    c = confidence(logits, temperatures)
    everything = survival(c, np.full(5, 4))
    wanted = calibration.survival(logits, temperatures)
    np.testing.assert_allclose(everything, wanted, rtol=1e-5)
    usable = np.array([0, 1, 2, 3, 4])
    some = survival(c, usable)
    np.testing.assert_allclose(some, np.where(np.arange(4) < usable[:, None], wanted, 0), rtol=1e-5)
    logits[2, 1] = np.nan
    c = np.asarray(confidence(logits, np.ones(4, np.float32)))
    assert c[2, 1] == 0 and not np.isnan(c).any()
    assert (np.asarray(survival(c, np.full(5, 4)))[2, 1:] == 0).all()


def test_fixed_length_and_static_threshold():
    usable = np.array([0, 1, 3])
    np.testing.assert_array_equal(jit(schedulers.fixed_length)(usable, 2), [0, 1, 2])
    rng = np.random.default_rng(0)
    c = rng.random((50, 4)).astype(np.float32)
    c[0, 0] = np.nan
    usable = rng.integers(0, 5, 50)
    for threshold in (0.0, 0.3, 0.8, 1.1):
        wanted = []
        for row, most in zip(c, usable, strict=True):
            length = 0
            while length < most and row[length] >= threshold:
                length += 1
            wanted.append(length)
        got = jit(schedulers.static_threshold)(c, usable, threshold)
        np.testing.assert_array_equal(got, wanted)
    assert got.dtype == jnp.int32


def test_load_and_the_threshold_that_follows_it():
    load = jit(schedulers.load)
    assert load(5, 10, 3, 4) == pytest.approx(0.6 * 0.5 + 0.4 * 0.75)
    assert load(50, 10, 5, 4) == 1.0 and load(0, 10, 0, 4) == 0.0
    survival = np.array([[0.9, 0.5, 0.2], [0.45, 0.1, 0.0], [0.0, 0.0, 0.0]], np.float32)
    for busy, wanted in ((0.0, [3, 2, 0]), (0.5, [2, 1, 0]), (1.0, [1, 0, 0])):
        lengths = jit(schedulers.load_adaptive)(survival, busy, 0.1, 0.85)  # 0.1, 0.2875, 0.85
        np.testing.assert_array_equal(lengths, wanted)
    # No threshold is no licence to verify what must not be.
    lengths = jit(schedulers.load_adaptive)(survival, 0.0, 0.0, 1.0)
    np.testing.assert_array_equal(lengths, [3, 2, 0])


def theta(lengths, survival, rates, rows=None):
    """Tokens per second that these lengths are expected to give."""
    expected = tokens = len(survival) if rows is None else rows
    for row, length in zip(survival.astype(np.float64), lengths, strict=True):
        expected += row[:length].sum()
        tokens += length
    return expected * rates[tokens - 1]


def algorithm_1(survival, rates, rows=None, early_stop=True):
    """The paper's, line by line; also Theta along its way through all drafts."""
    ranked = sorted(
        ((-float(a), r, k) for r, row in enumerate(survival) for k, a in enumerate(row))
    )
    lengths = [0] * len(survival)
    best, kept, seen = theta(lengths, survival, rates, rows), list(lengths), []
    seen.append(best)
    stopped = False
    for _, r, k in ranked:
        assert lengths[r] == k
        lengths[r] += 1
        now = theta(lengths, survival, rates, rows)
        seen.append(now)
        stopped |= early_stop and now <= best
        if now > best and not stopped:
            best, kept = now, list(lengths)
    return kept, seen


def test_algorithm_1_line_by_line():
    rng = np.random.default_rng(0)
    lengths_seen = set()
    for _ in range(100):
        survival = random_survival(rng, 3, 3)
        rates = falling(rng, 13, rng.choice([0.1, 0.5, 1.5]))
        rows = int(rng.integers(3, 5))  # one more may run without drafts
        got = jit(schedulers.hardware_aware)(survival, rows, table(rates)).tolist()
        assert got == algorithm_1(survival, rates, rows)[0]
        lengths_seen.add(sum(got))
    assert len(lengths_seen) > 6


def test_algorithm_1_is_best_where_theta_has_one_peak():
    rng = np.random.default_rng(1)
    one_peak = several = missed = 0
    for _ in range(150):
        survival = random_survival(rng, 3, 3)
        rates = falling(rng, 13, rng.choice([0.1, 0.5, 1.5]))
        all_lengths = itertools.product(range(4), repeat=3)
        best = max(theta(lengths, survival, rates) for lengths in all_lengths)
        costs = table(rates)
        greedy = theta(jit(schedulers.hardware_aware)(survival, 3, costs), survival, rates)
        most = jit(schedulers.budget)(survival, 3, costs)
        search = theta(jit(schedulers.top)(survival, most), survival, rates)
        assert search == pytest.approx(best, rel=1e-6)
        way = algorithm_1(survival, rates)[1]
        peak = next((i for i in range(len(way) - 1) if way[i + 1] <= way[i]), len(way) - 1)
        if max(way[peak:]) == way[peak]:
            one_peak += 1
            assert greedy == pytest.approx(best, rel=1e-6)
        else:
            several += 1
            missed += greedy < best * (1 - 1e-6)
    assert one_peak > 40 and several > 20 and missed > 20


def test_top_is_the_best_way_to_spend_a_budget():
    rng = np.random.default_rng(2)
    for _ in range(5):
        survival = random_survival(rng, 3, 3)
        for most in range(11):
            got = np.asarray(jit(schedulers.top)(survival, most))
            assert got.sum() == min(most, 9)
            flat = [1.0] * 13  # rates that make Theta the sum of survivals
            best = max(
                theta(lengths, survival, flat)
                for lengths in itertools.product(range(4), repeat=3)
                if sum(lengths) <= most
            )
            assert theta(got, survival, flat) == pytest.approx(best, rel=1e-6)


def test_a_stair_holds_algorithm_1_but_not_the_budget():
    survival = np.full((1, 4), 0.9, np.float32)
    stairs = CostTable.make([1, 2, 5], [1.0, 0.9, 0.8], padded=True)
    assert jit(schedulers.hardware_aware)(survival, 1, stairs) == 4
    stairs = CostTable.make([1, 2, 5], [1.0, 0.9, 0.6], padded=True)  # 1, 1.71, 1.68, 2.22, 2.76
    assert jit(schedulers.hardware_aware)(survival, 1, stairs) == 1
    assert jit(schedulers.budget)(survival, 1, stairs) == 4
    narrow = CostTable.make([1, 2, 3], [1.0, 0.9, 0.8], padded=True)  # no step takes more
    assert jit(schedulers.budget)(survival, 1, narrow) == 2


def test_a_draft_that_changes_nothing_ends_algorithm_1():
    survival = np.ones((1, 4), np.float32)
    level = table([1.0, 0.5, 0.4, 0.4, 0.4])  # Theta 1, 1, 1.2, 1.6, 2
    assert jit(schedulers.hardware_aware)(survival, 1, level) == 0
    assert jit(schedulers.budget)(survival, 1, level) == 4


def test_equal_survival_goes_slot_by_slot():
    survival = np.ones((3, 3), np.float32)
    wanted = [[0, 0, 0], [1, 0, 0], [2, 0, 0], [3, 0, 0], [3, 1, 0], [3, 2, 0], [3, 3, 0]]
    for most, lengths in enumerate(wanted):
        np.testing.assert_array_equal(jit(schedulers.top)(survival, most), lengths)


def test_nan_is_never_verified_and_leaves_the_others_alone():
    survival = np.array([[0.9, np.nan, 0.9], [0.8, 0.7, 0.6], [0.5, 0.0, 0.0]], np.float32)
    free = table([1.0] * 13)
    for lengths in (
        jit(schedulers.hardware_aware)(survival, 3, free),
        jit(schedulers.top)(survival, 6),
        jit(schedulers.asynchronous)(survival, survival, 3, free),
        jit(schedulers.load_adaptive)(survival, 0.0, 0.0, 1.0),
    ):
        np.testing.assert_array_equal(lengths, [1, 3, 1])


def test_rows_that_leave_between_budget_and_allocation():
    free, slow = table([1.0] * 13), table(1 / np.arange(1.0, 14))  # a token more brings at most 1
    rng = np.random.default_rng(3)
    running = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]], bool)
    survival = [random_survival(rng, 3, 3) * run[:, None] for run in running]
    for now in range(2, 5):
        rows = int(running[now - 2].sum())
        most = jit(schedulers.budget)(survival[now - 2], rows, free)
        lengths = jit(schedulers.asynchronous)(survival[now], survival[now - 2], rows, free)
        np.testing.assert_array_equal(lengths, 3 * running[now])
        assert lengths.sum() <= most == 3 * rows
        # Plain decoding goes on with a budget of nothing.
        lengths = jit(schedulers.asynchronous)(survival[now], survival[now - 2], rows, slow)
        np.testing.assert_array_equal(lengths, 0)
    nobody = jit(schedulers.asynchronous)(survival[0], survival[4], 0, free)
    np.testing.assert_array_equal(nobody, 0)
    # The batch of two rounds before may have had another size.
    wider = np.concatenate([survival[0], survival[1]])
    lengths = jit(schedulers.asynchronous)(survival[0], wider, 6, table([1.0] * 24))
    np.testing.assert_array_equal(lengths, 3)


def test_one_compilation_serves_all_loads():
    rng = np.random.default_rng(4)
    function = jax.jit(lambda *arguments: schedulers.asynchronous(*arguments))
    for rows in (2, 3):
        for step in (0.1, 0.5):
            survival, earlier = random_survival(rng, 2, 3, 3)
            function(survival, earlier, rows, table(falling(rng, 13, step)))
    assert function._cache_size() == 1


def test_rows_may_be_sharded():
    rng = np.random.default_rng(5)
    survival, usable = random_survival(rng, 8, 3), rng.integers(0, 4, 8).astype(np.int32)
    costs = table(falling(rng, 20, 0.2))
    switch = Switch.start(3)

    def every(survival, usable):
        lengths = schedulers.hardware_aware(survival, 8, costs)
        return (
            lengths,
            schedulers.load_adaptive(survival, 0.5, 0.1, 0.9),
            schedulers.survival(survival, usable),
        ), schedulers.switched(switch, survival, lengths, 8, costs, costs)

    wanted = jax.jit(every)(survival, usable)
    for mesh in ((1, 1), (4, 2)):
        with jax.set_mesh(make_mesh(*mesh)):
            got = jax.jit(every)(place(survival, "batch", None), place(usable, "batch"))
            assert {jax.typeof(x).sharding.spec[0] for x in got[0]} == {"fsdp"}
            best = place(np.zeros((8, 4), np.int32), "batch", None)
            drafts = place(np.zeros((8, 3), np.int32), "batch", None)
            result = jit(verify.verify_greedy)(best, drafts, got[0][0])
            np.testing.assert_array_equal(result.accepted, wanted[0][0])
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), got, wanted)


# Losslessness: one round, all drafts of all rows.


class Odds(Tables):
    """Tables of random probabilities, made at once instead of with a request's options."""

    def __init__(self, vocab, slots, seed):
        rng = np.random.default_rng(seed)
        self.vocab, self.slots = vocab, slots
        self.target, self.drafter = (
            [rng.dirichlet(np.ones(vocab), vocab**k).astype(np.float32) for k in range(width)]
            for width in (slots + 1, slots)
        )


class Rows:
    """Rows that are scheduled together: a target, a drafter and a confidence each.

    Confidence of slot k is a random function of the drafts before it.
    """

    def __init__(self, vocab, slots, rows, seed):
        rng = np.random.default_rng(seed)
        self.vocab, self.slots = vocab, slots
        self.tables = [Odds(vocab, slots, 10 * seed + r) for r in range(rows)]
        self.confidence_tables = [
            [rng.random(vocab**k).astype(np.float32) ** 0.5 for k in range(slots)]
            for _ in range(rows)
        ]

    @property
    def blocks(self):
        """The number of each row's block in all combinations: i[J, R]."""
        numbers = range(self.vocab**self.slots)
        return np.array(list(itertools.product(numbers, repeat=len(self.tables))))

    def confidence(self):
        """f32[J, R, P]."""
        return np.stack(
            [
                np.stack(
                    [table[block // self.vocab ** (self.slots - k)] for k, table in enumerate(row)],
                    axis=-1,
                )
                for row, block in zip(self.confidence_tables, self.blocks.T, strict=True)
            ],
            axis=1,
        )

    def emitted(self, lengths):
        """Joint distribution of the first P+1 tokens of every row, with lengths i[J, R]."""
        joint = 0.0
        for blocks, row in zip(self.blocks, np.asarray(lengths), strict=True):
            parts = zip(self.tables, blocks, row.tolist(), strict=True)
            parts = [given_block(tables, length)[block] for tables, block, length in parts]
            joint = joint + functools.reduce(np.multiply.outer, parts)
        return joint

    def error(self, lengths):
        own = functools.reduce(np.multiply.outer, [tables.tail(0) for tables in self.tables])
        return np.abs(self.emitted(lengths) - own).max()


@functools.cache
def given_block(tables, length):
    """Each block's probability times what is emitted with `length`: f64[V**P, V**(P+1)]."""
    vocab, slots = tables.vocab, tables.slots
    drafts = tables.blocks()
    q, p = tables.rows(tables.drafter, slots), tables.rows(tables.target, slots + 1)
    of_p, of_q = (
        np.take_along_axis(x[:, :slots], drafts[..., None], axis=2)[..., 0] for x in (p, q)
    )
    accept = np.asarray(jit(verify.acceptance_probability)(of_p, of_q), np.float64)
    sequence = np.arange(vocab ** (slots + 1))
    block = np.arange(len(drafts))
    out = np.zeros((len(block), len(sequence)))
    for accepted in range(length + 1):
        reaches = accept[:, :accepted].prod(axis=1)
        if accepted < length:
            reaches = reaches * (1 - accept[:, accepted])
        count = np.full(len(drafts), accepted, np.int32)
        own = np.asarray(jit(verify.next_distribution)(p, q, count, np.full_like(count, length)))
        same = (
            sequence // vocab ** (slots + 1 - accepted)
            == (block // vocab ** (slots - accepted))[:, None]
        )
        token = sequence // vocab ** (slots - accepted) % vocab
        out += (
            reaches[:, None] * same * own.astype(np.float64)[:, token] * tables.tail(accepted + 1)
        )
    return out * of_q.astype(np.float64).prod(axis=1)[:, None]


SIZES = [(3, 2, 1), (2, 2, 2), (2, 1, 3)]  # vocabulary, slots, rows


@functools.cache
def rows_of(size, seed):
    return Rows(*size, seed)


@functools.cache
def lengths_of(policy):
    """Lengths i32[J, R] for all drafts of policy(confidence f32[R, P], usable i32[R], option)."""
    return jax.jit(jax.vmap(policy, in_axes=(0, None, None)))


def fixed(confidence, usable, length):
    return schedulers.fixed_length(usable, length)


def static(confidence, usable, threshold):
    return schedulers.static_threshold(confidence, usable, threshold)


def adaptive(confidence, usable, load):
    return schedulers.load_adaptive(schedulers.survival(confidence, usable), load, 0.1, 0.9)


def hardware_aware(confidence, usable, costs):
    rows = len(confidence)
    return schedulers.hardware_aware(schedulers.survival(confidence, usable), rows, costs)


def budgeted(confidence, usable, budget):
    return schedulers.top(schedulers.survival(confidence, usable), budget)


def without_early_stop(confidence, usable, costs):
    survival = schedulers.survival(confidence, usable)
    return schedulers.asynchronous(survival, survival, len(confidence), costs)


def options(policy, size):
    """What to try a policy with."""
    _, slots, rows = size
    if policy is fixed:
        return range(slots + 1)
    if policy in (static, adaptive):
        return [0.0, 0.5, 0.7, 1.0]
    if policy is budgeted:  # whatever two rounds before said
        return range(rows * slots + 1)
    drafts = np.maximum(np.arange(1, rows * (slots + 1) + 1) - rows, 0)
    seconds = [1 + each * drafts for each in (0.1, 0.2, 0.4)]
    # The first draft is dear, those after it are cheap: where a global search looks past it.
    seconds += [1 + first * (drafts > 0) + 0.02 * drafts for first in np.linspace(0.3, 1.2, 10)]
    return [table(1 / x) for x in seconds]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", [fixed, static, adaptive, hardware_aware, budgeted])
def test_every_path_adds_up_to_the_target(policy, size):
    _, slots, count = size
    reacted = False
    for seed in range(3):
        rows = rows_of(size, seed)
        usable = np.full(count, slots)
        if seed == 2:
            usable[0] -= 1  # a row that may say only so much more
        for option in options(policy, size):
            lengths = np.asarray(lengths_of(policy)(rows.confidence(), usable, option))
            assert (lengths <= usable).all()
            assert rows.error(lengths) < RIGHT
            reacted |= (lengths != lengths[0]).any()
    # The test has teeth only where drafts change lengths, and not all can: those of the only slot,
    # or how a budget is spent on the only row.
    assert reacted == (slots > 1 and policy is not fixed and (policy, count) != (budgeted, 1))


@pytest.mark.parametrize("size", SIZES[:2])
def test_without_the_early_stop_the_output_is_biased(size):
    _, slots, count = size
    errors = []
    for seed in range(3):
        rows = rows_of(size, seed)
        for costs in options(hardware_aware, size):
            usable = np.full(count, slots)
            lengths = lengths_of(without_early_stop)(rows.confidence(), usable, costs)
            errors.append(rows.error(lengths))
    assert max(errors) > WRONG


def counter_example():
    """The paper's: x_1 is accepted with 0.8, and shows whether x_2 will be."""
    rows = Rows(2, 2, 1, 0)  # its own: tables are changed
    (tables,) = rows.tables
    tables.target[0] = np.array([[0.7, 0.3]], np.float32)
    tables.drafter[0] = np.array([[0.5, 0.5]], np.float32)
    true = verify.acceptance_probability(tables.target[0], tables.drafter[0]) @ tables.drafter[0].T
    assert true.item() == pytest.approx(0.8)
    rows.confidence_tables = [[np.float32([0.8]), np.float32([1.0, 0.0])]]
    return rows, table([1.0, 0.5, 0.45])


def test_the_counter_example_of_the_paper():
    rows, costs = counter_example()
    usable = np.array([2])

    def first_token(policy):
        lengths = lengths_of(policy)(rows.confidence(), usable, costs)
        return rows.emitted(lengths).reshape(2, 4).sum(axis=1), lengths[:, 0].tolist()

    biased, lengths = first_token(without_early_stop)
    assert lengths == [2, 2, 0, 0]  # x_1 is verified if it is 0, for then x_2 is promising
    np.testing.assert_allclose(biased, [0.85, 0.15], atol=1e-6)
    right, lengths = first_token(hardware_aware)
    assert lengths == [0, 0, 0, 0]
    np.testing.assert_allclose(right, [0.7, 0.3], atol=1e-6)


def test_a_confidence_that_sees_its_own_token_is_caught():
    rows = Rows(2, 1, 1, 0)
    (tables,) = rows.tables
    tables.target[0] = np.array([[0.5, 0.5]], np.float32)
    tables.drafter[0] = np.array([[0.9, 0.1]], np.float32)
    sees = np.array([[[1.0]], [[0.0]]], np.float32)  # confident of x_0 = 0 only
    lengths = lengths_of(static)(sees, np.array([1]), 0.5)
    first = rows.emitted(lengths).reshape(2, 2).sum(axis=1)
    np.testing.assert_allclose(first, [0.55, 0.45], atol=1e-6)
    assert rows.error(lengths_of(static)(np.ones_like(sees), np.array([1]), 0.5)) < RIGHT


def test_a_slot_is_decided_without_what_follows_it():
    trials, rows, slots = 1000, 3, 3
    rng = np.random.default_rng(6)
    before = random_survival(rng, trials, rows, slots)
    cut = rng.integers(0, slots, (trials, rows, 1))  # slots up to this one stay as they were
    factor = np.where(np.arange(slots) > cut, rng.random((trials, rows, slots)), 1)
    keeps = np.where(np.arange(slots) <= cut, before, np.take_along_axis(before, cut, 2))
    after = (keeps * np.cumprod(factor, axis=2)).astype(np.float32)
    rates = np.stack([falling(rng, 12, 1.5) for _ in range(trials)])
    costs = jax.tree.map(lambda *x: np.stack(x), *[table(row) for row in rates])
    which = rng.integers(0, rows, trials)

    def changed(policy):
        """Trials in which the row whose later slots changed decides differently on this one."""
        one = np.arange(rows)[:, None] == which[:, None, None]
        decide = jax.jit(jax.vmap(policy))
        old, new = (decide(x, costs) for x in (before, np.where(one, after, before)))
        verified = [
            np.take_along_axis(np.asarray(x), which[:, None], 1)
            > np.take_along_axis(cut[..., 0], which[:, None], 1)
            for x in (old, new)
        ]
        return int((verified[0] != verified[1]).sum())

    assert changed(lambda a, costs: schedulers.hardware_aware(a, rows, costs)) == 0
    assert changed(lambda a, costs: schedulers.top(a, 4)) == 0
    assert changed(lambda a, costs: schedulers.asynchronous(a, a, rows, costs)) > 3


# Losslessness over rounds: what earlier drafts decide.


class Story:
    """One row decoded in rounds until TOKENS tokens are there; tables see all that came before."""

    VOCAB, SLOTS, TOKENS = 2, 2, 4

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        width = self.TOKENS + self.SLOTS
        self.tables = Odds(self.VOCAB, width, seed)
        self.confidence = [rng.random((self.VOCAB**k, self.SLOTS)) ** 0.3 for k in range(width)]
        self.rounds = functools.cache(self.rounds)

    def rounds(self, count, prefix):
        """A round after `prefix` (of `count` tokens): a list of (q, survival, accept, own).

        One entry per block: its probability, survival as a tuple, acceptance probabilities f[P]
        and the target's distribution own[length][accepted] f[V].
        """
        t, v = self.tables, self.VOCAB
        drafts = np.array(list(itertools.product(range(v), repeat=self.SLOTS)), np.int32)
        number = [prefix, prefix * v + drafts[:, 0], (prefix * v + drafts[:, 0]) * v + drafts[:, 1]]
        at = [np.broadcast_to(x, len(drafts)) for x in number]
        q = np.stack([t.drafter[count + k][at[k]] for k in range(2)], axis=1)
        p = np.stack([t.target[count + k][at[k]] for k in range(3)], axis=1)
        of = [np.take_along_axis(x[:, :2], drafts[..., None], axis=2)[..., 0] for x in (p, q)]
        accept = np.asarray(jit(verify.acceptance_probability)(*of), np.float64)
        pairs = [(length, accepted) for length in range(3) for accepted in range(length + 1)]
        own = {
            pair: np.asarray(
                jit(verify.next_distribution)(
                    p, q, np.full(4, pair[1], np.int32), np.full(4, pair[0], np.int32)
                ),
                np.float64,
            )
            for pair in pairs
        }
        c = [self.confidence[count + k][at[k], k] for k in range(2)]
        survival = np.stack([c[0], c[0] * c[1]], axis=1).astype(np.float32)
        return [
            (
                of[1][b].astype(np.float64).prod(),
                drafts[b],
                tuple(survival[b].tolist()),
                accept[b],
                {pair: own[pair][b] for pair in pairs},
            )
            for b in range(len(drafts))
        ]

    def told(self, policy, start):
        """Distribution of the first TOKENS tokens: policy(state, survival) -> length, state."""
        v, ended, open_ = self.VOCAB, np.zeros(self.VOCAB**self.TOKENS), {(0, 0, start): 1.0}
        lengths_seen = set()
        while open_:
            following = {}
            for (count, prefix, state), mass in open_.items():
                for q, drafts, survival, accept, own in self.rounds(count, prefix):
                    length, after = policy(state, survival)
                    lengths_seen.add(length)
                    for accepted in range(length + 1):
                        reaches = mass * q * accept[:accepted].prod()
                        if accepted < length:
                            reaches *= 1 - accept[accepted]
                        said = functools.reduce(
                            lambda n, x: n * v + int(x), drafts[:accepted], prefix
                        )
                        for token in range(v):
                            tokens, number = count + accepted + 1, said * v + token
                            share = reaches * own[length, accepted][token]
                            if tokens >= self.TOKENS:
                                ended[number // v ** (tokens - self.TOKENS)] += share
                            else:
                                key = tokens, number, after
                                following[key] = following.get(key, 0.0) + share
            open_ = following
        return ended, lengths_seen

    def own(self):
        number, product = np.arange(self.VOCAB**self.TOKENS), 1.0
        for k in range(self.TOKENS):
            prefix = number // self.VOCAB ** (self.TOKENS - k)
            token = number // self.VOCAB ** (self.TOKENS - 1 - k) % self.VOCAB
            product = product * self.tables.target[k].astype(np.float64)[prefix, token]
        return product

    def error(self, policy, start):
        told, lengths = self.told(functools.cache(policy), start)
        return np.abs(told - self.own()).max(), lengths


@functools.cache
def budget(survival, rates):
    return int(jit(schedulers.budget)(np.float32([survival]), 1, table(rates)))


@functools.cache
def length_of(survival, budget):
    return int(jit(schedulers.top)(np.float32([survival]), budget)[0])


def delayed(rates, rounds):
    """`asynchronous` as an engine runs it, with a budget from so many `rounds` before."""

    def policy(state, survival):
        state = (*state, survival)
        if len(state) <= rounds:  # nothing to go by yet
            return 2, state
        return length_of(survival, budget(state[0], rates)), state[1:]

    return policy


def test_a_budget_of_earlier_rounds_is_lossless_and_one_of_this_round_is_not():
    right, wrong = [], []
    for seed in range(2):
        story = Story(seed)
        for rates in ((1.0, 0.5, 0.45), (1.0, 0.55, 0.5)):
            for rounds in (2, 1):
                error, lengths = story.error(delayed(rates, rounds), ())
                right.append((error, len(lengths)))
            wrong.append(story.error(delayed(rates, 0), ())[0])
    assert max(error for error, _ in right) < RIGHT
    assert max(count for _, count in right) > 1
    assert max(wrong) > WRONG


switch_step = jax.jit(schedulers.switched)


def leaves(switch):
    return tuple(tuple(np.ravel(x).tolist()) for x in jax.tree.leaves(switch))


def switching(costs, plain, too_early=False):
    """Speculates fully while the switch is on; `too_early` asks it about the very round."""
    start = Switch.start(2)
    shapes, tree = jax.tree.flatten(start)

    def policy(state, survival):
        arrays = [np.array(x, y.dtype).reshape(y.shape) for x, y in zip(state, shapes, strict=True)]
        switch = jax.tree.unflatten(tree, arrays)
        lengths = np.array([2 * int(switch.on)], np.int32)
        now = np.float32([survival])
        after = switch_step(switch, now, lengths, 1, costs, plain, patience=1, probe_after=1)
        return 2 * int((after if too_early else switch).on), leaves(after)

    return policy, leaves(start)


def test_the_switch_is_lossless_and_one_that_is_too_early_is_not():
    right, wrong = [], []
    for seed in range(2):
        story = Story(seed)
        for rate in (0.65, 0.85):  # plain decoding makes 2.5 times as much while a round lasts
            costs, plain = table([1.0, 0.6, 0.4]), table([rate])
            error, lengths = story.error(*switching(costs, plain))
            right.append((error, len(lengths)))
            wrong.append(story.error(*switching(costs, plain, too_early=True))[0])
    assert max(error for error, _ in right) < RIGHT
    assert max(count for _, count in right) == 2
    assert max(wrong) > WRONG


# The switch over many rounds.


def drive(switch, rounds, rows, costs, plain, mean=0.5, seed=0, patience=10, probe_after=10_000):
    """Rounds of a batch of 8 rows with `rows` running, drafts of the given mean confidence."""
    rng = np.random.default_rng(seed)
    states = []
    for _ in range(rounds):
        c = np.clip(rng.normal(mean, 0.15, (8, 3)), 0, 1)
        survival = np.cumprod(c, axis=1) * (np.arange(8) < rows)[:, None]
        lengths = np.where(np.arange(8) < rows, 3 * bool(switch.on), 0).astype(np.int32)
        how = {"patience": patience, "margin": 0.02, "probe_after": probe_after}
        survival = survival.astype(np.float32)
        switch = switch_step(switch, survival, lengths, rows, costs, plain, **how)
        states.append(bool(switch.on))
    return switch, states


# A step of up to 8 tokens costs the same, then in proportion: compute-bound. Drafting adds 0.1.
SECONDS = np.maximum(1.0, np.arange(1, 33) / 8)
PLAIN_COSTS, DRAFT_COSTS = table(1 / SECONDS), table(1 / (SECONDS + 0.1))


def test_it_switches_off_under_load_and_on_again_without():
    switch, states = drive(Switch.start(3), 100, 1, DRAFT_COSTS, PLAIN_COSTS)
    assert all(states)  # 1.9 tokens for 1.1 of the time
    switch, states = drive(switch, 100, 8, DRAFT_COSTS, PLAIN_COSTS)
    off = states.index(False)  # 1.9 tokens for 4.1 of the time
    assert 1 <= off <= 10 and not any(states[off:])
    assert np.allclose(switch.survival, [0.5, 0.25, 0.125], atol=0.1)
    switch, states = drive(switch, 100, 2, DRAFT_COSTS, PLAIN_COSTS)
    on = states.index(True)
    assert 1 <= on <= 60 and all(states[on:])


def test_it_rests_between_two_changes():
    _, states = drive(Switch.start(3), 30, 8, DRAFT_COSTS, PLAIN_COSTS)
    assert states[:9] == [True] * 9 and not any(states[9:])
    _, states = drive(Switch.start(3, on=False), 30, 8, DRAFT_COSTS, PLAIN_COSTS)
    assert not any(states)  # nothing known of the drafts: no reason to make any


def test_it_does_not_flutter_where_both_are_as_good():
    for mean, seed in itertools.product((0.05, 0.1, 0.15), range(3)):
        _, states = drive(Switch.start(3), 150, 2, DRAFT_COSTS, PLAIN_COSTS, mean, seed)
        assert np.abs(np.diff(states)).sum() <= 2


def test_it_looks_again_after_a_while():
    how = {"probe_after": 50}
    switch, _ = drive(Switch.start(3), 20, 2, DRAFT_COSTS, PLAIN_COSTS, mean=0.0, **how)
    assert not switch.on
    switch, states = drive(switch, 70, 2, DRAFT_COSTS, PLAIN_COSTS, mean=0.9, **how)
    assert states.index(True) < 50 and all(states[states.index(True) :])  # the text has changed
    switch, _ = drive(Switch.start(3), 20, 2, DRAFT_COSTS, PLAIN_COSTS, mean=0.0, **how)
    _, states = drive(switch, 400, 2, DRAFT_COSTS, PLAIN_COSTS, mean=0.0, **how)
    assert 0 < np.mean(states) < 0.2  # it has not; one look takes `patience` rounds


def test_rounds_without_rows_change_nothing():
    switch, _ = drive(Switch.start(3), 5, 2, DRAFT_COSTS, PLAIN_COSTS)
    after, _ = drive(switch, 3, 0, DRAFT_COSTS, PLAIN_COSTS)
    jax.tree.map(np.testing.assert_array_equal, after, switch)
