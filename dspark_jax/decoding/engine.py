"""Continuous batching: requests join and leave the rows of one batch between rounds.

R rows of fixed capacity live on the device (decoding/flat.py). `Engine.step` lets requests into
free rows, runs one round of all rows and hands out what it gave; whoever owns the engine calls it
in a loop, from one thread. All work per token is in the round's compiled programs; the host reads a
handful of small arrays once per round and turns them into text.

A request's text depends on nothing but the request at temperature 0, whatever the policy, its
neighbours, its row and what the row held before. Above 0 that holds where the policy verifies the
same lengths (fixed, off); a policy that looks at the load decides which random number draws a
token, and so only the distribution of the text is fixed.
"""

import dataclasses
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import RULES, place
from dspark_jax.decoding.flat import draft_rows, empty_rows, flat_round, join, shaped_rows
from dspark_jax.decoding.requests import (
    EngineFigures,
    Finish,
    QueueFull,
    Request,
    Ticket,
    Update,
    Waiting,
    check,
    params_of,
)
from dspark_jax.decoding.rounds import draft_head
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.stopping import TextStream
from dspark_jax.decoding.verify import Reason
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.models.target import Target
from dspark_jax.scheduling.policy import Policy, default_sizes, size_for
from dspark_jax.scheduling.schedulers import Switch, load, switched

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Engine", "EngineOptions", "Finish", "QueueFull", "Request", "Ticket", "Update"]

SHORTEST_PROMPT = 32  # prompts are padded to the next power of two from here
_ENDS = {Reason.STOP: Finish.STOP, Reason.LENGTH: Finish.LENGTH, Reason.ERROR: Finish.ERROR}


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Sizes and limits."""

    rows: int = 8  # requests answered at a time
    max_context: int = 1024  # prompt and answer together
    queue_limit: int = 64  # requests waiting for a row
    joins_per_step: int = 2  # prompts between two rounds; running answers wait for them
    sizes: tuple[int, ...] = ()  # of the target's pass, in tokens; () = `policy.default_sizes`

    def check(self, max_positions: int) -> None:
        """Refuses, with a UserError, sizes that no target of so many positions can have."""
        for name in ("rows", "joins_per_step", "queue_limit"):
            if getattr(self, name) < 1:
                raise UserError(f"engine: {name} is {getattr(self, name)}, give at least 1")
        if not 2 <= self.max_context <= max_positions:
            raise UserError(
                f"engine: max_context {self.max_context}: must be 2 to the target's "
                f"{max_positions} positions"
            )


class Engine:
    """Answers requests with a target and, if there is one, its drafter.

    `submit` and `Ticket.cancel` may be called from any thread, everything else from one.
    """

    def __init__(
        self,
        target: Target,
        drafter: AnyDrafter | None,
        stop_ids: tuple[int, ...],
        options: EngineOptions,
        policy: Policy,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ):
        """
        Args:
          stop_ids: tokens that end an answer.
          tokenizer: for texts and stop strings; None answers in tokens only.

        Raises:
          UserError: sizes that do not fit, or a policy that this drafter cannot follow.
        """
        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and mesh.shape[RULES["batch"]] > 1:
            raise UserError(
                "the engine spreads one batch over tp only: set mesh.fsdp to 1 and start one "
                "engine for each group of devices"
            )
        options.check(target.config.max_positions)
        self._drafts = drafter is not None and policy.drafts
        self.proposals = drafter.config.num_proposals if self._drafts else 0
        if policy.drafts:
            if drafter is None:
                raise UserError(f"policy {policy.kind} without a drafter: use off")
            has_confidence = getattr(drafter.config, "confidence_head", False)
            policy.check(has_confidence and hasattr(drafter, "confidence"), self.proposals)
        self.options, self.policy = options, policy
        self.sizes = options.sizes or default_sizes(options.rows, self.proposals)
        most = options.rows * (1 + self.proposals)
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[-1] != most:
            raise UserError(f"engine: sizes {self.sizes} must rise and end with {most}")
        self.figures = EngineFigures()
        self.waiting = Waiting(options.queue_limit)
        self._models = target, drafter if self._drafts else None
        self._tokenizer, self._stop_ids = tokenizer, tuple(stop_ids)
        self._vocab = target.config.vocab_size
        self._stop_array = jnp.asarray(stop_ids or (-1,), jnp.int32)
        self._head = draft_head(*self._models) if self._drafts else None
        # A block is written behind the last committed token, also where only its start is kept.
        capacity = options.max_context + self.proposals + 1
        self._capacity = capacity
        self._rows = empty_rows(*self._models, rows=options.rows, capacity=capacity)
        self._tickets: list[Ticket | None] = [None] * options.rows
        self._params: SamplingParams | None = None
        self._switch = Switch.start(max(self.proposals, 1))
        self._speculating = self._drafts
        self._budgets = [0, 0]  # for this round and the next

    # ---- From any thread -----------------------------------------------------------------------

    def submit(
        self, request: Request, listen: Callable[[Update], None] = lambda update: None
    ) -> Ticket:
        """Queues a request; `listen` is called with every update, from the engine's thread.

        Raises:
          UserError: a request that cannot be answered.
          QueueFull: too many are waiting.
        """
        has_text = self._tokenizer is not None
        check(request, self._vocab, self.options.max_context, has_text)
        seed = secrets.randbits(32) if request.seed is None else request.seed
        stream = None
        if has_text:
            stops = request.stop, request.min_tokens
            stream = TextStream(self._tokenizer, self._stop_ids, *stops)
        ticket = Ticket(request, seed, stream, listen)
        self.waiting.put(ticket)
        return ticket

    # ---- The engine's thread -------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Rows that answer a request."""
        return sum(ticket is not None for ticket in self._tickets)

    @property
    def speculating(self) -> bool:
        """Whether the next round drafts."""
        return self._speculating

    def warm_up(self) -> None:
        """Compiles what requests will need, on free rows, which stay free.

        Every size of the pass and every width of prompts, greedy and sampled; filters (top-k,
        top-p, min-p) and what shapes logits are compiled when a request first asks for them.
        """
        nobody = place(np.zeros(self.options.rows, bool), "batch")
        none = place(np.zeros(self.options.rows, np.int32), "batch")
        widths, width = [], SHORTEST_PROMPT
        while width < 2 * self.options.max_context:
            widths.append(min(width, self.options.max_context))
            width *= 2
        plain = [(size, False) for size in self.sizes if size <= self.options.rows]
        drafting = [(size, True) for size in self.sizes if self._drafts]
        cases = [(temperature, case) for temperature in (0.0, 1.0) for case in plain + drafting]
        for temperature, (size, with_drafts) in progress(cases, desc="compile", unit="program"):
            request = Request((0,), 1, temperature=temperature)
            count = self.options.rows
            params = _placed(params_of([request] * count, [0] * count, self._vocab))
            draft = None
            if with_drafts:
                draft, _ = self._draft(nobody, params, 0.0)
            given = self._rows, draft, none, nobody, params, self._stop_array
            self._rows, _ = flat_round(*self._models, self._head, *given, size=size)
        for temperature in (0.0, 1.0):
            for width in progress(widths, desc="compile", unit="prompt width"):
                prompt = (0,) * min(width, self.options.max_context - 1)
                ticket = Ticket(Request(prompt, 1, temperature=temperature), 0, None, print)
                self._join(0, ticket)
                self._leave(0)
        self.figures.prompt_tokens = 0

    def step(self) -> bool:
        """Lets requests in and runs one round; False if there is nothing to do."""
        began = time.monotonic()
        for ticket, reason in self.waiting.drop(began):
            self._end(ticket, [], reason)
        for row, ticket in enumerate(self._tickets):
            if ticket is not None and (reason := ticket.refused(began)) is not None:
                self._end(ticket, [], reason)
                self._leave(row)
        joined = self._let_in()
        if self.running:
            self._round()
        self.figures.busy_seconds += time.monotonic() - began
        return bool(self.running or joined or len(self.waiting))

    def _let_in(self) -> int:
        """Runs the prompts of the first in the queue into free rows."""
        entered = []
        for row, ticket in enumerate(self._tickets):
            if ticket is not None or len(entered) == self.options.joins_per_step:
                continue
            ticket = self.waiting.take()
            if ticket is None:
                break
            entered.append((row, ticket, self._join(row, ticket)))
        for row, ticket, emitted in entered:  # after all are on their way
            tokens, count, reason = (
                x[0] for x in jax.device_get((emitted.tokens, emitted.count, emitted.reason))
            )
            self._give(row, ticket, tokens[:count].tolist(), int(reason))
        return len(entered)

    def _join(self, row: int, ticket: Ticket):
        request = ticket.request
        width = SHORTEST_PROMPT
        while width < len(request.prompt):
            width *= 2
        prompt = np.zeros((1, min(width, self._capacity)), np.int32)
        prompt[0, : len(request.prompt)] = request.prompt
        ticket.started = time.monotonic()
        self._tickets[row], self._params = ticket, None
        self._shape()
        shaped = self._rows.shaping is not None
        self._rows, emitted = join(
            *self._models,
            self._rows,
            np.int32(row),
            place(prompt, "batch", None),
            place(np.array([len(request.prompt)], np.int32), "batch"),
            _placed(params_of([request], [ticket.seed], self._vocab, shaped)),
            self._stop_array,
            place(np.array([request.max_tokens], np.int32), "batch"),
        )
        self.figures.prompt_tokens += len(request.prompt)
        return emitted

    def _round(self) -> None:
        live = place(np.array([ticket is not None for ticket in self._tickets]), "batch")
        params = self._all_params()
        running, draft = self.running, None
        if self._speculating:
            busy = load(len(self.waiting), self.waiting.limit, running, self.options.rows)
            draft, choice = self._draft(live, params, busy)
            lengths = choice.lengths
            if self.policy.kind == "asynchronous":
                total = running + min(self._budgets[0], running * self.proposals)
            else:
                total = running + int(np.asarray(lengths).sum())
        else:
            lengths = place(np.zeros(self.options.rows, np.int32), "batch")
            total = running
        size = size_for(total, self.sizes)
        self._rows, emitted = flat_round(
            *self._models, self._head, self._rows, draft, lengths, live, params, self._stop_array,
            size=size,
        )  # fmt: skip
        if self.policy.switches:
            survival = choice.survival if draft is not None else np.zeros(
                (self.options.rows, self.proposals), np.float32)  # fmt: skip
            costs = self.policy.costs, self.policy.plain
            self._switch = _next_switch(self._switch, survival, lengths, np.int32(running), *costs)
        emitted, lengths = jax.device_get((emitted, lengths))
        if self.policy.kind == "asynchronous":
            given = int(choice.budget) if draft is not None else 0
            self._budgets = [self._budgets[1], given]
        if self.policy.switches:
            self._speculating = bool(self._switch.on)
        self.figures.rounds += 1
        self.figures.plain_rounds += draft is None
        self.figures.passes_tokens += size
        drafted = self.proposals if draft is not None else 0
        for row, ticket in enumerate(self._tickets):
            if ticket is None:
                continue
            count = int(emitted.count[row])
            tokens = emitted.tokens[row, :count].tolist()
            accepted = min(int(emitted.accepted[row]), count)
            of_round = drafted, int(lengths[row]), accepted, count
            ticket.counts.add(*of_round)
            if draft is not None:
                self.figures.speculative.add(*of_round)
            self._give(row, ticket, tokens, int(emitted.reason[row]))

    def _draft(self, live, params, busy):
        """The drafts of a round and what the policy makes of them."""
        given = self._models[1], self._head, self._rows, live, params, self.policy
        budget = np.int32(self._budgets[0])
        return draft_rows(*given, budget, np.float32(busy), sizes=self.sizes)

    def _give(self, row: int, ticket: Ticket, tokens: list[int], reason: int) -> None:
        if self._end(ticket, tokens, _ENDS.get(reason)) is not None:
            self._leave(row)

    def _end(self, ticket: Ticket, tokens: list[int], finish: Finish | None) -> Finish | None:
        """Delivers, and books an answer that ends."""
        before = len(ticket.tokens)
        finish = ticket.deliver(tokens, finish)
        self.figures.tokens += len(ticket.tokens) - before
        if finish is not None:
            self.figures.requests[finish] += 1
        return finish

    def _leave(self, row: int) -> None:
        self._tickets[row], self._params = None, None

    def _shape(self) -> None:
        """Rows have what shapes logits exactly while a request needs it."""
        needed = any(t is not None and t.request.shapes for t in self._tickets)
        if needed and self._rows.shaping is None:
            self._rows = shaped_rows(self._rows, self._vocab)
        elif not needed and self._rows.shaping is not None:
            self._rows = dataclasses.replace(self._rows, shaping=None)

    def _all_params(self) -> SamplingParams:
        """The options of all rows; free ones are greedy, which asks for nothing."""
        if self._params is None:
            self._shape()
            nobody = Request((), 1)
            requests = [nobody if t is None else t.request for t in self._tickets]
            # The rows hold the biases: only whether there are any is asked here.
            requests = [dataclasses.replace(r, logit_bias=None) for r in requests]
            seeds = [0 if t is None else t.seed for t in self._tickets]
            shaped = self._rows.shaping is not None
            self._params = _placed(params_of(requests, seeds, self._vocab, shaped))
        return self._params


def _placed(params: SamplingParams) -> SamplingParams:
    return jax.tree.map(lambda x: place(x, "batch"), params)


_next_switch = jax.jit(switched)
