"""What the public implementations compute differently from the same recipe, as named presets.

    python -m dspark_jax.train --config=configs/qwen3_4b.py --workdir=runs/a \\
        --config.semantics=speculators --config.loss.average_over=batch

A preset is a table of config fields, and nothing else knows its name: each difference is a field of
its own (`LossConfig`, `DrafterConfig`), so an ablation of one of them is one flag. Naming a preset
sets its fields there and then; what is set afterwards wins, be it in a config file or, whatever the
order of the flags, on the command line.

Sizes, data and the optimizer belong to no preset. Nor does what is wrong in one of them without
being meant: DeepSpec rounds RoPE frequencies to bfloat16, and sums are divided by themselves plus
1e-5 to 1e-8.
"""

from collections.abc import Mapping
from typing import Any

from ml_collections import config_dict

from dspark_jax.core.errors import UserError

# The paper (arXiv 2607.05147, section 3.3), normalised over the whole global batch.
_PAPER: dict[str, Any] = {
    "loss.ce": 0.1,
    "loss.l1": 0.9,
    "loss.kl": 0.0,
    "loss.confidence": 1.0,
    "loss.decay": 4.0,
    "loss.distance": "l1",
    "loss.ce_label": "data",
    "loss.teacher": "whole",
    "loss.anchors": "next",
    "loss.supervision": "prefix",
    "loss.mask_at": "label",
    "loss.cross_documents": False,
    "loss.denominator": "weights",
    "loss.average_over": "batch",
    "drafter.init": "normal",
    "drafter.head_init": "normal",
    "drafter.confidence_detach": False,
}

SEMANTICS: dict[str, dict[str, Any]] = {
    "paper": _PAPER,
    # deepspec/modeling/dspark/loss.py, deepspec/trainer/base_trainer.py: denominators are summed
    # over devices, but each accumulation step has its own.
    "deepspec": _PAPER | {"loss.average_over": "micro_batch"},
    # speculators 0.9: models/dspark/{core,metrics,model_definitions}.py, models/dflash/utils.py,
    # losses/{eager,utils}.py. Its own default loss is KL alone beside the confidence's.
    "speculators": _PAPER
    | {
        "loss.ce": 0.0,
        "loss.l1": 0.0,
        "loss.kl": 1.0,
        "loss.distance": "tv",
        "loss.ce_label": "target",
        "loss.teacher": "draft",
        "loss.anchors": "block",
        "loss.supervision": "slot",
        "loss.mask_at": "slot",
        "loss.cross_documents": True,
        "loss.denominator": "slots",
        "loss.average_over": "row",
        "drafter.head_init": "uniform",
    },
}


def table_of(name: str) -> dict[str, Any]:
    """The fields of a preset, by dotted name.

    Raises:
      UserError: there is no such preset.
    """
    if name not in SEMANTICS:
        known = ", ".join(SEMANTICS)
        raise UserError(f"config.semantics={name!r}: must be one of {known}, or empty")
    return SEMANTICS[name]


class Experiment(config_dict.ConfigDict):
    """The ConfigDict of config files; setting its `semantics` sets the fields of that preset."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "semantics" and value:
            self.update_from_flattened_dict(table_of(value))


def completed(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's mapping in which the fields that it leaves open are those of the preset it names.

    Of an `Experiment` every field is there; plain mappings may name a preset and little else.
    """
    found = dict(mapping)
    for name, value in SEMANTICS.get(found.get("semantics") or "", {}).items():
        group, field = name.split(".")
        if isinstance(inner := found.get(group, {}), Mapping):
            found[group] = {field: value, **inner}
    return found
