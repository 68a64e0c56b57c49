"""Stop strings, and the text of an answer as it may be shown while it grows.

A stop string ends an answer at the token that completes it, also in the middle of a block: tokens,
counts and text are those of decoding token by token. The text ends before the string. What may
still turn out to be part of a stop string, or of a character, is held back.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dspark_jax.core.errors import UserError
from dspark_jax.data.chat import response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Stop:
    """Where an answer ends."""

    tokens: int  # that it has, the one that completes the string the last of them
    text: str  # before the string
    string: str


def check_stops(stops: Sequence[str]) -> tuple[str, ...]:
    """The stop strings as given, or a UserError for one that is empty or no text."""
    if isinstance(stops, str):
        raise UserError(f"stop strings: {stops!r} is one string, give a list of them")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise UserError(f"stop strings: {stop!r}: give text of at least one character")
    return tuple(stops)


def first_stop(
    ids: Sequence[int],
    text_of: Callable[[Sequence[int]], str],
    stops: Sequence[str],
    *,
    checked: int = 0,
    min_tokens: int = 0,
) -> Stop | None:
    """The first token of an answer that completes a stop string.

    Of several strings that a token completes, the one that begins first ends the text; of those
    that begin together, the shortest.

    Args:
      ids: the answer so far.
      text_of: the text of any beginning of it.
      checked: so many of the ids are known to complete none.
      min_tokens: what is complete within so many tokens does not count.
    """
    known = max(checked, min_tokens)
    if not stops or len(ids) <= known:
        return None
    seen = len(whole_characters(text_of(ids[:known])))
    if _match(whole_characters(text_of(ids)), stops, seen) is None:
        return None
    for count in range(known + 1, len(ids) + 1):
        text = whole_characters(text_of(ids[:count]))
        match = _match(text, stops, seen)
        if match is not None:
            return Stop(count, text[: match[0]], match[1])
    return None


def showable(text: str, stops: Sequence[str]) -> int:
    """How many characters of a growing text no stop string can take back any more."""
    text = whole_characters(text)
    held = 0
    for stop in stops:
        longest = min(len(stop) - 1, len(text))
        held = max(held, next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0))
    return len(text) - held


def whole_characters(text: str) -> str:
    """Without the end of a cut character, which is decoded as replacement characters."""
    return text.rstrip("\ufffd")


def _match(text: str, stops: Sequence[str], seen: int) -> tuple[int, str] | None:
    """Where a stop string begins that ends after the first `seen` characters, and which."""
    found = [(text.find(stop, max(0, seen - len(stop) + 1)), len(stop), stop) for stop in stops]
    found = [one for one in found if one[0] >= 0]
    if not found:
        return None
    begin, _, stop = min(found)
    return begin, stop


class TextStream:
    """The text of one growing answer, piece by piece."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        end_ids: Sequence[int],
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ):
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self._stops, self._min_tokens = check_stops(stops), min_tokens
        self._checked = self._shown = 0
        self.text = ""
        self.stop: Stop | None = None

    def add(self, ids: Sequence[int]) -> str:
        """What may be shown now that the whole answer so far is `ids`; nothing after a stop."""
        if self.stop is not None:
            return ""
        self.stop = first_stop(
            ids, self._text_of, self._stops, checked=self._checked, min_tokens=self._min_tokens
        )
        if self.stop is not None:
            self.text = self.stop.text
            return self._upto(len(self.text))
        self._checked = len(ids)
        self.text = self._text_of(ids)
        return self._upto(showable(self.text, self._stops))

    def end(self) -> str:
        """What was held back, once there is no more."""
        return self._upto(len(self.text))

    def _text_of(self, ids: Sequence[int]) -> str:
        return response_text(self._tokenizer, ids, self._end_ids)

    def _upto(self, end: int) -> str:
        piece = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece
