"""A pruned draft vocabulary: which tokens it holds, and where draft ids become target ids.

pytest tests/test_draft_vocab.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import softmax
from tiny_drafter import (
    HIDDEN,
    MASK,
    VOCAB,
    head_arrays,
    make_drafter,
    make_head,
    make_reference,
    make_row,
    make_shape,
    random_weights,
)

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.dataset import Row
from dspark_jax.data.draft_vocab import (
    coverage,
    draft_vocabulary,
    most_frequent,
    token_counts,
)
from dspark_jax.decoding.rounds import propose
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target import TargetConfig, TargetHead


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


# Which tokens.


def test_only_what_the_target_said_is_counted():
    rows = [
        Row("a", "test", np.array([1, 1, 2, 3], np.int32), np.array([False, True, True, False])),
        Row("b", "test", np.array([3, 2, 2], np.int32), np.array([False, False, True])),
        Row("c", "test", np.array([4, 4], np.int32), np.zeros(2, bool)),
    ]
    np.testing.assert_array_equal(token_counts(rows, 6), [0, 1, 2, 0, 0, 0])
    assert token_counts([], 3).tolist() == [0, 0, 0]


def test_the_most_frequent_are_taken_and_of_equals_the_smaller():
    counts = np.array([0, 5, 3, 3, 9, 0, 3])
    for size, wanted in ((1, [4]), (3, [1, 2, 4]), (4, [1, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 6])):
        ids = most_frequent(counts, size)
        assert ids.tolist() == wanted and ids.dtype == np.int32
    assert most_frequent(np.zeros(9, np.int64), 4).tolist() == [0, 1, 2, 3]
    rng = np.random.default_rng(0)
    for _ in range(20):
        (counts, seen), size = rng.integers(0, 5, (2, 60)), int(rng.integers(1, 60))
        best = sorted(range(60), key=lambda token: (-counts[token], token))[:size]
        assert most_frequent(counts, size).tolist() == sorted(best)
        best = sorted(range(60), key=lambda token: (-counts[token], -seen[token], token))[:size]
        assert most_frequent(counts, size, (), seen).tolist() == sorted(best)


def test_stop_tokens_are_always_there():
    """Without them a drafter could never end an answer; the least frequent others make room."""
    counts = np.array([0, 5, 3, 3, 9, 0, 3])
    assert most_frequent(counts, 3, (5,)).tolist() == [1, 4, 5]
    assert most_frequent(counts, 3, (0, 6)).tolist() == [0, 4, 6]
    assert most_frequent(counts, 3, (4,)).tolist() == most_frequent(counts, 3).tolist()
    assert counts.tolist() == [0, 5, 3, 3, 9, 0, 3]


def test_coverage_is_a_share_of_all_that_was_counted():
    counts = np.array([0, 5, 3, 0, 2])
    assert coverage(counts, np.array([1, 4])) == 0.7
    assert coverage(counts, np.arange(5)) == 1.0
    assert coverage(counts, np.array([0, 3])) == 0.0
    assert coverage(np.zeros(5, np.int64), np.array([1])) == 0.0


def test_the_vocabulary_of_a_data_set_is_that_of_its_training_part():
    """What is held out is covered as it happens, and no token of it is counted; prompts decide
    between tokens that were said as often."""

    def row(prompt, response):
        tokens = np.array([*prompt, *response], np.int32)
        return Row("a", "test", tokens, np.arange(len(tokens)) >= len(prompt))

    train = [row([5, 5, 5], [1, 1, 2]), row([2], [3, 3, 3])]
    held_out = [row([6], [4, 4, 4, 3])]
    for size, wanted in ((3, [1, 3, 7]), (4, [1, 2, 3, 7]), (5, [1, 2, 3, 5, 7])):
        ids, line = draft_vocabulary(train, held_out, 8, size, (7,))
        assert ids.tolist() == wanted
    assert "5 of 8 tokens" in line and "100.00%" in line and "25.00%" in line


# The shape.

TARGET = TargetConfig("qwen3", VOCAB, HIDDEN, 5, 4, 2, 8, 24, 1e-5, RopeConfig(1e2), True, 64)


@pytest.mark.parametrize("size, drafted", [(0, VOCAB), (VOCAB, VOCAB), (24, 24), (1, 1)])
def test_a_vocabulary_is_pruned_when_it_is_smaller(size, drafted):
    shape = DrafterShape.of(DrafterConfig((0, 2), MASK, vocab_size=size), TARGET)
    assert (shape.draft_vocab, shape.pruned) == (drafted, drafted < VOCAB)
    weights = random_weights(make_shape(vocab_size=size))
    assert weights["markov.w1"].shape[0] == VOCAB  # previous tokens are the target's
    assert weights["markov.w2"].shape[0] == drafted
    assert ("draft_ids" in weights) == (drafted < VOCAB)


@pytest.mark.parametrize("size", [-1, VOCAB + 1])
def test_a_vocabulary_larger_than_the_targets_is_refused(size):
    with pytest.raises(UserError, match=f"vocab_size={size}: the target's vocabulary has {VOCAB}"):
        DrafterShape.of(DrafterConfig((0, 2), MASK, vocab_size=size), TARGET)


# Draft ids and target ids.


@pytest.mark.parametrize("devices", [(1, 1), (4, 2)])
def test_ids_go_there_and_back(devices):
    shape = make_shape(vocab_size=24, num_layers=1)
    weights = random_weights(shape)
    ids = weights["draft_ids"]
    with jax.set_mesh(make_mesh(*devices)):
        drafter, whole = make_drafter(shape, weights), make_head()
        tokens = place(np.arange(VOCAB, dtype=np.int32).reshape(4, 10), "batch", None)
        draft = np.asarray(jax.jit(lambda d, x: d.to_draft(x))(drafter, tokens)).ravel()
        for token in range(VOCAB):
            wanted = list(ids).index(token) if token in ids else -1
            assert draft[token] == wanted
        every = place(np.arange(24, dtype=np.int32).reshape(4, 6), "batch", None)
        back = jax.jit(lambda d, x: d.to_target(x))(drafter, every)
        np.testing.assert_array_equal(np.asarray(back).ravel(), ids)
        probs = np.random.default_rng(0).random((4, 3, 24), np.float32)
        spread = jax.jit(lambda d, x: d.scatter(x))(drafter, place(probs, "batch", None, None))
        wanted = np.zeros((4, 3, VOCAB), np.float32)
        wanted[..., ids] = probs
        np.testing.assert_array_equal(spread, wanted)
        head = jax.jit(lambda d, x: d.head(x))(drafter, whole)
        np.testing.assert_array_equal(head.weight, head_arrays()[1][ids])
        np.testing.assert_array_equal(head.embed, head_arrays()[0])
        assert head.weight.sharding.is_equivalent_to(whole.weight.sharding, 2)
        tied = jax.jit(lambda d, x: d.head(TargetHead(x.embed, None)))(drafter, whole)
        np.testing.assert_array_equal(tied.weight, head_arrays()[0][ids])
        np.testing.assert_array_equal(tied.embed, head_arrays()[0])


def test_a_whole_vocabulary_is_left_alone():
    """No copy of the head, no table."""
    shape = make_shape(vocab_size=VOCAB, num_layers=1)
    drafter, head = make_drafter(shape, random_weights(shape)), make_head()
    values = jnp.arange(6).reshape(2, 3)
    assert drafter.head(head) is head
    for same in (drafter.to_draft, drafter.to_target, drafter.scatter):
        assert same(values) is values


# Proposals.


def params(temperature: float, rows: int) -> SamplingParams:
    return SamplingParams.make(rows, temperature, seeds=list(range(rows)))


@functools.cache
def markov_alone() -> tuple[Drafter, TargetHead]:
    """Ten tokens, of which 2 and 7 can be drafted; the LM head is zero and the Markov head alone
    decides: after 2 comes 7, after 7 comes 2, and any other token says nothing (R030)."""
    shape = make_shape(num_layers=1, markov_rank=1, mask_token_id=9, vocab_size=2)
    shape = dataclasses.replace(shape, vocab_size=10)
    weights = random_weights(shape)
    weights["draft_ids"] = np.array([2, 7], np.int32)
    weights["markov.w1"] = np.zeros((10, 1), np.float32)
    weights["markov.w1"][[2, 7]] = [[5], [-5]]
    weights["markov.w2"] = np.array([[-1], [1]], np.float32)
    embed = np.random.default_rng(0).standard_normal((10, HIDDEN)).astype(np.float32)
    return make_drafter(shape, weights), TargetHead(jnp.asarray(embed), jnp.zeros((10, HIDDEN)))


@jax.jit
def propose_without_context(drafter, head, anchor, params):
    cache = drafter.empty_cache(anchor.shape[0], 8)
    return propose(drafter, drafter.head(head), anchor, cache, params)


def test_the_chain_runs_over_target_ids():
    """Draft ids 0 and 1, which are tokens too, are neither emitted nor looked up in W1."""
    anchors = np.array([2, 7, 0, 1], np.int32)
    draft = propose_without_context(*markov_alone(), anchors, params(0.0, 4))
    wanted = [[7, 2, 7, 2], [2, 7, 2, 7], [2, 7, 2, 7], [2, 7, 2, 7]]  # of equals the first
    assert np.asarray(draft.tokens).tolist() == wanted and draft.probs is None


def test_what_drafts_are_drawn_from_lies_on_target_ids():
    rows, temperature = 200, 4.0
    anchors = np.resize(np.array([2, 7, 0, 1], np.int32), rows)
    draft = propose_without_context(*markov_alone(), anchors, params(temperature, rows))
    tokens, probs = np.asarray(draft.tokens), np.asarray(draft.probs)
    assert probs.shape == (rows, 4, 10)
    assert set(tokens.ravel()) == {2, 7} == set(np.flatnonzero(probs.any((0, 1))))
    previous = np.concatenate([anchors[:, None], tokens[:, :-1]], axis=1)
    bias = np.where(previous == 2, 5.0, np.where(previous == 7, -5.0, 0.0)) / temperature
    np.testing.assert_allclose(probs[..., 7], 1 / (1 + np.exp(-2 * bias)), rtol=1e-5)
    np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-6)
    for known in (2, 7, 0):  # and they were drawn from that
        where = previous == known
        share = (tokens[where] == 7).mean()
        assert share == pytest.approx(probs[where][0, 7], abs=0.08), known


@pytest.mark.parametrize(
    "kind, from_anchor, temperature", [("vanilla", True, 0.7), ("rnn", False, 0.0)]
)
def test_proposals_are_those_of_the_loops(kind, from_anchor, temperature):
    """Slot by slot, each given the token drafted before it; confidence as well."""
    shape = make_shape(
        markov_head=kind, sample_from_anchor=from_anchor, num_layers=1, vocab_size=24
    )
    weights = random_weights(shape, seed=2)
    drafter, reference = make_drafter(shape, weights), make_reference(shape, weights)
    rows, lengths = [make_row((20,), [], seed=s) for s in (4, 5)], [5, 9]

    @jax.jit
    def run(drafter, head, taps, anchor, params):
        cache = drafter.extend(drafter.empty_cache(2, 24), taps).advance(jnp.array(lengths))
        return propose(drafter, drafter.head(head), anchor, cache, params)

    taps = np.stack([row.taps[:12] for row in rows])
    anchors = np.array([row.tokens[at] for row, at in zip(rows, lengths)])
    draft = jax.device_get(run(drafter, make_head(), taps, anchors, params(temperature, 2)))
    for b, (row, at) in enumerate(zip(rows, lengths)):
        hidden = reference.block(row, at)[-shape.config.num_proposals :]
        previous = [int(anchors[b]), *draft.tokens[b]]
        latents = reference.latents(previous[:-1], hidden)
        for k, (h, latent) in enumerate(zip(hidden, latents)):
            z = reference.draft_logits(h, latent)
            logit = reference.confidence_logit(h, previous[k])
            assert draft.confidence[b, k] == pytest.approx(logit, abs=1e-4)
            if temperature:
                wanted = np.zeros(VOCAB)
                wanted[weights["draft_ids"]] = softmax(z / temperature)
                np.testing.assert_allclose(draft.probs[b, k], wanted, atol=1e-5)
                assert draft.tokens[b, k] in weights["draft_ids"]
            else:
                assert draft.tokens[b, k] == weights["draft_ids"][z.argmax()]
