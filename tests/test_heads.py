"""The sequential heads: against loops, what each slot may know, and decoding slot by slot.

pytest tests/test_heads.py
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_drafter import (
    HIDDEN,
    RANK,
    VOCAB,
    make_drafter,
    make_head,
    make_reference,
    make_shape,
    random_weights,
)

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named
from dspark_jax.models.drafter import Drafter
from dspark_jax.models.heads import ConfidenceHead, MarkovHead

KINDS = ("vanilla", "gated", "rnn")
BATCH, ANCHORS, BLOCK = 2, 3, 4


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


@functools.cache
def drafter_of(kind: str, **options):
    """Shape, weights and drafter."""
    shape = make_shape(markov_head=kind, num_layers=1, **options)
    weights = random_weights(shape)
    return shape, weights, make_drafter(shape, weights)


@pytest.fixture(scope="module")
def slots():
    """Previous tokens i32[B, A, G] and hidden states [B, A, G, D]."""
    rng = np.random.default_rng(0)
    prev = rng.integers(0, VOCAB, (BATCH, ANCHORS, BLOCK)).astype(np.int32)
    return prev, rng.standard_normal((*prev.shape, HIDDEN)).astype(np.float32)


@jax.jit
def forced(drafter, prev, hidden):
    """Teacher-forced latents and confidence logits of whole blocks."""
    rows = drafter.markov.rows(prev.reshape(BATCH, -1)).reshape(*prev.shape, -1)
    return drafter.markov.latents(rows, hidden), drafter.confidence_logits(hidden, rows)


@jax.jit
def step(drafter, logits, prev, hidden, state):
    return drafter.markov.biased(logits, prev, hidden, state)


def close(got, want, tolerance=1e-5):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


# Against the loops, and decoding against training.


@pytest.mark.parametrize("kind", KINDS)
def test_latents_and_confidence_match_the_loops(kind, slots):
    shape, weights, drafter = drafter_of(kind)
    reference = make_reference(shape, weights)
    prev, hidden = slots
    latents, confidence = forced(drafter, *slots)
    assert latents.dtype == confidence.dtype == jnp.float32
    for b in range(BATCH):
        for a in range(ANCHORS):
            close(latents[b, a], reference.latents(prev[b, a], hidden[b, a]))
            for k in range(BLOCK):
                want = reference.confidence_logit(hidden[b, a, k], prev[b, a, k])
                close(confidence[b, a, k], want)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_slot_by_slot_equals_teacher_forcing(kind, slots):
    """Base logits plus latent @ W2.T, one slot at a time, the state handed on."""
    shape, weights, drafter = drafter_of(kind)
    prev, hidden = slots
    latents, _ = forced(drafter, *slots)
    base = np.asarray(hidden @ np.asarray(make_head().weight).T)
    want = base + np.einsum("bagr,vr->bagv", latents, weights["markov.w2"])
    for a in range(ANCHORS):
        state = drafter.markov.state(BATCH)
        for k in range(BLOCK):
            got, state = step(drafter, base[:, a, k], prev[:, a, k], hidden[:, a, k], state)
            assert got.dtype == jnp.float32
            close(got, want[:, a, k])
    # The states of two rows are their own: swapping the rows swaps the results.
    swapped, _ = step(drafter, base[::-1, 0, 0], prev[::-1, 0, 0], hidden[::-1, 0, 0], state[::-1])
    straight, _ = step(drafter, base[:, 0, 0], prev[:, 0, 0], hidden[:, 0, 0], state)
    close(swapped[::-1], straight, 1e-6)


def test_heads_on_bfloat16_hidden_states_stay_float32(slots):
    """They compute in float32 whatever the backbone computes in."""
    _, _, drafter = drafter_of("rnn")
    prev, hidden = slots
    rounded = hidden.astype(jnp.bfloat16)
    latents, confidence = forced(drafter, prev, rounded)
    exact = forced(drafter, prev, np.asarray(rounded, np.float32))
    assert latents.dtype == confidence.dtype == jnp.float32
    close(latents, exact[0], 1e-6)
    close(confidence, exact[1], 1e-6)


# What a slot may know.

# Which slots' latents depend on the previous token and on the hidden state of slot 1.
OWN, ON, NONE = {1}, {1, 2, 3}, set()
REACH = {"vanilla": (OWN, NONE), "gated": (OWN, OWN), "rnn": (ON, ON)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_reaches_a_latent(kind, slots):
    """Later tokens never do; earlier ones through the state of rnn only; other blocks never."""
    _, _, drafter = drafter_of(kind)
    prev, hidden = slots
    before, _ = forced(drafter, prev, hidden)
    other_prev, other_hidden = prev.copy(), hidden.copy()
    other_prev[0, 1, 1] = (prev[0, 1, 1] + 1) % VOCAB
    other_hidden[0, 1, 1] += 1.0
    for after, reached in zip(
        (forced(drafter, other_prev, hidden), forced(drafter, prev, other_hidden)), REACH[kind]
    ):
        changed = np.asarray(after[0] != before).any(-1)
        assert set(np.flatnonzero(changed[0, 1])) == reached
        changed[0, 1] = False
        assert not changed.any()


@pytest.mark.parametrize(
    "kind, with_markov", [("vanilla", True), ("rnn", True), ("vanilla", False)]
)
def test_what_reaches_a_confidence(kind, with_markov, slots):
    """The hidden state of its slot and the token before it; no token at or after the slot."""
    _, _, drafter = drafter_of(kind, confidence_with_markov=with_markov)
    prev, hidden = slots
    _, before = forced(drafter, prev, hidden)
    for slot in range(BLOCK):
        # The token that slot proposes is the previous token of slot + 1.
        later = prev.copy()
        later[..., slot + 1 :] = (later[..., slot + 1 :] + 1) % VOCAB
        _, after = forced(drafter, later, hidden)
        np.testing.assert_array_equal(after[..., : slot + 1], before[..., : slot + 1])
        own = prev.copy()
        own[..., slot] = (own[..., slot] + 1) % VOCAB
        _, after = forced(drafter, own, hidden)
        changed = np.asarray(after != before)
        assert changed[..., slot].all() == with_markov
        assert not np.delete(changed, slot, axis=-1).any()
        moved = hidden.copy()
        moved[..., slot, :] += 0.5
        _, after = forced(drafter, prev, moved)
        changed = np.asarray(after != before)
        assert changed[..., slot].all() and not np.delete(changed, slot, axis=-1).any()


@pytest.mark.parametrize("detach", [True, False])
def test_confidence_gradient_reaches_its_inputs_unless_detached(detach, slots):
    """The reference does not detach; as an option it is all or nothing (R054)."""
    _, _, drafter = drafter_of("vanilla", confidence_detach=detach)
    prev, hidden = slots

    def judged(drafter, hidden):
        rows = drafter.markov.rows(prev.reshape(BATCH, -1)).reshape(*prev.shape, -1)
        return jnp.sum(jnp.sin(drafter.confidence_logits(hidden, rows)))

    grads, d_hidden = jax.jit(jax.grad(judged, argnums=(0, 1)))(drafter, hidden)
    grads = named(grads)
    assert (np.asarray(d_hidden) != 0).all() != detach
    assert (np.asarray(d_hidden) == 0).all() == detach
    assert (np.asarray(grads["markov.w1"]) != 0).any() != detach
    assert (np.asarray(grads["confidence.weight"]) != 0).all()
    assert (np.asarray(grads["confidence.bias"]) != 0).all()


# What they are made of.


@pytest.mark.parametrize("kind", ("none", *KINDS))
@pytest.mark.parametrize("confidence", [True, False])
def test_parameters(kind, confidence):
    """W1 has a row for every target id; a part that is off has no weights."""
    shape = make_shape(markov_head=kind, confidence_head=confidence)
    arrays = named(jax.eval_shape(lambda: Drafter(shape, rngs=nnx.Rngs(0))))
    got = {name: array.shape for name, array in arrays.items() if "markov" in name}
    want = {"markov.w1": (VOCAB, RANK), "markov.w2": (VOCAB, RANK)}
    if kind == "gated":
        want |= {"markov.gate": (RANK, HIDDEN + RANK), "markov.gate_bias": (RANK,)}
    if kind == "rnn":
        want |= {"markov.joint": (3 * RANK, 2 * RANK + HIDDEN), "markov.joint_bias": (3 * RANK,)}
    assert got == ({} if kind == "none" else want)
    features = HIDDEN if kind == "none" else HIDDEN + RANK
    got = {name: array.shape for name, array in arrays.items() if "confidence" in name}
    want = {"confidence.weight": (1, features), "confidence.bias": (1,)}
    assert got == (want if confidence else {})


def test_no_markov_head_means_rank_0():
    """DFlash is the same drafter without sequential heads; a half-way setting is refused."""
    with pytest.raises(UserError, match="markov_rank"):
        DrafterConfig((0,), 1, markov_head="none", markov_rank=8)
    with pytest.raises(UserError, match="markov_rank"):
        DrafterConfig((0,), 1, markov_head="vanilla", markov_rank=0)
    with pytest.raises(UserError, match="markov_head"):
        DrafterConfig((0,), 1, markov_head="lstm")


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_initial_heads_of_both_kinds(kind):
    """N(0, 0.02) and zeros; or W1 N(0, 0.01) and the rest uniform within 1 / sqrt(inputs)."""
    inputs = {"w2": 16, "gate": 64, "gate_bias": 64, "joint": 80, "joint_bias": 80}
    heads = {}
    for init in ("normal", "uniform"):
        rngs, sizes = nnx.Rngs(3), (kind, 400, 16, 48)
        heads[init] = named(MarkovHead(*sizes, draft_vocab=300, init=init, rngs=rngs))
        for name, array in named(ConfidenceHead(48, 16, init=init, rngs=rngs)).items():
            heads[init][f"confidence.{name}"] = array
    inputs |= {"confidence.weight": 64, "confidence.bias": 64}
    for name, array in heads["normal"].items():
        array = np.asarray(array)
        if name.endswith("bias"):
            assert not array.any()
        else:
            assert array.std() == pytest.approx(0.02, rel=0.3 if array.size < 100 else 0.1)
    for name, array in heads["uniform"].items():
        array = np.asarray(array)
        if name == "w1":
            assert array.std() == pytest.approx(0.01, rel=0.1)
            assert np.abs(array).max() > 0.02
            continue
        bound = inputs[name] ** -0.5
        assert np.abs(array).max() <= bound
        assert array.any()
        if array.size > 500:
            assert array.std() == pytest.approx(bound / 3**0.5, rel=0.05)
            assert abs(array.mean()) < bound / 20


def test_a_drafter_takes_the_heads_it_is_told(slots):
    """And its backbone does not depend on that."""
    made = {}
    for init in ("normal", "uniform"):
        shape = make_shape(head_init=init, num_layers=1)
        made[init] = named(Drafter(shape, rngs=nnx.Rngs(0)))
    for name, array in made["normal"].items():
        same = np.array_equal(array, made["uniform"][name])
        assert same == (not name.startswith(("markov", "confidence"))), name
    assert np.asarray(made["uniform"]["confidence.bias"]).any()
