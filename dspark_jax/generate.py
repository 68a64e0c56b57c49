"""Answer prompts with a trained drafter, streamed, and say what speculation gained.

    python -m dspark_jax.generate --workdir=runs/a --prompt="What is a prime number?"
    python -m dspark_jax.generate --workdir=runs/a --prompt="Tell a story." --temperature=0.8
    python -m dspark_jax.generate --workdir=runs/a --prompt_file=prompts.jsonl --max_new_tokens=64

The text appears as it is decoded, several tokens per round. The line after it gives the tokens, the
rounds, the accepted length (tokens per round, the target's own included) and the speed beside plain
decoding of the same prompt by the same target. At temperature 0 both must give the same text; above
it both draw from the same distribution, with different texts. --nospeculate decodes plainly.
"""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from dspark_jax.core.command import run_main
from dspark_jax.core.config import MeshConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.chat import render_next, response_text
from dspark_jax.data.conversation import Conversation, Message
from dspark_jax.data.opened import OpenedTarget, check_drafter, open_target
from dspark_jax.data.prompts import load_prompts
from dspark_jax.decoding.plain import generate_plain, plain_step, prefill
from dspark_jax.decoding.rounds import draft_head, speculative_round, start
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.verify import Reason
from dspark_jax.models.drafter import Drafter
from dspark_jax.training.checkpoint import choose_step, load_drafter, read_record
from dspark_jax.weights.fingerprint import check_same_target

PROMPT_BUCKET = 32  # prompts are padded to a multiple of this


@dataclasses.dataclass(frozen=True)
class Options:
    """How to answer."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    seed: int = 0
    step: str = "best"
    speculate: bool = True
    target: str | None = None  # None = where the run says it is


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answer and what it took. Times include the prompt, not compilation."""

    text: str
    tokens: tuple[int, ...]  # the stop token included
    seconds: float
    rounds: int | None = None  # None where nothing was speculated, like the rest
    accepted_length: float | None = None  # None too if no round was complete
    tokens_plain: int | None = None  # of plain decoding, whose text differs if it was sampled
    seconds_plain: float | None = None
    equal: bool | None = None  # whether plain decoding gave the same tokens; at temperature 0


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the host reads after each round."""

    tokens: np.ndarray  # i32[count], the answer so far
    reason: int
    rounds: int
    complete_rounds: int = 0  # without one that the token limit cut
    complete_tokens: int = 0


def run(
    workdir: Path, conversations: Sequence[Conversation], options: Options, out: TextIO = sys.stdout
) -> list[Answer]:
    """Answers each conversation and writes text and figures to `out`.

    Args:
      conversations: messages after the first user message are left out.

    Raises:
      UserError: no run or checkpoint, another target, a prompt that does not fit, an option out of
        range, or a target that gives NaN.
    """
    if options.max_new_tokens < 1:
        raise UserError(f"--max_new_tokens={options.max_new_tokens}: must be at least 1")
    record = read_record(workdir)
    config = record.config
    step = choose_step(workdir, options.step) if options.speculate else 0
    with jax.set_mesh(_mesh(config.mesh)):
        params = SamplingParams.make(
            jax.sharding.get_mesh().shape["fsdp"],
            options.temperature,
            options.top_k,
            options.top_p,
            options.seed,
        )
        target = open_target(options.target or config.target, config.target_dtype)
        check_same_target(record.fingerprint, target.fingerprint, f"the drafter in {workdir}")
        check_drafter(record.shape, target, f"{workdir}/config.json: ", record.fingerprint)
        prompts = [_prompt_ids(target, conversation, options) for conversation in conversations]
        drafter = load_drafter(record, workdir, step) if options.speculate else None
        decoder = _Decoder(target, drafter, params, options, max(map(len, prompts)))
        return [decoder.answer(ids, out) for ids in prompts]


def _mesh(config: MeshConfig) -> jax.sharding.Mesh:
    """The run's mesh; one device where this machine has fewer, which changes no text."""
    if max(config.fsdp, 1) * config.tp > jax.device_count():
        return make_mesh()
    return make_mesh(config.fsdp, config.tp)


class _Decoder:
    """The compiled programs for prompts of up to one length.

    Row 0 of the batch is the request; the mesh may ask for more rows, which generate nothing.
    """

    def __init__(
        self,
        target: OpenedTarget,
        drafter: Drafter | None,
        params: SamplingParams,
        options: Options,
        longest: int,
    ):
        self._target = target
        self._drafter = drafter
        self._params = jax.tree.map(lambda x: place(x, "batch"), params)
        self._rows = params.seed.shape[0]
        self._width = -(-longest // PROMPT_BUCKET) * PROMPT_BUCKET
        max_new = options.max_new_tokens
        self._limits = (jnp.asarray(target.stop_ids, jnp.int32), self._row(max_new, 0))
        models = (target.model,) if drafter is None else (target.model, drafter)
        begin, go_on = _PLAIN if drafter is None else _SPECULATIVE
        arguments = (*self._prompt([0]), self._params, *self._limits)
        # Compiled ahead, so that no time below includes it.
        begin = begin.lower(*models, *arguments, max_new=max_new).compile()
        state, _ = begin(*models, *arguments)
        self._begin = functools.partial(begin, *models)
        if drafter is not None:
            models += (draft_head(*models),)
        self._go_on = functools.partial(
            go_on.lower(*models, state, self._params, *self._limits).compile(), *models
        )
        self._plain = None
        if drafter is not None:
            lowered = generate_plain.lower(target.model, *arguments, max_new=max_new)
            self._plain = functools.partial(lowered.compile(), target.model)

    def answer(self, ids: Sequence[int], out: TextIO) -> Answer:
        """Answers one prompt, streams the text to `out`, then a line of figures."""
        stream = _TextStream(self._target, out)
        began = time.perf_counter()
        for end in self._progress(ids):
            stream.show(end.tokens)
        seconds = time.perf_counter() - began
        stream.end()
        if end.reason == Reason.ERROR:
            raise UserError(
                f"the target gave NaN or infinite logits at token {len(ids) + len(end.tokens)}; "
                "check its weights and target_dtype"
            )
        answer = Answer(stream.text, tuple(end.tokens.tolist()), seconds)
        if self._plain is not None:
            answer = self._compared(answer, end, ids)
        print(_figures(answer), file=out, flush=True)
        return answer

    def _progress(self, ids: Sequence[int]) -> Iterator[Progress]:
        """What is there after the prompt and after each round; one read of the device for each."""
        state, seen = self._begin(*self._prompt(ids), self._params, *self._limits)
        for rounds in itertools.count():
            tokens, count, reason, *counts = (x[0] for x in jax.device_get(seen))
            yield Progress(tokens[:count], int(reason), rounds, *map(int, counts))
            if reason != Reason.RUNNING:
                return
            state, seen = self._go_on(state, self._params, *self._limits)

    def _compared(self, answer: Answer, end: Progress, ids: Sequence[int]) -> Answer:
        """Decodes the prompt again without the drafter."""
        began = time.perf_counter()
        result = self._plain(*self._prompt(ids), self._params, *self._limits)
        tokens, count = jax.device_get((result.tokens, result.count))
        seconds = time.perf_counter() - began
        same = tuple(tokens[0, : count[0]].tolist()) == answer.tokens
        complete = end.complete_rounds
        return dataclasses.replace(
            answer,
            rounds=end.rounds,
            accepted_length=end.complete_tokens / complete if complete else None,
            tokens_plain=int(count[0]),
            seconds_plain=seconds,
            equal=same if self._params.greedy else None,
        )

    def _prompt(self, ids: Sequence[int]) -> tuple[jax.Array, jax.Array]:
        padded = np.zeros((self._rows, self._width), np.int32)
        padded[0, : len(ids)] = ids
        return place(padded, "batch", None), self._row(len(ids), 1)

    def _row(self, value: int, others: int) -> jax.Array:
        """i32[B] with `value` for the request."""
        column = np.full((self._rows,), others, np.int32)
        column[0] = value
        return place(column, "batch")


# Programs return the state and, apart from it, what the host reads: the state is donated to the
# next round, and a buffer that the host looks at cannot be.


def _start(target, drafter, prompts, lengths, params, stop_ids, max_tokens, *, max_new):
    state = start(target, drafter, prompts, lengths, params, stop_ids, max_tokens, max_new=max_new)
    return state, _seen(state.out)


def _round(target, drafter, head, state, params, stop_ids, max_tokens):
    state = speculative_round(target, drafter, head, state, params, stop_ids, max_tokens)
    return state, (*_seen(state.out), state.stats.rounds, state.stats.tokens)


def _start_plain(target, prompts, lengths, params, stop_ids, max_tokens, *, max_new):
    state, _ = prefill(
        target,
        prompts,
        lengths,
        params,
        stop_ids,
        max_tokens,
        capacity=prompts.shape[1] + max_new,
        out_size=max_new,
    )
    return state, _seen(state.out)


def _step_plain(target, state, params, stop_ids, max_tokens):
    state = plain_step(target, state, params, stop_ids, max_tokens)
    return state, _seen(state.out)


def _seen(out) -> tuple[jax.Array, ...]:
    return out.tokens, out.count, out.reason


_SPECULATIVE = (
    jax.jit(_start, static_argnames="max_new"),
    jax.jit(_round, donate_argnames="state"),
)
_PLAIN = (
    jax.jit(_start_plain, static_argnames="max_new"),
    jax.jit(_step_plain, donate_argnames="state"),
)


class _TextStream:
    """Shows the text of a growing answer; bytes of a character wait until it is whole."""

    def __init__(self, target: OpenedTarget, out: TextIO):
        self._target = target
        self._out = out
        self._shown = 0
        self.text = ""

    def show(self, ids: np.ndarray) -> None:
        """Shows what `ids`, the whole answer so far, adds."""
        target = self._target
        self.text = response_text(target.tokenizer, ids.tolist(), target.stop_ids)
        # The end of a cut character is decoded as replacement characters.
        self._write(len(self.text.rstrip("\ufffd")))

    def end(self) -> None:
        """Shows what is left and ends the line."""
        self._write(len(self.text))
        print(file=self._out, flush=True)

    def _write(self, upto: int) -> None:
        print(self.text[self._shown : upto], end="", file=self._out, flush=True)
        self._shown = max(self._shown, upto)


def _prompt_ids(
    target: OpenedTarget, conversation: Conversation, options: Options
) -> tuple[int, ...]:
    """The rendered prompt, checked against the target's limits."""
    messages = list(conversation.messages)
    first = next(i for i, message in enumerate(messages) if message.role == "user")
    ids = render_next(target.tokenizer, messages[: first + 1], row=conversation.id).ids
    config = target.model.config
    if max(ids) >= config.vocab_size:  # the embedding lookup would clamp it silently
        raise UserError(
            f"{conversation.id}: token {max(ids)} has no row in the target's embedding "
            f"({config.vocab_size} rows); the tokenizer does not belong to this target"
        )
    if len(ids) + options.max_new_tokens > config.max_positions:
        raise UserError(
            f"{conversation.id}: {len(ids)} prompt tokens and --max_new_tokens="
            f"{options.max_new_tokens} are more than the target's {config.max_positions} "
            "positions: shorten one of them"
        )
    return tuple(ids)


def _figures(answer: Answer) -> str:
    """One line about an answer."""
    count = len(answer.tokens)
    speed = count / answer.seconds
    if answer.rounds is None:
        return f"[{count} tokens, {speed:.1f} tokens/s]"
    plain = answer.tokens_plain / answer.seconds_plain
    length = "-" if answer.accepted_length is None else f"{answer.accepted_length:.2f}"
    parts = [
        f"{count} tokens in {answer.rounds} rounds",
        f"accepted length {length}",
        f"{speed:.1f} tokens/s, plain decoding {plain:.1f} ({speed / plain:.2f} times as fast)",
    ]
    if answer.equal is not None:
        parts.append("same text as plain" if answer.equal else "NOT the text of plain decoding")
    return f"[{'; '.join(parts)}]"


def main() -> None:
    """Entry point."""
    if (_PROMPT.value is None) == (_PROMPT_FILE.value is None):
        raise UserError("give either --prompt or --prompt_file; see --help")
    if _PROMPT_FILE.value is not None:
        conversations = load_prompts(_PROMPT_FILE.value, seed=_SEED.value)
    elif not _PROMPT.value.strip():
        raise UserError("--prompt is empty: write what the target is to answer")
    else:
        message = Message("user", _PROMPT.value)
        conversations = [Conversation("--prompt", "--prompt", (message,))]
    options = Options(
        temperature=_TEMPERATURE.value,
        top_p=_TOP_P.value,
        top_k=_TOP_K.value,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        seed=_SEED.value,
        step=_STEP.value,
        speculate=_SPECULATE.value,
        target=_TARGET.value,
    )
    run(Path(_WORKDIR.value), conversations, options)


if __name__ == "__main__":  # flags too: several commands may be imported into one program
    _WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
    _PROMPT = flags.DEFINE_string("prompt", None, "What the user says.")
    _PROMPT_FILE = flags.DEFINE_string(
        "prompt_file",
        None,
        "Prompts from a .jsonl, .json or .parquet file, or generator:N, instead of --prompt; of "
        "each conversation everything up to the first user message is used.",
    )
    _TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the likeliest token every time.")
    _TOP_P = flags.DEFINE_float(
        "top_p", 1.0, "Keep the likeliest tokens of this much mass; 1 = off."
    )
    _TOP_K = flags.DEFINE_integer("top_k", 0, "Keep this many of the likeliest tokens; 0 = off.")
    _MAX_NEW_TOKENS = flags.DEFINE_integer(
        "max_new_tokens", 128, "At most so many tokens an answer."
    )
    _SEED = flags.DEFINE_integer("seed", 0, "Same seed, same text.")
    _STEP = flags.DEFINE_string("step", "best", "Checkpoint: best, latest or a step number.")
    _SPECULATE = flags.DEFINE_bool("speculate", True, "Use the drafter.")
    _TARGET = flags.DEFINE_string("target", None, "Where the run's target now is, if it has moved.")
    flags.mark_flags_as_required(["workdir"])
    run_main(main)
