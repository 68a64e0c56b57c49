"""What users get wrong ends in one line that says what, where and what to do, and leaves no mess.

The table runs in this process; a part of it again as real commands.

pytest tests/test_user_errors.py
"""

import concurrent.futures
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import tiny

from dspark_jax import generate, prepare, train
from dspark_jax.core.config import RunConfig, from_mapping
from dspark_jax.core.errors import UserError
from dspark_jax.data.conversation import Conversation, Message

ROOT = pathlib.Path(__file__).resolve().parent.parent
TEXT = list(range(3, 63))  # a document


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder in which everything is right: target, prompts, data and a run."""
    folder = tmp_path_factory.mktemp("good")
    target = tiny.make_target(folder / "target")
    prompts = tiny.write_prompts(folder / "prompts.jsonl", 4)
    documents = {f"doc-{i}": TEXT for i in range(12)}
    tiny.make_data(folder / "data", target, documents)
    tiny.make_run(folder / "run", tiny.make_config(target, prompts))
    tiny.make_target(folder / "other", seed=1)
    return folder


def cut_in_half(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def fields(good: pathlib.Path, changes: dict) -> dict:
    changes = {"data.path": str(good / "data"), "train.num_steps": 2} | changes
    return tiny.mapping(good / "target", good / "prompts.jsonl", changes)


def message(action, workdir: pathlib.Path) -> str:
    """The one line of a user's mistake, which must leave nothing in `workdir`."""
    before = contents(workdir)
    with pytest.raises(UserError) as error:
        action()
    assert contents(workdir) == before
    return check_line(str(error.value))


def contents(folder: pathlib.Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def check_line(line: str) -> str:
    assert "\n" not in line.strip() and 20 < len(line) < 700, line
    assert "object at 0x" not in line and "Traceback" not in line
    return line


# Configs


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"train.lernin_rate": 1.0}, "config.train.lernin_rate: no such field; there are "),
        ({"sed": 1}, "config.sed: no such field"),
        ({"train.num_steps": 1.5}, "config.train.num_steps=1.5: must be int"),
        ({"train.log_every": True}, "config.train.log_every=True: must be int"),
        ({"train.learning_rate": "1e-3"}, "config.train.learning_rate='1e-3': must be float"),
        ({"drafter.target_layer_ids": 1}, "config.drafter.target_layer_ids=1: must be a tuple"),
        ({"drafter": 3}, "config.drafter=3: must be a group of fields"),
        ({"drafter.markov_head": "lstm"}, "drafter.markov_head='lstm': must be one of none"),
        ({"drafter.markov_head": "none"}, "markov_head='none' with drafter.markov_rank=8: use"),
        ({"drafter.dtype": "float16"}, "drafter.dtype='float16': must be one of float32"),
        ({"drafter.block_size": 0}, "drafter.block_size=0: at least 1"),
        ({"drafter.num_layers": 0}, "drafter.num_layers=0: at least 1"),
        ({"target_dtype": "int8"}, "target_dtype='int8': must be one of"),
        ({"train.accumulation": 3}, "train.global_batch_size=2 is not a multiple of train.acc"),
        # Of the target
        ({"target": "/no/such/folder"}, "target '/no/such/folder': no such folder; give"),
        ({"drafter.target_layer_ids": (0, 9)}, "9 is out of range for a target of 4 layers"),
        ({"drafter.target_layer_ids": (-2, 1)}, "-2 is out of range for a target of 4 layers"),
        ({"drafter.target_layer_ids": (0, 3)}, "3 is the target's last layer; its output is"),
        ({"drafter.target_layer_ids": (2, 0)}, "must be strictly increasing"),
        ({"drafter.target_layer_ids": ()}, "target_layer_ids is empty: name at least one"),
        ({"drafter.mask_token_id": tiny.VOCAB}, "has no row in the target's embedding (272 rows)"),
        ({"drafter.mask_token_id": -1}, "drafter.mask_token_id=-1 has no row"),
        ({"drafter.mask_token_id": tiny.PAD}, "drafter.mask_token_id: 2 is the target's pad token"),
        ({"drafter.mask_token_id": tiny.END}, "drafter.mask_token_id: 0 is the target's eos token"),
        (
            {"drafter.mask_token_id": tiny.START},
            "config.drafter.mask_token_id: 1 is the target's b",
        ),
        ({"drafter.vocab_size": tiny.VOCAB + 1}, "drafter.vocab_size=273: the target's vocabulary"),
        ({"drafter.vocab_size": -1}, "drafter.vocab_size=-1: the target's vocabulary has 272 tok"),
        ({"drafter.num_kv_heads": 3}, "num_heads=4 is not a multiple of drafter.num_kv_heads=3"),
        # Of the machine
        ({"mesh": {"fsdp": 64, "tp": 1}}, "needs 64 devices, this machine has 8: set --config"),
        ({"mesh": {"fsdp": 4, "tp": 1}}, "train.accumulation=2 cannot be cut into the 4 parts"),
        ({"mesh": {"fsdp": 1, "tp": 4}}, "num_kv_heads=2 cannot be cut into the 4 parts"),
        ({"mesh": {"fsdp": 1, "tp": 2}, "drafter.num_kv_heads": 1}, "drafter.num_kv_heads=1 can"),
        ({"mesh": {"fsdp": 1, "tp": 2}, "drafter.vocab_size": 63}, "drafter.vocab_size=63 cannot"),
        # Of the data
        ({"drafter.mask_token_id": 40}, "occurs in the training data (row doc-0): choose an id"),
        ({"data.validation_fraction": 0.0}, "12 documents to train on and 0 to validate with;"),
        ({"data.sequence_length": 5}, "no document has two adjacent supervised tokens within 5"),
        ({"data.path": "", "data.prompts": "none.jsonl"}, "'none.jsonl' is no existing file"),
        ({"data.path": "", "data.prompts": "generator:x"}, "'generator:x' has no count; write"),
        ({"data.path": "", "data.prompts": "magpie:0"}, "write magpie:N with a positive N"),
    ],
)
def test_wrong_configs(good, tmp_path, changes, expected):
    workdir = tmp_path / "run"
    mapping = fields(good, changes)
    line = message(lambda: train.run(from_mapping(RunConfig, mapping), workdir), workdir)
    assert expected in line


@pytest.mark.parametrize("name", ["target_layer_ids", "mask_token_id"])
def test_what_has_no_default_is_asked_for(good, name):
    mapping = fields(good, {})
    del mapping["drafter"][name]
    with pytest.raises(UserError, match=f"config.drafter.{name} is required: set it in the"):
        from_mapping(RunConfig, mapping)


# Files


@pytest.mark.parametrize(
    "lines, expected",
    [
        ("", "holds no rows"),
        ('{"prompt": "a"}\n{"prompt": \n', "row 2 is not valid JSON"),
        ('{"prompt": " "}\n', "has an empty user message"),
        ('{"text": "a"}\n', "has none of the columns conversations, messages, prompt, turns"),
    ],
)
def test_wrong_prompts(good, tmp_path, lines, expected):
    path, workdir = tmp_path / "prompts.jsonl", tmp_path / "run"
    path.write_text(lines)
    config = from_mapping(RunConfig, fields(good, {"data.path": "", "data.prompts": str(path)}))
    line = message(lambda: prepare.run(config, workdir), workdir / "data" / "dataset")
    assert expected in line and str(path) in line


def truncate_weights(target: pathlib.Path) -> None:
    cut_in_half(target / "model.safetensors")


def lose_weights(target: pathlib.Path) -> None:
    (target / "model.safetensors").unlink()


def cut_config(target: pathlib.Path) -> None:
    cut_in_half(target / "config.json")


def other_family(target: pathlib.Path) -> None:
    tiny.make_target(target, config={"model_type": "mamba"})


def other_shape(target: pathlib.Path) -> None:
    tiny.make_target(target, config={"intermediate_size": 64})


def more_layers(target: pathlib.Path) -> None:
    tiny.make_target(target, config={"num_hidden_layers": 6})


def no_template(target: pathlib.Path) -> None:
    (target / "chat_template.jinja").unlink()


def no_tokenizer(target: pathlib.Path) -> None:
    (target / "tokenizer.json").unlink()


def wrong_end(target: pathlib.Path) -> None:
    (target / "generation_config.json").write_text('{"eos_token_id": 9999}')


@pytest.mark.parametrize(
    "damage, expected",
    [
        (truncate_weights, "model.safetensors: damaged or not a safetensors file"),
        (lose_weights, "neither model.safetensors nor model.safetensors.index.json"),
        (cut_config, "config.json"),
        (other_family, "model_type 'mamba' is not supported; targets are llama, qwen3"),
        (other_shape, "config.json implies"),
        (more_layers, "is missing"),
        (no_template, "the tokenizer has no chat template; use an instruct model"),
        (no_tokenizer, "no usable tokenizer"),
        (wrong_end, "eos_token_id 9999 is not made of ids of the tokenizer"),
    ],
)
def test_damaged_targets(good, tmp_path, damage, expected):
    target, workdir = tmp_path / "target", tmp_path / "run"
    shutil.copytree(good / "target", target)
    damage(target)
    config = from_mapping(RunConfig, fields(good, {"target": str(target)}))
    line = message(lambda: train.run(config, workdir), workdir)
    assert expected in line and str(target) in line


def cut_table(data: pathlib.Path) -> None:
    cut_in_half(next(data.glob("dataset/*.arrow")))


def lose_table(data: pathlib.Path) -> None:
    next(data.glob("dataset/*.arrow")).unlink()


def cut_record(data: pathlib.Path) -> None:
    cut_in_half(data / "dataset" / "dspark_jax.json")


@pytest.mark.parametrize(
    "damage, expected",
    [
        (cut_table, "dataset: damaged"),
        (lose_table, "dataset: damaged"),
        (cut_record, "dspark_jax.json: not readable as JSON"),
    ],
)
def test_damaged_data(good, tmp_path, damage, expected):
    data, workdir = tmp_path / "data", tmp_path / "run"
    shutil.copytree(good / "data", data)
    damage(data)
    config = from_mapping(RunConfig, fields(good, {"data.path": str(data)}))
    assert expected in message(lambda: train.run(config, workdir), workdir)


def test_data_of_another_target(good, tmp_path):
    config = from_mapping(RunConfig, fields(good, {"target": str(good / "other")}))
    line = message(lambda: train.run(config, tmp_path / "run"), tmp_path / "run")
    assert "data in" in line and "has another weights: use the same target, or prepare" in line


# Runs


def cut_checkpoint(run: pathlib.Path) -> None:
    files = [path for path in (run / "checkpoints" / "1").rglob("*") if path.is_file()]
    cut_in_half(max(files, key=lambda path: path.stat().st_size))


def lose_manifest(run: pathlib.Path) -> None:
    (run / "checkpoints" / "1" / "drafter" / "manifest.ocdbt").unlink()


def no_checkpoints(run: pathlib.Path) -> None:
    shutil.rmtree(run / "checkpoints")


def cut_run_config(run: pathlib.Path) -> None:
    cut_in_half(run / "config.json")


def old_run_config(run: pathlib.Path) -> None:
    record = json.loads((run / "config.json").read_text())
    record["config"]["drafter"]["gamma"] = 7
    (run / "config.json").write_text(json.dumps(record))


def other_drafter(run: pathlib.Path) -> None:
    record = json.loads((run / "config.json").read_text())
    record["config"]["drafter"]["markov_rank"] = 4
    (run / "config.json").write_text(json.dumps(record))


def not_a_run(run: pathlib.Path) -> None:
    (run / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')


RUNS = [
    (cut_checkpoint, "checkpoints/1: damaged checkpoint ("),
    (lose_manifest, "checkpoints/1: damaged checkpoint ("),
    (no_checkpoints, "no finished checkpoint in checkpoints/; train first"),
    (cut_run_config, "config.json: not readable as JSON"),
    (old_run_config, "config.drafter.gamma: no such field"),
    (other_drafter, "checkpoint 1 does not fit config.json ("),
    (not_a_run, "config.json is not the record of a run, but of a model or an exported drafter"),
]


def ask(workdir: pathlib.Path, target: str | None = None):
    conversation = Conversation("p", "p", (Message("user", "hi"),))
    return generate.run(workdir, [conversation], generate.Options(target=target))


@pytest.mark.parametrize("damage, expected", RUNS)
def test_damaged_runs(good, tmp_path, damage, expected):
    run = tmp_path / "run"
    shutil.copytree(good / "run", run)
    damage(run)
    assert expected in message(lambda: ask(run), run)


def test_a_drafter_and_another_target(good):
    line = message(lambda: ask(good / "run", str(good / "other")), good / "run")
    assert f"the drafter in {good / 'run'} was made with target" in line
    assert "has another weights: use the same target" in line


@pytest.mark.parametrize("tap, expected", [(9, "9 is out of range"), (1, "damaged or not a safe")])
def test_taps_are_refused_before_the_weights_are_read(good, tmp_path, tap, expected):
    """Two-sided: with taps that it has, the damaged weights are what is wrong."""
    cut = shutil.copytree(good / "target", tmp_path / "cut")
    truncate_weights(cut)
    mapping = fields(good, {"target": str(cut), "drafter.target_layer_ids": (0, tap)})
    workdir = tmp_path / "run"
    line = message(lambda: train.run(from_mapping(RunConfig, mapping), workdir), workdir)
    assert expected in line


# The same as real commands


@pytest.mark.slow
def test_commands_end_with_one_line(good, tmp_path):
    """Exit code 2, one line on stderr, no traceback, nothing left behind."""
    damaged = tmp_path / "damaged"
    shutil.copytree(good / "run", damaged)
    cut_checkpoint(damaged)
    broken = tmp_path / "broken"
    shutil.copytree(good / "run", broken)
    cut_run_config(broken)
    cut = tmp_path / "cut"
    shutil.copytree(good / "target", cut)
    truncate_weights(cut)
    config = tiny.write_config(
        tmp_path / "config.py", from_mapping(RunConfig, fields(good, {"data.path": ""}))
    )
    new = tmp_path / "new"
    start = [f"--config={config}", f"--workdir={new}"]
    run = f"--workdir={good / 'run'}"
    data = f"--config.data.path={good / 'data'}"
    table = [
        ("train", ["--config=none.py", f"--workdir={new}"], "no config file 'none.py'"),
        ("train", [*start, "--config.train.stepz=3"], "--config.train.stepz: the config has no"),
        ("train", [*start, f"--config.target={cut}"], "damaged or not a safetensors file"),
        ("train", [*start, data, "--config.drafter.mask_token_id=40"], "occurs in the training"),
        ("train", [*start, "--config.mesh.fsdp=64"], "needs 64 devices"),
        ("prepare", [*start, "--config.data.prompts=none.jsonl"], "'none.jsonl' is no existing"),
        ("generate", [run, "--prompt= "], "--prompt is empty: write what the target is to answer"),
        ("generate", [run], "give either --prompt or --prompt_file"),
        ("generate", [f"--workdir={new}", "--prompt=hi"], "new: no run here (config.json is"),
        ("generate", [f"--workdir={damaged}", "--prompt=hi"], "damaged checkpoint ("),
        ("generate", [f"--workdir={broken}", "--prompt=hi"], "not readable as JSON"),
        ("generate", [run, "--prompt=hi", f"--target={good / 'other'}"], "has another weights"),
    ]
    before = contents(tmp_path)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(lambda row: command(row[0], row[1]), table))
    for (name, arguments, expected), done in zip(table, ended, strict=True):
        shown = f"{name} {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 2, shown
        assert expected in done.stderr, shown
        assert done.stderr.startswith("dspark_jax: ") and done.stderr.count("\n") == 1, shown
        check_line(done.stderr)
        assert "Traceback" not in done.stdout, shown
    assert contents(tmp_path) == before


def command(name: str, arguments: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", f"dspark_jax.{name}", *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
