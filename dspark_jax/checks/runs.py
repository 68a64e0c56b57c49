"""The part of preflight that concerns a run, whose drafter is a config and no exported folder.

`train`, `evaluate`, `generate` and `convert` ask it once the target is known and before they load,
prepare or compile anything of the drafter. Engines are another matter (engines.py); here only a
drafter that none of them can serve is told of, before it is trained.
"""

import dataclasses
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from dspark_jax.checks import eagle3, engines, preflight
from dspark_jax.checks import target as targets
from dspark_jax.checks.facts import (
    FIELDS,
    REFUSE,
    WARN,
    DrafterFacts,
    Finding,
    TargetFacts,
    read_drafter,
)
from dspark_jax.core.errors import UserError
from dspark_jax.core.processes import is_first
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.weights.drafter_file import DrafterFile
from dspark_jax.weights.eagle3_file import capped
from dspark_jax.weights.fingerprint import Fingerprint

_CONFIG = "config.json"


def check_run(
    shape: DrafterShape, target: TargetFacts, made_with: Fingerprint | None = None
) -> list[Finding]:
    """What speaks against this drafter with this target; refusals first.

    Args:
      shape: with the sizes and the RoPE of the target that it was made for.
      made_with: the target that it was trained with; None before training.
    """
    drafter = _facts(shape, made_with)
    findings = [
        *preflight.check_sizes(drafter, target),
        *preflight.check_layer_ids(drafter, target),
    ]
    if drafter.kind != "eagle3":
        findings += preflight.check_mask(drafter, target)
    if other := preflight.rope_differences(shape.rope, target.rope):
        why = f"{', '.join(other)}: the drafter would turn otherwise than the target"
        remedy = "restore what it was trained with"
        findings += [Finding(REFUSE, "RoPE", f"{_CONFIG}: rope", why, remedy)]
    if made_with is not None:
        findings += targets.check_record(drafter, target)
    elif drafter.kind == "eagle3":
        findings += check_exportable(shape)
        findings += eagle3.check_target(drafter, target, "vllm")  # the one engine that takes it
    else:
        findings += check_servable(drafter, target)
    return sorted(findings, key=lambda finding: finding.severity != REFUSE)


def check_servable(drafter: DrafterFacts, target: TargetFacts) -> Iterator[Finding]:
    """Before it is trained: whether any engine could run these heads in this block."""
    refused = {
        engine: [f for f in engines.check_kind(drafter, target, engine) if f.severity == REFUSE]
        for engine in engines.ENGINES
    }
    if all(refused.values()):
        first = refused[engines.ENGINES[0]][0]
        why = f"{', '.join(refused)} could not serve it: {first.why}"
        yield Finding(WARN, "not servable", first.where, why, first.remedy)


def check_exportable(shape: DrafterShape) -> Iterator[Finding]:
    """Before it is trained: whether any layout could hold this EAGLE-3 drafter."""
    if reason := capped(shape):
        remedy = "it can be evaluated here, not exported; DSpark drafters can"
        yield Finding(WARN, "not servable", f"{_CONFIG}: algorithm", reason, remedy)


def tell(findings: Collection[Finding], place: str, stop: bool = True) -> None:
    """Prints each finding as one line on stderr, and stops at refusals.

    Args:
      place: what takes the place of "config.json: ", and of the record of an export.
      stop: False = refusals are printed as well.

    Raises:
      UserError: with the first refusal; it says how many there are.
    """
    refused = [finding for finding in findings if finding.severity == REFUSE]
    if refused and stop:
        more = f" (1 of {len(refused)} refusals)" if len(refused) > 1 else ""
        raise UserError(f"{_line(refused[0], place)}{more}")
    for finding in findings if is_first() else ():
        kind = "warning" if finding.severity == WARN else "refused by preflight"
        print(f"dspark_jax: {kind}: {_line(finding, place)}", file=sys.stderr, flush=True)


def check_export(folder: Path, target: TargetFacts, engine: str = "vllm") -> None:
    """Prints what speaks against serving a finished export, refusals included."""
    findings = preflight.preflight(read_drafter(folder), target, engine)
    tell(findings, f"{folder}/{_CONFIG}: ", stop=False)


def _line(finding: Finding, place: str) -> str:
    where = finding.where.replace(f"{_CONFIG}: ", place).replace(targets.RECORD, f"{place}target")
    return f"{where}: {finding.why}; {finding.remedy}"


class _NoFile(DrafterFile):
    """A flat config.json that was never written."""

    def __init__(self, value: dict):
        self.path, self.value, self.sections = Path(_CONFIG), value, {"": value}


def _facts(shape: DrafterShape, made_with: Fingerprint | None) -> DrafterFacts:
    """A run's drafter as preflight knows drafters, in the flat layout, without its tensors."""
    config = shape.config
    heads = config.markov_rank or config.confidence_head or config.sample_from_anchor
    kind = "dspark" if heads else "dflash"
    if config.algorithm == "eagle3":
        kind, own = "eagle3", {"ttt_length": config.block_size}
    else:
        own = {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "sample_from_anchor": config.sample_from_anchor,
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_head if config.markov_rank else None,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    said = dict.fromkeys(FIELDS) | {
        **own,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": shape.target_layers,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
    }
    return DrafterFacts(
        file=_NoFile(said),
        layout="deepspec",
        kind=kind,
        said=said,
        tensors={},
        tables={},
        files=None,
        record={"target": dataclasses.asdict(made_with)} if made_with else None,
        problems=(),
    )
