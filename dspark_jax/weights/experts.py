"""The experts of a layer as one tensor [E, out, in], however a file keeps them.

Released Qwen3-MoE files have one tensor for each expert and projection; Gemma 4's, and what
transformers 5 holds in memory, have `gate_up_proj` [E, 2 F, D], gate first, and `down_proj`
[E, D, F]. Either is read lazily: a device asks for its own experts and gets no other.
"""

import dataclasses
from typing import Any, Protocol

import numpy as np


class _Files(Protocol):
    files: dict[str, str]

    def slice(self, name: str) -> Any: ...


def expert_tensor(files: _Files, name: str, count: int) -> "PerExpert | Fused":
    """The tensor `name`, as "model.layers.3.mlp.experts.up_proj", of `count` experts.

    Raises:
      UserError: from `files.slice`, if a tensor is missing; of neither layout, one of the first.
    """
    prefix, part = name.rsplit(".", 1)
    fused = f"{prefix}.{'gate_up_proj' if part != 'down_proj' else part}"
    if fused in files.files:
        return Fused(files.slice(fused), part, frozenset({fused}))
    each = [f"{prefix}.{index}.{part}.weight" for index in range(count)]
    return PerExpert(tuple(files.slice(one) for one in each), frozenset(each))


@dataclasses.dataclass(frozen=True)
class PerExpert:
    """One tensor for each expert, stacked."""

    parts: tuple[Any, ...]
    names: frozenset[str]

    def get_dtype(self) -> str:
        """Of the files; one that is quantised shows in place of the first."""
        kinds = [part.get_dtype() for part in self.parts]
        return next((kind for kind in kinds if kind not in ("F32", "F16", "BF16")), kinds[0])

    def get_shape(self) -> list[int]:
        """[E, out, in]; an expert of another shape than the first shows in place of it."""
        shapes = [part.get_shape() for part in self.parts]
        odd = next((shape for shape in shapes if shape != shapes[0]), shapes[0])
        return [len(self.parts), *odd]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, *rest = index
        return np.stack([part[tuple(rest)] for part in self.parts[experts]])


@dataclasses.dataclass(frozen=True)
class Fused:
    """All experts in one tensor, gate and up beneath each other."""

    whole: Any
    part: str
    names: frozenset[str]

    def get_dtype(self) -> str:
        """Of the file."""
        return self.whole.get_dtype()

    def get_shape(self) -> list[int]:
        """[E, out, in]."""
        count, rows, columns = self.whole.get_shape()
        return [count, rows if self.part == "down_proj" else rows // 2, columns]

    def __getitem__(self, index: tuple[slice, slice, slice]) -> np.ndarray:
        experts, rows, columns = index
        first, last, _ = rows.indices(self.get_shape()[1])
        if self.part == "up_proj":
            first, last = first + self.get_shape()[1], last + self.get_shape()[1]
        return self.whole[experts, first:last, columns]
