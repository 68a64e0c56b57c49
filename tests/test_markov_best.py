"""The likeliest token under the Markov bias: kernels, ties, ragged tiles, shardings, drafting.

pytest tests/test_markov_best.py (and test_markov_best_compiles.py: what the compilers say)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny_drafter import HIDDEN, VOCAB, make_drafter, make_shape, random_weights

from dspark_jax.core.sharding import make_mesh
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.slots import propose_slots
from dspark_jax.kernels import markov_best as op
from dspark_jax.kernels.best_token import best_token

F32, BF16 = jnp.float32, jnp.bfloat16
SLOTS, SLOT = 3, 1

# B, V, R, dtype of w2. One row; odd vocabularies; two tiles of rows, the second ragged; three
# tiles of V, the last ragged; ranks below 128 (W2 is read transposed) and from there.
CASES = [(1, 15, 4, F32), (5, 300, 128, F32), (5, 300, 64, BF16), (530, 130, 96, F32),
         (7, 4500, 256, BF16)]  # fmt: skip
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_way = pytest.mark.parametrize("way", ["xla", "interpret", "triton"])


def make(n, v, r, dtype=F32, whole=False):
    """logits, latent, w2; with `whole` small whole numbers, whose sums are exact and often tie."""
    rng = np.random.default_rng(0)

    def array(shape, kind=F32):
        return jnp.asarray(rng.integers(-1, 2, shape) if whole else rng.normal(size=shape), kind)

    return array((SLOTS, n, v)), array((n, r)), array((v, r), dtype)


def place(x, *spec):
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), P(*spec)))


def run(way, logits, latent, w2, slot=SLOT):
    if way == "triton":
        return op._triton(logits, jnp.int32(slot), latent, w2, interpret=True)[1]
    return op.markov_best(logits, slot, latent, w2, implementation=way)


def scores_of(logits, latent, w2):
    rounded = np.asarray(latent.astype(w2.dtype), np.float64)
    return np.asarray(logits[SLOT], np.float64) + rounded @ np.asarray(w2, np.float64).T


@each_way
@each_case
def test_the_best_of_all(case, way):
    operands = make(*case)
    got, scores = np.asarray(run(way, *operands)), scores_of(*operands)
    assert got.dtype == np.int32 and got.shape == (case[0],)
    np.testing.assert_allclose(scores[np.arange(len(got)), got], scores.max(-1), rtol=1e-5)
    np.testing.assert_array_equal(got, scores.argmax(-1))  # these have no near ties


@each_way
@each_case
def test_ties_go_to_the_lowest_id(case, way):
    operands = make(*case, whole=True)
    scores = scores_of(*operands)
    if case[1] > 100:
        assert ((scores == scores.max(-1, keepdims=True)).sum(-1) > 1).any()
    np.testing.assert_array_equal(run(way, *operands), scores.argmax(-1))
    np.testing.assert_array_equal(op.markov_best_reference(operands[0], SLOT, *operands[1:]),
                                  scores.argmax(-1))  # fmt: skip


@each_way
def test_equal_logits_everywhere(way):
    """Between tiles too the first wins, and rows of -inf or NaN get an id of the vocabulary."""
    logits, latent, w2 = (jnp.zeros(s) for s in ((SLOTS, 6, 4500), (6, 8), (4500, 8)))
    logits = logits.at[SLOT, 1, 4100].set(1).at[SLOT, 1, 4490].set(1)
    logits = logits.at[SLOT, 2].set(-jnp.inf).at[SLOT, 3].set(jnp.nan)
    logits = logits.at[SLOT, 4, 4499].set(jnp.inf).at[SLOT, 5].set(-7)
    got = np.asarray(run(way, logits, latent, w2))
    np.testing.assert_array_equal(got[[0, 1, 2, 4, 5]], [0, 4100, 0, 4499, 0])
    assert 0 <= got[3] < 4500


@each_way
@pytest.mark.parametrize("slot", range(SLOTS))
def test_the_slot_asked_for(slot, way):
    logits, latent, w2 = make(4, 300, 16)
    want = op.markov_best_reference(logits, slot, latent, w2)
    np.testing.assert_array_equal(run(way, logits, latent, w2, slot), want)


def test_the_kernel_reads_nothing_that_was_not_written():
    """The TPU interpreter fills fresh memory with NaN, bounds accesses and looks for races."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    # A large rank makes the tiles small, here 32 x 128: two by two, ragged both ways.
    operands = make(40, 130, 4096, BF16)
    got = op._mosaic(operands[0], jnp.int32(SLOT), *operands[1:], interpret=params)[1]
    np.testing.assert_array_equal(got, scores_of(*operands).argmax(-1))


def test_kernel_is_used():
    operands = make(4, 300, 64)
    for way, used in (("interpret", True), ("xla", False)):
        jaxpr = str(jax.make_jaxpr(functools.partial(run, way))(*operands))
        assert ("pallas_call" in jaxpr) == used


@pytest.mark.parametrize("way", ["xla", "interpret"])
@pytest.mark.parametrize("mesh", [(4, 2), (2, 4), (1, 1)])
@pytest.mark.parametrize("whole", [False, True], ids=["sharded V", "whole V"])
def test_sharded_equals_unsharded(mesh, whole, way):
    logits, latent, w2 = make(8, 300, 16, whole=True)  # ties across devices too
    want = scores_of(logits, latent, w2).argmax(-1)
    with jax.set_mesh(make_mesh(*mesh)):
        vocab = None if whole else "tp"
        args = place(logits, None, "fsdp", vocab), place(latent, "fsdp"), place(w2, "tp", "fsdp")
        got = jax.jit(functools.partial(run, way))(*args)
        assert jax.typeof(got).sharding.spec == P("fsdp")
        np.testing.assert_array_equal(got, want)


def test_what_does_not_fit_is_said():
    logits, latent, w2 = make(4, 30, 8)
    with pytest.raises(ValueError, match="rows of logits"):
        op.markov_best(logits, 0, latent[:2], w2)
    with pytest.raises(ValueError, match="rows of logits"):
        op.markov_best(logits[0], 0, latent, w2)
    with pytest.raises(ValueError, match=r"not \[V, R\]"):
        op.markov_best(logits, 0, latent, w2.T)
    with pytest.raises(NotImplementedError, match="float16"):
        op.markov_best(logits, 0, latent, w2.astype(jnp.float16), implementation="interpret")


@pytest.mark.parametrize("vocab", [1, 31, 96, 256, 1000, 4096])
@pytest.mark.parametrize("lead", [(), (1,), (3, 5)], ids=str)
def test_best_token_is_the_argmax(lead, vocab):
    """Block by block where a block divides the vocabulary, in two passes where not."""
    rng = np.random.default_rng(1)
    for logits in (rng.normal(size=(*lead, vocab)), rng.integers(0, 3, (*lead, vocab))):
        logits = jnp.asarray(logits, F32)
        np.testing.assert_array_equal(best_token(logits), jnp.argmax(logits, -1))
    logits = logits.at[..., -1].set(jnp.nan)
    some = np.asarray(best_token(logits))
    assert ((some >= 0) & (some < vocab)).all()


# Drafting with it.


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_the_argmax_of_the_biased_logits(kind, mesh, temperature):
    """The same chain, slot after slot, as with all logits made; also where the target samples."""
    rng = np.random.default_rng(2)
    batch, slots = 4, 5
    base = rng.normal(size=(slots, batch, VOCAB)).astype(np.float32)
    hidden = rng.normal(size=(slots, batch, HIDDEN)).astype(np.float32)
    anchor = rng.integers(0, VOCAB, batch).astype(np.int32)
    shape = make_shape(markov_head=kind, num_layers=1)
    with jax.set_mesh(make_mesh(1, 1)):
        weights = {
            name: 3 * array if name.startswith("markov") else array
            for name, array in random_weights(shape).items()
        }
        drafter = make_drafter(shape, weights)
        prev, want, state = place(anchor, "fsdp"), [], drafter.markov.state(batch)
        for slot in range(slots):
            rows = place(base[slot], "fsdp"), prev, place(hidden[slot], "fsdp"), state
            logits, state = drafter.markov.biased(*rows)
            prev = jnp.argmax(logits, -1).astype(jnp.int32)
            want.append(np.asarray(prev))
    want = np.stack(want, 1)
    assert len(np.unique(want)) > 4  # the chain moves
    with jax.set_mesh(make_mesh(*mesh)):
        drafter = make_drafter(shape, weights)
        params = SamplingParams.make(batch, temperature, seeds=0, greedy_drafts=True)
        params = jax.tree.map(lambda x: place(x, "fsdp"), params)
        arrays = place(base, None, "fsdp", "tp"), place(hidden, None, "fsdp"), place(anchor, "fsdp")
        tokens, before, probs = jax.jit(
            lambda d, b, h, a: propose_slots(d, b, h, a, jnp.full_like(a, 9), params)
        )(drafter, *arrays)
    assert probs is None
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(before, np.column_stack([anchor, want[:, :-1]]))


@pytest.mark.accelerator
@pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a TPU or GPU")
@pytest.mark.parametrize("case", [*CASES, (128, 49152, 64, F32), (128, 151936, 256, F32)], ids=str)
def test_on_the_chip(case):
    operands = make(*case, whole=True)
    assert "pallas_call" in str(jax.make_jaxpr(op.markov_best)(operands[0], SLOT, *operands[1:]))
    got = jax.jit(op.markov_best)(operands[0], SLOT, *operands[1:])
    np.testing.assert_array_equal(got, scores_of(*operands).argmax(-1))
