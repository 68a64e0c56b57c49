"""What the backward pass of a layer keeps from the forward pass, and what it computes again."""

from collections.abc import Callable

import jax

# Of what is computed within a layer, this is kept; its inputs always are.
_KEPT = {
    "layer": jax.checkpoint_policies.nothing_saveable,
    # The products with weights. Scores of attention, the largest of all, are dots with batch axes.
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def rematerialised(layer: Callable, remat: str) -> Callable:
    """`layer` under one of `core.config.REMATS`; "none" keeps all that its gradient needs.

    Values and gradients are the same functions; arguments must be arrays (or trees of them).
    """
    return layer if remat == "none" else jax.checkpoint(layer, policy=_KEPT[remat])
