"""The loop of speculative rounds: equal to plain decoding, counted right, row by row.

    pytest tests/test_rounds.py

The target's text depends mostly on the last token, so that a random drafter, which shares its
embedding and LM head, is right about half of the time: rounds of every length occur.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.sharding import abstract, make_mesh, place
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.decoding.plain import generate_plain
from dspark_jax.decoding.rounds import generate_speculative, speculative_round, start
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.verify import Reason
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target import Target, TargetConfig

VOCAB, MASK, WIDTH, NEW = 8, 7, 8, 16
NO_STOP = (-1,)
CONFIG = TargetConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=24,
    rms_norm_eps=1e-5,
    rope=RopeConfig(100.0),
    tie_embeddings=False,
    max_positions=64,
)
KEPT = (0, 2, 4, 6)  # a pruned vocabulary: half of what the target says
PROMPTS = [[1, 2, 3], [4, 3, 2, 1, 0, 5, 6, 2], [6, 0, 5, 5]]


def filled(build, seed: int, scales: dict[str, float], ids: tuple[int, ...] = ()):
    """A module on the current mesh: norms about 1, everything else normal of the scale its name
    begins with, 0.25 otherwise; the same numbers on every mesh. `ids` of a pruned vocabulary."""
    empty = abstract(build)
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, array in named(empty).items():
        if name == "draft_ids":
            arrays[name] = jax.device_put(np.array(ids, np.int32), array.sharding)
            continue
        noise = rng.standard_normal(array.shape).astype(np.float32)
        scale = next((s for part, s in scales.items() if name.startswith(part)), 0.25)
        value = 1 + 0.1 * noise if "norm" in name else scale * noise
        arrays[name] = jax.device_put(value, array.sharding)
    return with_arrays(empty, arrays)


def make_target() -> Target:
    return filled(
        lambda: Target(CONFIG, rngs=nnx.Rngs(0)), 5, {"embed": 1.0, "lm_head": 0.6, "layers": 0.12}
    )


def make_drafter(
    head: str = "vanilla", from_anchor: bool = True, block: int = 4, ids: tuple[int, ...] = ()
) -> Drafter:
    config = DrafterConfig(
        target_layer_ids=(-1, 0),
        mask_token_id=MASK,
        block_size=block,
        num_layers=1,
        markov_head=head,
        markov_rank=0 if head == "none" else 8,
        sample_from_anchor=from_anchor,
        vocab_size=len(ids),
        dtype="float32",
    )
    shape = DrafterShape.of(config, CONFIG)
    scales = {"layers": 0.12, "markov": 0.5}
    return filled(lambda: Drafter(shape, rngs=nnx.Rngs(0)), 4, scales, ids)


@dataclasses.dataclass(frozen=True)
class Requests:
    """What `generate_*` take besides the models."""

    prompts: tuple[tuple[int, ...], ...]
    seeds: tuple[int, ...]
    limits: tuple[int, ...]
    stop: tuple[int, ...] = NO_STOP
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def arguments(self):
        rows = len(self.prompts)
        ids = np.full((rows, WIDTH), 5, np.int32)  # any valid id may pad
        for row, prompt in enumerate(self.prompts):
            ids[row, : len(prompt)] = prompt
        lengths = np.array([len(prompt) for prompt in self.prompts], np.int32)
        params = SamplingParams.make(
            rows, self.temperature, self.top_k, self.top_p, seeds=list(self.seeds)
        )
        return (
            place(ids, "batch", None),
            place(lengths, "batch"),
            jax.tree.map(lambda x: place(x, "batch"), params),
            jnp.asarray(self.stop, jnp.int32),
            place(np.array(self.limits, np.int32), "batch"),
        )

    def row(self, row: int) -> "Requests":
        fields = {name: (getattr(self, name)[row],) for name in ("prompts", "seeds", "limits")}
        return dataclasses.replace(self, **fields)


def requests(**changes) -> Requests:
    """Three prompts of different lengths; the second fills the prompt width to the last place."""
    fields = {"prompts": tuple(map(tuple, PROMPTS)), "seeds": (7, 8, 9), "limits": (NEW,) * 3}
    return Requests(**(fields | changes))


@dataclasses.dataclass(frozen=True)
class Row:
    """What one request got, as host values."""

    tokens: list[int]
    reason: int
    rounds: int = 0
    committed: int = 0
    reached: tuple[int, ...] = ()
    survived: tuple[int, ...] = ()


def plain(target, wanted: Requests, **options) -> list[Row]:
    out = generate_plain(target, *wanted.arguments(), max_new=NEW, **options)
    return rows_of(out)


def speculative(target, drafter, wanted: Requests) -> list[Row]:
    return rows_of(*generate_speculative(target, drafter, *wanted.arguments(), max_new=NEW))


def rows_of(out, stats=None) -> list[Row]:
    out, stats = jax.device_get((out, stats))
    rows = []
    for i, count in enumerate(out.count):
        assert not out.tokens[i, count:].any()  # nothing is written behind the end
        row = Row(out.tokens[i, :count].tolist(), int(out.reason[i]))
        if stats is not None:
            row = dataclasses.replace(
                row,
                rounds=int(stats.rounds[i]),
                committed=int(stats.tokens[i]),
                reached=tuple(stats.reached[i].tolist()),
                survived=tuple(stats.survived[i].tolist()),
            )
        rows.append(row)
    return rows


def text(rows: list[Row]) -> list[tuple[list[int], int]]:
    return [(row.tokens, row.reason) for row in rows]


@pytest.fixture(scope="module")
def one():
    """The mesh (1, 1)."""
    with jax.set_mesh(make_mesh(1, 1)) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def target(one):
    return make_target()


@pytest.fixture(scope="module")
def drafter(one):
    return make_drafter()


# The same decoding once more, from the definition: no cache, no batch, no loop on the device.


@jax.jit
def block_hidden(target, drafter, tokens, token, at):
    """Hidden states [1, 1, G, D] of the block with i32[1, 1] `token` at position `at` of tokens
    i32[1, S]."""
    taps = target(tokens, taps=drafter.config.target_layer_ids).taps
    positions = jnp.arange(tokens.shape[1])[None]
    context = drafter.context(taps, positions)
    return drafter.backbone(target.head, token, at, context, jnp.zeros_like(at), at)


class Replay:
    """Greedy rounds along a known text."""

    def __init__(self, target, drafter):
        self.target, self.drafter = target, drafter
        pruned = drafter.shape.pruned
        self.ids = np.asarray(drafter.draft_ids[...]) if pruned else np.arange(VOCAB)
        self.head = np.asarray(target.lm_head[...])[self.ids]
        self.w1, self.w2 = (np.asarray(w[...]) for w in (drafter.markov.w1, drafter.markov.w2))

    def proposals(self, prefix: list[int]) -> list[int]:
        """Argmax drafts after `prefix`, whose last token is the anchor; vanilla head."""
        tokens = np.zeros((1, WIDTH + NEW + 8), np.int32)
        tokens[0, : len(prefix)] = prefix
        at = len(prefix) - 1
        arrays = tokens, tokens[:, at : at + 1], np.full((1, 1), at, np.int32)
        arrays = (place(x, "batch", None) for x in arrays)
        hidden = np.asarray(block_hidden(self.target, self.drafter, *arrays))[0, 0]
        previous, drafts = prefix[-1], []
        for slot in hidden[-self.drafter.config.num_proposals :]:
            logits = self.head @ slot + self.w2 @ self.w1[previous]
            previous = int(self.ids[logits.argmax()])
            drafts.append(previous)
        return drafts

    def row(self, prompt, answer: list[int], limit: int, stop=NO_STOP) -> tuple[Row, list[list]]:
        """What a request with this plain answer must get, and the kept drafts of every round.

        Args:
          answer: plain decoding's tokens, at least as many as the request may keep.
        """
        slots = self.drafter.config.num_proposals
        reached, survived = [0] * slots, [0] * slots
        kept = answer[: 1 if limit else 0]
        rounds = committed = 0
        accepted_runs = []
        done = not limit or kept[-1] in stop or limit == 1
        while not done:
            drafts = self.proposals([*prompt, *kept])
            follows = answer[len(kept) : len(kept) + slots + 1]
            agree = 0
            while agree < min(slots, len(follows)) and drafts[agree] == follows[agree]:
                agree += 1
            emitted = follows[: agree + 1]
            ends = [i for i, token in enumerate(emitted) if token in stop]
            whole = emitted
            if ends:
                whole = emitted = emitted[: ends[0] + 1]
            emitted = emitted[: limit - len(kept)]
            kept = kept + emitted
            done = len(kept) == limit or kept[-1] in stop
            cut = len(emitted) < len(whole) or (len(follows) <= agree)
            accepted_runs.append(emitted[: min(agree, len(emitted))])
            if cut:
                continue  # the limit cut it: not counted
            rounds += 1
            committed += len(emitted)
            for k in range(slots):
                reached[k] += k < len(emitted)
                survived[k] += k < min(agree, len(emitted))
        stopped = bool(kept) and kept[-1] in stop
        reason = Reason.STOP if stopped else Reason.LENGTH
        row = Row(kept, int(reason), rounds, committed, tuple(reached), tuple(survived))
        return row, accepted_runs


@pytest.mark.parametrize(
    "head, from_anchor, ids",
    [("none", True, ()), ("vanilla", True, ()), ("gated", True, ()), ("rnn", True, ()),
     ("none", False, ()), ("vanilla", False, ()), ("rnn", False, KEPT)],
)  # fmt: skip
def test_greedy_equals_plain_for_every_head_and_layout(target, head, from_anchor, ids):
    wanted = requests()
    expected = plain(target, wanted)
    found = speculative(target, make_drafter(head, from_anchor, ids=ids), wanted)
    assert text(found) == text(expected)
    slots = 4 if from_anchor else 3
    for row in found:
        assert len(row.tokens) == NEW and len(row.reached) == slots
        assert row.rounds == row.reached[0]
        assert row.committed == row.rounds + sum(row.survived)
    # Vacuous if nothing is ever accepted, or everything.
    assert 0 < sum(row.survived[0] for row in found) < sum(row.rounds for row in found)


@pytest.mark.parametrize("ids", [(), KEPT], ids=["whole", "pruned"])
def test_counts_equal_a_replay_of_the_rounds_without_cache_or_batch(target, ids):
    wanted, drafter = requests(), make_drafter(ids=ids)
    answers = [row.tokens for row in plain(target, wanted)]
    if ids:  # some of the text can be drafted, some not
        assert {token in ids for answer in answers for token in answer} == {True, False}
    replay = Replay(target, drafter)
    expected = [replay.row(p, a, NEW)[0] for p, a in zip(PROMPTS, answers)]
    assert speculative(target, drafter, wanted) == expected
    assert len({row.rounds for row in expected}) > 1  # rows end at different times
    assert max(sum(row.survived[1:]) for row in expected) > 0  # runs of two and more


def test_a_stop_id_inside_an_accepted_run_ends_the_request_there(target, drafter):
    replay = Replay(target, drafter)
    answers = [row.tokens for row in plain(target, requests())]
    found = 0
    for prompt, answer in zip(PROMPTS, answers):
        runs = replay.row(prompt, answer, NEW)[1]
        for stop in {token for run in runs for token in run[:-1]}:  # not the last of a run
            expected, runs_with_stop = replay.row(prompt, answer, NEW, (stop,))
            inside = runs_with_stop and runs_with_stop[-1] and runs_with_stop[-1][-1] == stop
            if not inside:
                continue
            found += 1
            wanted = requests(prompts=(tuple(prompt),) * 3, stop=(stop,))
            assert text(plain(target, wanted)) == [(expected.tokens, Reason.STOP)] * 3
            assert speculative(target, drafter, wanted) == [expected] * 3
            assert expected.tokens == answer[: answer.index(stop) + 1]
    assert found


def test_stop_first_and_limits_of_0_1_and_any(target, drafter):
    wanted = requests()
    answers = [row.tokens for row in plain(target, wanted)]
    replay = Replay(target, drafter)
    # The first token of row 0 is a stop; the others end wherever they meet it.
    stop = (answers[0][0],)
    expected = [replay.row(p, a, NEW, stop)[0] for p, a in zip(PROMPTS, answers)]
    assert expected[0] == Row(answers[0][:1], Reason.STOP, 0, 0, (0,) * 4, (0,) * 4)
    assert speculative(target, drafter, requests(stop=stop)) == expected
    for limits in ((0, 1, 2), (3, 4, 5), (6, 7, 8), (NEW, 0, NEW)):
        expected = [replay.row(p, a, n)[0] for p, a, n in zip(PROMPTS, answers, limits)]
        assert [len(row.tokens) for row in expected] == list(limits)
        assert speculative(target, drafter, requests(limits=limits)) == expected
    # A stop id at the last allowed place is a stop, one place later the limit comes first.
    at = answers[1].index(answers[1][-1])
    for limit, reason in ((at + 1, Reason.STOP), (at, Reason.LENGTH)):
        wanted = requests(limits=(limit,) * 3, stop=(answers[1][at],))
        row = speculative(target, drafter, wanted)[1]
        assert (row.tokens, row.reason) == (answers[1][:limit], reason)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0, "top_k": 6, "top_p": 0.95}], ids=["greedy", "sampled"]
)
def test_a_request_does_not_notice_its_batch(target, drafter, options):
    wanted = requests(limits=(NEW, 9, NEW), **options)
    together = speculative(target, drafter, wanted)
    alone = [speculative(target, drafter, wanted.row(row))[0] for row in range(3)]
    assert together == alone
    order = [2, 0, 1]
    shuffled = dataclasses.replace(
        wanted,
        **{
            name: tuple(getattr(wanted, name)[i] for i in order)
            for name in ("prompts", "seeds", "limits")
        },
    )
    assert speculative(target, drafter, shuffled) == [together[i] for i in order]
    # Neighbours that change, row 1 that stays.
    others = dataclasses.replace(
        wanted, prompts=((6, 6), wanted.prompts[1], (0,)), seeds=(1, 8, 2), limits=(3, 9, 0)
    )
    assert speculative(target, drafter, others)[1] == together[1]
    if options:
        same_prompt = dataclasses.replace(wanted, prompts=(PROMPTS[0],) * 3, seeds=(7, 8, 7))
        rows = speculative(target, drafter, same_prompt)
        assert rows[0] == rows[2] and rows[0].tokens != rows[1].tokens


def test_requests_before_leave_nothing_and_nothing_is_compiled_again(target, drafter):
    first, second = requests(), requests(prompts=((6,), (0, 0), (1, 1, 1)), limits=(5, 3, 1))
    before = speculative(target, drafter, first)
    compiled = generate_speculative._cache_size()
    short = speculative(target, drafter, second)
    assert speculative(target, drafter, first) == before
    assert speculative(target, drafter, second) == short
    assert generate_speculative._cache_size() == compiled


_start = jax.jit(start, static_argnames="max_new")


@jax.jit
def _round(target, drafter, state, *options):
    return speculative_round(target, drafter, drafter.head(target.head), state, *options)


def test_finished_rows_are_frozen_and_stale_cache_rows_unseen(target, drafter):
    wanted = requests(limits=(2, NEW, 5))
    arguments = wanted.arguments()
    state = _start(target, drafter, *arguments, max_new=NEW)
    expected = speculative(target, drafter, wanted)

    def poisoned(cache):
        stale = jnp.arange(cache.capacity) >= cache.length[:, None]
        layers = tuple(
            dataclasses.replace(
                layer,
                k=jnp.where(stale[:, None, None, :], 1e6, layer.k),
                v=jnp.where(stale[:, None, :, None], 1e6, layer.v),
            )
            for layer in cache.layers
        )
        return dataclasses.replace(cache, layers=layers)

    ended = {}
    for _ in range(NEW + 2):
        host = jax.device_get(state)
        assert (host.target_cache.length == host.draft_cache.length).all()
        for row in range(3):
            what = jax.tree.map(
                lambda x, row=row: x[row].tolist(),
                (host.anchor, host.target_cache.length, host.out, host.stats),
            )
            if host.out.reason[row] != Reason.RUNNING:
                assert ended.setdefault(row, what) == what
        state = dataclasses.replace(
            state,
            target_cache=poisoned(state.target_cache),
            draft_cache=poisoned(state.draft_cache),
        )
        state = _round(target, drafter, state, arguments[2], *arguments[3:])
    assert set(ended) == {0, 1, 2}
    assert rows_of(state.out, state.stats) == expected


@pytest.mark.parametrize(
    "fsdp, tp, ids",
    [
        pytest.param(2, 1, (), marks=pytest.mark.slow),
        pytest.param(4, 2, (), marks=pytest.mark.slow),
        (4, 2, KEPT),
    ],
)
def test_any_mesh_gives_the_same_tokens_and_counts(target, fsdp, tp, ids):
    four = {"prompts": (*requests().prompts, (2, 2)), "seeds": (7, 8, 9, 10), "limits": (12,) * 4}
    wanted = requests(temperature=0.8, **four)
    expected = speculative(target, make_drafter(ids=ids), wanted)
    with jax.set_mesh(make_mesh(fsdp, tp)):
        assert speculative(make_target(), make_drafter(ids=ids), wanted) == expected


def exact_pairs(target, temperature: float) -> np.ndarray:
    """P(second and third token of the answer to PROMPTS[0]), f64[V, V], from one plain pass."""
    prompt = PROMPTS[0]
    ids = [[*prompt, a, b] for a in range(VOCAB) for b in range(VOCAB)]
    logits = jax.jit(lambda target, ids: target.head.logits(target(ids).hidden))(
        target, place(np.array(ids, np.int32), "batch", None)
    )
    exps = np.exp(np.asarray(logits, np.float64)[:, len(prompt) - 1 :] / temperature)
    probs = (exps / exps.sum(-1, keepdims=True)).reshape(VOCAB, VOCAB, 3, VOCAB)
    first, second, third = probs[0, 0, 0], probs[:, 0, 1], probs[:, :, 2]
    return np.einsum("a,ab,abc->bc", first, second, third)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = counts.sum() * probs
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    "ids", [(), pytest.param(KEPT, marks=pytest.mark.slow)], ids=["whole", "pruned"]
)
def test_sampled_text_has_the_targets_distribution(target, ids):
    """Pairs of tokens over thousands of seeds, against the enumerated distribution."""
    rows, temperature = 6000, 1.3
    prompts = (tuple(PROMPTS[0]),) * rows
    wanted = Requests(prompts, tuple(range(rows)), (3,) * rows, temperature=temperature)
    drafter = make_drafter(block=2, ids=ids)
    out, stats = generate_speculative(target, drafter, *wanted.arguments(), max_new=3)
    tokens, survived = jax.device_get((out.tokens, stats.survived))
    counts = np.zeros((VOCAB, VOCAB))
    np.add.at(counts, (tokens[:, 1], tokens[:, 2]), 1)
    # 63 degrees of freedom: 63 on average, and above 120 once in 50,000 times.
    assert chi_square(counts, exact_pairs(target, temperature)) < 120
    # The same counts would not pass for a temperature that is a little off.
    assert chi_square(counts, exact_pairs(target, temperature * 1.1)) > 120
    assert 0.1 < survived[:, 0].mean() < 0.95
