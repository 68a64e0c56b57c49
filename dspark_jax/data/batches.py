"""Documents packed into rows, rows into batches: a pure function of (seed, step)."""

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.data.dataset import Row


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """All rows of a data set, padded to S tokens. Row i of every array is one training row."""

    tokens: np.ndarray  # i32[rows, S]
    loss_mask: np.ndarray  # bool[rows, S]
    documents: np.ndarray  # i32[rows, S], 1.. per document, 0 = padding
    positions: np.ndarray  # i32[rows, S]
    names: tuple[tuple[str, ...], ...]  # ids of the documents of each row
    dropped: int  # documents without two adjacent supervised tokens
    truncated: int  # documents cut to S

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def padding(self) -> float:
        """Share of positions that hold no token."""
        return float((self.documents == 0).mean())


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


def pack(documents: Sequence[Row], length: int) -> PackedRows:
    """Packs documents into rows of `length` tokens, each into the first row that has room.

    They come in the order of a hash of their ids: sorted by length they would lie apart by kind,
    and a batch of few rows would hold one kind only. Longer documents are cut, ids and mask alike.
    A document without two adjacent supervised tokens can hold no anchor and is dropped. Both are
    counted.
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
    bins: list[list[Row]] = []
    room: list[int] = []
    for row in kept:
        size = min(len(row.ids), length)
        place = next((i for i, free in enumerate(room) if free >= size), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(length)
        bins[place].append(row)
        room[place] -= size
    shape = (len(bins), length)
    packed = PackedRows(
        np.zeros(shape, np.int32),
        np.zeros(shape, bool),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        tuple(tuple(row.id for row in group) for group in bins),
        dropped,
        truncated,
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


def batch_rows(step: int, *, num_rows: int, batch_size: int, seed: int) -> np.ndarray:
    """Row numbers of step `step`, i64[batch_size].

    Every epoch is a fresh permutation; batches run on across epochs, so each row is seen exactly
    once per epoch and any step can be computed without the ones before it.
    """
    first = step * batch_size
    epochs = range(first // num_rows, (first + batch_size - 1) // num_rows + 1)
    order = [np.random.default_rng((seed, epoch)).permutation(num_rows) for epoch in epochs]
    return np.concatenate(order)[first % num_rows :][:batch_size]
