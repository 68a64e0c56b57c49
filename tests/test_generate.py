"""generate: the streamed text is the decoded one, and its figures are true.

pytest tests/test_generate.py
"""

import io
import json
import re

import jax
import numpy as np
import pytest
import tiny

from dspark_jax import generate
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.chat import response_text
from dspark_jax.data.conversation import Conversation, Message
from dspark_jax.data.opened import open_target
from dspark_jax.decoding.stopping import TextStream
from dspark_jax.generate import Options

NEW = 24


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run whose target stops at a token that it soon writes, for some prompts."""
    folder = tmp_path_factory.mktemp("generate")
    target = tiny.make_target(folder / "target")
    config = tiny.make_config(target, tiny.write_prompts(folder / "prompts.jsonl", 3))
    return tiny.make_run(folder / "run", config)


def ask(workdir, *texts: str, **options):
    """The answers and what was written for them."""
    conversations = [
        Conversation(f"p-{i}", "test", (Message("user", text),)) for i, text in enumerate(texts)
    ]
    out = Pieces()
    return generate.run(workdir, conversations, Options(max_new_tokens=NEW, **options), out), out


class Pieces(io.StringIO):
    """Remembers what each write added."""

    def __init__(self):
        super().__init__()
        self.pieces = []

    def write(self, text):
        self.pieces.append(text)
        return super().write(text)


FIGURES = re.compile(
    r"\[(\d+) tokens in (\d+) rounds; accepted length ([\d.]+|-); ([\d.]+) tokens/s, plain "
    r"decoding ([\d.]+) \(([\d.]+) times as fast\)(; same text as plain)?\]"
)


def test_the_text_is_streamed_and_the_figures_are_true(workdir):
    (answer,), out = ask(workdir, "sun 1?")
    assert out.getvalue().startswith(answer.text + "\n[")
    figures = FIGURES.fullmatch(out.getvalue()[len(answer.text) + 1 :].rstrip("\n"))
    count, rounds, length, fast, plain, ratio = figures.groups()[:6]
    assert (int(count), int(rounds)) == (len(answer.tokens), answer.rounds) and figures[7]
    # The first token comes with the prompt; every round adds at least one of the others.
    assert len(answer.tokens) == NEW and 1 <= answer.rounds <= NEW - 1
    assert float(length) == pytest.approx(answer.accepted_length, abs=0.01)
    assert 1 <= answer.accepted_length <= 4
    assert float(fast) == pytest.approx(NEW / answer.seconds, rel=0.01)
    assert float(plain) == pytest.approx(NEW / answer.seconds_plain, rel=0.01)
    assert float(ratio) == pytest.approx(answer.seconds_plain / answer.seconds, abs=0.01)
    assert sum(bool(piece.strip("\n")) for piece in out.pieces) > 4


def test_greedy_text_is_that_of_plain_decoding(workdir):
    answers, _ = ask(workdir, "sun 1?", "a much longer question about rain, number 2?", "x")
    plain, out = ask(
        workdir, "sun 1?", "a much longer question about rain, number 2?", "x", speculate=False
    )
    assert [a.tokens for a in answers] == [a.tokens for a in plain]
    assert all(a.equal for a in answers)
    assert all(a.rounds is None and a.equal is None for a in plain)
    assert re.search(r"\n\[24 tokens, [\d.]+ tokens/s\]\n$", out.getvalue())


@pytest.mark.slow
def test_sampling_follows_the_seed(workdir):
    def text(**options):
        (answer,), _ = ask(workdir, "sun 1?", temperature=1.0, **options)
        return answer

    first, again, other = text(seed=1), text(seed=1), text(seed=2)
    assert first.tokens == again.tokens != other.tokens
    assert first.equal is None  # another text from the same distribution
    assert first.tokens_plain <= NEW and first.seconds_plain > 0
    (narrow,), _ = ask(workdir, "sun 1?", temperature=1.0, top_k=1)
    (greedy,), _ = ask(workdir, "sun 1?")
    assert narrow.tokens == greedy.tokens


def test_a_stop_token_ends_the_answer_and_is_not_shown(workdir, tmp_path):
    (whole,), _ = ask(workdir, "sun 1?")
    stop = next(t for i, t in enumerate(whole.tokens) if i >= 3 and t not in whole.tokens[:i])
    cut = whole.tokens.index(stop) + 1
    target = tiny.make_target(tmp_path / "target")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    (answer,), _ = ask(workdir, "sun 1?", target=str(target))
    assert answer.tokens == whole.tokens[:cut]
    tokenizer = open_tokens(target)
    assert answer.text == response_text(tokenizer, answer.tokens[:-1], ())


def test_a_stop_string_ends_both_ways_of_decoding_alike(workdir):
    (whole,), _ = ask(workdir, "sun 1?")
    stop = whole.text[9:12]
    (answer,), out = ask(workdir, "sun 1?", stop=("never in it", stop))
    assert answer.text == whole.text[: whole.text.index(stop)] and answer.equal
    assert answer.tokens == whole.tokens[: len(answer.tokens)]
    assert whole.tokens_plain > len(answer.tokens) > 0
    assert out.getvalue().startswith(answer.text + "\n[") and answer.accepted_length >= 1


@pytest.mark.slow
def test_options_reach_both_ways_of_decoding(workdir):
    (whole,), _ = ask(workdir, "sun 1?")
    often = max(set(whole.tokens), key=whole.tokens.count)
    options = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.2,
        "logit_bias": ((often, -100.0),),
        "min_tokens": 3,
    }
    (answer,), _ = ask(workdir, "sun 1?", **options)
    assert answer.equal and often not in answer.tokens and answer.tokens != whole.tokens
    assert max(answer.tokens.count(token) for token in answer.tokens) < whole.tokens.count(often)
    for more in ({"min_p": 1.0}, {"min_p": 0.05, "greedy_drafts": True}):
        (sampled,), _ = ask(workdir, "sun 1?", temperature=0.9, **options, **more)
        assert often not in sampled.tokens
        assert (sampled.tokens == answer.tokens) == (more == {"min_p": 1.0})


def open_tokens(target):
    from dspark_jax.data.opened import open_tokenizer

    return open_tokenizer(target)


def test_characters_are_shown_when_they_are_whole(workdir):
    text = "Grüße, 世界 🎉!"
    with jax.set_mesh(make_mesh()):
        target = open_target(str(workdir.parent / "target"), "float32")
    ids = target.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.encode())  # a token is a byte
    stream = TextStream(target.tokenizer, target.stop_ids)
    shown = [stream.add(ids[:end]) for end in range(1, len(ids) + 1)]
    assert [piece for piece in shown if piece] == list(text) and stream.end() == ""

    stream = TextStream(target.tokenizer, target.stop_ids)
    assert stream.add(ids[:-3]) == "Grüße, 世界 "  # cut within the last picture
    assert stream.end() == "\ufffd"


@pytest.mark.slow
def test_the_mesh_changes_nothing(workdir, tmp_path):
    (one,), _ = ask(workdir, "sun 1?")
    config = tiny.make_config(
        workdir.parent / "target",
        workdir.parent / "prompts.jsonl",
        {"mesh": {"fsdp": 2, "tp": 2}},
    )
    (sharded,), _ = ask(tiny.make_run(tmp_path / "sharded", config), "sun 1?")
    assert sharded.tokens == one.tokens and sharded.rounds == one.rounds
    config = tiny.make_config(
        workdir.parent / "target",
        workdir.parent / "prompts.jsonl",
        {"mesh": {"fsdp": 64, "tp": 1}},
    )
    run = tiny.make_run(tmp_path / "elsewhere", config)
    (alone,), _ = ask(run, "sun 1?", speculate=False)
    assert alone.tokens == one.tokens


def test_a_pruned_vocabulary_changes_no_text(workdir, tmp_path):
    """Drafts are the target's ids; what cannot be drafted is said all the same."""
    folder = workdir.parent
    config = tiny.make_config(
        folder / "target", folder / "prompts.jsonl", {"drafter.vocab_size": 64}
    )
    (answer,), _ = ask(tiny.make_run(tmp_path / "run", config), "sun 1?")
    (whole,), _ = ask(workdir, "sun 1?")
    assert answer.equal and answer.tokens == whole.tokens
    assert max(answer.tokens) >= 64


def test_logits_that_are_not_finite_end_in_one_line(workdir, tmp_path):
    (answer,), _ = ask(workdir, "sun 1?")
    bad = next(t for i, t in enumerate(answer.tokens) if i >= 3 and t not in answer.tokens[:i])

    def poison(weights):
        weights["model.embed_tokens.weight"][bad] = np.nan

    target = tiny.make_target(tmp_path / "target", change=poison)
    config = tiny.make_config(target, workdir.parent / "prompts.jsonl")
    run = tiny.make_run(tmp_path / "run", config)
    for options in ({}, {"speculate": False}):
        with pytest.raises(UserError, match="NaN or infinite logits at token") as error:
            ask(run, "sun 1?", **options)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text, options, expected",
    [
        ("x" * 300, {}, r"p-0: 3\d\d prompt tokens and --max_new_tokens=24 are more than .* 256"),
        ("sun", {"step": "7"}, "no checkpoint '7'; there are best, latest, 1"),
        ("sun", {"temperature": -1.0}, "temperature is -1"),
        ("sun", {"top_p": 0.0}, "top_p is 0"),
        ("sun", {"min_tokens": 30}, "--min_tokens=30 is more than --max_new_tokens=24"),
        (
            "sun",
            {"logit_bias": ((272, 1.0),)},
            "token 272, the target has tokens 0 to 271",
        ),
        ("sun", {"stop": ("",)}, "stop strings"),
        ("sun", {"repetition_penalty": 1e-300}, "penalty is 1e-300, give 1e-06 to 1e"),
        ("sun", {"scheduler": "fixed:2", "speculate": False}, "no drafts to choose from"),
    ],
)
def test_what_cannot_be_asked(workdir, text, options, expected):
    with pytest.raises(UserError, match=expected):
        ask(workdir, text, **options)


def test_biases_of_the_command_line():
    assert generate._biases(["42:-100", "7:1.5"]) == ((42, -100.0), (7, 1.5))
    for pairs in (["abc"], ["42"], ["42:1:2"], ["x:1"], [""]):
        with pytest.raises(UserError, match="is no token:bias, as in 42:-100"):
            generate._biases(pairs)
    with pytest.raises(UserError, match="token 42 is there twice"):
        generate._biases(["42:1", "42:5"])
