"""How fast one stream decodes here: plain, speculative, beside transformers and the memory's limit.

    python experiments/bench_decode.py --workdir=runs/demo --out=runs/bench/decode.json

Plain greedy decoding reads every weight once for each token, so a machine that reads B bytes per
second cannot give more than B / weight bytes tokens per second. This prints what share of that is
reached, and what speculation with the run's drafter makes of it beside what its accepted length
and the measured costs of a round predict. PyTorch is needed for the comparison with transformers'
`generate` alone; where it is not installed that is said, and the figure is null.

Everything is measured in one process and in turns, so that a slow spell of the machine hits all
alike; medians count, and the spread is in the report. Prompts are the run's own, held out, and
answers are cut at a fixed number of tokens, without stop ids, the same for all.
"""

import dataclasses
import importlib.util
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from dspark_jax.core.command import run_main
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named
from dspark_jax.data.opened import OpenedTarget, open_target
from dspark_jax.decoding.costs import round_costs
from dspark_jax.decoding.evaluation import read_sets
from dspark_jax.decoding.plain import generate_plain
from dspark_jax.decoding.rounds import generate_speculative
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.training.checkpoint import choose_step, load_drafter, read_record

# name of the weights -> dtype and `weights` of `open_target`; each has a limit of its own
WEIGHTS = {
    "float32": ("float32", ""),
    "bfloat16": ("bfloat16", ""),
    "int8": ("float32", "int8"),
    "int8+bfloat16": ("bfloat16", "int8"),
}
_LEAST_READ = 600_000_000  # bytes: above the last-level caches of today's servers


@dataclasses.dataclass(frozen=True)
class Options:
    """What to measure."""

    new_tokens: int = 64
    prompts: int = 4
    repeats: int = 3
    weights: tuple[str, ...] = ("float32",)  # the first one's drafter is measured
    least_read: int = _LEAST_READ
    step: str = "best"


def run(workdir: Path, out: Path, options: Options) -> dict[str, Any]:
    """Measures, writes the report and returns it."""
    for name in options.weights:
        if name not in WEIGHTS:
            raise UserError(f"--weights={name}: choose from {', '.join(WEIGHTS)}")
    for name in ("new_tokens", "prompts", "repeats"):
        if getattr(options, name) < 2 - (name != "new_tokens"):
            raise UserError(f"--{name}={getattr(options, name)} is too few")
    record = read_record(workdir)
    parts, report = [], {}
    with jax.set_mesh(make_mesh(1, 1)):
        for number, weights in enumerate(options.weights):
            dtype, stored = WEIGHTS[weights]
            target = open_target(record.config.target, dtype, weights=stored)
            drafter = load_drafter(record, workdir, choose_step(workdir, options.step))
            parts.append(_measure(target, drafter, record, weights, options, peer=not number))
            del target, drafter
            report = _report(parts, workdir, record.config.target, options)
            write_json(out, report)
    return report


def _report(parts: list[dict], workdir: Path, target: str, options: Options) -> dict[str, Any]:
    first = parts[0]
    report = {
        key: first[key]
        for key in (
            "plain_over_transformers",
            "speculative_over_plain",
            "predicted_over_plain",
            "bandwidth_limit_tokens_per_second",
            "plain_share_of_limit",
        )
    }
    report |= {"weights": parts, "machine": machine(), "options": dataclasses.asdict(options)}
    return report | {"workdir": str(workdir), "target": target}


def _measure(target: OpenedTarget, drafter, record, weights: str, options: Options, peer: bool):
    """The figures of one kind of weights."""
    model, new = target.model, options.new_tokens
    sets = read_sets(
        target,
        record.config.evaluate.prompts,
        split="heldout",
        per_set=options.prompts,
        max_prompt_tokens=record.config.data.max_prompt_tokens,
        seed=0,
    )
    by_turns = itertools.zip_longest(*(one.prompts for one in sets))
    prompts = [prompt.ids for group in by_turns for prompt in group if prompt is not None]
    prompts = prompts[: options.prompts]
    width = max(map(len, prompts))
    params = SamplingParams.make(1, 0.0, seeds=0)
    params = jax.tree.map(lambda x: place(x, "batch"), params)
    nothing = jnp.full((1,), -1, jnp.int32)

    def arguments(ids: list[int], tokens: int):
        padded = np.pad(np.array([ids], np.int32), ((0, 0), (0, width - len(ids))))
        numbers = (place(np.array([n], np.int32), "batch") for n in (len(ids), tokens))
        length, limit = numbers
        return place(padded, "batch", None), length, params, nothing, limit

    def plain(ids: list[int], tokens: int) -> np.ndarray:
        out = generate_plain(model, *arguments(ids, tokens), max_new=new)
        return np.asarray(out.tokens)[0, :tokens]

    counts = {"rounds": 0, "tokens": 0}

    def speculative(ids: list[int], tokens: int) -> np.ndarray:
        out, stats = generate_speculative(model, drafter, *arguments(ids, tokens), max_new=new)
        if tokens == new:
            counts["rounds"] += int(stats.rounds[0])
            counts["tokens"] += int(stats.tokens[0])
        return np.asarray(out.tokens)[0, :tokens]

    ways: dict[str, Callable] = {"plain": plain, "speculative": speculative}
    if peer and (torch_way := _transformers(target)):
        ways["transformers"] = torch_way
    seconds, texts = _in_turns(ways, prompts, new, options.repeats, weights)

    # The part after the prompt, by which the limit and the predictions are stated.
    decoding = {
        name: [whole - first for whole, first in zip(s[new], s[1], strict=True)]
        for name, s in seconds.items()
    }
    bytes_read = sum(x.nbytes for x in named(model).values())
    if not model.config.tie_embeddings:  # of the table one row is read
        bytes_read -= model.embed[...].nbytes
    bandwidth = read_bandwidth(max(bytes_read, options.least_read), options.repeats)
    context = int(statistics.mean(map(len, prompts))) + new // 2
    costs = round_costs(model, drafter, context=context, repeats=5 * options.repeats)
    in_parts = sum(
        getattr(costs, f"{part}_seconds")
        for part in ("draft_backbone", "draft_head", "draft_chain", "verify", "extend")
    )
    length = counts["tokens"] / counts["rounds"]

    def median(name: str) -> float:
        return statistics.median(decoding[name])

    def ratio(name: str, over: str) -> float:
        """Of speeds: the median over pairs that ran one after the other."""
        pairs = zip(seconds[name][new], seconds[over][new], strict=True)
        return statistics.median(other / own for own, other in pairs)

    limit = bandwidth / bytes_read
    speed = (new - 1) / median("plain")
    return {
        "weights": weights,
        "weight_bytes": bytes_read,
        "bandwidth_bytes_per_second": bandwidth,
        "bandwidth_limit_tokens_per_second": limit,
        "plain_tokens_per_second": speed,
        "plain_share_of_limit": speed / limit,
        "plain_over_transformers": ratio("plain", "transformers")
        if "transformers" in ways
        else None,
        "accepted_length": length,
        "speculative_tokens_per_second": (new - 1) / median("speculative"),
        "speculative_over_plain": median("plain") / median("speculative"),
        "predicted_over_plain": length * costs.plain_step_seconds / in_parts,
        "predicted_over_plain_by_round": length * costs.plain_step_seconds / costs.round_seconds,
        "whole_call_speculative_over_plain": ratio("speculative", "plain"),
        "whole_call_seconds": {name: _spread(s[new]) for name, s in seconds.items()},
        "decoding_seconds": {name: _spread(s) for name, s in decoding.items()},
        "same_text_as_plain": {
            name: sum(np.array_equal(a, b) for a, b in zip(t, texts["plain"], strict=True))
            for name, t in texts.items()
        },
        "prompts": len(prompts),
        "round_costs": dataclasses.asdict(costs),
    }


def _in_turns(ways: dict[str, Callable], prompts, new: int, repeats: int, desc: str):
    """Seconds of every way for `new` tokens and for one, by prompt and repeat, and the texts."""
    seconds = {name: {new: [], 1: []} for name in ways}
    texts = {name: [way(ids, new) for ids in prompts] for name, way in ways.items()}  # compiles
    turns = [ids for _ in range(repeats) for ids in prompts]
    for ids in progress(turns, desc=desc, unit="turn"):
        for name, way in ways.items():
            for tokens in (new, 1):
                began = time.perf_counter()
                way(ids, tokens)
                seconds[name][tokens].append(time.perf_counter() - began)
    return seconds, texts


def _transformers(target: OpenedTarget) -> Callable | None:
    """transformers' greedy `generate` of the same weights in float32 on all cores, or None."""
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed (make torch): not compared with transformers' generate")
        return None
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(_cores())
    model = AutoModelForCausalLM.from_pretrained(target.directory, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # nothing ends early, as with us

    def generate(ids: list[int], tokens: int) -> np.ndarray:
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[0, len(ids) :].numpy()

    return generate


def read_bandwidth(size: int, repeats: int) -> float:
    """Bytes per second at which all cores read an array of `size` bytes, at the best of `repeats`.

    The faster of XLA's product of a matrix with a vector and of numpy's sum, a thread per core.
    """
    columns = 4096
    rows = -(-size // (4 * columns))
    matrix = jnp.ones((rows, columns), jnp.float32)
    read = jax.jit(lambda a, x: a @ x)
    vector = jnp.ones(columns, jnp.float32)
    host = np.asarray(matrix).reshape(-1)
    parts = np.array_split(host, _cores())
    best = float("inf")
    with ThreadPoolExecutor(len(parts)) as pool:
        jax.block_until_ready(read(matrix, vector))
        for _ in range(repeats):
            for way in (
                lambda: jax.block_until_ready(read(matrix, vector)),
                lambda: list(pool.map(np.sum, parts)),
            ):
                began = time.perf_counter()
                way()
                best = min(best, time.perf_counter() - began)
    return matrix.nbytes / best


def machine() -> dict[str, Any]:
    """What ran this."""
    names = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    device = jax.devices()[0]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": _cores(),
        "device": device.device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def summary(report: dict[str, Any]) -> str:
    """The report as a table."""
    columns = (
        "weights", "MB", "limit tok/s", "plain tok/s", "share", "plain / transformers",
        "accepted length", "speculative tok/s", "over plain", "predicted",
    )  # fmt: skip
    rows = [
        (
            part["weights"],
            part["weight_bytes"] / 1e6,
            part["bandwidth_limit_tokens_per_second"],
            part["plain_tokens_per_second"],
            part["plain_share_of_limit"],
            part["plain_over_transformers"],
            part["accepted_length"],
            part["speculative_tokens_per_second"],
            part["speculative_over_plain"],
            part["predicted_over_plain"],
        )
        for part in report["weights"]
    ]
    return table(rows, columns)


def main() -> None:
    """Entry point."""
    given = flags.FLAGS
    options = Options(
        new_tokens=given.new_tokens,
        prompts=given.prompts,
        repeats=given.repeats,
        weights=tuple(given.weights),
        step=given.step,
    )
    report = run(Path(given.workdir), Path(given.out), options)
    print(f"{summary(report)}\nreport: {given.out}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "runs/demo", "The run whose target and drafter are measured.")
    flags.DEFINE_string("out", "runs/bench/decode.json", "The report.")
    flags.DEFINE_integer("new_tokens", Options.new_tokens, "Tokens of one answer.")
    flags.DEFINE_integer("prompts", Options.prompts, "Held-out prompts.")
    flags.DEFINE_integer("repeats", Options.repeats, "Calls of each way per prompt.")
    flags.DEFINE_list("weights", list(Options.weights), f"Of {', '.join(WEIGHTS)}.")
    flags.DEFINE_string("step", "best", "The checkpoint: best, latest or a number.")
    run_main(main)
