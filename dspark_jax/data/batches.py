"""Documents packed into rows, or bucketed by length, and batches of rows: a pure function of (seed,
step)."""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence

import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.data.dataset import Row

_WINDOW = 64  # documents among which those that share a row are chosen


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """All rows of a data set, padded to S tokens. Row i of every array is one training row.

    Rows of one bucket share a width, that of their batches: what lies behind it is padding.
    """

    tokens: np.ndarray  # i32[rows, S]
    loss_mask: np.ndarray  # bool[rows, S]
    documents: np.ndarray  # i32[rows, S], 1.. per document, 0 = padding
    positions: np.ndarray  # i32[rows, S]
    names: tuple[tuple[str, ...], ...]  # ids of the documents of each row
    dropped: int  # documents without two adjacent supervised tokens
    truncated: int  # documents cut to S
    widths: np.ndarray | None = None  # i32[rows], None = S

    def __len__(self) -> int:
        return len(self.tokens)

    def width(self, rows: np.ndarray) -> int:
        """Positions of a batch of these rows."""
        return self.tokens.shape[1] if self.widths is None else int(self.widths[rows].max())

    def padding_of(self, rows: np.ndarray) -> float:
        """Share of the positions of a batch of these rows that hold no token."""
        return 1 - float((self.documents[rows] > 0).sum()) / (self.width(rows) * len(rows))

    @property
    def described(self) -> str:
        """How long rows are, in words."""
        if self.widths is None:
            return f"{self.tokens.shape[1]} tokens"
        widths, counts = np.unique(self.widths, return_counts=True)
        parts = ", ".join(f"{width} ({count})" for width, count in zip(widths, counts))
        return f"up to {parts} tokens"

    @property
    def mean_width(self) -> float:
        """Positions of a row, over all rows."""
        return self.tokens.shape[1] if self.widths is None else float(self.widths.mean())

    @property
    def padding(self) -> float:
        """Share of positions that hold no token."""
        return 1 - float((self.documents > 0).sum()) / (self.mean_width * len(self))


def split(documents: Sequence[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """(train, validation): by a hash of the conversation, so samples of one prompt stay together.

    Raises:
      UserError: no document is left to train on or to validate with.
    """
    train: list[Row] = []
    validation: list[Row] = []
    for row in documents:
        conversation = row.id.rsplit("#", 1)[0]
        digest = hashlib.sha256(conversation.encode()).digest()
        chosen = int.from_bytes(digest[:4], "little") < fraction * 2**32
        (validation if chosen else train).append(row)
    if not train or not validation:
        raise UserError(
            f"data: {len(train)} documents to train on and {len(validation)} to validate with; "
            "prepare more prompts or change --config.data.validation_fraction"
        )
    return train, validation


def pack(documents: Sequence[Row], length: int, buckets: Sequence[int] = ()) -> PackedRows:
    """Packs documents into rows of `length` tokens, or gives each a row in a bucket of its length.

    Packed, they come in the order of a hash of their ids. A row begins with the next document and
    takes those of the `_WINDOW` behind it that fill it best (`_fill`). Sorted by length, as the
    usual packings are, rows would hold one kind only, and so would a batch of few rows.

    With buckets (`bucket_widths`) a row is one document, in the same order, as wide as the
    narrowest bucket that holds it.

    Longer documents are cut, ids and mask alike. A document without two adjacent supervised tokens
    can hold no anchor and is dropped. Both are counted.
    """
    kept, dropped, truncated = [], 0, 0
    for row in documents:
        truncated += len(row.ids) > length
        mask = row.loss_mask[:length]
        if not (mask[:-1] & mask[1:]).any():
            dropped += 1
        else:
            kept.append(row)
    if not kept:
        raise UserError(
            f"data: no document has two adjacent supervised tokens within {length} tokens; raise "
            "--config.data.sequence_length"
        )
    kept.sort(key=lambda row: hashlib.sha256(f"pack {row.id}".encode()).digest())
    bins, widths = [[row] for row in kept], None
    if buckets:
        sizes = [min(len(row.ids), length) for row in kept]
        widths = np.array(buckets, np.int32)[np.searchsorted(buckets, sizes)]
    else:
        bins = _fill(kept, length)
    shape = (len(bins), length)
    packed = PackedRows(
        np.zeros(shape, np.int32),
        np.zeros(shape, bool),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        tuple(tuple(row.id for row in group) for group in bins),
        dropped,
        truncated,
        widths,
    )
    for index, group in enumerate(bins):
        start = 0
        for number, row in enumerate(group, start=1):
            size = min(len(row.ids), length)
            here = slice(start, start + size)
            packed.tokens[index, here] = row.ids[:size]
            packed.loss_mask[index, here] = row.loss_mask[:size]
            packed.documents[index, here] = number
            packed.positions[index, here] = np.arange(size)
            start += size
    return packed


def bucket_widths(documents: Sequence[Row], length: int, count: int = 4) -> tuple[int, ...]:
    """Widths of at most `count` buckets, ascending, that hold these documents with least padding.

    Each is a multiple of a 32nd of `length`. A step compiles once for each bucket, so few must do.
    """
    grid = np.unique(-(-length * np.arange(1, 33) // 32))
    sizes = np.sort([min(len(row.ids), length) for row in documents])
    below = np.searchsorted(sizes, grid, side="right")  # documents that each width holds
    last = int(np.searchsorted(below, len(sizes)))
    # Positions of all documents up to width i in so many buckets, the widest of them i.
    best = {(i, 1): (int(below[i] * grid[i]), (int(grid[i]),)) for i in range(last + 1)}
    for number, i in itertools.product(range(2, count + 1), range(last + 1)):
        options = [best[i, number - 1]]
        for j in range(i):
            cost, widths = best[j, number - 1]
            options.append((cost + int((below[i] - below[j]) * grid[i]), (*widths, int(grid[i]))))
        best[i, number] = min(options)
    return best[last, count][1]


def _fill(documents: Sequence[Row], length: int) -> list[list[Row]]:
    """Rows of documents, each with as many tokens as the next `_WINDOW` documents allow.

    Which sums of lengths can be reached is one integer, bit by bit: with each document, what it was
    and the same moved by its length.
    """
    rest, rows = list(documents), []
    while rest:
        first, window = rest[0], rest[1 : 1 + _WINDOW]
        room = length - min(len(first.ids), length)
        reached = [1]  # after each document of the window
        for row in window:
            reached.append(reached[-1] | (reached[-1] << len(row.ids)) & ((2 << room) - 1))
        fill, chosen = reached[-1].bit_length() - 1, []
        for index in reversed(range(len(window))):  # the later ones stay, where there is a choice
            if not reached[index] >> fill & 1:
                chosen.append(index)
                fill -= len(window[index].ids)
        rows.append([first, *(window[index] for index in reversed(chosen))])
        rest[: 1 + len(window)] = [row for i, row in enumerate(window) if i not in chosen]
    return rows


def batch_rows(step: int, *, num_rows: int, batch_size: int, seed: int) -> np.ndarray:
    """Row numbers of step `step`, i64[batch_size].

    Every epoch is a fresh permutation; batches run on across epochs, so each row is seen exactly
    once per epoch and any step can be computed without the ones before it.
    """
    first = step * batch_size
    epochs = range(first // num_rows, (first + batch_size - 1) // num_rows + 1)
    order = [np.random.default_rng((seed, epoch)).permutation(num_rows) for epoch in epochs]
    return np.concatenate(order)[first % num_rows :][:batch_size]


def step_rows(packed: PackedRows, step: int, batch_size: int, seed: int) -> np.ndarray:
    """Row numbers of step `step` of `packed`, i64[batch_size], all in one bucket.

    With buckets each is a stream of its own, as in `batch_rows`: what does not fill a batch at the
    end of an epoch begins the next one. An epoch takes its batches of all streams in random order.
    """
    if packed.widths is None:
        return batch_rows(step, num_rows=len(packed), batch_size=batch_size, seed=seed)
    buckets = [np.flatnonzero(packed.widths == width) for width in np.unique(packed.widths)]
    sizes = np.array([len(rows) for rows in buckets])
    epoch = step * batch_size // len(packed)  # or one later: streams wait for whole batches
    while (sizes * (epoch + 1) // batch_size).sum() <= step:
        epoch += 1
    first, end = sizes * epoch // batch_size, sizes * (epoch + 1) // batch_size
    order = np.repeat(np.arange(len(buckets)), end - first)
    np.random.default_rng((seed, epoch)).shuffle(order)
    place = step - first.sum()
    bucket = order[place]
    number = first[bucket] + (order[:place] == bucket).sum()
    rows = batch_rows(
        int(number), num_rows=int(sizes[bucket]), batch_size=batch_size, seed=seed + int(bucket)
    )
    return buckets[bucket][rows]
