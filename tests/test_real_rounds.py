"""The round itself, enumerated: models, sampling options, policy and verification together.

    pytest tests/test_real_rounds.py

Keys are replaced by what they would decide: every draft block and every outcome of the acceptance
tests is forced through `recorded_round` once. Its own last draw is not made; the distribution it
would be made from is what counts. With weights from one pass of the target and the numpy
distribution of tests/test_shaping.py, the paths add up to the target's own distribution, or some
part of the round is wrong.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_lossless import RIGHT, WRONG
from test_rounds import CONFIG, filled, one
from test_shaping import Asked

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.sharding import place
from dspark_jax.decoding import rounds, sampling, slots
from dspark_jax.decoding.sampling import Purpose
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.target import Target
from dspark_jax.scheduling import schedulers
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.schedulers import CostTable

__all__ = ["one"]  # a fixture

VOCAB, SLOTS, PROMPTS = 3, 2, ([1, 2], [0])
SMALL = dataclasses.replace(CONFIG, vocab_size=VOCAB, num_layers=1)
ACCEPT, REJECT = 0.0, 1 - 2.0**-24


def models():
    options = DrafterConfig(
        target_layer_ids=(-1,), mask_token_id=2, block_size=SLOTS, num_layers=1, markov_rank=4,
        dtype="float32",
    )  # fmt: skip
    shape = DrafterShape.of(options, SMALL)
    scales = {"embed": 1.0, "lm_head": 0.6, "markov": 1.0, "confidence": 1.5}
    return (
        filled(lambda: Target(SMALL, rngs=nnx.Rngs(0)), 5, scales),
        filled(lambda: Drafter(shape, rngs=nnx.Rngs(0)), 4, scales),
    )


class Forced:
    """Stands in for keys and draws while a round is traced."""

    def __init__(self, drafts, uniforms):
        self.drafts, self.uniforms, self.own = drafts, uniforms, None

    def purpose_key(self, seed, position, purpose, slot=0):
        if purpose == Purpose.PROPOSE:
            return jnp.swapaxes(self.drafts, 0, 1)
        if purpose == Purpose.ACCEPT:
            return self.uniforms
        return jnp.zeros_like(seed, jnp.float32)

    def draw(self, probs, keys):
        if keys.dtype == jnp.int32:  # a draft
            return keys
        self.own = probs
        return jnp.argmax(probs, axis=-1).astype(jnp.int32)


def error(monkeypatch, asked, policy, rows=2, greedy_drafts=False):
    """Largest deviation of the first P+1 tokens of all rows, and the lengths that occurred."""
    target, drafter = models()
    ids = np.zeros((rows, 2), np.int32)
    for row in range(rows):
        ids[row, : len(PROMPTS[row])] = PROMPTS[row]
    lengths = np.array([len(prompt) for prompt in PROMPTS[:rows]], np.int32)
    params = asked.params(rows, VOCAB, seeds=list(range(3, 3 + rows)), greedy_drafts=greedy_drafts)
    params = jax.tree.map(lambda x: place(x, "batch"), params)
    limits = jnp.full((1,), -1, jnp.int32), place(np.full(rows, 9, np.int32), "batch")
    request = place(ids, "batch", None), place(lengths, "batch"), params, *limits
    begin = jax.jit(rounds.start, static_argnames="max_new")
    state = begin(target, drafter, *request, policy, max_new=9)
    if state.budgets is not None:  # what rounds before may have left
        state = dataclasses.replace(state, budgets=jnp.array([2, 4], jnp.int32))

    @jax.jit
    def outcomes(target, drafter, state, params, drafts, uniforms):
        head = drafter.head(target.head)

        def one(path):
            forced = Forced(*path)
            with pytest.MonkeyPatch.context() as patch:
                for module in (slots, sampling):
                    patch.setattr(module, "purpose_key", forced.purpose_key)
                patch.setattr(sampling, "draw", forced.draw)
                patch.setattr(sampling, "uniform", lambda keys: keys)
                said = state.shaping, state.out.count
                draft = rounds.propose(
                    drafter, head, state.anchor, state.draft_cache, params, *said
                )
                record = rounds.recorded_round(
                    target, drafter, head, state, params, *limits, policy
                )[1]
            return draft.probs, draft.tokens, record, forced.own

        return jax.lax.map(one, (drafts, uniforms))

    def all_of(values):
        each = list(itertools.product(values, repeat=SLOTS))
        return np.array(list(itertools.product(each, repeat=rows)))

    blocks, tests = all_of(range(VOCAB)).astype(np.int32), all_of((ACCEPT, REJECT))
    if greedy_drafts:
        blocks = blocks[:1]  # nothing is drawn
    drafts = np.repeat(blocks, len(tests), axis=0)
    uniforms = np.tile(tests.astype(np.float32), (len(blocks), 1, 1))
    forced = (place(x, None, "batch", None) for x in (drafts, uniforms))
    q, drafts, record, own = jax.device_get(outcomes(target, drafter, state, params, *forced))
    tables = [exact(target, asked, PROMPTS[row], int(state.anchor[row])) for row in range(rows)]
    joint = 0.0
    for path in range(len(drafts)):
        parts = []
        for row in range(rows):
            verified, block = int(record.verified[path, row]), drafts[path, row].tolist()
            weight, accepted = 1.0, 0
            for slot, token in enumerate(block):
                drawn = 1.0 if q is None else float(q[path, row, slot, token])
                weight *= drawn
                if not weight:
                    break
                ratio = min(1.0, tables[row][slot][(*block[:slot], token)] / drawn)
                take = uniforms[path, row, slot] == ACCEPT
                weight *= ratio if take else 1 - ratio
                if take and slot == accepted and slot < verified:
                    accepted += 1
            if weight:
                assert accepted == record.accepted[path, row]
            parts.append(weight * spread(tables[row], block[:accepted], own[path, row]))
        joint = joint + np.multiply.outer(*parts) if rows == 2 else joint + parts[0]
    wanted = [spread(table, [], table[0]) for table in tables]
    wanted = np.multiply.outer(*wanted) if rows == 2 else wanted[0]
    assert abs(wanted.sum() - 1) < RIGHT
    return np.abs(joint - wanted).max(), set(record.verified.reshape(-1).tolist())


def exact(target, asked, prompt, anchor):
    """P(token k | prompt, anchor, tokens before), f64[V] * (k + 1), for k = 0..P."""
    tails = list(itertools.product(range(VOCAB), repeat=SLOTS))
    ids = np.array([[*prompt, anchor, *tail] for tail in tails], np.int32)
    logits = jax.jit(lambda target, ids: target.head.logits(target(ids).hidden))(
        target, place(ids, "batch", None)
    )
    logits = np.asarray(logits)[:, len(prompt) :]
    tables = [np.zeros((VOCAB,) * (k + 1)) for k in range(SLOTS + 1)]
    for row, tail in zip(logits, tails, strict=True):
        for k in range(SLOTS + 1):
            said = [anchor, *tail[:k]]
            tables[k][tail[:k]] = asked.distribution(row[k], prompt, said, (-1,))
    return tables


def spread(table, accepted, own):
    """P of all sequences of P+1 tokens that begin with `accepted` and then one of `own`."""
    joint = np.asarray(own, np.float64)
    for k in range(len(accepted) + 1, SLOTS + 1):
        joint = joint[..., None] * table[k][tuple(accepted)]
    whole = np.zeros((VOCAB,) * (SLOTS + 1))
    whole[tuple(accepted)] = joint
    return whole.reshape(-1)


def costs(first, later):
    """By tokens of a pass: two rows' anchors, a first draft, and each one after it."""
    seconds = [1, 1] + [1 + first + later * more for more in range(4)]
    return CostTable.make(range(1, 7), 1 / np.array(seconds))


HARD = Asked(0.9, 0, 0.95, 0.02, 1.4, 0.3, 0.5, ((0, 0.7),))
HARDWARE = Policy("hardware", costs=costs(0.3, 0.5))


def test_hardware_aware_rounds_with_every_option(monkeypatch, one):
    off, lengths = error(monkeypatch, HARD, HARDWARE)
    assert off < RIGHT
    assert len(lengths) > 1  # drafts change how many are verified


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        None,
        Policy("fixed", 1),
        Policy("threshold", threshold=0.5),
        Policy("load", threshold=0.3, highest=0.9),
        Policy("asynchronous", costs=costs(0.2, 0.1)),
    ],
    ids=lambda policy: policy.kind if policy else "all",
)
@pytest.mark.parametrize("asked", [Asked(), HARD], ids=["plain", "hard"])
def test_rounds_of_every_policy(monkeypatch, one, policy, asked):
    assert error(monkeypatch, asked, policy)[0] < RIGHT


@pytest.mark.slow
def test_chosen_drafts(monkeypatch, one):
    assert error(monkeypatch, HARD, HARDWARE, greedy_drafts=True)[0] < RIGHT


@pytest.mark.slow
def test_a_search_past_the_early_stop_is_caught(monkeypatch, one):
    def searching(survival, rows, table):
        return schedulers.asynchronous(survival, survival, rows, table)

    monkeypatch.setattr(schedulers, "hardware_aware", searching)
    found = [
        error(monkeypatch, HARD, Policy("hardware", costs=costs(first, 0.01)))[0]
        for first in (0.4, 0.6, 0.8)
    ]
    assert max(found) > WRONG
