"""Which tokens a drafter of a pruned vocabulary can propose: those that the target says most."""

from collections.abc import Iterable, Sequence

import numpy as np

from dspark_jax.data.dataset import Row


def draft_vocabulary(
    train: Sequence[Row], held_out: Sequence[Row], vocab: int, size: int, always: Sequence[int]
) -> tuple[np.ndarray, str]:
    """The ids, i32[size] ascending, and a line that says how much they cover.

    Args:
      train: what they are counted in; held_out: what the coverage is also told of.
      vocab: V; size: V_d; always: see `most_frequent`.
    """
    counts = token_counts(train, vocab)
    seen = sum((np.bincount(row.ids, minlength=vocab) for row in train), np.zeros(vocab, np.int64))
    ids = most_frequent(counts, size, always, seen)
    held = coverage(token_counts(held_out, vocab), ids)
    return ids, (
        f"draft vocabulary: {size} of {vocab} tokens, which are {coverage(counts, ids):.2%} of the "
        f"responses, {held:.2%} of those for validation"
    )


def token_counts(rows: Iterable[Row], vocab: int) -> np.ndarray:
    """How often each token was generated (supervised tokens alone), i64[V]."""
    counts = np.zeros(vocab, np.int64)
    for row in rows:
        counts += np.bincount(row.ids[row.loss_mask], minlength=vocab)
    return counts


def most_frequent(
    counts: np.ndarray,
    size: int,
    always: Sequence[int] = (),
    seen: np.ndarray | None = None,
) -> np.ndarray:
    """The `size` most frequent ids, ascending, i32[size].

    Args:
      counts: i64[V], of the responses.
      always: ids that are in whatever their count: the target's stop tokens.
      seen: i64[V], counts of prompts and responses, which decide between equals: answers take up
        words of their prompts. Of equals in that too the smaller id is taken, which in most
        tokenizers is the more common token.
    """
    rank = counts.astype(np.int64).copy()
    rank[list(always)] = np.iinfo(np.int64).max
    second = np.zeros_like(rank) if seen is None else seen
    order = np.lexsort((np.arange(len(rank)), -second, -rank))
    return np.sort(order[:size]).astype(np.int32)


def coverage(counts: np.ndarray, ids: np.ndarray) -> float:
    """Share of the counted tokens that are among `ids`."""
    return float(counts[ids].sum() / max(counts.sum(), 1))
