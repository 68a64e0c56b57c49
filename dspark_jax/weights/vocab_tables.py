"""The draft vocabulary in files: d2t, t2d and the rows of the target's LM head.

`d2t` i64[V_d] holds offsets, target id = draft id + d2t[draft id]; `t2d` bool[V] is true on the
ids that can be drafted. Engines without `d2t` take draft ids for target ids, so a drafter of a
pruned vocabulary without it, or with absolute ids in it, is refused.
"""

from pathlib import Path

import numpy as np

from dspark_jax.core.errors import UserError
from dspark_jax.weights.names import EMBED, LM_HEAD
from dspark_jax.weights.safetensors import TensorFiles

TABLES = ("d2t", "t2d")


def tables_of(ids: np.ndarray, vocab: int) -> dict[str, np.ndarray]:
    """d2t and t2d of draft_ids i32[V_d] in a target vocabulary of `vocab` tokens."""
    to_draft = np.zeros(vocab, bool)
    to_draft[ids] = True
    return {"d2t": ids.astype(np.int64) - np.arange(len(ids)), "t2d": to_draft}


def ids_of(where: Path, d2t: np.ndarray, t2d: np.ndarray | None, size: int, vocab: int):
    """draft_ids i32[size] from the tables of a file.

    Raises:
      UserError: wrong shapes or dtypes, ids outside the vocabulary or twice, tables in dispute.
    """
    if d2t.shape != (size,) or d2t.dtype.kind not in "iu":
        raise UserError(
            f"{where}: d2t is {d2t.dtype}{list(d2t.shape)}, config.json implies int64[{size}]"
        )
    ids = d2t.astype(np.int64) + np.arange(size)
    good = ids.min() >= 0 and ids.max() < vocab and len(np.unique(ids)) == size
    agrees = t2d is None or (t2d.shape == (vocab,) and np.array_equal(np.flatnonzero(t2d), ids))
    if good and agrees and (np.diff(ids) <= 0).any():
        raise UserError(
            f"{where}: the target ids of d2t are not ascending, in which order t2d and with it "
            "speculators take the rows of the LM head: sort d2t, lm_head and markov_w2 by target id"
        )
    if good and agrees:
        return ids.astype(np.int32)
    absolute = d2t.min() >= 0 and d2t.max() < vocab and (np.diff(d2t) > 0).all()
    if absolute and (t2d is None or np.array_equal(np.flatnonzero(t2d), d2t)):
        raise UserError(
            f"{where}: d2t holds target ids; engines read offsets: store d2t - arange({size})"
        )
    if not good:
        raise UserError(f"{where}: draft id + d2t gives ids outside 0..{vocab - 1} or one twice")
    raise UserError(f"{where}: t2d does not mark the ids of d2t; one of them is of another drafter")


def target_table(target_directory: Path, name: str) -> np.ndarray:
    """The target's embedding or LM head [V, D] by its name in drafters' files, as it is stored."""
    files = TensorFiles(target_directory)
    tied = name == LM_HEAD and name not in files.files
    return np.asarray(files.read(f"model.{EMBED}" if tied or name == EMBED else name))


def head_rows(target_directory: Path, ids: np.ndarray) -> np.ndarray:
    """The target's LM head at those ids, [V_d, D] in the dtype of its files."""
    files = TensorFiles(target_directory)
    table = files.slice(LM_HEAD if LM_HEAD in files.files else f"model.{EMBED}")
    vocab, size = table.get_shape()
    rows = np.empty((len(ids), size), np.asarray(table[:1]).dtype)
    for start in range(0, vocab, 8192):  # files cut ranges, not lists of rows
        here = (ids >= start) & (ids < start + 8192)
        if here.any():
            rows[here] = np.asarray(table[start : min(start + 8192, vocab)])[ids[here] - start]
    return rows
