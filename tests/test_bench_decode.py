"""The decoding bench on a tiny run: every figure is there and follows from the others.

pytest tests/test_bench_decode.py
"""

import importlib.util
import json
import pathlib
import sys

import jax
import pytest
import tiny
from tiny_drafter import random_weights

from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.opened import open_target
from dspark_jax.training.checkpoint import RunRecord, save_drafter, write_record

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "experiments"))
import bench_decode

TINY = bench_decode.Options(new_tokens=4, prompts=2, repeats=1, least_read=1_000_000)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    target = tiny.make_target(folder / "target")
    config = tiny.make_config(target, tiny.write_prompts(folder / "weather.jsonl", 3))
    config = config.__class__(**{**vars(config), "evaluate": config.evaluate.__class__(
        prompts=str(folder / "weather.jsonl"))})  # fmt: skip
    with jax.set_mesh(make_mesh(1, 1)):
        opened = open_target(config.target, config.target_dtype)
        record = RunRecord(
            config, opened.fingerprint, str(target), opened.model.config, ("LlamaForCausalLM",)
        )
        write_record(folder / "run", record)
        save_drafter(folder / "run", random_weights(record.shape), step=1)
    return folder / "run"


def test_the_report_keeps_its_contract(workdir, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "torch" else find(n))
    out = tmp_path / "decode.json"
    returned = bench_decode.run(workdir, out, TINY)
    assert "PyTorch is not installed" in capsys.readouterr().out
    report = json.loads(out.read_text())
    assert report["plain_over_transformers"] is None
    (part,) = report["weights"]
    assert report["bandwidth_limit_tokens_per_second"] == pytest.approx(
        part["bandwidth_bytes_per_second"] / part["weight_bytes"]
    )
    costs = part["round_costs"]
    parts = sum(
        costs[f"{name}_seconds"]
        for name in ("draft_backbone", "draft_head", "draft_chain", "verify", "extend")
    )
    predicted = part["accepted_length"] * costs["plain_step_seconds"] / parts
    assert report["predicted_over_plain"] == pytest.approx(predicted)
    assert part["same_text_as_plain"] == {"plain": 2, "speculative": 2}
    assert 1 <= part["accepted_length"] <= costs["proposals"] + 1
    assert report["machine"]["cores"] >= 1
    assert "float32" in bench_decode.summary(returned)


@pytest.mark.slow
def test_beside_transformers_and_in_eight_bits(workdir, tmp_path):
    pytest.importorskip("torch")
    options = bench_decode.Options(**{**vars(TINY), "weights": ("float32", "int8", "bfloat16")})
    report = bench_decode.run(workdir, tmp_path / "decode.json", options)
    first, small, half = report["weights"]
    assert report["plain_over_transformers"] > 0
    assert first["same_text_as_plain"]["transformers"] == 2
    assert small["weight_bytes"] < half["weight_bytes"] < first["weight_bytes"]
    assert small["plain_over_transformers"] is None  # compared once, in float32


def test_a_mistake_is_one_line(workdir, tmp_path):
    options = bench_decode.Options(**{**vars(TINY), "weights": ("int4",)})
    with pytest.raises(UserError, match="--weights=int4"):
        bench_decode.run(workdir, tmp_path / "decode.json", options)
