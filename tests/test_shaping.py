"""Penalties, logit bias and min_tokens inside a block: as if its tokens had come one at a time.

    pytest tests/test_shaping.py

Against plain loops over single tokens; losslessness by the enumeration of tests/test_lossless.py
for every option and both ways to draft, and with real models on a vocabulary of middle size.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_lossless import RIGHT, WRONG, Tables, error
from test_rounds import CONFIG, KEPT, NEW, PROMPTS, filled, make_drafter, one, target
from test_rounds import requests as three
from test_sampling import reference

from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.decoding import verify
from dspark_jax.decoding.plain import generate_plain
from dspark_jax.decoding.rounds import generate_speculative, start
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.shaping import begin_shaping
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.target import Target

__all__ = ["one", "target"]  # fixtures


@dataclasses.dataclass(frozen=True)
class Asked:
    """The options of one request, as `SamplingParams.make` takes them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    def params(self, rows: int, vocab: int, **more) -> SamplingParams:
        fields = dataclasses.asdict(self) | {"logit_bias": dict(self.logit_bias)}
        return SamplingParams.make(rows, **fields, vocab_size=vocab, **({"seeds": 0} | more))

    def distribution(self, logits, prompt, output, stops) -> np.ndarray:
        """Of the token after `prompt` and `output`, by loops in float64."""
        shaped = np.array(logits, np.float64)
        for token, bias in self.logit_bias:
            shaped[token] += bias
        for token in range(len(shaped)):
            if token in stops and len(output) < self.min_tokens:
                shaped[token] = -np.inf
            if token in prompt or token in output:
                up = shaped[token] > 0
                shaped[token] *= 1 / self.repetition_penalty if up else self.repetition_penalty
            shaped[token] -= self.frequency_penalty * output.count(token)
            shaped[token] -= self.presence_penalty * (token in output)
        kept = shaped
        if self.temperature and self.min_p:
            low = shaped.max() + self.temperature * np.log(self.min_p)
            kept = np.where(shaped >= low, shaped, -np.inf)
        probs = reference(kept, self.temperature, self.top_k, self.top_p)
        return probs


OPTIONS = {
    "plain": Asked(),
    "greedy": Asked(0.0, frequency_penalty=0.9, presence_penalty=-0.4),
    "min_p": Asked(0.7, min_p=0.3),
    "filters": Asked(1.3, top_k=3, top_p=0.9, min_p=0.05),
    "repetition": Asked(repetition_penalty=1.7),
    "rewarded": Asked(repetition_penalty=0.6, frequency_penalty=-0.5),
    "presence": Asked(0.8, presence_penalty=1.1),
    "frequency": Asked(frequency_penalty=1.3),
    "bias": Asked(logit_bias=((0, 2.5), (2, -1.0))),
    "banned": Asked(logit_bias=((1, -100.0),)),
    "min_tokens": Asked(min_tokens=5),
    "all": Asked(0.8, 3, 0.95, 0.02, 1.3, 0.4, 0.7, ((0, 1.0),), 5),
}


def said_before(params, vocab, prompt, output, stops=(1,)):
    """The shaping of identical rows with this prompt and output, and how much was said."""
    rows = len(params.seed)
    shape = begin_shaping(
        params,
        jnp.asarray([[*prompt, 0]] * rows, jnp.int32),  # padded with a token that must not count
        jnp.full(rows, len(prompt), jnp.int32),
        jnp.asarray(stops, jnp.int32),
        vocab,
    )
    if shape is not None and output:
        shape = shape.said(
            jnp.asarray([[*output, 0]] * rows, jnp.int32), jnp.full(rows, len(output))
        )
    return shape, jnp.full(rows, len(output), jnp.int32)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_block_is_shaped_as_its_tokens_one_by_one(name):
    asked, vocab, width, stops = OPTIONS[name], 6, 4, (1, 4)
    rng = np.random.default_rng(0)
    rows = 40
    params = asked.params(rows, vocab)
    prompt, output = [2, 2, 5], [3, 2, 3]
    shape, emitted = said_before(params, vocab, prompt, output, stops)
    logits = (rng.normal(size=(rows, width, vocab)) * 2).astype(np.float32)
    drafts = rng.integers(0, vocab, (rows, width - 1)).astype(np.int32)
    shaped = logits
    if shape is None:
        assert name in ("plain", "min_p", "filters")
    else:
        shaped = shape.logits(jnp.asarray(logits), params, emitted, jnp.asarray(drafts))
    got = np.asarray(params.distribution(jnp.asarray(shaped)))
    for row in range(rows):
        for slot in range(width):
            before = [*output, *drafts[row, :slot].tolist()]
            wanted = asked.distribution(logits[row, slot], prompt, before, stops)
            np.testing.assert_allclose(got[row, slot], wanted, atol=2e-6, err_msg=f"{row} {slot}")
    if shape is not None:  # the drafter's way: one token at a time
        for slot in range(width):
            step = shape.logits(logits[:, slot : slot + 1], params, emitted + slot)
            np.testing.assert_allclose(step[:, 0], shaped[:, slot], atol=1e-5)
            if slot < width - 1:
                shape = shape.said(drafts[:, slot : slot + 1], jnp.ones(rows, jnp.int32))


def test_constant_logits_with_a_frequency_penalty_alternate():
    params = SamplingParams.make(1, 0.0, frequency_penalty=0.2)
    logits = jnp.asarray([[[3.0, 2.9, 0.0]] * 4])
    shape, emitted = said_before(params, 3, [0, 0], [])  # the prompt does not count
    best = jnp.argmax(shape.logits(logits, params, emitted, jnp.array([[0, 1, 0]])), axis=-1)
    np.testing.assert_array_equal(best, [[0, 1, 0, 1]])
    blind = jnp.argmax(shape.logits(logits, params, emitted, jnp.array([[2, 2, 2]])), axis=-1)
    np.testing.assert_array_equal(blind, [[0, 0, 0, 0]])


def test_only_kept_tokens_are_counted_row_by_row():
    params = SamplingParams.make(3, presence_penalty=1.0, seeds=0)
    shape, _ = said_before(params, 4, [3], [])
    shape = shape.said(jnp.array([[1, 1, 2], [0, 1, 2], [2, 2, 2]]), jnp.array([2, 0, 3]))
    np.testing.assert_array_equal(shape.output, [[0, 2, 0, 0], [0, 0, 0, 0], [0, 0, 3, 0]])
    np.testing.assert_array_equal(shape.prompt, [[False, False, False, True]] * 3)
    narrow = shape.columns(jnp.array([1, 3]))
    np.testing.assert_array_equal(narrow.output, [[2, 0], [0, 0], [0, 0]])
    assert narrow.bias is None and narrow.stops is None


# Enumerated.


class Shaped(Tables):
    """Tables of a request with options: the target's by loops, the drafter's as it drafts."""

    def __init__(self, asked, greedy_drafts, seed, vocab=3, slots=2):
        super().__init__(vocab, slots, seed, (1.0, 0, 1.0), (1.0, 0, 1.0))
        self.asked, self.stops = asked, (1,)
        self.prompt, self.output = [0, 2], [2]
        self.target = [
            np.array(
                [
                    asked.distribution(row, self.prompt, [*self.output, *prefix], self.stops)
                    for prefix, row in zip(
                        itertools.product(range(vocab), repeat=k), logits, strict=True
                    )
                ],
                np.float32,
            )
            for k, logits in enumerate(self.target_logits)
        ]
        self.params = asked.params(vocab**slots, vocab, greedy_drafts=greedy_drafts)
        self.drafter = self.as_drafted()

    def shape(self):
        return said_before(self.params, self.vocab, self.prompt, self.output, self.stops)

    def tables_of(self, rows):
        """f32[V**G, W, V], a row for each block, by prefix; which must be all they depend on."""
        tables = []
        for k in range(rows.shape[1]):
            groups = rows[:, k].reshape(self.vocab**k, -1, self.vocab)
            np.testing.assert_array_equal(groups, np.broadcast_to(groups[:, :1], groups.shape))
            tables.append(groups[:, 0])
        return tables

    def as_verified(self, counted=True):
        """The target's tables from one pass over every block; not `counted` ignores its drafts."""
        raw = self.rows([np.float32(x) for x in self.target_logits], self.slots + 1)
        shape, emitted = self.shape()
        if shape is not None:
            drafts = self.blocks() if counted else np.full_like(self.blocks(), -1)
            raw = shape.logits(raw, self.params, emitted, jnp.asarray(drafts))
        return self.tables_of(np.asarray(self.params.distribution(jnp.asarray(raw))))

    def as_drafted(self):
        raw = self.rows([np.float32(x) for x in self.draft_logits], self.slots)
        shape, emitted = self.shape()
        rows = []
        for slot in range(self.slots):
            logits = jnp.asarray(raw[:, slot])
            if shape is not None:
                logits = shape.logits(logits[:, None], self.params, emitted + slot)[:, 0]
                token = jnp.asarray(self.blocks()[:, slot])[:, None]
                shape = shape.said(token, jnp.ones(len(raw), jnp.int32))
            probs = np.asarray(self.params.distribution(logits))
            if self.params.drafts_greedily:
                probs = np.eye(self.vocab, dtype=np.float32)[probs.argmax(axis=1)]
            rows.append(probs)
        return self.tables_of(np.stack(rows, axis=1))


@pytest.mark.parametrize("greedy_drafts", [False, True], ids=["drawn", "chosen"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_path_adds_up_to_the_target(name, greedy_drafts):
    biased = 0.0
    for seed in range(2):
        tables = Shaped(OPTIONS[name], greedy_drafts, seed)
        assert error(tables, judged=tables.as_verified()) < RIGHT
        # A drafter that ignores the options is one like any other.
        tables.drafter = [np.full_like(table, 1 / 3) for table in tables.drafter]
        assert error(tables, judged=tables.as_verified()) < RIGHT
        biased = max(biased, error(tables, judged=tables.as_verified(counted=False)))
    counts = OPTIONS[name].params(1, 3).penalised
    assert (biased > WRONG) == counts  # counting from the block on only would be seen


def test_a_chosen_draft_is_verified_as_one_of_its_own_distribution():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), (300, 3)).astype(np.float32)
    p[:50] = np.eye(4)[rng.integers(0, 4, (50, 3))]  # nothing left after a rejection
    drafts = rng.integers(0, 4, (300, 2)).astype(np.int32)
    q = np.eye(4, dtype=np.float32)[drafts]
    number = np.arange(300, dtype=np.int32)
    lengths = number % 3
    uniforms = rng.random((300, 2)).astype(np.float32)
    chosen = verify.accepted_prefix(p, drafts, None, uniforms, lengths)
    drawn = verify.accepted_prefix(p, drafts, q, uniforms, lengths)
    np.testing.assert_array_equal(chosen, drawn)
    assert set(np.asarray(chosen)) == {0, 1, 2}
    accepted = np.minimum(number // 3 % 3, lengths)
    chosen = verify.next_distribution(p, None, accepted, lengths, drafts)
    np.testing.assert_array_equal(chosen, verify.next_distribution(p, q, accepted, lengths))


# With real models.


@dataclasses.dataclass(frozen=True)
class Real:
    """What `generate_*` take besides the models, for rows of the same options."""

    asked: Asked
    greedy_drafts: bool = False
    stop: tuple[int, ...] = (-1,)
    vocab: int = CONFIG.vocab_size

    def arguments(self, base=None):
        prompts, lengths, params, _, limits = (base or three()).arguments()
        seeds = np.asarray(params.seed)
        params = self.asked.params(
            len(seeds), self.vocab, seeds=seeds.tolist(), greedy_drafts=self.greedy_drafts
        )
        params = jax.tree.map(lambda x: place(x, "batch"), params)
        return prompts, lengths, params, jnp.asarray(self.stop, jnp.int32), limits


def texts(out):
    return [row[:n].tolist() for row, n in zip(np.asarray(out.tokens), np.asarray(out.count))]


HARD = Asked(0.0, 0, 1.0, 0.0, 1.2, 0.3, 0.4, ((3, 1.0), (6, -100.0)), 6)


@pytest.mark.parametrize("ids", [KEPT, pytest.param((), marks=pytest.mark.slow)], ids=str)
def test_greedy_text_with_options_is_that_of_plain_decoding(target, ids):
    drafter = make_drafter(ids=ids)
    stop = (5,)
    case = Real(HARD, stop=stop)
    plain = generate_plain(target, *case.arguments(), max_new=NEW)
    found, stats = generate_speculative(target, drafter, *case.arguments(), max_new=NEW)
    assert texts(found) == texts(plain)
    np.testing.assert_array_equal(found.reason, plain.reason)
    for row in texts(plain):
        assert 6 not in row and stop[0] not in row[:6]
    assert np.asarray(stats.survived).sum() > 0
    # By loops: every token is the best one after those before it.
    ids = np.zeros((3, 8 + NEW), np.int32)
    for row, said in enumerate(zip(PROMPTS, texts(plain), strict=True)):
        whole = [*said[0], *said[1]]
        ids[row, : len(whole)] = whole
    logits = jax.jit(lambda target, ids: target.head.logits(target(ids).hidden))(
        target, place(ids, "batch", None)
    )
    for row, (prompt, said) in enumerate(zip(PROMPTS, texts(plain), strict=True)):
        after = np.asarray(logits)[row, len(prompt) - 1 :]
        for k, token in enumerate(said):
            assert HARD.distribution(after[k], prompt, said[:k], stop).argmax() == token


@pytest.mark.slow
def test_any_mesh_gives_the_same_text(target):
    four = {"prompts": (*map(tuple, PROMPTS), (2, 2)), "seeds": (7, 8, 9, 10), "limits": (9,) * 4}
    asked = dataclasses.replace(HARD, temperature=0.9, min_p=0.05)

    def run(target, drafter):
        arguments = Real(asked).arguments(three(**four))
        out, stats = generate_speculative(target, drafter, *arguments, max_new=NEW)
        return texts(out), np.asarray(stats.survived).tolist()

    expected = run(target, make_drafter(ids=KEPT))
    with jax.set_mesh(make_mesh(4, 2)):
        again = filled(
            lambda: Target(CONFIG, rngs=nnx.Rngs(0)),
            5,
            {"embed": 1.0, "lm_head": 0.6, "layers": 0.12},
        )
        assert run(again, make_drafter(ids=KEPT)) == expected


def test_nothing_is_held_or_compiled_for_what_nobody_asked(target):
    drafter = make_drafter()
    for asked, held in (
        (Asked(0.0, logit_bias=()), None),
        (Asked(0.7, 3, 0.9, 0.1), None),
        (Asked(min_tokens=1), {"bias", "stops"}),
        (Asked(presence_penalty=1.0), {"prompt", "output"}),
    ):
        shape = jax.eval_shape(
            lambda *args: start(target, drafter, *args, max_new=NEW), *Real(asked).arguments()
        ).shaping
        if held is None:
            assert shape is None
        else:
            assert {f.name for f in dataclasses.fields(shape) if getattr(shape, f.name)} == held


@pytest.mark.parametrize(
    "greedy_drafts", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["drawn", "chosen"]
)
def test_sampled_text_on_a_vocabulary_of_middle_size(one, greedy_drafts):
    """The second and third token, which rounds decide, over thousands of seeds."""
    vocab, rows, prompt = 48, 6000, [1, 2, 3]
    config = dataclasses.replace(CONFIG, vocab_size=vocab)
    scales = {"embed": 1.0, "lm_head": 0.6, "layers": 0.12}
    target = filled(lambda: Target(config, rngs=nnx.Rngs(0)), 5, scales)
    options = DrafterConfig(
        target_layer_ids=(-1, 0), mask_token_id=vocab - 1, block_size=2, num_layers=1,
        markov_rank=8, dtype="float32",
    )  # fmt: skip
    shape = DrafterShape.of(options, config)
    drafter = filled(lambda: Drafter(shape, rngs=nnx.Rngs(0)), 4, {"layers": 0.12, "markov": 0.5})
    asked = Asked(1.1, 0, 0.97, 0.01, 1.5, 0.5, 0.9, ((7, 3.0), (9, -3.0)), 2)
    case = Real(asked, greedy_drafts, stop=(7,), vocab=vocab)
    many = three(prompts=(tuple(prompt),) * rows, seeds=tuple(range(rows)), limits=(3,) * rows)
    out, stats = generate_speculative(target, drafter, *case.arguments(many), max_new=3)
    tokens, count = np.asarray(out.tokens), np.asarray(out.count)

    ids = np.array([[*prompt, a, b] for a in range(vocab) for b in range(vocab)], np.int32)
    logits = jax.jit(lambda target, ids: target.head.logits(target(ids).hidden))(
        target, place(ids, "batch", None)
    )
    logits = np.asarray(logits).reshape(vocab, vocab, -1, vocab)[:, :, len(prompt) - 1 :]

    def exact(asked):
        joint = np.zeros((vocab, vocab))
        first = asked.distribution(logits[0, 0, 0], prompt, [], (7,))
        for a in first.nonzero()[0]:
            second = asked.distribution(logits[a, 0, 1], prompt, [a], (7,))
            for b in second.nonzero()[0]:
                third = asked.distribution(logits[a, b, 2], prompt, [a, b], (7,))
                joint[b] += first[a] * second[b] * third
        return joint.reshape(-1)

    assert (count == 3).all()  # the stop id cannot come before the third
    counts = np.bincount(tokens[:, 1] * vocab + tokens[:, 2], minlength=vocab * vocab)

    def surprise(asked):
        wanted = rows * exact(asked)
        assert not counts[wanted == 0].any() or asked is not case.asked
        rare = wanted < 5
        got = np.append(counts[~rare], counts[rare].sum())
        wanted = np.append(wanted[~rare], wanted[rare].sum())
        assert len(got) > 100
        return (((got - wanted) ** 2 / wanted).sum() - len(got)) / np.sqrt(2 * len(got))

    assert surprise(asked) < 4
    assert surprise(dataclasses.replace(asked, repetition_penalty=1.2)) > 8
    assert surprise(dataclasses.replace(asked, temperature=1.4)) > 8
    assert 0.05 < np.asarray(stats.survived)[:, 0].mean() < 0.95


@pytest.mark.parametrize(
    "options, words",
    [
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"presence_penalty": [0, 2.5]}, "presence_penalty is 2.5 in row 1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {5: 1.0}}, "token 5 in row 0, the target has tokens 0 to 4"),
        ({"logit_bias": {-1: 1.0}}, "token -1"),
        ({"logit_bias": [None, {2: 200}]}, "token 2 is 200 in row 1"),
        ({"logit_bias": [None]}, "for 1 rows"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(UserError, match=words) as refused:
        SamplingParams.make(2, **options, vocab_size=5)
    assert "\n" not in str(refused.value)
