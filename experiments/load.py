"""Throughput under load: how much should be verified when 1 or 1,000 requests run at a time?

    python experiments/load.py --workdir=runs/a --tasks=gsm8k.jsonl,mbpp.jsonl --part=costs
    python experiments/load.py --workdir=runs/a --tasks=gsm8k.jsonl,mbpp.jsonl --part=trace
    python experiments/load.py --workdir=runs/a --tasks=gsm8k.jsonl,mbpp.jsonl --part=engine
    python experiments/load.py --part=simulate --chip=v5e --target_parameters=4e9

Parts, each of which keeps what it found in --out and goes on from there after a kill:

costs     seconds of a round by the tokens in it, for every --concurrency (scheduling/step_costs.py)
trace     greedy answers of the prompt sets with the drafter's confidence and success at every token
engine    the engine itself at every --concurrency: no speculation, fixed lengths, a static
          threshold and the hardware-aware scheduler take turns
simulate  the same policies replayed on the trace up to 1,000 requests: on the measured costs, those
          of the largest batch growing in proportion beyond it, and with --chip on a roofline

Leaves load.json, whose points have concurrency, policy, tokens_per_second,
tokens_per_second_per_user and verified_per_request, a table and load.png.
"""

import dataclasses
import itertools
import json
import time
from pathlib import Path

import jax
import numpy as np
from absl import flags

from dspark_jax.core import chips, pictures
from dspark_jax.core.command import run_main
from dspark_jax.core.config import from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.opened import open_target_of
from dspark_jax.decoding.engine import Engine, EngineOptions, Request
from dspark_jax.decoding.evaluation import read_sets
from dspark_jax.decoding.flat import draft_rows, empty_rows, flat_round, join
from dspark_jax.decoding.rounds import draft_head
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.decoding.step_seconds import measure_steps
from dspark_jax.decoding.verify import Reason
from dspark_jax.scheduling.policy import Policy
from dspark_jax.scheduling.schedulers import CostTable
from dspark_jax.scheduling.simulation import Trace, accepted_drafts, simulate
from dspark_jax.scheduling.step_costs import StepCosts
from dspark_jax.training.checkpoint import choose_step, load_drafter, read_record

SIMULATED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
MULTIPLES = (1, 1.5, 2, 3, 4, 6, 8)  # sizes of a pass, in rows


@dataclasses.dataclass(frozen=True)
class Study:
    """What to study, from the flags."""

    workdir: Path | None
    tasks: str
    concurrency: tuple[int, ...]
    prompts_per_set: int
    max_prompt_tokens: int
    max_new_tokens: int
    threshold: float
    rounds: int
    repeats: int
    out: Path

    @property
    def context(self) -> int:
        """Tokens that a row can hold."""
        return self.max_prompt_tokens + self.max_new_tokens


def sizes_for(rows: int, proposals: int) -> tuple[int, ...]:
    """Few sizes, as each is compiled for every batch."""
    most = rows * (1 + proposals)
    return tuple(sorted({min(max(round(rows * m), 1), most) for m in MULTIPLES} | {most}))


class Models:
    """Target, drafter and prompts."""

    def __init__(self, study: Study):
        if study.workdir is None:
            raise UserError("--workdir is missing: this part runs the models of a run")
        record = read_record(study.workdir)
        self.target = open_target_of(record.config)
        self.drafter = load_drafter(record, study.workdir, choose_step(study.workdir, "best"))
        sets = read_sets(
            self.target, study.tasks, split="test", per_set=study.prompts_per_set,
            max_prompt_tokens=study.max_prompt_tokens, seed=0,
        )  # fmt: skip
        # From every set in turn, so that any stretch has all of them.
        by_turn = itertools.zip_longest(*(one.prompts for one in sets))
        self.prompts = [p.ids for turn in by_turn for p in turn if p is not None]
        self.proposals = self.drafter.config.num_proposals


def costs_part(study: Study) -> None:
    models, path = Models(study), study.out / "costs.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    for rows in study.concurrency:
        if str(rows) in found:
            continue
        costs = measure_steps(
            models.target.model, models.drafter, target_name=models.target.name, batches=(rows,),
            sizes=sizes_for(rows, models.proposals), context=study.context * 3 // 4,
            capacity=study.context + models.proposals + 1, repeats=study.repeats,
        )  # fmt: skip
        found[str(rows)] = dataclasses.asdict(costs)
        write_json(path, found)
        (one,) = costs.batches
        lines = [[b, f"{1e3 * s:.1f}"] for b, s in zip(one.tokens, one.seconds)]
        print(table(lines, ["tokens", "pass, ms"]))
        plain = [f"{1e3 * s:.1f}" for s in one.plain_seconds]
        print(f"{rows} rows: plain {', '.join(plain)} ms, drafting {1e3 * one.draft_seconds:.1f}")


def read_costs(study: Study) -> dict[int, StepCosts]:
    path = study.out / "costs.json"
    if not path.exists():
        raise UserError(f"{path} is missing: run --part=costs first")
    found = json.loads(path.read_text())
    return {int(rows): from_mapping(StepCosts, costs, str(path)) for rows, costs in found.items()}


def trace_part(study: Study, batch: int = 8) -> None:
    """Greedy decoding that drafts at every token and verifies none: no position is left out."""
    path = study.out / "trace.npz"
    if path.exists():
        return
    models = Models(study)
    prompts = models.prompts
    lengths, confidence, accepted = [], [], []
    for first in progress(range(0, len(prompts), batch), desc="trace", unit="batch"):
        for answer in recorded(models, prompts[first : first + batch], study, batch):
            tokens, drafts, logits = answer
            lengths.append(len(tokens))
            confidence.append(logits)
            accepted.append(accepted_drafts(tokens, drafts))
    trace = Trace(np.array(lengths), np.concatenate(confidence), np.concatenate(accepted))
    trace.write(path)
    print(f"{len(lengths)} answers, {sum(lengths)} tokens, {trace.accepted.mean() + 1:.2f} tokens "
          "of a whole round at a random token")  # fmt: skip


def recorded(models: Models, prompts: list, study: Study, batch: int) -> list:
    """Tokens [T], drafts [T, P] and confidence [T, P] of each answer."""
    target, drafter = models.target.model, models.drafter
    rows = empty_rows(target, drafter, rows=batch, capacity=study.context + models.proposals + 1)
    stop = jax.numpy.asarray(models.target.stop_ids, jax.numpy.int32)
    head, live = draft_head(target, drafter), place(np.arange(batch) < len(prompts), "batch")
    tokens = []
    for row, ids in enumerate(prompts):
        padded = np.zeros((1, study.max_prompt_tokens), np.int32)
        padded[0, : len(ids)] = ids
        rows, emitted = join(
            target, drafter, rows, np.int32(row), place(padded, "batch", None),
            place(np.array([len(ids)], np.int32), "batch"), placed(1), stop,
            place(np.array([study.max_new_tokens], np.int32), "batch"),
        )  # fmt: skip
        tokens.append(np.asarray(emitted.tokens)[0, : int(emitted.count[0])].tolist())
    drafts, logits = [[] for _ in prompts], [[] for _ in prompts]
    params, none = placed(batch), place(np.zeros(batch, np.int32), "batch")
    policy = Policy("fixed", length=models.proposals)
    zero = np.int32(0), np.float32(0)
    running = np.arange(batch) < len(prompts)
    while running.any():
        given = drafter, head, rows, live, params, policy, *zero
        draft, _ = draft_rows(*given, sizes=(batch,))
        rows, emitted = flat_round(
            target, drafter, head, rows, None, none, live, params, stop, size=batch
        )
        emitted, proposed, sure = jax.device_get((emitted, draft.tokens, draft.confidence))
        for row in range(len(prompts)):
            if running[row]:
                drafts[row].append(proposed[row])
                logits[row].append(sure[row])
                tokens[row] += emitted.tokens[row, : emitted.count[row]].tolist()
        running &= emitted.reason == Reason.RUNNING
    found = zip(tokens, drafts, logits, strict=True)
    return [(t[: len(d)], np.array(d), np.array(c)) for t, d, c in found if d]


def placed(batch: int) -> SamplingParams:
    return jax.tree.map(lambda x: place(x, "batch"), SamplingParams.make(batch, 0.0, seeds=0))


def policies(study: Study, proposals: int, tables: tuple | None) -> dict[str, Policy]:
    found = {"none": Policy()}
    for length in range(1, proposals + 1):
        found[f"fixed {length}"] = Policy("fixed", length=length)
    found["threshold"] = Policy("threshold", threshold=study.threshold, highest=1.0)
    if tables is not None:
        found["scheduler"] = Policy("hardware", costs=tables[0], plain=tables[1])
    return found


def engine_part(study: Study) -> None:
    models, costs, path = Models(study), read_costs(study), study.out / "engine.json"
    points = json.loads(path.read_text()) if path.exists() else []
    for rows in study.concurrency:
        if any(point["concurrency"] == rows for point in points):
            continue
        sizes = sizes_for(rows, models.proposals)
        chosen = policies(study, models.proposals, tables_of(costs[rows]))
        kept = ("none", "fixed 1", "fixed 2", "fixed 4", f"fixed {models.proposals}", "threshold",
                "scheduler")  # fmt: skip
        loads = {name: Load(models, study, chosen[name], rows, sizes) for name in kept
                 if name in chosen}  # fmt: skip
        for load in loads.values():  # everything is compiled, the scheduler has settled
            load.run(study.rounds)
            load.forget()
        for _ in range(study.repeats):
            for load in loads.values():
                load.run(study.rounds)
        points += [{"policy": name, **load.point()} for name, load in loads.items()]
        write_json(path, points)
    show(points, study.out)


class Load:
    """An engine that always has as many requests as rows."""

    def __init__(self, models: Models, study: Study, policy: Policy, rows: int, sizes: tuple):
        options = EngineOptions(
            rows=rows, max_context=study.context, queue_limit=rows, joins_per_step=rows,
            sizes=sizes if policy.drafts else tuple(s for s in sizes if s <= rows),
        )  # fmt: skip
        target = models.target
        drafter = models.drafter if policy.drafts else None
        self.engine = Engine(target.model, drafter, target.stop_ids, options, policy)
        self._rows, self._limit = rows, study.max_new_tokens
        self._prompts = itertools.cycle(models.prompts)
        self._rng = np.random.default_rng(0)
        self.forget()

    def forget(self) -> None:
        self._seconds = 0.0
        self._before = dataclasses.replace(self.engine.figures)
        self._verified, self._row_rounds = 0, 0

    def run(self, rounds: int) -> None:
        engine = self.engine
        for _ in range(rounds):
            while engine.running + len(engine.waiting) < self._rows:
                # Of all ages from the start, as in a server that has long been running.
                first = engine.figures.rounds == 0
                limit = int(self._rng.integers(1, self._limit)) if first else self._limit
                engine.submit(Request(next(self._prompts), limit))
            verified = engine.figures.speculative.verified
            began = time.perf_counter()
            engine.step()
            self._seconds += time.perf_counter() - began
            self._verified += engine.figures.speculative.verified - verified
            self._row_rounds += self._rows

    def point(self) -> dict:
        tokens = self.engine.figures.tokens - self._before.tokens
        return {
            "concurrency": self._rows,
            "tokens_per_second": tokens / self._seconds,
            "tokens_per_second_per_user": tokens / self._seconds / self._rows,
            "verified_per_request": self._verified / self._row_rounds,
            "drafting": 1 - (self.engine.figures.plain_rounds - self._before.plain_rounds)
            / max(self.engine.figures.rounds - self._before.rounds, 1),
            "source": "engine",
        }  # fmt: skip


def simulate_part(study: Study, chip: str, parameters: float, draft_share: float) -> None:
    trace = Trace.read(study.out / "trace.npz")
    sources = {}
    if (study.out / "costs.json").exists():
        measured = read_costs(study)
        sources["measured costs"] = lambda n: scaled(measured, n)
    if chip:
        found = chips.chip_named(chip)
        if found is None:
            raise UserError(f"--chip={chip}: known are {[c.name for c in chips.CHIPS]}")
        sources[f"roofline {chip}"] = lambda n: roofline(found, parameters, draft_share, n, trace)
    points = []
    cases = [(source, n) for source in sources for n in SIMULATED]
    for source, number in progress(cases, desc="simulate", unit="load"):
        costs, plain, sizes = sources[source](number)
        for name, policy in policies(study, trace.proposals, (costs, plain)).items():
            result = simulate(trace, policy, number, costs, plain, sizes=sizes)
            points.append({"concurrency": number, "policy": name, "source": source,
                           **dataclasses.asdict(result)})  # fmt: skip
    show(points, study.out, "simulated")


def scaled(measured: dict[int, StepCosts], number: int) -> tuple:
    """Tables and sizes for so many rows: of the next larger measured batch, or in proportion."""
    rows = min((r for r in measured if r >= number), default=max(measured))
    factor = max(number / rows, 1.0)
    (one,) = measured[rows].batches
    larger = dataclasses.replace(
        one, rows=number, draft_seconds=factor * one.draft_seconds,
        tokens=tuple(round(size * factor) for size in one.tokens),
        plain_tokens=tuple(round(size * factor) for size in one.plain_tokens),
        seconds=tuple(factor * s for s in one.seconds),
        plain_seconds=tuple(factor * s for s in one.plain_seconds),
    )  # fmt: skip
    return *tables_of(dataclasses.replace(measured[rows], batches=(larger,))), larger.tokens


def tables_of(costs: StepCosts) -> tuple[CostTable, CostTable]:
    """Of rounds with drafts and without."""
    rows = costs.batches[0].rows
    return costs.rounds(rows), costs.plain(rows)


def roofline(chip: chips.Chip, parameters: float, share: float, number: int, trace: Trace) -> tuple:
    """Seconds of a pass: reading all bfloat16 weights or computing, whichever takes longer, and the
    drafter's of `share` of the parameters over all slots; at half of the chip's peak each."""

    def seconds(tokens: float, weights: float) -> float:
        reading = 2 * weights / chip.hbm_bytes_per_second
        return 2 * max(reading, 2 * weights * tokens / chip.flops_per_second)

    most = number * (1 + trace.proposals)
    sizes = np.unique(np.round(np.geomspace(1, most, 64)).astype(int))
    drafting = seconds(number * trace.proposals, share * parameters)
    both = [1 / (seconds(s, parameters) + drafting) for s in sizes]
    plain = [1 / seconds(s, parameters) for s in sizes]
    return CostTable.make(sizes, both), CostTable.make(sizes, plain), ()


def show(points: list[dict], out: Path, name: str = "engine") -> None:
    """load.json of all parts, the table of these points, and the picture."""
    path = out / "load.json"
    others = json.loads(path.read_text())["points"] if path.exists() else []
    sources = {point["source"] for point in points}
    kept = [point for point in others if point["source"] not in sources]
    write_json(path, {"points": kept + points})
    for source in sorted(sources):
        group = [point for point in points if point["source"] == source]
        names = list(dict.fromkeys(point["policy"] for point in group))
        loads = sorted({point["concurrency"] for point in group})
        at = {(p["policy"], p["concurrency"]): p for p in group}
        lines = []
        for number in loads:
            fixed = max(at[n, number]["tokens_per_second"] for n in names if n.startswith("fixed"))
            none, ours = (at[n, number]["tokens_per_second"] for n in ("none", "scheduler"))
            lines.append([number, f"{none:.4g}", f"{fixed:.4g}",
                          f"{at['threshold', number]['tokens_per_second']:.4g}", f"{ours:.4g}",
                          f"{ours / max(fixed, none):.3f}", f"{ours / none:.3f}",
                          f"{at['scheduler', number]['verified_per_request']:.2f}"])  # fmt: skip
        columns = ["requests", "none", "best fixed", "threshold", "scheduler", "over the best",
                   "over none", "verified"]  # fmt: skip
        print(f"\n{source}, tokens per second\n{table(lines, columns)}")
        draw(group, out / f"load_{source.replace(' ', '_')}.png", source)


def draw(points: list[dict], path: Path, source: str) -> None:
    figure = pictures._figure(width=11.0, height=3.6)
    panels = [("tokens_per_second", "all requests", "tokens/s"),
              ("tokens_per_second_per_user", "each request", "tokens/s"),
              ("verified_per_request", "drafts verified", "per request and round")]  # fmt: skip
    names = list(dict.fromkeys(point["policy"] for point in points))
    styles = {"none": ("#000000", "-"), "threshold": (pictures.COLOURS[4], "--"),
              "scheduler": (pictures.COLOURS[1], "-")}  # fmt: skip
    for axis, (field, title, label) in zip(figure.subplots(1, 3), panels, strict=True):
        pictures._style(axis, title, f"requests at a time ({source})", label)
        for name in names:
            line = sorted((p["concurrency"], p[field]) for p in points if p["policy"] == name)
            colour, dash = styles.get(name, (pictures.COLOURS[0], ":"))
            strength = 1.0 if name in styles else 0.3 + 0.1 * int(name.split()[-1])
            axis.plot(*zip(*line, strict=True), color=colour, linestyle=dash, label=name,
                      marker=".", alpha=min(strength, 1.0))  # fmt: skip
        axis.set_xscale("log")
        if field != "verified_per_request":
            axis.set_yscale("log")
    figure.axes[-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    pictures._save(figure, path)


def main() -> None:
    study = Study(
        workdir=Path(_WORKDIR.value) if _WORKDIR.value else None,
        tasks=_TASKS.value,
        concurrency=tuple(int(number) for number in _CONCURRENCY.value),
        prompts_per_set=_PROMPTS.value,
        max_prompt_tokens=_LONGEST.value,
        max_new_tokens=_NEW.value,
        threshold=_THRESHOLD.value,
        rounds=_ROUNDS.value,
        repeats=_REPEATS.value,
        out=Path(_OUT.value),
    )
    study.out.mkdir(parents=True, exist_ok=True)
    with jax.set_mesh(make_mesh()):
        if _PART.value in ("costs", "all"):
            costs_part(study)
        if _PART.value in ("trace", "all"):
            trace_part(study)
        if _PART.value in ("engine", "all"):
            engine_part(study)
        if _PART.value in ("simulate", "all"):
            simulate_part(study, _CHIP.value, _PARAMETERS.value, _SHARE.value)


if __name__ == "__main__":
    _WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run with the drafter.")
    _TASKS = flags.DEFINE_string("tasks", "generator:24", "Prompt sets, as for evaluate.")
    _PART = flags.DEFINE_enum("part", "all", ["costs", "trace", "engine", "simulate", "all"],
                              "What to do.")  # fmt: skip
    _CONCURRENCY = flags.DEFINE_list("concurrency", ["1", "4", "16", "64"], "Requests at a time.")
    _PROMPTS = flags.DEFINE_integer("prompts_per_set", 8, "Prompts of each set.")
    _LONGEST = flags.DEFINE_integer("max_prompt_tokens", 192, "Longer prompts are left out.")
    _NEW = flags.DEFINE_integer("max_new_tokens", 64, "Tokens of an answer at most.")
    _THRESHOLD = flags.DEFINE_float("threshold", 0.5, "Of the static threshold.")
    _ROUNDS = flags.DEFINE_integer("rounds", 20, "Of each policy before the next has its turn.")
    _REPEATS = flags.DEFINE_integer("repeats", 3, "Turns, or rounds of each size for the costs.")
    _CHIP = flags.DEFINE_string("chip", "", "Simulate on a chip's roofline too, such as v5e.")
    _PARAMETERS = flags.DEFINE_float("target_parameters", 4e9, "Of the target on that chip.")
    _SHARE = flags.DEFINE_float("draft_share", 0.15, "The drafter's parameters, of the target's.")
    _OUT = flags.DEFINE_string("out", "runs/load", "Folder of the results.")
    run_main(main)
