"""What the Markov head is worth: DSpark against the same drafter without it (DFlash).

    python experiments/markov_ablation.py --part=synthetic --out=runs/markov
    python experiments/markov_ablation.py --part=smollm2 --out=runs/markov
    python experiments/markov_ablation.py --part=smollm2 --workdir_data=runs/demo/data ...

Same data, same steps, same everything but the head. `synthetic` takes a target whose distribution
is known exactly (collision.py), so measured accepted lengths stand beside the computed optimum of
drafters with and without knowledge of their own last word. `smollm2` trains both as the demo does,
on answers of the bundled target, and measures them on held-out prompts.

Writes ablation.json and ablation.png to --out and prints a table. A part that is there already is
kept, so the two can be run one after the other.
"""

import dataclasses
import functools
import json
import runpy
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import collision
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from dspark_jax import train
from dspark_jax.core.command import run_main
from dspark_jax.core.config import DrafterConfig, RunConfig, TrainConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.pictures import COLOURS, MARKERS
from dspark_jax.core.progress import progress
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.data.batches import PackedRows
from dspark_jax.data.opened import open_target_of
from dspark_jax.decoding.evaluation import Decoding, read_sets, run_sets
from dspark_jax.decoding.figures import Outcome, SetResult, set_result
from dspark_jax.decoding.plain import generate_plain
from dspark_jax.decoding.rounds import generate_speculative, propose, start
from dspark_jax.decoding.sampling import SamplingParams
from dspark_jax.features.local import LocalSource
from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.target import Target
from dspark_jax.training.checkpoint import choose_step, load_drafter, read_record
from dspark_jax.training.step import Recipe, init_state, make_optimizer, train_step

HELD_OUT = 48  # prompts that the drafters of SmolLM2 are measured on
SEEN_OFTEN = 30  # a slot decided in fewer rounds is no point in the picture
LABELS = {"markov": "DSpark", "no_markov": "DFlash (no Markov head)"}


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Sizes of the synthetic part."""

    steps: int = 800
    slots: int = 7
    rows: int = 512  # of training data, `length` words each
    length: int = 64
    batch: int = 16
    measured_rows: int = 64
    measured_tokens: int = 512
    seed: int = 0


def run_synthetic(options: Synthetic) -> dict[str, Any]:
    """Trains and measures both drafters on the collision target."""
    began = time.monotonic()
    source = collision.Source.of(collision.PHRASES)
    best, _ = collision.best_factorised(source.transition, options.slots)
    marginal = collision.long_run(
        source.transition, collision.marginals(source.transition, options.slots)
    )
    drafters, drafts = {}, {}
    with jax.set_mesh(make_mesh()):
        target = collision.make_target(source)
        data = _answers(target, options)
        for name, rank in (("markov", len(source.words)), ("no_markov", 0)):
            config = DrafterConfig(
                target_layer_ids=(0,),
                mask_token_id=source.mask_id,
                block_size=options.slots,
                num_layers=2,
                markov_head="vanilla" if rank else "none",
                markov_rank=rank,
                dtype="float32",
            )
            drafter = _trained(target, config, data, options, LABELS[name])
            drafters[name] = dataclasses.asdict(_measured(target, drafter, options))
            drafts[name] = [source.text(ids) for ids in _drafts(target, drafter, source)]
    return {
        "phrases": collision.PHRASES,
        "drafters": drafters,
        "computed": {
            "all_accepted": {"accepted_length": options.slots + 1.0},
            "best_factorised": dataclasses.asdict(best),
            "factorised_marginals": dataclasses.asdict(marginal),
        },
        "drafts_after_the_stop": drafts,
        "options": dataclasses.asdict(options),
        "seconds": time.monotonic() - began,
    }


def _answers(target: Target, options: Synthetic) -> PackedRows:
    """Training rows: the target's own words after a stop, sampled at temperature 1."""
    words = _decode(generate_plain, options.rows, options.length - 1, range(options.rows), target)
    tokens = np.concatenate([np.zeros((options.rows, 1), np.int32), words.tokens], axis=1)
    return PackedRows(
        tokens=tokens,
        loss_mask=np.broadcast_to(np.arange(options.length) > 0, tokens.shape).copy(),
        documents=np.ones_like(tokens),
        positions=np.broadcast_to(np.arange(options.length, dtype=np.int32), tokens.shape).copy(),
        names=tuple((f"row {row}",) for row in range(options.rows)),
        dropped=0,
        truncated=0,
    )


def _decode(generate, rows: int, new: int, seeds: Sequence[int], *models) -> Any:
    """`generate` for `rows` prompts of one stop each, `new` words at temperature 1."""
    params = SamplingParams.make(rows, 1.0, seeds=list(seeds))
    return jax.device_get(
        generate(
            *models,
            place(np.zeros((rows, 1), np.int32), "batch", None),
            place(np.ones(rows, np.int32), "batch"),
            jax.tree.map(lambda x: place(x, "batch"), params),
            jnp.asarray([-1], jnp.int32),  # nothing ends an answer
            place(np.full(rows, new, np.int32), "batch"),
            max_new=new,
        )
    )


def _trained(
    target: Target, config: DrafterConfig, data: PackedRows, options: Synthetic, label: str
) -> Drafter:
    """A drafter after the product's own train step, with the paper's loss."""
    recipe = TrainConfig(global_batch_size=options.batch, num_anchors=16, learning_rate=3e-3)
    source = LocalSource(
        target,
        config.target_layer_ids,
        data,
        data,
        batch_size=options.batch,
        accumulation=1,
        seed=options.seed,
        validation_rows=0,
    )
    tx = make_optimizer(recipe, options.steps)
    init = functools.partial(init_state, shape=DrafterShape.of(config, target.config), tx=tx)
    state = jax.jit(init)(jax.random.key(options.seed), target)
    static = Recipe(LossConfig(), recipe.num_anchors, recipe.loss_chunk, options.seed)
    with progress(total=options.steps, desc=f"train {label}", unit="step") as bar:
        for step in range(options.steps):
            batch = source.batch(step)
            state, result = train_step(state, target.head, batch, tx=tx, recipe=static)
            if step % 20 == 19:
                bar.note(f"loss {float(result['loss']):.3f}")
            bar.update()
    return state.drafter


def _measured(target: Target, drafter: Drafter, options: Synthetic) -> SetResult:
    """Decodes speculatively, each row a prompt of its own, and counts."""
    rows = options.measured_rows
    seeds = range(10**6, 10**6 + rows)  # apart from those of the training data
    out, stats = _decode(
        generate_speculative, rows, options.measured_tokens, seeds, target, drafter
    )
    return set_result(
        [
            Outcome(
                id=f"row {row}",
                rounds=int(stats.rounds[row]),
                tokens=int(stats.tokens[row]),
                reached=stats.reached[row],
                survived=stats.survived[row],
                output=out.tokens[row].tolist(),
                plain_output=None,
            )
            for row in range(rows)
        ]
    )


def _drafts(
    target: Target, drafter: Drafter, source: collision.Source, number: int = 6
) -> list[list[int]]:
    """Blocks drafted after the stop, none of them verified."""
    before = source.words.index(next(iter(collision.PHRASES)).split()[-1])  # then comes the stop
    params = SamplingParams.make(number, 1.0, seeds=list(range(number)))
    state = start(
        target,
        drafter,
        place(np.full((number, 1), before, np.int32), "batch", None),
        place(np.ones(number, np.int32), "batch"),
        jax.tree.map(lambda x: place(x, "batch"), params),
        jnp.asarray([-1], jnp.int32),
        place(np.ones(number, np.int32), "batch"),
        max_new=1,
    )
    draft = propose(drafter, drafter.head(target.head), state.anchor, state.draft_cache, params)
    return np.asarray(draft.tokens).tolist()


def run_smollm2(steps: int, out: Path, data: Path | None) -> dict[str, Any]:
    """Trains both drafters for the bundled target and measures them on held-out prompts.

    Args:
      data: a folder that prepare has made; None lets the target answer the demo's prompts.
    """
    base = from_mapping(RunConfig, _config_file("configs/smollm2.py", "demo"))
    where = dataclasses.replace(base.data, path=str(data or out / "data"))
    recipe = dataclasses.replace(
        base.train, num_steps=steps, validate_every=steps, checkpoint_every=steps
    )
    base = dataclasses.replace(base, data=where, train=recipe)
    without = dataclasses.replace(base.drafter, markov_head="none", markov_rank=0)
    drafters: dict[str, dict[str, Any]] = {}
    for name, drafter in (("markov", base.drafter), ("no_markov", without)):
        workdir = out / f"{name}-{steps}"
        print(f"{LABELS[name]}: {workdir}", flush=True)
        validation = train.run(dataclasses.replace(base, drafter=drafter), workdir)
        drafters[name] = {"validation": validation, **_held_out(workdir)}
    return {
        "steps": steps,
        "data": "prepared" if data else where.prompts,
        "drafters": drafters,
    }


def _held_out(workdir: Path) -> dict[str, Any]:
    """Figures of a run's drafter on generated prompts that training never saw."""
    record = read_record(workdir)
    found = {}
    with jax.set_mesh(make_mesh(record.config.mesh.fsdp, record.config.mesh.tp)):
        target = open_target_of(record.config)
        drafter = load_drafter(record, workdir, choose_step(workdir, "latest"))
        _, _, *domain = record.config.evaluate.prompts.split(":")
        prompts = ":".join(["generator", str(HELD_OUT), *domain])
        sets = read_sets(
            target, prompts, split="test", per_set=HELD_OUT, max_prompt_tokens=256, seed=0
        )
        for temperature in (1.0, 0.0):
            how = Decoding(temperature, max_new_tokens=64, batch_size=24, plain=False)
            outcomes = run_sets(target, drafter, sets, how).outcomes.values()
            pooled = set_result([outcome for group in outcomes for outcome in group])
            found[f"temperature_{temperature:.0f}"] = dataclasses.asdict(pooled)
    return found


def _config_file(name: str, variant: str) -> dict[str, Any]:
    path = Path(__file__).resolve().parent.parent / name
    return runpy.run_path(str(path))["get_config"](variant).to_dict()


def summary(report: Mapping[str, Any]) -> str:
    """The report as one table, and what the synthetic drafters draft."""
    rows, text = [], []

    def add(part: str, what: str, figures: Mapping[str, Any]) -> None:
        low, high = figures.get("accepted_length_ci95") or (None, None)
        slots = figures.get("conditional_acceptance", [1.0] * width)
        slots = [*slots, *[""] * (width - len(slots))]  # blocks of the parts differ
        rows.append([part, what, figures["accepted_length"], low, high, *slots])

    width = max(
        len(one.get("conditional_acceptance") or one["temperature_1"]["conditional_acceptance"])
        for part in report.values()
        for one in part["drafters"].values()
    )
    if synthetic := report.get("synthetic"):
        for name, figures in synthetic["drafters"].items():
            add("synthetic", LABELS[name], figures)
        for name, figures in synthetic["computed"].items():
            add("synthetic", f"computed: {name.replace('_', ' ')}", figures)
        for name, drafts in synthetic["drafts_after_the_stop"].items():
            text += [f'{LABELS[name]} drafts after ".":', *(f"  {draft}" for draft in drafts[:4])]
    if smollm2 := report.get("smollm2"):
        for key in ("temperature_1", "temperature_0"):
            for name, figures in smollm2["drafters"].items():
                add(f"SmolLM2, {key.replace('_', ' ')}", LABELS[name], figures[key])
    columns = ["target", "drafter", "accepted length", "95 %", ""]
    columns += [f"slot {slot + 1}" for slot in range(width)]
    return "\n".join([table(rows, columns), "slot k: conditional acceptance", *text])


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Conditional acceptance slot by slot, a panel for each part that is there."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[str, list[tuple[str, Sequence[float], str, int]]]] = []
    if synthetic := report.get("synthetic"):
        best = synthetic["computed"]["best_factorised"]
        lines = [(f"{LABELS[name]}, {one['accepted_length']:.2f} tokens per round",
                  one["conditional_acceptance"], "-", index)
                 for index, (name, one) in enumerate(synthetic["drafters"].items())]  # fmt: skip
        lines.append((f"best without a Markov head (computed), {best['accepted_length']:.2f}",
                      best["conditional_acceptance"], ":", 6))  # fmt: skip
        panels.append(("Phrases of known distribution", lines))
    if smollm2 := report.get("smollm2"):
        lines = [(f"{LABELS[name]}, temperature {key[-1]}, {one[key]['accepted_length']:.2f}",
                  _seen_often(one[key]), dash, index)
                 for key, dash in (("temperature_1", "-"), ("temperature_0", "--"))
                 for index, (name, one) in enumerate(smollm2["drafters"].items())]  # fmt: skip
        panels.append((f"SmolLM2-135M, {smollm2['steps']} training steps", lines))
    figure = Figure(figsize=(5.4 * len(panels), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for label, values, dash, index in lines:
            slots = range(1, len(values) + 1)
            axis.plot(slots, [np.nan if v is None else v for v in values], dash, label=label,
                      color=COLOURS[index], marker=MARKERS[index], markersize=5)  # fmt: skip
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_xticks(range(1, 1 + max(len(values) for _, values, *_ in lines)))
        axis.set_xlabel("slot", fontsize=9)
        axis.set_ylabel("accepted, if all earlier slots were", fontsize=9)
        axis.set_ylim(0, 1.04)
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        top = max(value for _, values, *_ in lines for value in values if value is not None)
        axis.legend(frameon=False, fontsize=8, loc="upper right" if top < 0.75 else "lower left")
    temporary = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(temporary)
    temporary.replace(path)


def _seen_often(figures: Mapping[str, Any]) -> list[float | None]:
    """Conditional acceptance of the slots that enough rounds decided."""
    reached = [figures["rounds"] * share for share in (1.0, *figures["survival"])]
    pairs = zip(figures["conditional_acceptance"], reached, strict=False)
    return [value if number >= SEEN_OFTEN else None for value, number in pairs]


def main() -> None:
    """Entry point."""
    given = flags.FLAGS
    if given.steps is not None and given.steps < 1:
        raise UserError(f"--steps={given.steps}: at least 1")
    data = Path(given.workdir_data) if given.workdir_data else None
    if data is not None and not (data / "dataset").is_dir():
        raise UserError(f"--workdir_data={data}: no prepared data there; see dspark_jax.prepare")
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "ablation.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    if given.part in ("synthetic", "all"):
        report["synthetic"] = run_synthetic(Synthetic(steps=given.steps or Synthetic.steps))
        write_json(path, report)
    if given.part in ("smollm2", "all"):
        report["smollm2"] = run_smollm2(given.steps or 400, out, data)
        write_json(path, report)
    report = json.loads(path.read_text())
    draw(report, out / "ablation.png")
    print(summary(report))
    print(f"{path}\n{out / 'ablation.png'}")


if __name__ == "__main__":  # flags too: tests import this file beside the commands
    flags.DEFINE_enum("part", "all", ["synthetic", "smollm2", "all"], "What to run.")
    flags.DEFINE_string("out", "runs/markov_ablation", "Folder of the results.")
    flags.DEFINE_integer("steps", None, "Steps of each training; by default 800 and 400.")
    flags.DEFINE_string("workdir_data", None, "Folder that prepare has made (smollm2 only).")
    run_main(main)
