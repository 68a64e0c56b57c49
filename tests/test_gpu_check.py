"""The script for GPUs, with small arrays on the CPU: every line of it, and that it sees a mistake.

pytest tests/test_gpu_check.py
"""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "experiments"))

import gpu_check

from dspark_jax.core.chips import chip_named
from dspark_jax.core.sharding import make_mesh


def test_the_kernel_is_held_against_xla_and_pytorch():
    with jax.set_mesh(make_mesh(1, 1)):
        rows = gpu_check.markov_case(gpu_check.TINY, jnp.bfloat16, "interpret", None)
    assert [row["by"] for row in rows] == ["Pallas (interpret)", "XLA"]
    for row in rows:
        assert row["right"] is True and row["relative_error"] < 2**-7 and row["seconds"] > 0
        # logits in and out, W2, and one row of W1 for each slot; two bytes each.
        assert row["bytes"] == 2 * (2 * 37 * 300 + 300 * 16 + 37 * 16)


def test_a_wrong_result_is_seen_and_a_peer_is_not_judged():
    exact = np.array([1.0, -2.0, 4.0], np.float32)
    results = {
        "right": lambda: jnp.asarray(exact),
        "off": lambda: jnp.asarray(exact + np.float32([0, 0, 0.05])),
        "nan": lambda: jnp.asarray(np.float32([1, np.nan, 4])),
        "PyTorch": lambda: jnp.asarray(exact * 2),
    }
    rows = {row["by"]: row for row in gpu_check._measured(results, exact, 0.01, 1)}
    assert {name: row["right"] for name, row in rows.items()} == {
        "right": True, "off": False, "nan": False, "PyTorch": None,
    }  # fmt: skip
    assert rows["off"]["relative_error"] == pytest.approx(0.05 / 4, rel=1e-4)


def test_without_a_gpu_it_refuses_in_one_line(tmp_path):
    script, out = str(ROOT / "experiments" / "gpu_check.py"), tmp_path / "report.json"
    result = subprocess.run(
        [sys.executable, script, f"--out={out}"], capture_output=True, text=True, cwd=ROOT
    )
    if result.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "jax sees no GPU here" in result.stderr and "--tiny" in result.stderr
    assert not out.exists()


@pytest.mark.slow
def test_every_line_runs_on_a_cpu(tmp_path):
    """Against PyTorch too where it is installed; with a chip's peaks, as on a GPU."""
    torch = gpu_check.the_torch(tiny=True)
    report = gpu_check.check(gpu_check.TINY, "interpret", torch, chip_named("H100"))
    assert report["right"] and len(report["cases"]) == 4 * (3 if torch else 2)
    step = report["train_step"]
    assert step["losses"][-1] < step["losses"][0]
    assert step["mfu"] == pytest.approx(step["flops"] / step["seconds"] / 989e12)
    assert all(0 < row["share_of_bandwidth"] < 1 for row in report["cases"][:2])
    json.dumps(report)
