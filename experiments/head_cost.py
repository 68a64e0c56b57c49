"""What the sequential head costs: seconds of a round with and without it.

    python experiments/head_cost.py --out=runs/head_cost
    python experiments/head_cost.py --temperature=1 --vocab=12288 --out=runs/head_cost
    python experiments/head_cost.py --part=count

Drafters of random weights (latency does not depend on values) for the bundled target, in the shape
of configs/smollm2.py: without a head, and with vanilla, gated and rnn. For every block size and
batch the four take turns in one process, each a whole speculative round as decoding runs it; a head
costs the median over turns of its round's seconds over those of the round without, less one.

`count` runs nothing: FLOPs and bytes of a round of the Qwen3 configs, and what share the head has
where each part is bound by arithmetic or memory of the chip. Writes head_cost.json and
head_cost.png to --out. Cases that are there already are kept.
"""

import dataclasses
import json
import runpy
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from bench_decode import machine
from flax import nnx

from dspark_jax.core.chips import Chip, chip_named
from dspark_jax.core.command import run_main
from dspark_jax.core.config import DrafterConfig, RunConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.pictures import COLOURS, MARKERS
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.opened import open_target
from dspark_jax.decoding.costs import rewound_round
from dspark_jax.decoding.plain import Generated
from dspark_jax.decoding.rounds import RoundState, RoundStats, draft_head
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.target import Target

ROOT = Path(__file__).resolve().parent.parent
HEADS = ("none", "vanilla", "gated", "rnn")
GOAL = 0.013  # the paper's Figure 4: block of 16, batch 128
QWEN3 = ("qwen3_4b", "qwen3_8b", "qwen3_14b")
CHIPS = ("v5e", "v5p", "v6e", "H200")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    gammas: tuple[int, ...] = (4, 8, 12, 16)
    batches: tuple[int, ...] = (1, 8, 32)
    temperature: float = 0.0
    vocab: int = 0  # tokens that the drafter may propose, 0 = all
    context: int = 128  # tokens before the anchor
    repeats: int = 9
    seconds: float = 60.0  # a case ends after so long, once it has had three turns


# ---- Measured ---------------------------------------------------------------------------------


def run(name: str, out: Path, options: Options) -> dict[str, Any]:
    """Measures what head_cost.json does not have yet, writing it after every case.

    Raises:
      UserError: no such target, or nothing to do.
    """
    if min(options.gammas + options.batches + (options.repeats,), default=0) < 1:
        raise UserError("--gammas, --batches and --repeats take numbers of 1 and above")
    path = out / "head_cost.json"
    report = json.loads(path.read_text()) if path.exists() else {"cases": []}
    base = _config("smollm2").drafter
    with jax.set_mesh(make_mesh(1, 1)):
        target = open_target(name, "float32").model
        for batch in options.batches:
            for gamma in options.gammas:
                case = {"target": name, "gamma": gamma, "batch": batch}
                case |= {key: getattr(options, key) for key in ("temperature", "vocab", "context")}
                if any(case.items() <= one.items() for one in report["cases"]):
                    continue
                config = dataclasses.replace(base, block_size=gamma, vocab_size=options.vocab)
                case["seconds"] = _case(target, config, batch, options)
                report["cases"].append(case | _shares(case["seconds"]))
                report["machine"] = machine()
                write_json(path, report)
                print(summary({"cases": report["cases"][-1:]}), flush=True)
                jax.clear_caches()  # programs of one case at a time
    return report


def _config(name: str) -> RunConfig:
    table = runpy.run_path(str(ROOT / "configs" / f"{name}.py"))["get_config"]("")
    return from_mapping(RunConfig, table.to_dict())


def _case(
    target: Target, config: DrafterConfig, batch: int, options: Options
) -> dict[str, list[float]]:
    """Seconds of a round by head, one for each turn."""
    drafters = {head: _drafter(target, config, head) for head in HEADS}
    lm_head = draft_head(target, drafters["none"])
    params = SamplingParams.make(batch, options.temperature, seeds=list(range(batch)))
    params = jax.tree.map(lambda x: place(x, "batch"), params)
    gamma = config.block_size
    # Nothing ends: no stop id, and a limit that one round does not reach.
    limits = jnp.full((1,), -1, jnp.int32), place(np.full(batch, gamma + 2, np.int32), "batch")
    state = _state(target, drafters["none"], batch, options.context)
    seconds: dict[str, list[float]] = {head: [] for head in HEADS}
    started = time.perf_counter()
    for turn in range(options.repeats + 1):
        for head, drafter in drafters.items():  # the state goes from one to the next
            jax.block_until_ready(state)
            began = time.perf_counter()
            state = rewound_round(target, drafter, lm_head, state, params, *limits)
            jax.block_until_ready(state)
            if turn:
                seconds[head].append(time.perf_counter() - began)
        if not turn:  # it compiled
            started = time.perf_counter()
        elif turn >= 3 and time.perf_counter() - started > options.seconds:
            break
    return seconds


def _drafter(target: Target, config: DrafterConfig, head: str) -> Drafter:
    rank = 0 if head == "none" else config.markov_rank
    config = dataclasses.replace(
        config, markov_head=head, markov_rank=rank, init_from="", init_new="", init="normal"
    )
    shape = DrafterShape.of(config, target.config)
    return jax.jit(lambda: Drafter(shape, rngs=nnx.Rngs(0)))()


def _state(target: Target, drafter: Drafter, batch: int, context: int) -> RoundState:
    """As after `context` tokens; the caches hold zeros, which costs the same."""
    width = drafter.config.num_proposals + 1
    size = context + width

    def numbers(value: int, *shape: int) -> jax.Array:
        axes = ("batch", *[None] * len(shape))
        return place(np.full((batch, *shape), value, np.int32), *axes)

    def filled(cache):
        return dataclasses.replace(cache, length=numbers(context))

    return RoundState(
        anchor=numbers(1),
        target_cache=filled(target.empty_cache(batch, size)),
        draft_cache=filled(drafter.empty_cache(batch, size)),
        out=Generated(numbers(0, 2 * width), numbers(0), numbers(0)),
        stats=RoundStats.zeros(batch, width - 1),
    )


def _shares(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    medians = {head: statistics.median(times) for head, times in seconds.items()}
    added = {
        head: statistics.median(a / b for a, b in zip(seconds[head], seconds["none"], strict=True))
        - 1
        for head in HEADS[1:]
    }
    return {"median_seconds": medians, "added": added}


def summary(report: Mapping[str, Any]) -> str:
    """The measured cases as a table."""
    rows = [
        (
            f"{case['temperature']:g}",
            f"{case['vocab'] or 'all'}",
            case["batch"],
            case["gamma"],
            len(case["seconds"]["none"]),
            1e3 * case["median_seconds"]["none"],
            *(100 * case["added"][head] for head in HEADS[1:]),
        )
        for case in report["cases"]
    ]
    columns = ("temperature", "vocabulary", "batch", "block", "turns", "ms without head")
    return table(rows, (*columns, *(f"{head} +%" for head in HEADS[1:])))


def draw(report: Mapping[str, Any], path: Path) -> None:
    """What the heads add, over the block size: a panel for each batch of the first setting."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = {(case["temperature"], case["vocab"]) for case in report["cases"]}
    first = min(settings)
    cases = [c for c in report["cases"] if (c["temperature"], c["vocab"]) == first]
    batches = sorted({case["batch"] for case in cases})
    figure = Figure(figsize=(3.6 * len(batches), 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(batches), squeeze=False, sharey=True)[0]
    for axis, batch in zip(panels, batches, strict=True):
        points = sorted((c["gamma"], c["added"]) for c in cases if c["batch"] == batch)
        for index, head in enumerate(HEADS[1:]):
            axis.plot([gamma for gamma, _ in points], [100 * added[head] for _, added in points],
                      color=COLOURS[index], marker=MARKERS[index], label=head)  # fmt: skip
        axis.axhline(100 * GOAL, color="grey", linewidth=0.8, linestyle="--")
        axis.set_title(f"batch {batch}", fontsize=11, loc="left")
        axis.set_xlabel("block size", fontsize=9)
        axis.set_xticks([gamma for gamma, _ in points])
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("added to a round, %", fontsize=9)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path)


# ---- Counted ----------------------------------------------------------------------------------


def count(batch: int = 128, gamma: int = 16, context: int = 1024) -> list[dict[str, Any]]:
    """The head's share of a round on chips at their best, by config and chip.

    Every part of the round takes the longer of its arithmetic and its memory traffic. Weights of
    the target are bfloat16, the drafter's float32, computed with in bfloat16; W2 and its products
    are float32, which a TPU multiplies in six passes of bfloat16 (counted for all chips). With more
    chips that share the work all parts shrink alike, so the share is that of one chip.
    """
    shapes = json.loads((Path(__file__).parent / "target_shapes.json").read_text())
    rows = []
    for name in QWEN3:
        config = _config(name)
        for chip in map(chip_named, CHIPS):
            figures = _count(shapes[config.target], config.drafter, chip, batch, gamma, context)
            rows.append({"config": name, "chip": chip.name, **figures})
    return rows


def _count(
    target: Mapping[str, Any], config: DrafterConfig, chip: Chip, batch: int, gamma: int, ctx: int
) -> dict[str, float]:
    d, v, r = target["hidden_size"], target["vocab_size"], config.markov_rank
    kv = target["num_key_value_heads"] * target["head_dim"]
    q = target["num_attention_heads"] * target["head_dim"]
    layer = 2 * d * q + 2 * d * kv + 3 * d * target["intermediate_size"]
    deep, shallow = target["num_hidden_layers"], config.num_layers

    def seconds(flops: float, moved: float) -> float:
        return max(flops / chip.flops_per_second, moved / chip.hbm_bytes_per_second)

    def pass_(layers: int, tokens: int, weight_bytes: int) -> float:
        flops = layers * tokens * (2 * layer + 4 * ctx * q)
        moved = layers * (weight_bytes * layer + batch * ctx * 2 * kv * 2)
        return seconds(flops, moved)

    def lm_head(tokens: int) -> float:
        return seconds(2 * tokens * d * v, 2 * d * v + 4 * tokens * v)

    verified, drafted = batch * (gamma + 1), batch * gamma
    taps = len(config.target_layer_ids)
    logits = 4 * batch * v  # of a slot
    best = seconds(0, logits)  # its arg-max, which is needed without a head too
    without = (
        pass_(deep, verified, 2)
        + lm_head(verified)
        + seconds(0, 4 * verified * v)
        + pass_(shallow, drafted, 4)
        + seconds(2 * verified * taps * d * d, 4 * taps * d * d)
        + lm_head(drafted)
        + gamma * best
    )
    products = 2 * batch * v * r

    def added(passes: int, w2_bytes: int, read_and_written: int) -> float:
        slot = seconds(passes * products, w2_bytes * v * r + read_and_written * logits)
        return gamma * (slot - best) / without

    head_flops = gamma * products
    round_flops = verified * (2 * deep * layer + 2 * d * v) + drafted * (
        2 * shallow * layer + 2 * d * v
    )
    return {
        "round_ms": 1e3 * without,
        "flops_share": head_flops / round_flops,
        "added_unfused": added(6, 4, 3),  # biased logits written, and read by the arg-max
        "added": added(6, 4, 1),
        "added_bfloat16_w2": added(1, 2, 1),
    }


def count_table(rows: list[dict[str, Any]]) -> str:
    """`count` as a table."""
    columns = ("config", "chip", "round ms", "FLOPs %", "logits written +%", "fused +%",
               "fused, W2 in bfloat16 +%")  # fmt: skip
    lines = [(row["config"], row["chip"], row["round_ms"],
              *(100 * row[key] for key in ("flops_share", "added_unfused", "added",
                                           "added_bfloat16_w2"))) for row in rows]  # fmt: skip
    return table(lines, columns)


def main() -> None:
    """Entry point."""
    given = flags.FLAGS
    out = Path(given.out)
    if given.part == "count":
        return print(count_table(count()))
    options = Options(
        gammas=tuple(map(int, given.gammas)),
        batches=tuple(map(int, given.batches)),
        temperature=given.temperature,
        vocab=given.vocab,
        repeats=given.repeats,
        seconds=given.seconds,
    )
    out.mkdir(parents=True, exist_ok=True)
    report = run(given.target, out, options)
    draw(report, out / "head_cost.png")
    print(f"{summary(report)}\nreport: {out / 'head_cost.json'}")


if __name__ == "__main__":
    flags.DEFINE_string("target", "smollm2", "The target of the measured rounds.")
    flags.DEFINE_string("out", "runs/head_cost", "Where report and picture go.")
    flags.DEFINE_enum("part", "measure", ["measure", "count"], "Measure, or count for Qwen3.")
    flags.DEFINE_list("gammas", list(map(str, Options.gammas)), "Tokens drafted per round.")
    flags.DEFINE_list("batches", list(map(str, Options.batches)), "Rows of a batch.")
    flags.DEFINE_float("temperature", 0.0, "Of target and drafter; 0 is greedy.")
    flags.DEFINE_integer("vocab", 0, "Tokens the drafter may propose, 0 = all.")
    flags.DEFINE_integer("repeats", Options.repeats, "Turns of each head.")
    flags.DEFINE_float("seconds", Options.seconds, "A case ends after so long (three turns).")
    run_main(main)
