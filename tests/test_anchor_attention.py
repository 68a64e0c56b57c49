"""The attention of the drafter's blocks: against loops, what may influence what, meshes, size.

pytest tests/test_anchor_attention.py
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import jaxprs_in_params
from reference import softmax

from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.kernels import anchor_attention as op
from dspark_jax.kernels import anchor_groups
from dspark_jax.kernels.anchor_groups import listed, meetings

F32, BF16 = jnp.float32, jnp.bfloat16
NAMES = ("q", "context_k", "context_v", "k", "v")
IMPLEMENTATIONS = ["xla", "interpret", "triton"]
SLOW = [
    "xla",
    pytest.param("interpret", marks=pytest.mark.slow),
    pytest.param("triton", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """So that few positions are many tiles, and few blocks many groups. Triton is interpreted."""
    for module, prefix in ((op, "_"), (anchor_groups, "_TPU_"), (anchor_groups, "_GPU_")):
        monkeypatch.setattr(module, f"{prefix}ROWS", 24)
        monkeypatch.setattr(module, f"{prefix}KEYS", 16)
    interpreted = functools.partial(pl.pallas_call, interpret=True)
    monkeypatch.setattr(
        op.gpu, "pl", types.SimpleNamespace(**vars(pl) | {"pallas_call": interpreted})
    )


def documents_at(anchors, lengths):
    """first and stop of anchors in a row of documents of these lengths."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    first = starts[np.searchsorted(starts, anchors, side="right") - 1]
    return first, np.asarray(anchors)


# Anchors of two rows: three documents and padding, blocks at their first and last tokens, two that
# are not filled; and one document over all of the row.
ROWS = [
    ([0, 5, 6, 17, 18, 30, 31], [18, 13, 6], 2),
    ([1, 2, 15, 16, 17, 33, 40, 43, 44], [45], 0),
]


def bounds():
    first, stop = [], []
    for anchors, lengths, unfilled in ROWS:
        a, b = documents_at(anchors, lengths)
        first.append(np.concatenate([a, [0] * unfilled]))
        stop.append(np.concatenate([b, [-1] * unfilled]))
    return np.array(first, np.int32), np.array(stop, np.int32)


def operands(block=3, queries=2, dim=8, size=45, dtype=np.float32, seed=0):
    """Arrays of two rows with two key heads, and a weight of the output."""
    rng = np.random.default_rng(seed)
    first, stop = bounds()
    slots = block * first.shape[1]
    shapes = [
        (2, 2, queries, slots, dim), (2, 2, dim, size), (2, 2, size, dim), (2, 2, dim, slots),
        (2, 2, slots, dim), (2, 2, queries, slots, dim),
    ]  # fmt: skip
    *arrays, weight = (jnp.asarray(rng.standard_normal(s), dtype) for s in shapes)
    return arrays, (jnp.asarray(first), jnp.asarray(stop)), weight


@functools.partial(jax.jit, static_argnames="implementation")
def _run(arrays, limits, weight, implementation):
    def loss(*arrays):
        out = op.anchor_attention(*arrays, *limits, implementation=implementation)
        return jnp.sum(out.astype(F32) * weight.astype(F32)), out

    (_, out), grads = jax.value_and_grad(loss, range(5), has_aux=True)(*arrays)
    return out, *grads


def value_and_grads(arrays, limits, weight, implementation):
    """The output, and the gradients of a weighed sum of it, in float64."""
    arrays = _run(tuple(arrays), tuple(limits), weight, implementation)
    return [np.asarray(x, np.float64) for x in arrays]


def loops(arrays, first, stop):
    """The output, slot by slot."""
    q, context_k, context_v, k, v = (np.asarray(x, np.float64) for x in arrays)
    block, out = q.shape[3] // first.shape[1], np.zeros(q.shape)
    for b, h, member, slot in np.ndindex(q.shape[:4]):
        low, high = int(first[b, slot // block]), int(stop[b, slot // block])
        if high < low:
            continue
        own = slice(slot // block * block, slot // block * block + block)
        keys = np.concatenate([context_k[b, h, :, low:high].T, k[b, h, :, own].T])
        values = np.concatenate([context_v[b, h, low:high], v[b, h, own]])
        scores = keys @ q[b, h, member, slot] / np.sqrt(q.shape[-1])
        out[b, h, member, slot] = softmax(scores) @ values
    return out


def close(got, want, tolerance):
    for name, a, b in zip(("out", *NAMES), got, want, strict=True):
        assert a.shape == b.shape and np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), err_msg=name)


CASES = {
    "grouped": {},
    "one slot, one query": {"block": 1, "queries": 1},
    "wide": {"block": 7, "queries": 5, "dim": 16},
    "longer context": {"size": 70},
}


@functools.cache
def dense(case):
    return value_and_grads(*operands(**CASES[case]), "dense")


@pytest.mark.parametrize("case", CASES)
def test_the_plain_form_matches_the_loops(case):
    arrays, limits, _ = operands(**CASES[case])
    np.testing.assert_allclose(dense(case)[0], loops(arrays, *limits), atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradients(implementation):
    close(value_and_grads(*operands(), implementation), dense("grouped"), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(CASES)[1:])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradients_of_other_sizes(case, implementation):
    close(value_and_grads(*operands(**CASES[case]), implementation), dense(case), 2e-6)


@pytest.mark.parametrize("implementation", SLOW)
def test_bfloat16(implementation):
    """Rounded operands; softmax and sums are in float32."""
    arrays, limits, weight = operands(dtype=BF16)
    exact = value_and_grads([x.astype(F32) for x in arrays], limits, weight, "dense")
    close(value_and_grads(arrays, limits, weight, implementation), exact, 2e-2)


@pytest.mark.parametrize("scale", [(300.0, 1.0), (1.0, 300.0)])
@pytest.mark.parametrize("implementation", ["dense", *SLOW])
def test_one_softmax_over_context_and_block(scale, implementation):
    """Also when the scores of one side dwarf the other's."""
    (q, context_k, context_v, k, v), limits, weight = operands()
    arrays = (q, context_k * scale[0], context_v, k * scale[1], v)
    got = value_and_grads(arrays, limits, weight, implementation)
    np.testing.assert_allclose(got[0], loops(arrays, *limits), atol=1e-4)
    assert all(np.isfinite(x).all() for x in got)


@pytest.mark.parametrize("implementation", ["dense", *SLOW])
def test_what_a_block_does_not_see_has_no_influence(implementation):
    """Context from its anchor on, other documents, other blocks, padding with NaN; and the rest
    has."""
    (q, *rest), limits, weight = operands()
    first, stop = (np.asarray(x) for x in limits)
    want = value_and_grads((q, *rest), limits, weight, implementation)
    nowhere = np.ones((2, 45), bool)
    for b in range(2):
        for low, high in zip(first[b], stop[b]):
            nowhere[b, low : max(low, high)] = False
    assert nowhere.any(1).all()

    def spoilt(x, axis, where, by):
        shape = [2, 1, 1, 1]
        shape[axis] = -1
        return jnp.where(where.reshape(shape), by, x)

    context_k, context_v, k, v = rest
    unseen = spoilt(context_k, 3, nowhere, np.nan), spoilt(context_v, 2, nowhere, np.nan)
    got = value_and_grads((q, *unseen, k, v), limits, weight, implementation)
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)
    for grad, axis in ((got[2], 3), (got[3], 2)):  # and is sent no gradient
        shape = [2, 1, 1, 1]
        shape[axis] = 45
        assert not (grad * nowhere.reshape(shape)).any()

    for block in range(9):
        low, high = first[:, block, None], stop[:, block, None]
        position, slot = np.arange(45), np.arange(27) // 3
        outside = (position < low) | (position >= high)
        others = np.broadcast_to(slot != block, (2, 27))
        changed = (
            q, spoilt(context_k, 3, outside, 1e4), spoilt(context_v, 2, outside, 1e4),
            spoilt(k, 3, others, 1e4), spoilt(v, 2, others, 1e4),
        )  # fmt: skip
        out = value_and_grads(changed, limits, weight, implementation)[0]
        own = slice(3 * block, 3 * block + 3)
        np.testing.assert_array_equal(out[..., own, :], want[0][..., own, :])

    # Every position and slot that is seen counts.
    for index, axis, seen in ((1, 3, ~nowhere), (2, 2, ~nowhere)):
        grad = np.moveaxis(want[index + 1], axis, 1).any((2, 3))
        np.testing.assert_array_equal(grad, seen)
    filled = np.repeat(stop >= first, 3, axis=1)
    for index, axis in ((3, 3), (4, 2)):
        np.testing.assert_array_equal(np.moveaxis(want[index + 1], axis, 1).any((2, 3)), filled)
    unfilled = ~filled[:, None, None, :, None] & np.ones_like(want[0], bool)
    assert unfilled.any() and not want[0][unfilled].any() and not want[1][unfilled].any()


@pytest.mark.parametrize("implementation", SLOW)
def test_no_order_of_blocks_is_needed(implementation):
    arrays, limits, weight = operands()
    order = np.random.default_rng(0).permutation(9)
    slots = (3 * order[:, None] + np.arange(3)).ravel()
    q, context_k, context_v, k, v = arrays
    mixed = (q[..., slots, :], context_k, context_v, k[..., slots], v[..., slots, :])
    limits_mixed = tuple(x[:, order] for x in limits)
    got = value_and_grads(mixed, limits_mixed, weight[..., slots, :], implementation)
    want = value_and_grads(arrays, limits, weight, implementation)
    np.testing.assert_allclose(got[0], want[0][..., slots, :], atol=1e-6)
    np.testing.assert_allclose(got[2], want[2], atol=1e-5)


@pytest.mark.parametrize("implementation", SLOW)
def test_a_mesh_changes_nothing(implementation):
    """Rows over one axis, heads over the other; each device walks through tiles of its own."""
    want = value_and_grads(*operands(), implementation)
    with jax.set_mesh(make_mesh(2, 2)):
        arrays, limits, weight = operands()
        arrays = [place(x, "batch", "heads", *[None] * (x.ndim - 2)) for x in arrays]
        limits = [place(x, "batch", None) for x in limits]
        weight = place(weight, "batch", "heads", None, None, None)
        out = jax.eval_shape(lambda *x: op.anchor_attention(*x), *arrays, *limits)
        assert out.sharding.spec[:2] == ("fsdp", "tp")
        got = value_and_grads(arrays, limits, weight, implementation)
    close(got, want, 1e-6)


def test_only_tiles_that_are_seen_are_visited():
    """Pairs of group and tile, counted by hand for groups of 2 and tiles of 16."""
    first = jnp.asarray([[0, 0, 20, 20, 40, 0]])
    stop = jnp.asarray([[3, 16, 20, 37, 41, -1]])
    chosen = meetings(first.reshape(1, 3, 2), stop.reshape(1, 3, 2), 16, 4)
    np.testing.assert_array_equal(chosen[0].astype(int), [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 1, 0]])
    items, total = listed(chosen)
    assert items[:total].tolist() == [0, 5, 6, 10] and (np.asarray(items[4:]) == -1).all()


@pytest.mark.parametrize("implementation", SLOW[:2])
def test_no_scores_of_all_the_context_exist(implementation, monkeypatch):
    """512 anchors, 7 slots and 2,048 positions: nothing in the compiled program, forward and back,
    is as large as the scores of one head; the plain form has several of these."""
    monkeypatch.undo()  # tiles of their real size
    anchors, block, size, queries = 512, 7, 2048, 2
    slots = anchors * block
    shapes = [
        (1, 1, queries, slots, 64), (1, 1, 64, size), (1, 1, size, 64), (1, 1, 64, slots),
        (1, 1, slots, 64),
    ]  # fmt: skip
    arrays = [jax.ShapeDtypeStruct(s, F32) for s in shapes]
    limits = [jax.ShapeDtypeStruct((1, anchors), jnp.int32)] * 2

    def temporary_bytes(implementation):
        def loss(*x):
            return op.anchor_attention(*x, implementation=implementation).sum()

        grad = jax.jit(jax.grad(loss, range(5)))
        largest = max(largest_array(jax.make_jaxpr(grad)(*arrays, *limits).jaxpr))
        compiled = grad.lower(*arrays, *limits).compile()
        return compiled.memory_analysis().temp_size_in_bytes, largest

    scores = 4 * slots * size
    used, largest = temporary_bytes(implementation)
    assert largest < slots * size / 4 and used < scores
    used, largest = temporary_bytes("dense")
    assert largest >= queries * slots * size and used > 2 * scores


def largest_array(jaxpr):
    """Numbers of elements of all arrays in a program, those of its loops too."""
    for equation in jaxpr.eqns:
        yield from (x.aval.size for x in equation.outvars if hasattr(x.aval, "size"))
        for inner in jaxprs_in_params(equation.params):
            yield from largest_array(inner)


def test_operands_that_do_not_fit_are_refused():
    (q, context_k, context_v, k, v), (first, stop), _ = operands()
    for wrong, name in (
        ((q, context_k[:1], context_v, k, v, first, stop), "context_k"),
        ((q, context_k, context_v, k, v[:, :, 1:], first, stop), "v "),
        ((q, context_k, context_v, k, v, first, stop[:, 1:]), "stop"),
        ((q, context_k, context_v, k, v, first[:, :5], stop[:, :5]), "no 5 blocks"),
    ):
        with pytest.raises(ValueError, match=name):
            op.anchor_attention(*wrong)
    with pytest.raises(ValueError, match="'triton2' is none of"):
        op.anchor_attention(q, context_k, context_v, k, v, first, stop, implementation="triton2")
