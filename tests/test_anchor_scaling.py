"""The scaling table of anchors: which cases it takes, and a small one measured.

pytest tests/test_anchor_scaling.py
"""

import json
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "experiments"))

import anchor_scaling

from dspark_jax.core.errors import UserError


def test_cases_are_those_that_fit():
    assert anchor_scaling.chosen(["8", "4"], [6, 64], [1, "4"]) == [
        (4, 6, 1), (4, 64, 1), (8, 64, 1), (4, 64, 4), (8, 64, 4),
    ]  # fmt: skip
    for wrong in ((["x"], [8], [1]), ([4], [], [1]), ([4], [8], [0]), ([4], [-8], [1])):
        with pytest.raises(UserError, match="whole numbers"):
            anchor_scaling.chosen(*wrong)
    with pytest.raises(UserError, match="long enough"):
        anchor_scaling.chosen([4], [4], [1])


def test_both_forms_are_measured_and_agree(tmp_path, capsys):
    report = anchor_scaling.run(tmp_path, [(16, 256, 1), (16, 256, 8)], 1, 1, 1.0)
    assert json.loads((tmp_path / "anchor_scaling.json").read_text()) == report
    one, eight = report["cases"]
    assert 64 < one["context_used"] < 192 and eight["context_used"] < 32
    for row in (one, eight):
        assert len(row["ours_seconds"]) == len(row["masked_seconds"]) == 1
        scores = 4 * 9 * 16 * 7 * (256 + 16 * 7)
        assert row["masked_largest_bytes"] >= scores and row["masked_temp_bytes"] > scores
    assert capsys.readouterr().out.count("\n") == 4


def test_what_asks_for_too_much_memory_is_left_out(tmp_path, capsys):
    (row,) = anchor_scaling.run(tmp_path, [(4, 32, 1)], 1, 1, 0.0)["cases"]
    assert row["masked_seconds"] == [] and row["masked_temp_bytes"] > 0
    assert capsys.readouterr().out.splitlines()[-1].split()[5] == "-"


def test_the_largest_array_is_read_from_the_program():
    program = """
    ENTRY %main {
      %p = f32[100,100]{1,0} parameter(0)
      %a = (f32[3,4]{1,0}, bf16[5,6]{1,0}) fusion(f32[100,100]{1,0} %p), kind=kLoop
      %b = pred[] compare(s32[] %x, s32[] %y), direction=LT
    """
    assert anchor_scaling.largest_array(program) == 60
