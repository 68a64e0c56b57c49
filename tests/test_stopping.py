"""Stop strings: the same end, whatever the blocks in which the tokens come.

pytest tests/test_stopping.py
"""

import numpy as np
import pytest

from dspark_jax.core.errors import UserError
from dspark_jax.decoding.stopping import TextStream, check_stops, first_stop, showable


def text_of(pieces):
    """Tokens that are pieces of text."""
    return "".join(pieces)


def one_by_one(pieces, stops, min_tokens=0):
    """Tokens kept and text, from the definition."""
    for count in range(1, len(pieces) + 1):
        text = "".join(pieces[:count])
        early = len("".join(pieces[:min_tokens]))
        ends = [
            (begin, len(stop))
            for stop in stops
            for begin in range(len(text))
            if text.startswith(stop, begin) and begin + len(stop) > early
        ]
        if ends and count > min_tokens:
            return count, text[: min(ends)[0]]
    return len(pieces), "".join(pieces)


class Pieces:
    """A tokenizer whose tokens are the pieces themselves."""

    def decode(self, ids, **options):
        return "".join(ids)


def test_a_stop_string_inside_over_and_longer_than_a_block():
    found = first_stop(["xa", "b", "c", "d"], text_of, ["ab"])
    assert (found.tokens, found.text, found.string) == (2, "x", "ab")
    assert first_stop(["xa"], text_of, ["ab"]) is None
    found = first_stop(["xa", "bc"], text_of, ["ab"], checked=1)
    assert (found.tokens, found.text) == (2, "x")
    found = first_stop(["w", "ab", "cd", "ef", "g"], text_of, ["bcdef"], checked=3)
    assert (found.tokens, found.text) == (4, "wa")
    found = first_stop(["abc"], text_of, ["c", "b"])  # the first in the text, not in the list
    assert (found.tokens, found.text, found.string) == (1, "a", "b")
    assert first_stop(["abc"], text_of, []) is None


def test_what_is_complete_within_min_tokens_does_not_count():
    pieces = ["a", "b", "a", "b", "a", "b"]
    assert first_stop(pieces, text_of, ["ab"]).tokens == 2
    found = first_stop(pieces, text_of, ["ab"], min_tokens=2)
    assert (found.tokens, found.text) == (4, "ab")
    assert first_stop(pieces, text_of, ["ab"], min_tokens=3).tokens == 4
    assert first_stop(pieces, text_of, ["ab"], min_tokens=6) is None


@pytest.mark.parametrize("block", [1, 2, 3, 5, 30])
def test_every_block_size_gives_what_single_tokens_give(block):
    rng = np.random.default_rng(block)
    stopped = 0
    for _ in range(200):
        pieces = [
            "".join(rng.choice(list("abc"), rng.integers(0, 4))) for _ in range(rng.integers(1, 12))
        ]
        stops = ["".join(rng.choice(list("abc"), rng.integers(2, 4))) for _ in range(2)]
        least = int(rng.integers(0, 4))
        stream, shown = TextStream(Pieces(), (), stops, least), ""
        count, text = one_by_one(pieces, stops, least)
        for end in range(block, len(pieces) + block, block):
            shown += stream.add(pieces[:end])
            assert text.startswith(shown)  # nothing is shown that has to be taken back
        shown += stream.end()
        assert shown == stream.text == text
        kept = stream.stop.tokens if stream.stop else len(pieces)
        assert kept == count
        stopped += stream.stop is not None
    assert 40 < stopped < 195


def test_only_what_may_still_be_a_stop_string_is_held_back():
    assert showable("hello", ["lox", "z"]) == 3
    assert showable("hello", ["oh", "llo!"]) == 2
    assert showable("hello", ["hello"]) == 5  # complete, or it would have ended the text
    assert showable("hello", []) == 5
    assert showable("hell\ufffd", ["x"]) == 4


@pytest.mark.parametrize("stops, said", [([""], "at least one"), ("ab", "a list"), ([3], "3")])
def test_bad_stop_strings_are_refused(stops, said):
    with pytest.raises(UserError, match=said):
        check_stops(stops)
