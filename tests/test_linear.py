"""Products with int8 and bfloat16 weights, and targets whose matrices are int8.

pytest tests/test_linear.py
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_targets import model_config, random_tensors, write_model

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.core.trees import named, with_arrays
from dspark_jax.models.linear import dequantised, linear, quantise_rows
from dspark_jax.weights.fingerprint import check_same_target, fingerprint
from dspark_jax.weights.safetensors import load_target


@pytest.fixture(autouse=True)
def one_device():
    with jax.set_mesh(make_mesh(1, 1)):
        yield


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    config = model_config()
    return write_model(tmp_path_factory.mktemp("target"), config, random_tensors(config))


def test_rows_are_rounded_to_127ths_of_their_largest_entry():
    weight = np.array([[1.0, -2.0, 0.5], [0.0, 0.0, 0.0], [1e-8, 3e-8, -1e-8]])
    values, scale = quantise_rows(weight)
    assert values.dtype == np.int8 and values.tolist() == [
        [64, -127, 32],
        [0, 0, 0],
        [42, 127, -42],
    ]
    np.testing.assert_allclose(scale, [2 / 127, 1, 3e-8 / 127], rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 5, 80])  # by digits, and by conversion above 64
def test_int8_products_are_those_of_the_stored_weights(rows):
    rng = np.random.default_rng(rows)
    weight, scale = quantise_rows(rng.standard_normal((48, 96)))
    x = rng.standard_normal((1, rows, 96)).astype(np.float32) * np.logspace(-3, 3, rows)[:, None]
    exact = x.astype(np.float64) @ (weight * scale[:, None].astype(np.float64)).T
    found = jax.jit(lambda x: linear(x, jnp.asarray(weight), jnp.asarray(scale), None))(x)
    # Each entry of x is off by at most 1/64516 of its row's largest, and all errors might add up.
    bound = np.abs(x).max(-1, keepdims=True) / 64516 * np.abs(weight * scale[:, None]).sum(1)
    assert (np.abs(found - exact) <= bound + 1e-5 * np.abs(exact).max(-1, keepdims=True)).all()
    assert (np.abs(found - exact) > 0).any()


def test_one_row_of_bfloat16_is_the_row_that_many_are():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((1, 3, 64)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((32, 64)), jnp.bfloat16)
    exact = np.asarray(x, np.float64)[0] @ np.asarray(weight, np.float64).T
    run = jax.jit(lambda x: linear(x, weight, None, None))
    one, many = run(x[:, :1]), run(x)
    assert one.shape == (1, 1, 32) and one.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(one[0], np.float64), exact[:1], rtol=0.01, atol=0.02)
    np.testing.assert_allclose(np.asarray(many[0], np.float64), exact, rtol=0.01, atol=0.02)


def logits_of(target, tokens):
    def run(target, tokens):
        cache = target.empty_cache(*tokens.shape)
        return target.head.logits(target(tokens, cache=cache).hidden)

    return np.asarray(jax.jit(run)(target, tokens))


@pytest.mark.parametrize("mesh", [pytest.param((1, 1), marks=pytest.mark.slow), (4, 2)])
def test_an_int8_target_is_its_own_weights_rounded(directory, mesh):
    tokens = np.random.default_rng(1).integers(0, 96, (4, 20)).astype(np.int32)
    plain = load_target(directory, "float32")
    exact = logits_of(plain, tokens)
    with jax.set_mesh(make_mesh(*mesh)):
        target = load_target(directory, "float32", "int8")
        arrays = jax.device_get(named(target))
        sharded = {n: len(x.sharding.device_set) for n, x in named(target).items()}
        found = logits_of(target, jax.device_put(tokens, jax.P("fsdp", None)))
    assert set(sharded.values()) == {mesh[0] * mesh[1]}
    matrices = {name for name, x in arrays.items() if x.dtype == np.int8}
    assert len(matrices) == 3 * 7 and all(f"{name}_scale" in arrays for name in matrices)
    # The values are those of the file, rounded row by row; everything else is as it was.
    floats = {name: np.asarray(x) for name, x in dequantised(arrays).items()}
    whole = jax.device_get(named(plain))
    assert set(floats) == set(whole)
    for name, value in whole.items():
        if name not in matrices:
            np.testing.assert_array_equal(floats[name], value)
            continue
        step = arrays[f"{name}_scale"]
        step = step.reshape(*step.shape, *[1] * (value.ndim - step.ndim))
        assert (np.abs(floats[name] - value) <= 0.5001 * step).all()
    # The pass computes with exactly those, and they are not far from the file's.
    rounded = logits_of(with_arrays(plain, {n: jnp.asarray(x) for n, x in floats.items()}), tokens)
    assert np.abs(found - rounded).max() < 2e-3 * np.abs(rounded).max()
    error = np.sqrt(((found - exact) ** 2).mean()) / exact.std()
    assert 1e-4 < error < 0.05


def test_another_precision_is_another_target(directory):
    whole, small = fingerprint(directory, "a"), fingerprint(directory, "a", "int8")
    assert whole.differences(small) == ["weights"]
    assert (whole.target_weights, small.target_weights) == ("", "int8")
    with pytest.raises(UserError, match="another weights"):
        check_same_target(whole, small, "the drafter")


def test_experts_are_refused(tmp_path):
    config = model_config("qwen3_moe", num_experts=4, num_experts_per_tok=2,
                          moe_intermediate_size=16, norm_topk_prob=True,
                          decoder_sparse_step=1, mlp_only_layers=[])  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="target_weights='int8'"):
        load_target(tmp_path, "float32", "int8")
