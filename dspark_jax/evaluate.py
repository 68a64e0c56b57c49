"""Measure a trained drafter: accepted length, acceptance slot by slot, and what it gains in speed.

    python -m dspark_jax.evaluate --workdir=runs/a --tasks=eval/*.jsonl --out=report.json
    python -m dspark_jax.evaluate --workdir=runs/a --tasks=generator:32 --temperature=1

--tasks: files with prompts, globs, hub data sets or generator:N, separated by commas. Each file
is a prompt set of its own; of a conversation the first turn is asked, later ones are not. Plain
and speculative decoding take turns on the same prompts; compiling is timed apart. The picture
acceptance_per_slot.png is put beside the report.
"""

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import jax
from absl import flags

from dspark_jax.core.command import run_main
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import peak_device_bytes, peak_memory_bytes, table, write_json
from dspark_jax.core.pictures import acceptance_per_slot
from dspark_jax.core.sharding import mesh_here
from dspark_jax.data.opened import OpenedTarget, check_drafter, open_target_of
from dspark_jax.decoding.costs import RoundCosts, round_costs
from dspark_jax.decoding.evaluation import Decoding, Measured, PromptSet, read_sets, run_sets
from dspark_jax.decoding.figures import agreement, macro_length, set_result, speed
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.models.drafter import Drafter
from dspark_jax.scheduling.by_name import HELP, read_policy
from dspark_jax.scheduling.policy import Policy
from dspark_jax.training.checkpoint import RunRecord, choose_step, load_drafter, read_record
from dspark_jax.weights.fingerprint import check_same_target


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure. None takes what the run's config says."""

    tasks: str | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    step: str = "best"
    prompts_per_set: int | None = None
    max_new_tokens: int | None = None
    max_prompt_tokens: int = 512
    batch_size: int | None = None
    seed: int = 0
    split: str = "test"
    plain: bool = True
    costs: bool = True
    scheduler: str = "all"  # see scheduling/by_name.py
    force_costs: bool = False
    target: str | None = None


def run(request: Request, workdir: Path, out: Path) -> dict[str, Any]:
    """Evaluates the drafter of `workdir`, writes the report to `out` and returns it."""
    record = read_record(workdir)
    config = record.config
    request = dataclasses.replace(
        request,
        tasks=request.tasks or config.evaluate.prompts,
        prompts_per_set=_given(request.prompts_per_set, config.evaluate.prompts_per_set),
        max_new_tokens=_given(request.max_new_tokens, config.evaluate.max_new_tokens),
        batch_size=_given(request.batch_size, config.evaluate.batch_size),
    )
    _check(request)
    step = choose_step(workdir, request.step)
    policy = _policy(request, workdir, record, step)  # before what takes long
    with jax.set_mesh(mesh_here(config.mesh.fsdp, config.mesh.tp)):
        target = open_target_of(config, request.target)
        check_same_target(record.fingerprint, target.fingerprint, f"the drafter of {workdir}")
        check_drafter(record.shape, target, f"{workdir}/config.json: ", record.fingerprint)
        drafter = load_drafter(record, workdir, step)
        sets = read_sets(
            target,
            request.tasks,
            split=request.split,
            per_set=request.prompts_per_set,
            max_prompt_tokens=_longest_prompt(request, record),
            seed=request.seed,
        )
        how = Decoding(
            temperature=request.temperature,
            top_p=request.top_p,
            max_new_tokens=request.max_new_tokens,
            batch_size=request.batch_size,
            seed=request.seed,
            plain=request.plain,
            policy=policy,
        )
        measured = run_sets(target, drafter, sets, how)
        costs = None
        if request.costs and config.drafter.algorithm != "dspark":
            print("the costs of a round are measured for DSpark and DFlash drafters only")
        elif request.costs:
            costs = _costs(request, target, drafter, sets)
    report = _report(request, workdir, step, target, sets, measured, costs)
    report["drafter_config"] = dataclasses.asdict(config.drafter)
    write_json(out, report)
    acceptance_per_slot(report["sets"], out.with_name("acceptance_per_slot.png"))
    return report


def summary(report: dict[str, Any]) -> str:
    """The report as a table with one row per set, and what there is to say besides."""
    rows, slots = [], []
    for name, values in report["sets"].items():
        low, high = values["accepted_length_ci95"] or (None, None)
        row = [name, values["prompts"], values["rounds"], values["tokens"]]
        rows.append([*row, values["accepted_length"], low, high])
        slots.append([name, "conditional", *values["conditional_acceptance"]])
        slots.append(["", "survival", *values["survival"]])
    columns = ["set", "prompts", "rounds", "tokens", "accepted length", "95 % from", "to"]
    slot_columns = ["set", "accepted"] + [f"slot {k}" for k in range(1, len(slots[0]) - 1)]
    lines = [
        table(rows, columns),
        "",
        table(slots, slot_columns),
        "conditional: share accepted of the drafts whose earlier slots all were; survival: of all "
        "rounds, accepted up to and including the slot",
        "",
        f"accepted length, mean over sets: {_show(report['all']['accepted_length'])} tokens per "
        f"round at temperature {report['temperature']:g}",
    ]
    fast = report["tokens_per_second_speculative"]
    if report["request"]["scheduler"] != "all":
        verified = report["all"]["pooled"]["verified_per_round"]
        lines.append(
            f"{_show(verified)} drafts verified per round, by --scheduler="
            f"{report['request']['scheduler']}"
        )
    if report["speedup"] is None:
        lines.append(f"{fast:.1f} tokens/s with speculation (plain decoding not run)")
    else:
        low, high = report["speedup_ci95"]
        lines.append(
            f"{fast:.1f} tokens/s with speculation, {report['tokens_per_second_plain']:.1f} plain: "
            f"{report['speedup']:.2f} times (95 %: {low:.2f} to {high:.2f}); compiling and "
            f"warm-up, {report['warm_up_seconds']:.0f} s, left out"
        )
    if report["greedy_compared"]:
        lines.append(
            f"{report['greedy_equal']} of {report['greedy_compared']} outputs are exactly those of "
            "plain decoding"
        )
    if costs := report["round_costs"]:
        lines.append(
            f"a round costs {costs['round_seconds'] * 1e3:.1f} ms, a plain step "
            f"{costs['plain_step_seconds'] * 1e3:.1f} ms: speculation pays above "
            f"{report['break_even_accepted_length']:.2f} tokens per round"
        )
    if dropped := sum(map(len, report["dropped_prompts"].values())):
        lines.append(f"{dropped} prompts were too long and left out (named in the report)")
    return "\n".join(lines)


def _report(
    request: Request,
    workdir: Path,
    step: int,
    target: OpenedTarget,
    sets: list[PromptSet],
    measured: Measured,
    costs: RoundCosts | None,
) -> dict[str, Any]:
    seed = request.seed
    by_set = {}
    for name, outcomes in measured.outcomes.items():
        values = dataclasses.asdict(set_result(outcomes, seed))
        by_set[name] = values | dataclasses.asdict(speed(measured.timings[name], seed))
    outcomes = [outcome for group in measured.outcomes.values() for outcome in group]
    timings = [timing for group in measured.timings.values() for timing in group]
    length, interval = macro_length(list(measured.outcomes.values()), seed)
    greedy = agreement(outcomes) if request.temperature == 0 else None
    return {
        "sets": by_set,
        "all": {
            "accepted_length": length,
            "accepted_length_ci95": interval,
            "pooled": dataclasses.asdict(set_result(outcomes, seed)),
        },
        "temperature": request.temperature,
        **dataclasses.asdict(speed(timings, seed)),
        "greedy_equal": greedy.equal if greedy else None,
        "greedy_compared": greedy.compared if greedy else None,
        "greedy_first_difference": greedy.first_difference if greedy else None,
        "round_costs": dataclasses.asdict(costs) if costs else None,
        "break_even_accepted_length": costs.break_even_accepted_length if costs else None,
        "warm_up_seconds": measured.warm_up_seconds,
        "measured": "each batch plainly and speculatively in turns, prefill included, compiling "
        "and the first call left out; first turn of each conversation",
        "dropped_prompts": {one.name: one.dropped for one in sets},
        "request": dataclasses.asdict(request),
        "target": target.name,
        "target_fingerprint": dataclasses.asdict(target.fingerprint),
        "drafter": f"{workdir}/checkpoints/{step}",
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "peak_memory_bytes": peak_memory_bytes(),
        "peak_device_memory_bytes": peak_device_bytes(),
    }


def _costs(request: Request, target: OpenedTarget, drafter: Drafter, sets) -> RoundCosts:
    """Costs at the context that a typical prompt has halfway through its answer."""
    lengths = sorted(len(prompt.ids) for one in sets for prompt in one.prompts)
    context = lengths[len(lengths) // 2] + request.max_new_tokens // 2
    fsdp = jax.sharding.get_mesh().shape["fsdp"]
    return round_costs(
        target.model,
        drafter,
        batch=-(-request.batch_size // fsdp) * fsdp,
        context=context,
        temperature=request.temperature,
    )


def _check(request: Request) -> None:
    for name in ("prompts_per_set", "max_new_tokens", "max_prompt_tokens", "batch_size"):
        if getattr(request, name) < 1:
            raise UserError(f"--{name}={getattr(request, name)}: at least 1")
    SamplingParams.make(1, request.temperature, top_p=request.top_p, seeds=0)  # refuses bad ones


def _longest_prompt(request: Request, record: RunRecord) -> int:
    """The longest prompt that leaves room for the answer and one block behind it."""
    behind = request.max_new_tokens + record.config.drafter.num_proposals + 1
    room = record.target_config.max_positions - behind
    if room < 1:
        raise UserError(
            f"--max_new_tokens={request.max_new_tokens}: the target has only "
            f"{record.target_config.max_positions} positions"
        )
    return min(request.max_prompt_tokens, room)


def _policy(request: Request, workdir: Path, record: RunRecord, step: int) -> Policy | None:
    if request.scheduler == "off":
        raise UserError("--scheduler=off is plain decoding, which is measured beside every other")
    drafter = record.config.drafter
    return read_policy(
        request.scheduler,
        workdir,
        step=step,
        proposals=drafter.num_proposals,
        has_confidence=drafter.confidence_head,
        rows=request.batch_size,
        force=request.force_costs,
    )


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _git(*arguments: str) -> str | None:
    """What git says of the repository this code lies in; None outside of one."""
    package = Path(__file__).resolve().parent
    command = ["git", "-C", str(package)]
    try:
        top = subprocess.run(
            [*command, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if Path(top) != package.parent:  # installed somewhere inside another repository
            return None
        return subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def main() -> None:
    """Entry point."""
    given = flags.FLAGS
    workdir = Path(given.workdir)
    out = Path(given.out) if given.out else workdir / "evaluation.json"
    names = [field.name for field in dataclasses.fields(Request)]
    request = Request(**{name: given[name].value for name in names})
    print(summary(run(request, workdir, out)))
    print(f"report: {out}")


if __name__ == "__main__":  # flags too: several commands may be imported into one program
    flags.DEFINE_string("workdir", None, "The run whose drafter is measured.")
    flags.DEFINE_string("tasks", None, "Prompts; by default what the run's config names.")
    flags.DEFINE_string("out", None, "The report; by default WORKDIR/evaluation.json.")
    flags.DEFINE_float("temperature", 0.0, "Of both models; 0 is greedy.")
    flags.DEFINE_float("top_p", 1.0, "Nucleus of both models; 1 is off.")
    flags.DEFINE_string("step", "best", "The checkpoint: best, latest or a number.")
    flags.DEFINE_integer("prompts_per_set", None, "At most so many prompts of each set.")
    flags.DEFINE_integer("max_new_tokens", None, "Tokens of one answer.")
    flags.DEFINE_integer("max_prompt_tokens", 512, "Longer prompts are dropped.")
    flags.DEFINE_integer("batch_size", None, "Prompts decoded together.")
    flags.DEFINE_integer("seed", 0, "Of the draw of prompts, of sampling and the bootstrap.")
    flags.DEFINE_string("split", "test", "Of hub data sets.")
    flags.DEFINE_bool("plain", True, "Also decode without speculation, for the speed-up.")
    flags.DEFINE_bool("costs", True, "Also measure the parts of a round.")
    flags.DEFINE_string("scheduler", "all", HELP)
    flags.DEFINE_bool("force_costs", False, "Use costs of another device.")
    flags.DEFINE_string("target", None, "Where the run's target now is, if it has moved.")
    flags.mark_flags_as_required(["workdir"])
    run_main(main)
