"""What an engine is asked and what it answers: requests, tickets to follow them, its figures."""

import dataclasses
import enum
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from dspark_jax.core.errors import UserError
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.stopping import TextStream


class QueueFull(Exception):
    """There are as many requests waiting as may; come again later."""


class Finish(enum.StrEnum):
    """Why an answer ended."""

    STOP = "stop"  # a stop id or a stop string
    LENGTH = "length"  # max_tokens
    CANCELLED = "cancelled"
    DEADLINE = "deadline"  # the request's own
    ERROR = "error"  # the target gave NaN or infinite logits


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and how to answer it."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None = of the engine's choice, another one each time
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None  # by token
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # texts that end the answer before themselves
    deadline: float | None = None  # time.monotonic() by which it has to be finished

    @property
    def shapes(self) -> bool:
        """Whether it changes logits, see `shaping`."""
        penalties = self.presence_penalty, self.frequency_penalty, self.repetition_penalty - 1
        return any(penalties) or bool(self.logit_bias) or self.min_tokens > 0


def params_of(
    requests: Sequence[Request], seeds: Sequence[int], vocab_size: int, shaped: bool = False
) -> SamplingParams:
    """The options of a batch of requests; `shaped`: as if they asked for all that shapes logits.

    Raises:
      UserError: an option out of its range.
    """
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
             "frequency_penalty", "logit_bias", "min_tokens")  # fmt: skip
    columns = {name: [getattr(request, name) for request in requests] for name in names}
    params = SamplingParams.make(len(requests), **columns, seeds=seeds, vocab_size=vocab_size)
    return dataclasses.replace(params, penalised=True, biased=True) if shaped else params


def check(request: Request, vocab_size: int, max_context: int, has_tokenizer: bool) -> None:
    """Refuses, with a UserError, a request that cannot be answered."""
    length = len(request.prompt)
    if not length:
        raise UserError("the prompt is empty")
    if not all(0 <= token < vocab_size for token in request.prompt):
        raise UserError(f"the prompt has tokens outside of the vocabulary of {vocab_size}")
    if request.max_tokens < 1:
        raise UserError(f"max_tokens is {request.max_tokens}, give at least 1")
    if length + request.max_tokens > max_context:
        raise UserError(
            f"{length} prompt tokens and max_tokens {request.max_tokens} are more than the "
            f"context of {max_context} tokens; shorten one of them"
        )
    if request.stop and not has_tokenizer:
        raise UserError("stop strings need a tokenizer")
    if request.min_tokens > request.max_tokens:
        raise UserError(
            f"min_tokens {request.min_tokens} is more than max_tokens {request.max_tokens}"
        )
    params_of([request], [request.seed], vocab_size)


@dataclasses.dataclass(frozen=True)
class Update:
    """What a round added to an answer."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish | None = None


@dataclasses.dataclass
class Counts:
    """Of one request, or of all together. tau = tokens / rounds, of rounds that drafted."""

    rounds: int = 0  # a row in a round counts once
    drafted: int = 0
    verified: int = 0
    accepted: int = 0
    tokens: int = 0  # emitted; the first of an answer comes with its prompt, before any round

    def add(self, drafted: int, verified: int, accepted: int, tokens: int) -> None:
        """One row's round."""
        self.rounds += 1
        self.drafted += drafted
        self.verified += verified
        self.accepted += accepted
        self.tokens += tokens


class Ticket:
    """A request on its way. Made and written by the engine; `cancel` may be called by anyone."""

    _numbers = itertools.count(1)

    def __init__(self, request: Request, seed: int, stream: TextStream | None, listen: Callable):
        self.id = next(self._numbers)
        self.request, self.seed, self.stream = request, seed, stream
        self.listen: Callable[[Update], None] = listen
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self.counts = Counts()
        self.wanted = True  # False once cancelled
        self.arrived = time.monotonic()
        self.started: float | None = None  # when it got its row
        self.first_token: float | None = None
        self.ended: float | None = None

    def cancel(self) -> None:
        """Ends it at the next round at the latest; a finished one stays as it is."""
        self.wanted = False

    @property
    def text(self) -> str:
        """The answer so far; what a stop string may still cut off is in it until the end."""
        return "" if self.stream is None else self.stream.text

    def refused(self, now: float) -> Finish | None:
        """Why it should not go on, whatever the model says."""
        if not self.wanted:
            return Finish.CANCELLED
        deadline = self.request.deadline
        return Finish.DEADLINE if deadline is not None and now > deadline else None

    def deliver(self, tokens: list[int], finish: Finish | None) -> Finish | None:
        """Gives the listener what a round added; returns why the answer ends here, if it does."""
        shown = ""
        if self.stream is not None and finish not in (Finish.CANCELLED, Finish.DEADLINE):
            shown = self.stream.add([*self.tokens, *tokens])
            if self.stream.stop is not None:
                tokens, finish = tokens[: self.stream.stop.tokens - len(self.tokens)], Finish.STOP
            if finish is not None:
                shown += self.stream.end()
        self.tokens += tokens
        now = time.monotonic()
        if tokens and self.first_token is None:
            self.first_token = now
        if finish is not None:
            self.finish, self.ended = finish, now
        if tokens or shown or finish is not None:
            self.listen(Update(shown, tuple(tokens), finish))
        return finish


class Waiting:
    """The queue: first come, first served; safe to use from several threads."""

    def __init__(self, limit: int):
        self.limit = limit
        self._tickets: deque[Ticket] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._tickets)

    def put(self, ticket: Ticket) -> None:
        """At the end.

        Raises:
          QueueFull: `limit` tickets wait already.
        """
        with self._lock:
            if len(self._tickets) >= self.limit:
                raise QueueFull(f"{self.limit} requests are waiting already")
            self._tickets.append(ticket)

    def take(self) -> Ticket | None:
        """The first, or None."""
        with self._lock:
            return self._tickets.popleft() if self._tickets else None

    def drop(self, now: float) -> Iterable[tuple[Ticket, Finish]]:
        """Takes out those that need not wait any longer."""
        with self._lock:
            kept, dropped = deque(), []
            for ticket in self._tickets:
                reason = ticket.refused(now)
                if reason is None:
                    kept.append(ticket)
                else:
                    dropped.append((ticket, reason))
            self._tickets = kept
        return dropped


@dataclasses.dataclass
class EngineFigures:
    """What an engine has done since it was made."""

    requests: dict[Finish, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(Finish, 0)
    )
    prompt_tokens: int = 0
    tokens: int = 0  # of answers, those of cancelled ones too
    rounds: int = 0  # of the target over all running rows
    plain_rounds: int = 0  # of these, without the drafter
    passes_tokens: int = 0  # that the target's passes were long, padding included
    busy_seconds: float = 0.0  # in rounds and prompts
    speculative: Counts = dataclasses.field(
        default_factory=Counts
    )  # over rows, rounds that drafted

    @property
    def accepted_length(self) -> float | None:
        """tau: tokens of a row in a round that drafted, the target's own included."""
        return (
            self.speculative.tokens / self.speculative.rounds if self.speculative.rounds else None
        )

    @property
    def verified_per_request(self) -> float | None:
        """Drafts of a row that a round verified, over rounds that drafted."""
        counts = self.speculative
        return counts.verified / counts.rounds if counts.rounds else None
