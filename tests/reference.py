"""The drafter, its blocks and its loss once more: numpy, float64, loops, nothing shared with JAX.

Written from the papers (DSpark, DFlash, YaRN, Llama 3) for tests to compare with, slot by slot.
Weights are a dictionary of arrays by name, as `dspark_jax.core.trees.named` gives them.
"""

import dataclasses
import math

import numpy as np


def rope_frequencies(rope, head_dim: int) -> tuple[list[float], float]:
    """Inverse frequency of every rotated pair, and the factor on cos and sin."""
    dim = int(head_dim * rope.partial_rotary_factor)
    plain = [rope.theta ** (-2 * i / dim) for i in range(dim // 2)]
    if rope.kind == "default":
        return plain, 1.0
    if rope.kind == "linear":
        return [f / rope.factor for f in plain], 1.0
    window = rope.original_max_position
    if rope.kind == "llama3":
        scaled = []
        for f in plain:
            turns = window * f / (2 * math.pi)  # within the original context
            if turns < rope.low_freq_factor:
                scaled.append(f / rope.factor)
            elif turns > rope.high_freq_factor:
                scaled.append(f)
            else:
                keep = turns - rope.low_freq_factor
                keep /= rope.high_freq_factor - rope.low_freq_factor
                scaled.append(keep * f + (1 - keep) * f / rope.factor)
        return scaled, 1.0
    assert rope.kind == "yarn"

    def pair_with(turns: float) -> float:
        return dim * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = max(math.floor(pair_with(rope.beta_fast)), 0)
    last = min(math.ceil(pair_with(rope.beta_slow)), dim - 1)
    scaled = []
    for i, f in enumerate(plain):
        if i <= first:
            slow = 0.0
        elif i >= last:
            slow = 1.0
        else:
            slow = (i - first) / (last - first)
        scaled.append(f * (1 - slow) + f / rope.factor * slow)
    return scaled, rope.attention_factor or 1 + 0.1 * math.log(rope.factor)


def rotate(x: np.ndarray, position: int, rope) -> np.ndarray:
    """RoPE of one head [H]: pair i is (x[i], x[i + half]); what is not rotated stays."""
    frequencies, factor = rope_frequencies(rope, len(x))
    half = len(frequencies)
    out = np.array(x, np.float64)
    for i, frequency in enumerate(frequencies):
        cos = math.cos(position * frequency) * factor
        sin = math.sin(position * frequency) * factor
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / math.sqrt(np.mean(x * x) + eps) * weight


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


@dataclasses.dataclass
class Row:
    """One packed row of S tokens."""

    tokens: np.ndarray  # i[S]
    loss_mask: np.ndarray  # bool[S]
    documents: np.ndarray  # i[S], 0 = padding
    positions: np.ndarray  # i[S]
    taps: np.ndarray  # [S, L, D]
    last_hidden: np.ndarray  # [S, D]


@dataclasses.dataclass
class Slot:
    """What one slot is about; positions are None where the row has none."""

    label: int | None
    prev: int | None
    supervised: bool
    weight: float


def candidates(loss_mask, documents, room: int | None = None) -> list[int]:
    """Anchors a with generated tokens at a and a + 1, in one document.

    With `room`, those with a generated token at a and so many positions behind it.
    """
    found = []
    for a in range(len(loss_mask)):
        if room is not None:
            good = a + room < len(loss_mask)
        else:
            good = a + 1 < len(loss_mask) and loss_mask[a + 1] and documents[a] == documents[a + 1]
        if good and loss_mask[a] and documents[a] > 0:
            found.append(a)
    return found


def block_slots(
    anchor: int, loss_mask, documents, size: int, from_anchor: bool, loss
) -> list[Slot]:
    """The slots of the block at `anchor`, after the options of `loss` (a LossConfig)."""
    length = len(loss_mask)
    slots, unbroken = [], True
    for k in range(size):
        label = anchor + k + 1 if from_anchor else anchor + k
        prev = label - 1
        proposal = k if from_anchor else k - 1
        if proposal < 0:  # restates the anchor
            slots.append(Slot(None, None, False, 0.0))
            continue
        inside = label < length
        judged = label if loss.mask_at == "label" else anchor + k
        good = (
            inside
            and bool(loss_mask[judged])
            and (loss.cross_documents or documents[label] == documents[anchor])
        )
        unbroken = unbroken and good
        supervised = unbroken if loss.supervision == "prefix" else good
        weight = math.exp(-proposal / loss.decay) if loss.decay else 1.0
        slots.append(
            Slot(
                label if inside else None,
                prev if prev < length else None,
                supervised,
                weight if supervised else 0.0,
            )
        )
    return slots


def context_of(anchor: int, documents) -> list[int]:
    """Positions a block sees: before the anchor, in its document."""
    return [j for j in range(anchor) if documents[j] == documents[anchor]]


@dataclasses.dataclass
class Term:
    """The losses and metrics of one supervised slot."""

    row: int
    anchor: int
    slot: int
    weight: float
    ce: float
    l1: float
    kl: float  # of the tokens that can be drafted
    accept: float
    match: float
    bce: float
    confidence: float
    wanted: float  # the label c* of the confidence: `accept`, but of the loss's own teacher


class ReferenceDrafter:
    """A drafter of `shape` (sizes and options only) with `weights`, embed and lm head [V, D].

    It drafts the ids weights["draft_ids"], or all of them if there are none.
    """

    def __init__(self, weights, embed, lm_head, shape):
        self.w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
        self.draft_ids = [int(token) for token in weights.get("draft_ids", range(len(lm_head)))]
        self.embed = np.asarray(embed, np.float64) * shape.embed_scale
        self.cap = shape.logit_softcap
        self.lm_head = np.asarray(lm_head, np.float64)
        self.shape = shape
        self.config = shape.config
        self.eps = shape.rms_norm_eps

    def features(self, taps: np.ndarray) -> np.ndarray:
        """h_ctx [D] of one token's taps [L, D]."""
        joined = np.concatenate([np.asarray(tap, np.float64) for tap in taps])
        return norm(self.w["fc"] @ joined, self.w["hidden_norm"], self.eps)

    def key_value(self, layer: int, x: np.ndarray, position: int, kv_head: int):
        """Key and value [H] of one token for one key/value head."""
        at = f"layers.{layer}.attention."
        key = norm(self.w[at + "k"][kv_head] @ x, self.w[at + "k_norm"], self.eps)
        return rotate(key, position, self.shape.rope), self.w[at + "v"][kv_head] @ x

    def context(self, row: Row, layer: int) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """[S][K] keys and values of the context tokens of a row."""
        kept = []
        for taps, position in zip(row.taps, row.positions):
            x = self.features(taps)
            heads = range(self.shape.num_kv_heads)
            kept.append([self.key_value(layer, x, int(position), head) for head in heads])
        return kept

    def layer(self, layer: int, xs, positions, context) -> list[np.ndarray]:
        """One layer over the G slots xs of a block; context [j][K] is what they all see."""
        name = f"layers.{layer}."
        w, shape = self.w, self.shape
        normed = [norm(x, w[name + "input_norm"], self.eps) for x in xs]
        out = []
        for slot, x in enumerate(xs):
            attended = np.zeros(shape.hidden_size)
            for head in range(shape.num_heads):
                group = shape.num_heads // shape.num_kv_heads
                kv_head, member = head // group, head % group
                query = w[name + "attention.q"][kv_head, member] @ normed[slot]
                query = norm(query, w[name + "attention.q_norm"], self.eps)
                query = rotate(query, positions[slot], shape.rope)
                seen = [token[kv_head] for token in context]
                seen += [
                    self.key_value(layer, other, position, kv_head)
                    for other, position in zip(normed, positions)
                ]
                scores = np.array([query @ key for key, _ in seen]) / math.sqrt(shape.head_dim)
                mixed = sum(p * value for p, (_, value) in zip(softmax(scores), seen))
                attended += w[name + "attention.o"][:, kv_head, member] @ mixed
            x = x + attended
            inner = norm(x, w[name + "post_norm"], self.eps)
            gate, up = w[name + "mlp.gate"] @ inner, w[name + "mlp.up"] @ inner
            out.append(x + w[name + "mlp.down"] @ (gate * sigmoid(gate) * up))
        return out

    def block(self, row: Row, anchor: int, contexts=None) -> np.ndarray:
        """Post-norm hidden states [G, D] of the block at `anchor`."""
        config = self.config
        layers = range(config.num_layers)
        contexts = contexts or [self.context(row, layer) for layer in layers]
        ids = [int(row.tokens[anchor])] + [config.mask_token_id] * (config.block_size - 1)
        positions = [int(row.positions[anchor]) + k for k in range(config.block_size)]
        xs = [self.embed[token] for token in ids]
        visible = context_of(anchor, row.documents)
        for layer in layers:
            xs = self.layer(layer, xs, positions, [contexts[layer][j] for j in visible])
        return np.stack([norm(x, self.w["norm"], self.eps) for x in xs])

    def latents(self, prev_tokens, hidden) -> list[np.ndarray]:
        """Latents [R] of consecutive slots, the first of them the first that proposes a token."""
        w, kind = self.w, self.config.markov_head
        state = np.zeros(self.config.markov_rank)
        out = []
        for token, h in zip(prev_tokens, hidden):
            e = w["markov.w1"][token]
            if kind == "vanilla":
                out.append(e)
            elif kind == "gated":
                gate = w["markov.gate"] @ np.concatenate([h, e]) + w["markov.gate_bias"]
                out.append(sigmoid(gate) * e)
            else:
                z = np.concatenate([state, e, h])
                g, c, o = np.split(w["markov.joint"] @ z + w["markov.joint_bias"], 3)
                state = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c)
                out.append(np.tanh(o))
        return out

    def confidence_logit(self, h: np.ndarray, prev_token: int) -> float:
        features = h
        if self.config.confidence_with_markov and self.config.markov_rank:
            features = np.concatenate([h, self.w["markov.w1"][prev_token]])
        return float(self.w["confidence.weight"][0] @ features + self.w["confidence.bias"][0])

    def draft_logits(self, h: np.ndarray, latent: np.ndarray | None) -> np.ndarray:
        """Logits [V_d] of a slot, in the order of `draft_ids`."""
        z = self.capped(np.array([self.lm_head[token] @ h for token in self.draft_ids]))
        return z if latent is None else z + self.w["markov.w2"] @ latent

    def capped(self, logits: np.ndarray) -> np.ndarray:
        """What a target that caps its logits makes of them."""
        return self.cap * np.tanh(logits / self.cap) if self.cap else logits

    def terms(self, rows: list[Row], anchors: list[list[int]], loss) -> list[Term]:
        """Every supervised slot of the blocks at the anchors of each row.

        Args:
          loss: the options of the loss, a LossConfig.
        """
        config = self.config
        skip = 0 if config.sample_from_anchor else 1
        found = []
        for number, row in enumerate(rows):
            contexts = [self.context(row, layer) for layer in range(config.num_layers)]
            for index, anchor in enumerate(anchors[number]):
                slots = block_slots(
                    anchor,
                    row.loss_mask,
                    row.documents,
                    config.block_size,
                    config.sample_from_anchor,
                    loss,
                )
                live = [k for k, slot in enumerate(slots) if slot.supervised]
                chain = list(range(skip, live[-1] + 1)) if live else []
                assert loss.supervision == "slot" or live == chain  # a prefix
                hidden = self.block(row, anchor, contexts)[chain]
                prev = [int(row.tokens[slots[k].prev]) for k in chain]
                latents = self.latents(prev, hidden) if config.markov_rank else [None] * len(chain)
                for k, h, token, latent in zip(chain, hidden, prev, latents):
                    if not slots[k].supervised:
                        continue
                    label = slots[k].label
                    z = self.draft_logits(h, latent)
                    zt = self.lm_head @ np.asarray(row.last_hidden[label - 1], np.float64)
                    zt = self.capped(zt)
                    whole, q = softmax(zt), np.zeros(len(zt))  # over all the target can say
                    q[self.draft_ids] = softmax(z)
                    p = whole
                    if loss.teacher == "draft":
                        p = np.zeros(len(zt))
                        p[self.draft_ids] = softmax(zt[self.draft_ids])
                    l1 = float(np.abs(q - p).sum())
                    kl = sum(p[v] * math.log(p[v] / q[v]) for v in self.draft_ids)
                    wanted = float(np.minimum(p, q).sum())
                    accept = float(np.minimum(whole, q).sum())  # of speculative sampling, T = 1
                    bce = confidence = 0.0
                    if config.confidence_head:
                        logit = self.confidence_logit(h, token)
                        confidence = float(sigmoid(logit))
                        bce = -wanted * math.log(confidence)
                        bce -= (1 - wanted) * math.log(1 - confidence)
                    said = int(row.tokens[label] if loss.ce_label == "data" else p.argmax())
                    ce = -math.log(q[said]) if said in self.draft_ids else 0.0
                    match = float(self.draft_ids[z.argmax()] == zt.argmax())
                    where = (number, index, k, slots[k].weight)
                    values = (ce, l1, kl, accept, match, bce, confidence, wanted)
                    found.append(Term(*where, *values))
        return found


def bce_of(term: Term, accept: float) -> float:
    """The confidence loss against a label that is held fixed."""
    c = term.confidence
    return -accept * math.log(c) - (1 - accept) * math.log(1 - c)


def total_loss(terms: list[Term], loss, wanted=None, judged=None, groups=None) -> float:
    """The loss over the whole global batch.

    Args:
      terms: of all rows; loss: the weights of the terms and how they are divided.
      wanted: labels of the confidence loss, held fixed (they carry no gradient).
      judged: terms whose confidences are used instead (a detached confidence head).
      groups: numbers of the rows that are averaged first, in lists; None = all together.
    """
    wanted = wanted or [term.wanted for term in terms]
    half = 0.5 if loss.distance == "tv" else 1.0
    results = []
    for group in groups or [sorted({term.row for term in terms})]:
        value = total = 0.0
        for term, other, label in zip(terms, judged or terms, wanted):
            if term.row not in group:
                continue
            bce = bce_of(other, label) if loss.confidence and other.confidence else 0.0
            drafted = loss.ce * term.ce + loss.l1 * half * term.l1 + loss.kl * term.kl
            value += term.weight * (drafted + loss.confidence * bce)
            total += term.weight if loss.denominator == "weights" else 1
        results.append(value / total if total else 0.0)
    return sum(results) / len(results)
