"""Packed rows give what their documents give alone; buckets, and what padding costs.

pytest tests/test_packing.py
"""

import collections
import dataclasses
import itertools
import json

import jax
import numpy as np
import pytest
import tiny
from eagle3_reference import EAGLE3
from flax import nnx

from dspark_jax import train
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.core.trees import named, trainable, with_tables
from dspark_jax.data.batches import bucket_widths, pack, step_rows
from dspark_jax.data.dataset import Row
from dspark_jax.data.opened import open_target
from dspark_jax.features.local import LocalSource, add_features
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.drafters import new_drafter
from dspark_jax.training.anchors import make_blocks, slot_weights
from dspark_jax.training.losses import dspark_loss


def documents(sizes, seed=0):
    """Random text; generated from a third on."""
    rng = np.random.default_rng(seed)
    return [
        Row(f"d{i}", "test", rng.integers(3, 250, n).astype(np.int32), np.arange(n) >= n // 3)
        for i, n in enumerate(sizes)
    ]


# Equal to the unpacked documents.

LENGTH = 48


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    with jax.set_mesh(make_mesh(1, 1)):
        yield open_target(str(tiny.make_target(tmp_path_factory.mktemp("t") / "target")), "float32")


def anchors_of(packed, chosen):
    """The anchors of each row, from those of each document by name, sorted and filled up."""
    rows = []
    for row, names in enumerate(packed.names):
        found = []
        for number, name in enumerate(names, start=1):
            start = int(np.argmax(packed.documents[row] == number))
            found += [start + at for at in chosen[name]]
        rows.append(found)
    anchors = np.zeros((len(rows), max(map(len, rows))), np.int32)
    filled = np.zeros(anchors.shape, bool)
    for row, found in enumerate(rows):
        anchors[row, : len(found)], filled[row, : len(found)] = found, True
    return anchors, filled


@jax.jit
def loss_of(drafter, head, batch, anchors, filled):
    config, loss = drafter.config, LossConfig(kl=0.3)
    blocks = make_blocks(anchors, filled, batch.loss_mask, batch.documents, config, loss)
    one = jax.tree.map(lambda x: x[None], blocks)  # one micro-batch
    weights = jax.tree.map(lambda x: x[0], slot_weights(one, batch.loss_mask[None], config, loss))

    def share(params):
        whole = with_tables(params, drafter)
        return dspark_loss(whole, head, batch, blocks, weights, weights.unit, loss, 16)

    (value, sums), grads = jax.value_and_grad(share, has_aux=True)(trainable(drafter))
    return value, dataclasses.replace(sums, rows=sums.anchors), named(grads)


def run(target, drafter, packed, chosen):
    """Loss, sums and gradients of all rows, the target's own pass over them included."""
    arrays = packed.tokens, packed.loss_mask, packed.documents, packed.positions
    arrays += (np.arange(len(packed), dtype=np.int32),)
    put = [place(x[None], None, "batch", *[None] * (x.ndim - 1)) for x in arrays]
    batch = add_features(target.model, *put, taps=drafter.config.target_layer_ids)
    batch = jax.tree.map(lambda x: x[0], batch)
    chosen = [place(x, "batch", None) for x in anchors_of(packed, chosen)]
    return jax.device_get(loss_of(drafter, target.model.head, batch, *chosen))


@pytest.mark.parametrize("algorithm", ["dspark", "eagle3"])
def test_packed_rows_equal_their_documents_alone(target, algorithm, tmp_path):
    """Losses, sums and every gradient, with the same anchors; to rounding."""
    changes = (
        {"drafter.num_layers": 2}
        if algorithm == "dspark"
        else {f"drafter.{name}": value for name, value in EAGLE3.items()}
    )
    config = tiny.make_config(target.directory, tmp_path / "p", changes)
    with jax.set_mesh(make_mesh(1, 1)):
        shape = DrafterShape.of(config.drafter, target.model.config)
        drafter = jax.jit(lambda: new_drafter(shape, rngs=nnx.Rngs(0)))()
        texts = documents([20, 15, 11, 30, 9, 13, 40])
        packed = pack(texts, LENGTH)
        alone = pack(texts, LENGTH, (LENGTH,))
        assert len(alone) == 7 and len(packed) == 4 and packed.padding < 0.3
        # Also at a document's first token to be generated and at its last but one.
        chosen = {
            row.id: sorted({len(row.ids) // 3, len(row.ids) // 2, len(row.ids) - 2})
            for row in texts
        }
        got, want = (run(target, drafter, rows, chosen) for rows in (packed, alone))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for field in dataclasses.fields(got[1]):
        a, b = (getattr(x[1], field.name) for x in (got, want))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=field.name)
    assert got[1].anchors == 21 and got[1].slots.min() > 0
    for name, grad in got[2].items():
        scale = np.abs(want[2][name]).max()
        assert scale > 0
        np.testing.assert_allclose(grad, want[2][name], atol=1e-4 * scale, err_msg=name)


# What padding costs.


def sizes_like_chats(count, longest):
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(4.0, 0.6, count), 9, longest).astype(int)


def test_rows_are_filled_better_than_by_first_fit():
    """And hold documents that are near in the order of the hash, short ones and long ones."""
    texts = documents(sizes_like_chats(600, 256))
    packed = pack(texts, 256)
    order = [name for row in pack(texts, 256, (256,)).names for name in row]
    room = []
    for size in (len(texts[int(name[1:])].ids) for name in order):
        place = next((i for i, free in enumerate(room) if free >= size), None)
        if place is None:
            room.append(256)
            place = -1
        room[place] -= size
    first_fit = sum(room) / (256 * len(room))
    assert packed.padding < 0.01 < first_fit
    at = {name: index for index, name in enumerate(order)}
    spread = [max(at[name] for name in names) - at[names[0]] for names in packed.names]
    assert max(spread) < 200  # a window of 64, moved on by those that were taken
    third = len(packed) // 3
    means = [
        np.mean([len(texts[int(name[1:])].ids) for names in part for name in names])
        for part in (packed.names[:third], packed.names[third : 2 * third])
    ]
    assert 0.8 < means[0] / means[1] < 1.25


def test_rows_without_packing_are_as_wide_as_their_bucket():
    texts = documents([9, 10, 12, 30, 31, 60, 62, 64, 100, 20])
    buckets = bucket_widths(texts, 64)
    assert buckets == (12, 20, 32, 64)
    packed = pack(texts, 64, buckets)
    assert len(packed) == 10 and packed.truncated == 1
    for row, (name,) in enumerate(packed.names):
        size = min(len(texts[int(name[1:])].ids), 64)
        assert (packed.documents[row] > 0).sum() == size <= packed.widths[row]
        assert packed.widths[row] == min(width for width in buckets if width >= size)
    used = sum(min(len(text.ids), 64) for text in texts)
    assert packed.padding == pytest.approx(1 - used / packed.widths.sum())
    assert packed.padding_of(np.arange(10)) == pytest.approx(1 - used / 640)
    assert packed.described == "up to 12 (3), 20 (1), 32 (2), 64 (4) tokens"
    assert pack(texts, 64).described == "64 tokens"
    assert bucket_widths(texts[:3], 64, 1) == (12,)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_other_buckets_waste_less(count):
    """Against all choices of so many multiples of an eighth."""
    texts = documents(sizes_like_chats(60, 64), seed=1)
    sizes = np.array([len(text.ids) for text in texts])

    def padded(widths):
        return np.array(widths)[np.searchsorted(widths, sizes)].sum()

    grid = range(2, 65, 2)  # 32 of them
    best = min(
        padded((*others, 64))
        for number in range(count)
        for others in itertools.combinations(grid[:-1], number)
    )
    assert padded(bucket_widths(texts, 64, count)) == best


def test_batches_of_buckets():
    """One width each, every row once an epoch of its bucket, any step by itself, mixed widths."""
    texts = documents([10] * 11 + [30] * 6 + [60] * 8)
    packed = pack(texts, 64, bucket_widths(texts, 64))
    steps = [step_rows(packed, step, 4, seed=5) for step in range(50)]  # 8 epochs
    seen, widths = collections.defaultdict(list), []
    for rows in steps:
        (width,) = np.unique(packed.widths[rows])
        widths.append(int(width))
        seen[width] += rows.tolist()
    for width, rows in seen.items():
        own = np.flatnonzero(packed.widths == width)
        assert abs(len(rows) - 8 * len(own)) <= 8
        whole = len(rows) // len(own) * len(own)
        for epoch in np.array(rows[:whole]).reshape(-1, len(own)):
            np.testing.assert_array_equal(np.sort(epoch), own)
    assert len({tuple(widths[i : i + 6]) for i in range(0, 48, 6)}) > 4  # in no fixed order
    for step in (41, 7, 0):
        np.testing.assert_array_equal(step_rows(packed, step, 4, seed=5), steps[step])
    other = [step_rows(packed, step, 4, seed=6) for step in range(50)]
    assert any((a != b).any() for a, b in zip(steps, other))


def test_a_source_cuts_batches_to_their_bucket(target):
    """Also those for validation, where each row is judged once."""
    texts = documents([10, 12, 11, 30, 40, 44, 9])
    with jax.set_mesh(make_mesh(1, 1)):
        packed = pack(texts, LENGTH, bucket_widths(texts, LENGTH, 2))
        options = {"batch_size": 2, "accumulation": 1, "seed": 0, "validation_rows": 5}
        source = LocalSource(target.model, (0, 2), packed, packed, **options, cache_bytes=10**8)
        for step in (0, 1, 2, 3, 0, 1):  # the last ones from memory
            batch = source.batch(step)
            rows = np.asarray(batch.rows)[0]
            width = packed.width(rows)
            assert batch.tokens.shape == (1, 2, width) and batch.taps.shape[:3] == (1, 2, width)
            np.testing.assert_array_equal(batch.tokens[0], packed.tokens[rows, :width])
            used = (packed.documents[rows] > 0).sum()
            assert source.padding(step) == pytest.approx(1 - used / (2 * width))
        judged = []
        for batch in source.validation():
            live = np.asarray(batch.loss_mask).any(-1)
            judged += np.asarray(batch.rows)[live].tolist()
        assert sorted(judged) == [0, 1, 2, 3, 4]
        assert len({batch.tokens.shape for batch in source.validation()}) == 2
    assert source.tokens_per_step == round(2 * packed.widths.mean())


@pytest.mark.slow
def test_training_without_packing(tmp_path, capsys):
    """Every bucket compiles once and padding is told."""
    target = tiny.make_target(tmp_path / "target")
    prompts = tiny.write_prompts(tmp_path / "prompts.jsonl", 20)
    rng = np.random.default_rng(0)
    texts = {f"d{i}#0.1": rng.integers(3, 250, 12 + 5 * (i % 12)).tolist() for i in range(40)}
    tiny.make_data(tmp_path / "data", target, texts)
    changes = {"data.path": str(tmp_path / "data"), "data.packing": False, "train.num_steps": 8}
    config = tiny.make_config(target, prompts, changes)
    compiled = train.train_step._cache_size()
    train.run(config, tmp_path / "run")
    line = capsys.readouterr().out
    assert "tokens, " in line and "% padding" in line and "rows of up to " in line
    widths = line.count("(")
    assert train.train_step._cache_size() - compiled <= widths
    logged = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    padding = [x["padding"] for x in logged if "padding" in x]
    assert len(padding) == 8 and all(0 <= x < 0.6 for x in padding) and len(set(padding)) > 1

    losses = [x["loss"] for x in logged if "loss" in x]
    assert len(losses) == 8 and np.isfinite(losses).all()
