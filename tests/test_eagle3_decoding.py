"""EAGLE-3 in the round that all drafters share: equal to plain decoding, counted right, lossless.

pytest tests/test_eagle3_decoding.py
"""

import functools

import jax
import numpy as np
import pytest
import test_rounds as rounds
from eagle3_reference import EAGLE3, ReferenceEagle3, with_options
from flax import nnx
from reference import Row
from test_lossless import RIGHT, Tables, emitted, probabilities
from test_rounds import CONFIG, KEPT, NEW, PROMPTS, VOCAB, Requests, plain, speculative, text

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.decoding.rounds import propose, start
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.eagle3 import Eagle3Drafter

LENGTH = 32


def make_eagle3(ids=(), block: int = 4, **options) -> Eagle3Drafter:
    """One that is often right: it attends most to the entry itself, of which it takes the token's
    embedding, and the target's text depends mostly on the last token."""
    config = DrafterConfig(
        target_layer_ids=(-1, 0), block_size=block, vocab_size=len(ids), dtype="float32", **EAGLE3
    )
    shape = with_options(DrafterShape.of(config, CONFIG), **options)
    scales = {"fc": 0.1, "layers.0.attention": 0.4, "layers": 0.12}
    drafter = rounds.filled(lambda: Eagle3Drafter(shape, rngs=nnx.Rngs(0)), 4, scales, ids)
    arrays, at = named(drafter), "layers.0.attention."
    heads, dim, size = 2, 8, CONFIG.hidden_size
    keys, copy = np.asarray(arrays[at + "k"]), np.eye(size, dtype=np.float32)
    changed = {
        "q": keys[:, None].repeat(2, 1),
        "q_norm": np.full(dim, 2, np.float32),
        "k_norm": np.full(dim, 2, np.float32),
        "v": np.concatenate([copy, 0.1 * copy], axis=1).reshape(heads, dim, 2 * size),
        "o": copy.reshape(size, heads, 1, dim).repeat(2, 2) / 2,
    }
    for name, array in changed.items():
        old = arrays[at + name]
        assert array.shape == old.shape
        arrays[at + name] = jax.device_put(array, old.sharding)
    return with_arrays(drafter, arrays)


def reference_of(target, drafter) -> ReferenceEagle3:
    weights = {name: np.asarray(x) for name, x in named(drafter).items()}
    tables = (np.asarray(x[...]) for x in (target.embed, target.lm_head))
    return ReferenceEagle3(weights, *tables, drafter.shape)


@functools.partial(jax.jit, static_argnames="taps")
def _taps(target, tokens, taps):
    return target(tokens, taps=taps).taps


def row_of(target, drafter, tokens) -> Row:
    """A row of these tokens with the target's taps; what is behind them is filler."""
    ids = np.zeros((1, LENGTH), np.int32)
    ids[0, : len(tokens)] = tokens
    taps = _taps(target, place(ids, "batch", None), drafter.config.target_layer_ids)
    ones = np.ones(LENGTH, bool)
    return Row(ids[0], ones, ones.astype(int), np.arange(LENGTH), np.asarray(taps)[0], ids)


class Replay(rounds.Replay):
    """Greedy rounds along a known text: every chain anew, in numpy, without a cache."""

    def __init__(self, target, drafter):
        self.target, self.drafter = target, drafter
        self.reference = reference_of(target, drafter)

    def proposals(self, prefix: list[int]) -> list[int]:
        row, anchor, drafts = row_of(self.target, self.drafter, prefix), len(prefix) - 1, []
        for k in range(self.drafter.config.num_proposals):
            best = self.reference.chain(row, anchor, k + 1)[k].argmax()
            drafts.append(self.reference.draft_ids[best])
            row.tokens[anchor + 1 + k] = drafts[-1]
        return drafts


@pytest.fixture(scope="module", autouse=True)
def one():
    """One device, and compilations that are quick rather than good."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(make_mesh(1, 1)):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def target(one):
    return rounds.make_target()


@pytest.mark.parametrize(
    "ids, options",
    [((), {}), (KEPT, {"norm_output": True, "norm_before_residual": True})],
    ids=["whole", "pruned"],
)
def test_greedy_is_plain_decoding_and_counts_are_those_of_a_replay(target, ids, options):
    """Prompts of three lengths in one batch, rows that accept different numbers of drafts."""
    wanted, drafter = rounds.requests(), make_eagle3(ids, **options)
    expected = plain(target, wanted)
    found = speculative(target, drafter, wanted)
    assert text(found) == text(expected)
    replay = Replay(target, drafter)
    answers = [row.tokens for row in expected]
    assert found == [replay.row(p, a, NEW)[0] for p, a in zip(PROMPTS, answers)]
    # Vacuous if nothing is ever accepted, or everything.
    assert 0 < sum(row.survived[0] for row in found) < sum(row.rounds for row in found)
    assert sum(sum(row.survived[1:]) for row in found) > 0


@pytest.mark.slow
def test_a_request_does_not_notice_its_batch(target):
    wanted, drafter = rounds.requests(temperature=0.9), make_eagle3()
    together = speculative(target, drafter, wanted)
    assert together == [speculative(target, drafter, wanted.row(i))[0] for i in range(3)]


@pytest.mark.slow
def test_any_mesh_gives_the_same_tokens_and_counts(target):
    four = {"prompts": (*PROMPTS, (2, 2)), "seeds": (7, 8, 9, 10), "limits": (12,) * 4}
    four["prompts"] = tuple(map(tuple, four["prompts"]))
    wanted = rounds.requests(temperature=0.8, **four)
    expected = speculative(target, make_eagle3(KEPT), wanted)
    with jax.set_mesh(make_mesh(4, 2)):
        assert speculative(rounds.make_target(), make_eagle3(KEPT), wanted) == expected


# Losslessness: the tables of test_lossless.py, filled with what target and drafter really answer.

SLOTS = 2


def tables_of(target, drafter, options, prefix) -> Tables:
    """Both distributions given `prefix`, which ends with the anchor, and up to two more tokens."""
    tables = Tables(VOCAB, SLOTS, 0, options, options)
    paths = tables.blocks()
    ids = np.concatenate([np.tile(prefix, (len(paths), 1)), paths], axis=1).astype(np.int32)
    logits = jax.jit(lambda target, ids: target.head.logits(target(ids).hidden))(
        target, place(ids, "batch", None)
    )
    own = np.asarray(logits)[:, len(prefix) - 1 :].reshape(VOCAB, VOCAB, SLOTS + 1, VOCAB)
    own = [own[0, 0, :1], own[:, 0, 1], own[:, :, 2].reshape(VOCAB**2, VOCAB)]
    tables.target = [probabilities(x, options) for x in own]
    reference, drafts = reference_of(target, drafter), [[], []]
    for token in range(VOCAB):
        row = row_of(target, drafter, [*prefix, token])
        first, second = reference.chain(row, len(prefix) - 1, 2)
        drafts[0] = [first]
        drafts[1].append(second)
    tables.drafter = []
    for logits in drafts:
        whole = np.zeros((len(logits), VOCAB), np.float32)
        whole[:, reference.draft_ids] = probabilities(np.array(logits), options)
        tables.drafter.append(whole)
    return tables


@pytest.mark.parametrize(
    "ids, options", [((), (1.0, 0, 1.0)), (KEPT, (0.7, 3, 0.9))], ids=["whole", "pruned+filtered"]
)
def test_every_path_adds_up_to_the_target_and_drafts_are_drawn_from_the_tables(
    target, ids, options
):
    """What `propose` says that it drew from is, draft by draft, the distribution enumerated."""
    drafter = make_eagle3(ids, block=SLOTS)
    likely = plain(target, rounds.requests())[0].tokens[0]  # so that many draw it as anchor
    tables = tables_of(target, drafter, options, [*PROMPTS[0], likely])
    own = tables.tail(0)
    for lengths in range(SLOTS + 1):
        assert np.abs(emitted(tables, lengths) - own).max() < RIGHT
    rows, (temperature, top_k, top_p) = 300, options
    wanted = Requests(
        (tuple(PROMPTS[0]),) * rows, tuple(range(rows)), (NEW,) * rows,
        temperature=temperature, top_k=top_k, top_p=top_p,
    )  # fmt: skip
    state, draft = _first(target, drafter, *wanted.arguments())
    chosen = np.asarray(state.anchor) == likely
    tokens, probs = np.asarray(draft.tokens)[chosen], np.asarray(draft.probs)[chosen]
    assert len(tokens) > 20
    np.testing.assert_allclose(probs[:, 0], tables.drafter[0].repeat(len(tokens), 0), atol=2e-6)
    np.testing.assert_allclose(probs[:, 1], tables.drafter[1][tokens[:, 0]], atol=2e-6)
    assert (np.take_along_axis(probs, tokens[..., None], 2) > 0).all()
    assert len(np.unique(tokens[:, 0])) > 1 and set(tokens.ravel()) <= set(ids or range(VOCAB))


@jax.jit
def _first(target, drafter, prompts, lengths, params, stop, limits):
    state = start(target, drafter, prompts, lengths, params, stop, limits, max_new=NEW)
    head = drafter.head(target.head)
    return state, propose(drafter, head, state.anchor, state.draft_cache, params)
