"""Rotary embedding: frequencies of every scaling, and what is rotated.

pytest tests/test_rope.py
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from reference import rope_frequencies, rotate

from dspark_jax.models.layers import RopeConfig, apply_rope, inverse_frequencies, rope_angles

ROPES = {
    "default": RopeConfig(theta=100.0),
    "linear": RopeConfig(theta=100.0, kind="linear", factor=2.5),
    "llama3": RopeConfig(
        theta=500.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=64,
    ),
    "yarn": RopeConfig(theta=300.0, kind="yarn", factor=4.0, original_max_position=256),
    "yarn, given factor": RopeConfig(
        theta=300.0, kind="yarn", factor=4.0, original_max_position=256, attention_factor=0.7
    ),
    "partial": RopeConfig(theta=100.0, partial_rotary_factor=0.25),
    "partial yarn": RopeConfig(
        theta=300.0,
        kind="yarn",
        factor=4.0,
        original_max_position=256,
        partial_rotary_factor=0.5,
    ),
}
# What transformers 5.24 computes for head_dim 16.
PUBLISHED = {
    "linear": [0.4, 0.224937, 0.126491, 0.0711312, 0.04, 0.0224937, 0.0126491, 0.00711312],
    "llama3": [1, 0.459863, 0.0976166, 0.0121562, 0.00559017, 0.00257071, 0.00118218, 0.00054364],
    "yarn": [1, 0.428912, 0.180211, 0.0736139, 0.0288675, 0.0106128, 0.00346816, 0.00170004],
    "partial yarn": [1, 0.180211, 0.0288675, 0.00346816],
}


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("head_dim", [8, 16])
def test_rope_matches_the_loops(kind, head_dim):
    rope = ROPES[kind]
    positions = np.array([0, 1, 15, 16, 1000])  # no table: beyond max_positions is nothing special
    x = np.random.default_rng(0).standard_normal((5, head_dim)).astype(np.float32)
    got = apply_rope(x, *rope_angles(rope, head_dim, jnp.asarray(positions)))
    want = [rotate(row, int(p), rope) for row, p in zip(x, positions)]
    np.testing.assert_allclose(got, want, atol=2e-4)
    if rope.partial_rotary_factor < 1:
        kept = int(head_dim * rope.partial_rotary_factor)
        np.testing.assert_array_equal(np.asarray(got)[:, kept:], x[:, kept:])
        assert np.abs(np.asarray(got)[2:, :kept] - x[2:, :kept]).min() > 0


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies(kind):
    """A scaling that is dropped, or a theta that falls back to 10000, shows here (R060)."""
    rope = ROPES[kind]
    got, factor = inverse_frequencies(rope, 16)
    want, want_factor = rope_frequencies(rope, 16)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert factor == pytest.approx(want_factor)
    other, _ = inverse_frequencies(dataclasses.replace(rope, theta=10000.0), 16)
    assert not np.allclose(other[1:], got[1:], rtol=0.1)
    if kind in PUBLISHED:
        np.testing.assert_allclose(got, PUBLISHED[kind], rtol=1e-5)


def test_frequencies_stay_float32_with_bfloat16_compute():
    """bf16 frequencies are 0.6 rad off at distance 512, bf16 positions cannot tell 257 from 258."""
    rope = RopeConfig(theta=1e6)
    cos, _ = rope_angles(rope, 128, jnp.asarray([257, 258, 4000]))
    assert cos.dtype == jnp.float32
    exact = [[math.cos(p * f) for f in rope_frequencies(rope, 128)[0]] for p in (257, 258, 4000)]
    np.testing.assert_allclose(cos, exact, atol=5e-4)
