"""metrics.jsonl survives resumes and kills; reports are whole or absent; tables can be read."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.core import metrics
from dspark_jax.core.errors import UserError
from dspark_jax.core.metrics import MetricsWriter, read_metrics, table, to_json, write_json


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_values_of_every_kind_become_plain_json(tmp_path):
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(
            jnp.int32(1),
            {
                "loss": jnp.float32(1.5),
                "conditional_acceptance": jnp.array([0.5, jnp.nan], jnp.bfloat16),
                "tokens": np.int64(3),
                "grad_norm": float("inf"),
            },
        )
        # On disk before the writer is closed: a killed run keeps what it logged.
        assert lines(tmp_path / "run") == [
            {
                "step": 1,
                "loss": 1.5,
                "conditional_acceptance": [0.5, None],
                "tokens": 3,
                "grad_norm": None,
            }
        ]


def log(workdir, steps, step=0, mark="first"):
    with MetricsWriter(workdir, step) as writer:
        for number in steps:
            writer.write(number, {"mark": mark})


@pytest.mark.parametrize("cut", ['{"step": 6, "ma', '{"step": 6, "mark": "cut"}', "\x00\x00", ""])
def test_resume_drops_later_lines_and_mends_a_cut_one(tmp_path, cut):
    log(tmp_path, [2, 4, 5])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(cut)
    log(tmp_path, [5, 6], step=4, mark="second")
    assert [(line["step"], line["mark"]) for line in lines(tmp_path)] == [
        (2, "first"),
        (4, "first"),
        (5, "second"),
        (6, "second"),
    ]


def test_a_last_line_that_only_lacks_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    log(tmp_path, [3], step=2)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]


def test_a_new_run_in_an_old_folder_starts_anew(tmp_path):
    log(tmp_path, [1, 2])
    log(tmp_path, [1], mark="second")
    assert lines(tmp_path) == [{"step": 1, "mark": "second"}]


def test_damage_in_the_middle_is_named_and_nothing_is_lost(tmp_path):
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 1}\nnot json\n{"step": 2}\n'
    path.write_text(text)
    with pytest.raises(UserError, match="metrics.jsonl line 2 is no metrics line"):
        MetricsWriter(tmp_path, 1)
    assert path.read_text() == text
    with pytest.raises(UserError, match="cannot read metrics"):
        read_metrics(tmp_path / "absent.jsonl")


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.jax, "process_index", lambda: 1)
    log(tmp_path / "run", [1])
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_one_scalar_per_slot(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import struct  # the framing is length, crc, record, crc

    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"loss": 2.0, "acceptance": np.array([0.5, np.nan, 0.25])})
    (path,) = (tmp_path / "tensorboard").iterdir()
    data, found = path.read_bytes(), {}
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        event = Event.FromString(data[12 : 12 + length])
        found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        data = data[16 + length :]
    assert found == {
        ("loss", 7): 2.0,
        ("acceptance/slot_0", 7): 0.5,
        ("acceptance/slot_2", 7): 0.25,
    }


def test_reports_keep_their_order_and_have_no_nan(tmp_path):
    path = tmp_path / "new" / "report.json"
    write_json(path, {"b": np.float32(0.5), "a": [float("nan"), np.bool_(True)], "out": tmp_path})
    assert json.loads(path.read_text()) == {"b": 0.5, "a": [None, True], "out": str(tmp_path)}
    assert path.read_text().index('"b"') < path.read_text().index('"a"')
    write_json(path, {"b": 1, "a": 2}, sort_keys=True)
    assert path.read_text() == '{\n  "a": 2,\n  "b": 1\n}\n'


def test_a_report_that_fails_leaves_the_old_one_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError, match="object has no JSON form"):
        write_json(path, {"a": object()})

    def refuse(source, target):
        assert json.loads(source.read_text()) == {"a": 2}  # whole before it gets its name
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UserError, match="cannot write .*report.json: No space left"):
        write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_report_under_a_file_is_a_users_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_json(tmp_path / "file" / "report.json", {})
    with pytest.raises(UserError, match="cannot write"):
        MetricsWriter(tmp_path / "file" / "run")


def test_to_json_of_integers_stays_integers():
    assert repr(to_json({"n": jnp.arange(2), 3: (np.uint8(4),)})) == "{'n': [0, 1], '3': [4]}"


def test_table():
    rows = [["gsm8k", 3.2125, 12000, None, True], ["mt-bench", 12.0, 30, float("nan"), False]]
    assert table(rows, ["set", "accepted length", "tokens", "p", "equal"]).splitlines() == [
        "set       accepted length  tokens  p  equal",
        "--------  ---------------  ------  -  -----",
        "gsm8k                3.21  12,000  -    yes",
        "mt-bench            12.00      30  -     no",
    ]
    assert table([], ["a"]) == "a\n-"


def test_peak_memory_is_this_process_own():
    """A child of a large parent is small: its peak is not its parent's."""
    ballast = np.ones(300 << 20, np.uint8)
    assert metrics.peak_memory_bytes() > ballast.nbytes
    code = "from dspark_jax.core.metrics import peak_memory_bytes as p; print(p())"
    before, after = (
        int(subprocess.run([sys.executable, "-c", c], capture_output=True, check=True).stdout)
        for c in (code, code.replace("; print", "; x = b'1' * (200 << 20); print"))
    )
    assert 20 << 20 < before < ballast.nbytes
    assert 150 << 20 < after - before < 260 << 20


def test_peak_device_bytes_is_told_or_none():
    peak = metrics.peak_device_bytes()
    assert peak is None or peak > 0
