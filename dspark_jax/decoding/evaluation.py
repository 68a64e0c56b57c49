"""What a drafter is worth on prompt sets: accepted length, acceptance slot by slot, speed.

Plain and speculative decoding run in turns on the same prompts in one process, programs compiled
and warm, so their ratio is a fair one on a machine whose speed drifts.
"""

import dataclasses
import random
import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.core.progress import Progress, progress
from dspark_jax.core.sharding import place
from dspark_jax.data.chat import render_next
from dspark_jax.data.conversation import Conversation
from dspark_jax.data.opened import OpenedTarget
from dspark_jax.data.prompts import load_prompts
from dspark_jax.decoding.figures import Outcome, Timing
from dspark_jax.decoding.plain import Generated, generate_plain
from dspark_jax.decoding.responses import request_seed
from dspark_jax.decoding.rounds import RoundStats, generate_speculative
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.verify import Reason
from dspark_jax.models.drafter import Drafter
from dspark_jax.scheduling.policy import Policy

SMALLEST_WIDTH = 128  # prompts are padded to this or a doubling of it: one compilation for each


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt as the target reads it."""

    id: str
    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Prompts that are reported together."""

    name: str
    prompts: tuple[Prompt, ...]
    dropped: tuple[str, ...]  # ids of those that were too long


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How the prompts are decoded."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    batch_size: int = 1
    seed: int = 0
    plain: bool = True  # also without speculation, for the comparison
    policy: Policy | None = None  # how many drafts are verified; None = all


@dataclasses.dataclass(frozen=True)
class Measured:
    """All of an evaluation; outcomes and timings by the name of the set."""

    outcomes: dict[str, list[Outcome]]
    timings: dict[str, list[Timing]]
    warm_up_seconds: float  # compiling and first calls, in no other figure


def read_sets(
    target: OpenedTarget,
    tasks: str,
    *,
    split: str,
    per_set: int,
    max_prompt_tokens: int,
    seed: int,
) -> list[PromptSet]:
    """Reads and renders the prompts that `tasks` names: first user turn only.

    Each file or hub data set is one set, named by its stem; the generator gives one per source,
    from its held-out prompts.

    Args:
      tasks: as `data.prompts.load_prompts` takes it.
      split: of hub data sets.
      per_set: at most so many of each, drawn with `seed`; "generator:N" is N in all.
      max_prompt_tokens: longer prompts are dropped, and others are drawn in their place.

    Raises:
      UserError: nothing to read, or no prompt of a set is short enough.
    """
    parts = [part.strip() for part in tasks.split(",")]
    generated = [part for part in parts if part.startswith("generator:")]
    others = [part for part in parts if not part.startswith("generator:")]
    groups: dict[str, list[Conversation]] = {}
    if others:
        for conversation in load_prompts(",".join(others), split=split, seed=seed):
            name = conversation.id.rpartition("-")[0]
            groups.setdefault(name, []).append(conversation)
    if generated:
        for conversation in load_prompts(",".join(generated), split="heldout", seed=seed):
            groups.setdefault(conversation.source, []).append(conversation)
    sets = []
    for name, conversations in groups.items():
        order = random.Random(f"{seed}/{name}").sample(conversations, len(conversations))
        kept, dropped = [], []
        for conversation in order:
            if len(kept) == per_set:
                break
            ids = _first_turn(target, conversation)
            if len(ids) > max_prompt_tokens:
                dropped.append(conversation.id)
            else:
                kept.append(Prompt(conversation.id, tuple(ids)))
        if not kept:
            raise UserError(
                f"prompt set {name}: none of its {len(dropped)} prompts is at most "
                f"{max_prompt_tokens} tokens long; raise --max_prompt_tokens"
            )
        sets.append(PromptSet(name, tuple(kept), tuple(dropped)))
    return sets


def run_sets(
    target: OpenedTarget, drafter: Drafter, sets: Sequence[PromptSet], how: Decoding
) -> Measured:
    """Decodes every prompt speculatively, and plainly too if asked.

    Which of the two goes first alternates from batch to batch.

    Raises:
      UserError: the target gave NaN or infinite logits, with the prompt named.
    """
    outcomes: dict[str, list[Outcome]] = {}
    timings: dict[str, list[Timing]] = {}
    warm: set[int] = set()
    warm_up_seconds = 0.0
    total = sum(len(prompts.prompts) for prompts in sets)
    with progress(total=total, desc="evaluate", unit="prompt") as bar:
        number = 0
        for prompts in sets:
            results, times = outcomes.setdefault(prompts.name, []), []
            timings[prompts.name] = times
            for width, group in _batches(prompts.prompts, how.batch_size):
                batch = _Batch(target, drafter, group, width, how)
                if width not in warm:
                    warm.add(width)
                    began = time.perf_counter()
                    batch.warm_up()
                    warm_up_seconds += time.perf_counter() - began
                found, timing = batch.measure(plain_first=number % 2 == 0)
                results += found
                times.append(timing)
                number += 1
                _note(bar, outcomes, len(group))
    return Measured(outcomes, timings, warm_up_seconds)


class _Batch:
    """One batch on the device, ready to be decoded both ways."""

    def __init__(self, target: OpenedTarget, drafter: Drafter, group, width: int, how: Decoding):
        devices = jax.sharding.get_mesh().shape["fsdp"]
        rows = -(-how.batch_size // devices) * devices
        prompts = np.zeros((rows, width), np.int32)
        lengths = np.ones(rows, np.int32)
        limits = np.zeros(rows, np.int32)  # rows that fill up a batch generate nothing
        seeds = [0] * rows
        for row, prompt in enumerate(group):
            prompts[row, : len(prompt.ids)] = prompt.ids
            lengths[row] = len(prompt.ids)
            limits[row] = how.max_new_tokens
            seeds[row] = request_seed(how.seed, prompt.id)
        params = SamplingParams.make(rows, how.temperature, top_p=how.top_p, seeds=seeds)
        self.group, self.how = group, how
        self.target, self.drafter = target.model, drafter
        self.limits = place(limits, "batch")
        self.arguments = (
            place(prompts, "batch", None),
            place(lengths, "batch"),
            jax.tree.map(lambda x: place(x, "batch"), params),
            jnp.asarray(target.stop_ids, jnp.int32),
        )

    def plain(self, limits: jax.Array) -> Generated:
        new = self.how.max_new_tokens
        return jax.block_until_ready(
            generate_plain(self.target, *self.arguments, limits, max_new=new)
        )

    def speculative(self, limits: jax.Array) -> tuple[Generated, RoundStats]:
        new = self.how.max_new_tokens
        request = *self.arguments, limits, self.how.policy
        return jax.block_until_ready(
            generate_speculative(self.target, self.drafter, *request, max_new=new)
        )

    def warm_up(self) -> None:
        """Compiles, and runs one step or round of each."""
        few = jnp.minimum(self.limits, 2)
        self.speculative(few)
        if self.how.plain:
            self.plain(few)

    def measure(self, plain_first: bool) -> tuple[list[Outcome], Timing]:
        plain = plain_seconds = None
        if self.how.plain and plain_first:
            plain, plain_seconds = _timed(self.plain, self.limits)
        (out, stats), seconds = _timed(self.speculative, self.limits)
        if self.how.plain and not plain_first:
            plain, plain_seconds = _timed(self.plain, self.limits)
        out, stats, plain = jax.device_get((out, stats, plain))
        _check_finite(self.group, out)
        outcomes = [
            Outcome(
                id=prompt.id,
                rounds=int(stats.rounds[row]),
                tokens=int(stats.tokens[row]),
                reached=stats.reached[row],
                survived=stats.survived[row],
                verified=int(stats.verified[row]),
                output=_ids(out, row),
                plain_output=None if plain is None else _ids(plain, row),
            )
            for row, prompt in enumerate(self.group)
        ]
        plain_tokens = None if plain is None else int(plain.count.sum())
        return outcomes, Timing(plain_seconds, plain_tokens, seconds, int(out.count.sum()))


def _first_turn(target: OpenedTarget, conversation: Conversation) -> list[int]:
    messages = conversation.messages
    end = next(i for i, message in enumerate(messages) if message.role == "user") + 1
    ids = render_next(target.tokenizer, messages[:end], row=conversation.id).ids
    vocab = target.model.config.vocab_size
    if max(ids) >= vocab:  # the embedding lookup would clamp it silently
        raise UserError(
            f"{conversation.id}: token {max(ids)} has no row in the target's embedding ({vocab} "
            "rows); the tokenizer does not belong to this target"
        )
    return ids


def _batches(prompts: Sequence[Prompt], size: int) -> Iterator[tuple[int, list[Prompt]]]:
    """Batches of prompts that are padded to the same width, with that width."""
    by_width: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        width = SMALLEST_WIDTH
        while width < len(prompt.ids):
            width *= 2
        by_width.setdefault(width, []).append(prompt)
    for width, group in sorted(by_width.items()):
        for start in range(0, len(group), size):
            yield width, group[start : start + size]


def _timed(decode, limits: jax.Array):
    began = time.perf_counter()
    result = decode(limits)
    return result, time.perf_counter() - began


def _ids(out: Generated, row: int) -> list[int]:
    return out.tokens[row, : out.count[row]].tolist()


def _check_finite(group: Sequence[Prompt], out: Generated) -> None:
    for row, prompt in enumerate(group):
        if out.reason[row] == Reason.ERROR:
            raise UserError(
                f"{prompt.id}: the target gave NaN or infinite logits at token "
                f"{len(prompt.ids) + out.count[row]}; check its weights and target_dtype"
            )


def _note(bar: Progress, outcomes: dict[str, list[Outcome]], count: int) -> None:
    found = [outcome for results in outcomes.values() for outcome in results]
    rounds = sum(outcome.rounds for outcome in found)
    if rounds:
        tokens = sum(outcome.tokens for outcome in found)
        bar.note(f"accepted length {tokens / rounds:.2f}")
    bar.update(count)
