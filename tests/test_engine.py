"""The engine: every answer is the request's own, whatever joins, leaves or fails beside it.

pytest tests/test_engine.py
"""

import dataclasses
import time

import jax
import numpy as np
import pytest
import test_rounds
from test_rounds import NEW, VOCAB, Requests

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.decoding.engine import Engine, EngineOptions, Finish, QueueFull, Request
from dspark_jax.decoding.flat import draft_rows, flat_round, join
from dspark_jax.decoding.plain import generate_plain
from dspark_jax.decoding.requests import params_of
from dspark_jax.decoding.step_seconds import measure_steps
from dspark_jax.scheduling.policy import Policy, choose, default_sizes, filled
from dspark_jax.scheduling.schedulers import CostTable, hardware_aware

ROWS, CONTEXT, SIZES = 3, 24, (3, 15)
COSTS = CostTable.make((3, 8, 15), [1.0, 0.8, 0.6])
POLICIES = {
    "off": Policy(),
    "fixed": Policy("fixed", length=4),
    "threshold": Policy("threshold", threshold=0.4),
    "load": Policy("load", threshold=0.2, highest=0.7),
    "hardware": Policy("hardware", costs=COSTS),
    "asynchronous": Policy("asynchronous", costs=COSTS),
}


@pytest.fixture(autouse=True, scope="module")
def mesh():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh()) as mesh:
        yield mesh
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def target(mesh):
    return test_rounds.make_target()


@pytest.fixture(scope="module")
def drafter(mesh):
    return test_rounds.make_drafter()


def make_engine(target, drafter, policy="hardware", stop_ids=(3,), **options) -> Engine:
    policy = POLICIES[policy] if isinstance(policy, str) else policy
    sizes = SIZES if policy.drafts else (1, 3)
    options = {"rows": ROWS, "max_context": CONTEXT, "sizes": sizes} | options
    return Engine(target, drafter, stop_ids, EngineOptions(**options), policy)


def random_requests(number: int, seed: int = 0, **fields) -> list[Request]:
    rng = np.random.default_rng(seed)
    found = []
    for one in range(number):
        prompt = rng.integers(0, VOCAB - 1, rng.integers(1, 9)).tolist()
        limit = int(rng.integers(1, NEW + 1))
        found.append(Request(tuple(prompt), limit, seed=one, **fields))
    return found


def plain_of(target, request: Request, stop=(3,)) -> tuple[list[int], str]:
    wanted = Requests(
        prompts=(request.prompt,),
        seeds=(request.seed,),
        limits=(request.max_tokens,),
        stop=stop,
        temperature=request.temperature,
        top_k=request.top_k,
    )
    out = jax.device_get(generate_plain(target, *wanted.arguments(), max_new=NEW))
    finish = {1: "stop", 2: "length", 3: "error"}[int(out.reason[0])]
    return out.tokens[0, : out.count[0]].tolist(), finish


def answers(engine: Engine, requests: list[Request], together: int = 99) -> list:
    """Tickets of all, of which a few at a time are known to the engine."""
    tickets, left = [], list(requests)
    for _ in range(2000):
        while left and sum(t.finish is None for t in tickets) < together:
            tickets.append(engine.submit(left.pop(0)))
        if not engine.step() and not left:
            return tickets
    raise AssertionError("the engine does not come to an end")


QUICK = ("fixed", "hardware", "asynchronous")


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in POLICIES]
)
def test_every_greedy_answer_is_its_own_plain_decoding(target, drafter, kind):
    """More requests than rows, of all lengths, so that rows change hands at all times."""
    requests = random_requests(9)
    engine = make_engine(target, drafter, kind)
    tickets = answers(engine, requests)
    for request, ticket in zip(requests, tickets, strict=True):
        assert (ticket.tokens, ticket.finish) == plain_of(target, request)
    figures = engine.figures
    assert figures.tokens == sum(len(ticket.tokens) for ticket in tickets)
    assert figures.prompt_tokens == sum(len(request.prompt) for request in requests)
    assert sum(figures.requests.values()) == len(requests)
    counts = figures.speculative
    assert counts.accepted <= counts.verified <= counts.drafted
    if kind == "off":
        assert counts.rounds == 0 and figures.plain_rounds == figures.rounds
    else:
        assert counts.accepted > 0
        assert figures.accepted_length > 1
    assert engine.running == 0


def test_a_sampled_answer_knows_no_neighbours(target, drafter):
    """The same draws alone, among others, in another row and after others were in that row."""
    requests = random_requests(7, seed=1, temperature=1.0)
    engine = make_engine(target, drafter, "fixed", sizes=SIZES[-1:])
    together = answers(engine, requests)
    again = answers(engine, requests[::-1])[::-1]
    alone = [answers(engine, [request])[0] for request in requests]
    for one, other, third in zip(together, again, alone, strict=True):
        assert one.tokens == other.tokens == third.tokens
        assert one.counts == other.counts == third.counts
    assert len({tuple(ticket.tokens) for ticket in together}) > 3
    seeded = dataclasses.replace(requests[0], max_tokens=NEW)
    unseeded = dataclasses.replace(seeded, seed=None)
    texts = {tuple(t.tokens) for t in answers(engine, [unseeded] * 6)}
    assert len(texts) > 1


@pytest.mark.slow
def test_sampled_without_drafts_is_plain_decoding(target):
    requests = random_requests(4, seed=2, temperature=1.0)
    for request, ticket in zip(
        requests, answers(make_engine(target, None, "off"), requests), strict=True
    ):
        assert (ticket.tokens, ticket.finish) == plain_of(target, request)


def test_greedy_and_sampled_requests_share_rounds(target, drafter):
    greedy, sampled = random_requests(3, seed=3), random_requests(3, seed=4, temperature=1.0)
    mixed = [request for pair in zip(greedy, sampled, strict=True) for request in pair]
    tickets = answers(make_engine(target, drafter, "fixed", sizes=SIZES[-1:]), mixed)
    for request, ticket in list(zip(mixed, tickets, strict=True))[::2]:
        assert (ticket.tokens, ticket.finish) == plain_of(target, request)


def test_what_shapes_logits_shapes_those_of_its_own_request(target, drafter):
    """Penalties, biases and min_tokens beside requests without any; the rows keep nothing after."""
    plain_ones = random_requests(4, seed=9)
    options = [
        {"frequency_penalty": 1.5},
        {"presence_penalty": -1.0, "repetition_penalty": 1.7},
        {"logit_bias": {3: -100.0, 5: 2.0, 1: 1.0}},
        {"min_tokens": 9},
    ]
    shaped = [
        dataclasses.replace(request, max_tokens=NEW, **option)
        for request, option in zip(random_requests(4, seed=10), options, strict=True)
    ]
    engine = make_engine(target, drafter, "fixed", sizes=SIZES[-1:])
    mixed = [request for pair in zip(shaped, plain_ones, strict=True) for request in pair]
    tickets = answers(engine, mixed)
    changed = 0
    for request, ticket in zip(mixed, tickets, strict=True):
        wanted = Requests(prompts=(request.prompt,), seeds=(0,), limits=(request.max_tokens,))
        prompt, length, _, _, limit = wanted.arguments()
        params = params_of([request], [0], VOCAB)
        params = jax.tree.map(lambda x: place(x, "batch"), params)
        out = generate_plain(
            target,
            prompt,
            length,
            params,
            jax.numpy.array([3], jax.numpy.int32),
            limit,
            max_new=NEW,
        )
        expected = out.tokens[0, : int(out.count[0])].tolist()
        assert ticket.tokens == expected
        if request.shapes:
            changed += expected != plain_of(target, request)[0]
    assert changed >= 3
    again = answers(engine, plain_ones)
    assert [t.tokens for t in again] == [t.tokens for t in tickets[1::2]]
    assert engine._rows.shaping is None


def test_what_ends_early_leaves_no_trace(target, drafter):
    """Cancelled while waiting, while running and within an update; a deadline in either place.
    The rows go to others, whose answers are right."""
    long = Request((1, 2, 3), NEW, seed=0)
    engine = make_engine(target, drafter, "fixed", stop_ids=())
    seen = []
    first, second = engine.submit(long, seen.append), engine.submit(long)
    third = engine.submit(dataclasses.replace(long, deadline=time.monotonic() - 1))
    within = engine.submit(long, lambda update: within.cancel())
    waiting = engine.submit(long)
    waiting.cancel()
    engine.step()
    assert (third.finish, third.tokens) == (Finish.DEADLINE, [])
    assert waiting.finish == Finish.CANCELLED
    second.cancel()
    engine.step()
    assert second.finish == Finish.CANCELLED and 0 < len(second.tokens) < NEW
    assert second.tokens == plain_of(target, long, (-1,))[0][: len(second.tokens)]
    while engine.step():
        pass
    assert within.finish == Finish.CANCELLED and len(within.tokens) < NEW
    assert (first.tokens, first.finish) == plain_of(target, long, (-1,))
    assert sum((update.tokens for update in seen), ()) == tuple(first.tokens)
    assert [update.finish for update in seen if update.finish] == [Finish.LENGTH]
    late = engine.submit(dataclasses.replace(long, deadline=time.monotonic() + 3600))
    engine.step()
    late.request = dataclasses.replace(late.request, deadline=time.monotonic() - 1)
    engine.step()
    assert late.finish == Finish.DEADLINE and late.tokens
    assert engine.running == 0 and not len(engine.waiting)
    assert engine.figures.requests[Finish.CANCELLED] == 3
    assert (answers(engine, [long])[0].tokens, "length") == plain_of(target, long, (-1,))


def test_the_queue_has_an_end_and_requests_have_limits(target, drafter):
    engine = make_engine(target, drafter, queue_limit=2)
    for _ in range(2):
        engine.submit(Request((1,), 2))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.submit(Request((1,), 2))
    for request, message in [
        (Request((), 2), "prompt is empty"),
        (Request((1, VOCAB), 2), "outside of the vocabulary of 8"),
        (Request((1, -1), 2), "outside of the vocabulary"),
        (Request((1,), 0), "max_tokens is 0"),
        (Request((1,) * 20, 5), "20 prompt tokens and max_tokens 5 are more than .* 24"),
        (Request((1,), 2, temperature=-1.0), "temperature is -1"),
        (Request((1,), 2, top_p=0.0), "top_p is 0"),
        (Request((1,), 2, stop=("x",)), "need a tokenizer"),
    ]:
        with pytest.raises(UserError, match=message):
            engine.submit(request)
    while engine.step():
        pass
    assert engine.figures.requests[Finish.LENGTH] + engine.figures.requests[Finish.STOP] == 2


def test_a_request_of_exactly_the_context_ends_by_length(target, drafter):
    engine = make_engine(target, drafter, "fixed", stop_ids=())
    full = Request(tuple(range(7)) + (1,), CONTEXT - 8, seed=0)
    (ticket,) = answers(engine, [full])
    assert (ticket.tokens, ticket.finish) == plain_of(target, full, (-1,))
    assert len(ticket.tokens) == CONTEXT - 8 and ticket.finish == Finish.LENGTH


def test_a_target_that_fails_on_one_request_fails_on_no_other(target, drafter):
    """A token whose embedding is NaN poisons the row that says it, at that token."""
    good, other = random_requests(2, seed=5)
    good, other = (dataclasses.replace(r, max_tokens=NEW) for r in (good, other))
    said, _ = plain_of(target, good, (-1,))
    bad = next(token for token in said if token not in good.prompt)
    others = plain_of(target, other, (-1,))
    arrays = named(target)
    chosen = np.arange(VOCAB)[:, None] == bad
    arrays["embed"] = jax.numpy.where(chosen, np.nan, arrays["embed"])
    poisoned = with_arrays(target, arrays)
    engine = make_engine(poisoned, drafter, "fixed", stop_ids=())
    first, second = answers(engine, [good, other])
    assert first.finish == Finish.ERROR
    assert first.tokens == said[: said.index(bad) + 1]
    if bad not in (*other.prompt, *others[0]):
        assert (second.tokens, second.finish) == others
    assert engine.running == 0


def test_nothing_is_kept_from_the_request_before_and_nothing_compiled_again(target, drafter):
    requests = random_requests(20, seed=6)
    engine = make_engine(target, drafter, "fixed")
    first = answers(engine, requests[:2])
    compiled = flat_round._cache_size()
    answers(engine, requests, together=5)
    again = answers(engine, requests[:2])
    for one, other in zip(first, again, strict=True):
        assert (one.tokens, one.counts) == (other.tokens, other.counts)
    assert flat_round._cache_size() <= compiled + 1  # a size that two rows did not need


@pytest.mark.slow
def test_after_warming_up_nothing_is_compiled(target, drafter):
    engine = make_engine(target, drafter, "fixed")
    engine.warm_up()
    programs = flat_round, draft_rows, join
    compiled = [program._cache_size() for program in programs]
    requests = random_requests(8, seed=11)
    tickets = answers(engine, requests)
    answers(engine, random_requests(8, seed=11, temperature=1.0))
    assert [program._cache_size() for program in programs] == compiled
    for request, ticket in zip(requests, tickets, strict=True):
        assert (ticket.tokens, ticket.finish) == plain_of(target, request)
    assert engine.figures.prompt_tokens == 2 * sum(len(r.prompt) for r in requests)


def test_speculation_switches_off_and_on_again(target, drafter):
    """Rounds with drafts cost as much as they like here; the answers stay the same."""
    dear = CostTable.make((1, 15), [0.01, 0.01])
    cheap = CostTable.make((1, 15), [1.0, 1.0])
    requests = random_requests(30, seed=7)
    off = make_engine(target, drafter, Policy("hardware", costs=dear, plain=cheap))
    tickets = answers(off, requests, together=3)
    assert not off.speculating and off.figures.plain_rounds > 0
    on = make_engine(target, drafter, Policy("hardware", costs=cheap, plain=cheap))
    others = answers(on, requests, together=3)
    assert on.speculating and on.figures.plain_rounds == 0
    assert [t.tokens for t in tickets] == [t.tokens for t in others]


def test_policies_that_cannot_be_followed(target, drafter):
    bare = test_rounds.make_drafter(head="none")
    bare = bare if not bare.config.confidence_head else None
    for policy, models, message in [
        (Policy("fixed", length=5), (target, drafter), "the drafter proposes 4"),
        (Policy("fixed", length=2), (target, None), "without a drafter"),
        (Policy("hardware"), (target, drafter), "needs a table of costs"),
    ]:
        with pytest.raises(UserError, match=message):
            make_engine(*models, policy)
    with pytest.raises(UserError, match="must be one of"):
        Policy("sometimes")
    with pytest.raises(UserError, match="at least one draft"):
        Policy("fixed")
    with pytest.raises(UserError, match="max_context 65"):
        make_engine(target, drafter, max_context=65)
    with pytest.raises(UserError, match="must rise and end with 15"):
        make_engine(target, drafter, sizes=(3, 20))
    with (
        jax.set_mesh(make_mesh(2, 1)),
        pytest.raises(UserError, match="over tp only"),
    ):
        make_engine(target, drafter)


def test_costs_are_measured_for_every_size(target, drafter):
    given = {"target_name": "tiny", "batches": (ROWS,), "sizes": SIZES, "context": 8}
    found = measure_steps(target, drafter, **given, capacity=CONTEXT, repeats=2)
    (one,) = found.batches
    assert one.plain_tokens == (3,) and len(one.seconds) == 2
    assert min(*one.seconds, *one.plain_seconds, one.draft_seconds) > 0
    costs, plain = found.rounds(ROWS), found.plain(ROWS)
    assert costs.tokens.tolist() == list(SIZES) and plain.tokens.tolist() == [3]
    policy = Policy("hardware", costs=costs, plain=plain)
    requests = random_requests(5, seed=8)
    for request, ticket in zip(
        requests, answers(make_engine(target, drafter, policy), requests), strict=True
    ):
        assert ticket.tokens == plain_of(target, request)[0]


def test_sizes_hold_every_round_and_waste_little():
    for rows in (1, 3, 8, 32, 64):
        sizes = default_sizes(rows, 7)
        assert rows in sizes and sizes[-1] == 8 * rows and list(sizes) == sorted(set(sizes))
        assert all(b <= 2 * a for a, b in zip(sizes, sizes[1:], strict=False))
        assert len(sizes) < 22


@pytest.mark.parametrize("kind", ["hardware", "asynchronous", "threshold", "load"])
def test_no_draft_decides_on_itself(kind):
    """Whether slot k of row r is verified is the same whatever that row's later slots say: they
    have seen its token. Filling up the size keeps that, and uses up the size."""
    rng = np.random.default_rng(0)
    rows, slots, sizes = 3, 4, (2, 3, 5, 8, 11, 15)
    costs = CostTable.make((1, 3, 8, 15), [1.0, 0.9, 0.6, 0.4])
    policy = Policy(kind, costs=costs, threshold=0.3, highest=0.8)
    usable, running = jax.numpy.array([4, 4, 2]), jax.numpy.int32(3)

    @jax.jit
    def lengths(logits):
        budget, load = jax.numpy.int32(5), jax.numpy.float32(0.5)
        options = {"proposals": slots, "sizes": sizes}
        found = choose(policy, logits, usable, running, budget, load, **options)
        return found.lengths, hardware_aware(found.survival, running, costs)

    grew = 0
    for _ in range(60):
        logits = rng.normal(1.0, 2.0, (rows, slots)).astype(np.float32)
        before, admitted = map(np.asarray, lengths(logits))
        assert (before <= np.asarray(usable)).all()
        if kind == "hardware":
            total = 3 + before.sum()
            assert total in sizes or total == 3 + np.asarray(usable).sum()
            assert (before >= admitted).all()
            grew += int(before.sum() > admitted.sum())
        row, slot = rng.integers(rows), rng.integers(slots)
        logits[row, slot + 1 :] = rng.normal(1.0, 4.0, slots - slot - 1)
        after = np.asarray(lengths(logits)[0])
        assert (after[row] > slot) == (before[row] > slot)
    assert kind != "hardware" or grew > 5
    none = filled(jax.numpy.zeros((3, 4)), jax.numpy.zeros(3, int), running, sizes)
    assert not np.asarray(none).any()
