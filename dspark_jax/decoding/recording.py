"""Rounds as they happen, kept for calibration: what the confidence head said and what came true.

Speculative decoding of prompts, whole blocks verified. Every finished answer is one line of a
file, written and synced before it counts; a restart drops a torn last line and goes on with what is
missing. The file is named after what it depends on, so that no two recipes mix.
"""

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import place
from dspark_jax.data.opened import OpenedTarget
from dspark_jax.decoding.evaluation import Prompt
from dspark_jax.decoding.responses import request_seed
from dspark_jax.decoding.rounds import (
    RoundRecord,
    RoundState,
    draft_head,
    recorded_round,
    start,
)
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.verify import Reason
from dspark_jax.models.drafter import Drafter
from dspark_jax.scheduling.calibration import Rounds

BUCKET = 32  # prompts are padded to a multiple of this
TOGETHER = 8  # rounds between two looks of the host at who still runs


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that recorded rounds depend on."""

    step: int  # of the drafter
    drafter: str  # a hash of its weights
    target: str  # a hash of its fingerprint
    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int

    @property
    def name(self) -> str:
        """Of the file."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return f"rounds-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"


@dataclasses.dataclass(frozen=True)
class Answered:
    """The rounds of one answer; None where its first token ended it."""

    prompt: str
    sample: int
    rounds: Rounds | None


class RoundLog:
    """Append-only file of answers; a line counts once it is complete."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.path = folder / recipe.name
        # By prompt and sample: a hash of the prompt's ids, and its rounds.
        self.done: dict[tuple[str, int], tuple[str, Rounds | None]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        text = self.path.read_bytes() if self.path.exists() else b""
        good = text[: text.rfind(b"\n") + 1]
        if len(good) < len(text):  # a kill tore the last line
            with self.path.open("r+b") as file:
                file.truncate(len(good))
        for number, line in enumerate(good.splitlines()[1:], start=2):
            try:
                row = json.loads(line)
                rounds = None
                if row["logits"]:
                    rounds = Rounds(
                        np.array(row["logits"], np.float32),
                        np.array(row["accepted"], np.int64),
                        np.array(row["verified"], np.int64),
                    )
                self.done[row["prompt"], row["sample"]] = row["ids"], rounds
            except (ValueError, KeyError, TypeError, UserError):
                raise UserError(
                    f"{self.path} line {number} is damaged: delete the file to record again"
                ) from None
        self._file = self.path.open("a")
        if not good:
            self._write({"recipe": dataclasses.asdict(recipe)})

    def has(self, prompt: Prompt, sample: int) -> bool:
        """Whether the prompt's answer was recorded; an error if it was another prompt's."""
        found = self.done.get((prompt.id, sample))
        if found is not None and found[0] != _ids_hash(prompt):
            raise UserError(
                f"{self.path}: {prompt.id} was another prompt when it was recorded; delete the file"
            )
        return found is not None

    def add(self, prompts: Sequence[Prompt], answers: Sequence[Answered]) -> None:
        """Appends answers; they survive a kill once this returns."""
        for prompt, answer in zip(prompts, answers, strict=True):
            rounds, row = answer.rounds, {"prompt": answer.prompt, "sample": answer.sample}
            row |= {"ids": _ids_hash(prompt), "logits": [], "accepted": [], "verified": []}
            if rounds is not None:
                # Nine digits give every float32 back.
                row["logits"] = [[float(f"{z:.9g}") for z in one] for one in rounds.logits.tolist()]
                row["accepted"] = rounds.accepted.tolist()
                row["verified"] = rounds.verified.tolist()
            self._write(row)
            self.done[answer.prompt, answer.sample] = _ids_hash(prompt), rounds
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _write(self, row: dict) -> None:
        self._file.write(json.dumps(row, separators=(",", ":")) + "\n")
        self._file.flush()


def record(
    target: OpenedTarget,
    drafter: Drafter,
    prompts: Sequence[tuple[Prompt, int]],
    *,
    temperature: float,
    top_p: float,
    max_new: int,
    seed: int,
    batch: int,
) -> Iterator[list[tuple[Prompt, Answered]]]:
    """Decodes (prompt, sample number) batch by batch, shortest prompts first.

    An answer depends on the seed, its prompt and its sample number, not on its batch.

    Raises:
      UserError: the target gave NaN or infinite logits, with the prompt named.
    """
    devices = jax.sharding.get_mesh().shape["fsdp"]
    batch = -(-batch // devices) * devices
    head = draft_head(target.model, drafter)
    stop_ids = np.asarray(target.stop_ids, np.int32)
    ordered = sorted(prompts, key=lambda one: (len(one[0].ids), one[0].id, one[1]))
    for begin in range(0, len(ordered), batch):
        group = ordered[begin : begin + batch]
        width = -(-max(len(prompt.ids) for prompt, _ in group) // BUCKET) * BUCKET
        ids, lengths = np.zeros((batch, width), np.int32), np.ones(batch, np.int32)
        limits, seeds = np.zeros(batch, np.int32), [0] * batch
        for row, (prompt, sample) in enumerate(group):
            ids[row, : len(prompt.ids)] = prompt.ids
            lengths[row], limits[row] = len(prompt.ids), max_new
            seeds[row] = request_seed(seed, prompt.id, sample)
        params = SamplingParams.make(batch, temperature, top_p=top_p, seeds=seeds)
        options = (
            jax.tree.map(lambda x: place(x, "batch"), params),
            jnp.asarray(stop_ids),
            place(limits, "batch"),
        )
        prompts_and_lengths = place(ids, "batch", None), place(lengths, "batch")
        state = _start(target.model, drafter, *prompts_and_lengths, *options, max_new=max_new)
        found: list[RoundRecord] = []
        while (np.asarray(state.out.reason) == Reason.RUNNING).any():
            state, several = _rounds(target.model, drafter, head, state, *options)
            found.append(jax.device_get(several))
        reason = np.asarray(state.out.reason)
        for row, (prompt, _) in enumerate(group):
            if reason[row] == Reason.ERROR:
                raise UserError(
                    f"{prompt.id}: the target gave NaN or infinite logits; check its weights and "
                    "target_dtype"
                )
        rows = _by_row(found, stop_ids, batch, drafter.config.num_proposals)
        yield [
            (prompt, Answered(prompt.id, sample, rounds))
            for (prompt, sample), rounds in zip(group, rows[: len(group)], strict=True)
        ]


_start = jax.jit(start, static_argnames="max_new")


@functools.partial(jax.jit, donate_argnames="state")
def _rounds(target, drafter, head, state, params, stop_ids, max_tokens):
    """TOGETHER rounds and their records, stacked."""

    def step(state: RoundState, _):
        return recorded_round(target, drafter, head, state, params, stop_ids, max_tokens)

    return jax.lax.scan(step, state, None, length=TOGETHER)


def _by_row(
    found: Sequence[RoundRecord], stop_ids: np.ndarray, batch: int, slots: int
) -> list[Rounds | None]:
    """The rounds of each row, as `Rounds` counts them: up to a stop id among the drafts."""
    if not found:
        return [None] * batch
    running, drafts, confidence, verified, accepted = (
        np.concatenate([getattr(one, name) for one in found])
        for name in ("running", "drafts", "confidence", "verified", "accepted")
    )
    stops = np.isin(drafts, stop_ids)
    upto = np.where(stops.any(axis=-1), stops.argmax(axis=-1) + 1, slots)
    verified = np.minimum(verified, upto)
    accepted = np.minimum(accepted, verified)
    rows: list[Rounds | None] = []
    for row in range(batch):
        on = running[:, row]
        rounds = (x[on, row] for x in (confidence, accepted, verified))
        rows.append(Rounds(*rounds) if on.any() else None)
    return rows


def together(answers: Sequence[Rounds | None]) -> Rounds:
    """All rounds of some answers, of which at least one has any."""
    answers = [one for one in answers if one is not None]
    parts = ("logits", "accepted", "verified")
    return Rounds(*(np.concatenate([getattr(one, name) for one in answers]) for name in parts))


def _ids_hash(prompt: Prompt) -> str:
    return hashlib.sha256(np.asarray(prompt.ids, np.int32).tobytes()).hexdigest()[:12]
