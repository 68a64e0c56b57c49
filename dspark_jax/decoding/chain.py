"""EAGLE-3's proposals: a chain of tokens, each drawn before the next can be thought of."""

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import spec
from dspark_jax.decoding.sampling import Purpose, SamplingParams, propose, purpose_key
from dspark_jax.decoding.shaping import Shaping
from dspark_jax.models.eagle3 import Eagle3Drafter, Eagle3State
from dspark_jax.models.target import TargetHead


def propose_chain(
    drafter: Eagle3Drafter,
    head: TargetHead,
    anchor: jax.Array,
    state: Eagle3State,
    params: SamplingParams,
    shaping: Shaping | None = None,
    emitted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """One chain of G steps per row; nothing of it is kept in `state`.

    Args:
      head: `drafter.head` of the target's.
      anchor: i32[B], the token at state.length.
      shaping: of the drafter's logits, and emitted i32[B] tokens before the first draft.

    Returns:
      Tokens i32[B, G], and f32[B, G, V] what each was drawn from (None: it was chosen).
    """
    context, at = state.cache.layers[0], state.length[:, None]
    visible = (jnp.arange(state.cache.capacity) < at)[:, None]
    steps = jnp.arange(drafter.config.block_size)
    keys = purpose_key(params.seed[:, None], at, Purpose.PROPOSE, steps)

    def step(carry, xs):
        prev, hidden, own, shaping = carry
        index, key = xs
        hidden, own = drafter.step(
            head, hidden, prev[:, None], at - 1, index, context, visible, own
        )
        logits = head.logits(drafter.normed(hidden))[:, 0]
        logits = jax.sharding.reshard(logits, spec("batch", None))  # sampling looks at all of it
        if shaping is not None:
            logits = shaping.logits(logits[:, None], params, emitted + index)[:, 0]
        token, probs = propose(logits, params, key)
        if shaping is not None:
            shaping = shaping.said(token[:, None], jnp.ones_like(token))
        token = drafter.to_target(token)
        probs = None if probs is None else drafter.scatter(probs)
        return (token, hidden, own, shaping), (token, probs)

    start = (anchor, state.features[:, None], drafter.chain(anchor.shape[0], 1), shaping)
    _, drafts = jax.lax.scan(step, start, (steps, jnp.moveaxis(keys, 1, 0)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), drafts)
