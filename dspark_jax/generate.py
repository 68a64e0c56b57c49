"""Answer prompts with a trained drafter, streamed, and say what speculation gained.

    python -m dspark_jax.generate --workdir=runs/a --prompt="What is a prime number?"
    python -m dspark_jax.generate --workdir=runs/a --prompt="Tell a story." --temperature=0.8
    python -m dspark_jax.generate --workdir=runs/a --prompt_file=prompts.jsonl --max_new_tokens=64
    python -m dspark_jax.generate --workdir=runs/a --prompt="Count." --stop="10" --logit_bias=42:-9

The text appears as it is decoded, several tokens per round. The line after it gives the tokens, the
rounds, the accepted length (tokens per round, the target's own included) and the speed beside plain
decoding of the same prompt by the same target. At temperature 0 both must give the same text; above
it both draw from the same distribution, with different texts. --nospeculate decodes plainly.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import jax
from absl import flags

from dspark_jax.core.command import run_main
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import mesh_here
from dspark_jax.data.chat import render_next
from dspark_jax.data.conversation import Conversation, Message
from dspark_jax.data.opened import OpenedTarget, check_drafter, open_target_of
from dspark_jax.data.prompts import load_prompts
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.stopping import TextStream, check_stops
from dspark_jax.decoding.streaming import Streaming
from dspark_jax.decoding.verify import Reason
from dspark_jax.scheduling.by_name import HELP, read_policy
from dspark_jax.training.checkpoint import choose_step, load_drafter, read_record
from dspark_jax.weights.fingerprint import check_same_target


@dataclasses.dataclass(frozen=True)
class Options:
    """How to answer."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    greedy_drafts: bool = False
    scheduler: str = "all"  # see scheduling/by_name.py
    force_costs: bool = False
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
    tokens_plain: int | None = None  # that plain decoding made, those after a stop string too
    seconds_plain: float | None = None
    verified_per_round: float | None = None  # drafts, where a scheduler decides
    equal: bool | None = None  # whether plain decoding gave the same tokens; at temperature 0


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
    if options.min_tokens > options.max_new_tokens:
        raise UserError(
            f"--min_tokens={options.min_tokens} is more than --max_new_tokens="
            f"{options.max_new_tokens}: lower one or raise the other"
        )
    check_stops(options.stop)
    if options.scheduler == "off":
        options = dataclasses.replace(options, speculate=False)
    elif options.scheduler != "all" and not options.speculate:
        raise UserError(
            f"--scheduler={options.scheduler} with --nospeculate: plain decoding has no drafts to "
            "choose from; leave one of them out"
        )
    record = read_record(workdir)
    config = record.config
    step, policy = 0, None
    if options.speculate:  # the policy before what takes long
        step = choose_step(workdir, options.step)
        policy = read_policy(
            options.scheduler,
            workdir,
            step=step,
            proposals=config.drafter.num_proposals,
            has_confidence=config.drafter.confidence_head,
            rows=1,
            force=options.force_costs,
        )
    with jax.set_mesh(mesh_here(config.mesh.fsdp, config.mesh.tp)):
        params = SamplingParams.make(
            jax.sharding.get_mesh().shape["fsdp"],
            options.temperature,
            options.top_k,
            options.top_p,
            options.seed,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=dict(options.logit_bias),
            min_tokens=options.min_tokens,
            vocab_size=record.target_config.vocab_size,
            greedy_drafts=options.greedy_drafts,
        )
        target = open_target_of(config, options.target)
        check_same_target(record.fingerprint, target.fingerprint, f"the drafter in {workdir}")
        check_drafter(record.shape, target, f"{workdir}/config.json: ", record.fingerprint)
        prompts = [_prompt_ids(target, conversation, options) for conversation in conversations]
        drafter = load_drafter(record, workdir, step) if options.speculate else None
        decoder = Streaming(
            target, drafter, params, options.max_new_tokens, max(map(len, prompts)), policy
        )
        return [_answer(decoder, target, options, ids, out) for ids in prompts]


def _answer(
    decoder: Streaming,
    target: OpenedTarget,
    options: Options,
    ids: Sequence[int],
    out: TextIO,
) -> Answer:
    """Answers one prompt, streams the text to `out`, then a line of figures."""
    stops = options.stop, options.min_tokens
    stream = TextStream(target.tokenizer, target.stop_ids, *stops)
    began = time.perf_counter()
    for end in decoder.progress(ids):
        print(stream.add(end.tokens.tolist()), end="", file=out, flush=True)
        if stream.stop is not None:
            break
    seconds = time.perf_counter() - began
    print(stream.end(), file=out, flush=True)
    if end.reason == Reason.ERROR and stream.stop is None:
        raise UserError(
            f"the target gave NaN or infinite logits at token {len(ids) + len(end.tokens)}; "
            "check its weights and target_dtype"
        )
    kept = None if stream.stop is None else stream.stop.tokens
    answer = Answer(stream.text, tuple(end.tokens[:kept].tolist()), seconds)
    if options.speculate:
        plain, seconds_plain = decoder.plain(ids)
        other = TextStream(target.tokenizer, target.stop_ids, *stops)
        other.add(plain)
        kept = None if other.stop is None else other.stop.tokens
        complete, tokens = end.complete_rounds, end.complete_tokens
        if complete == end.rounds:  # the last one too: what follows a stop string is no gain
            tokens -= len(end.tokens) - len(answer.tokens)
        answer = dataclasses.replace(
            answer,
            rounds=end.rounds,
            accepted_length=tokens / complete if complete else None,
            tokens_plain=len(plain),
            seconds_plain=seconds_plain,
            verified_per_round=(
                end.complete_verified / complete
                if complete and options.scheduler != "all"
                else None
            ),
            equal=tuple(plain[:kept]) == answer.tokens if options.temperature == 0 else None,
        )
    print(_figures(answer), file=out, flush=True)
    return answer


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
    if answer.verified_per_round is not None:
        parts.insert(2, f"{answer.verified_per_round:.2f} drafts verified per round")
    if answer.equal is not None:
        parts.append("same text as plain" if answer.equal else "NOT the text of plain decoding")
    return f"[{'; '.join(parts)}]"


def _biases(pairs: Sequence[str]) -> tuple[tuple[int, float], ...]:
    """What --logit_bias says: ("42:-100", "7:1.5")."""
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition(":")
        try:
            found = int(token), float(bias)
        except ValueError:
            raise UserError(
                f"--logit_bias={','.join(pairs)}: {pair!r} is no token:bias, as in 42:-100,7:1.5"
            ) from None
        if found[0] in biases:
            raise UserError(f"--logit_bias={','.join(pairs)}: token {found[0]} is there twice")
        biases[found[0]] = found[1]
    return tuple(biases.items())


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
        min_p=_MIN_P.value,
        repetition_penalty=_REPETITION_PENALTY.value,
        presence_penalty=_PRESENCE_PENALTY.value,
        frequency_penalty=_FREQUENCY_PENALTY.value,
        logit_bias=_biases(_LOGIT_BIAS.value),
        stop=tuple(_STOP.value),
        min_tokens=_MIN_TOKENS.value,
        greedy_drafts=_DRAFTS.value == "greedy",
        scheduler=_SCHEDULER.value,
        force_costs=_FORCE_COSTS.value,
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
    _MIN_P = flags.DEFINE_float(
        "min_p", 0.0, "Keep tokens of at least this share of the likeliest one's; 0 = off."
    )
    _REPETITION_PENALTY = flags.DEFINE_float(
        "repetition_penalty", 1.0, "Above 1 against tokens of prompt and answer; 1 = off."
    )
    _PRESENCE_PENALTY = flags.DEFINE_float(
        "presence_penalty", 0.0, "Taken off the logit of every token the answer has; -2 to 2."
    )
    _FREQUENCY_PENALTY = flags.DEFINE_float(
        "frequency_penalty", 0.0, "The same for each time that the answer has it; -2 to 2."
    )
    _LOGIT_BIAS = flags.DEFINE_list(
        "logit_bias", [], "Added to logits: token:bias, separated by commas; -100 to 100."
    )
    _STOP = flags.DEFINE_multi_string(
        "stop", [], "A text that ends the answer and is not shown; may be given several times."
    )
    _MIN_TOKENS = flags.DEFINE_integer("min_tokens", 0, "Nothing ends the answer before so many.")
    _DRAFTS = flags.DEFINE_enum(
        "drafts",
        "sampled",
        ["sampled", "greedy"],
        "Above temperature 0 drafts are drawn, or the drafter's likeliest; same distribution.",
    )
    _MAX_NEW_TOKENS = flags.DEFINE_integer(
        "max_new_tokens", 128, "At most so many tokens an answer."
    )
    _SEED = flags.DEFINE_integer("seed", 0, "Same seed, same text.")
    _STEP = flags.DEFINE_string("step", "best", "Checkpoint: best, latest or a step number.")
    _SCHEDULER = flags.DEFINE_string("scheduler", "all", HELP)
    _FORCE_COSTS = flags.DEFINE_bool("force_costs", False, "Use costs of another device.")
    _SPECULATE = flags.DEFINE_bool("speculate", True, "Use the drafter.")
    _TARGET = flags.DEFINE_string("target", None, "Where the run's target now is, if it has moved.")
    flags.mark_flags_as_required(["workdir"])
    run_main(main)
