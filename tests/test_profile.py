"""The profile of a run: it trains as any other, and its FLOPs are those of the products.

pytest tests/test_profile.py
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
import tiny

from dspark_jax import train
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import read_metrics
from dspark_jax.core.sharding import make_mesh
from dspark_jax.features.source import Batch
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.models.target_config import ExpertsConfig, SlidingConfig, TargetConfig
from dspark_jax.training import profile
from dspark_jax.training.flops import StepSizes, drafter_flops, target_flops
from dspark_jax.training.step import Recipe, all_blocks

ROPE = RopeConfig(1e4)
MORE = {
    "llama": {},
    "qwen3_moe": {"experts": ExpertsConfig(8, 2, 16, True, dense_layers=(1,))},
    "gemma3_text": {"sliding": SlidingConfig((True, False, True, True), 5, ROPE)},
}
DOCUMENTS = np.array([[1] * 9 + [2] * 14 + [0] * 7, [1] * 30])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run without and with a profile."""
    folder = tmp_path_factory.mktemp("profile")
    target = tiny.make_target(folder / "target")
    documents = {f"d{i}": list(range(5, 60 + i)) for i in range(12)}
    data = tiny.make_data(folder / "data", target, documents)
    steps = profile.STEPS + 2
    changes = {"data.path": str(data), "train.num_steps": steps, "train.validate_every": steps}
    config = tiny.make_config(target, tiny.write_prompts(folder / "p.jsonl", 2), changes)
    values = {}
    for on in (False, True):
        values[on] = train.run(dataclasses.replace(config, profile=on), folder / f"run{on:d}")
    return folder, config, values


def test_a_profiled_run_trains_as_any_other(runs):
    folder, _, values = runs
    assert values[True] == values[False]
    last = [read_metrics(folder / f"run{on}" / "metrics.jsonl")[-2] for on in (0, 1)]
    assert last[0]["loss"] == last[1]["loss"]
    assert last[0]["step"] == profile.STEPS + 2


def test_report_and_picture(runs):
    folder, config, _ = runs
    report = json.loads((folder / "run1/profile/profile.json").read_text())
    assert 0 < report["target_seconds"] < report["loop_seconds"] * 10
    assert report["loop_seconds_range"][0] <= report["loop_seconds"]
    parts = ["backbone", "vocabulary_loss_and_heads", "optimizer", "rest_of_step"]
    total = sum(report[f"{name}_seconds"] for name in parts)
    assert total == pytest.approx(report["step_alone_seconds"])
    assert "mfu" not in report  # no peak of a CPU is known
    assert report["model_flops_per_second"] == report["model_flops"] / report["loop_seconds"]
    spans = profile._spans(folder / "run1/profile")
    assert len(spans["host: dispatch"]) == len(spans["host: input"]) == profile.TRACED
    assert spans["device: target"] and spans["device: train step"]
    assert (folder / "run1/profile/timeline.png").stat().st_size > 5000
    # The last steps are too few for another one.
    again = dataclasses.replace(config, profile=True)
    again = dataclasses.replace(
        again, train=dataclasses.replace(again.train, num_steps=profile.STEPS + 9)
    )
    with pytest.raises(UserError, match=r"there are 7 to go"):
        train.run(again, folder / "run0")


def tiny_config(family: str) -> TargetConfig:
    sizes = (320, 32, 4, 4, 2, 8, 48, 1e-5, ROPE, False, 128)
    return TargetConfig(family, *sizes, **MORE[family])


def batch() -> Batch:
    rng = np.random.default_rng(0)
    shape = DOCUMENTS.shape
    fields = rng.integers(0, 60, shape), (rng.random(shape) < 0.8) & (DOCUMENTS > 0), DOCUMENTS
    fields += np.zeros(shape), np.arange(2), np.zeros(shape), np.zeros(shape)
    return Batch(*(np.int32(x)[None] if x.dtype != bool else x[None] for x in fields))


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", "none"])
def test_drafter_flops_are_those_of_the_products(head):
    rank = 0 if head == "none" else 8
    prompts = {"drafter.markov_head": head, "drafter.markov_rank": rank, "drafter.num_layers": 2}
    config = tiny.make_config("t", "p", prompts)
    target = tiny_config("llama")
    shape, given = DrafterShape.of(config.drafter, target), batch()
    with jax.set_mesh(make_mesh()):
        recipe = Recipe(config.loss, 6, 64, 0)
        blocks, _ = all_blocks(jax.random.key(0), given, config.drafter, recipe)
        sizes = StepSizes.of(given, blocks)
    blocks = jax.device_get(blocks)
    slots = labels = 0
    context = int((DOCUMENTS > 0).sum())
    d, width, h = shape.hidden_size, shape.intermediate_size, shape.head_dim
    products = [(context, 2 * d, d)] * 2
    for row in range(2):
        predicted = set()
        for anchor, filled in enumerate(blocks.filled[0, row]):
            if not filled:
                continue
            at = blocks.anchors[0, row, anchor]
            before = (DOCUMENTS[row, :at] == DOCUMENTS[row, at]).sum()
            slots += 3
            predicted |= set(blocks.label_index[0, row, anchor].tolist())
            products += 3 * 2 * [(shape.num_heads * 3, h, before + 3)] * 2
        labels += len(predicted)
    q, kv = shape.num_heads * h, shape.num_kv_heads * h
    layer = [(slots, d, q)] * 2 + [(slots, d, kv)] * 2 + [(context, d, kv)] * 2
    products += 3 * 2 * (layer + [(slots, d, width)] * 3)
    vocab = shape.vocab_size
    products += [(slots, d, vocab)] * 2 + [(labels, d, vocab)]
    biased = labels if head in ("vanilla", "none") else slots
    products += 3 * [(biased, rank, vocab)]
    if head == "gated":
        products += 3 * [(slots, d + rank, rank)]
    if head == "rnn":
        products += 3 * [(slots, 2 * rank + d, 3 * rank)]
    count = sum(2.0 * m * k * n for m, k, n in products)
    assert drafter_flops(shape, sizes) == pytest.approx(count, rel=1e-12)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_target_flops_are_those_of_the_products(family):
    config = tiny_config(family)
    d, h, tokens = config.hidden_size, config.head_dim, int((DOCUMENTS > 0).sum())
    products = []
    for index in range(config.num_layers):
        heads = config.num_heads + 2 * config.num_kv_heads
        products += [(tokens, d, heads * h), (tokens, config.num_heads * h, d)]
        if config.has_experts(index):
            moe = config.experts
            products += [(tokens, d, moe.count)]
            products += [(tokens * moe.per_token, d, moe.width)] * 3
        else:
            products += [(tokens, d, config.intermediate_size)] * 3
        for length in (9, 14, 30):
            window = config.sliding.window if config.slides(index) else length
            seen = sum(min(i + 1, window) for i in range(length))
            products += [(config.num_heads, h, seen)] * 2
    count = sum(2.0 * m * k * n for m, k, n in products)
    logits = 2.0 * tokens * d * config.vocab_size
    with jax.set_mesh(make_mesh()):
        found = [target_flops(config, batch(), head=head) for head in (False, True)]
    assert found == pytest.approx([count, count + logits], rel=1e-12)
