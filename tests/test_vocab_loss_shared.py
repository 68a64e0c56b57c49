"""Rows that share a position of the teacher: chunks, values, gradients and meshes.

pytest tests/test_vocab_loss_shared.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_vocab_loss import AXES, close, operands

from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.kernels.vocab_loss import Teacher, vocab_loss, vocab_loss_reference
from dspark_jax.kernels.vocab_loss_chunks import chunk_shape, make_plan

BATCH, POSITIONS, ROWS, CHUNK = 4, 9, 40, 48
KEPT = np.array([0, 2, 3, 7, 8, 9, 13, 17, 21, 22, 28, 30, 31, 36, 38, 39])
WEIGHTS = {"ce_weight": 0.1, "l1_weight": 0.9, "kl_weight": 0.3}


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


def shared_operands(kept=None, dtype=jnp.float32, cap=0.0, shared_latent=True):
    """40 rows of each batch entry on its 9 positions, of which no live row is on the last."""
    args = list(operands(ROWS, True, dtype, kept, cap=cap))
    taught = args[4]
    parts = (taught.hidden, taught.lse, taught.best)
    rng = np.random.default_rng(3)
    at = np.sort(rng.integers(0, POSITIONS - 1, (BATCH, ROWS)), axis=1).astype(np.int32)
    at = rng.permuted(at, axis=1)
    at[args[6] == 0] = POSITIONS - 1
    args[4] = Teacher(*(x if x is None else x[:, :POSITIONS] for x in parts), at)
    if shared_latent:
        args[1] = args[1][:, :POSITIONS]
    return args


def evaluate(args, fn, on_mesh=True, **options):
    """Loss, terms and gradients for hidden, latent and w2."""
    if on_mesh:
        put = [lambda x, axes=axes: place(x, *axes) for axes in AXES]
        args = [jax.tree.map(f, x) for f, x in zip(put, args)]

    return _evaluate(tuple(args[:3]), tuple(args[3:]), fn, tuple(options.items()))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _evaluate(trained, rest, fn, options):
    def loss(trained):
        return fn(*trained, *rest, **WEIGHTS, **dict(options))

    (value, terms), grads = jax.value_and_grad(loss, has_aux=True)(trained)
    return value, terms, grads


# Draft ids kept, dtype, whose latents, other options.
CASES = {
    "whole": (None, jnp.float32, True, {}),
    "latents of rows": (None, jnp.float32, False, {}),
    "pruned, renormalised": (KEPT, jnp.float32, True, {"renormalise": True}),
    "pruned, capped": (KEPT, jnp.float32, True, {"softcap": 1.5}),
    "bfloat16": (None, jnp.bfloat16, True, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    """Against the plain reference and its jax.grad, in float32."""
    kept, dtype, shared_latent, options = CASES[case]
    args = shared_operands(kept, dtype, options.get("softcap", 0.0), shared_latent)
    assert chunk_shape(BATCH * ROWS, BATCH * POSITIONS, CHUNK) == (CHUNK, 24, True)
    options |= {"shared_latent": shared_latent}
    got = evaluate(args, vocab_loss, chunk=CHUNK, **options)
    exact = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x, args)
    want = evaluate(exact, vocab_loss_reference, on_mesh=False, **options)
    rough = dtype == jnp.bfloat16
    live = args[6] > 0
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-4 if rough else 1e-6)
    for field in dataclasses.fields(got[1]):
        x, y = (np.asarray(getattr(terms, field.name))[live] for terms in (got[1], want[1]))
        np.testing.assert_allclose(x, y, atol=1e-4 if rough else 1e-5, err_msg=field.name)
    for x, y in zip(got[2], want[2]):
        close(x, y, 2e-2 if rough else 1e-5)
    assert not np.asarray(got[2][0])[~live].any()


def test_positions_of_no_live_row_have_no_influence():
    """Nor have rows of weight 0, wherever they point (R044)."""
    args = shared_operands()
    clean = evaluate(args, vocab_loss, chunk=CHUNK, shared_latent=True)
    spoiled = jax.tree.map(np.array, args)
    spoiled[4].hidden[:, -1] = spoiled[1][:, -1] = np.nan
    spoiled[0][args[6] == 0] = np.nan
    got = evaluate(spoiled, vocab_loss, chunk=CHUNK, shared_latent=True)
    jax.tree.map(np.testing.assert_array_equal, got, clean)
    spoiled[4].hidden[1, 2, 3] = np.nan
    assert np.isnan(evaluate(spoiled, vocab_loss, chunk=CHUNK, shared_latent=True)[0])


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "pruned"])
def test_sharding_does_not_matter(kept):
    """Rows over fsdp, vocabulary over tp; one device has far fewer live rows than the other."""
    args = shared_operands(kept)
    args[6][2:, 5:] = 0
    if kept is None:
        args[5] = None  # the label is the target's arg-max, wherever it lies
    want = evaluate(args, vocab_loss, chunk=CHUNK // 2, shared_latent=True)
    with jax.set_mesh(make_mesh(2, 2)):
        got = evaluate(args, vocab_loss, chunk=CHUNK // 2, shared_latent=True)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        close(x, y, 3e-6)


@pytest.mark.parametrize("spread", ["even", "one position", "own positions"])
def test_every_live_row_is_in_one_chunk_at_its_position(spread):
    """Whatever the rows share, which the shapes do not tell."""
    rng = np.random.default_rng(0)
    n, positions = 500, 200
    at = {
        "even": rng.integers(0, positions, n),
        "one position": np.full(n, 7),
        "own positions": np.arange(n) % positions,
    }[spread]
    live = rng.random(n) < (0.3 if spread == "own positions" else 0.8)
    plan = jax.jit(make_plan, static_argnums=(2, 3))(at.astype(np.int32), live, positions, 64)
    size, room, shared = chunk_shape(n, positions, 64)
    assert shared and plan.rows.shape[1:] == (size,) and plan.positions.shape[1:] == (room,)
    rows, count = np.asarray(plan.rows), int(plan.count)
    there = rows < n
    np.testing.assert_array_equal(np.sort(rows[there]), np.flatnonzero(live))
    assert there[:count].any(1).all() and not there[count:].any()
    found = np.take_along_axis(np.asarray(plan.positions), np.asarray(plan.spot), axis=1)
    np.testing.assert_array_equal(found[there], at[rows[there]])
    if spread == "one position":
        assert count == -(-live.sum() // size)
    inverse = np.asarray(plan.inverse)
    np.testing.assert_array_equal(rows.reshape(-1)[inverse[live]], np.flatnonzero(live))
    assert (inverse[~live] == rows.size).all()


def test_when_rows_share():
    """512 anchors of 7 slots on 512 positions do, at a seventh of the rows; 8 anchors do not."""
    assert chunk_shape(3584, 512, 256) == (256, 56, True)
    assert chunk_shape(1792, 512, 256) == (256, 96, True)
    assert chunk_shape(56, 512, 256) == (56, 56, False)
    assert chunk_shape(20, 20, 1) == (1, 1, False)
