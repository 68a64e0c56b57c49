"""The server's endpoints: OpenAI's chat and text completions, models, health and metrics."""

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dspark_jax.decoding.requests import Counts, Finish
from dspark_jax.serving.asks import ApiError, Ask, parse_chat, parse_text
from dspark_jax.serving.metrics import exposition
from dspark_jax.serving.service import Answering, Service

_DROPPED = 64 << 20  # bytes of a body beyond the limit that are taken in before it is refused
_FAILED = {  # what a client is told of an answer that did not come to its end
    Finish.DEADLINE: (504, "the answer was not finished within its timeout", "timeout"),
    Finish.CANCELLED: (503, "the server is stopping", "unavailable"),
    Finish.ERROR: (500, "the target gave NaN or infinite logits, or the engine failed", None),
}


def make_app(service: Service, api_key: str | None, max_body_bytes: int) -> Starlette:
    """The ASGI application.

    Args:
      api_key: that clients of /v1 have to send; None = everybody is served.
      max_body_bytes: of a request.
    """
    created = int(time.time())

    async def models(request: Request) -> Response:
        _authorise(request, api_key)
        model = {
            "id": service.name,
            "object": "model",
            "created": created,
            "owned_by": "dspark_jax",
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def model(request: Request) -> Response:
        _authorise(request, api_key)
        if request.path_params["name"] != service.name:
            raise ApiError(404, f"no such model; this server has {service.name!r}", "model")
        return JSONResponse(
            {"id": service.name, "object": "model", "created": created, "owned_by": "dspark_jax"}
        )

    def completions(parse: Callable[[Any], Ask]) -> Callable:
        async def endpoint(request: Request) -> Response:
            _authorise(request, api_key)
            ask = parse(await _json(request, max_body_bytes))
            answering = await service.begin(ask)
            answer = _Answer(ask, answering)
            if ask.stream:
                return _Events(answering, answer.events())
            return await _unless_gone(request, answer.whole())

        return endpoint

    async def health(request: Request) -> Response:
        body = {"status": "ok" if service.healthy else service.failure or "stopping"}
        return JSONResponse(body, 200 if service.healthy else 503)

    async def metrics(request: Request) -> Response:
        return Response(exposition(service), media_type="text/plain; version=0.0.4")

    routes = [
        Route("/v1/chat/completions", completions(parse_chat), methods=["POST"]),
        Route("/v1/completions", completions(parse_text), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.stop)

    handlers = {ApiError: _refused, HTTPException: _unknown, Exception: _fault}
    return Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)


async def _refused(request: Request, error: ApiError) -> Response:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(error.status)
    return JSONResponse(error.body(), error.status, headers)


async def _unknown(request: Request, error: HTTPException) -> Response:
    known = "/v1/chat/completions, /v1/completions, /v1/models, /health, /metrics"
    what = f"{request.method} {request.url.path}: {error.detail}; there are {known}"
    return JSONResponse(ApiError(error.status_code, what).body(), error.status_code, error.headers)


async def _fault(request: Request, error: Exception) -> Response:
    return JSONResponse(ApiError(500, "a fault of the server, see its log").body(), 500)


def _authorise(request: Request, api_key: str | None) -> None:
    if api_key is None:
        return
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
        raise ApiError(401, "a wrong API key, or none", None, "invalid_api_key")


async def _json(request: Request, limit: int) -> Any:
    """The body, as far as the limit allows.

    What is too much is still taken in, up to a bound, and dropped: a client that is cut off while
    it sends would see a broken connection in place of the reason.
    """
    too_much = ApiError(413, f"the body is larger than this server's {limit} bytes")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit + _DROPPED:
        raise too_much
    body, size = bytearray(), 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit + _DROPPED:
                raise too_much
            if size <= limit:
                body += part
    except ClientDisconnect:
        raise ApiError(400, "the client left in the middle of its request") from None
    if size > limit:
        raise too_much
    try:
        found = json.loads(body)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # "\ud800" is JSON, but no text that could be answered
        half = ascii(error.object[error.start])
        raise ApiError(400, f"the body has half of a surrogate pair, {half}: no text") from None
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from None
    return found


async def _unless_gone(request: Request, answer: Any) -> Response:
    """The answer, unless the client leaves before: then nobody needs it."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(answer), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        return Response(status_code=499)  # seen by nobody
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Events(StreamingResponse):
    """Server-sent events; however the response ends, nobody answers for it any longer."""

    def __init__(self, answering: Answering, events: AsyncIterator[str]):
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._answering = answering

    async def __call__(self, *asgi: Any) -> None:
        """Also where the client left before the first event."""
        try:
            await super().__call__(*asgi)
        finally:
            self._answering.ticket.cancel()


class _Answer:
    """One answer in OpenAI's words."""

    def __init__(self, ask: Ask, answering: Answering):
        self._ask, self._answering = ask, answering
        kind = "chatcmpl" if ask.chat else "cmpl"
        self._id, self._created = f"{kind}-{uuid.uuid4().hex}", int(time.time())

    async def whole(self) -> Response:
        """At once, when it has ended."""
        text, finish = "", None
        async for update in self._answering.updates():
            text, finish = text + update.text, update.finish
        if finish in _FAILED:
            status, message, code = _FAILED[finish]
            raise ApiError(status, message, None, code)
        said = {"text": text}
        if self._ask.chat:
            said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = {"index": 0, **said, "finish_reason": finish.value, "logprobs": None}
        return JSONResponse(self._body("", [choice]) | {"usage": self._usage()})

    async def events(self) -> AsyncIterator[str]:
        """As server-sent events, one for every round that shows something."""
        if self._ask.chat:
            yield self._event([self._delta({"role": "assistant", "content": ""})])
        async with contextlib.aclosing(self._answering.updates()) as updates:
            async for update in updates:
                if update.text:
                    said = {"content": update.text} if self._ask.chat else update.text
                    yield self._event([self._delta(said)])
                if update.finish in _FAILED:
                    status, message, code = _FAILED[update.finish]
                    yield _line(ApiError(status, message, None, code).body())
                    return
                if update.finish is not None:
                    last = self._delta({} if self._ask.chat else "", update.finish.value)
                    yield self._event([last])
        if self._ask.stream_usage:
            yield _line(self._body(".chunk", []) | {"usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _delta(self, said: Any, finish: str | None = None) -> dict[str, Any]:
        name = "delta" if self._ask.chat else "text"
        return {"index": 0, name: said, "finish_reason": finish, "logprobs": None}

    def _event(self, choices: list[dict]) -> str:
        usage = {"usage": None} if self._ask.stream_usage else {}
        return _line(self._body(".chunk", choices) | usage)

    def _body(self, chunk: str, choices: list[dict]) -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if self._ask.chat else "text_completion"
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._ask.model,
            "choices": choices,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, ticket = self._answering.prompt_tokens, self._answering.ticket
        count = len(ticket.tokens)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "total_tokens": prompt + count,
            "speculation": _speculation(ticket.counts),
        }


def _speculation(counts: Counts) -> dict[str, Any]:
    return {
        "rounds": counts.rounds,
        "drafted_tokens": counts.drafted,
        "verified_tokens": counts.verified,
        "accepted_tokens": counts.accepted,
        "accepted_length": counts.tokens / counts.rounds if counts.rounds else None,
    }


def _line(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
