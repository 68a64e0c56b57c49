"""How long the target's pass takes by the number of tokens in it: is a trimmed draft saved work?

    python experiments/step_time.py --workdir=runs/demo --rows=8 --out=step_time.json

For R rows with P drafts each, the table gives the median seconds of a round whose drafts are
trimmed to B tokens in all, of the same round unpacked (always R * (1 + P) tokens), and of plain
rounds. Takes turns, so that a slow spell of the machine hits all alike. Writes a picture beside the
report.
"""

import dataclasses
import functools
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from dspark_jax.core import pictures
from dspark_jax.core.command import run_main
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.opened import open_target_of
from dspark_jax.decoding.rounds import draft_head, speculative_round, start
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.step_seconds import measure_steps
from dspark_jax.scheduling.step_costs import BatchCosts
from dspark_jax.training.checkpoint import choose_step, load_drafter, read_record


def run(workdir: Path, rows: int, context: int, repeats: int, out: Path) -> dict:
    record = read_record(workdir)
    with jax.set_mesh(make_mesh()):
        opened = open_target_of(record.config)
        target = opened.model
        drafter = load_drafter(record, workdir, choose_step(workdir, "best"))
        costs = measure_steps(
            target, drafter, target_name=opened.name, batches=(rows,), context=context,
            capacity=context + 64, repeats=repeats,
        )  # fmt: skip
        whole = unpacked_seconds(target, drafter, rows, context, repeats)
    report = dataclasses.asdict(costs) | {"unpacked_round_seconds": whole}
    write_json(out, report)
    (one,) = costs.batches
    plain = dict(zip(one.plain_tokens, one.plain_seconds, strict=True))
    found = []
    for size, seconds in zip(one.tokens, one.seconds, strict=True):
        both = one.draft_seconds + seconds
        found.append([size, f"{1e3 * seconds:.1f}", f"{1e3 * both:.1f}", f"{both / whole:.2f}",
                      f"{1e3 * plain[size]:.1f}" if size in plain else "-"])  # fmt: skip
    columns = ["tokens", "pass, ms", "round with drafting, ms", "over unpacked", "plain round, ms"]
    print(table(found, columns))
    print(f"{rows} rows, {context} tokens of context; unpacked round {1e3 * whole:.1f} ms, "
          f"drafting {1e3 * one.draft_seconds:.1f} ms")  # fmt: skip
    picture(one, whole, out.with_suffix(".png"))
    return report


def unpacked_seconds(target, drafter, rows: int, context: int, repeats: int) -> float:
    """Median of the round that verifies all drafts of all rows as a batch."""
    rng, proposals = np.random.default_rng(0), drafter.config.num_proposals
    ids = rng.integers(0, target.config.vocab_size, (rows, context)).astype(np.int32)
    params = jax.tree.map(lambda x: place(x, "batch"), SamplingParams.make(rows, 0.0, seeds=0))
    limits = jnp.full((1,), -1, jnp.int32), place(np.full(rows, 4096, np.int32), "batch")
    begin = jax.jit(start, static_argnames="max_new")
    prompt = place(ids, "batch", None), place(np.full(rows, context, np.int32), "batch")
    room = (repeats + 2) * (proposals + 1)
    state = begin(target, drafter, *prompt, params, *limits, max_new=room)
    head = draft_head(target, drafter)
    one = jax.jit(functools.partial(speculative_round), donate_argnames="state")
    times = []
    for _ in range(repeats + 1):
        jax.block_until_ready(state)
        began = time.perf_counter()
        state = jax.block_until_ready(one(target, drafter, head, state, params, *limits))
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def picture(costs: BatchCosts, whole: float, path: Path) -> None:
    figure = pictures._figure(width=6.4, height=4.0)
    axis = figure.subplots()
    pictures._style(axis, "Time of a round by the tokens verified in it",
                    "tokens of the target's pass, all rows", "milliseconds")  # fmt: skip
    both = [1e3 * (costs.draft_seconds + s) for s in costs.seconds]
    blue, red, green = pictures.COLOURS[:3]
    axis.plot(costs.tokens, both, color=blue, marker="o", label="packed, with drafting")
    plain = [1e3 * s for s in costs.plain_seconds]
    axis.plot(costs.plain_tokens, plain, color=green, marker="s", label="no drafts")
    axis.axhline(1e3 * whole, color=red, linestyle="--", label="unpacked, always all drafts")
    axis.set(xlim=(0, None), ylim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    pictures._save(figure, path)


def main() -> None:
    run(Path(_WORKDIR.value), _ROWS.value, _CONTEXT.value, _REPEATS.value, Path(_OUT.value))


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run with the drafter.")
    _ROWS = flags.DEFINE_integer("rows", 8, "Requests at a time.")
    _CONTEXT = flags.DEFINE_integer("context", 128, "Tokens behind every row.")
    _REPEATS = flags.DEFINE_integer("repeats", 7, "Rounds of each size, of which the median.")
    _OUT = flags.DEFINE_string("out", "step_time.json", "The report.")
    flags.mark_flags_as_required(["workdir"])
    run_main(main)
