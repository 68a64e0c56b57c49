"""The target in this process: taps stream into the drafter, nothing is written to disk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dspark_jax.core.sharding import move, place, place_parts, spec, to_host
from dspark_jax.data.batches import PackedRows, step_rows
from dspark_jax.features.source import Batch
from dspark_jax.models.target import Target, TargetHead


@functools.partial(jax.jit, static_argnames=("taps", "whole"))
def add_features(
    target: Target,
    tokens: jax.Array,
    loss_mask: jax.Array,
    documents: jax.Array,
    positions: jax.Array,
    rows: jax.Array,
    *,
    taps: tuple[int, ...],
    whole: bool = False,
) -> Batch:
    """Runs the target over M micro-batches of packed rows, one at a time.

    Args:
      whole: also what a drafter of a pruned vocabulary has to know of the target's whole one.
    """

    def run(micro):
        ids, document, position = micro
        output = target(ids, taps=taps, documents=document, positions=position)
        summary = _whole_vocabulary(target.head, output.hidden) if whole else (None, None)
        return output.taps, output.hidden, *summary

    features = jax.lax.map(run, (tokens, documents, positions))
    return Batch(tokens, loss_mask, documents, positions, rows, *features)


def _whole_vocabulary(
    head: TargetHead, hidden: jax.Array, positions: int = 128
) -> tuple[jax.Array, jax.Array]:
    """Log-sum-exp f32[B, S] and arg-max i32[B, S] of the logits, a few positions at a time."""
    batch, length, size = hidden.shape
    chunk = next(n for n in range(min(positions, length), 0, -1) if length % n == 0)
    chunks = jnp.moveaxis(hidden.reshape(batch, length // chunk, chunk, size), 1, 0)

    def one(hidden):
        logits = head.logits(hidden)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return jax.nn.logsumexp(logits, axis=-1), best

    out = spec("batch", None)
    return tuple(
        jax.lax.reshape(jnp.moveaxis(x, 0, 1), (batch, length), out_sharding=out)
        for x in jax.lax.map(one, chunks)
    )


class LocalSource:
    """A `FeatureSource` that runs the target in this program, on the trainer's mesh or on its own.

    Dispatch is asynchronous: asking for the next batch right after a train step queues the
    target's forward while the step still runs; on devices of its own it runs beside the step.
    """

    def __init__(
        self,
        target: Target,
        taps: tuple[int, ...],
        train: PackedRows,
        validation: PackedRows,
        *,
        batch_size: int,
        accumulation: int,
        seed: int,
        validation_rows: int,
        cache_bytes: int = 0,
        whole_vocabulary: bool = False,
        mesh: Mesh | None = None,
    ):
        """The current mesh is that of the batches; `mesh` is the target's, if it has its own."""
        self._home = jax.sharding.get_mesh()
        self._mesh = mesh or self._home
        self._target = target
        self._taps = taps
        self._train = train
        self._validation = validation
        self._batch_size = batch_size
        self._accumulation = accumulation
        self._seed = seed
        self._validation_rows = min(validation_rows, len(validation))
        self._memory = _Memory(cache_bytes)
        self._whole = whole_vocabulary
        self._validation_batches: list[Batch] = []  # kept only if training rows are

    @property
    def num_rows(self) -> int:
        """Training rows of an epoch."""
        return len(self._train)

    @property
    def tokens_per_step(self) -> int:
        """Positions of a global batch, padding included; with buckets a mean over all rows."""
        return round(self._batch_size * self._train.mean_width)

    def padding(self, step: int) -> float:
        """Share of the positions of a step's batch that hold no token."""
        return self._train.padding_of(self._rows(step))

    def batch(self, step: int) -> Batch:
        """The batch of an optimizer step."""
        rows = self._rows(step)
        if (kept := self._memory.get(rows)) is not None:
            return self._remembered(rows, kept)
        batch = self._features(self._train, rows, self._accumulation)
        self._memory.put(rows, batch)
        return batch

    def blame(self, step: int) -> str:
        """What a message says of a step whose taps or loss are not finite; runs the target again.

        Names the documents of the rows on which the target is not finite, or else of the batch.
        """
        rows = self._rows(step)
        batch = self._features(self._train, rows, self._accumulation)
        problem = check_features(batch, self._taps)
        live = (batch.documents > 0)[..., None]
        taps = jnp.isfinite(jnp.where(live[..., None], batch.taps, 0)).all((2, 3, 4))
        hidden = jnp.isfinite(jnp.where(live, batch.last_hidden, 0)).all((2, 3))
        bad = rows[~to_host(taps & hidden).reshape(-1)]
        names = [name for row in (bad if len(bad) else rows) for name in self._train.names[row]]
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"{problem or 'the loss is NaN or infinite'} in {', '.join(names[:8])}{more}"

    def _rows(self, step: int) -> np.ndarray:
        size = self._batch_size
        return step_rows(self._train, step, size, self._seed)

    def validation(self) -> list[Batch]:
        """The first validation rows, in micro-batches of the training size.

        A last batch that is not full is filled with its first row without supervision, so nothing
        compiles anew and no row counts twice. With buckets each has batches of its own.
        """
        if self._validation_batches:
            return self._validation_batches
        size = self._batch_size // self._accumulation
        batches = []
        for rows in _buckets(self._validation, self._validation_rows):
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                batches.append(self._features(self._validation, part, 1, pad_to=size))
        if self._memory.enabled:
            self._validation_batches = batches
        return batches

    def _remembered(self, rows: np.ndarray, features: tuple[np.ndarray, ...]) -> Batch:
        micro = self._accumulation

        def put(x: np.ndarray) -> jax.Array:
            shaped = x.reshape(micro, len(x) // micro, *x.shape[1:])
            return place(shaped, None, "batch", *[None] * (x.ndim - 1))

        supervised = np.ones(len(rows), bool)
        return Batch(*_inputs(self._train, rows, supervised, micro), *map(put, features))

    def _features(self, packed: PackedRows, rows: np.ndarray, micro: int, pad_to: int = 0) -> Batch:
        missing = max(pad_to - len(rows), 0)
        chosen = np.concatenate([rows, np.repeat(rows[:1], missing)])
        supervised = np.arange(len(chosen)) < len(rows)
        with jax.set_mesh(self._mesh):
            inputs = _inputs(packed, chosen, supervised, micro)
            batch = add_features(self._target, *inputs, taps=self._taps, whole=self._whole)
        return move(batch, self._home)


def _inputs(
    packed: PackedRows, rows: np.ndarray, supervised: np.ndarray, micro: int
) -> tuple[jax.Array, ...]:
    """The first five fields of a `Batch` on the current mesh; a process reads only its own rows.

    Args:
      supervised: bool[rows], False = the row has no loss.
    """
    width = packed.width(rows)
    rows, supervised = rows.reshape(micro, -1), supervised.reshape(micro, -1)

    def put(values: np.ndarray) -> jax.Array:
        cut = values[:, :width]
        shape = (*rows.shape, width)
        return place_parts(lambda index: cut[rows[index[:2]]], shape, None, "batch", None)

    def masked(index: tuple[slice, ...]) -> np.ndarray:
        return packed.loss_mask[rows[index[:2]], :width] & supervised[index[:2]][..., None]

    tokens = put(packed.tokens)
    return (
        tokens,
        place_parts(masked, tokens.shape, None, "batch", None),
        put(packed.documents),
        put(packed.positions),
        place_parts(lambda index: rows[index].astype(np.int32), rows.shape, None, "batch"),
    )


def _buckets(packed: PackedRows, count: int) -> list[np.ndarray]:
    """The first rows, those of each bucket together."""
    if packed.widths is None:
        return [np.arange(count)]
    widths = packed.widths[:count]
    return [np.flatnonzero(widths == width) for width in np.unique(widths)]


class _Memory:
    """Features of training rows kept in host memory, so that later epochs skip the target.

    Holds as many rows as fit into its bytes and nothing on disk. A batch is taken over at the
    next call, when the device is done with it, so dispatch never waits.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._used = 0
        self._rows: dict[int, tuple[np.ndarray, ...]] = {}
        self._fresh: tuple[np.ndarray, Batch] | None = None

    @property
    def enabled(self) -> bool:
        """Whether anything is remembered."""
        return self._limit > 0

    def put(self, rows: np.ndarray, batch: Batch) -> None:
        """Remembers a batch that was just dispatched."""
        if self._limit:
            self._fresh = (rows, batch)

    def get(self, rows: np.ndarray) -> tuple[np.ndarray, ...] | None:
        """The features of the rows, as `Batch` names them, if all are there."""
        if self._fresh is not None:
            self._take(*self._fresh)
            self._fresh = None
        if not all(int(row) in self._rows for row in rows):
            return None
        return tuple(np.stack(parts) for parts in zip(*(self._rows[int(row)] for row in rows)))

    def _take(self, rows: np.ndarray, batch: Batch) -> None:
        features = (batch.taps, batch.last_hidden, batch.teacher_lse, batch.teacher_best)
        arrays = [np.asarray(x) for x in features if x is not None]
        arrays = [x.reshape(-1, *x.shape[2:]) for x in arrays]
        for index, row in enumerate(rows):
            size = sum(x[index].nbytes for x in arrays)
            if int(row) not in self._rows and self._used + size <= self._limit:
                self._rows[int(row)] = tuple(x[index].copy() for x in arrays)
                self._used += size


def check_features(batch: Batch, taps: tuple[int, ...]) -> str | None:
    """What is wrong with a batch's features, or None; blocks until they are there.

    All-zero or repeated taps train smoothly to a useless drafter, so they are refused.
    """
    live = (batch.documents > 0)[..., None]
    for index, tap in enumerate(taps):
        values = jnp.where(live, batch.taps[..., index, :], 0)
        if not bool(jnp.isfinite(values).all()):
            return f"tap of layer {tap} has NaN or infinite values"
        if not bool((values != 0).any()):
            return f"tap of layer {tap} is all zeros"
        if index and bool((batch.taps[..., index, :] == batch.taps[..., index - 1, :]).all()):
            return f"taps of layers {taps[index - 1]} and {tap} are identical"
    if not bool(jnp.isfinite(jnp.where(live, batch.last_hidden, 0)).all()):
        return "the target's last hidden state has NaN or infinite values"
    return None
