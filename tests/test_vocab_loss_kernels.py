"""The kernels of the vocabulary loss: values and gradients, several tiles, ragged at the end.

pytest tests/test_vocab_loss_kernels.py (and test_vocab_loss_compiles.py: what the compilers say)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core.sharding import make_mesh, place
from dspark_jax.kernels import vocab_loss as op
from dspark_jax.kernels.vocab_loss import Teacher, vocab_loss, vocab_loss_reference
from dspark_jax.kernels.vocab_loss_chunks import chunk_shape

BATCH, ROWS, POSITIONS, HIDDEN, RANK, CHUNK = 2, 30, 8, 16, 8, 32
VOCAB = 2100  # three tiles on a TPU, two on a GPU, the last ragged
KERNELS = pytest.mark.parametrize("kernel", ["mosaic_tpu_interpret", "triton_interpret"])

# Dtype, part of the vocabulary, latents ("position", "row" or none), options.
CASES = {
    "whole": (jnp.float32, VOCAB, "position", {"kl_weight": 0.3}),
    "bfloat16": (jnp.bfloat16, VOCAB, "row", {"kl_weight": 0.3}),
    "bare": (jnp.float32, VOCAB, None, {"kl_weight": 0.3, "labels": "target"}),
    "pruned, capped": (jnp.float32, 1300, "position", {"softcap": 1.5, "kl_weight": 0.3}),
    "renormalised": (
        jnp.float32,
        1300,
        "row",
        {"renormalise": True, "kl_weight": 0.1, "labels": "target"},
    ),
}


def operands(dtype, vocab, latents, labels=None, softcap=0.0, shared=True):
    """As vocab_loss takes them; one in four rows has no weight and holds NaN."""
    rng = np.random.default_rng(0)

    def normal(*shape, scale=1.0):  # bfloat16 as its values are, whatever they are kept in
        values = jnp.asarray(scale * rng.standard_normal(shape), dtype)
        return values.astype(jnp.float32)

    at = rng.integers(0, POSITIONS, (BATCH, ROWS)).astype(np.int32)
    whole = normal(VOCAB, HIDDEN, scale=0.5)
    taught = normal(BATCH, POSITIONS, HIDDEN)
    zt = np.asarray(taught @ whole.T)
    zt = softcap * np.tanh(zt / softcap) if softcap else zt
    lse = best = None
    if vocab != VOCAB:
        lse = np.asarray(jax.nn.logsumexp(zt, axis=-1))
        best = np.where(zt.argmax(-1) < vocab, zt.argmax(-1), -1).astype(np.int32)
    near = jnp.take_along_axis(taught, at[..., None], axis=1)
    weights = rng.uniform(0.1, 1.0, (BATCH, ROWS)) * (rng.random((BATCH, ROWS)) < 0.75)
    hidden = (near + 0.3 * normal(BATCH, ROWS, HIDDEN)).astype(dtype)
    hidden = jnp.where(weights[..., None] > 0, hidden, jnp.nan)
    if not shared:
        taught, at = near, None
    return (
        hidden,
        normal(BATCH, POSITIONS if latents == "position" else ROWS, RANK) if latents else None,
        normal(vocab, RANK, scale=0.3) if latents else None,
        whole[:vocab].astype(dtype),
        Teacher(taught.astype(dtype), lse, best, at),
        None if labels else rng.integers(0, vocab, (BATCH, ROWS)).astype(np.int32),
        weights.astype(np.float32),
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def evaluate(args, implementation, options):
    hidden, latent, w2, *rest = args
    options = {"ce_weight": 0.1, "l1_weight": 0.9, **dict(options)}

    def loss(trained):
        if implementation == "reference":
            return vocab_loss_reference(*trained, *rest, **options)
        return vocab_loss(*trained, *rest, **options, chunk=CHUNK, implementation=implementation)

    (value, terms), grads = jax.value_and_grad(loss, has_aux=True)((hidden, latent, w2))
    return value, terms, grads


def exact(args):
    """In float32, zeros in rows of weight 0: the reference multiplies their NaN by 0."""
    hidden = jnp.where(args[-1][..., None] > 0, args[0], 0)
    args = (hidden, *args[1:])
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, args)


def close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


@KERNELS
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, kernel):
    dtype, vocab, latents, options = CASES[case]
    options = dict(options)
    labels = options.pop("labels", None)
    args = operands(dtype, vocab, latents, labels, options.get("softcap", 0.0))
    options = tuple((options | {"shared_latent": latents == "position"}).items())
    got = evaluate(args, kernel, options)
    want = evaluate(exact(args), "reference", options)
    rough = dtype == jnp.bfloat16
    live = args[-1] > 0
    assert float(got[0]) == pytest.approx(float(want[0]), rel=1e-4 if rough else 1e-5)
    for field in dataclasses.fields(got[1]):
        x, y = (np.asarray(getattr(terms, field.name))[live] for terms in (got[1], want[1]))
        np.testing.assert_allclose(x, y, atol=2e-5, rtol=1e-5, err_msg=field.name)
    for x, y in zip(got[2], want[2]):
        if y is not None:
            close(x, y, 2e-2 if rough else 1e-5)
    assert not np.asarray(got[2][0])[~live].any()
    assert "pallas_call" in str(jax.make_jaxpr(lambda x: evaluate(x, kernel, options))(args))


@KERNELS
def test_rows_that_share_nothing(kernel):
    """Each with its own position."""
    args = operands(jnp.float32, VOCAB, "row", shared=False)
    assert not chunk_shape(BATCH * ROWS, BATCH * ROWS, CHUNK)[2]
    got, want = evaluate(args, kernel, ()), evaluate(exact(args), "reference", ())
    for x, y in zip(jax.tree.leaves((got[0], got[2])), jax.tree.leaves((want[0], want[2]))):
        close(x, y, 1e-5)


@KERNELS
def test_sharding_does_not_matter(kernel):
    """Rows over fsdp, 1,050 tokens of the vocabulary to a device of tp."""
    args = operands(jnp.float32, VOCAB, "position")
    options = (("shared_latent", True),)
    want = evaluate(args, kernel, options)
    axes = [("batch",), ("batch",), ("vocab", "embed"), ("vocab", "embed"), *[("batch",)] * 3]
    with jax.set_mesh(make_mesh(2, 2)):
        put = [lambda x, spec=spec: place(x, *spec) for spec in axes]
        placed = tuple(jax.tree.map(f, x) for f, x in zip(put, args))
        got = evaluate(placed, kernel, options)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        close(x, y, 1e-5)


def test_what_is_not_supported_is_said(monkeypatch):
    args = list(operands(jnp.float32, VOCAB, "row"))
    args[0] = args[0].astype(jnp.float16)
    run = functools.partial(vocab_loss, *args, ce_weight=1.0, l1_weight=1.0)
    with pytest.raises(NotImplementedError, match="float16"):
        run(implementation="triton")
    with pytest.raises(ValueError, match="none of"):
        run(implementation="pallas")
    for backend, name in (("tpu", "mosaic_tpu"), ("gpu", "triton"), ("cpu", "xla")):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        assert op._choose(None, args[0], args[3], args[4]) == "xla"  # float16
        assert op._choose(None, args[3], args[3], args[4]) == name
