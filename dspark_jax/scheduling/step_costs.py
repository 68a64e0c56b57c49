"""What a step costs on this machine, by the tokens in it: kept in a file, refused elsewhere.

Measured by decoding/step_seconds.py.
"""

import dataclasses
import json
import os
from pathlib import Path

import jax

from dspark_jax.core.config import from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import write_atomically
from dspark_jax.scheduling.schedulers import CostTable
from dspark_jax.weights.safetensors import read_json

FILE = "costs.json"


@dataclasses.dataclass(frozen=True)
class BatchCosts:
    """Median seconds for R rows."""

    rows: int
    tokens: tuple[int, ...]  # B of a step with drafts, rising; below R some rows are free
    seconds: tuple[float, ...]  # without drafting itself
    draft_seconds: float
    plain_tokens: tuple[int, ...]  # of a step without drafts, one for each row that runs
    plain_seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """costs.json: the costs, and all that they depend on."""

    batches: tuple[BatchCosts, ...]  # by rising R
    device: str
    devices: int
    target: str
    dtype: str
    proposals: int
    context: int  # tokens behind every row
    temperature: float
    repeats: int
    jax: str
    dspark_jax: str

    def write(self, path: str | os.PathLike) -> None:
        """Writes costs.json."""
        write_atomically(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(
        cls, path: str | os.PathLike, *, proposals: int | None = None, force: bool = False
    ) -> "StepCosts":
        """Reads costs.json, for this device.

        Args:
          proposals: of the drafter in use.
          force: also take costs of another device.

        Raises:
          UserError: no such file, not what `write` writes, or of another device or drafter.
        """
        self = from_mapping(cls, read_json(Path(path)), str(path))
        if not self.batches:
            raise UserError(f"{path}: no costs in it; measure them again with calibrate")
        for one in self.batches:
            pairs = (one.tokens, one.seconds), (one.plain_tokens, one.plain_seconds)
            lengths = [len(tokens) == len(seconds) for tokens, seconds in pairs]
            if not (one.rows >= 1 and one.draft_seconds >= 0 and all(lengths)):
                raise UserError(f"{path}: damaged costs for {one.rows} rows; measure them again")
            self.rounds(one.rows)  # refuses what is no table
            self.plain(one.rows)
        here = jax.devices()[0].device_kind
        if self.device != here and not force:
            raise UserError(
                f"{path}: costs of {self.device!r}, this is {here!r}; measure them here with "
                "python -m dspark_jax.calibrate --norecord, or take them with --force_costs"
            )
        if proposals not in (None, self.proposals):
            raise UserError(
                f"{path}: costs of rounds with {self.proposals} drafts, this drafter proposes "
                f"{proposals}; measure them again"
            )
        return self

    @property
    def most_rows(self) -> int:
        """Of the largest batch that was measured."""
        return max(one.rows for one in self.batches)

    def rounds(self, rows: int) -> CostTable:
        """Of rounds that draft, by tokens of the target's pass."""
        one = self._for(rows)
        return CostTable.make(one.tokens, [1 / (s + one.draft_seconds) for s in one.seconds])

    def plain(self, rows: int) -> CostTable:
        """Of rounds that do not draft."""
        one = self._for(rows)
        return CostTable.make(one.plain_tokens, [1 / s for s in one.plain_seconds])

    def _for(self, rows: int) -> BatchCosts:
        """Of the smallest measured batch that holds so many rows; else of the largest."""
        enough = [one for one in self.batches if one.rows >= rows]
        return min(enough or self.batches, key=lambda one: one.rows if enough else -one.rows)
