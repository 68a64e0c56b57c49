"""A thousand requests through one engine: every answer its own, memory flat.

pytest -m slow tests/test_soak.py -s
"""

import dataclasses
import gc
import resource
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.chat import response_text
from dspark_jax.data.opened import open_target
from dspark_jax.decoding.engine import Engine, EngineOptions, Finish, Request
from dspark_jax.decoding.plain import generate_plain
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.stopping import first_stop
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.schedulers import CostTable
from dspark_jax.training.checkpoint import load_drafter, read_record

ROWS, WIDTH, NEW, SIZES = 32, 48, 40, (16, 32, 64, 96, 128)


def make_requests(number: int, seed: int) -> list[Request]:
    """Prompts and limits of all lengths; of some the deadline has passed."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(number):
        prompt = rng.integers(3, tiny.LAST_TOKEN + 1, rng.integers(1, WIDTH + 1)).tolist()
        deadline = time.monotonic() - 1 if rng.random() < 0.02 else None
        found.append(Request(tuple(prompt), int(rng.integers(1, NEW + 1)), deadline=deadline))
    return found


def plain_answers(target, requests: list[Request], batch: int = 50) -> list[tuple]:
    """Tokens and finish of each, by plain decoding in batches."""
    stop_ids, answers = jnp.asarray(target.stop_ids, jnp.int32), []
    for first in range(0, len(requests), batch):
        part = requests[first : first + batch]
        ids, lengths = np.zeros((len(part), WIDTH), np.int32), [len(r.prompt) for r in part]
        for row, request in zip(ids, part, strict=True):
            row[: len(request.prompt)] = request.prompt
        out = generate_plain(
            target.model, place(ids, "batch", None), place(np.array(lengths, np.int32), "batch"),
            SamplingParams.make(len(part), 0.0, seeds=0), stop_ids,
            place(np.array([r.max_tokens for r in part], np.int32), "batch"), max_new=NEW,
        )  # fmt: skip
        out = jax.device_get(out)
        for row in range(len(part)):
            finish = Finish.STOP if out.reason[row] == 1 else Finish.LENGTH
            answers.append((out.tokens[row, : out.count[row]].tolist(), finish))
    return answers


def with_stops(target, requests: list[Request], answers: list[tuple], seed: int) -> tuple:
    """Stop strings for two requests of five, most of them cut out of the answer's own text, and
    what the answers (tokens, text, finish) then are."""
    rng, changed, expected = np.random.default_rng(seed), [], []

    def text_of(ids):
        return response_text(target.tokenizer, ids, target.stop_ids)

    for request, (tokens, finish) in zip(requests, answers, strict=True):
        text, stop = text_of(tokens), ()
        if text and rng.random() < 0.4:
            at, size = rng.integers(len(text)), rng.integers(1, 4)
            own = text[at : at + size].strip("\ufffd")
            stop = tuple({own, "zq", "never"} - {""})
        end = first_stop(tokens, text_of, stop)
        if end is None:
            expected.append((tokens, text, finish))
        else:
            expected.append((tokens[: end.tokens], end.text, Finish.STOP))
        changed.append(dataclasses.replace(request, stop=stop))
    return changed, expected


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.slow
def test_a_thousand_requests(tmp_path):
    """At 32 at a time, with cancellations at any moment."""
    target_dir = tiny.make_target(tmp_path / "target")
    prompts = tiny.write_prompts(tmp_path / "prompts.jsonl", 2)
    workdir = tiny.make_run(tmp_path / "run", tiny.make_config(target_dir, prompts))
    costs = CostTable.make(SIZES, [5.0, 4.5, 4.0, 3.0, 2.5])
    with jax.set_mesh(make_mesh()):
        target = open_target(str(target_dir), "float32")
        drafter = load_drafter(read_record(workdir), workdir, 1)
        requests = make_requests(1000, 0)
        answers = plain_answers(target, requests)
        requests, expected = with_stops(target, requests, answers, 2)
        options = EngineOptions(
            rows=ROWS, max_context=WIDTH + NEW, queue_limit=ROWS, joins_per_step=8, sizes=SIZES
        )
        policy = Policy("hardware", costs=costs)
        engine = Engine(target.model, drafter, target.stop_ids, options, policy, target.tokenizer)
        rng, tickets, texts, memory, arrays = np.random.default_rng(1), [], {}, [], []
        doomed = {}
        rounds = 0
        while True:
            while len(tickets) < len(requests) and (engine.running + len(engine.waiting) < ROWS):
                number = len(tickets)
                texts[number] = []
                ticket = engine.submit(
                    requests[number], lambda update, n=number: texts[n].append(update.text)
                )
                tickets.append(ticket)
                if rng.random() < 0.15:
                    doomed[number] = rounds + int(rng.integers(0, 25))
                if number % 100 == 99:
                    gc.collect()
                    memory.append(resident_bytes())
                    arrays.append(len(jax.live_arrays()))
            for number, when in list(doomed.items()):
                if rounds >= when:
                    tickets[number].cancel()
                    del doomed[number]
            if not engine.step() and len(tickets) == len(requests):
                break
            rounds += 1
    finished = dict.fromkeys(Finish, 0)
    for number, (ticket, (tokens, text, finish)) in enumerate(zip(tickets, expected, strict=True)):
        finished[ticket.finish] += 1
        if ticket.finish in (Finish.CANCELLED, Finish.DEADLINE):
            assert ticket.tokens == tokens[: len(ticket.tokens)], number
            assert text.startswith("".join(texts[number])), number
        else:
            assert (ticket.tokens, ticket.finish) == (tokens, finish), number
            assert ticket.text == text == "".join(texts[number]), number
    print(f"\n{rounds} rounds; {finished}; accepted length {engine.figures.accepted_length:.2f}, "
          f"verified {engine.figures.verified_per_request:.2f}; "
          f"MB after each 100 requests: {[round(m / 2**20) for m in memory]}; "
          f"arrays: {arrays}")  # fmt: skip
    assert min(finished[f] for f in (Finish.STOP, Finish.LENGTH, Finish.CANCELLED)) >= 50
    assert finished[Finish.DEADLINE] >= 5 and finished[Finish.ERROR] == 0
    assert sum(bool(r.stop) and e[2] == Finish.STOP for r, e in zip(requests, expected)) > 50
    assert engine.running == 0 and not len(engine.waiting)
    assert engine.figures.speculative.accepted > 100
    assert memory[-1] - memory[2] < 16 * 2**20, "memory grows"
    assert max(arrays[2:]) - min(arrays[2:]) <= 64
