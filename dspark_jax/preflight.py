"""Does this drafter fit this target, in the engine that is to serve them?

    python -m dspark_jax.preflight --drafter=exports/a --target=/models/Qwen3-4B --engine=vllm
    python -m dspark_jax.preflight --drafter=exports/a --target=smollm2 --engine=vllm \\
        --data=runs/a/data --json=preflight.json

A drafter that does not fit seldom fails: verification keeps the text right, and only the accepted
length falls. This reads both folders, without loading a model, and prints everything that it finds,
each with its reason and a remedy:

    refuse   served like this it would draft wrongly or not at all, or it is of an unknown kind
    warn     right only under a condition that the files do not tell

--drafter is a folder with config.json and safetensors, in the speculators layout (what convert
writes and `vllm serve` takes) or the flat DeepSpec layout (the released DeepSeek drafters). A run's
folder is no such thing: export it first. --target is a model folder, a hub id or smollm2.

What is compared: the anchor flag and the number of proposals, the tapped layers and where they are
counted from, sizes, RoPE, the mask token, heads against tensors, dtypes, the draft vocabulary, and
whether this is the target trained with (fingerprint, tokenizer, chat template). Then what the
engine takes. vLLM: both layouts, vanilla heads, DSpark in its GPU runner V2 only. SGLang: the
DeepSpec layout, all three heads, the whole vocabulary. tpu-inference: DFlash, fill-in. EAGLE-3 is
judged by the norms, taps, tables and proposals of its own, which vLLM takes in speculators' layout;
the other two want a layout that is not written here, and DeepSpec's is run by DeepSpec alone.

--data is the data folder of prepare. With it the mask token is looked for in every document, and
the beginnings of the documents are compared with the target's chat template.

Exit code: 0 without a refusal, 2 with one.
"""

import dataclasses
import sys
import textwrap
from pathlib import Path

import numpy as np
from absl import flags

from dspark_jax.checks.engines import ENGINES
from dspark_jax.checks.facts import (
    REFUSE,
    DataFacts,
    Finding,
    TargetFacts,
    read_drafter,
)
from dspark_jax.checks.preflight import preflight
from dspark_jax.checks.target import read_target
from dspark_jax.core.command import FAULT_OF_USER, run_main
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import table, write_json
from dspark_jax.data.chat import empty_user_turn_ids
from dspark_jax.data.dataset import FOLDER, load_dataset
from dspark_jax.data.opened import open_tokenizer
from dspark_jax.weights.fingerprint import Fingerprint
from dspark_jax.weights.resolve import resolve_target
from dspark_jax.weights.safetensors import read_json

_WIDTH = 72  # of the column with reasons and remedies


def run(drafter: Path, target: str, engine: str, data: Path | None = None) -> list[Finding]:
    """Everything that speaks against this drafter with this target in this engine."""
    described = read_drafter(drafter.expanduser())
    served = read_target(resolve_target(target), target)
    seen = read_data(data.expanduser(), served) if data else None
    return preflight(described, served, engine, seen)


def read_data(directory: Path, target: TargetFacts) -> DataFacts:
    """Token counts of a prepared data set, and how its documents begin."""
    rows = load_dataset(directory)
    counts = np.zeros(target.config["vocab_size"], np.int64)
    for row in rows:
        found = np.bincount(row.ids)
        counts = np.pad(counts, (0, max(0, len(found) - len(counts))))
        counts[: len(found)] += found
    try:
        opening = empty_user_turn_ids(open_tokenizer(target.directory))
        opened = sum(list(row.ids[: len(opening)]) == opening for row in rows)
    except UserError:  # no template, or none that begins every conversation alike
        opened = None
    record = read_json(directory / FOLDER / "dspark_jax.json")
    return DataFacts(directory, len(rows), counts, opened, Fingerprint(**record["target"]))


def report(findings: list[Finding]) -> str:
    """One table: the place and the reason of each finding, its remedy below."""
    rows: list[tuple[str, str, str]] = []
    for finding in findings:
        why = textwrap.wrap(f"{finding.where}: {finding.why}", _WIDTH)
        remedy = textwrap.wrap(
            finding.remedy, _WIDTH, initial_indent="-> ", subsequent_indent="   "
        )
        first, *more = [*why, *remedy]
        rows += [(finding.severity, finding.what, first), *(("", "", line) for line in more)]
    return table(rows, ("", "what", "where, why -> remedy"))


def main() -> None:
    """Entry point."""
    data = Path(_DATA.value) if _DATA.value else None
    findings = run(Path(_DRAFTER.value), _TARGET.value, _ENGINE.value, data)
    refused = sum(finding.severity == REFUSE for finding in findings)
    if _JSON.value:
        value = {
            "drafter": _DRAFTER.value,
            "target": _TARGET.value,
            "engine": _ENGINE.value,
            "refused": refused,
            "warned": len(findings) - refused,
            "findings": [dataclasses.asdict(finding) for finding in findings],
        }
        write_json(_JSON.value, value)
    if findings:
        print(f"{report(findings)}\n")
    found = f"{refused} refused, {len(findings) - refused} warned" if findings else "nothing found"
    print(f"{found}: {_DRAFTER.value} with {_TARGET.value} in {_ENGINE.value}")
    if refused:
        sys.stdout.flush()
        sys.exit(FAULT_OF_USER)


if __name__ == "__main__":  # flags too: several commands may be imported into one program
    _DRAFTER = flags.DEFINE_string("drafter", None, "Folder of the exported drafter.")
    _TARGET = flags.DEFINE_string(
        "target", None, "Its target: a model folder, a hub id, or smollm2."
    )
    _ENGINE = flags.DEFINE_enum("engine", None, list(ENGINES), "What is to serve them.")
    _DATA = flags.DEFINE_string(
        "data", None, "The data folder of prepare (WORKDIR/data), to look for the mask token in."
    )
    _JSON = flags.DEFINE_string("json", None, "A file to write the findings to as well.")
    flags.mark_flags_as_required(["drafter", "target", "engine"])
    run_main(main)
