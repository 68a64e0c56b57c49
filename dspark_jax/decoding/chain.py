"""EAGLE-3's proposals: a chain of tokens, each drawn before the next can be thought of."""

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import spec
from dspark_jax.decoding.sampling import Purpose, SamplingParams, purpose_key, sample
from dspark_jax.models.eagle3 import Eagle3Drafter, Eagle3State
from dspark_jax.models.target import TargetHead


def propose_chain(
    drafter: Eagle3Drafter,
    head: TargetHead,
    anchor: jax.Array,
    state: Eagle3State,
    params: SamplingParams,
) -> tuple[jax.Array, jax.Array | None]:
    """One chain of G steps per row; nothing of it is kept in `state`.

    Args:
      head: `drafter.head` of the target's.
      anchor: i32[B], the token at state.length.

    Returns:
      Tokens i32[B, G], and f32[B, G, V] what each was drawn from (None in a greedy batch).
    """
    context, at = state.cache.layers[0], state.length[:, None]
    visible = (jnp.arange(state.cache.capacity) < at)[:, None]
    steps = jnp.arange(drafter.config.block_size)
    keys = purpose_key(params.seed[:, None], at, Purpose.PROPOSE, steps)

    def step(carry, xs):
        prev, hidden, own = carry
        index, key = xs
        hidden, own = drafter.step(
            head, hidden, prev[:, None], at - 1, index, context, visible, own
        )
        logits = head.logits(drafter.normed(hidden))[:, 0]
        logits = jax.sharding.reshard(logits, spec("batch", None))  # sampling looks at all of it
        token, probs = sample(logits, params, key)
        token = drafter.to_target(token)
        return (token, hidden, own), (token, None if params.greedy else drafter.scatter(probs))

    start = (anchor, state.features[:, None], drafter.chain(anchor.shape[0], 1))
    _, drafts = jax.lax.scan(step, start, (steps, jnp.moveaxis(keys, 1, 0)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), drafts)
