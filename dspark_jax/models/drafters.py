"""The drafter that a shape describes, whatever its algorithm."""

from flax import nnx

from dspark_jax.models.drafter import Drafter, DrafterShape
from dspark_jax.models.eagle3 import Eagle3Drafter

AnyDrafter = Drafter | Eagle3Drafter


def new_drafter(shape: DrafterShape, *, rngs: nnx.Rngs) -> AnyDrafter:
    """A fresh drafter on the current mesh."""
    kind = Eagle3Drafter if shape.config.algorithm == "eagle3" else Drafter
    return kind(shape, rngs=rngs)
