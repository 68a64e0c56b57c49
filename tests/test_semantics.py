"""Named semantics: which fields a preset sets, what wins over it, and that a run remembers both.

pytest tests/test_semantics.py
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from test_config import fields, flat

from dspark_jax.core.config import (
    DrafterConfig,
    RunConfig,
    default_config,
    from_mapping,
    to_mapping,
)
from dspark_jax.core.errors import UserError
from dspark_jax.core.loss_config import LossConfig
from dspark_jax.core.semantics import SEMANTICS

ROOT = pathlib.Path(__file__).resolve().parent.parent


def start():
    """A config with its required fields."""
    c = default_config()
    c.target, c.data.prompts = "some/target", "generator:8"
    c.drafter.update(target_layer_ids=(0, 2), mask_token_id=5)
    return c


def value_of(config, name: str):
    for part in name.split("."):
        config = getattr(config, part)
    return config


def test_presets_are_tables_over_the_same_fields():
    """Every field by which losses can differ is in each, so that naming one leaves none open."""
    in_loss = {f"loss.{name}" for name in flat(LossConfig().__dict__)}
    heads = {"drafter.init", "drafter.head_init", "drafter.confidence_detach"}
    assert in_loss | heads <= fields()
    for table in SEMANTICS.values():
        assert set(table) == in_loss | heads


@pytest.mark.parametrize("name", SEMANTICS)
def test_a_preset_sets_its_fields_and_no_others(name):
    c = start()
    before = flat(c.to_dict())
    c.semantics = name
    after = flat(c.to_dict())
    assert after == before | SEMANTICS[name] | {"semantics": name}
    run = from_mapping(RunConfig, c.to_dict())  # every value is one that the field takes
    for field, value in SEMANTICS[name].items():
        assert value_of(run, field) == value and type(value_of(run, field)) is type(value)


def test_the_paper_is_what_the_defaults_are():
    c = start()
    c.semantics = "paper"
    run = from_mapping(RunConfig, c.to_dict())
    assert run.loss == LossConfig() and run.drafter == DrafterConfig((0, 2), 5)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_our_configs_name_no_preset_and_compute_as_before(path):
    """Only the weights of the terms, the decay and how layers start are theirs to choose."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = from_mapping(RunConfig, module.get_config().to_dict())
    assert run.semantics == ""
    free = {f"loss.{name}" for name in ("ce", "l1", "kl", "confidence", "decay")} | {"drafter.init"}
    for name, value in SEMANTICS["paper"].items():
        assert name in free or value_of(run, name) == value


def test_the_presets_differ_where_the_implementations_do():
    paper, theirs = SEMANTICS["paper"], SEMANTICS["speculators"]
    assert {k for k, v in SEMANTICS["deepspec"].items() if v != paper[k]} == {"loss.average_over"}
    assert {k for k, v in theirs.items() if v == paper[k]} == {
        "loss.confidence",
        "loss.decay",
        "drafter.init",
        "drafter.confidence_detach",
    }


def test_in_a_config_file_what_is_set_later_wins():
    c = start()
    c.loss.ce = 0.5
    c.semantics = "speculators"
    assert c.loss.ce == 0.0
    c.loss.ce = 0.5
    assert (c.loss.ce, c.loss.kl) == (0.5, 1.0)
    c.update(semantics="paper")
    assert (c.loss.ce, c.loss.kl) == (0.1, 0.0)
    c.semantics = ""  # names no preset and so sets nothing
    assert c.loss.ce == 0.1
    with pytest.raises(UserError, match="'deepspeck': must be one of paper, deepspec, speculators"):
        c.semantics = "deepspeck"


def test_a_plain_mapping_may_name_one_and_little_else():
    """A notebook's dictionary: what it leaves open is the preset's, what it says is its own."""
    plain = {
        "target": "some/target",
        "semantics": "speculators",
        "data": {"prompts": "generator:8"},
        "drafter": {"target_layer_ids": (0, 2), "mask_token_id": 5},
        "loss": {"ce": 0.1},
    }
    run = from_mapping(RunConfig, plain)
    for name, value in SEMANTICS["speculators"].items():
        assert value_of(run, name) == (0.1 if name == "loss.ce" else value)
    with pytest.raises(UserError, match="semantics='papers': must be one of"):
        from_mapping(RunConfig, plain | {"semantics": "papers"})


PROGRAM = """
import json
from ml_collections import config_flags
from dspark_jax.core.command import run_main

CONFIG = config_flags.DEFINE_config_file("config", None, "", lock_config=True)
run_main(lambda: print(json.dumps(CONFIG.value.to_dict())))
"""
PLAIN = """
from ml_collections import config_dict
from dspark_jax.core.config import default_config

def get_config():
    return config_dict.ConfigDict(default_config().to_dict())
"""
FILE = """
from dspark_jax.core.config import default_config

def get_config(variant=""):
    c = default_config()
    c.loss.update(ce=1.0, kl=0.25, distance="tv")
    if variant:
        c.semantics = variant
        c.loss.decay = 7.0
    return c
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    (folder / "program.py").write_text(PROGRAM)
    (folder / "file.py").write_text(FILE)
    (folder / "plain.py").write_text(PLAIN)
    return folder


def parsed(folder, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.parametrize(
    "arguments, preset, others",
    [
        (["--config=file.py"], None, {"loss.ce": 1.0, "loss.kl": 0.25, "loss.distance": "tv"}),
        (["--config=file.py:deepspec"], "deepspec", {"loss.decay": 7.0}),
        (["--config=file.py:deepspec", "--config.semantics=paper"], "paper", {}),
        (["--config=file.py", "--config.semantics=speculators"], "speculators", {}),
        (
            ["--config=file.py", "--config.loss.ce=2", "--config.loss.average_over=batch",
             "--config.semantics=speculators", "--config.drafter.head_init=normal"],
            "speculators",
            {"loss.ce": 2.0, "loss.average_over": "batch", "drafter.head_init": "normal"},
        ),
        (["--config=plain.py", "--config.semantics=speculators", "--config.loss.ce=2"],
         "speculators", {"loss.ce": 2.0}),
    ],
    ids=["file", "file's own", "given over the file's own", "given", "given with fields", "plain"],
)  # fmt: skip
def test_on_the_command_line_fields_win_over_presets_over_files(folder, arguments, preset, others):
    done = parsed(folder, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    found = flat(json.loads(done.stdout))
    table = SEMANTICS[preset] if preset else {}
    assert found == flat(default_config().to_dict()) | table | others | {"semantics": preset or ""}


def test_an_unknown_preset_is_one_line(folder):
    done = parsed(folder, "--config=file.py", "--config.semantics=papers")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "config.semantics='papers': must be one of paper, deepspec" in done.stderr


@pytest.mark.parametrize(
    "field, value",
    [
        ("distance", "l2"),
        ("ce_label", "teacher"),
        ("teacher", "pruned"),
        ("anchors", "any"),
        ("supervision", "all"),
        ("mask_at", "anchor"),
        ("denominator", "tokens"),
        ("average_over", "device"),
        ("kl", -0.5),
        ("decay", float("nan")),
    ],
)
def test_other_values_are_refused_by_name(field, value):
    with pytest.raises(UserError, match=f"loss.{field}="):
        LossConfig(**{field: value})


def test_a_run_remembers_fields_and_name():
    c = start()
    c.semantics = "speculators"
    c.loss.ce = 0.1
    run = from_mapping(RunConfig, c.to_dict())
    stored = json.loads(json.dumps(to_mapping(run)))
    assert stored["semantics"] == "speculators"
    assert from_mapping(RunConfig, stored) == run and run.loss.ce == 0.1  # not the preset's again
    # A run of before has none of these fields, and was what the defaults are.
    for name in set(flat(SEMANTICS["paper"])) - {"loss.ce"}:
        group, field = name.split(".")
        if field not in ("l1", "kl", "confidence", "decay", "init"):
            del stored[group][field]
    del stored["semantics"]
    old = from_mapping(RunConfig, stored)
    assert old.semantics == "" and old.loss.average_over == "batch"
    assert old.drafter.head_init == "normal"
