"""A target whose distribution is known exactly, and how far the best drafter can get on it.

The target answers sentence by sentence with one of several phrases: "of course .", "no problem .".
What follows depends on the last word alone, so a drafter that knows its own last word drafts
perfectly. One that fills all slots at once, each without knowing the others, cannot: it knows
that slot 1 is "of" or "no" and slot 2 "course" or "problem", and drafts "of problem".

The best such *factorised* drafter is computed here, not estimated; see `best_factorised`.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx

from dspark_jax.core.trees import named, with_arrays
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target import Target, TargetConfig

PHRASES = {
    "of course": 0.30,
    "no problem": 0.25,
    "you are welcome": 0.20,
    "with great pleasure": 0.15,
    "sounds good": 0.10,
}
STOP = "."
# Logit of words that cannot follow, below those that can: they keep 1e-5 of the probability.
FLOOR = 14.0
AFRESH = 1e-7  # share of computed rounds that start at the stop, whatever the round before


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """A Markov source over words; V words."""

    words: tuple[str, ...]  # the stop first, the drafter's mask, which never occurs, last
    transition: np.ndarray  # f64[V, V], row = the last word

    @classmethod
    def of(cls, phrases: Mapping[str, float]) -> "Source":
        """After the stop one of the phrases, after its last word the stop. No word occurs twice."""
        spoken = [word for phrase in phrases for word in phrase.split()]
        if len(set(spoken)) < len(spoken) or abs(sum(phrases.values()) - 1) > 1e-9:
            raise ValueError("every word may occur once, and probabilities must add up to 1")
        words = (STOP, *spoken, "[mask]")
        number = {word: i for i, word in enumerate(words)}
        transition = np.zeros((len(words), len(words)))
        for phrase, probability in phrases.items():
            first, *rest = phrase.split()
            transition[0, number[first]] = probability
            for word, following in itertools.pairwise([first, *rest, STOP]):
                transition[number[word], number[following]] = 1.0
        transition[-1, 0] = 1.0
        return cls(words, transition)

    @property
    def mask_id(self) -> int:
        """The word that never occurs."""
        return len(self.words) - 1

    def text(self, ids) -> str:
        """Words joined by spaces."""
        return " ".join(self.words[i] for i in ids)


def make_target(source: Source) -> Target:
    """A `Target` on the current mesh whose next word has exactly the source's distribution.

    Attention and MLP add nothing to the residual stream, so the last hidden state is the one-hot
    of the word, and the LM head's column of a word holds the log-probabilities of the next. Twice
    as many hidden dimensions as words: the head maps the other half to one word each, so that a
    drafter can express any distribution. The target itself never uses them.
    """
    vocab = len(source.words)
    hidden = -(-2 * vocab // 16) * 16
    config = TargetConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=4 * hidden,
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_embeddings=False,
        max_positions=2048,
    )
    target = Target(config, rngs=nnx.Rngs(0))
    values = {name: np.array(array) for name, array in named(target).items()}
    for name in values:
        if name.endswith(("attention.o", "mlp.down")):
            values[name][...] = 0
    values["embed"][...] = np.eye(vocab, hidden) * hidden**0.5  # of RMS 1, as after a norm
    values["norm"][...] = hidden**-0.5
    with np.errstate(divide="ignore"):
        logits = np.maximum(np.log(source.transition.T) + FLOOR, 0)
    values["lm_head"][...] = np.concatenate([logits, 4 * np.eye(vocab, hidden - vocab)], axis=1)
    placed = {
        name: jax.device_put(values[name], array.sharding) for name, array in named(target).items()
    }
    return with_arrays(target, placed)


@dataclasses.dataclass(frozen=True, eq=False)
class LongRun:
    """What a drafter reaches on average over endlessly many rounds; G slots."""

    accepted_length: float  # tokens per round, the target's own included
    survival: np.ndarray  # f64[G], share of rounds in which slots up to this one are accepted
    conditional_acceptance: np.ndarray  # f64[G], of rounds whose earlier slots were accepted


def marginals(transition: np.ndarray, slots: int) -> np.ndarray:
    """The drafts of a factorised drafter that gives each slot its true marginal: [V, G, V]."""
    powers = [np.linalg.matrix_power(transition, slot + 1) for slot in range(slots)]
    return np.stack(powers, axis=1)


def play(transition: np.ndarray, anchor: int, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One round of factorised drafts f64[G, V] after `anchor`, all its outcomes at once.

    Walks over the distribution of accepted prefixes, of which only the last word matters: from
    word x the draft y is made with probability q(y) and kept with min(1, p(y|x) / q(y)), together
    min(p, q); otherwise the target's word is y with max(p - q, 0), which ends the round.

    Returns:
      survival f64[G], and the distribution of the next anchor f64[V].
    """
    prefix = np.zeros(len(transition))  # mass of accepted prefixes by their last word
    prefix[anchor] = 1.0
    following = np.zeros(len(transition))
    survival = []
    for q in drafts:
        kept = np.minimum(transition, q)
        following += prefix @ (transition - kept)
        prefix = prefix @ kept
        survival.append(prefix.sum())
    return np.array(survival), following + prefix @ transition


def long_run(transition: np.ndarray, policy: np.ndarray) -> LongRun:
    """Averages rounds of a factorised drafter, f64[V, G, V] by anchor, over its own anchors."""
    survival, following = _rounds(transition, policy)
    size = len(transition)
    equations = following.T - np.eye(size)
    equations[-1] = 1.0
    share = np.linalg.solve(equations, np.eye(size)[-1])  # of rounds that start at each anchor
    survival = share @ survival
    before = np.concatenate([[1.0], survival[:-1]])
    conditional = np.where(before > 0, survival / np.where(before > 0, before, 1), np.nan)
    return LongRun(1 + float(survival.sum()), survival, conditional)


def best_factorised(transition: np.ndarray, slots: int) -> tuple[LongRun, np.ndarray]:
    """The factorised drafter with the most tokens per round, and what it drafts.

    A factorised drafter chooses distributions q_1..q_G from the anchor alone (all before it says
    nothing more of a Markov source). Two steps, both exact:

    1. Which next anchor a round leads to matters, so this is a Markov decision process: states
       are anchors, a step is a round, the reward is its tokens. Policy iteration finds the highest
       average, and ends when no anchor can improve.
    2. The best choice for one anchor, given what each next anchor is worth: with the other slots
       fixed, the value is a sum of terms c * min(p(y|x), q_k(y)), linear in q_k between the points
       where some q_k(y) meets some p(y|x). So an optimum lies at a corner of these cells, for
       every slot in turn: all combinations of corners are tried, with the mass of accepted
       prefixes (see `play`) carried along. Equal prefix distributions are looked at once.

    The corners are exponentially many in the words that may follow: for small sources.

    Returns:
      The long run, and the policy f64[V, G, V].
    """
    size = len(transition)
    policy = marginals(transition, slots)
    while True:
        survival, following = _rounds(transition, policy)
        rewards = 1 + survival.sum(axis=1)
        # gain + worth[a] = reward[a] + following[a] @ worth, with worth[0] = 0
        equations = np.eye(size) - following
        equations[:, 0] = 1.0
        solution = np.linalg.solve(equations, rewards)
        gain, worth = solution[0], np.concatenate([[0.0], solution[1:]])
        found = _best_rounds(transition, worth, slots)
        better = [
            anchor for anchor, (value, _) in enumerate(found) if value > gain + worth[anchor] + 1e-6
        ]
        if not better:
            return long_run(transition, policy), policy
        for anchor in better:
            policy[anchor] = found[anchor][1]


def _rounds(transition: np.ndarray, policy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`play` from every anchor: survival [V, G] and next anchors [V, V].

    A very few rounds start afresh at the stop, so that there is one average even where rounds from
    two anchors never meet (as when all sentences are as long as a full round).
    """
    played = [play(transition, anchor, drafts) for anchor, drafts in enumerate(policy)]
    following = np.stack([f for _, f in played]) * (1 - AFRESH)
    following[:, 0] += AFRESH
    return np.stack([s for s, _ in played]), following


def _best_rounds(
    transition: np.ndarray, worth: np.ndarray, slots: int
) -> list[tuple[float, np.ndarray]]:
    """The most that a round from each anchor is worth, and its drafts f64[G, V]."""
    size = len(transition)
    known: dict[tuple, tuple[float, tuple]] = {}

    def best(slot: int, prefix: np.ndarray) -> tuple[float, tuple]:
        """Of one unit of mass of prefixes: tokens still to come plus worth of the next anchor."""
        if slot == slots:
            return 1 + float(prefix @ transition @ worth), ()
        key = (slot, *np.round(prefix, 12))
        if key in known:
            return known[key]
        last = np.flatnonzero(prefix)
        corners = _corners(transition[last])
        kept = np.minimum(transition[last], corners[:, None, :])  # [corners, prefixes, V]
        accepted = prefix[last] @ kept
        mass = accepted.sum(axis=1)
        values = (prefix[last] @ (transition[last] - kept)) @ (1 + worth) + mass
        found = (-np.inf, ())
        for q, value, after, share in zip(corners, values, accepted, mass, strict=True):
            later, rest = best(slot + 1, after / share) if share > 0 else (0.0, ())
            if value + share * later > found[0] + 1e-12:
                found = (float(value + share * later), (q, *rest))
        known[key] = found
        return found

    results = []
    for anchor in range(size):
        value, chosen = best(0, np.eye(size)[anchor])
        drafts = np.zeros((slots, size))  # slots that are never reached stay empty
        drafts[: len(chosen)] = chosen
        results.append((value, drafts))
    return results


def _corners(rows: np.ndarray) -> np.ndarray:
    """Corners of the cells into which rows p(.|x), f64[N, V], cut the distributions q: f64[C, V].

    All entries of q but one are 0 or equal to some p; the one takes what is left.
    """
    size = rows.shape[1]
    possible = [int(word) for word in np.flatnonzero(rows.max(axis=0) > 0)]
    useless = [word for word in range(size) if word not in possible][:1]  # to draft less
    corners = []
    for free in possible + useless:
        others = [word for word in possible if word != free]
        choices = [sorted({0.0, *rows[:, word]}) for word in others]
        for values in itertools.product(*choices):
            q = np.zeros(size)
            q[others] = values
            q[free] = 1.0 - sum(values)
            if q[free] > -1e-12:
                corners.append(np.maximum(q, 0.0))
    return np.unique(np.round(corners, 12), axis=0)
