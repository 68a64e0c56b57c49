"""The cost of the sequential head: a case on a tiny target, kept; and what is counted.

pytest tests/test_head_cost.py
"""

import json
import pathlib
import sys

import pytest
import tiny

from dspark_jax.core.errors import UserError

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "experiments"))
import head_cost

CASE = head_cost.Options(gammas=(2,), batches=(2,), context=4, repeats=2)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A tiny target, and a drafter that fits it in place of the one of configs/smollm2.py."""
    target = tiny.make_target(tmp_path / "target")
    config = tiny.make_config(target, tiny.write_prompts(tmp_path / "prompts.jsonl", 3))
    monkeypatch.setattr(head_cost, "_config", lambda name: config)
    return str(target)


@pytest.mark.parametrize(
    "temperature, vocab", [(0.0, 0), pytest.param(1.0, 20, marks=pytest.mark.slow)]
)
def test_every_head_takes_its_turns(small, tmp_path, temperature, vocab):
    options = head_cost.dataclasses.replace(CASE, temperature=temperature, vocab=vocab)
    report = head_cost.run(small, tmp_path, options)
    (case,) = json.loads((tmp_path / "head_cost.json").read_text())["cases"]
    assert set(case["seconds"]) == set(head_cost.HEADS)
    assert all(len(turns) == 2 and min(turns) > 0 for turns in case["seconds"].values())
    ratios = [a / b for a, b in zip(case["seconds"]["rnn"], case["seconds"]["none"], strict=True)]
    assert case["added"]["rnn"] == pytest.approx(sum(ratios) / 2 - 1)
    assert head_cost.run(small, tmp_path, options)["cases"] == report["cases"]  # not again
    head_cost.draw(report, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    assert "rnn +%" in head_cost.summary(report)


def test_bad_numbers_are_refused(small, tmp_path):
    with pytest.raises(UserError, match="--batches"):
        head_cost.run(small, tmp_path, head_cost.dataclasses.replace(CASE, batches=(0,)))


def test_counts_by_hand():
    """Qwen3-4B on a v5e: a slot reads its logits in float32 and W2, and computes less than that."""
    row = next(r for r in head_cost.count(batch=128, gamma=16, context=1024)
               if (r["config"], r["chip"]) == ("qwen3_4b", "v5e"))  # fmt: skip
    logits, w2, products = 4 * 128 * 151936, 151936 * 256, 2 * 128 * 151936 * 256
    slot = max(6 * products / 197e12, (logits + 4 * w2) / 819e9)
    added = 16 * (slot - logits / 819e9)
    assert row["added"] == pytest.approx(added / (row["round_ms"] / 1e3))
    assert row["added_bfloat16_w2"] == pytest.approx(16 * 2 * w2 / 819e9 / (row["round_ms"] / 1e3))
    layers = 36 * (2 * 2560 * 4096 + 2 * 2560 * 1024 + 3 * 2560 * 9728)
    target = 2 * 128 * 17 * (layers + 2560 * 151936)
    assert 0.8 < 16 * products / row["flops_share"] / target < 1.6  # the drafter adds to it
    assert "qwen3_14b" in head_cost.count_table(head_cost.count())
