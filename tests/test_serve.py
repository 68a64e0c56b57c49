"""The server as a client meets it: OpenAI's own client, a real process, a real socket.

pytest tests/test_serve.py
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dspark_jax import serve
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.chat import render_next
from dspark_jax.data.conversation import Message
from dspark_jax.data.opened import open_target
from dspark_jax.decoding.engine import EngineOptions
from dspark_jax.decoding.plain import generate_plain
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.serving.asks import ApiError, parse_chat, parse_text

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
reserved = pytest.importorskip("dspark_jax.serving.server").reserved

KEY, NEW, CONTEXT = "a-key", 24, 128
SUN = [{"role": "user", "content": "sun 1?"}]


# ---- What is asked -----------------------------------------------------------------------------

CHAT = {"model": "m", "messages": SUN}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"messages": None}, "messages is missing"),
        ({"messages": []}, "messages is [], give a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is 'tool', give sys"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "last message must be the user's"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content is 5, give a string"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "parts of type text",
        ),
        ({"messages": [{"role": "user", "content": "x", "name": "bob"}]}, "name is not supported"),
        ({"model": None}, "model is missing"),
        ({"temperature": 2.5}, "temperature is 2.5, give a number, 0 to 2"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0, give more"),
        ({"n": 2}, "n=2 is not supported"),
        ({"logprobs": True}, "logprobs=True is not supported"),
        ({"top_logprobs": 3}, "top_logprobs=3 is not supported"),
        ({"tools": [{"type": "function"}]}, "tools="),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"stop": ["a"] * 17}, "stop is"),
        ({"stop": [""]}, "give a string or up to 16"),
        ({"stop": [1]}, "stop is [1]"),
        ({"seed": -1}, "seed is -1, give a whole number, 0 to 4294967295"),
        ({"max_tokens": 0}, "max_tokens is 0, give a whole number, 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "differ"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5"),
        ({"logit_bias": {"x": 1}}, "logit_bias: 'x' is not a token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias[5] is 101, give a number, -100 to 100"),
        ({"presence_penalty": 3}, "presence_penalty is 3"),
        ({"stream_options": {"include_usage": True}}, "stream_options without stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options has x"),
        ({"temprature": 1}, "temprature is not supported"),
        ({"logprobs": 0}, "logprobs=0 is not supported"),  # of text completions: log probabilities
        ({"n": True}, "n=True is not supported"),
        ({"repetition_penalty": 10**400}, "give a number, 1e-06 to 1e+06"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300, give a number"),
        ({"timeout": -1}, "timeout is -1"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(changes, message):
    with pytest.raises(ApiError) as error:
        parse_chat(CHAT | changes)
    assert error.value.status == 400 and message in str(error.value)
    body = error.value.body()["error"]
    assert body["type"] == "invalid_request_error" and body["message"] == str(error.value)


def test_what_asks_for_nothing_is_fine():
    nulls = dict.fromkeys(("stop", "seed", "n", "tools", "logit_bias", "unheard_of"))
    defaults = {"n": 1, "logprobs": False, "tools": [], "user": "me", "top_k": -1}
    defaults |= {"response_format": {"type": "text"}}
    plain = parse_chat(CHAT)
    assert parse_chat(CHAT | nulls) == parse_chat(CHAT | defaults) == plain
    assert plain.sampling.temperature == 1.0 and plain.max_tokens is None and plain.chat
    parts = [{"type": "text", "text": "sun "}, {"type": "text", "text": "1?"}]
    assert parse_chat(CHAT | {"messages": [{"role": "user", "content": parts}]}) == plain
    asked = {"stop": "x", "max_completion_tokens": 5, "logit_bias": {"7": -3}, "top_k": 4}
    found = parse_chat(CHAT | asked | {"stream": True, "stream_options": {"include_usage": True}})
    assert (found.stop, found.max_tokens, found.stream, found.stream_usage) == (
        ("x",),
        5,
        True,
        True,
    )
    assert found.sampling.logit_bias == {7: -3.0} and found.sampling.top_k == 4


@pytest.mark.parametrize(
    "prompt, expected",
    [("hi", "hi"), ([1, 2], (1, 2)), (["hi"], "hi"), ([[1, 2]], (1, 2)), (None, None), ("", None),
     ([], None), (["a", "b"], None), ([True], None), ([1.0], None)],
)  # fmt: skip
def test_prompts_of_text_completions(prompt, expected):
    body = {"model": "m", "prompt": prompt}
    if expected is None:
        with pytest.raises(ApiError, match="prompt"):
            parse_text(body)
    else:
        ask = parse_text(body)
        assert (ask.prompt, ask.max_tokens, ask.chat) == (expected, 16, False)
    for other in ([], "x", None, 3):
        with pytest.raises(ApiError, match="JSON object"):
            parse_text(other)


# ---- A server ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Running:
    process: subprocess.Popen
    url: str
    client: object

    def get(self, path: str, key: str | None = None) -> tuple[int, str]:
        return self.send(path, None, key)

    def send(self, path: str, body: bytes | None, key: str | None = KEY) -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self.url + path, body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics")[1], re.M)
        return float(found[1])

    def settled(self) -> None:
        """Waits until nothing runs: no request has a row for ever."""
        for _ in range(600):
            if not self.metric("dspark_running_requests") + self.metric("dspark_waiting_requests"):
                return
            time.sleep(0.05)
        raise AssertionError("a row is stuck")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    tiny.make_target(folder / "target")
    prompts = tiny.write_prompts(folder / "prompts.jsonl", 2)
    (folder / "key").write_text(KEY + "\n")
    with jax.set_mesh(make_mesh()):
        tiny.make_run(folder / "run", tiny.make_config(folder / "target", prompts))
    return folder


def start(folder, *flags: str) -> Running:
    command = [sys.executable, "-m", "dspark_jax.serve", f"--workdir={folder / 'run'}", "--port=0",
               "--name=tiny", "--rows=2", f"--max_context={CONTEXT}", "--queue_limit=4",
               f"--api_key_file={folder / 'key'}", "--nowarm_up", *flags]  # fmt: skip
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    line = process.stdout.readline()
    if not line.startswith("tiny at http://127.0.0.1:"):
        process.kill()
        raise AssertionError(line + process.stderr.read())
    url = line.split()[2].removesuffix(",").removesuffix("/v1")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)
    return Running(process, url, client)


@pytest.fixture(scope="module")
def server(folder):
    running = start(folder, "--scheduler=all")
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def plain(folder):
    """Plain decoding in this process: messages or ids -> ids, text."""
    with jax.set_mesh(make_mesh()):
        target = open_target(str(folder / "target"), "float32")

        def answer(asked, max_tokens: int = NEW) -> tuple[list[int], str]:
            ids = asked
            if isinstance(asked[0], dict):
                messages = [Message(m["role"], m["content"]) for m in asked]
                ids = render_next(target.tokenizer, messages).ids
            padded = np.zeros((1, 64), np.int32)
            padded[0, : len(ids)] = ids
            out = generate_plain(
                target.model, place(padded, "batch", None),
                place(np.array([len(ids)], np.int32), "batch"),
                SamplingParams.make(1, 0.0, seeds=0), jnp.asarray(target.stop_ids, jnp.int32),
                place(np.array([max_tokens], np.int32), "batch"), max_new=NEW,
            )  # fmt: skip
            tokens = out.tokens[0, : int(out.count[0])].tolist()
            kept = [token for token in tokens if token not in target.stop_ids]
            options = {"clean_up_tokenization_spaces": False}
            return tokens, target.tokenizer.decode(kept, **options)

        yield answer


def test_chat_streamed_and_whole_is_plain_decoding(server, plain):
    tokens, text = plain(SUN)
    asked = {"model": "tiny", "messages": SUN, "max_tokens": NEW, "temperature": 0}
    whole = server.client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == ("length" if len(tokens) == NEW else "stop")
    usage = whole.usage
    assert usage.completion_tokens == len(tokens)
    assert usage.total_tokens == usage.prompt_tokens + len(tokens)
    counts = usage.speculation
    assert counts["rounds"] > 0 and counts["drafted_tokens"] == 3 * counts["rounds"]
    assert counts["accepted_tokens"] <= counts["verified_tokens"] <= counts["drafted_tokens"]
    chunks = list(
        server.client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    *parts, last = chunks
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts if part.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert last.choices == [] and last.usage.completion_tokens == len(tokens)
    assert last.usage.speculation == counts


def test_text_completions_and_stop_strings(server, plain):
    ids = [5, 9, 30, 44]
    tokens, text = plain(ids)
    asked = {"model": "tiny", "max_tokens": NEW, "temperature": 0}
    whole = server.client.completions.create(prompt=ids, **asked)
    assert whole.choices[0].text == text
    stop = text[6:8]
    cut = server.client.completions.create(prompt=ids, stop=["never there", stop], **asked)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < len(tokens)
    chunks = server.client.completions.create(prompt=ids, stop=stop, stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut.choices[0].text


def test_many_at_once_each_get_their_own(server, plain):
    """More than there are rows and places in the queue: the others are told to come again."""
    prompts = [[5 + i, 9, 30 + i] for i in range(12)]
    expected = [plain(prompt)[1] for prompt in prompts]

    async def ask(client, prompt):
        try:
            found = await client.completions.create(
                model="tiny", prompt=prompt, max_tokens=NEW, temperature=0
            )
            return found.choices[0].text
        except openai.RateLimitError as error:
            assert "4 requests are waiting already" in str(error)
            return None

    async def everybody():
        options = {"base_url": f"{server.url}/v1", "api_key": KEY, "max_retries": 0}
        async with openai.AsyncOpenAI(**options) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    found = asyncio.run(everybody())
    served = [
        (text, right) for text, right in zip(found, expected, strict=True) if text is not None
    ]
    assert 4 <= len(served) < 12 and all(text == right for text, right in served)
    server.settled()


def test_who_leaves_frees_the_row(server):
    asked = {"model": "tiny", "max_tokens": 120, "temperature": 0}
    stream = server.client.completions.create(prompt=[5, 6], stream=True, **asked)
    next(iter(stream))
    stream.close()
    impatient = server.client.with_options(timeout=0.02)
    for token in range(7, 12):
        with contextlib.suppress(openai.APITimeoutError):
            impatient.completions.create(prompt=[5, token], **asked)
    server.settled()
    assert server.metric('dspark_requests_total{finish="cancelled"}') >= 1


def test_bad_requests_get_a_status_and_a_reason(server):
    create = server.client.chat.completions.create
    asked = {"model": "tiny", "messages": SUN, "max_tokens": 4, "temperature": 0}
    for changes, kind, message in [
        ({"model": "gpt-4"}, openai.NotFoundError, "there is no model 'gpt-4' here"),
        ({"n": 2}, openai.BadRequestError, "n=2 is not supported"),
        ({"max_tokens": 500}, openai.BadRequestError, "more than this server's context of 128"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, openai.BadRequestError, "context"),
        ({"extra_body": {"timeout": 0.0}}, openai.InternalServerError, "within its timeout"),
    ]:
        with pytest.raises(kind, match=re.escape(message)):
            create(**asked | changes)
    with pytest.raises(openai.BadRequestError, match="outside of the vocabulary"):
        server.client.completions.create(model="tiny", prompt=[99999], max_tokens=4)
    with pytest.raises(openai.AuthenticationError, match="a wrong API key"):
        server.client.with_options(api_key="other").models.list()
    path = "/v1/completions"
    for body, key, status, message in [
        (b"{", KEY, 400, "not JSON"),
        (b"[]", KEY, 400, "JSON object"),
        (b"[" * 100_000, KEY, 400, "not JSON"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', KEY, 400, "surrogate pair, '\\ud800'"),
        (b"x" * (1 << 21), KEY, 413, "larger than this server's 1048576 bytes"),
        (b"{}", None, 401, "none"),
    ]:
        found = server.send(path, body, key)
        assert found[0] == status and message in json.loads(found[1])["error"]["message"]
    assert server.get("/nowhere")[0] == 404 and server.get(path)[0] == 405
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    server.settled()


def test_metrics_and_health(server):
    from prometheus_client.parser import text_string_to_metric_families

    assert json.loads(server.get("/health")[1]) == {"status": "ok"}
    families = {f.name: f for f in text_string_to_metric_families(server.get("/metrics")[1])}
    assert families["dspark_accepted_length"].samples[0].value >= 1
    assert families["dspark_rows"].samples[0].value == 2
    ended = {s.labels["finish"]: s.value for s in families["dspark_requests"].samples}
    assert ended["length"] > 0 and ended["error"] == 0
    verified, accepted = (
        families[f"dspark_{name}_tokens"].samples[0].value for name in ("verified", "accepted")
    )
    assert accepted <= verified


def test_a_port_is_taken_at_once_and_open_later():
    with reserved("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):  # nobody is kept waiting by a loading server
            socket.create_connection(("127.0.0.1", port), timeout=5)
        first.listen()
        said = f"port {port}: .*in use; choose another --port"
        with pytest.raises(UserError, match=said), reserved("127.0.0.1", port):
            pass
    for host, port, said in [
        ("127.0.0.1", 70000, "--port=70000: give 0"),
        ("127.0.0.1", -1, "--port=-1: give 0"),
        ("no such host", 0, "--host=no such host: no such address"),
    ]:
        with pytest.raises(UserError, match=said), reserved(host, port):
            pass


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"port": 65536}, "--port=65536"),
        ({"grace": float("nan")}, "--grace=nan: give 0 to 86400"),
        ({"grace": float("inf")}, "--grace=inf"),
        ({"max_body_bytes": 0}, "--max_body_bytes=0: give at least 1"),
        ({"max_tokens": -5}, "--max_new_tokens=-5"),
        ({"engine": EngineOptions(rows=0, max_context=128)}, "rows is 0, give at least 1"),
        ({"engine": EngineOptions(queue_limit=-1, max_context=128)}, "queue_limit is -1"),
    ],
)
def test_what_cannot_be_served(folder, changes, said):
    options = serve.Options(engine=EngineOptions(max_context=128))
    with pytest.raises(UserError, match=said):
        serve.run(folder / "run", dataclasses.replace(options, **changes))


@pytest.mark.parametrize("key, said", [("", "empty"), ("caf\u00e9", "ASCII"), ("a\nb", "one line")])
def test_keys_that_no_client_could_send(tmp_path, key, said):
    (tmp_path / "key").write_text(key, encoding="utf-8")
    with pytest.raises(UserError, match=said):
        serve._api_key(str(tmp_path / "key"))


@pytest.mark.slow
def test_the_end_lets_those_who_are_served_finish(folder, plain):
    """A stream goes on after SIGTERM to its end, a newcomer is refused, the exit code is 0."""
    running = start(folder, "--scheduler=hardware", "--grace=30")
    expected = plain(SUN)[1]
    asked = {"model": "tiny", "messages": SUN, "max_tokens": NEW, "temperature": 0}
    stream = iter(running.client.chat.completions.create(**asked, stream=True))
    text = next(stream).choices[0].delta.content
    running.process.send_signal(signal.SIGTERM)
    text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == expected
    assert running.process.wait(timeout=60) == 0
    with pytest.raises(openai.APIConnectionError):
        running.client.models.list()


@pytest.mark.slow
def test_no_time_to_finish(folder):
    running = start(folder, "--scheduler=off", "--grace=0")
    asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 120, "temperature": 0,
             "logit_bias": {str(tiny.END): -100}}  # fmt: skip
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(running.client.completions.create, **asked) for _ in range(6)]
        time.sleep(0.3)
        running.process.send_signal(signal.SIGTERM)
        for future in waiting:
            error = future.exception(timeout=60)
            assert error is None or isinstance(error, openai.APIError)
    assert running.process.wait(timeout=60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        (["--scheduler=sometimes"], "--scheduler=sometimes: write all, off"),
        (["--scheduler=fixed:9"], "the drafter proposes 3"),
        (["--max_context=300"], "max_context 300"),
        (["--api_key_file=nowhere"], "--api_key_file=nowhere: cannot be read"),
        (["--workdir=nowhere"], "no run here"),
    ],
)
def test_a_wrong_start_ends_in_one_line(folder, flags, message):
    command = [sys.executable, "-m", "dspark_jax.serve", f"--workdir={folder / 'run'}", "--port=0",
               "--max_context=128"]  # fmt: skip
    found = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert found.returncode == 2 and message in found.stderr, found.stderr
