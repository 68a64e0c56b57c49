"""The bench of the train step: which cases it takes, and the FLOPs it holds a step to."""

import pathlib
import sys

import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "experiments"))

import bench_train_step
from train_step.our_step import BLOCK, LENGTH, TAPS, Case, config_of, least_flops

from dspark_jax.core.errors import UserError
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target_config import TargetConfig


def test_cases_are_chosen_by_number():
    chosen = bench_train_step.chosen_cases("layers:2,anchors:256")
    assert {(c.layers, c.anchors) for c in chosen} == {(2, 256)}
    assert len(chosen) == len(bench_train_step.CASES) // 6
    assert bench_train_step.chosen_cases("") == bench_train_step.CASES
    for wrong in ("layers:3", "depth:2", "layers=2", "layers:two"):
        with pytest.raises(UserError, match="--cases"):
            bench_train_step.chosen_cases(wrong)


def test_least_flops_are_those_of_the_products_one_by_one():
    """Counted again, product by product: [m, k] x [k, n] is 2 m k n."""
    case = Case(layers=2, rank=64, anchors=3, vocab=1000)
    rope = RopeConfig(1e4)
    target = TargetConfig("llama", 1000, 576, 30, 9, 3, 64, 1536, 1e-5, rope, True, 2048)
    shape = DrafterShape.of(config_of(case, 1000).drafter, target)
    anchors = np.array([20, 24, 300])  # labels 21..27, 25..31, 301..307: 18 positions of 21
    slots, positions = 3 * BLOCK, 18
    products = [(LENGTH, len(TAPS) * 576, 576)] * 2  # fc: forward, its own gradient
    for _ in range(case.layers):
        dense = [(slots, 576, 576)] * 2 + [(slots, 576, 192)] * 2 + [(slots, 576, 1536)] * 3
        dense += [(LENGTH, 576, 192)] * 2  # keys and values of the context
        for anchor in anchors:  # 9 heads: scores, then values
            dense += [(9 * BLOCK, 64, anchor + BLOCK)] * 2
        products += 3 * dense
    products += [(slots, 576, 1000)] * 2 + [(positions, 576, 1000)]  # logits and back; target's
    products += [(positions, 64, 1000)] * 3  # bias, its latent's gradient, W2's
    count = sum(2.0 * m * k * n for m, k, n in products)
    assert least_flops(shape, anchors) == pytest.approx(count, rel=1e-12)
