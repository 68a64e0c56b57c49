"""The engine in a thread of its own, and the way between it and the event loop of the server."""

import asyncio
import contextlib
import copy
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable

import jax

from dspark_jax.core.errors import UserError
from dspark_jax.data.chat import render_next
from dspark_jax.data.opened import OpenedTarget
from dspark_jax.decoding.engine import Engine, Finish, QueueFull, Request, Ticket, Update
from dspark_jax.serving.asks import ApiError, Ask

_LOG = logging.getLogger("dspark_jax.serve")


class Service:
    """Answers asks until it is stopped.

    The engine's thread makes the engine, as the mesh is a thread's own, and is the only one to
    touch it apart from `submit` and `cancel`.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        target: OpenedTarget,
        mesh: jax.sharding.Mesh,
        name: str,
        max_tokens: int,
    ):
        """
        Args:
          name: of the model, as clients have to call it.
          max_tokens: that an answer may have at most.
        """
        self.name, self.max_tokens = name, max_tokens
        self._target, self._mesh, self._make = target, mesh, make_engine
        # Rust tokenizers may not encode and decode at the same time: one for prompts.
        self._encoder, self._encoding = copy.deepcopy(target.tokenizer), threading.Lock()
        self._wake, self._ready = threading.Event(), threading.Event()
        self._stopping = self._draining = False
        self._tickets: set[Ticket] = set()
        self.failure: str | None = None
        self.engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- Life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns once requests can be answered.

        Raises:
          UserError or whatever making the engine raises.
        """
        self._thread.start()
        self._ready.wait()
        if self.engine is None:
            raise self._error

    def drain(self, seconds: float) -> None:
        """Takes no more requests; those here have so many seconds to finish. Returns at once."""
        if not self._draining:
            self._draining = True
            timer = threading.Timer(seconds, self._cancel_all)
            timer.daemon = True
            timer.start()

    def stop(self) -> None:
        """Ends the thread, with whatever it still does."""
        self._draining = self._stopping = True
        self._cancel_all()
        self._wake.set()
        self._thread.join(timeout=60)

    @property
    def healthy(self) -> bool:
        """Whether requests are taken and answered."""
        return self.failure is None and not self._draining and self._thread.is_alive()

    def _cancel_all(self) -> None:
        for ticket in list(self._tickets):
            ticket.cancel()
        self._wake.set()

    def _run(self) -> None:
        try:
            with jax.set_mesh(self._mesh):
                try:
                    self.engine = self._make()
                except BaseException as error:
                    self._error = error
                    return
                finally:
                    self._ready.set()
                while not self._stopping:
                    if not self.engine.step():
                        self._wake.wait(timeout=1.0)
                        self._wake.clear()
                self.engine.step()  # tells those that were cancelled
        except Exception as error:  # a fault of this code or of the device: nobody may hang
            _LOG.exception("the engine failed")
            self.failure = f"{type(error).__name__}: {error}"
            for ticket in list(self._tickets):
                if ticket.finish is None:
                    ticket.finish = Finish.ERROR
                    ticket.listen(Update("", (), Finish.ERROR))

    # ---- Requests ------------------------------------------------------------------------------

    async def begin(self, ask: Ask) -> "Answering":
        """Queues an ask.

        Raises:
          ApiError: it cannot be answered, now or ever.
        """
        if ask.model != self.name:
            message = f"there is no model {ask.model!r} here; this server has {self.name!r}"
            raise ApiError(404, message, "model", "model_not_found")
        self._check_health()
        ids = await asyncio.to_thread(self._ids, ask)
        room = self.engine.options.max_context - len(ids)
        limit = min(room, self.max_tokens) if ask.max_tokens is None else ask.max_tokens
        if limit > room or room < 1:
            more = "" if ask.max_tokens is None else f" and max_tokens {ask.max_tokens}"
            raise ApiError(
                400,
                f"{len(ids)} prompt tokens{more} are more than this server's context of "
                f"{self.engine.options.max_context} tokens",
                "messages" if ask.chat else "prompt",
                "context_length_exceeded",
            )
        if limit > self.max_tokens:
            raise ApiError(
                400,
                f"max_tokens is {limit}, this server gives at most {self.max_tokens}",
                "max_tokens",
            )
        answering = Answering(asyncio.get_running_loop(), len(ids))
        try:
            request = self._request(ask, ids, limit)
            ticket = self.engine.submit(request, answering.listen)
        except QueueFull as error:
            raise ApiError(429, f"{error}; try again later", None, "queue_full") from None
        except UserError as error:
            raise ApiError(400, str(error)) from None
        answering.ticket = ticket
        self._tickets.add(ticket)
        answering.on_end = lambda: self._tickets.discard(ticket)
        if ticket.finish is not None:  # before anybody was told
            self._tickets.discard(ticket)
        self._check_health(ticket)
        self._wake.set()
        return answering

    def _check_health(self, ticket: Ticket | None = None) -> None:
        """Also after the ticket is known to all, for an engine that failed in between."""
        if self.healthy:
            return
        if ticket is not None:
            ticket.cancel()
            self._tickets.discard(ticket)
        why = "the server is stopping" if self.failure is None else "the engine has failed"
        raise ApiError(503, why, None, "unavailable")

    def _request(self, ask: Ask, ids: tuple[int, ...], limit: int) -> Request:
        sampling = ask.sampling
        deadline = None if ask.timeout is None else time.monotonic() + ask.timeout
        return Request(
            prompt=ids,
            max_tokens=limit,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            min_tokens=sampling.min_tokens,
            logit_bias=sampling.logit_bias,
            stop=ask.stop,
            deadline=deadline,
        )

    def _ids(self, ask: Ask) -> tuple[int, ...]:
        with self._encoding:
            try:
                if ask.chat:
                    return tuple(render_next(self._encoder, ask.prompt, row="messages").ids)
                if isinstance(ask.prompt, str):
                    found = self._encoder(ask.prompt)["input_ids"]
                    if not found:
                        raise ApiError(400, "the prompt has no tokens", "prompt")
                    return tuple(found)
            except UserError as error:
                raise ApiError(400, str(error), "messages") from None
        return ask.prompt


class Answering:
    """One answer on its way to a client."""

    def __init__(self, loop: asyncio.AbstractEventLoop, prompt_tokens: int):
        self._loop, self._updates = loop, asyncio.Queue()
        self.prompt_tokens = prompt_tokens
        self.ticket: Ticket | None = None
        self.on_end: Callable[[], None] = lambda: None

    def listen(self, update: Update) -> None:
        """Called from the engine's thread."""
        if update.finish is not None:
            self.on_end()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)

    async def updates(self) -> AsyncIterator[Update]:
        """All of them to the one that ends it. Leaving early cancels the request."""
        try:
            while True:
                update = await self._updates.get()
                yield update
                if update.finish is not None:
                    return
        finally:
            self.ticket.cancel()
