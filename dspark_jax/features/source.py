"""The batch a drafter trains on, wherever its target features come from."""

import dataclasses
from typing import Protocol

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Packed rows with the target's features. M micro-batches of B rows.

    Nothing is shifted: index j of every array is about the token at j.
    """

    tokens: jax.Array  # i32[M, B, S]
    loss_mask: jax.Array  # bool[M, B, S], True on tokens the target generated
    documents: jax.Array  # i32[M, B, S], 1.. per packed document, 0 = padding
    positions: jax.Array  # i32[M, B, S], restart at 0 in every document
    rows: jax.Array  # i32[M, B], global row number of the data order: names a row, seeds anchors
    taps: jax.Array  # [M, B, S, L, D] raw outputs of the tapped layers
    last_hidden: jax.Array  # [M, B, S, D], after the target's final norm
    # Of the target's distribution for the token after j, over its whole vocabulary; None where the
    # drafter shares it, and its loss then sees both.
    teacher_lse: jax.Array | None = None  # f32[M, B, S], log-sum-exp of the logits
    teacher_best: jax.Array | None = None  # i32[M, B, S], the most probable token


class FeatureSource(Protocol):
    """Makes batches: the target in this process, a store, or a server."""

    def batch(self, step: int) -> Batch:
        """The batch of an optimizer step, a pure function of the step."""
        ...

    def validation(self) -> list[Batch]:
        """The validation batches, always the same."""
        ...
