"""Options that change logits before they become a distribution, token by token inside a block.

In this order, vLLM's: no stop id before `min_tokens`, logit bias, repetition penalty (on tokens of
prompt and output: positive logits are divided by it, negative ones multiplied; arXiv 1909.05858),
frequency penalty (times how often the output has the token) and presence penalty (once for every
token that it has; both as in OpenAI's API).

The target's distribution for a slot of a block counts the drafts before that slot: as if they had
come one at a time. The drafter's logits are shaped alike, for more of its drafts to be accepted.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.decoding.sampling import SamplingParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shaping:
    """What shapes the logits of each row, apart from its numbers in `SamplingParams`.

    Held only for what the params promise: without any there is no `Shaping` at all, with one half
    of the fields are None. 5 bytes for each row and token of the vocabulary where `penalised`, 5
    where `biased`; the logits of one slot are 4, and a block has a handful of slots.
    """

    prompt: jax.Array | None  # bool[B, V], whether the prompt has the token; penalised
    output: jax.Array | None  # i32[B, V], how often the output has it; penalised
    bias: jax.Array | None  # f32[B, V]; biased
    stops: jax.Array | None  # bool[B, V], whether it is a stop id; biased

    def said(self, tokens: jax.Array, count: jax.Array) -> "Shaping":
        """After the first `count` i32[B] of `tokens` i32[B, W] have been added to the output."""
        if self.output is None:
            return self
        times = (jnp.arange(tokens.shape[1]) < count[:, None]).astype(jnp.int32)
        output = jax.vmap(lambda row, ids, n: row.at[ids].add(n))(self.output, tokens, times)
        return dataclasses.replace(self, output=output)

    def columns(self, ids: jax.Array) -> "Shaping":
        """For logits of a pruned vocabulary with the target's `ids` i32[V_d]."""
        return jax.tree.map(jax.vmap(lambda row: row[ids]), self)

    def logits(
        self,
        logits: jax.Array,
        params: SamplingParams,
        emitted: jax.Array,
        drafts: jax.Array | None = None,
    ) -> jax.Array:
        """Shaped logits f32[B, W, V].

        Args:
          logits: [B, W, V], for W tokens in a row.
          params: those that `begin_shaping` was given.
          emitted: i32[B], tokens of the output before the first of them.
          drafts: i32[B, W-1], the tokens between the first and the last; None where W is 1.
        """
        logits = logits.astype(jnp.float32)
        slots, ids = jnp.arange(logits.shape[1]), jnp.arange(logits.shape[2])
        if params.biased:
            early = emitted[:, None] + slots < params.min_tokens[:, None]
            logits = jnp.where(early[..., None] & self.stops[:, None], -jnp.inf, logits)
            logits = logits + self.bias[:, None]
        if params.penalised:
            counts = self.output[:, None]
            for slot in range(logits.shape[1] - 1):
                token = drafts[:, slot, None, None]
                counts = counts + ((token == ids) & (slots > slot)[:, None])
            in_output = counts > 0
            repetition, presence, frequency = (
                x[:, None, None]
                for x in (
                    params.repetition_penalty,
                    params.presence_penalty,
                    params.frequency_penalty,
                )
            )
            factor = jnp.where(in_output | self.prompt[:, None], repetition, 1.0)
            logits = jnp.where(logits > 0, logits / factor, logits * factor)
            logits = logits - frequency * counts - presence * in_output
        return logits


def begin_shaping(
    params: SamplingParams,
    prompts: jax.Array,
    lengths: jax.Array,
    stop_ids: jax.Array,
    vocab_size: int,
) -> Shaping | None:
    """Before the first token; None where the params ask for nothing.

    Args:
      prompts: i32[B, P], right-padded; lengths: i32[B].
      stop_ids: i32[K] for all rows or i32[B, K], -1 as filler.
    """
    prompt = output = bias = stops = None

    def zeros(dtype) -> jax.Array:  # bool or number [B, V], sharded like the rows
        return (0 * lengths[:, None] + jnp.zeros(vocab_size, jnp.int32)).astype(dtype)

    if params.penalised:
        real = jnp.arange(prompts.shape[1]) < lengths[:, None]
        mark = jax.vmap(lambda row, ids, on: row.at[ids].max(on))
        prompt, output = mark(zeros(bool), prompts, real), zeros(jnp.int32)
    if params.biased:
        add = jax.vmap(lambda row, ids, values: row.at[ids].add(values, mode="drop"))
        bias = add(zeros(jnp.float32), params.bias_ids, params.bias)
        stops = jnp.any(stop_ids[..., None] == jnp.arange(vocab_size), axis=-2) | zeros(bool)
    return None if prompt is None and bias is None else Shaping(prompt, output, bias, stops)
