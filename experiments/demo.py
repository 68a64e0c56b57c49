"""The whole path on one small machine: prompts, responses, a drafter, its worth, text, an export.

    make demo
    .venv/bin/python experiments/demo.py --workdir=runs/demo
    .venv/bin/python experiments/demo.py --workdir=runs/long --config.train.num_steps=2000

Trains a drafter for the bundled SmolLM2-135M-Instruct on its own answers to generated prompts, and
measures it on prompts of the same kinds that it has never seen. About a quarter of an hour on two
cores. Run it again after a kill: what is finished is not done again. Leaves in the workdir
report.json, training_curve.png, acceptance_per_slot.png and export/, which vLLM can serve.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from absl import flags
from ml_collections import config_flags

from dspark_jax import convert, evaluate, generate, prepare, train
from dspark_jax.core.command import run_main
from dspark_jax.core.config import RunConfig, from_mapping, to_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import peak_memory_bytes, table, to_json, write_json
from dspark_jax.core.pictures import acceptance_per_slot
from dspark_jax.core.progress import clock
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.opened import open_target_of
from dspark_jax.data.prompts import load_prompts
from dspark_jax.decoding.evaluation import Decoding, read_sets, run_sets
from dspark_jax.decoding.figures import set_result
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.training.checkpoint import choose_step, load_arrays, read_record
from dspark_jax.training.step import init_state
from dspark_jax.weights.importing import read_folder
from dspark_jax.weights.names import DRAFT_IDS
from dspark_jax.weights.safetensors import read_json

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "smollm2.py"
SAMPLES = 2  # texts that are shown
SAMPLE_SEED = 1  # of their prompts, so that they are not among those evaluated
UNTRAINED_PROMPTS = 4
SAMPLED_PROMPTS = 48  # at temperature 1, where accepted lengths scatter more
SAMPLED_TOGETHER = 16  # of them, as no speed is measured there


class Stages:
    """WORKDIR/stages.json: what is finished, its result, seconds and peak memory."""

    def __init__(self, path: Path, config: RunConfig, names: list[str]):
        self.path, self.names = path, names
        plain = json.loads(json.dumps(to_mapping(config)))
        self.record: dict[str, Any] = {"config": plain, "done": {}}
        if path.exists():
            self.record = read_json(path)
            if self.record.get("config") != plain:
                raise UserError(
                    f"{path.parent} holds a demo with another config: use another --workdir or "
                    "delete it"
                )

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of `work`, from the last time if it was finished then."""
        where = f"{self.names.index(name) + 1}/{len(self.names)} {name}"
        done = self.record["done"]
        if name in done:
            print(f"\n== {where}: done before, {clock(done[name]['seconds'])}", flush=True)
            return done[name]["result"]
        print(f"\n== {where}", flush=True)
        began = time.monotonic()
        result = to_json(work())
        seconds = time.monotonic() - began
        done[name] = {"seconds": seconds, "peak_memory_bytes": peak_memory_bytes()}
        done[name]["result"] = result
        write_json(self.path, self.record)
        print(f"== {name} took {clock(seconds)}", flush=True)
        return result

    def seconds(self) -> dict[str, float]:
        """Seconds of every finished stage."""
        return {name: stage["seconds"] for name, stage in self.record["done"].items()}

    def peak_memory_bytes(self) -> int:
        """The most memory any stage needed."""
        return max(stage["peak_memory_bytes"] for stage in self.record["done"].values())


def run(config: RunConfig, workdir: Path) -> dict[str, Any]:
    """Runs what is not finished yet and returns the report."""
    names = ["prepare", "train", "untrained", "evaluate t=1", "evaluate t=0", "generate", "export"]
    stages = Stages(workdir / "stages.json", config, names)
    stages.run("prepare", lambda: prepare.run(config, workdir))
    stages.run("train", lambda: train.run(config, workdir))
    untrained = stages.run("untrained", lambda: untrained_length(config, workdir))
    sampled = stages.run("evaluate t=1", lambda: measure(workdir, 1.0))
    greedy = stages.run("evaluate t=0", lambda: measure(workdir, 0.0))
    texts = stages.run("generate", lambda: show_texts(workdir))
    exported = stages.run("export", lambda: export(workdir))
    acceptance_per_slot(
        {
            "temperature 0": greedy["all"]["pooled"],
            "temperature 1": sampled["all"]["pooled"],
        },
        workdir / "acceptance_per_slot.png",
    )
    equal = greedy["greedy_equal"] == greedy["greedy_compared"]
    report = {
        "accepted_length_t0": greedy["all"]["accepted_length"],
        "accepted_length_t0_ci95": greedy["all"]["accepted_length_ci95"],
        "accepted_length_t1": sampled["all"]["accepted_length"],
        "accepted_length_t1_ci95": sampled["all"]["accepted_length_ci95"],
        "accepted_length_t0_untrained": untrained,
        "tokens_per_second_plain": greedy["tokens_per_second_plain"],
        "tokens_per_second_speculative": greedy["tokens_per_second_speculative"],
        "speedup": greedy["speedup"],
        "speedup_ci95": greedy["speedup_ci95"],
        "greedy_equal": equal and all(text["equal"] for text in texts),
        "greedy_equal_prompts": greedy["greedy_equal"],
        "greedy_compared_prompts": greedy["greedy_compared"],
        "greedy_first_difference": greedy["greedy_first_difference"],
        "break_even_accepted_length": greedy["break_even_accepted_length"],
        "round_costs": greedy["round_costs"],
        "export_dir": exported["directory"],
        "export_read_back_equal": exported["equal"],
        "seconds_total": sum(stages.seconds().values()),
        "seconds": stages.seconds(),
        "peak_memory_bytes": stages.peak_memory_bytes(),
        "target": config.target,
        "device": greedy["device"],
        "commit": greedy["commit"],
    }
    write_json(workdir / "report.json", report)
    return report


def untrained_length(config: RunConfig, workdir: Path) -> float | None:
    """Greedy accepted length of the drafter that training began with, on a few prompts."""
    arrays = load_arrays(workdir, choose_step(workdir, "latest"))
    with jax.set_mesh(make_mesh(config.mesh.fsdp, config.mesh.tp)):
        target = open_target_of(config)
        shape = DrafterShape.of(config.drafter, target.model.config)
        init = functools.partial(init_state, shape=shape, tx=optax.identity())
        drafter = jax.jit(init)(
            jax.random.key(config.seed), target.model, arrays.get(DRAFT_IDS)
        ).drafter
        sets = read_sets(
            target,
            _ask(config.evaluate.prompts, UNTRAINED_PROMPTS),
            split="",
            per_set=UNTRAINED_PROMPTS,
            max_prompt_tokens=config.data.max_prompt_tokens,
            seed=0,
        )
        how = Decoding(max_new_tokens=config.evaluate.max_new_tokens, plain=False)
        outcomes = run_sets(target, drafter, sets, how).outcomes
    return set_result([outcome for group in outcomes.values() for outcome in group]).accepted_length


def measure(workdir: Path, temperature: float) -> dict[str, Any]:
    """Evaluates on held-out prompts; the speed is compared at temperature 0, one by one."""
    request = evaluate.Request(temperature=temperature)
    if temperature:
        request = dataclasses.replace(
            request,
            tasks=_ask(read_record(workdir).config.evaluate.prompts, SAMPLED_PROMPTS),
            prompts_per_set=SAMPLED_PROMPTS,
            plain=False,
            costs=False,
            batch_size=SAMPLED_TOGETHER,
        )
    out = workdir / f"evaluation_t{temperature:g}" / "report.json"
    report = evaluate.run(request, workdir, out)
    print(evaluate.summary(report))
    return report


def _ask(prompts: str, count: int) -> str:
    """generator:N:K with another N."""
    return ":".join(["generator", str(count), *prompts.split(":")[2:]])


def show_texts(workdir: Path) -> list[dict[str, Any]]:
    """Answers a few prompts with and without speculation, streamed."""
    prompts = _ask(read_record(workdir).config.evaluate.prompts, SAMPLES)
    conversations = load_prompts(prompts, split="heldout", seed=SAMPLE_SEED)
    for number, conversation in enumerate(conversations, start=1):
        print(f"prompt {number}: {conversation.messages[0].content}")
    print(flush=True)
    tokens = read_record(workdir).config.evaluate.max_new_tokens
    answers = generate.run(workdir, conversations, generate.Options(max_new_tokens=tokens))
    return [
        {"prompt": conversation.messages[0].content, "answer": answer.text, "equal": answer.equal}
        for conversation, answer in zip(conversations, answers, strict=True)
    ]


def export(workdir: Path) -> dict[str, Any]:
    """Writes the drafter for vLLM and reads it back as a stranger's."""
    exported = convert.export_run(workdir, workdir / "export", force=True)
    ours = load_arrays(workdir, choose_step(workdir, "best"))
    with jax.set_mesh(make_mesh()):
        back = read_folder(exported.directory).arrays
    equal = set(ours) == set(back) and all(np.array_equal(ours[n], back[n]) for n in ours)
    if not equal:
        raise UserError(f"{exported.directory}: what was read back is not what was exported")
    return {"directory": str(exported.directory), "equal": equal, "tensors": exported.tensors}


def summary(report: dict[str, Any]) -> str:
    """The report as one table."""

    def length(name: str) -> str:
        if report[name] is None:
            return "-"
        low, high = report[f"{name}_ci95"]
        return f"{report[name]:.2f} tokens per round (95 %: {low:.2f} to {high:.2f})"

    plain, fast = report["tokens_per_second_plain"], report["tokens_per_second_speculative"]
    equal = f"{report['greedy_equal_prompts']} of {report['greedy_compared_prompts']} prompts"
    untrained = report["accepted_length_t0_untrained"]
    rows = [
        ("accepted length, temperature 0", length("accepted_length_t0")),
        ("  before training", "-" if untrained is None else f"{untrained:.2f}"),
        ("accepted length, temperature 1", length("accepted_length_t1")),
        ("plain decoding", f"{plain:.1f} tokens/s"),
        ("speculative decoding", f"{fast:.1f} tokens/s ({report['speedup']:.2f} times)"),
        ("speculation pays above", f"{report['break_even_accepted_length']:.2f} tokens per round"),
        ("text equal to plain decoding", equal),
        ("export, read back equal", report["export_dir"]),
        ("time", clock(report["seconds_total"])),
        ("peak memory", f"{report['peak_memory_bytes'] / 1e9:.1f} GB"),
    ]
    return table(rows, ("demo", ""))


def main() -> None:
    """Entry point."""
    workdir = Path(flags.FLAGS.workdir)
    config = from_mapping(RunConfig, flags.FLAGS.config.to_dict())
    report = run(config, workdir)
    print(f"\n{summary(report)}\n\nreport: {workdir / 'report.json'}")


if __name__ == "__main__":
    flags.DEFINE_string("workdir", "runs/demo", "Everything goes here.")
    config_flags.DEFINE_config_file(
        "config", f"{CONFIG}:demo", "The experiment; fields can be changed.", lock_config=True
    )
    run_main(main)
