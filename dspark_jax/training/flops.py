"""The floating-point operations that a step cannot do without, counted from shapes.

What MFU is a share of: a product of [m, k] with [k, n] counts 2 m k n, and nothing else counts, no
norms, softmaxes or optimizer, nor what is computed again to save memory.
"""

import dataclasses
import math

import jax
import numpy as np
from flax import nnx

from dspark_jax.core.trees import named
from dspark_jax.features.source import Batch
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.target import Target
from dspark_jax.models.target_config import TargetConfig
from dspark_jax.training.anchors import Blocks


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """What a global batch asks for; all counts are sums over its rows."""

    tokens: int  # context tokens
    slots: int  # slots of filled anchors
    labels: int  # different positions that slots predict
    seen: int  # context tokens that anchors may see, one anchor after the other

    @classmethod
    def of(cls, batch: Batch, blocks: Blocks) -> "StepSizes":
        """Counts a global batch: arrays [M, B, ...], read from the device."""
        filled, first, stop, index = jax.device_get(
            (blocks.filled, blocks.first, blocks.stop, blocks.label_index)
        )
        documents = np.asarray(batch.documents)
        labels = sum(
            len(np.unique(index[m, b][filled[m, b]])) for m, b in np.ndindex(documents.shape[:2])
        )
        slots = int(filled.sum()) * index.shape[-1]
        return cls(
            int((documents > 0).sum()), slots, labels, int(np.maximum(stop - first, 0).sum())
        )


def drafter_flops(shape: DrafterShape, sizes: StepSizes) -> float:
    """Of the train step of a block drafter, forward and backward.

    A product with a trained matrix is needed three times (forward, and the gradients of its input
    and its own), with the target's frozen head twice. Slots go through all layers; the target's
    logits and the bias of a vanilla Markov head are functions of a position, needed once for each
    that is predicted. The taps have no gradient.
    """
    config, d, width = shape.config, shape.hidden_size, shape.intermediate_size
    q, kv = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    block = config.block_size
    per_slot = 2 * d * q + d * kv + 3 * d * width
    attention = 2 * q * (block * sizes.seen + sizes.slots * block)  # scores, then values
    layer = 3 * (sizes.slots * per_slot + sizes.tokens * d * kv + attention)
    context = 2 * sizes.tokens * len(config.target_layer_ids) * d * d
    rank, biased = config.markov_rank, sizes.labels
    mixing = 0
    if config.markov_head in ("gated", "rnn"):  # latents depend on the slot's hidden state
        biased = sizes.slots
        gates = rank * (d + rank) if config.markov_head == "gated" else 3 * rank * (2 * rank + d)
        mixing = 3 * sizes.slots * gates
    vocabulary = 2 * sizes.slots * d + sizes.labels * d + 3 * biased * rank
    return 2.0 * (config.num_layers * layer + context + mixing + shape.draft_vocab * vocabulary)


def target_flops(config: TargetConfig, batch: Batch, *, head: bool = False) -> float:
    """Of the target's forward over a global batch, up to its last hidden state.

    Args:
      head: with the logits of every position, as a pruned drafter needs them.
    """
    arrays = named(jax.eval_shape(lambda: Target(config, rngs=nnx.Rngs(0))))
    documents = np.asarray(batch.documents)
    tables = ("embed", "lm_head", "per_layer.embed")
    weights = 0.0
    for name, array in arrays.items():
        if array.ndim > 1 and name not in tables:
            chosen = config.experts.per_token / config.experts.count if ".experts." in name else 1
            weights += array.size * chosen
    rows = documents.reshape(-1, documents.shape[-1])
    counts = [np.unique(row[row > 0], return_counts=True)[1] for row in rows]
    lengths = np.concatenate(counts).astype(np.float64)
    attention = 0.0
    for layer in range(config.num_layers):
        seen = np.minimum(lengths, config.sliding.window) if config.slides(layer) else lengths
        pairs = (seen * (seen + 1) / 2 + (lengths - seen) * seen).sum()
        attention += 2 * pairs * math.prod(arrays[f"layers.{layer}.attention.q"].shape[:-1])
    tokens = lengths.sum()
    logits = tokens * config.vocab_size * config.hidden_size if head else 0.0
    return 2.0 * float(tokens * weights + attention + logits)
