"""Distributions against a plain numpy reference; keys, uniforms and draws against arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.decoding import sampling
from dspark_jax.decoding.sampling import Purpose, SamplingParams, purpose_key


def reference(logits, temperature, top_k, top_p):
    """`distribution` of one row, by sorting, in float64."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    weights = np.exp((logits - logits.max()) / np.float64(np.float32(temperature)))
    order = np.argsort(-logits, kind="stable")
    kept = order[:top_k] if top_k else order
    if top_p < 1:
        mass = weights[kept] / weights[kept].sum()
        before = np.concatenate([[0], np.cumsum(mass)[:-1]])
        kept = kept[before < top_p]
    probs = np.zeros(len(logits))
    probs[kept] = weights[kept] / weights[kept].sum()
    return probs


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, **flags):
    """`distribution`; a single row is masked up to 8 tokens, to be compiled once for all."""
    logits = jnp.asarray(logits)
    size = logits.shape[-1]
    if logits.ndim == 1 and size < 8:
        logits = jnp.pad(logits, (0, 8 - size), constant_values=-jnp.inf)
    options = (jnp.asarray(option) for option in (temperature, top_k, top_p))
    probs = np.asarray(sampling.distribution(logits, *options, **flags))
    assert not probs[..., size:].any() or np.isnan(probs).any()
    return probs[..., :size]


@pytest.mark.parametrize("vocab", [2, 1000])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_distribution_matches_the_reference(vocab, dtype):
    rng = np.random.default_rng(vocab)
    rows = 64
    logits = jnp.asarray(rng.normal(size=(rows, vocab)) * 3, dtype)  # bfloat16: many ties
    temperature = rng.choice([0.0, 0.7, 1.0, 1.3], rows).astype(np.float32)
    top_k = rng.choice([0, 1, 2, 5, vocab, 2 * vocab], rows).astype(np.int32)
    top_p = rng.choice([1e-6, 0.31, 0.77, 0.951, 1.0], rows).astype(np.float32)
    got = probabilities(logits, temperature, top_k, top_p)
    assert got.dtype == np.float32
    exact = np.asarray(logits.astype(jnp.float32))
    for row in range(rows):
        wanted = reference(exact[row], temperature[row], top_k[row], top_p[row])
        np.testing.assert_array_equal(got[row] > 0, wanted > 0, err_msg=str(row))
        np.testing.assert_allclose(got[row], wanted, atol=1e-6)
    np.testing.assert_allclose(got.sum(axis=-1), 1, atol=1e-6)


def test_filters_by_hand():
    logits = np.log([0.5, 0.3, 0.2])
    np.testing.assert_allclose(probabilities(logits, top_p=0.7), [0.625, 0.375, 0], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, top_p=0.4), [1, 0, 0], atol=1e-6)
    np.testing.assert_allclose(probabilities(logits, top_k=2), [0.625, 0.375, 0], atol=1e-6)
    # Top-p counts what top-k left: 0.5 of 0.8 is below 0.63, of 1.0 above 0.49.
    np.testing.assert_allclose(
        probabilities(logits, top_k=2, top_p=0.63), [0.625, 0.375, 0], atol=1e-6
    )
    np.testing.assert_allclose(probabilities(logits, top_k=2, top_p=0.6), [1, 0, 0], atol=1e-6)


def test_ties_go_to_the_lowest_id():
    flat = np.zeros(6)
    for k in range(1, 7):
        wanted = np.where(np.arange(6) < k, 1 / k, 0)
        np.testing.assert_allclose(probabilities(flat, top_k=k), wanted, atol=1e-6)
    np.testing.assert_allclose(probabilities(flat, top_p=0.4), [1 / 3] * 3 + [0] * 3, atol=1e-6)
    logits = [1.0, 2.0, 1.0, 1.0, 0.0]
    np.testing.assert_array_equal(probabilities(logits, top_k=3) > 0, [1, 1, 1, 0, 0])
    np.testing.assert_array_equal(probabilities(logits, top_k=3, top_p=0.6) > 0, [1, 1, 0, 0, 0])
    np.testing.assert_array_equal(probabilities([0.0, 5.0, 5.0], temperature=0.0), [0, 1, 0])
    np.testing.assert_array_equal(probabilities([-0.0, 0.0], top_k=1), [1, 0])


def test_extreme_logits():
    masked = [-np.inf, 3.0, 1.0, -np.inf]
    for options in ({}, {"top_k": 3}, {"top_p": 0.9999}, {"temperature": 0.0}):
        probs = probabilities(masked, **options)
        assert probs[0] == probs[3] == 0
        np.testing.assert_allclose(probs.sum(), 1, atol=1e-6)
    np.testing.assert_array_equal(probabilities([80.0, -1e30, 79.0], temperature=1e-38), [1, 0, 0])
    np.testing.assert_allclose(probabilities([3e38, 3e38]), [0.5, 0.5])
    for options in ({}, {"top_k": 2}, {"top_p": 0.5}):  # visible, and the search ends
        assert np.isnan(probabilities([1.0, np.nan, 2.0], **options)).any()


def test_rows_of_a_batch_do_not_mix():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(6, 4, 50)), jnp.float32)  # [B, slots, V]
    params = SamplingParams.make(
        6, [0, 0.7, 1, 1.3, 1, 0.5], [0, 0, 3, 0, 2, 50], [1, 1, 1, 0.5, 0.9, 0.2], seeds=0
    )
    together = params.distribution(logits)
    for row in range(6):
        options = (np.asarray(x)[row] for x in (params.temperature, params.top_k, params.top_p))
        alone = probabilities(logits[row], *options)
        np.testing.assert_allclose(together[row], alone, atol=1e-7)


def test_promises_change_nothing():
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(8, 700)), jnp.float32)
    np.testing.assert_allclose(
        probabilities(logits, filtered=False), probabilities(logits), atol=1e-7
    )
    np.testing.assert_array_equal(
        probabilities(logits, 0.0, greedy=True), probabilities(logits, 0.0)
    )
    keys = purpose_key(jnp.arange(8), 0, Purpose.PROPOSE)
    params = SamplingParams.make(8, 0.0, seeds=0)
    token, probs = sampling.sample(logits, params, keys)
    np.testing.assert_array_equal(token, np.argmax(logits, axis=-1))
    mixed = SamplingParams.make(8, [0.0] * 7 + [1.0], seeds=0)
    assert params.greedy and not mixed.greedy
    other, others = sampling.sample(logits, mixed, keys)
    np.testing.assert_array_equal(token[:7], other[:7])
    np.testing.assert_array_equal(probs[:7], others[:7])


def test_best_token_is_the_argmax():
    rng = np.random.default_rng(2)
    logits = jnp.asarray(rng.integers(-3, 3, (50, 20)), jnp.bfloat16)
    np.testing.assert_array_equal(sampling.best_token(logits), jnp.argmax(logits, axis=-1))
    assert sampling.best_token(jnp.array([1.0, jnp.nan, 0.0])) == 2  # some id of the vocabulary


def test_rows_finite():
    inf, nan = np.inf, np.nan
    rows = [[1, 2], [1, nan], [inf, 0], [-inf, 0], [-inf, -inf], [nan, inf], [-inf, nan]]
    got = sampling.rows_finite(jnp.array(rows))
    np.testing.assert_array_equal(got, [True, False, False, True, False, False, False])
    np.testing.assert_array_equal(sampling.rows_finite(jnp.array(rows).astype(jnp.bfloat16)), got)


def test_make_broadcasts_and_marks():
    params = SamplingParams.make(3, 0.7, [0, 5, 0], 1.0, seeds=[1, 2**32 - 1, 3])
    np.testing.assert_allclose(params.temperature, [0.7] * 3)
    np.testing.assert_array_equal(params.top_k, [0, 5, 0])
    np.testing.assert_array_equal(params.seed, np.array([1, 2**32 - 1, 3], np.uint32))
    assert params.seed.dtype == jnp.uint32 and params.top_k.dtype == jnp.int32
    assert params.filtered and not params.greedy
    assert not SamplingParams.make(2, 1.0, seeds=0).filtered
    greedy = SamplingParams.make(2, 0.0, 5, 0.5, seeds=0)  # filters of a greedy row do nothing
    assert greedy.greedy and not greedy.filtered
    assert SamplingParams.make(2, [0.0, 1.0], seeds=0).greedy is False


def test_unseeded_requests_differ():
    first, second = SamplingParams.make(4), SamplingParams.make(4)
    assert len(set(np.asarray(first.seed)) | set(np.asarray(second.seed))) == 8
    some = SamplingParams.make(3, seeds=[7, None, 9])
    assert some.seed[0] == 7 and some.seed[2] == 9


@pytest.mark.parametrize(
    "options,words",
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": [1.0]}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": [0.5, 1.1]}, "row 1"),
        ({"seeds": -1}, "seeds"),
        ({"seeds": 2**32}, "seeds"),
        ({"seeds": [1, 2, 3]}, "seeds"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words) as error:
        SamplingParams.make(2, **options)
    assert "\n" not in str(error.value)


def bits(keys):
    return np.asarray(jax.random.key_data(keys))


def test_keys_are_all_different():
    seeds, positions, slots = np.meshgrid([0, 1, 2**32 - 1], np.arange(20), np.arange(4))
    found = [
        bits(purpose_key(seeds.astype(np.uint32), positions, purpose, slots)).reshape(-1, 2)
        for purpose in Purpose
    ]
    found = np.concatenate(found)
    assert len(np.unique(found, axis=0)) == len(found)


def test_keys_do_not_depend_on_the_batch():
    seeds = jnp.array([3, 9, 2**32 - 5], jnp.uint32)
    positions = jnp.array([[0, 1], [5, 6], [100, 101]])
    together = bits(purpose_key(seeds[:, None], positions, Purpose.ACCEPT))
    for row in range(3):
        alone = bits(purpose_key(seeds[row], positions[row, 1], Purpose.ACCEPT))
        np.testing.assert_array_equal(together[row, 1], alone)
    with jax.default_prng_impl("rbg"):  # nor on jax's settings
        again = bits(purpose_key(seeds[:, None], positions, Purpose.ACCEPT))
    np.testing.assert_array_equal(again, together)


def test_uniform_range_and_resolution():
    keys = purpose_key(jnp.arange(100_000), 7, Purpose.ACCEPT)
    u = np.asarray(sampling.uniform(keys), np.float64)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * len(u))
    assert abs((u < 0.01).mean() - 0.01) < 5 * np.sqrt(0.01 / len(u))
    assert (u[u < 0.01] * 2**23 % 1 > 0).mean() > 0.9  # finer than jax's own
    assert len(np.unique(u)) > 0.95 * len(u)


@jax.jit
def drawn(probs, keys):  # the noise differs, the probabilities are read once
    return jax.vmap(sampling.draw, in_axes=(None, 0))(probs, keys)


def draws(probs, count):
    keys = purpose_key(jnp.arange(count), 0, Purpose.TARGET)
    return np.asarray(drawn(jnp.asarray(probs, jnp.float32), keys))


@pytest.mark.parametrize("vocab", [5, 700])
def test_draws_follow_the_probabilities(vocab):
    rng = np.random.default_rng(vocab)
    probs = rng.exponential(size=vocab) ** 2 * (rng.random(vocab) > 0.3)
    probs /= probs.sum()
    count = 40_000
    counts = np.bincount(draws(probs, count), minlength=vocab)
    assert not counts[probs == 0].any()
    likely = probs * count > 5
    wanted = np.append(probs[likely], probs[~likely].sum()) * count
    got = np.append(counts[likely], counts[~likely].sum())
    wanted, got = wanted[wanted > 0], got[wanted > 0]
    freedom = len(wanted) - 1
    excess = (((got - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom)
    assert excess < 5
    doubled = wanted * np.where(np.arange(len(wanted)) == np.argmax(wanted), 1.1, 1)
    doubled *= count / doubled.sum()  # a tenth more of one token would be seen
    assert (((got - doubled) ** 2 / doubled).sum() - freedom) / np.sqrt(2 * freedom) > excess


def test_scale_of_the_weights_does_not_matter():
    probs = np.random.default_rng(0).random(700)
    np.testing.assert_array_equal(draws(probs, 50), draws(probs * 2.0**-20, 50))


def test_tail_tokens_are_reached():
    # One head token and 65536 others 19.1 nats below it: 3.3e-4 of the mass, 5e-9 each.
    tail, trials = 65_536, 40_000
    logits = jnp.concatenate([jnp.zeros(1), jnp.full(tail, -19.1)])
    probs = jax.nn.softmax(logits)
    tokens = draws(probs, trials)
    expected = trials * tail * float(probs[1])
    hits = tokens[tokens > 0]
    assert 10 < expected < 20
    assert abs(len(hits) - expected) < 3 * np.sqrt(expected)
    assert len(set(hits)) == len(hits) and hits.max() > tail / 2


def test_bfloat16_logits_are_drawn_from_in_float32():
    logits = jnp.zeros(10_000, jnp.bfloat16)
    tokens = draws(probabilities(logits), 10_000)
    # Distinct values of 10,000 draws from 10,000: 6,321 on average, 31 the standard deviation.
    assert abs(len(set(tokens)) - 6321) < 5 * 31


@pytest.mark.parametrize("vocab", [5, 700])
def test_draw_stays_in_the_vocabulary(vocab):
    only = np.zeros(vocab)
    only[vocab - 1] = 1e-30
    assert (draws(only, 50) == vocab - 1).all()
    for bad in (np.zeros(vocab), np.full(vocab, np.nan)):
        tokens = draws(bad, 50)
        assert tokens.min() >= 0 and tokens.max() < vocab


def test_token_and_distribution_come_together():
    rng = np.random.default_rng(5)
    logits = jnp.asarray(rng.normal(size=(64, 50)), jnp.bfloat16)
    params = SamplingParams.make(64, 0.7, 4, 0.9, seeds=list(range(64)))
    keys = purpose_key(params.seed, jnp.arange(64), Purpose.PROPOSE, 2)
    token, probs = sampling.sample(logits, params, keys)
    np.testing.assert_array_equal(probs, params.distribution(logits))
    np.testing.assert_array_equal(token, sampling.draw(probs, keys))
    assert (np.take_along_axis(np.asarray(probs), np.asarray(token)[:, None], 1) > 0).all()


@jax.jit
def step(logits, params, positions):
    keys = purpose_key(params.seed, positions, Purpose.PROPOSE)
    return sampling.sample(logits, params, keys), sampling.rows_finite(logits)


@pytest.mark.parametrize("fsdp,tp", [(1, 1), (4, 2)])
@pytest.mark.parametrize("options", [(0.0, 0, 1.0), (0.8, 0, 1.0), ([0, 1] * 4, [3, 0] * 4, 0.7)])
def test_sharded_batch_samples_the_same(fsdp, tp, options):
    logits = np.random.default_rng(6).normal(size=(8, 700)).astype(np.float32)
    params = SamplingParams.make(8, *options, seeds=list(range(8)))
    positions = np.arange(8, dtype=np.int32)

    (token, probs), _ = step(logits, params, positions)
    with jax.set_mesh(make_mesh(fsdp, tp)):
        placed = jax.tree.map(lambda x: place(x, "batch"), params)
        (sharded, others), _ = step(place(logits, "batch", None), placed, place(positions, "batch"))
    assert sharded.sharding.spec[0] == "fsdp"
    np.testing.assert_array_equal(token, sharded)
    np.testing.assert_allclose(probs, others, atol=1e-7)
