"""The sequential heads: the Markov bias between neighbouring slots, and the confidence head.

A Markov head turns the previous token (and, for gated and rnn, the slot's hidden state) into a
latent of rank R; the bias on the slot's logits is latent @ W2.T (paper section 3.2).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from dspark_jax.core.sharding import gather_rows, param, spec
from dspark_jax.kernels.markov_best import markov_best
from dspark_jax.kernels.markov_bias import latent_bias, markov_bias


def linear_init(kind: str, inputs: int) -> tuple[Callable, Callable]:
    """Initialisers of weight and bias of a linear map with so many inputs.

    "normal": N(0, 0.02) and 0 (DeepSpec); "uniform": both within 1 / sqrt(inputs), which is what
    PyTorch gives a layer by itself and speculators leaves as it is.
    """
    if kind == "normal":
        return nnx.initializers.normal(0.02), nnx.initializers.zeros
    bound = inputs**-0.5

    def uniform(key, shape, dtype, out_sharding=None):
        return jax.random.uniform(key, shape, dtype, -bound, bound, out_sharding=out_sharding)

    return uniform, uniform


class MarkovHead(nnx.Module):
    """vanilla, gated or rnn. W1 is indexed by target ids, W2's rows are draft ids."""

    def __init__(
        self,
        kind: str,
        vocab: int,
        rank: int,
        hidden: int,
        *,
        draft_vocab: int = 0,
        init: str = "normal",
        rngs: nnx.Rngs,
    ):
        self.kind = kind
        table = nnx.initializers.normal(0.02 if init == "normal" else 0.01)
        self.w1 = param(table, rngs, (vocab, rank), (None, "embed"), jnp.float32)
        weight, _ = linear_init(init, rank)
        shape = (draft_vocab or vocab, rank)
        self.w2 = param(weight, rngs, shape, ("vocab", "embed"), jnp.float32)
        if kind == "gated":  # input [h ; e]
            weight, bias = linear_init(init, hidden + rank)
            self.gate = param(weight, rngs, (rank, hidden + rank), (None, None), jnp.float32)
            self.gate_bias = param(bias, rngs, (rank,), (None,), jnp.float32)
        if kind == "rnn":  # input [s ; e ; h], rows gate | candidate | output
            shape = (3 * rank, 2 * rank + hidden)
            weight, bias = linear_init(init, shape[1])
            self.joint = param(weight, rngs, shape, (None, None), jnp.float32)
            self.joint_bias = param(bias, rngs, (3 * rank,), (None,), jnp.float32)

    @property
    def rank(self) -> int:
        """R."""
        return self.w1.shape[1]

    def rows(self, prev: jax.Array) -> jax.Array:
        """W1[prev], f32[B, T, R] of target ids i32[B, T]."""
        return gather_rows(self.w1[...], prev, ("batch", None, None))

    def state(self, batch: int) -> jax.Array:
        """The recurrent state before slot 0: zeros f32[B, R] (unused by vanilla and gated)."""
        return jnp.zeros((batch, self.rank), jnp.float32, out_sharding=spec("batch", None))

    def latents(self, rows: jax.Array, hidden: jax.Array) -> jax.Array:
        """Teacher-forced latents of whole blocks.

        Args:
          rows: f32[B, A, G, R], W1 of each slot's previous token.
          hidden: [B, A, G, D], the slots' final hidden states.

        Returns:
          f32[B, A, G, R].
        """
        if self.kind == "vanilla":
            return rows
        if self.kind == "gated":
            return self._gated(rows, hidden)
        state = jnp.zeros_like(rows[:, :, 0])
        latents = []
        for slot in range(rows.shape[2]):  # G is small; unrolled
            state, latent = self._rnn(state, rows[:, :, slot], hidden[:, :, slot])
            latents.append(latent)
        return jnp.stack(latents, axis=2)

    def biased(
        self, logits: jax.Array, prev: jax.Array, hidden: jax.Array, state: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Logits of one slot with its bias, and the next state.

        Args:
          logits: f32[B, V_d]; prev: i32[B] target ids; hidden: [B, D]; state: f32[B, R].
        """
        if self.kind == "vanilla":
            return markov_bias(logits, prev, self.w1[...], self.w2[...]), state
        latent, state = self._latent(prev, hidden, state)
        return latent_bias(logits, latent, self.w2[...]), state

    def best(
        self,
        logits: jax.Array,
        slot: jax.Array,
        prev: jax.Array,
        hidden: jax.Array,
        state: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """The argmax of what `biased` gives, i32[B] draft ids, without making it; the next state.

        Args:
          logits: f32[G, B, V_d] of all slots; slot: i32[], which of them.
          prev, hidden, state: as for `biased`.
        """
        latent, state = self._latent(prev, hidden, state)
        return markov_best(logits, slot, latent, self.w2[...]), state

    def _latent(self, prev, hidden, state) -> tuple[jax.Array, jax.Array]:
        """Of one slot, f32[B, R], and the next state."""
        rows = self.rows(prev[:, None])[:, 0]
        if self.kind == "vanilla":
            return rows, state
        if self.kind == "gated":
            return self._gated(rows, hidden), state
        state, latent = self._rnn(state, rows, hidden)
        return latent, state

    def _gated(self, rows: jax.Array, hidden: jax.Array) -> jax.Array:
        inputs = jnp.concatenate([hidden.astype(jnp.float32), rows], axis=-1)
        gate = jnp.einsum("...i,oi->...o", inputs, self.gate[...]) + self.gate_bias[...]
        return jax.nn.sigmoid(gate) * rows

    def _rnn(self, state, rows, hidden) -> tuple[jax.Array, jax.Array]:
        inputs = jnp.concatenate([state, rows, hidden.astype(jnp.float32)], axis=-1)
        joint = jnp.einsum("...i,oi->...o", inputs, self.joint[...]) + self.joint_bias[...]
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        state = gate * state + (1 - gate) * jnp.tanh(candidate)
        return state, jnp.tanh(output)


class ConfidenceHead(nnx.Module):
    """Logit of P(slot accepted | all earlier slots accepted), in float32.

    It sees the slot's hidden state and, with `markov`, the previous token's W1 row: nothing at or
    after the token it judges.
    """

    def __init__(self, hidden: int, rank: int, *, init: str = "normal", rngs: nnx.Rngs):
        weight, bias = linear_init(init, hidden + rank)
        self.weight = param(weight, rngs, (1, hidden + rank), (None, None), jnp.float32)
        self.bias = param(bias, rngs, (1,), (None,), jnp.float32)

    def __call__(self, hidden: jax.Array, rows: jax.Array | None) -> jax.Array:
        """hidden [..., D], rows f32[..., R] or None -> logits f32[...]."""
        features = hidden.astype(jnp.float32)
        if rows is not None:
            features = jnp.concatenate([features, rows], axis=-1)
        return jnp.einsum("...d,d->...", features, self.weight[...][0]) + self.bias[...][0]
