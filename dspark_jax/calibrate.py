"""Make the confidence head's numbers true, and measure what a step costs on this machine.

    python -m dspark_jax.calibrate --workdir=runs/a --temperature=1
    python -m dspark_jax.calibrate --workdir=runs/a --temperature=1 --prompts=a.jsonl,b.jsonl
    python -m dspark_jax.calibrate --workdir=runs/a --norecord --batches=1,8,32

Decodes prompts speculatively, those that the run validates with unless --prompts names others, and
records of every round what the confidence head said and how many drafts were accepted; kept in
WORKDIR/calibration/ and continued after a kill. Half of the prompts, with all their rounds, fit a
temperature for each slot (sequential temperature scaling), and an offset for heads that are too
sure on the whole; the other half measures them, and the temperatures alone.

Leaves WORKDIR/calibration.json, which `convert` folds into an export for engines that know no
temperature, reliability.png, and costs.json: seconds of a step for every number of tokens verified,
for this device. generate and evaluate take both with --scheduler.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

import dspark_jax
from dspark_jax.core.command import run_main
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import mesh_here
from dspark_jax.data.batches import split
from dspark_jax.data.dataset import load_dataset
from dspark_jax.data.opened import OpenedTarget, check_drafter, open_target_of
from dspark_jax.decoding.evaluation import Prompt, read_sets
from dspark_jax.decoding.recording import Recipe, RoundLog, record, together
from dspark_jax.decoding.step_seconds import measure_steps
from dspark_jax.models.drafter import Drafter
from dspark_jax.scheduling import calibration
from dspark_jax.scheduling.calibration import Calibration, Recorded
from dspark_jax.scheduling.step_costs import FILE as COSTS_FILE
from dspark_jax.scheduling.step_costs import StepCosts
from dspark_jax.training.checkpoint import (
    RunRecord,
    choose_step,
    load_arrays,
    load_drafter,
    read_record,
)
from dspark_jax.weights.fingerprint import arrays_hash, check_same_target

FOLDER = "calibration"
EVERY = 1_000_000  # prompts of each set: all


@dataclasses.dataclass(frozen=True)
class Request:
    """What to record and measure."""

    prompts: str = ""  # "" = what the run validates with
    temperature: float = 1.0
    top_p: float = 1.0
    step: str = "best"
    rounds: int = 20_000
    samples: int = 1
    max_new_tokens: int = 64
    max_prompt_tokens: int = 512
    batch_size: int = 16
    seed: int = 0
    split: str = "test"
    record: bool = True
    costs: bool = True
    batches: tuple[int, ...] = (1, 8)
    context: int = 256
    repeats: int = 9
    target: str | None = None


def run(request: Request, workdir: Path) -> tuple[Calibration | None, StepCosts | None]:
    """Calibrates the drafter of `workdir` and writes the files; see the docstring.

    Raises:
      UserError: no run, a drafter without a confidence head, prompts that cannot be used, too few
        of them, or a target that gives NaN.
    """
    run_record = read_record(workdir)
    _check(request, run_record)
    step = choose_step(workdir, request.step)
    with jax.set_mesh(mesh_here(run_record.config.mesh.fsdp, run_record.config.mesh.tp)):
        target = open_target_of(run_record.config, request.target)
        check_same_target(run_record.fingerprint, target.fingerprint, f"the drafter of {workdir}")
        place = f"{workdir}/config.json: "
        check_drafter(run_record.shape, target, place, run_record.fingerprint)
        drafter = load_drafter(run_record, workdir, step)
        found = costs = None
        if request.record:
            found = _calibrated(request, workdir, step, run_record, target, drafter)
        if request.costs:
            costs = measure_steps(
                target.model,
                drafter,
                batches=request.batches,
                context=request.context,
                repeats=request.repeats,
                target_name=target.name,
                temperature=request.temperature,
            )
            costs.write(workdir / COSTS_FILE)
            print(_costs_table(costs))
            print(f"\ncosts: {workdir / COSTS_FILE}")
    return found, costs


def _calibrated(
    request: Request,
    workdir: Path,
    step: int,
    run_record: RunRecord,
    target: OpenedTarget,
    drafter: Drafter,
) -> Calibration:
    """Records what is missing, fits, measures and writes."""
    prompts = _prompts(request, workdir, run_record, target)
    hashed = arrays_hash(load_arrays(workdir, step))
    recipe = Recipe(
        step=step,
        drafter=hashed,
        target=run_record.fingerprint.weights,
        temperature=request.temperature,
        top_p=request.top_p,
        max_new_tokens=request.max_new_tokens,
        seed=request.seed,
    )
    log = RoundLog(workdir / FOLDER, recipe)
    used = _record(request, log, prompts, target, drafter)
    log.close()
    fit, heldout = halves(used)
    if not fit or not heldout:
        raise UserError(
            f"{len(used)} prompts gave rounds: at least one to fit with and one to measure with "
            "are needed; give more with --prompts"
        )
    rounds = [
        together([log.done[name, sample][1] for name, sample in answers if name in half])
        for half in (fit, heldout)
        for answers in [sorted(log.done)]
    ]
    made = calibration.calibrate(*rounds)
    made = dataclasses.replace(
        made,
        recorded=Recorded(
            drafter=str(workdir),
            step=step,
            drafter_hash=hashed,
            target=target.name,
            target_hash=run_record.fingerprint.weights,
            prompts=request.prompts or "the run's validation prompts",
            fit_prompts=len(fit),
            heldout_prompts=len(heldout),
            rounds=sum(len(one.logits) for one in rounds),
            temperature=request.temperature,
            top_p=request.top_p,
            max_new_tokens=request.max_new_tokens,
            seed=request.seed,
            device=jax.devices()[0].device_kind,
            jax=jax.__version__,
            dspark_jax=dspark_jax.__version__,
        ),
    )
    made.write(workdir / calibration.FILE)
    calibration.reliability_diagram(rounds[1], made, workdir / "reliability.png")
    print(summary(made))
    print(f"\ncalibration: {workdir / calibration.FILE}")
    return made


def _record(
    request: Request,
    log: RoundLog,
    prompts: Sequence[Prompt],
    target: OpenedTarget,
    drafter: Drafter,
) -> list[str]:
    """Decodes until there are enough rounds; the ids of the prompts that gave some.

    Whole batches of a fixed order: what is recorded does not depend on where a run was killed.
    """
    wanted = [(prompt, sample) for sample in range(request.samples) for prompt in prompts]
    order = sorted(wanted, key=lambda one: _digest(f"{request.seed}/{one[0].id}/{one[1]}"))
    count, used = 0, set()
    with progress(total=request.rounds, desc="rounds", unit="round") as bar:
        for begin in range(0, len(order), request.batch_size):
            group = order[begin : begin + request.batch_size]
            missing = [one for one in group if not log.has(*one)]
            if missing:
                for answered in record(
                    target,
                    drafter,
                    missing,
                    temperature=request.temperature,
                    top_p=request.top_p,
                    max_new=request.max_new_tokens,
                    seed=request.seed,
                    batch=request.batch_size,
                ):
                    log.add(*zip(*answered, strict=True))
            found = [log.done[prompt.id, sample][1] for prompt, sample in group]
            used |= {p.id for (p, _), one in zip(group, found, strict=True) if one is not None}
            more = sum(len(one.logits) for one in found if one is not None)
            bar.update(min(more, max(request.rounds - count, 0)))
            count += more
            if count >= request.rounds:
                break
    if count < request.rounds:
        print(
            f"note: {count} rounds recorded of the {request.rounds} asked for: give more --prompts "
            "or --samples"
        )
    return sorted(used)


def halves(prompts: Sequence[str]) -> tuple[set[str], set[str]]:
    """To fit with and to measure with: alternately, in the order of a hash of their ids."""
    order = sorted(set(prompts), key=_digest)
    return set(order[::2]), set(order[1::2])


def summary(made: Calibration) -> str:
    """The figures of a calibration, slot by slot, on the rounds not used for fitting."""
    rows = []
    for name, one in (
        ("before", made.before),
        ("after", made.after),
        ("STS alone", made.after_sts),
        ("one for all", made.after_single),
    ):
        for what, values in (
            ("ECE, %", [100 * x for x in one.ece]),
            ("AUC", one.auc),
            ("Brier", one.brier),
        ):
            mean = one.mean_ece * 100 if what == "ECE, %" else None
            rows.append([name, what, *values, mean])
    slots = len(made.temperatures)
    columns = ["", "held-out rounds", *(f"slot {k + 1}" for k in range(slots)), "mean"]
    rows.append(["T", "temperature", *made.temperatures, made.single_temperature])
    rows.append(["b", "offset", *made.offsets, made.single_offset])
    rows.append(["T alone", "temperature", *made.sts_temperatures, None])
    chance = [100 * x for x in made.after.ece_of_perfect]
    rows.append(["chance", "ECE, %", *chance, sum(chance) / slots])
    lines = [
        table(rows, columns),
        "",
        f"{made.recorded.rounds} rounds: {made.recorded.fit_prompts} prompts to fit with, "
        f"{made.recorded.heldout_prompts} others to measure with; temperature "
        f"{made.recorded.temperature:g}",
        "chance: the error that true predictions would show on as many rounds; the means of "
        "temperature and offset are those for all slots",
    ]
    if made.after.mean_ece > made.before.mean_ece:
        lines.append(
            "warning: on the held-out rounds this is worse than the head as it was trained; record "
            "more (--prompts, --samples, --rounds) or delete the file"
        )
    if made.at_limit:
        slots_text = ", ".join(str(slot + 1) for slot in made.at_limit)
        lines.append(
            f"the best temperature or offset of slot {slots_text} lies beyond what was tried"
        )
    return "\n".join(lines)


def _costs_table(costs: StepCosts) -> str:
    """A row for each number of tokens verified."""
    rows = []
    for one in costs.batches:
        plain = dict(zip(one.plain_tokens, one.plain_seconds, strict=True))
        for tokens, seconds in zip(one.tokens, one.seconds, strict=True):
            alone = 1e3 * plain[tokens] if tokens in plain else None
            step = 1e3 * seconds
            rows.append([one.rows, tokens, step, 1 / seconds, 1e3 * one.draft_seconds, alone])
    columns = ["rows", "tokens", "step ms", "steps per second", "drafting ms", "plain ms"]
    return table(rows, columns)


def _prompts(
    request: Request, workdir: Path, run_record: RunRecord, target: OpenedTarget
) -> list[Prompt]:
    """The prompts to decode, each once."""
    room = run_record.target_config.max_positions - request.max_new_tokens
    longest = min(request.max_prompt_tokens, room - run_record.config.drafter.num_proposals - 1)
    if longest < 1:
        raise UserError(
            f"--max_new_tokens={request.max_new_tokens}: the target has only "
            f"{run_record.target_config.max_positions} positions"
        )
    if request.prompts:
        sets = read_sets(
            target,
            request.prompts,
            split=request.split,
            per_set=EVERY,
            max_prompt_tokens=longest,
            seed=request.seed,
        )
        return [
            Prompt(f"{one.name}/{prompt.id}", prompt.ids) for one in sets for prompt in one.prompts
        ]
    config = run_record.config
    folder = Path(config.data.path) if config.data.path else workdir / "data"
    if not (folder / "dataset").is_dir():
        raise UserError(f"{folder}: the run's data are not there; give --prompts=FILES")
    rows = split(load_dataset(folder, target.fingerprint), config.data.validation_fraction)[1]
    prompts = {}
    for row in rows:
        ids = tuple(row.ids[: int(row.loss_mask.argmax())].tolist())
        if 0 < len(ids) <= longest:
            prompts.setdefault(row.id.rsplit("#", 1)[0], ids)
    if not prompts:
        raise UserError(
            f"{folder}: no validation prompt of at most {longest} tokens; give --prompts=FILES"
        )
    return [Prompt(name, ids) for name, ids in prompts.items()]


def _check(request: Request, run_record: RunRecord) -> None:
    if run_record.config.drafter.algorithm != "dspark":
        raise UserError("calibrate is for DSpark and DFlash drafters; this run is EAGLE-3")
    if request.record and not run_record.config.drafter.confidence_head:
        raise UserError(
            "this drafter has no confidence head (drafter.confidence_head=False), so there is "
            "nothing to calibrate; --norecord measures the costs alone"
        )
    for name in ("rounds", "samples", "max_new_tokens", "max_prompt_tokens", "batch_size",
                 "context", "repeats"):  # fmt: skip
        if getattr(request, name) < 1:
            raise UserError(f"--{name}={getattr(request, name)}: at least 1")
    if not math.isfinite(request.temperature) or request.temperature < 0:
        raise UserError(f"--temperature={request.temperature}: 0 or more")
    if not 0 < request.top_p <= 1:
        raise UserError(f"--top_p={request.top_p}: above 0, up to 1 (off)")
    if not (request.record or request.costs):
        raise UserError("--norecord and --nocosts leave nothing to do; leave one of them out")
    most = run_record.target_config.max_positions
    if request.costs and request.context + run_record.config.drafter.num_proposals + 1 > most:
        raise UserError(f"--context={request.context}: the target has only {most} positions")
    if not request.batches or min(request.batches) < 1:
        raise UserError("--batches: give numbers of rows from 1, as in 1,8,32")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def main() -> None:
    """Entry point."""
    given = flags.FLAGS
    names = [field.name for field in dataclasses.fields(Request) if field.name != "batches"]
    try:
        batches = tuple(int(part) for part in given.batches)
    except ValueError:
        raise UserError(f"--batches={','.join(given.batches)}: write 1,8,32") from None
    request = Request(**{name: given[name].value for name in names}, batches=batches)
    run(request, Path(given.workdir))


if __name__ == "__main__":  # flags too: several commands may be imported into one program
    flags.DEFINE_string("workdir", None, "The run whose drafter is calibrated.")
    flags.DEFINE_string("prompts", "", "Files, hub data sets or generator:N, by commas.")
    flags.DEFINE_float("temperature", 1.0, "At which the drafter will be used.")
    flags.DEFINE_float("top_p", 1.0, "Nucleus of both models; 1 is off.")
    flags.DEFINE_string("step", "best", "The checkpoint: best, latest or a number.")
    flags.DEFINE_integer("rounds", 20_000, "Record at least so many, if the prompts give them.")
    flags.DEFINE_integer("samples", 1, "Answers to each prompt, if one of each is too few.")
    flags.DEFINE_integer("max_new_tokens", 64, "Tokens of one answer.")
    flags.DEFINE_integer("max_prompt_tokens", 512, "Longer prompts are left out.")
    flags.DEFINE_integer("batch_size", 16, "Prompts decoded together.")
    flags.DEFINE_integer("seed", 0, "Of sampling and of the order of prompts.")
    flags.DEFINE_string("split", "test", "Of hub data sets.")
    flags.DEFINE_bool("record", True, "Record rounds and calibrate.")
    flags.DEFINE_bool("costs", True, "Measure the costs of a step.")
    flags.DEFINE_list("batches", ["1", "8"], "Numbers of rows to measure the costs for.")
    flags.DEFINE_integer("context", 256, "Tokens behind every row while measuring costs.")
    flags.DEFINE_integer("repeats", 9, "Steps of each kind, of which the median counts.")
    flags.DEFINE_string("target", None, "Where the run's target now is, if it has moved.")
    flags.mark_flags_as_required(["workdir"])
    run_main(main)
