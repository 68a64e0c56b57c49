"""How fast and how lean is the drafter's train step, beside another trainer's on the same machine?

    make peer-speculators
    python experiments/bench_train_step.py --peer=speculators --out=runs/bench_train_step
    python experiments/bench_train_step.py --peer=speculators --cases=layers:2,anchors:256

The same drafter (sizes of SmolLM2-135M: hidden 576, 9 heads of 64, 3 for keys and values, MLP 1536,
blocks of 7), the same weights, hidden states and anchors, in float32: cross-entropy 0.1, sum
|p_d - p_t| 0.9, confidence 1.0, clipping, AdamW. The losses of both sides must agree. Hidden states
are given, so no target runs.

Each measurement is a process of its own, one at a time, ours and the peer's in turn, on --threads
cores. The peer runs with glibc's allocator as it comes, and again with it tuned to keep what is
freed (`TUNED` below), since it spends much time in page faults otherwise; ours asks for that
itself, as `dspark_jax.train` does. Times are medians over the steps of all processes of a side;
memory is what the timed steps needed at most, and above what lay there between two steps.

The share of the machine's rate is the time that the fewest FLOPs of a step (training/flops.py)
take at the best rate that a matrix product in XLA reaches in the same run, over our time.

Leaves OUT/bench_train_step.json and prints a table. Run it again after a kill: finished cases stay.
"""

import dataclasses
import functools
import itertools
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from absl import flags
from train_step.our_step import Case

from dspark_jax.core.command import run_main
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table, write_json
from dspark_jax.core.progress import progress
from dspark_jax.weights.safetensors import read_json

ROOT = Path(__file__).resolve().parent.parent
OURS = ROOT / "experiments/train_step/our_step.py"
WARMUP = 2
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(256 << 20),
}
CASES = [
    Case(layers, rank, anchors, vocab)
    for vocab, (layers, rank), anchors in itertools.product(
        (49152, 8192), ((2, 64), (2, 256), (5, 64), (5, 256)), (64, 256, 512)
    )
]


def chosen_cases(text: str) -> list[Case]:
    """The cases that "layers:2,anchors:256" leaves; all of them for ""."""
    wanted = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition(":")
        known = [field.name for field in dataclasses.fields(Case)]
        if name not in known or not number.isdigit():
            raise UserError(f"--cases={text}: write NAME:NUMBER, NAME one of {', '.join(known)}")
        wanted[name] = int(number)
    kept = [c for c in CASES if all(getattr(c, name) == n for name, n in wanted.items())]
    if not kept:
        raise UserError(f"--cases={text}: no case has these numbers")
    return kept


def measure(case: Case, out: Path, peer: str, threads: int, steps: int, rounds: int) -> dict:
    """Both sides in turn; the row of the report."""
    folder = out / case.name
    folder.mkdir(parents=True, exist_ok=True)
    how = {"warmup": WARMUP, "steps": steps, "threads": threads, "learning_rate": 6e-4}
    how |= {"export": str(folder / "export")}
    write_json(folder / "case.json", dataclasses.asdict(case) | how)
    worker([sys.executable, OURS, "prepare", folder], threads)
    python = peer_python(peer)
    sides = {
        "ours": ([sys.executable, OURS, "time", folder], {}),
        "peer": ([python, ROOT / f"experiments/train_step/{peer}_step.py", folder], {}),
        "peer_tuned": ([python, ROOT / f"experiments/train_step/{peer}_step.py", folder], TUNED),
    }
    answers: dict[str, list[dict]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (command, variables) in sides.items():
            worker(command, threads, variables)
            file = folder / ("ours.json" if name == "ours" else f"{peer}.json")
            answers[name].append(read_json(file))
            file.unlink()
    return row_of(case, peer, answers)


def row_of(case: Case, peer: str, answers: dict[str, list[dict]]) -> dict[str, Any]:
    """What the report says of a case."""
    row = dataclasses.asdict(case) | {"peer": peer}
    for name, runs in answers.items():
        seconds = [value for run in runs for value in run["seconds"]]
        row[f"{name}_seconds"] = statistics.median(seconds)
        row[f"{name}_seconds_range"] = [min(seconds), max(seconds)]
        row[f"{name}_peak_bytes"] = max(run["peak_bytes"] for run in runs)
        row[f"{name}_step_bytes"] = max(run["peak_bytes"] - run["idle_bytes"] for run in runs)
        row[f"{name}_first_step_seconds"] = min(run["first_step_seconds"] for run in runs)
    ours = answers["ours"][0]
    row["ratio"] = row["peer_seconds"] / row["ours_seconds"]
    row["ratio_tuned"] = row["peer_tuned_seconds"] / row["ours_seconds"]
    row["step_memory_ratio"] = row["peer_step_bytes"] / row["ours_step_bytes"]
    row["compile_seconds"] = row["ours_first_step_seconds"] - row["ours_seconds"]
    row["least_flops"] = ours["least_flops"]
    row["flops_per_second"] = max(run["flops_per_second"] for run in answers["ours"])
    reached = ours["least_flops"] / row["ours_seconds"]
    row["share_of_product_rate"] = reached / row["flops_per_second"]
    both = list(zip(ours["losses"], answers["peer"][0]["losses"], strict=True))
    row["first_losses"] = both[0]
    row["largest_loss_difference"] = max(abs(a / b - 1) for a, b in both)
    if row["largest_loss_difference"] > 1e-3:
        raise UserError(f"{case.name}: not the same step: losses {both} of ours and {peer}")
    row["versions"] = ours["versions"] | answers["peer"][0]["versions"]
    return row


def worker(command: list, threads: int, variables: dict[str, str] | None = None) -> None:
    """Runs a process on the first `threads` cores and waits for it."""
    cores = set(sorted(os.sched_getaffinity(0))[:threads])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "MALLOC_"))}
    kept |= {"OMP_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    if str(command[0]) != sys.executable:
        kept.pop("PYTHONPATH", None)
    else:
        kept["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        list(map(str, command)),
        env=kept | (variables or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        preexec_fn=functools.partial(os.sched_setaffinity, 0, cores),
    )
    if done.returncode:
        last = done.stdout.strip().splitlines()[-1:] or ["it said nothing"]
        raise UserError(f"{' '.join(map(str, command[:2]))} failed: {last[0]}")


def peer_python(peer: str) -> Path:
    """The peer's Python."""
    python = ROOT / ".venv-peers" / peer / "bin/python"
    if not python.is_file():
        raise UserError(f"no {python.relative_to(ROOT)}: run `make peer-{peer}` first")
    return python


def show(rows: list[dict]) -> str:
    """The table."""
    columns = ("layers", "rank", "anchors", "vocab", "ours s", "peer s", "tuned s", "ratio",
               "tuned", "step MB", "peer MB", "1/", "of rate")  # fmt: skip
    return table(
        [
            (
                *(r[name] for name in ("layers", "rank", "anchors", "vocab")),
                *(f"{r[f'{side}_seconds']:.3f}" for side in ("ours", "peer", "peer_tuned")),
                f"{r['ratio']:.2f}",
                f"{r['ratio_tuned']:.2f}",
                f"{r['ours_step_bytes'] / 1e6:.0f}",
                f"{r['peer_step_bytes'] / 1e6:.0f}",
                f"{r['step_memory_ratio']:.1f}",
                f"{r['share_of_product_rate']:.0%}",
            )
            for r in rows
        ],
        columns,
    )


def run(out: Path, peer: str, cases: list[Case], threads: int, steps: int, rounds: int) -> dict:
    """Measures what is not there yet; returns the report."""
    file = out / "bench_train_step.json"
    report: dict[str, Any] = {"cases": []}
    if file.exists():
        report = read_json(file)
    report["machine"] = machine(threads)
    done = {Case(*(row[f.name] for f in dataclasses.fields(Case))) for row in report["cases"]}
    peer_python(peer)  # before anything is written
    out.mkdir(parents=True, exist_ok=True)
    missing = [case for case in cases if case not in done]
    with progress(total=len(missing), desc="cases", unit="case") as bar:
        for case in missing:
            row = measure(case, out, peer, threads, steps, rounds)
            report["cases"].append(row)
            write_json(file, report)
            bar.note(f"{case.name}: {row['ratio']:.2f}, tuned {row['ratio_tuned']:.2f}")
            bar.update()
    print(show(report["cases"]))
    return report


def machine(threads: int) -> dict[str, Any]:
    """Where it was measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    return {"cpu": name, "threads": threads, "cores": os.cpu_count(), "libc": platform.libc_ver()}


def main() -> None:
    """Entry point."""
    cases = chosen_cases(_CASES.value)
    run(Path(_OUT.value).resolve(), _PEER.value, cases, _THREADS.value, _STEPS.value, _ROUNDS.value)


if __name__ == "__main__":
    _PEER = flags.DEFINE_enum("peer", "speculators", ["speculators"], "Whom to compare with.")
    _OUT = flags.DEFINE_string("out", "runs/bench_train_step", "Folder of the report.")
    _CASES = flags.DEFINE_string("cases", "", "Only those, as layers:2,rank:64,anchors:256.")
    _THREADS = flags.DEFINE_integer("threads", 2, "Cores of each side.")
    _STEPS = flags.DEFINE_integer("steps", 3, "Timed steps of a process, after two that warm up.")
    _ROUNDS = flags.DEFINE_integer("rounds", 2, "Processes of each side.")
    run_main(main)
