"""The chunked loss over the vocabulary: values and gradients, rows of weight 0, meshes.

pytest tests/test_vocab_loss.py
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import softmax

from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.kernels.vocab_loss import vocab_loss, vocab_loss_reference

BATCH, HIDDEN, RANK, VOCAB = 4, 16, 8, 40
CE, L1 = 0.1, 0.9


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


def operands(rows: int, latent: bool = True, dtype=jnp.float32, seed: int = 0):
    """hidden, latent, w2, head, teacher, labels, weights; one in four weights is 0."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    weights = rng.uniform(0.1, 1.0, (BATCH, rows)) * (rng.random((BATCH, rows)) < 0.75)
    return (
        normal(BATCH, rows, HIDDEN).astype(dtype),
        normal(BATCH, rows, RANK) if latent else None,
        normal(VOCAB, RANK) if latent else None,
        (0.5 * normal(VOCAB, HIDDEN)).astype(dtype),
        normal(BATCH, rows, HIDDEN).astype(dtype),
        rng.integers(0, VOCAB, (BATCH, rows)).astype(np.int32),
        weights.astype(np.float32),
    )


AXES = [("batch",), ("batch",), ("vocab", "embed"), ("vocab", "embed"), *[("batch",)] * 3]


def placed(args):
    """On the current mesh, as in training."""
    return tuple(None if x is None else place(x, *axes) for x, axes in zip(args, AXES))


def with_grads(args, chunk=None, ce=CE, l1=L1):
    """Loss, terms and gradients for hidden, latent and w2; chunk None = the plain reference."""
    return _with_grads(args if chunk is None else placed(args), chunk, ce, l1)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _with_grads(args, chunk, ce, l1):
    hidden, latent, w2, *rest = args

    def loss(trained):
        if chunk is None:
            return vocab_loss_reference(*trained, *rest, ce_weight=ce, l1_weight=l1)
        return vocab_loss(*trained, *rest, ce_weight=ce, l1_weight=l1, chunk=chunk)

    (value, terms), grads = jax.value_and_grad(loss, has_aux=True)((hidden, latent, w2))
    return value, terms, grads


def close(got, want, tolerance):
    """Within `tolerance` of the largest element."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def loops(args):
    """Terms [B, N] in float64."""
    hidden, latent, w2, head, teacher, labels, _ = (
        x if x is None else np.asarray(x, np.float64) for x in args
    )
    ce, l1, match = np.zeros((3, *labels.shape))
    for b, n in np.ndindex(labels.shape):
        z = head @ hidden[b, n]
        if latent is not None:
            z = z + w2 @ latent[b, n]
        zt = head @ teacher[b, n]
        p, q = softmax(zt), softmax(z)
        ce[b, n] = -math.log(q[int(labels[b, n])])
        l1[b, n] = np.abs(q - p).sum()
        match[b, n] = z.argmax() == zt.argmax()
    return ce, l1, match


# Rows per batch entry and chunk: one chunk, ragged last chunks, fewer chunk rows than the batch.
CASES = [(5, 256, True), (7, 12, True), (7, 12, False), (3, 1, True)]


@pytest.mark.parametrize("rows, chunk, latent", CASES)
def test_values_and_gradients(rows, chunk, latent):
    args = operands(rows, latent)
    value, terms, grads = with_grads(args, chunk=chunk)
    live = args[-1] > 0
    for got, want in zip((terms.ce, terms.l1, terms.match), loops(args)):
        np.testing.assert_allclose(np.asarray(got)[live], want[live], rtol=1e-5, atol=1e-5)
    want_ce, want_l1, _ = loops(args)
    assert value == pytest.approx((args[-1] * (CE * want_ce + L1 * want_l1)).sum(), rel=1e-5)
    want = with_grads(args)
    assert value == pytest.approx(float(want[0]), rel=1e-6)
    for got, expected in zip(grads, want[2]):
        if expected is None:
            assert got is None
        else:
            assert got.dtype == expected.dtype
            close(got, expected, 1e-5)
    np.testing.assert_array_equal(np.asarray(grads[0])[~live], 0)


def test_without_gradients_the_values_are_the_same():
    args, chunk = operands(7), 12
    value, terms, _ = with_grads(args, chunk=chunk)
    plain = jax.jit(functools.partial(vocab_loss, ce_weight=CE, l1_weight=L1, chunk=chunk))
    plain = plain(*placed(args))
    assert float(plain[0]) == pytest.approx(float(value), rel=1e-6)
    close(plain[1].l1, terms.l1, 1e-6)


@pytest.mark.parametrize("ce, l1", [(1.0, 0.0), (0.0, 1.0)])
def test_gradient_of_each_term_by_differences(ce, l1):
    """Along random directions, in float64, against the loops."""
    args = operands(3)
    value, _, grads = with_grads(args, chunk=8, ce=ce, l1=l1)

    def loss(args):
        want_ce, want_l1, _ = loops(args)
        return (args[-1] * (ce * want_ce + l1 * want_l1)).sum()

    assert float(value) == pytest.approx(loss(args), rel=1e-5)
    rng = np.random.default_rng(1)
    for index, grad in enumerate(grads):
        for _ in range(3):
            direction = rng.standard_normal(grad.shape)
            moved = [[np.asarray(x, np.float64) for x in args] for _ in range(2)]
            for sign, values in zip((1, -1), moved):
                values[index] = values[index] + sign * 1e-6 * direction
                values[5] = args[5]
            slope = (loss(moved[0]) - loss(moved[1])) / 2e-6
            assert float((np.asarray(grad) * direction).sum()) == pytest.approx(slope, rel=2e-4)


def test_bfloat16_stays_near_float32():
    """Operands rounded, logits and softmax in float32: within what rounding d_z once costs."""
    for latent in (True, False):
        args = operands(7, latent, jnp.bfloat16)
        value, terms, grads = with_grads(args, chunk=12)
        exact = [x if x is None else np.asarray(x, np.float32) for x in args]
        exact[5] = args[5]
        want = with_grads(tuple(exact))
        assert float(value) == pytest.approx(float(want[0]), rel=1e-4)
        live = args[-1] > 0
        np.testing.assert_allclose(
            np.asarray(terms.l1)[live], np.asarray(want[1].l1)[live], atol=1e-4
        )
        assert grads[0].dtype == jnp.bfloat16
        for got, expected in zip(grads, want[2]):
            if expected is not None:
                close(got, expected, 2e-2)
    assert grads[1] is grads[2] is None


def test_upstream_gradient_scales_and_terms_have_none():
    args = placed(operands(7))

    def loss(hidden, factor):
        value, terms = vocab_loss(hidden, *args[1:], ce_weight=CE, l1_weight=L1, chunk=12)
        return factor * value + jnp.sum(terms.ce + terms.l1)

    grad = jax.jit(jax.grad(loss))
    want = -2 * np.asarray(with_grads(operands(7), chunk=12)[2][0])
    close(grad(args[0], -2.0), want, 1e-5)
    np.testing.assert_array_equal(grad(args[0], 0.0), 0)


def test_rows_of_weight_zero_have_no_influence():
    """Whatever they hold: NaN, infinities, ids outside the vocabulary (R044)."""
    args = operands(7)
    dead = args[-1] == 0
    assert 3 < dead.sum() < dead.size - 3

    def fill(value, label):
        hidden, latent, w2, head, teacher, labels, weights = (np.array(x) for x in args)
        hidden[dead] = latent[dead] = teacher[dead] = value
        labels[dead] = label
        return hidden, latent, w2, head, teacher, labels, weights

    clean = with_grads(fill(0.0, 0), chunk=12)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))
    for value, label in ((np.nan, -100), (np.inf, VOCAB), (-np.inf, -1), (1e30, 10**9)):
        spoiled = with_grads(fill(value, label), chunk=12)
        for got, want in zip(jax.tree.leaves(spoiled), jax.tree.leaves(clean)):
            np.testing.assert_array_equal(got, want)
    # A live row does have one.
    assert with_grads((args[0] + 0.1, *args[1:]), chunk=12)[0] != clean[0]


@pytest.mark.parametrize("index", [0, 1, 2, 4])
def test_a_live_row_that_is_not_finite_shows(index):
    """Not even a NaN of the teacher, which only enters comparisons, may look like a small loss."""
    args = operands(7)
    b, n = np.argwhere(args[-1] > 0)[3]
    spoiled = [x.copy() for x in args]
    spoiled[index][(b, n, 2) if index != 2 else (5, 1)] = np.nan
    value, terms, _ = with_grads(tuple(spoiled), chunk=12)
    assert np.isnan(value) and np.isnan(terms.l1[b, n])
    if index != 2:
        assert np.isfinite(np.delete(np.asarray(terms.l1).ravel(), b * 7 + n)).all()


def test_nothing_live_is_zero():
    args = (*operands(7)[:-1], np.zeros((BATCH, 7), np.float32))
    value, _, grads = with_grads(args, chunk=12)
    assert value == 0 and not any(np.asarray(g).any() for g in grads)


def test_logits_of_all_rows_never_exist():
    """No array of B x N x V in the program; the reference has it."""
    args = operands(32)

    def largest(chunk) -> int:
        sizes = []

        def visit(part):
            part = getattr(part, "jaxpr", part)  # closed or open
            for equation in getattr(part, "eqns", ()):
                sizes.extend(math.prod(v.aval.shape) for v in equation.outvars)
                for inner in equation.params.values():
                    visit(inner)

        given = placed(args) if chunk else args
        visit(jax.make_jaxpr(lambda args: _with_grads(args, chunk, CE, L1))(given))
        return max(sizes)

    assert largest(None) >= BATCH * 32 * VOCAB
    assert largest(16) <= BATCH * 32 * HIDDEN


@pytest.mark.parametrize("latent", [True, False])
def test_sharding_does_not_matter(latent):
    """Batch over fsdp, vocabulary over tp: the same numbers, and gradients placed like operands."""
    args = operands(7, latent)
    want = with_grads(args, chunk=12)
    with jax.set_mesh(make_mesh(4, 2)):
        got = with_grads(args, chunk=12)
        for grad, operand in zip(got[2], placed(args)):
            if operand is not None:
                assert grad.sharding.is_equivalent_to(operand.sharding, grad.ndim)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        close(x, y, 1e-6)
