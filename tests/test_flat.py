"""Rows of different lengths through the target as one flat list: a batch's numbers, less work.

pytest tests/test_flat.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_eagle3_decoding
import test_families
import test_rounds
from flax import nnx
from test_rounds import NEW, Requests, plain, requests, speculative

from dspark_jax.core.sharding import abstract, make_mesh, place
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.decoding.flat import empty_rows, flat_round, join, usable_slots
from dspark_jax.decoding.rounds import draft_head, propose
from dspark_jax.decoding.verify import Reason
from dspark_jax.models.packing import Packing
from dspark_jax.models.target import Target
from dspark_jax.models.target_config import TargetConfig

CAPACITY, WIDTH, PREFIX = 24, 4, 9
COUNTS, LENGTHS = (3, 0, 1, 4), (7, 4, 9, 2)  # of each row: tokens of the round, tokens before it
TOTAL = sum(COUNTS)


@pytest.fixture(autouse=True, scope="module")
def mesh():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh()) as mesh:
        yield mesh
    jax.config.update("jax_disable_most_optimizations", False)


# ---- The packing -------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [COUNTS, (0, 0, 0, 0), (4, 4, 4, 4), (0, 0, 0, 1)])
@pytest.mark.parametrize("size", [1, 8, 16])
def test_packing_places_every_token_once(counts, size):
    if sum(counts) > size:
        pytest.skip("the caller's fault")
    packing = jax.device_get(Packing.of(jnp.asarray(counts, jnp.int32), WIDTH, size))
    expected = [(r, s) for r, count in enumerate(counts) for s in range(count)]
    found = list(zip(packing.row.tolist(), packing.slot.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert all(0 <= r < len(counts) and 0 <= s < WIDTH for r, s in found)
    for r, count in enumerate(counts):
        for s in range(WIDTH):
            if s < count:
                assert found[packing.place[r, s]] == (r, s)
            assert 0 <= packing.place[r, s] < size
    x = np.arange(len(counts) * 2 * WIDTH * 3).reshape(len(counts), 2, WIDTH, 3)
    axes = ("batch", None, None, None)
    on_device = Packing.of(jnp.asarray(counts, jnp.int32), WIDTH, size)
    flat = on_device.flat(jnp.asarray(x), axes, 2)
    assert flat.shape == (1, 2, size, 3)
    back = np.asarray(on_device.rows(flat, axes, 2))
    for r, count in enumerate(counts):
        np.testing.assert_array_equal(back[r, :, :count], x[r, :, :count])


def test_rows_over_several_devices_are_refused():
    with (
        jax.set_mesh(make_mesh(2, 1)),
        pytest.raises(ValueError, match="batch axis has more than one"),
    ):
        Packing.of(jnp.asarray(COUNTS, jnp.int32), WIDTH, 8)


# ---- The target's pass, every family -----------------------------------------------------------


def random_target(name: str) -> Target:
    if name == "llama":
        return test_rounds.make_target()
    config = TargetConfig.from_hf(test_families.hf_config(name), "float32")
    empty = abstract(lambda: Target(config, rngs=nnx.Rngs(0)))
    rng, arrays = np.random.default_rng(3), {}
    for key, array in named(empty).items():
        noise = rng.standard_normal(array.shape).astype(np.float32)
        value = 1 + 0.2 * noise if "norm" in key or "scal" in key else 0.2 * noise
        arrays[key] = jax.device_put(value.astype(array.dtype), array.sharding)
    return with_arrays(empty, arrays)


@functools.partial(jax.jit, static_argnames=("taps", "size"))
def run(target, tokens, cache, counts, *, taps, size=None):
    """Hidden states, taps and cache of tokens [R, W] as a batch, or packed into `size` places."""
    if size is None:
        output = target(tokens, cache=cache, taps=taps)
        return target.head.logits(output.hidden), output.taps, output.cache
    packing = Packing.of(counts, tokens.shape[1], size)
    flat = packing.flat(tokens, ("batch", None))
    output = target(flat, cache=cache, taps=taps, packing=packing)
    logits, axes = target.head.logits(output.hidden), ("batch", None, "vocab")
    taps = packing.rows(output.taps, ("batch", None, None, None))
    return packing.rows(logits, axes), taps, output.cache


def prefilled(target, seed: int = 0):
    """A cache whose rows hold LENGTHS tokens each, and tokens [R, WIDTH] that go on."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, target.config.vocab_size, (4, PREFIX + WIDTH)).astype(np.int32)
    cache = target.empty_cache(4, CAPACITY)
    before = place(ids[:, :PREFIX], "batch", None)
    *_, cache = run(target, before, cache, None, taps=())
    tokens = place(ids[:, PREFIX:], "batch", None)
    return cache.advance(place(np.array(LENGTHS, np.int32), "batch")), tokens


def check_pass(target, size: int) -> None:
    cache, tokens = prefilled(target)
    counts, taps = place(np.array(COUNTS, np.int32), "batch"), (-1, 0)
    batch = jax.device_get(run(target, tokens, cache, counts, taps=taps))
    packed = jax.device_get(run(target, tokens, cache, counts, taps=taps, size=size))
    for row, (count, length) in enumerate(zip(COUNTS, LENGTHS, strict=True)):
        for ours, theirs in zip(packed[:2], batch[:2], strict=True):
            np.testing.assert_allclose(ours[row, :count], theirs[row, :count], 2e-5, 2e-5)
        for ours, theirs in zip(packed[2].layers, batch[2].layers, strict=True):
            end = length + count
            np.testing.assert_allclose(ours.k[row, ..., :end], theirs.k[row, ..., :end], 0, 2e-5)
            np.testing.assert_allclose(ours.v[row, :, :end], theirs.v[row, :, :end], 0, 2e-5)


FAST = ("llama", "gemma4")
SLOW = [pytest.param(x, marks=pytest.mark.slow) for x in test_families.CASES if x not in FAST]


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_the_packed_pass_gives_the_numbers_of_the_batch(name):
    check_pass(random_target(name), TOTAL + 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *test_families.CASES])
def test_also_with_heads_over_devices_and_without_padding(name):
    with jax.set_mesh(make_mesh(1, 2)):
        check_pass(random_target(name), TOTAL)


# ---- Rounds ------------------------------------------------------------------------------------


class Driver:
    """Requests through `join` and `flat_round`, with lengths of the test's choice."""

    def __init__(self, target, drafter, wanted: Requests, rows: int = 4):
        self.models = target, drafter
        self.head = None if drafter is None else draft_head(target, drafter)
        self.rows = _empty(target, drafter, rows)
        self.stop = jnp.asarray(wanted.stop, jnp.int32)
        order = [2, 0, 3][: len(wanted.prompts)]  # rows in no order, and one that stays free
        self.at = dict(enumerate(order))
        every = dict.fromkeys(range(rows), 0) | {row: i for i, row in self.at.items()}
        chosen = [wanted.row(i) for _, i in sorted(every.items())]
        self.params = Requests(
            prompts=tuple(c.prompts[0] for c in chosen),
            seeds=tuple(c.seeds[0] for c in chosen),
            limits=tuple(c.limits[0] for c in chosen),
            temperature=wanted.temperature,
            top_k=wanted.top_k,
            top_p=wanted.top_p,
        ).arguments()[2]
        self.texts = {}
        for number, row in self.at.items():
            prompt, length, params, stop, limit = wanted.row(number).arguments()
            entered = _join(
                *self.models, self.rows, jnp.int32(row), prompt, length, params, stop, limit
            )
            self.rows, emitted = entered
            self.texts[number] = emitted.tokens[0, : int(emitted.count[0])].tolist()
        self.live = place(np.ones(rows, bool), "batch")
        self.accepted = 0

    def round(self, choose, speculate: bool = True, size: int = 0):
        """`choose(usable)` gives lengths i[R]."""
        draft, proposals = None, 0
        if speculate:
            draft = _propose(self.models[1], self.head, self.rows, self.params)
            proposals = draft.tokens.shape[1]
        usable = np.asarray(usable_slots(self.rows, self.live, proposals))
        lengths = np.minimum(choose(usable), usable).astype(np.int32)
        running = np.asarray(self.rows.running)
        size = size or int(running.sum() + lengths.sum())
        self.rows, emitted = _round(
            *self.models, self.head, self.rows, draft, place(lengths, "batch"), self.live,
            self.params, self.stop, size=size,
        )  # fmt: skip
        emitted = jax.device_get(emitted)
        assert not emitted.count[~running].any()
        for number, row in self.at.items():
            self.texts[number] += emitted.tokens[row, : emitted.count[row]].tolist()
            self.accepted += int(emitted.count[row] > 0) * int(emitted.accepted[row])

    def result(self) -> list[tuple[list[int], int]]:
        reasons = np.asarray(self.rows.reason)
        return [(self.texts[i], int(reasons[row])) for i, row in self.at.items()]

    @property
    def going(self) -> bool:
        return bool((np.asarray(self.rows.reason) == Reason.RUNNING).any())


def _empty(target, drafter, rows: int):
    return empty_rows(target, drafter, rows=rows, capacity=test_rounds.WIDTH + NEW + 6)


# Without donation, as some tests look at the rows before.
_join = jax.jit(join)
_round = jax.jit(flat_round, static_argnames="size")


@jax.jit
def _propose(drafter, head, rows, params):
    return propose(drafter, head, rows.anchor, rows.draft_cache, params)


def drafters():
    return {"dspark": test_rounds.make_drafter(), "eagle3": test_eagle3_decoding.make_eagle3()}


@pytest.mark.parametrize("kind", ["dspark", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_greedy_text_is_plain_whatever_is_verified(kind):
    """Random lengths, rounds without the drafter between them, rows that end at different times;
    the padded size must not matter, and drafts must go on being accepted."""
    target, drafter = test_rounds.make_target(), drafters()[kind]
    wanted = requests(limits=(NEW, 5, 11), stop=(3,))
    driver, rng = Driver(target, drafter, wanted), np.random.default_rng(0)
    rounds = 0
    while driver.going:
        choose = functools.partial(rng.integers, 0, 5)
        driver.round(lambda usable, c=choose: c(len(usable)), speculate=rounds % 4 != 2, size=16)
        rounds += 1
    expected = [(row.tokens, row.reason) for row in plain(target, wanted)]
    assert driver.result() == expected
    assert driver.accepted >= 3


def test_greedy_text_without_a_drafter():
    target, wanted = test_rounds.make_target(), requests(limits=(NEW, 1, 7))
    driver = Driver(target, None, wanted)
    while driver.going:
        driver.round(lambda usable: usable, speculate=False, size=4)
    assert driver.result() == [(row.tokens, row.reason) for row in plain(target, wanted)]


def test_sampled_text_without_verified_drafts_is_plain_decoding():
    """Drafts are made and none is looked at: the target draws what it would have drawn anyway."""
    target, drafter = test_rounds.make_target(), test_rounds.make_drafter()
    wanted = requests(temperature=1.0)
    driver = Driver(target, drafter, wanted)
    while driver.going:
        driver.round(lambda usable: 0 * usable, size=8)
    assert driver.result() == [(row.tokens, row.reason) for row in plain(target, wanted)]


@pytest.mark.slow
def test_sampled_text_with_all_drafts_verified_is_that_of_the_batch():
    """The last tokens may differ in who draws them: a row with room for one needs no draft."""
    target, drafter = test_rounds.make_target(), test_rounds.make_drafter()
    wanted = requests(temperature=1.0, top_k=6)
    driver = Driver(target, drafter, wanted)
    while driver.going:
        driver.round(lambda usable: usable, size=16)
    batch = speculative(target, drafter, wanted)
    for (ours, _), theirs in zip(driver.result(), batch, strict=True):
        assert ours[: NEW - 4] == theirs.tokens[: NEW - 4]


@pytest.mark.parametrize("kind", ["dspark", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_the_drafters_context_is_that_of_a_fresh_start(kind):
    """After rounds of all lengths, with and without the drafter, it equals what `join` would make
    of the same tokens."""
    target, drafter = test_rounds.make_target(), drafters()[kind]
    wanted = requests(prompts=((1, 2, 3), (4, 3, 2)), seeds=(7, 8), limits=(NEW, NEW))
    driver, rng = Driver(target, drafter, wanted), np.random.default_rng(1)
    for number in range(4):
        driver.round(lambda usable: rng.integers(0, 5, len(usable)), speculate=number != 1, size=10)
    lengths = np.asarray(driver.rows.target_cache.length)
    for number, row in driver.at.items():
        seen = [*wanted.prompts[number], *driver.texts[number]]
        assert lengths[row] == len(seen) - 1  # the anchor has not run
        fresh = _empty(target, drafter, 4)
        prompt = np.zeros((1, 24), np.int32)
        prompt[0, : len(seen) - 1] = seen[:-1]
        one = requests(prompts=((1,),), seeds=(0,), limits=(2,)).arguments()
        fresh, _ = _join(
            target, drafter, fresh, jnp.int32(row), place(prompt, "batch", None),
            place(np.array([len(seen) - 1], np.int32), "batch"), *one[2:],
        )  # fmt: skip
        ours, theirs = (jax.device_get(rows.draft_cache) for rows in (driver.rows, fresh))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            if a.ndim == 4 and a.shape[-1] == CAPACITY + 6:  # keys
                a, b = a[..., : lengths[row]], b[..., : lengths[row]]
            elif a.ndim == 4:
                a, b = a[:, :, : lengths[row]], b[:, :, : lengths[row]]
            elif kind == "eagle3" and a.ndim == 2:
                continue  # the entry of the anchor: `join` sampled another one
            np.testing.assert_allclose(a[row], b[row], 0, 1e-5)


def test_free_rows_and_padding_have_no_influence():
    """Whatever a free row holds, NaN included, a round of the others is bit for bit the same."""
    target, drafter = test_rounds.make_target(), test_rounds.make_drafter()
    wanted = requests()
    driver = Driver(target, drafter, wanted)
    free = next(row for row in range(4) if row not in driver.at.values())

    def poisoned(x):
        if x.ndim < 3 or x.shape[0] != 4:
            return x
        chosen = np.arange(4).reshape(4, *[1] * (x.ndim - 1)) == free
        return jnp.where(chosen, jnp.nan, x)

    outcomes = []
    for rows in (driver.rows, jax.tree.map(poisoned, driver.rows)):
        draft = _propose(drafter, driver.head, rows, driver.params)
        lengths = place(np.array([1, 0, 3, 2], np.int32), "batch")
        given = (draft, lengths, driver.live, driver.params, driver.stop)
        after, emitted = _round(target, drafter, driver.head, rows, *given, size=14)
        outcomes.append(jax.device_get((after.target_cache.layers[1].v, emitted)))
    used = list(driver.at.values())
    (cache, emitted), (other_cache, other) = outcomes
    length = int(driver.rows.target_cache.length.max())
    np.testing.assert_array_equal(cache[used][:, :, :length], other_cache[used][:, :, :length])
    for a, b in zip(jax.tree.leaves(emitted), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a[used], b[used])


def test_a_row_that_is_no_longer_live_ends_and_emits_nothing():
    target, wanted = test_rounds.make_target(), requests()
    driver = Driver(target, None, wanted)
    driver.live = place(np.arange(4) != driver.at[1], "batch")
    before = list(driver.texts[1])
    driver.round(lambda usable: usable, speculate=False, size=3)
    assert driver.texts[1] == before
    assert np.asarray(driver.rows.reason)[driver.at[1]] != Reason.RUNNING
    driver.live = place(np.ones(4, bool), "batch")
    while driver.going:
        driver.round(lambda usable: usable, speculate=False, size=3)
    expected = [(row.tokens, row.reason) for row in plain(target, wanted)]
    assert [driver.result()[i] for i in (0, 2)] == [expected[i] for i in (0, 2)]
