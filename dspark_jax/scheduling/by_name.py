"""--scheduler of the commands: a policy from a word and what calibrate left in the run."""

from pathlib import Path

from dspark_jax.core.errors import UserError
from dspark_jax.scheduling import calibration, step_costs
from dspark_jax.scheduling.calibration import Calibration
from dspark_jax.scheduling.policy import BY_CONFIDENCE, BY_COSTS, Policy
from dspark_jax.scheduling.step_costs import StepCosts

HELP = (
    "How many drafts are verified: all, fixed:N, threshold:C (up to the first of less confidence), "
    "load:LOW:HIGH, hardware (what pays by costs.json), asynchronous (with the budget of two "
    "rounds before) or off (plain decoding). Confidence is calibrated by calibration.json."
)
_NUMBERS = {"all": 0, "off": 0, "fixed": 1, "threshold": 1, "load": 2, "hardware": 0,
            "asynchronous": 0}  # fmt: skip


def read_policy(
    text: str,
    workdir: Path,
    *,
    step: int,
    proposals: int,
    has_confidence: bool,
    rows: int,
    force: bool = False,
    measured_later: bool = False,
) -> Policy | None:
    """The policy that `text` names; None for "all".

    Args:
      workdir: the run, for calibration.json (temperature 1 where there is none) and costs.json.
      step: of the drafter in use.
      rows: decoded together, for the costs.
      force: take costs of another device.
      measured_later: costs that are missing, or of fewer rows, are no error but left out.

    Raises:
      UserError: no such policy, one that this drafter cannot follow, or files that are missing, of
        another device or of another step.
    """
    kind, *numbers = text.split(":")
    if kind not in _NUMBERS or len(numbers) != _NUMBERS[kind]:
        raise UserError(
            f"--scheduler={text}: write all, off, fixed:N, threshold:C, load:LOW:HIGH, hardware or "
            "asynchronous"
        )
    if kind == "all":
        return None
    try:
        values = [float(number) for number in numbers]
        length = int(numbers[0]) if kind == "fixed" else 0
    except ValueError:
        wanted = "whole number" if kind == "fixed" else "number"
        raise UserError(f"--scheduler={text}: {':'.join(numbers)} is no {wanted}") from None
    if kind in ("threshold", "load") and not (sorted(values) == values and _shares(values)):
        wanted = "C from 0 to 1" if kind == "threshold" else "0 <= LOW <= HIGH <= 1"
        raise UserError(f"--scheduler={text}: confidence is {wanted}")
    if kind == "fixed" and not 1 <= length <= proposals:
        raise UserError(
            f"--scheduler={text}: the drafter proposes {proposals}; write fixed:1 to "
            f"fixed:{proposals}, or off"
        )
    fields = {}
    if kind == "threshold":
        fields = {"threshold": values[0], "highest": 1.0}
    elif kind == "load":
        fields = {"threshold": values[0], "highest": values[1]}
    if kind in BY_COSTS:
        path = workdir / step_costs.FILE
        costs = None
        if path.is_file():
            costs = StepCosts.read(path, proposals=proposals, force=force)
        elif not measured_later:
            raise UserError(
                f"--scheduler={text}: no {path}; measure it with python -m dspark_jax.calibrate "
                f"--workdir={workdir}"
            )
        if costs and (not measured_later or costs.most_rows >= rows):
            fields = {"costs": costs.rounds(rows), "plain": costs.plain(rows)}
    if kind in BY_CONFIDENCE and has_confidence:
        path = workdir / calibration.FILE
        if path.is_file():
            made = Calibration.read(path, proposals)
            if made.recorded.step != step:
                raise UserError(
                    f"{path} is of step {made.recorded.step}, this is step {step}; calibrate again"
                )
            fields |= {"temperatures": made.temperatures, "offsets": made.offsets}
        else:
            print(f"note: no {path}: the confidence is taken as trained; see calibrate")
    policy = Policy(kind, length, **fields)
    policy.check(has_confidence, proposals, measured_later)
    return policy


def _shares(values: list[float]) -> bool:
    return all(0 <= value <= 1 for value in values)  # NaN is none
