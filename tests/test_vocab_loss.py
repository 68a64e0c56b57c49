"""The chunked loss over the vocabulary, whole and pruned: values, gradients, meshes.

pytest tests/test_vocab_loss.py
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import softmax

from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.kernels.vocab_loss import Teacher, vocab_loss, vocab_loss_reference

BATCH, HIDDEN, RANK, VOCAB = 4, 16, 8, 40
CE, L1, KL = 0.1, 0.9, 0.3
KEPT = np.array([0, 2, 3, 7, 8, 9, 13, 17, 21, 22, 28, 30, 31, 36, 38, 39])  # a pruned vocabulary
VOCABULARIES = pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "pruned"])


@pytest.fixture(autouse=True, scope="module")
def mesh():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


def operands(rows: int, latent: bool = True, dtype=jnp.float32, kept=None, seed=0, cap=0.0):
    """hidden, latent, w2, head, teacher, labels, weights; one in four weights is 0.

    Every other row is near its teacher. With ids `kept` of a pruned vocabulary, one in four labels
    is outside of it. `cap` is that of the target's logits.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    weights = rng.uniform(0.1, 1.0, (BATCH, rows)) * (rng.random((BATCH, rows)) < 0.75)
    noise = np.where(np.arange(rows)[:, None] % 2, 1, 0.3).astype(np.float32)
    taught = normal(BATCH, rows, HIDDEN)
    args = [
        ((noise < 1) * taught + noise * normal(BATCH, rows, HIDDEN)).astype(dtype),
        noise * normal(BATCH, rows, RANK) if latent else None,
        normal(VOCAB, RANK) if latent else None,
        whole_head(dtype),
        Teacher(taught.astype(dtype)),
        rng.integers(0, VOCAB, (BATCH, rows)).astype(np.int32),
        weights.astype(np.float32),
    ]
    if kept is not None:
        logits = capped(as_float(args[4].hidden) @ as_float(args[3]).T, cap)
        to_draft = np.full(VOCAB, -1, np.int32)
        to_draft[kept] = np.arange(len(kept))
        lse = np.log(np.exp(logits).sum(-1)).astype(np.float32)
        args[4] = Teacher(args[4].hidden, lse, to_draft[logits.argmax(-1)])
        args[5] = np.where(rng.random((BATCH, rows)) < 0.25, -1, args[5] % len(kept))
        args[5] = args[5].astype(np.int32)
        args[2] = args[2][kept] if latent else None
        args[3] = args[3][kept]
    return tuple(args)


def whole_head(dtype=jnp.float32):
    """The target's LM head [V, D], of which `operands` takes the rows of its vocabulary."""
    noise = np.random.default_rng(99).standard_normal((VOCAB, HIDDEN))
    return (0.5 * noise).astype(np.float32).astype(dtype)


def as_float(x):
    return np.asarray(x, np.float64)


def capped(logits, cap: float):
    """What a target with this soft-cap makes of its logits; 0 = none."""
    return cap * np.tanh(logits / cap) if cap else logits


AXES = [("batch",), ("batch",), ("vocab", "embed"), ("vocab", "embed"), *[("batch",)] * 3]


def placed(args):
    """On the current mesh, as in training."""
    return tuple(
        jax.tree.map(functools.partial(lambda axes, x: place(x, *axes), axes), arg)
        for arg, axes in zip(args, AXES)
    )


def with_grads(args, chunk=None, ce=CE, l1=L1, kl=KL, renormalise=False, cap=0.0):
    """Loss, terms and gradients for hidden, latent and w2; chunk None = the plain reference."""
    args = args if chunk is None else placed(args)
    return _with_grads(args, chunk, ce, l1, kl, renormalise, cap)


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def _with_grads(args, chunk, ce, l1, kl, renormalise=False, cap=0.0):
    hidden, latent, w2, *rest = args
    options = {"ce_weight": ce, "l1_weight": l1, "kl_weight": kl}
    options |= {"renormalise": renormalise, "softcap": cap}

    def loss(trained):
        if chunk is None:
            return vocab_loss_reference(*trained, *rest, **options)
        return vocab_loss(*trained, *rest, **options, chunk=chunk)

    (value, terms), grads = jax.value_and_grad(loss, has_aux=True)((hidden, latent, w2))
    return value, terms, grads


def close(got, want, tolerance):
    """Within `tolerance` of the largest element."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@dataclasses.dataclass
class Loops:
    """Terms f64[B, N]."""

    ce: np.ndarray
    l1: np.ndarray
    kl: np.ndarray
    match: np.ndarray
    accept: np.ndarray

    def loss(self, weights, ce=CE, l1=L1, kl=KL) -> float:
        return (weights * (ce * self.ce + l1 * self.l1 + kl * self.kl)).sum()


def loops(args, kept=None, renormalise=False, cap=0.0) -> Loops:
    """Every token of the target's vocabulary by itself: what was not kept, q never gives.

    Without labels, the most probable token is the label. Renormalised, p is over what was kept;
    the acceptance never is. A cap is of both sides' logits, and not of the bias.
    """
    hidden, latent, w2, head, teacher, labels, weights = args
    hidden, head, taught = as_float(hidden), as_float(head), as_float(teacher.hidden)
    whole = as_float(whole_head())
    kept = list(range(VOCAB) if kept is None else kept)
    found = Loops(*np.zeros((5, *weights.shape)))
    for at in np.ndindex(weights.shape):
        z = capped(head @ hidden[at], cap)
        if latent is not None:
            z = z + as_float(w2) @ as_float(latent)[at]
        zt = capped(whole @ taught[at], cap)
        said, q = softmax(zt), softmax(z)
        p = said
        if renormalise:
            p = np.where(np.isin(np.arange(VOCAB), kept), said, 0) / said[kept].sum()
        for token in range(VOCAB):
            given = q[kept.index(token)] if token in kept else 0.0
            found.l1[at] += abs(given - p[token])
            found.accept[at] += min(given, said[token])
            if token in kept:
                found.kl[at] += p[token] * math.log(p[token] / given)
        best = int(p.argmax())
        own = kept.index(best) if best in kept else -1
        label = own if labels is None else int(labels[at])
        if label >= 0:
            found.ce[at] = -math.log(q[label])
        found.match[at] = kept[z.argmax()] == zt.argmax()
    return found


def check(terms, wanted: Loops, live) -> None:
    """Every term of the rows that count."""
    for name in ("ce", "l1", "kl", "match", "accept"):
        got, want = np.asarray(getattr(terms, name)), getattr(wanted, name)
        np.testing.assert_allclose(got[live], want[live], rtol=1e-5, atol=1e-5, err_msg=name)


# Rows per batch entry and chunk: one chunk, ragged last chunks, fewer chunk rows than the batch.
CASES = {
    "one chunk": (5, 256, True, None),
    "ragged": (7, 12, True, None),
    "bare": (7, 12, False, None),
    "small chunk": (3, 1, True, None),
    "pruned": (7, 12, True, KEPT),
    "pruned, bare": (3, 1, False, KEPT),
}


@pytest.mark.parametrize("rows, chunk, latent, kept", CASES.values(), ids=CASES)
def test_values_and_gradients(rows, chunk, latent, kept):
    args = operands(rows, latent, kept=kept)
    value, terms, grads = with_grads(args, chunk=chunk)
    live, wanted = args[-1] > 0, loops(args, kept)
    assert set(wanted.match[live]) == {0, 1} and wanted.accept[live].max() > 0.5
    for name in ("ce", "l1", "kl", "match"):
        got, want = np.asarray(getattr(terms, name)), getattr(wanted, name)
        np.testing.assert_allclose(got[live], want[live], rtol=1e-5, atol=1e-5, err_msg=name)
    accept = 1 - np.asarray(terms.l1) / 2
    np.testing.assert_allclose(accept[live], wanted.accept[live], atol=1e-6)
    np.testing.assert_array_equal(np.asarray(terms.accept)[live], accept[live])
    assert value == pytest.approx(wanted.loss(args[-1]), rel=1e-5)
    want = with_grads(args)
    assert value == pytest.approx(float(want[0]), rel=1e-6)
    for got, expected in zip(grads, want[2]):
        if expected is None:
            assert got is None
        else:
            assert got.dtype == expected.dtype
            close(got, expected, 1e-5)
    np.testing.assert_array_equal(np.asarray(grads[0])[~live], 0)


@pytest.mark.parametrize("cap", [0.0, 1.5], ids=["", "capped"])
@pytest.mark.parametrize(
    "kept, own_label, renormalise",
    [(None, True, True), (KEPT, True, False), (KEPT, False, True), (KEPT, True, True)],
    ids=["target's label", "pruned, target's label", "renormalised", "renormalised, its label"],
)
def test_the_target_as_label_and_renormalised(kept, own_label, renormalise, cap):
    """Against the loops, gradients against jax.grad of the plain reference."""
    args = list(operands(7, kept=kept, cap=cap))
    given = loops(args, kept, cap=cap)
    if own_label:
        args[5] = None
    value, terms, grads = with_grads(args, chunk=12, renormalise=renormalise, cap=cap)
    live, wanted = args[-1] > 0, loops(args, kept, renormalise and kept is not None, cap)
    check(terms, wanted, live)
    assert value == pytest.approx(wanted.loss(args[-1]), rel=1e-5)
    assert (wanted.ce[live] == 0).any() == (kept is not None and not (own_label and renormalise))
    for got, want in zip(grads, with_grads(args, renormalise=renormalise, cap=cap)[2]):
        close(got, want, 1e-5)
    # Each option is one: without it the terms are others. Renormalising a whole is none.
    assert (np.abs(wanted.ce - given.ce) > 1e-3)[live].any() == own_label
    assert (np.abs(wanted.l1 - given.l1) > 1e-3)[live].any() == (renormalise and kept is not None)
    np.testing.assert_array_equal(wanted.accept, given.accept)


@VOCABULARIES
def test_soft_cap(kept):
    """Both sides are capped, the bias is not: against the loops, gradients against autodiff."""
    cap = 1.5
    args = operands(7, kept=kept, cap=cap)
    value, terms, grads = with_grads(args, chunk=12, cap=cap)
    live, wanted = args[-1] > 0, loops(args, kept, cap=cap)
    check(terms, wanted, live)
    assert value == pytest.approx(wanted.loss(args[-1]), rel=1e-5)
    for got, want in zip(grads, with_grads(args, cap=cap)[2]):
        close(got, want, 1e-5)
    free = loops(args, kept)
    assert np.abs(free.l1 - wanted.l1)[live].max() > 0.1  # and it matters


def test_what_the_target_puts_outside_a_pruned_vocabulary_is_lost():
    """Half of p is on a token that cannot be drafted: no q is accepted more than 0.3 (R029)."""
    kept, p = np.array([0, 2, 5]), np.array([0.1, 0.5, 0.1, 0.1, 0.1, 0.1])
    q = np.array([[1, 1, 1], [8, 1, 1], [0.98, 0.01, 0.01]])
    q /= q.sum(-1, keepdims=True)
    hidden = np.zeros((1, 3, 6), np.float32)
    hidden[..., kept] = np.log(q)
    zt = np.broadcast_to(np.log(p) + 3.0, (1, 3, 6)).astype(np.float32)
    head, ones = np.eye(6, dtype=np.float32)[kept], np.ones((1, 3), np.float32)
    head, labels = jnp.asarray(head), np.array([[-1, 1, -1]])  # only the second can be drafted
    whole = Teacher(zt, np.full((1, 3), 3.0, np.float32), np.full((1, 3), -1, np.int32))

    def loss(hidden, teacher=whole):
        rest = (None, None, head, teacher, labels, ones)
        return vocab_loss(hidden, *rest, ce_weight=1.0, l1_weight=0.0, chunk=8)

    (value, terms), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(hidden)
    accept = 1 - np.asarray(terms.l1)[0] / 2
    np.testing.assert_allclose(accept, [0.3, 0.3, 0.12], atol=1e-6)  # sums of min(p, q) over V
    np.testing.assert_allclose(terms.ce, [[0, -math.log(0.1), 0]], rtol=1e-5)
    assert float(value) == pytest.approx(-math.log(0.1), rel=1e-5)
    assert not np.asarray(terms.match).any()  # the target's best token is not among them
    grad = np.asarray(grad)[0]
    np.testing.assert_allclose(grad[1, kept], q[1] - [0, 1, 0], atol=1e-6)
    assert not grad[::2].any()
    # Renormalised to what was kept, p would seem to be met exactly.
    _, sliced = jax.jit(loss)(hidden, Teacher(zt))
    assert np.asarray(sliced.l1)[0, 0] == pytest.approx(0, abs=1e-6)


@VOCABULARIES
def test_without_gradients_the_values_are_the_same(kept):
    args, chunk = operands(7, kept=kept), 12
    value, terms, _ = with_grads(args, chunk=chunk)
    weights = {"ce_weight": CE, "l1_weight": L1, "kl_weight": KL}
    plain = jax.jit(functools.partial(vocab_loss, **weights, chunk=chunk))(*placed(args))
    assert float(plain[0]) == pytest.approx(float(value), rel=1e-6)
    close(plain[1].l1, terms.l1, 1e-6)
    close(plain[1].kl, terms.kl, 1e-6)


@VOCABULARIES
@pytest.mark.parametrize("ce, l1, kl", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)])
def test_gradient_of_each_term_by_differences(ce, l1, kl, kept):
    """Along random directions, in float64, against the loops."""
    args = operands(3, kept=kept)
    value, _, grads = with_grads(args, 8, ce, l1, kl)

    def loss(args):
        return loops(args, kept).loss(args[-1], ce, l1, kl)

    assert float(value) == pytest.approx(loss(args), rel=1e-5, abs=1e-6)
    rng = np.random.default_rng(1)
    for index, grad in enumerate(grads):
        direction = rng.standard_normal((3, *grad.shape))
        slopes = []
        for one in direction:
            moved = [list(args), list(args)]
            for sign, values in zip((1, -1), moved):
                values[index] = as_float(args[index]) + sign * 1e-6 * one
            slopes.append((loss(moved[0]) - loss(moved[1])) / 2e-6)
        found = (np.asarray(grad) * direction).reshape(3, -1).sum(-1)
        np.testing.assert_allclose(found, slopes, rtol=2e-4)


def test_bfloat16_stays_near_float32():
    """Operands rounded, logits and softmax in float32: within what rounding d_z once costs."""
    for latent, kept in ((True, KEPT), (False, None)):
        args = operands(7, latent, jnp.bfloat16, kept)
        value, terms, grads = with_grads(args, chunk=12)
        want = with_grads(
            jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x, args)
        )
        assert float(value) == pytest.approx(float(want[0]), rel=1e-4)
        live = args[-1] > 0
        np.testing.assert_allclose(
            np.asarray(terms.l1)[live], np.asarray(want[1].l1)[live], atol=1e-4
        )
        assert grads[0].dtype == jnp.bfloat16
        for got, expected in zip(grads, want[2]):
            if expected is not None:
                close(got, expected, 2e-2)
        assert latent or grads[1] is grads[2] is None


def test_upstream_gradient_scales_and_terms_have_none():
    args = placed(operands(7))

    def loss(hidden, factor):
        weights = {"ce_weight": CE, "l1_weight": L1, "kl_weight": KL}
        value, terms = vocab_loss(hidden, *args[1:], **weights, chunk=12)
        return factor * value + jnp.sum(terms.ce + terms.l1 + terms.kl)

    grad = jax.jit(jax.grad(loss))
    want = -2 * np.asarray(with_grads(operands(7), chunk=12)[2][0])
    close(grad(args[0], -2.0), want, 1e-5)
    np.testing.assert_array_equal(grad(args[0], 0.0), 0)


@VOCABULARIES
def test_rows_of_weight_zero_have_no_influence(kept):
    """Whatever they hold: NaN, infinities, ids outside the vocabulary (R044)."""
    args = operands(7, kept=kept)
    dead = args[-1] == 0
    assert 3 < dead.sum() < dead.size - 3

    def fill(value, label):
        hidden, latent, w2, head, teacher, labels, weights = jax.tree.map(np.array, args)
        hidden[dead] = latent[dead] = teacher.hidden[dead] = value
        labels[dead] = label
        if kept is not None:
            teacher.lse[dead], teacher.best[dead] = value, label
        return hidden, latent, w2, head, teacher, labels, weights

    def counted(result):
        value, terms, grads = result
        return value, jax.tree.map(lambda x: np.where(dead, 0, x), terms), grads

    clean = with_grads(fill(0.0, 0), chunk=12)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(clean))
    for value, label in ((np.nan, -100), (np.inf, VOCAB), (-np.inf, -1), (1e30, 10**9)):
        spoiled = with_grads(fill(value, label), chunk=12)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(spoiled))
        jax.tree.map(np.testing.assert_array_equal, counted(spoiled), counted(clean))
    # A live row does have one.
    assert with_grads((args[0] + 0.1, *args[1:]), chunk=12)[0] != clean[0]


@VOCABULARIES
@pytest.mark.parametrize("index", [0, 1, 2, 4])
def test_a_live_row_that_is_not_finite_shows(index, kept):
    """Not even a NaN of the teacher, which only enters comparisons, may look like a small loss."""
    args = operands(7, kept=kept)
    b, n = np.argwhere(args[-1] > 0)[3]
    spoiled = jax.tree.map(np.array, args)
    part = spoiled[4].hidden if index == 4 else spoiled[index]
    part[(b, n, 2) if index != 2 else (5, 1)] = np.nan
    value, terms, _ = with_grads(tuple(spoiled), 12, kl=0.0)
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
        visit(jax.make_jaxpr(lambda args: _with_grads(args, chunk, CE, L1, KL))(given))
        return max(sizes)

    assert largest(None) >= BATCH * 32 * VOCAB
    assert largest(16) <= BATCH * 32 * HIDDEN
    args = (*args[:5], None, args[6])  # the target's label needs no more
    assert largest(16) <= BATCH * 32 * HIDDEN


@pytest.mark.parametrize(
    "latent, kept, theirs",
    [(True, None, False), (False, None, True), (True, KEPT, False), (True, KEPT, True)],
    ids=["whole", "bare", "pruned", "pruned, renormalised, target's label"],
)
def test_sharding_does_not_matter(latent, kept, theirs):
    """Batch over fsdp, vocabulary over tp: the same numbers, and gradients placed like operands."""
    args = list(operands(7, latent, kept=kept))
    if theirs:
        args[5] = None
    want = with_grads(args, chunk=12, renormalise=theirs)
    with jax.set_mesh(make_mesh(4, 2)):
        got = with_grads(args, chunk=12, renormalise=theirs)
        for grad, operand in zip(got[2], placed(args)):
            if operand is not None:
                assert grad.sharding.is_equivalent_to(operand.sharding, grad.ndim)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        close(x, y, 3e-6)
