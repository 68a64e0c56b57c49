"""A target as the commands hold it: model, tokenizer, stop ids and fingerprint together."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dspark_jax.checks.facts import TargetFacts
from dspark_jax.checks.runs import check_run, tell
from dspark_jax.checks.target import read_target
from dspark_jax.core.config import DrafterConfig, RunConfig
from dspark_jax.core.errors import UserError
from dspark_jax.data.chat import end_of_turn_ids
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.target import Target
from dspark_jax.weights.fingerprint import Fingerprint, fingerprint
from dspark_jax.weights.resolve import resolve_target
from dspark_jax.weights.safetensors import load_target, target_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class OpenedTarget:
    """Everything a command needs of a target."""

    name: str
    directory: Path
    model: Target
    tokenizer: "PreTrainedTokenizerBase"
    stop_ids: tuple[int, ...]
    fingerprint: Fingerprint

    @property
    def facts(self) -> TargetFacts:
        """What its files say, for the checks; reads no weights."""
        facts = read_target(self.directory, self.name, self.fingerprint)
        stops = dict.fromkeys(self.stop_ids, "stop")
        return dataclasses.replace(facts, roles=stops | facts.roles)


def check_drafter(
    shape: DrafterShape, target: OpenedTarget, place: str, made_with: Fingerprint | None = None
) -> None:
    """The part of preflight that concerns a run: warnings on stderr, or a refusal.

    Args:
      place: of the drafter's config, before the name of a field.
      made_with: the target that it was trained with; None before training.

    Raises:
      UserError: this drafter must not be used with this target.
    """
    tell(check_run(shape, target.facts, made_with), place)


def open_tokenizer(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a target directory; it must have a chat template.

    Raises:
      UserError: no tokenizer, or no chat template.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{directory}: no usable tokenizer ({reason})") from None
    if not tokenizer.chat_template:
        raise UserError(f"{directory}: the tokenizer has no chat template; use an instruct model")
    return tokenizer


def open_target(
    name: str, dtype: str, drafter: DrafterConfig | None = None, weights: str = ""
) -> OpenedTarget:
    """Resolves, loads and fingerprints a target on the current mesh.

    Args:
      name: "smollm2" (bundled), a directory or a hub id.
      dtype: float32 or bfloat16.
      drafter: one to be made for it; what the target's config alone tells against it is told
        before any weights are read.
      weights: int8, or "" for weights in `dtype`; another value is another target.

    Raises:
      UserError: no such target, or one that cannot have this drafter.
    """
    directory = resolve_target(name)
    if drafter is not None:
        DrafterShape.of(drafter, target_config(directory, dtype))
    tokenizer = open_tokenizer(directory)
    return OpenedTarget(
        name=name,
        directory=directory,
        model=load_target(directory, dtype, weights),
        tokenizer=tokenizer,
        stop_ids=end_of_turn_ids(tokenizer, directory),
        fingerprint=fingerprint(directory, name, weights),
    )


def open_target_of(config: RunConfig, name: str = "") -> OpenedTarget:
    """The target of a run in that run's precision; `name` = it is elsewhere now."""
    return open_target(name or config.target, config.target_dtype, weights=config.target_weights)
