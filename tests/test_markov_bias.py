"""The Markov bias kernels: values, gradients, ragged tiles and shardings.

pytest tests/test_markov_bias.py (and test_markov_bias_compiles.py: what the compilers say)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dspark_jax.core.sharding import make_mesh
from dspark_jax.kernels import markov_bias as op

F32, BF16 = jnp.float32, jnp.bfloat16

# Leading dims, V, Vt, R, dtype. One row; odd vocabularies; two tiles of rows, the second ragged;
# three tiles of V, the last ragged; ranks below 128 (W2 is read transposed) and from there.
CASES = [
    ((1,), 15, 15, 4, F32),
    ((3, 5), 300, 320, 128, F32),
    ((3, 5), 300, 320, 64, BF16),
    ((530,), 130, 37, 96, F32),
    ((7,), 4500, 64, 256, BF16),
]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[:4]}")


def make(lead, v, vt, r, dtype=F32, w2_dtype=None):
    """logits, prev, w1, w2 and a cotangent; ids repeat and leave the vocabulary on both sides."""
    rng = np.random.default_rng(0)
    logits, w1, g = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((*lead, v), (vt, r), (*lead, v))
    )
    prev = jnp.asarray(rng.integers(-2, vt + 2, lead), jnp.int32)
    return logits, prev, w1, jnp.asarray(rng.standard_normal((v, r)), w2_dtype or dtype), g


def close(got, want, dtype=F32):
    """Within what rounding the result once allows; `want` was computed in float32."""
    got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
    assert got.shape == want.shape
    tolerance = 1e-5 if dtype == F32 else 2.0**-8
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@functools.partial(jax.jit, static_argnums=0)
def value_and_grads(fn, prev, g, *args):
    value, vjp = jax.vjp(lambda logits, *weights: fn(logits, prev, *weights), *args)
    return value, *vjp(g)


def run(implementation):
    return functools.partial(op.markov_bias, implementation=implementation)


def flat_operands(logits, prev, w1, w2):
    return logits.reshape(-1, logits.shape[-1]), jnp.clip(prev.ravel(), 0, len(w1) - 1), w1, w2


def test_reference_is_the_formula():
    logits, prev, w1, w2, _ = make((2, 3), 11, 7, 5)
    rows = np.asarray(w1, np.float64)[np.clip(prev, 0, 6)]
    want = np.asarray(logits, np.float64) + np.einsum("abr,vr->abv", rows, w2)
    close(op.markov_bias_reference(logits, prev, w1, w2), want)
    close(op.latent_bias_reference(logits, rows.astype(np.float32), w2), want)


@each_case
def test_markov_value_and_gradients(case):
    logits, prev, w1, w2, g = make(*case)
    upcast = [x.astype(F32) for x in (g, logits, w1, w2)]
    want = value_and_grads(op.markov_bias_reference, prev, *upcast)
    for a, b in zip(value_and_grads(run("interpret"), prev, g, logits, w1, w2), want):
        assert a.dtype == case[-1]
        close(a, b, a.dtype)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
def test_latent_value_and_gradients(dtype):
    logits, prev, w1, w2, g = make((3, 5), 300, 320, 64, dtype)
    latent = op._rows(w1, prev)
    upcast = [x.astype(F32) for x in (logits, latent, w2)]
    want, vjp = jax.vjp(op.latent_bias_reference, *upcast)
    want = (want, *vjp(g.astype(F32)))
    fn = functools.partial(op.latent_bias, implementation="interpret")
    got, vjp = jax.vjp(fn, logits, latent, w2)
    for a, b in zip((got, *vjp(g)), want):
        assert a.dtype == dtype
        close(a, b, dtype)


def test_float32_table_beside_bfloat16_products():
    logits, prev, w1, w2, g = make((6,), 300, 320, 128, F32, w2_dtype=BF16)
    rounded = w1.astype(BF16).astype(F32)
    want = op.markov_bias_reference(logits, prev, rounded, w2.astype(F32))
    _, d_logits, d_w1, d_w2 = value_and_grads(run("interpret"), prev, g, logits, w1, w2)
    close(op.markov_bias(logits, prev, w1, w2, implementation="interpret"), want)
    assert (d_logits.dtype, d_w1.dtype, d_w2.dtype) == (F32, F32, BF16)


@each_case
def test_triton_body(case):
    operands = flat_operands(*make(*case)[:4])
    want = op.markov_bias_reference(*(x.astype(F32) if x.ndim > 1 else x for x in operands))
    close(op._triton(*operands, interpret=True), want, case[-1])


class Pointer:
    """An array as a Triton kernel has it: only the masks of the kernel keep it inside."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = np.array(array), array.shape, array.dtype
        self.at = self

    def __getitem__(self, index):
        return self.array, np.broadcast_arrays(*index) if isinstance(index, tuple) else [index]


def inside(at, mask):
    array, index = at
    index = tuple(np.asarray(i)[np.asarray(mask)] for i in index)
    assert all((i >= 0).all() and (i < size).all() for i, size in zip(index, array.shape))
    return array, index


def load(at, *, mask, other):
    array, index = inside(at, mask)
    values = np.full(mask.shape, other, array.dtype)
    values[np.asarray(mask)] = array[index]
    return jnp.asarray(values)


def store(at, values, *, mask):
    array, index = inside(at, mask)
    array[index] = np.asarray(values)[np.asarray(mask)]


def test_triton_masks_keep_every_access_inside(monkeypatch):
    """On a GPU what goes past the end of a row lands in the next one; the interpreter forgives."""
    operands = flat_operands(*make((20,), 35, 30, 20)[:4])
    refs = [Pointer(x) for x in (*operands, jnp.full_like(operands[0], jnp.nan))]
    monkeypatch.setattr(op.plgpu, "load", load)
    monkeypatch.setattr(op.plgpu, "store", store)
    for tile in np.ndindex(2, 3):
        monkeypatch.setattr(op.pl, "program_id", lambda axis, tile=tile: tile[axis])
        with jax.disable_jit():
            op._triton_kernel(*refs, block_n=16, block_v=16, block_r=16)
    close(refs[-1].array, op.markov_bias_reference(*operands))


def test_mosaic_body_reads_nothing_that_was_not_written():
    """The TPU interpreter fills fresh memory with NaN, bounds accesses and looks for races."""
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    # A large rank makes the tiles small, here 32 x 128: two by two, ragged both ways.
    operands = flat_operands(*make((40,), 130, 37, 4096, BF16)[:4])
    want = op.markov_bias_reference(*operands)
    close(op._mosaic(*operands, interpret=params), want, BF16)
    rows = (operands[0], None, op._rows(operands[2], operands[1]), operands[3])
    close(op._mosaic(*rows, interpret=params), want, BF16)


@pytest.mark.parametrize("implementation", ["interpret", "xla"])
def test_other_rows_of_the_table_do_not_leak(implementation):
    logits, _, w1, w2, _ = make((4,), 40, 37, 8)
    prev = jnp.array([0, 9, 30, 36])
    poisoned = jnp.full_like(w1, jnp.nan).at[prev].set(w1[prev])
    got = op.markov_bias(logits, prev, poisoned, w2, implementation=implementation)
    close(got, op.markov_bias_reference(logits, prev, w1, w2))


def test_kernel_is_used_and_follows_prev():
    logits, prev, w1, w2, _ = make((4,), 300, 320, 64)
    prev = jnp.clip(prev, 0, 300)
    assert "pallas_call" in str(jax.make_jaxpr(run("interpret"))(logits, prev, w1, w2))
    assert "pallas_call" not in str(jax.make_jaxpr(run("xla"))(logits, prev, w1, w2))
    before, after = (run("interpret")(logits, p, w1, w2) for p in (prev, prev.at[2].add(1)))
    changed = np.abs(np.asarray(after - before)).max(axis=1) > 0.1
    np.testing.assert_array_equal(changed, [False, False, True, False])


def test_differentiable_inside_scan():
    """Greedy drafting: each slot's bias depends on the token the slot before chose."""
    base, _, w1, w2, _ = make((5, 4), 130, 130, 16)  # [slots, B, V]

    def draft(fn, w1, w2):
        def slot(prev, logits):
            logits = fn(logits, prev, w1, w2)
            return jnp.argmax(logits, -1), (jnp.argmax(logits, -1), jax.nn.logsumexp(logits, -1))

        _, (tokens, scores) = jax.lax.scan(slot, jnp.array([0, 7, 9, 9]), base)
        return scores.sum(), tokens

    step = jax.value_and_grad(draft, argnums=(1, 2), has_aux=True)
    (got, tokens), grads = jax.jit(step, static_argnums=0)(run("interpret"), w1, w2)
    (want, want_tokens), want_grads = step(op.markov_bias_reference, w1, w2)
    np.testing.assert_array_equal(tokens, want_tokens)
    assert len(np.unique(tokens)) > 4  # the chain moves: a constant prev would pass otherwise
    close(got, want)
    jax.tree.map(close, grads, want_grads)


def place(x, *spec):
    return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), P(*spec)))


@pytest.mark.parametrize(
    "mesh, w1_spec, implementation",
    [
        ((4, 2), (None, None), "interpret"),
        ((4, 2), (None, "fsdp"), "interpret"),
        ((4, 2), (None, "tp"), "xla"),
        ((4, 2), ("tp", None), "xla"),
        ((1, 1), (None, None), "interpret"),
    ],
)
def test_sharded_equals_unsharded(mesh, w1_spec, implementation):
    # bfloat16 shows where partial sums are rounded before devices add them up.
    dtype = BF16 if w1_spec == (None, "fsdp") else F32
    logits, prev, w1, w2, g = make((8, 3), 300, 320, 64, dtype)  # 150 of V a device: ragged
    upcast = [x.astype(F32) for x in (g, logits, w1, w2)]
    want = value_and_grads(op.markov_bias_reference, prev, *upcast)
    with jax.set_mesh(make_mesh(*mesh)):
        args = (
            place(prev, "fsdp", None),
            place(g, "fsdp", None, "tp"),
            place(logits, "fsdp", None, "tp"),
            place(w1, *w1_spec),
            place(w2, "tp", None),
        )
        fn = run(implementation)
        got, *grads = value_and_grads(fn, *args)
        for a, b in zip((got, *grads), want):
            close(a, b, dtype)
        for a, b in zip((got, *grads), (args[2], *args[2:])):
            assert jax.typeof(a).sharding.spec == jax.typeof(b).sharding.spec
        eager = op.markov_bias(args[2], args[0], *args[3:], implementation=implementation)
        close(eager, want[0], dtype)
        if w1_spec == (None, "fsdp") and mesh == (4, 2):
            hlo = value_and_grads.lower(fn, *args).compile().as_text()
            gathered = [x for x in hlo.splitlines() if "all-gather" in x and "[320,64]" in x]
            assert not gathered and "all-to-all" in hlo  # rows move, the table stays


def test_sharded_latents():
    logits, prev, w1, w2, g = make((8, 3), 300, 320, 64)
    latent = op._rows(w1, prev)
    want, vjp = jax.vjp(op.latent_bias_reference, logits, latent, w2)
    with jax.set_mesh(make_mesh(4, 2)):
        args = place(logits, "fsdp", None, "tp"), place(latent, "fsdp"), place(w2, "tp", "fsdp")
        fn = functools.partial(op.latent_bias, implementation="interpret")
        got, sharded_vjp = jax.vjp(jax.jit(fn), *args)
        close(got, want)
        for a, b, x in zip(sharded_vjp(place(g, "fsdp", None, "tp")), vjp(g), args):
            close(a, b)
            assert jax.typeof(a).sharding.spec == jax.typeof(x).sharding.spec


def test_odd_vocabulary_under_tensor_parallelism():
    """V = 15 over two devices: whole, or padded with -inf logits that stay -inf."""
    logits, prev, w1, w2, _ = make((4,), 15, 15, 4)
    want = op.markov_bias_reference(logits, prev, w1, w2)
    with jax.set_mesh(make_mesh(1, 2)):
        whole = op.markov_bias(place(logits, "fsdp"), prev, w1, w2, implementation="interpret")
        close(whole, want)
        padded = jnp.pad(logits, ((0, 0), (0, 1)), constant_values=-jnp.inf)
        w2 = jnp.pad(w2, ((0, 1), (0, 0)))
        got = jax.jit(run("interpret"))(
            place(padded, "fsdp", "tp"), place(prev, "fsdp"), place(w1), place(w2, "tp", None)
        )
        close(np.asarray(got)[:, :15], want)
        assert np.all(np.asarray(got)[:, 15] == -np.inf)


def test_ids_repeated_often_are_summed_in_float32():
    """bfloat16 cannot count beyond 256 by ones; the gradient of a table row has to."""
    n, v, r = 1000, 8, 4
    args = jnp.zeros((n, v), BF16), jnp.ones((5, r), BF16), jnp.ones((v, r), BF16)
    prev = jnp.full((n,), 3)
    fn, g = run("interpret"), jnp.ones((n, v), BF16)
    want = np.zeros((5, r)) + 8000 * np.eye(5)[3][:, None]
    np.testing.assert_array_equal(np.float32(value_and_grads(fn, prev, g, *args)[2]), want)
    with jax.set_mesh(make_mesh(4, 2)):
        for w1_spec in ((None, None), (None, "fsdp")):
            prev, g = place(prev, "fsdp"), place(g, "fsdp", "tp")
            args = place(args[0], "fsdp", "tp"), place(args[1], *w1_spec), place(args[2], "tp")
            got = value_and_grads(fn, prev, g, *args)
            np.testing.assert_array_equal(np.float32(got[2]), want)


def test_what_is_not_supported_is_said(monkeypatch):
    logits, prev, w1, w2, _ = make((4,), 30, 30, 8, jnp.float16)
    for name in ("mosaic_tpu", "triton", "interpret"):
        with pytest.raises(NotImplementedError, match="float16"):
            op.markov_bias(logits, prev, w1, w2, implementation=name)
    wide = make((2,), 3, 3, 5000)[:4]
    with pytest.raises(NotImplementedError, match="rank 5000"):
        op.markov_bias(*wide, implementation="interpret")
    with (
        jax.set_mesh(jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))),
        pytest.raises(NotImplementedError, match="explicit"),
    ):
        op.markov_bias(*make((4,), 30, 30, 8)[:4], implementation="interpret")
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")  # None falls back, and runs here
    want = op.markov_bias_reference(logits, prev, w1, w2)
    np.testing.assert_array_equal(op.markov_bias(logits, prev, w1, w2), want)
    with pytest.raises(ValueError, match="leading shape"):
        op.markov_bias(logits, prev[:2], w1, w2)
    with pytest.raises(ValueError, match=r"not \[V, R\]"):
        op.markov_bias(logits, prev, w1, w2.T)
    with pytest.raises(ValueError, match="none of"):
        op.markov_bias(logits, prev, w1, w2, implementation="pallas")


@pytest.mark.parametrize(
    "backend, name", [("tpu", "mosaic_tpu"), ("gpu", "triton"), ("cpu", "xla")]
)
def test_default_follows_the_backend(monkeypatch, backend, name):
    logits, _, w1, w2, _ = make((4,), 30, 30, 8)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert op.choose(None, logits, w1, w2) == name


@pytest.mark.accelerator
@pytest.mark.skipif(jax.default_backend() == "cpu", reason="needs a TPU or GPU")
@pytest.mark.parametrize("case", [*CASES, ((512,), 49152, 49152, 64, BF16)])
def test_on_the_chip(case):
    logits, prev, w1, w2, g = make(*case)
    upcast = [x.astype(F32) for x in (g, logits, w1, w2)]
    want = value_and_grads(op.markov_bias_reference, prev, *upcast)
    got = value_and_grads(run(None), prev, g, logits, w1, w2)
    assert "pallas_call" in str(jax.make_jaxpr(op.markov_bias)(logits, prev, w1, w2))
    for a, b in zip(got, want):
        close(a, b, a.dtype)
