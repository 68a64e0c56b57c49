"""Every command runs the part of preflight that concerns it, once, before it does anything else.

Two-sided: of a right folder nothing is said, and what stops the command is something later; a wrong
one is refused in one line, or warned of in one line on stderr.

pytest tests/test_command_checks.py
"""

import dataclasses
import json
import pathlib
import shutil

import pytest
import tiny
from eagle3_reference import EAGLE3

from dspark_jax import convert, evaluate, generate, prepare, train
from dspark_jax.checks.runs import check_run
from dspark_jax.checks.target import read_target
from dspark_jax.core.config import RunConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.data.conversation import Conversation, Message
from dspark_jax.data.dataset import load_dataset
from dspark_jax.models.drafter import DrafterShape
from dspark_jax.models.layers import RopeConfig
from dspark_jax.weights.fingerprint import Fingerprint, fingerprint
from dspark_jax.weights.safetensors import target_config

ORDINARY = 77  # a mask id that texts may contain


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A target, runs and data in which everything is right."""
    folder = tmp_path_factory.mktemp("good")
    target = tiny.make_target(folder / "target")
    prompts = tiny.write_prompts(folder / "prompts.jsonl", 4)
    for name, changes in {
        "run": {},
        "ordinary": {"drafter.mask_token_id": ORDINARY},
        "gated": {"drafter.markov_head": "gated"},
    }.items():
        tiny.make_run(folder / name, tiny.make_config(target, prompts, changes))
    row = list(range(3, 63))
    tiny.make_data(folder / "data", target, {f"doc-{i}": row for i in range(12)})
    return folder


@pytest.fixture
def copy(good, tmp_path):
    """A run and its target that a test may damage: the run names the copy."""

    def make(run: str = "run") -> tuple[pathlib.Path, pathlib.Path]:
        target = shutil.copytree(good / "target", tmp_path / "target")
        made = shutil.copytree(good / run, tmp_path / "run")
        edit(made, target_directory=str(target), config__target=str(target))
        return made, target

    return make


def edit(folder: pathlib.Path, name: str = "config.json", **fields) -> None:
    """Sets fields of a JSON file; `a__b` is b in a, None removes."""
    value = json.loads((folder / name).read_text())
    for field, new in fields.items():
        *outer, last = field.split("__")
        inner = value
        for step in outer:
            inner = inner[step]
        if new is None:
            del inner[last]
        else:
            inner[last] = new
    (folder / name).write_text(json.dumps(value))


# What each command does with a run, and what stops it after the checks.


def by_evaluate(run, tmp_path, later: bool):
    tasks = str(tmp_path / "none.jsonl")
    evaluate.run(evaluate.Request(tasks=tasks), run, tmp_path / "report.json")


def by_generate(run, tmp_path, later: bool):
    conversation = Conversation("p", "p", (Message("user", "hi"),))
    options = generate.Options(max_new_tokens=10_000 if later else 4)
    generate.run(run, [conversation], options)


def by_convert(run, tmp_path, later: bool):
    out = tmp_path / "taken"
    out.mkdir(exist_ok=True)
    (out / "mine.txt").write_text("mine")
    convert.convert(str(run), "speculators", out if later else tmp_path / "out")


COMMANDS = {
    "evaluate": (by_evaluate, "none.jsonl"),
    "generate": (by_generate, "are more than the target's 256 positions"),
    "convert": (by_convert, "is not empty"),
}
EACH = pytest.mark.parametrize("command", COMMANDS)


def c(**fields):
    return lambda run, target: edit(run, **fields)


def retemplate(run, target):
    path = target / "chat_template.jinja"
    path.write_text(path.read_text() + "{# changed #}")


def other_weights(run, target):
    tiny.make_target(target, seed=1)


def retokenize(run, target):
    (target / "tokenizer.json").write_text((target / "tokenizer.json").read_text() + "\n")


WRONG_RUNS = {
    "mask id is eos": (c(config__drafter__mask_token_id=tiny.END), "mask_token_id: 0 is the targe"),
    "mask id is pad": (c(config__drafter__mask_token_id=tiny.PAD), "2 is the target's pad token"),
    "mask id is bos": (c(config__drafter__mask_token_id=tiny.START), "1 is the target's bos token"),
    "mask id has no row": (c(config__drafter__mask_token_id=tiny.VOCAB), "has no row in the targ"),
    "last layer": (c(config__drafter__target_layer_ids=[0, 3]), "3 is the target's last layer"),
    "tap out of range": (c(config__drafter__target_layer_ids=[0, 8]), "8 is out of range for a t"),
    "taps in another order": (c(config__drafter__target_layer_ids=[2, 0]), "strictly increasing"),
    "fewer taps": (c(config__drafter__target_layer_ids=[2]), "fit"),
    "hidden size": (c(target_config__hidden_size=48), "hidden_size: 48, the target's is 32"),
    "vocabulary": (c(target_config__vocab_size=300), "vocab_size: 300, the target's is 272"),
    "depth": (c(target_config__num_layers=6), "num_target_layers: 6, the target has 4"),
    "RoPE": (c(target_config__rope__theta=1e6), "rope: theta 1000000.0 (target 100.0)"),
    "target weights": (other_weights, "has another weights"),
    "target config": (lambda run, target: edit(target, rms_norm_eps=1e-6), "has another config"),
    "tokenizer": (retokenize, "has another tokenizer"),
    "head type": (c(config__drafter__markov_head="gated"), "fit"),
    "Markov rank": (c(config__drafter__markov_rank=4), "fit"),
    "confidence head": (c(config__drafter__confidence_head=False), "fit"),
    "draft layers": (c(config__drafter__num_layers=2), "fit"),
    "draft vocabulary": (c(config__drafter__vocab_size=100), "fit"),
}


# One command meets them all, the others one of each kind: of the files, of the target, of weights.
SOME = ("mask id is eos", "last layer", "RoPE", "target weights", "head type")


@pytest.mark.parametrize(
    "command, wrong",
    [(name, wrong) for name in COMMANDS for wrong in (WRONG_RUNS if name == "evaluate" else SOME)],
)
def test_a_wrong_run_is_refused(copy, tmp_path, capsys, command, wrong):
    run, target = copy()
    damage, expected = WRONG_RUNS[wrong]
    damage(run, target)
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(UserError) as caught:
        COMMANDS[command][0](run, tmp_path, later=False)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert capsys.readouterr().err == ""
    made = set(tmp_path.rglob("*")) - set(before)
    assert {path.name for path in made} <= {"taken", "mine.txt"}  # the test's own


@EACH
def test_a_right_run_is_silent(copy, tmp_path, capsys, command):
    run, _ = copy()
    act, later = COMMANDS[command]
    for fields in ({}, {"fingerprint__template": None}):  # as older runs were written
        edit(run, **fields)
        with pytest.raises(UserError, match=later):
            act(run, tmp_path, later=True)
        assert capsys.readouterr().err == ""


@EACH
def test_another_chat_template_is_one_warning(copy, tmp_path, capsys, command):
    """Of what recorded its own; the model is the same, so the command goes on."""
    run, target = copy()
    retemplate(run, target)
    act, later = COMMANDS[command]
    with pytest.raises(UserError, match=later):
        act(run, tmp_path, later=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dspark_jax: warning: {run}/config.json: target: made with ")
    assert "has another chat template" in line
    edit(run, fingerprint__template="")
    with pytest.raises(UserError, match=later):
        act(run, tmp_path, later=True)
    assert capsys.readouterr().err == ""


# Before training there is only a config.


def fields(target: pathlib.Path, **changes) -> RunConfig:
    """A config whose prompts are not there: that comes after the checks."""
    mapping = tiny.mapping(target, target / "none.jsonl", changes)
    return from_mapping(RunConfig, mapping)


def with_changes(**changes):
    return {name.replace("__", "."): value for name, value in changes.items()}


@pytest.mark.parametrize("command", [train, prepare], ids=["train", "prepare"])
@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"drafter.mask_token_id": tiny.END}, "config.drafter.mask_token_id: 0 is the target's eo"),
        ({"drafter.mask_token_id": tiny.PAD}, "config.drafter.mask_token_id: 2 is the target's pa"),
        ({"drafter.mask_token_id": 999}, "drafter.mask_token_id=999 has no row in the target's"),
        ({"drafter.target_layer_ids": (0, 3)}, "3 is the target's last layer"),
        ({"drafter.target_layer_ids": (0, 4)}, "4 is out of range"),
    ],
)
def test_a_wrong_config_is_refused(good, tmp_path, capsys, command, changes, expected):
    with pytest.raises(UserError) as caught:
        command.run(fields(good / "target", **changes), tmp_path / "run")
    assert expected in str(caught.value)
    assert capsys.readouterr().err == "" and not (tmp_path / "run").exists()


def test_a_mask_id_that_the_template_writes_is_refused(tmp_path):
    """It is no bos there, and still in every prompt."""
    target = tiny.make_target(tmp_path / "target", config={"bos_token_id": None})
    with pytest.raises(UserError) as caught:
        train.run(fields(target, **{"drafter.mask_token_id": tiny.START}), tmp_path / "run")
    assert "1 is '<|im_start|>', which the chat template writes" in str(caught.value)


@pytest.mark.parametrize("command", [train, prepare], ids=["train", "prepare"])
def test_a_right_config_is_silent(good, tmp_path, capsys, command):
    with pytest.raises(UserError, match=r"none\.jsonl"):
        command.run(fields(good / "target"), tmp_path / "run")
    assert capsys.readouterr().err == ""


def test_what_no_engine_serves_is_one_warning_before_training(good, tmp_path, capsys):
    """DSpark's block without any Markov head; as fill-in it is DFlash, which all three serve."""
    bare = {"drafter.markov_head": "none", "drafter.markov_rank": 0}
    with pytest.raises(UserError, match=r"none\.jsonl"):
        train.run(fields(good / "target", **bare), tmp_path / "run")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dspark_jax: warning: config.drafter.markov_rank: vllm, sglang, tpu-inf")
    dflash = bare | {"drafter.confidence_head": False, "drafter.sample_from_anchor": False}
    for changes in (dflash, {"drafter.markov_head": "rnn"}):  # SGLang serves all heads
        with pytest.raises(UserError, match=r"none\.jsonl"):
            train.run(fields(good / "target", **changes), tmp_path / "run")
        assert capsys.readouterr().err == ""


def test_data_of_another_template_is_one_warning(good, tmp_path, capsys):
    target = shutil.copytree(good / "target", tmp_path / "target")
    data = good / "data"
    found = fingerprint(target, "copy")
    load_dataset(data, found)
    assert capsys.readouterr().err == ""
    retemplate(None, target)
    load_dataset(data, fingerprint(target, "copy"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dspark_jax: warning: {data}: made with ")
    assert "has another chat template" in line
    # And in the command, which goes on to find the mask token in them.
    mapping = tiny.mapping(target, tmp_path, {"data.path": str(data), "drafter.mask_token_id": 40})
    with pytest.raises(UserError, match="occurs in the training data"):
        train.run(from_mapping(RunConfig, mapping), tmp_path / "run")
    assert len(capsys.readouterr().err.splitlines()) == 1


# Exports and imports.


def test_a_finished_export_is_preflighted_for_vllm(good, tmp_path, capsys):
    convert.convert(str(good / "run"), "speculators", tmp_path / "fine")
    assert capsys.readouterr().err == ""
    convert.convert(str(good / "ordinary"), "speculators", tmp_path / "ordinary")
    (line,) = capsys.readouterr().err.splitlines()
    where = f"{tmp_path / 'ordinary'}/config.json: mask_token_id"
    assert line.startswith(f"dspark_jax: warning: {where}: 77 is an ordinary token")
    convert.convert(str(good / "gated"), "speculators", tmp_path / "gated", force=True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dspark_jax: refused by preflight: ")
    assert "vLLM reads only vanilla heads" in line
    convert.convert(str(good / "gated"), "deepspec", tmp_path / "sglang")  # which serves it
    assert capsys.readouterr().err == ""

    # Back again: the folder and the target must still fit.
    convert.convert(str(tmp_path / "fine"), "orbax", tmp_path / "imported")
    assert capsys.readouterr().err == ""
    edit(tmp_path / "fine", mask_token_id=tiny.END)
    edit(tmp_path / "fine", "dspark_jax.json", config__drafter__mask_token_id=tiny.END)
    with pytest.raises(UserError, match="mask_token_id: 0 is the target's eos token"):
        convert.convert(str(tmp_path / "fine"), "orbax", tmp_path / "again")
    assert not (tmp_path / "again").exists()


# The checks themselves, and the fingerprint.


def test_several_refusals_are_one_line(good):
    from dspark_jax.checks.runs import tell

    config = tiny.make_config(good / "target", good / "prompts.jsonl").drafter
    shape = DrafterShape.of(config, target_config(good / "target", "float32"))
    facts = read_target(good / "target", "tiny")
    assert check_run(shape, facts) == check_run(shape, facts, facts.fingerprint) == []
    config = dataclasses.replace(config, mask_token_id=tiny.PAD)
    shape = dataclasses.replace(shape, config=config, hidden_size=8)
    with pytest.raises(UserError) as caught:
        tell(check_run(shape, facts), "config.drafter.")
    assert str(caught.value).startswith("config.drafter.hidden_size: 8, the target's is 32")
    assert str(caught.value).endswith("(1 of 2 refusals)")


def test_eagle3_is_checked_as_well_but_for_what_it_lacks(good):
    """It has no mask token, and DSpark's block without a Markov head is not what it is."""
    changes = {f"drafter.{name}": value for name, value in EAGLE3.items()}
    config = tiny.make_config(good / "target", good / "prompts.jsonl", changes).drafter
    shape = DrafterShape.of(config, target_config(good / "target", "float32"))
    facts = read_target(good / "target", "tiny")
    assert check_run(shape, facts) == check_run(shape, facts, facts.fingerprint) == []
    for field, value in (("hidden_size", 8), ("target_layers", 6), ("rope", RopeConfig(7.0))):
        (finding,) = check_run(dataclasses.replace(shape, **{field: value}), facts)
        assert finding.severity == "refuse"
    capped = dataclasses.replace(shape, logit_softcap=30.0)
    (finding,) = check_run(capped, facts)  # which convert would refuse to write
    assert (finding.severity, finding.what) == ("warn", "not servable")
    assert check_run(capped, facts, facts.fingerprint) == []  # once it is trained: too late
    granite = dataclasses.replace(facts, config=facts.config | {"model_type": "granite"})
    (finding,) = check_run(shape, granite)
    assert (finding.severity, finding.what) == ("warn", "target family")


def test_the_template_in_the_fingerprint(good, tmp_path):
    target = shutil.copytree(good / "target", tmp_path / "target")
    before = fingerprint(target, "a")
    assert before.template and not before.other_template(fingerprint(good / "target", "b"))
    retemplate(None, target)
    after = fingerprint(target, "a")
    assert before.differences(after) == [] and before.other_template(after)
    (target / "chat_template.jinja").unlink()
    none = fingerprint(target, "a")
    assert none.other_template(after)  # none at all is another one
    # A template in tokenizer_config.json is the same as one in a file of its own.
    edit(target, "tokenizer_config.json", chat_template=tiny.CHATML)
    assert not before.other_template(fingerprint(target, "a"))
    # Older files do not tell.
    old = {k: v for k, v in dataclasses.asdict(before).items() if k != "template"}
    assert not Fingerprint(**old).other_template(after)
    assert not after.other_template(Fingerprint(**old))


def test_the_table_is_long_enough():
    assert len(WRONG_RUNS) >= 20
