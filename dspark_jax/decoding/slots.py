"""The proposals of a block: slot after slot, each with the bias of the token drafted before it."""

import jax
import jax.numpy as jnp

from dspark_jax.core.sharding import spec
from dspark_jax.decoding.sampling import Purpose, SamplingParams, propose, purpose_key
from dspark_jax.decoding.shaping import Shaping
from dspark_jax.models.drafter import Drafter


def propose_slots(
    drafter: Drafter,
    base: jax.Array,
    hidden: jax.Array,
    anchor: jax.Array,
    at: jax.Array,
    params: SamplingParams,
    shaping: Shaping | None = None,
    emitted: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The sequential part of `propose`, over logits f32[P, B, V_d] and hidden states [P, B, D].

    Args:
      at: i32[B], the position of the anchor.

    Returns:
      Drafts i32[B, P], the tokens before them i32[B, P], and f32[B, P, V] they were drawn from.
    """
    # Nobody asks for the logits of a draft that is chosen and not drawn: they are not even made.
    only_best = bool(drafter.config.markov_rank) and params.drafts_greedily and shaping is None
    if not only_best:
        base = jax.sharding.reshard(base, spec(None, "batch", None))
    slots = jnp.arange(len(base))
    keys = purpose_key(params.seed, at, Purpose.PROPOSE, slots[:, None])

    def slot(carry, xs):
        prev, state, shaping = carry
        hidden, key, index = xs
        if only_best:
            token, state = drafter.markov.best(base, index, prev, hidden, state)
            token = drafter.to_target(token)
            return (token, state, shaping), (token, prev, None)
        logits = base[index]
        if drafter.config.markov_rank:
            logits, state = drafter.markov.biased(logits, prev, hidden, state)
        if shaping is not None:
            logits = shaping.logits(logits[:, None], params, emitted + index)[:, 0]
        token, probs = propose(logits, params, key)
        if shaping is not None:
            shaping = shaping.said(token[:, None], jnp.ones_like(token))
        token = drafter.to_target(token)
        probs = None if probs is None else drafter.scatter(probs)
        return (token, state, shaping), (token, prev, probs)

    state = None
    if drafter.config.markov_rank:
        state = drafter.markov.state(anchor.shape[0])
    _, outputs = jax.lax.scan(slot, (anchor, state, shaping), (hidden, keys, slots))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), outputs)
