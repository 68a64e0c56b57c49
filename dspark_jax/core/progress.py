"""A progress bar with the time left; plain lines every ten seconds where there is no terminal."""

import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Generic, TextIO, TypeVar

from tqdm import tqdm

from dspark_jax.core.processes import is_first

T = TypeVar("T")


def progress(
    items: Iterable[T] | None = None,
    total: int | None = None,
    desc: str = "",
    unit: str = "it",
    initial: int = 0,
) -> "Progress[T]":
    """Shows how far a loop is, at what rate, and how long it will still take, on stderr.

    Either iterates (`for row in progress(rows, desc="tokenize", unit="row")`) or counts by hand:

        with progress(total=steps, desc="train", unit="step", initial=resumed_step) as bar:
            ...
            bar.note(f"loss {loss:.3f}")
            bar.update()

    Args:
        items: what to iterate over; None to count by hand with `update`.
        total: the count at the end; by default `len(items)` where that exists.
        desc: what is going on, one or two words.
        unit: the singular name of one item.
        initial: items done before this process began, as after a resume. They count as done, but
            not for the rate.
    """
    if total is None and hasattr(items, "__len__"):
        total = len(items)
    return Progress(items, total, desc, unit, initial)


class Progress(Generic[T]):
    """What `progress` returns: an iterable and a context manager.

    On a terminal a bar; elsewhere (logs of CI) a plain line at the start, about every
    `every_seconds`, and at the end. Of several processes only the first shows anything.
    """

    def __init__(
        self,
        items: Iterable[T] | None,
        total: int | None,
        desc: str,
        unit: str,
        initial: int = 0,
        stream: TextIO | None = None,
        every_seconds: float = 10.0,
    ):
        self._items = items
        self._total = total
        self._desc = desc
        self._unit = unit
        self._stream = stream or sys.stderr
        self._every_seconds = every_seconds
        self._note = ""
        self._closed = False
        self.done = initial  # items finished so far
        # The first item is left out of the rate: it includes compiling.
        self._started = self._printed_at = time.monotonic()
        self._counted_from: tuple[float, int] | None = None
        self._bar = None
        self._shown = is_first()
        if not self._shown:
            return
        if _is_terminal(self._stream):
            self._bar = tqdm(total=total, desc=desc, unit=unit, initial=initial,
                             file=self._stream, dynamic_ncols=True)  # fmt: skip
        else:
            self._print_line()

    def update(self, count: int = 1) -> None:
        """`count` more items are done."""
        self.done += count
        if self._bar is not None:
            self._bar.update(count)
            return
        now = time.monotonic()
        if self._counted_from is None:
            self._counted_from = (now, self.done)
        if now - self._printed_at >= self._every_seconds:
            self._print_line()

    def note(self, text: str) -> None:
        """Shows `text`, such as the latest loss, after the numbers from now on."""
        self._note = text
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def close(self) -> None:
        """Leaves the last state on the screen; more calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
        else:
            self._print_line()

    def __enter__(self) -> "Progress[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        if self._items is None:
            raise TypeError("progress() was given nothing to iterate over; count with update()")
        with self:
            for item in self._items:
                yield item
                self.update()

    def _print_line(self) -> None:
        if not self._shown:
            return
        self._printed_at = time.monotonic()
        print(self._line(), file=self._stream, flush=True)

    def _line(self) -> str:
        """One line such as `train: 40%, 400/1000 step, 2.1 step/s, 4:45 left, loss 1.23`."""
        parts = []
        if self._total:
            parts.append(f"{self.done / self._total:.0%}")
        parts.append(f"{self.done}{f'/{self._total}' if self._total else ''} {self._unit}")
        elapsed, rate = self._printed_at - self._started, 0.0
        if self._counted_from is not None:
            since, first = self._counted_from
            if self._printed_at > since and self.done > first:
                rate = (self.done - first) / (self._printed_at - since)
        if rate:
            slow = rate < 1
            number = 1 / rate if slow else rate
            number = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
            parts.append(f"{number} s/{self._unit}" if slow else f"{number} {self._unit}/s")
        if self._closed:
            parts.append(f"took {clock(elapsed)}")
        elif rate and self._total:
            parts.append(f"{clock((self._total - self.done) / rate)} left")
        if self._note:
            parts.append(self._note)
        return f"{self._desc + ': ' if self._desc else ''}{', '.join(parts)}"


def _is_terminal(stream: TextIO) -> bool:
    """Whether a bar can be drawn: some consoles are terminals without a width."""
    return stream.isatty() and os.get_terminal_size(stream.fileno()).columns > 0


def clock(seconds: float) -> str:
    """`seconds` as m:ss or h:mm:ss."""
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
