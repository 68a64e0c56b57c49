"""What the target gives to training, and what of its whole vocabulary a pruned drafter is told.

pytest tests/test_features.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_targets import model_config, random_tensors, write_model

from dspark_jax.core.config import MeshConfig
from dspark_jax.core.sharding import make_mesh, make_meshes, place
from dspark_jax.data.batches import pack
from dspark_jax.data.dataset import Row
from dspark_jax.features.local import LocalSource, _whole_vocabulary
from dspark_jax.models.target import TargetHead
from dspark_jax.weights.safetensors import load_target

LENGTH, TAPS = 24, (0, 1)


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    config = model_config(tie_word_embeddings=request.param)
    return write_model(tmp_path_factory.mktemp("model"), config, random_tensors(config))


def source_of(folder, **options) -> LocalSource:
    """Two rows a batch of ten documents, in two micro-batches."""
    rng = np.random.default_rng(0)
    documents = [
        Row(f"d{i}", "test", rng.integers(0, 96, 9 + i).astype(np.int32), np.arange(9 + i) > 2)
        for i in range(10)
    ]
    return LocalSource(
        options.pop("target", None) or load_target(folder, options.pop("dtype", "float32")),
        TAPS,
        pack(documents, LENGTH),
        pack(documents[:2], LENGTH),
        **{"batch_size": 2, "accumulation": 2, "seed": 0, "validation_rows": 1} | options,
    )


def check_whole_vocabulary(batch, folder, tolerance=1e-5):
    """Against the logits of the target's head, all at once in float64."""
    target = load_target(folder, "float32")
    logits = np.asarray(batch.last_hidden, np.float64) @ np.asarray(target.head.weight).T
    top = logits.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]
    assert (batch.teacher_lse.dtype, batch.teacher_best.dtype) == (jnp.float32, jnp.int32)
    np.testing.assert_allclose(batch.teacher_lse, lse, rtol=tolerance, atol=tolerance)
    chosen = np.take_along_axis(logits, np.asarray(batch.teacher_best)[..., None], -1)
    np.testing.assert_allclose(chosen, top, atol=tolerance)
    assert len(np.unique(batch.teacher_best)) > 5  # not one token everywhere


def test_a_pruned_drafter_is_told_of_the_whole_vocabulary(folder):
    batch = source_of(folder, whole_vocabulary=True).batch(0)
    assert batch.teacher_lse.shape == batch.teacher_best.shape == (2, 1, LENGTH)
    check_whole_vocabulary(jax.device_get(batch), folder)
    plain = source_of(folder).batch(0)
    assert plain.teacher_lse is None and plain.teacher_best is None
    np.testing.assert_array_equal(plain.last_hidden, batch.last_hidden)


def test_the_same_from_memory_and_for_validation(folder):
    """What is remembered comes back as it was, and counts in the memory that it takes."""
    fresh = source_of(folder, whole_vocabulary=True)
    row = LENGTH * (3 * 32 + 2) * 4  # bytes of taps, last hidden, log-sum-exp and best
    for rows in (3, fresh.num_rows):
        kept = source_of(folder, whole_vocabulary=True, cache_bytes=rows * row)
        for step in range(8):
            jax.tree.map(np.testing.assert_array_equal, kept.batch(step), fresh.batch(step))
        assert len(kept._memory._rows) == rows
    kept._target = None  # which is not asked again
    jax.tree.map(np.testing.assert_array_equal, kept.batch(9), fresh.batch(9))
    (validation,) = fresh.validation()
    check_whole_vocabulary(jax.device_get(validation), folder)


def test_on_eight_devices(folder):
    """Rows over fsdp, the head over tp."""
    options = {"whole_vocabulary": True, "batch_size": 4, "accumulation": 1}
    want = jax.device_get(source_of(folder, **options).batch(0))
    with jax.set_mesh(make_mesh(4, 2)):
        got = source_of(folder, **options).batch(0)
        assert got.teacher_lse.sharding.spec[:2] == (None, "fsdp")
        check_whole_vocabulary(jax.device_get(got), folder)
    np.testing.assert_allclose(got.teacher_lse, want.teacher_lse, rtol=1e-5)
    np.testing.assert_array_equal(got.teacher_best, want.teacher_best)


def test_on_devices_of_its_own(folder):
    """The target on four devices, what it gives on the four others, rows where they belong."""
    options = {"whole_vocabulary": True, "batch_size": 4, "accumulation": 1}
    want = jax.device_get(source_of(folder, **options).batch(0))
    ours, theirs = make_meshes(MeshConfig(fsdp=4, tp=1, target_fsdp=4))
    with jax.set_mesh(theirs):
        target = load_target(folder, "float32")
    with jax.set_mesh(ours):
        source = source_of(folder, **options, target=target, mesh=theirs)
        for batch in (source.batch(0), *source.validation()):
            for x in jax.tree.leaves(batch):
                assert x.sharding.mesh == ours and x.sharding.spec[1] == "fsdp"
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), source.batch(0), want)


@pytest.mark.parametrize("positions", [1, 5, 8, 100])
def test_the_size_of_a_chunk_does_not_matter(positions):
    """5 does not divide 14: chunks of 2 then."""
    rng = np.random.default_rng(0)
    hidden, weight = rng.standard_normal((2, 14, 8)), rng.standard_normal((20, 8))
    head = TargetHead(place(np.float32(weight), "vocab", "embed"), None)
    split = jax.jit(_whole_vocabulary, static_argnums=2)
    lse, best = split(head, place(np.float32(hidden), "batch"), positions)
    logits = hidden @ weight.T
    np.testing.assert_allclose(lse, np.log(np.exp(logits).sum(-1)), rtol=1e-5)
    np.testing.assert_array_equal(best, logits.argmax(-1))


def test_bfloat16_sums_in_float32(folder):
    """A target in bfloat16 rounds its states and its head, not the sum over the vocabulary."""
    batch = jax.device_get(source_of(folder, whole_vocabulary=True, dtype="bfloat16").batch(0))
    assert batch.last_hidden.dtype == jnp.bfloat16
    check_whole_vocabulary(batch, folder, 0.05)
