"""EAGLE-3 once more: numpy, float64, loops, nothing shared with JAX; from arXiv 2503.01840."""

import dataclasses

import numpy as np
from reference import Row, context_of, norm, rotate, sigmoid, softmax

from dspark_jax.core.config import DrafterConfig
from dspark_jax.models.drafter import DrafterShape

EAGLE3 = {
    "algorithm": "eagle3",
    "mask_token_id": -1,
    "markov_head": "none",
    "markov_rank": 0,
    "confidence_head": False,
    "num_layers": 1,
}


def with_options(shape: DrafterShape, **options) -> DrafterShape:
    """The shape with other options of its EAGLE-3 part."""
    eagle3 = dataclasses.replace(shape.config.eagle3, **options)
    return dataclasses.replace(shape, config=dataclasses.replace(shape.config, eagle3=eagle3))


class ReferenceEagle3:
    """Chains of a drafter of `shape` with `weights`; embed and lm_head [V, D] are the target's."""

    def __init__(self, weights, embed, lm_head, shape: DrafterShape):
        self.w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.draft_ids = [int(token) for token in weights.get("draft_ids", range(len(lm_head)))]
        self.embed = np.asarray(embed, np.float64)
        self.lm_head = np.asarray(lm_head, np.float64)
        self.shape, self.eps = shape, shape.rms_norm_eps
        self.config: DrafterConfig = shape.config
        self.options, self.rope = shape.config.eagle3, shape.rope

    def features(self, taps: np.ndarray) -> np.ndarray:
        """g [D] of one position's taps [L, D]."""
        parts = [np.asarray(tap, np.float64) for tap in taps]
        if self.options.fc_norm:
            parts = [norm(x, self.w[f"fc_norm.{i}"], self.eps) for i, x in enumerate(parts)]
        joined = np.concatenate(parts)
        if self.options.norm_before_fc:
            joined = norm(joined, self.w["input_norm"], self.eps)
        return self.w["fc"] @ joined

    def joined(self, token: int, hidden: np.ndarray) -> np.ndarray:
        """What attention reads: [embedding ; hidden], each normalised, [2D]."""
        w = self.w
        embedding = norm(self.embed[token], w["layers.0.input_norm"], self.eps)
        return np.concatenate([embedding, norm(hidden, w["layers.0.hidden_norm"], self.eps)])

    def key_value(self, x: np.ndarray, position: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """[K] keys and values of one entry or step."""
        pairs, at = [], "layers.0.attention."
        for head in range(self.shape.num_kv_heads):
            key = self.w[at + "k"][head] @ x
            if self.options.qk_norm:
                key = norm(key, self.w[at + "k_norm"], self.eps)
            pairs.append((rotate(key, position, self.rope), self.w[at + "v"][head] @ x))
        return pairs

    def layer(self, token: int, hidden: np.ndarray, position: int, seen: list) -> np.ndarray:
        """The layer's output [D] where `seen` [n][K] are the keys and values it attends to."""
        w, shape, at = self.w, self.shape, "layers.0.attention."
        x = self.joined(token, hidden)
        attended = np.zeros(shape.hidden_size)
        for head in range(shape.num_heads):
            group = shape.num_heads // shape.num_kv_heads
            kv_head, member = head // group, head % group
            query = w[at + "q"][kv_head, member] @ x
            if self.options.qk_norm:
                query = norm(query, w[at + "q_norm"], self.eps)
            query = rotate(query, position, self.rope)
            scores = np.array([query @ pairs[kv_head][0] for pairs in seen])
            weights = softmax(scores / np.sqrt(shape.head_dim))
            mixed = sum(p * pairs[kv_head][1] for p, pairs in zip(weights, seen))
            attended += w[at + "o"][:, kv_head, member] @ mixed
        residual = hidden
        if self.options.norm_before_residual:
            residual = norm(hidden, w["layers.0.hidden_norm"], self.eps)
        out = residual + attended
        inner = norm(out, w["layers.0.post_norm"], self.eps)
        gate, up = w["layers.0.mlp.gate"] @ inner, w["layers.0.mlp.up"] @ inner
        return out + w["layers.0.mlp.down"] @ (gate * sigmoid(gate) * up)

    def chain(self, row: Row, anchor: int, steps: int) -> list[np.ndarray]:
        """Logits [V_d] of the steps of the chain at `anchor`, given the row's own tokens."""
        before, seen = context_of(anchor, row.documents), []
        for j in before:
            x = self.joined(int(row.tokens[j + 1]), self.features(row.taps[j]))
            seen.append(self.key_value(x, int(row.positions[j])))
        hidden, logits = self.features(row.taps[anchor - 1]), []
        for k in range(steps):
            token, position = int(row.tokens[anchor + k]), int(row.positions[anchor]) - 1 + k
            if k:  # the first step is the last entry
                seen = [*seen, self.key_value(self.joined(token, hidden), position)]
            hidden = self.layer(token, hidden, position, seen)
            final = norm(hidden, self.w["norm"], self.eps)
            if self.options.norm_output:
                hidden = final
            logits.append(np.array([self.lm_head[token] @ final for token in self.draft_ids]))
        return logits
