"""Chat templates to token ids, and the loss mask: exactly the tokens that the target generates.

A response enters as the ids that the target produced and is never tokenised again: `render_next`
gives the ids to answer, `assemble` joins prompts and responses. `mask_from_messages` is for data
that already holds answers as text. Nothing here searches a rendered text for markers: every
boundary is the end of a render and is compared token by token, and what cannot be proved is
refused or put into a row of its own.

Text that quotes a control token (special in the tokenizer, such as <|im_end|>) in a system or user
message is encoded as ordinary text, so nobody can open or close a turn by quoting its marker. The
added tokens that a tokenizer does not call special, and all tokens in assistant messages (which may
carry thinking markers), are encoded as the tokenizer does by itself.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.data.conversation import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESERVED_OPTIONS = (
    "conversation",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
)
# Contents to try an open user turn with: words, digits, symbols, other scripts.
_PROBES = ("Hello", "how", "the", "Write a", "x = 1", "42", "(a)", "<b>", '"c"', "Ünit", "你好")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One answered turn.

    Attributes:
        prompt_ids: everything the target saw: the whole row up to the response.
        response_ids: what it generated, the end-of-turn token included if it got that far.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """One row of training data.

    Attributes:
        ids: i32[S].
        loss_mask: bool[S], true on the tokens that the target generated.
    """

    ids: np.ndarray
    loss_mask: np.ndarray


@dataclasses.dataclass(frozen=True)
class NextPrompt:
    """What the target is to answer next.

    Attributes:
        ids: the whole rendered conversation, up to where the response begins.
        new_row: the ids do not continue the row so far; its turns are history here, unsupervised.
    """

    ids: list[int]
    new_row: bool


def render_next(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    so_far_ids: Sequence[int] = (),
    *,
    template_options: Mapping[str, Any] | None = None,
    row: str = "conversation",
) -> NextPrompt:
    """The prompt for the answer to `messages`, which end with a user message.

    The conversation is rendered in full, as a serving engine renders it. If the row so far (prompt
    and response ids of the turns before) is a token prefix of that, the row goes on. If it is not,
    because the template rewrites earlier turns (Qwen3 drops their thinking) or because the text of
    an answer tokenises differently from how it was generated, the turn begins a new row: training
    on the old ids would show the drafter a context that the target never has.

    Args:
        so_far_ids: the last turn's `prompt_ids + response_ids`; empty for the first turn.
        template_options: variables of the template, such as {"enable_thinking": False}.
        row: names the conversation in errors.
    """
    ids = _encode(tokenizer, messages, True, template_options, row)
    so_far = list(so_far_ids)
    return NextPrompt(ids, new_row=ids[: len(so_far)] != so_far)


def response_text(
    tokenizer: "PreTrainedTokenizerBase", response_ids: Sequence[int], end_ids: Sequence[int]
) -> str:
    """The text of a response, to be the content of an assistant message: no end-of-turn token."""
    ids = list(response_ids)
    if ids and ids[-1] in end_ids:
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def assemble(
    turns: Sequence[Turn], max_length: int | None = None, *, row: str = "conversation"
) -> Tokens:
    """One row from the turns of one conversation; the mask is true on every response.

    Args:
        turns: each prompt continues the turn before (`NextPrompt.new_row` was false).
        max_length: ids and mask are cut here together.
        row: names the conversation in errors.

    Raises:
        ValueError: a prompt does not continue the turn before it.
        UserError: no token is supervised.
    """
    ids: list[int] = []
    mask: list[bool] = []
    for number, turn in enumerate(turns, start=1):
        prompt = list(turn.prompt_ids)
        if prompt[: len(ids)] != ids:
            raise ValueError(f"{row}: turn {number} does not continue turn {number - 1}")
        mask += [False] * (len(prompt) - len(ids)) + [True] * len(turn.response_ids)
        ids = prompt + list(turn.response_ids)
    return _tokens(ids, mask, max_length, row)


def mask_from_messages(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    max_length: int | None = None,
    *,
    end_ids: Sequence[int] | None = None,
    template_options: Mapping[str, Any] | None = None,
    row: str = "conversation",
) -> Tokens:
    """Ids and mask of a conversation that already holds its answers, every assistant turn masked.

    A turn begins where the render of the messages before it, with the generation prompt, ends, and
    runs to the first end-of-turn token, included. Both the prompt and the turn rendered as the last
    one have to be token prefixes of the whole render.

    Args:
        max_length: ids and mask are cut here together.
        end_ids: as from `end_of_turn_ids`; None for the tokenizer's eos token alone.

    Raises:
        UserError: the turn is not rendered the same way once others follow it, it has no end, it
            quotes an end-of-turn token, or no token is supervised. It names `row` and the turn.
    """
    ends = set(end_of_turn_ids(tokenizer) if end_ids is None else end_ids)
    end_texts = [tokenizer.convert_ids_to_tokens(end) for end in sorted(ends)]
    ids = _encode(tokenizer, messages, False, template_options, row)
    mask = [False] * len(ids)
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        where = f"{row}, assistant message {index + 1}"
        if quoted := [text for text in end_texts if text in message.content]:
            raise UserError(
                f"{where} contains the end-of-turn token {quoted[0]}, which the target cannot go "
                f"on after; remove it from the text"
            )
        prompt = _encode(tokenizer, messages[:index], True, template_options, where)
        alone = _encode(tokenizer, messages[: index + 1], False, template_options, where)
        if ids[: len(prompt)] != prompt:
            raise UserError(
                f"{where}: the chat template does not render the prompt of this turn as the "
                f"beginning of the conversation; make one row of each turn"
            )
        end = next((i for i in range(len(prompt), len(ids)) if ids[i] in ends), None)
        if end is None:
            raise UserError(
                f"{where}: no end-of-turn token ({', '.join(end_texts)}) follows in the render; "
                f"name the one the chat template uses in end_ids"
            )
        if ids[: end + 1] != alone[: end + 1]:
            raise UserError(
                f"{where}: the chat template renders this turn differently once others follow it; "
                f"make one row of each turn"
            )
        mask[len(prompt) : end + 1] = [True] * (end + 1 - len(prompt))
    return _tokens(ids, mask, max_length, row)


def end_of_turn_ids(
    tokenizer: "PreTrainedTokenizerBase", generation_config_dir: str | Path | None = None
) -> tuple[int, ...]:
    """The ids at which generation stops: those of generation_config.json, then the tokenizer's eos.

    Raises:
        UserError: there is none at all, or the file is damaged.
    """
    ids: list[int] = []
    if generation_config_dir is not None:
        path = Path(generation_config_dir) / "generation_config.json"
        if path.exists():
            try:
                value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            except (ValueError, AttributeError) as error:
                raise UserError(f"{path} is not a JSON object: {error}") from error
            ids = [] if value is None else value if isinstance(value, list) else [value]
            if not all(type(i) is int and 0 <= i < len(tokenizer) for i in ids):
                raise UserError(f"{path}: eos_token_id {value} is not made of ids of the tokenizer")
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    if not ids:
        raise UserError(
            "no end-of-turn token: neither the tokenizer nor generation_config.json names an eos "
            "token; add eos_token_id to generation_config.json"
        )
    return tuple(dict.fromkeys(ids))


def empty_user_turn_ids(
    tokenizer: "PreTrainedTokenizerBase",
    system: str | None = None,
    *,
    template_options: Mapping[str, Any] | None = None,
) -> list[int]:
    """The ids of an opened user turn, up to where the user's text would begin.

    A chat model that continues them writes a prompt (Magpie, arXiv 2406.08464).

    Raises:
        UserError: the template or the tokenizer lets the user's text change what precedes it.
    """
    before = [] if system is None else [Message("system", system)]
    # Private-use characters, which neither a template nor a tokenizer treats in a special way.
    probe = _unused(before) * 2
    quoted, _ = _quote(tokenizer, before)
    rendered = _render(
        tokenizer, [*quoted, Message("user", probe)], False, template_options, "open user turn"
    )
    ids = None
    if rendered.count(probe) == 1:
        ids = _encode_text(tokenizer, rendered[: rendered.index(probe)], _unused(before))
    for text in _PROBES:
        if ids is None:
            break
        filled = [*before, Message("user", text)]
        whole = _encode(tokenizer, filled, False, template_options, "open user turn")
        ids = ids if whole[: len(ids)] == ids and len(whole) > len(ids) else None
    if not ids:
        raise UserError(
            "open user turn: the chat template has no fixed tokens before the user's text, so the "
            "target cannot be asked to write prompts; use a file of prompts"
        )
    return ids


def _tokens(ids: list[int], mask: list[bool], max_length: int | None, row: str) -> Tokens:
    loss_mask = np.asarray(mask[:max_length], bool)
    if not loss_mask.any():
        cut = f" in its first {max_length} tokens" if any(mask) else ""
        raise UserError(f"{row}: no token of an answer{cut}, nothing to learn from; leave it out")
    return Tokens(np.asarray(ids[:max_length], np.int32), loss_mask)


def _encode(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    generation_prompt: bool,
    template_options: Mapping[str, Any] | None,
    where: str,
) -> list[int]:
    """The ids of the rendered messages, quoted control tokens as text."""
    quoted, sentinel = _quote(tokenizer, messages)
    rendered = _render(tokenizer, quoted, generation_prompt, template_options, where)
    ids = _encode_text(tokenizer, rendered, sentinel)
    if sentinel in rendered:
        plain = tokenizer(rendered.replace(sentinel, ""), add_special_tokens=False)["input_ids"]
        if _decode(tokenizer, ids) != _decode(tokenizer, plain) or ids == plain:
            raise UserError(
                f"{where}: a message quotes a control token and this tokenizer cannot encode that "
                f"as text; leave the message out"
            )
    return ids


def _quote(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message]
) -> tuple[list[Message], str]:
    """Messages whose quoted control tokens are broken by a character, and that character.

    Breaking after the first character survives whatever the template does to the text (trim, split,
    escape), which encoding the contents apart from the template would not. The pieces are then
    encoded one by one, so that only the tokens at a quotation differ from those of the whole text.
    """
    sentinel = _unused(messages)
    control = set(tokenizer.all_special_tokens)
    control |= {t.content for t in tokenizer.added_tokens_decoder.values() if t.special}
    quoted = []
    for message in messages:
        content = message.content
        if message.role != "assistant":
            for token in sorted(control):
                content = content.replace(token, token[0] + sentinel + token[1:])
        quoted.append(dataclasses.replace(message, content=content))
    return quoted, sentinel


def _unused(messages: Sequence[Message]) -> str:
    """A private-use character that occurs in no message."""
    used = set().union(*(message.content for message in messages))
    return next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)


def _render(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    generation_prompt: bool,
    template_options: Mapping[str, Any] | None,
    where: str,
) -> str:
    options = dict(template_options or {})
    if reserved := sorted(set(options) & set(_RESERVED_OPTIONS)):
        raise UserError(f"template_options: '{reserved[0]}' is not a variable of a chat template")
    plain = [dataclasses.asdict(message) for message in messages]
    try:
        # As a batch of one: an empty conversation, the prompt of an assistant turn that comes
        # first, is refused outside a batch.
        return tokenizer.apply_chat_template(
            [plain], tokenize=False, add_generation_prompt=generation_prompt, **options
        )[0]
    except (jinja2.TemplateError, ValueError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{where}: the chat template refuses the messages: {reason}") from error


def _encode_text(tokenizer: "PreTrainedTokenizerBase", text: str, sentinel: str) -> list[int]:
    pieces = [piece for piece in text.split(sentinel) if piece]
    return [i for p in pieces for i in tokenizer(p, add_special_tokens=False)["input_ids"]]


def _decode(tokenizer: "PreTrainedTokenizerBase", ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
