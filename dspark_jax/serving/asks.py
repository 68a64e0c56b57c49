"""Requests in OpenAI's JSON to what the engine takes: everything is honoured or refused by name.

Fields as in OpenAI's API reference of chat and text completions; top_k, min_p, repetition_penalty,
min_tokens and timeout are additions with the meaning they have in vLLM (timeout: seconds until the
answer has to be finished). null stands for "not given" everywhere.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dspark_jax.data.conversation import Message
from dspark_jax.decoding.sampling import PENALTIES


class ApiError(Exception):
    """What the client is told, with an HTTP status."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """In OpenAI's shape."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else None)
        error = {
            "message": str(self),
            "type": kind or "invalid_request_error",
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, with the API's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None


@dataclasses.dataclass(frozen=True)
class Ask:
    """One request to be answered."""

    model: str
    prompt: str | tuple[int, ...] | tuple[Message, ...]  # text, tokens, or a conversation
    sampling: Sampling
    max_tokens: int | None  # None = as many as fit
    stop: tuple[str, ...]
    stream: bool
    stream_usage: bool  # a last chunk with the usage
    timeout: float | None  # seconds

    @property
    def chat(self) -> bool:
        """Whether it is a conversation."""
        return isinstance(self.prompt, tuple) and any(isinstance(m, Message) for m in self.prompt)


# Fields that may be there with a value that asks for nothing.
_NOTHING: dict[str, tuple] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none",),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),  # of tools, which there are none of
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "metadata": ({},),
    "ignore_eos": (False,),
}
# Who asks has no influence on the answer.
_LABELS = ("user", "safety_identifier")
_MOST_STOPS, _LONGEST_STOP = 16, 256


def parse_chat(body: Any) -> Ask:
    """A body of /v1/chat/completions.

    Raises:
      ApiError: 400, naming the field.
    """
    fields = _Fields(body)
    messages = fields.take("messages", _messages)
    if messages is None:
        raise ApiError(400, "messages is missing: give at least one user message", "messages")
    limit = fields.take("max_completion_tokens", _whole(1))
    old_limit = fields.take("max_tokens", _whole(1))
    if limit is not None and old_limit not in (None, limit):
        raise ApiError(400, "max_tokens and max_completion_tokens differ", "max_tokens")
    return fields.ask(messages, old_limit if limit is None else limit)


def parse_text(body: Any) -> Ask:
    """A body of /v1/completions; its max_tokens is 16 if not given, as OpenAI has it.

    Raises:
      ApiError: 400, naming the field.
    """
    fields = _Fields(body)
    prompt = fields.take("prompt", _prompt)
    if prompt is None:
        raise ApiError(400, "prompt is missing: give a string or a list of token ids", "prompt")
    limit = fields.take("max_tokens", _whole(1))
    return fields.ask(prompt, 16 if limit is None else limit)


class _Fields:
    """The fields of a body, each taken once; what is left at the end is not known here."""

    def __init__(self, body: Any):
        if not isinstance(body, dict):
            raise ApiError(400, "the body must be a JSON object")
        self._left = {name: value for name, value in body.items() if value is not None}

    def take(self, name: str, check: Callable[[Any, str], Any]) -> Any:
        """The checked value, or None if it is not given."""
        return check(self._left.pop(name), name) if name in self._left else None

    def ask(self, prompt: Any, max_tokens: int | None) -> Ask:
        """Everything that both kinds of request have."""
        model = self.take("model", _text)
        if not model:
            raise ApiError(400, "model is missing: see /v1/models", "model")
        given = {
            "temperature": self.take("temperature", _number(0, 2)),
            "top_p": self.take("top_p", _number(0, 1)),
            "top_k": self.take("top_k", _whole(-1)),
            "min_p": self.take("min_p", _number(0, 1)),
            "seed": self.take("seed", _whole(0, 2**32 - 1)),
            "presence_penalty": self.take("presence_penalty", _number(-2, 2)),
            "frequency_penalty": self.take("frequency_penalty", _number(-2, 2)),
            "repetition_penalty": self.take("repetition_penalty", _number(*PENALTIES)),
            "min_tokens": self.take("min_tokens", _whole(0)),
            "logit_bias": self.take("logit_bias", _logit_bias),
        }
        if given["top_p"] == 0:
            raise ApiError(400, "top_p is 0, give more than that", "top_p")
        given["top_k"] = 0 if given["top_k"] == -1 else given["top_k"]  # vLLM's "off"
        sampling = Sampling(**{name: x for name, x in given.items() if x is not None})
        stream = bool(self.take("stream", _flag))
        options = self.take("stream_options", _object) or {}
        if options and not stream:
            raise ApiError(400, "stream_options without stream", "stream_options")
        if unknown := sorted(set(options) - {"include_usage"}):
            raise ApiError(400, f"stream_options has {unknown[0]}: not supported", "stream_options")
        usage = options.get("include_usage")
        usage = usage is not None and _flag(usage, "stream_options.include_usage")
        stop, timeout = self.take("stop", _stop) or (), self.take("timeout", _number(0, 86400))
        for name in _LABELS:
            self.take(name, _text)
        for name, value in self._left.items():
            if name not in _NOTHING:
                raise ApiError(400, f"{name} is not supported by this server", name)
            if not any(type(x) is type(value) and x == value for x in _NOTHING[name]):  # 0 == False
                raise ApiError(400, f"{name}={_short(value)} is not supported: leave it out", name)
        return Ask(model, prompt, sampling, max_tokens, stop, stream, usage, timeout)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def _wrong(name: str, value: Any, wanted: str) -> ApiError:
    return ApiError(400, f"{name} is {_short(value)}, give {wanted}", name)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _object(value: Any, name: str) -> dict:
    if not isinstance(value, dict):
        raise _wrong(name, value, "an object")
    return value


def _number(low: float, high: float) -> Callable[[Any, str], float]:
    def check(value: Any, name: str) -> float:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low <= value <= high:
            raise _wrong(name, value, f"a number, {low:g} to {high:g}")
        return float(value)

    return check


def _whole(low: int, high: int = 2**31 - 1) -> Callable[[Any, str], int]:
    def check(value: Any, name: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise _wrong(name, value, f"a whole number, {low} to {high}")
        return value

    return check


def _stop(value: Any, name: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    good = isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)
    if not good or len(stops) > _MOST_STOPS or max(map(len, stops), default=0) > _LONGEST_STOP:
        wanted = f"a string or up to {_MOST_STOPS}, of 1 to {_LONGEST_STOP} characters"
        raise _wrong(name, value, wanted)
    return tuple(stops)


def _logit_bias(value: Any, name: str) -> dict[int, float]:
    biases, number = {}, _number(-100, 100)
    for token, bias in _object(value, name).items():
        if not token.isascii() or not token.isdigit() or len(token) > 9:
            raise ApiError(400, f"logit_bias: {_short(token)} is not a token id", name)
        biases[int(token)] = number(bias, f"{name}[{token}]")
    return biases


def _prompt(value: Any, name: str) -> str | tuple[int, ...]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int for token in value):
        return tuple(value)
    raise _wrong(name, value, "one prompt: a string or a list of token ids, not empty")


def _messages(value: Any, name: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(name, value, "a list of messages")
    messages = tuple(_message(one, f"{name}[{i}]") for i, one in enumerate(value))
    if messages[-1].role != "user":
        raise ApiError(400, "the last message must be the user's, whom the model answers", name)
    return messages


def _message(value: Any, name: str) -> Message:
    fields = {key: x for key, x in _object(value, name).items() if x not in (None, [])}
    role, content = fields.pop("role", None), fields.pop("content", "")
    role = "system" if role == "developer" else role
    if role not in ("system", "user", "assistant"):
        raise _wrong(f"{name}.role", role, "system, developer, user or assistant")
    if fields:
        raise ApiError(400, f"{name}.{next(iter(fields))} is not supported", name)
    if isinstance(content, list):  # parts
        for part in content:
            known = isinstance(part, dict) and part.get("type") == "text"
            if not known or not isinstance(part.get("text"), str):
                raise ApiError(400, f"{name}.content: only parts of type text are supported", name)
        content = "".join(part["text"] for part in content)
    return Message(role, _text(content, f"{name}.content"))
