"""Training end to end on a tiny target: it learns, survives kills, and stops when it must.

pytest tests/test_train.py
"""

import dataclasses
import functools
import importlib.util
import logging
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from orbax.checkpoint import v1 as ocp

from dspark_jax import train
from dspark_jax.convert import convert
from dspark_jax.core.config import RunConfig
from dspark_jax.core.errors import Terminated, UserError
from dspark_jax.core.metrics import read_metrics
from dspark_jax.core.sharding import abstract, make_mesh
from dspark_jax.core.trees import named
from dspark_jax.data.batches import batch_rows, pack, split
from dspark_jax.data.dataset import Row, load_dataset, save_dataset
from dspark_jax.data.draft_vocab import draft_vocabulary
from dspark_jax.data.opened import open_target
from dspark_jax.training.checkpoint import (
    checkpoint_steps,
    choose_step,
    load_arrays,
    load_drafter,
    open_checkpoints,
    read_record,
    restore_latest,
    save,
)
from dspark_jax.training.step import TrainState, init_state, make_optimizer, train_step
from dspark_jax.weights.fingerprint import fingerprint

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 8  # of the run that the others are compared with; a checkpoint every 2
SOME_ROWS = 1.5e-4  # GiB; a row's taps and last hidden state are 96 x 3 x 32 floats


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    """The same programs come back in every test and process: compile each once."""
    folder = jax.config.jax_compilation_cache_dir or str(tmp_path_factory.mktemp("jax_cache"))
    cache = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in cache}
    for name, value in cache.items():
        jax.config.update(name, value)
    yield cache
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.make_target(tmp_path_factory.mktemp("model") / "target")


@dataclasses.dataclass(frozen=True)
class Reference:
    """A finished run and what it took to make it."""

    config: RunConfig
    workdir: pathlib.Path
    returned: dict
    compiled: int  # programs of the train step


@pytest.fixture(scope="module")
def reference(target, tmp_path_factory):
    """Data prepared and drafter trained in one go, as the command does."""
    folder = tmp_path_factory.mktemp("reference")
    changes = {"train.num_steps": STEPS, "train.keep_checkpoints": 3}
    config = tiny.make_config(target, tiny.write_prompts(folder / "prompts.jsonl", 14), changes)
    train_step.clear_cache()
    returned = train.run(config, folder / "run")
    return Reference(config, folder / "run", returned, train_step._cache_size())


def changed(reference: Reference, changes: dict) -> RunConfig:
    """The reference's config with some fields changed, on the data it prepared."""
    fields = {
        "train.num_steps": STEPS,
        "train.keep_checkpoints": 3,
        "data.path": str(reference.workdir / "data"),
    }
    return tiny.make_config(
        pathlib.Path(reference.config.target),
        pathlib.Path(reference.config.data.prompts),
        fields | changes,
    )


def rows(workdir: pathlib.Path, kind: str = "") -> dict[int, dict]:
    """What metrics.jsonl says, without times: {step: values}; kind "validation" or training."""
    found: dict[int, dict] = {}
    for line in read_metrics(workdir / "metrics.jsonl"):
        if any(name.startswith("validation/") for name in line) == (kind == "validation"):
            assert line["step"] not in found, f"step {line['step']} is there twice"
            found[line["step"]] = {
                name: value
                for name, value in line.items()
                if name not in ("seconds_per_step", "tokens_per_second")
            }
    return found


def column(workdir: pathlib.Path, name: str) -> list[float]:
    return [row[name] for row in rows(workdir).values()]


def assert_same_run(workdir: pathlib.Path, reference: pathlib.Path) -> None:
    """Every logged number, every checkpoint and its rank, bit for bit."""
    assert rows(workdir) == rows(reference)
    assert rows(workdir, "validation") == rows(reference, "validation")
    assert checkpoint_steps(workdir) == checkpoint_steps(reference)
    last = choose_step(reference, "latest")
    ours, theirs = load_arrays(workdir, last), load_arrays(reference, last)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


# What a run leaves


def test_metrics_have_names_and_every_step_is_there(reference):
    training = rows(reference.workdir)
    assert list(training) == list(range(1, STEPS + 1))
    assert set(training[1]) == {
        "step",
        "loss",
        "loss_ce",
        "loss_l1",
        "loss_confidence",
        "acceptance",
        "acceptance_t0",
        "expected_accepted_length",
        "expected_accepted_length_t0",
        "confidence_error",
        "confidence_bias",
        "confidence_cumulative_bias",
        "anchors_per_row",
        "grad_norm",
        "padding",
        "learning_rate",
    }
    lines = read_metrics(reference.workdir / "metrics.jsonl")
    assert all(line["tokens_per_second"] > 0 for line in lines if "loss" in line)
    assert all(len(row["acceptance"]) == 3 for row in training.values())
    validation = rows(reference.workdir, "validation")
    assert list(validation) == [2, 4, 6, 8]
    for name, value in reference.returned.items():
        assert validation[STEPS][f"validation/{name}"] == value


def test_learning_rate_is_logged_as_it_was_used(reference):
    rates = column(reference.workdir, "learning_rate")
    assert rates[0] == 0.0 and max(rates) == pytest.approx(3e-3)
    assert rates[1:] == sorted(rates[1:], reverse=True)


def test_record_picture_and_tensorboard(reference):
    assert read_record(reference.workdir).config == reference.config
    if importlib.util.find_spec("matplotlib"):
        assert (reference.workdir / "training_curve.png").stat().st_size > 1000
    if importlib.util.find_spec("tensorboardX"):
        assert list((reference.workdir / "tensorboard").glob("events*"))


def test_the_step_is_compiled_once(reference):
    assert reference.compiled == 1


def test_a_finished_run_is_left_alone(reference, tmp_path):
    shutil.copytree(reference.workdir, tmp_path / "run")
    again = train.run(changed(reference, {}), tmp_path / "run")
    assert again == reference.returned
    assert_same_run(tmp_path / "run", reference.workdir)


@pytest.mark.slow
def test_epochs_are_counted_in_rows_and_rounded_up(reference, tmp_path):
    config = changed(reference, {"train.num_steps": 0, "train.num_epochs": 1})
    train.run(config, tmp_path)
    documents = load_dataset(reference.workdir / "data")
    length = len(pack(split(documents, 0.3)[0], config.data.sequence_length))
    assert list(rows(tmp_path)) == list(range(1, -(-length // 2) + 1))


# A pruned vocabulary

PRUNED = {"drafter.vocab_size": 64, "loss.kl": 0.5, "train.num_steps": 4}


@pytest.fixture(scope="module")
def pruned(reference, tmp_path_factory):
    """A short run of a drafter that proposes 64 of the 272 tokens."""
    workdir = tmp_path_factory.mktemp("pruned") / "run"
    train.run(changed(reference, PRUNED), workdir)
    return workdir


def most_said(data: pathlib.Path) -> np.ndarray:
    """The draft vocabulary that a data set gives."""
    documents = split(load_dataset(data), 0.3)[0]
    return draft_vocabulary(documents, [], tiny.VOCAB, 64, [tiny.END])[0]


def test_a_pruned_drafter_proposes_what_the_target_says_most(reference, pruned):
    ids = most_said(reference.workdir / "data")
    assert tiny.END in ids and len(ids) == 64
    for step in checkpoint_steps(pruned):
        arrays = load_arrays(pruned, step)
        assert arrays["draft_ids"].dtype == np.int32
        np.testing.assert_array_equal(arrays["draft_ids"], ids)
        assert arrays["markov.w1"].shape[0] == tiny.VOCAB and arrays["markov.w2"].shape[0] == 64
    assert all(row["loss_kl"] > 0 for row in rows(pruned).values())
    assert all(0 < rate < 1 for row in rows(pruned).values() for rate in row["acceptance"])
    assert column(pruned, "loss") != column(reference.workdir, "loss")[:4]


@pytest.mark.slow
def test_a_pruned_drafter_is_the_same_on_any_mesh(reference, pruned, tmp_path):
    train.run(changed(reference, PRUNED | {"mesh": {"fsdp": 2, "tp": 2}}), tmp_path)
    for name in ("loss", "loss_kl", "grad_norm"):
        np.testing.assert_allclose(column(tmp_path, name), column(pruned, name), rtol=2e-4)
    ours, theirs = load_arrays(tmp_path, 4), load_arrays(pruned, 4)
    np.testing.assert_array_equal(ours["draft_ids"], theirs["draft_ids"])


def test_a_resumed_run_keeps_the_vocabulary_of_its_checkpoint(reference, pruned, tmp_path):
    """Data that has changed would give another one of the same size, and every row of W2 and of
    the head would mean another token (R027)."""
    rng, target = np.random.default_rng(0), pathlib.Path(reference.config.target)
    documents = {f"doc-{i}": rng.integers(150, 250, 60).tolist() for i in range(20)}
    data = tiny.make_data(tmp_path / "data", target, documents)
    shutil.copytree(pruned, tmp_path / "run")
    config = changed(reference, PRUNED | {"data.path": str(data), "train.num_steps": 6})
    train.run(config, tmp_path / "run")
    before, after = (load_arrays(tmp_path / "run", step) for step in (4, 6))
    assert not np.array_equal(most_said(data), before["draft_ids"])
    np.testing.assert_array_equal(after["draft_ids"], before["draft_ids"])
    assert not np.array_equal(after["markov.w2"], before["markov.w2"])


# It learns


def names_for(fraction: float, train_rows: int) -> tuple[list[str], str]:
    """Ids that the split puts into training, and one that it keeps for validation."""
    empty = [Row(f"doc-{i}", "test", np.zeros(1, np.int32), np.zeros(1, bool)) for i in range(99)]
    kept, held_out = split(empty, fraction)
    return [row.id for row in kept[:train_rows]], held_out[0].id


@pytest.mark.slow
def test_one_repeated_sample_is_learnt_by_heart(reference, tmp_path):
    """A shift between anchors, labels and previous tokens would leave it well below (R039)."""
    answered = load_dataset(reference.workdir / "data")[0]
    (name,), held_out = names_for(0.3, 1)
    target = pathlib.Path(reference.config.target)
    same = [dataclasses.replace(answered, id=name) for name in (name, held_out)]
    save_dataset(tmp_path / "data", same, fingerprint(target, str(target)), 0)
    config = changed(
        reference,
        {
            "data.path": str(tmp_path / "data"),
            "data.sequence_length": 48,
            "train.global_batch_size": 1,
            "train.num_steps": 300,
            "train.num_anchors": 16,
            "train.log_every": 1,
            "train.validate_every": 300,
            "train.checkpoint_every": 300,
            "train.learning_rate": 1e-2,
        },
    )
    values = train.run(config, tmp_path / "run")
    losses = column(tmp_path / "run", "loss")
    assert losses[-1] < losses[0] / 3
    # Of block_size + 1 = 4. At temperature 1 it has to match whole distributions.
    assert values["expected_accepted_length_t0"] > 3.95
    assert values["expected_accepted_length"] > 3.0


@pytest.mark.slow
def test_without_heads_it_is_a_dflash_run(reference, tmp_path):
    changes = {
        "drafter.markov_head": "none",
        "drafter.markov_rank": 0,
        "drafter.confidence_head": False,
        "drafter.sample_from_anchor": False,
        "train.learning_rate": 1e-2,
    }
    values = train.run(changed(reference, changes), tmp_path)
    losses = column(tmp_path, "loss")
    assert losses[-1] < losses[0]
    assert len(values["acceptance"]) == 2  # one proposal less than slots
    assert not [name for name in load_arrays(tmp_path, STEPS) if "markov" in name or "conf" in name]


# Nothing but the recipe changes the result


def test_validation_changes_nothing(reference, tmp_path):
    train.run(changed(reference, {"train.validate_every": 1000}), tmp_path)
    assert rows(tmp_path) == rows(reference.workdir)
    assert list(rows(tmp_path, "validation")) == [STEPS]


def test_remembered_features_change_nothing(reference, tmp_path):
    """With room for four of five rows some batches come from memory and some from the target."""
    train.run(changed(reference, {"train.feature_memory_gb": SOME_ROWS}), tmp_path)
    assert rows(tmp_path) == rows(reference.workdir)


def raw_arrays(workdir: pathlib.Path, step: int) -> dict[str, np.ndarray]:
    """What training goes on with, whatever is exported."""
    path = workdir.absolute() / "checkpoints" / str(step)
    saved = ocp.checkpointables_metadata(path).metadata["drafter"]
    host = jax.tree.map(lambda m: np.empty(m.shape, m.dtype), saved)
    return ocp.load_checkpointables(path, {"drafter": host})["drafter"]


def test_an_average_of_the_weights_is_what_is_used(reference, tmp_path, caplog):
    """Saved, exported and resumed: the average of the weights after each update."""
    changes = FIRST | {"train.ema": 0.14, "train.num_steps": 5}
    config, workdir = changed(reference, changes), tmp_path / "run"
    train.run(config, workdir)
    expected = column(reference.workdir, "loss")[:2]
    np.testing.assert_allclose(column(workdir, "loss")[:2], expected, rtol=1e-5)
    average = raw_arrays(workdir, 1)  # the first learning rate is 0
    for step in range(2, 6):
        decay, raw = min(0.14, step / (9 + step)), raw_arrays(workdir, step)
        average = {n: decay * average[n].astype(float) + (1 - decay) * raw[n] for n in raw}
        for name, array in load_arrays(workdir, step).items():
            np.testing.assert_allclose(array, average[name], rtol=1e-5, atol=1e-7)
            assert (array != raw[name]).any()
    again = tmp_path / "again"
    shutil.copytree(workdir, again)
    shutil.rmtree(again / "checkpoints" / "5" / "ema")  # lost, not left out
    shutil.rmtree(again / "checkpoints" / "4")
    with caplog.at_level(logging.WARNING):
        train.run(config, again)
    assert "checkpoint 5 cannot be read" in caplog.text
    assert rows(again) == rows(workdir) and rows(again, "validation") == rows(workdir, "validation")
    ours, theirs = load_arrays(again, 5), load_arrays(workdir, 5)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_an_average_may_begin_and_end_at_a_restart(reference, tmp_path, capsys):
    for steps, decay in ((2, 0.0), (4, 0.5), (6, 0.0)):
        changes = {"train.ema": decay, "train.num_steps": steps, "train.warmup_fraction": 0.5}
        train.run(changed(reference, changes), tmp_path / "run")
        average, raw = load_arrays(tmp_path / "run", steps), raw_arrays(tmp_path / "run", steps)
        assert all(np.array_equal(average[name], raw[name]) == (not decay) for name in raw)
    assert "train.ema=0.5 (there 0.0)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"train.accumulation": 2}, {"mesh": {"fsdp": 2, "tp": 1}}])
def test_partitions_agree_to_rounding(reference, tmp_path, change):
    train.run(changed(reference, change), tmp_path)
    for name in ("loss", "grad_norm", "learning_rate"):
        expected = column(reference.workdir, name)
        np.testing.assert_allclose(column(tmp_path, name), expected, rtol=2e-4, atol=1e-6)


# Going on after a kill


def command(workdir: pathlib.Path, config: pathlib.Path, cache: dict) -> subprocess.Popen:
    environment = {
        **os.environ,
        "JAX_NUM_CPU_DEVICES": "8",
        **{name.upper(): str(value) for name, value in cache.items()},
    }
    arguments = [f"--config={config}", f"--workdir={workdir}"]
    return subprocess.Popen(
        [sys.executable, "-m", "dspark_jax.train", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_when(process: subprocess.Popen, ready, limit: float = 300.0) -> bool:
    """Kills the process as soon as `ready()`; whether it was still running."""
    until = time.monotonic() + limit
    while process.poll() is None and time.monotonic() < until:
        if ready():
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.0005)
    output, _ = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), output
    return process.returncode != 0


def saving(workdir: pathlib.Path):
    """A checkpoint is being written."""
    return lambda: any("tmp" in path.name for path in workdir.glob("checkpoints/*"))


def saved_beyond(workdir: pathlib.Path, step: int):
    """A checkpoint later than `step` has just been finished."""
    return lambda: any(
        path.name.isdigit() and int(path.name) > step for path in workdir.glob("checkpoints/*")
    )


def logged(workdir: pathlib.Path, step: int):
    """The metrics have reached `step`."""

    def ready() -> bool:
        path = workdir / "metrics.jsonl"
        return path.exists() and f'{{"step": {step},' in path.read_text()

    return ready


LONG = {
    "train.num_steps": 24,
    "train.checkpoint_every": 3,
    "train.validate_every": 6,
    "train.keep_checkpoints": 2,
    "train.feature_memory_gb": SOME_ROWS,
}


@pytest.fixture(scope="module")
def uninterrupted(reference, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    train.run(changed(reference, LONG), workdir)
    return workdir


def test_killed_runs_go_on_bit_for_bit(reference, uninterrupted, tmp_path, compile_once):
    """Killed within a save, then between a save and the next metrics (R120, R121, R123, R124)."""
    config = tiny.write_config(tmp_path / "config.py", changed(reference, LONG))
    workdir = tmp_path / "run"
    assert kill_when(command(workdir, config, compile_once), saving(workdir))
    assert kill_when(command(workdir, config, compile_once), saved_beyond(workdir, 3))
    assert not kill_when(command(workdir, config, compile_once), lambda: False)
    assert_same_run(workdir, uninterrupted)


def test_sigterm_saves_before_the_end(reference, uninterrupted, tmp_path):
    """The step it was at, whatever the interval; the rest is the same to the bit."""

    def terminate() -> None:
        while not logged(tmp_path, 4)():
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=terminate, daemon=True).start()
    with pytest.raises(Terminated, match=f"step .* of 24 is saved in {tmp_path}"):
        train.run(changed(reference, LONG | {"train.checkpoint_every": 24}), tmp_path)
    assert signal.getsignal(signal.SIGTERM) is before
    (step,) = checkpoint_steps(tmp_path)
    assert step == max(rows(tmp_path)) and 4 <= step < 24
    train.run(changed(reference, LONG), tmp_path)
    for kind in ("", "validation"):
        assert rows(tmp_path, kind) == rows(uninterrupted, kind)
    ours, theirs = load_arrays(tmp_path, 24), load_arrays(uninterrupted, 24)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_random_kills_go_on_bit_for_bit(reference, uninterrupted, tmp_path, compile_once, seed):
    config = tiny.write_config(tmp_path / "config.py", changed(reference, LONG))
    workdir, rng, killed = tmp_path / "run", random.Random(seed), 0
    for _ in range(6):
        step = rng.randrange(1, 24)
        ready = rng.choice([saving(workdir), logged(workdir, step), saved_beyond(workdir, step)])
        delay = rng.choice([0, 0, 0.01, 0.1])

        def late(ready=ready, delay=delay) -> bool:
            return ready() and time.sleep(delay) is None

        killed += kill_when(command(workdir, config, compile_once), late)
    assert killed
    assert not kill_when(command(workdir, config, compile_once), lambda: False)
    assert_same_run(workdir, uninterrupted)


# Damaged checkpoints


def largest(folder: pathlib.Path) -> pathlib.Path:
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)


def truncate(step: pathlib.Path) -> None:
    path = largest(step / "drafter")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def lose_a_file(step: pathlib.Path) -> None:
    largest(step / "optimizer").unlink()


def lose_an_item(step: pathlib.Path) -> None:
    shutil.rmtree(step / "optimizer")


def leave_temporary(step: pathlib.Path) -> None:
    step.rename(step.with_name(f"{step.name}.orbax-checkpoint-tmp-1"))


def leave_empty(step: pathlib.Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def cut_rank(step: pathlib.Path) -> None:
    (step / "metrics" / "metrics").write_text('{"expected')


@pytest.mark.parametrize("damage", [truncate, lose_a_file, lose_an_item, leave_empty])
def test_an_older_checkpoint_steps_in(reference, tmp_path, damage, caplog):
    workdir = tmp_path / "run"
    shutil.copytree(reference.workdir, workdir)
    damage(workdir / "checkpoints" / str(STEPS))
    with caplog.at_level(logging.WARNING):
        train.run(changed(reference, {}), workdir)
    assert f"checkpoint {STEPS} cannot be read" in caplog.text
    assert_same_run(workdir, reference.workdir)


@pytest.mark.parametrize("damage", [leave_temporary, cut_rank])
def test_half_a_save_and_a_lost_rank_do_no_harm(reference, tmp_path, damage):
    workdir = tmp_path / "run"
    shutil.copytree(reference.workdir, workdir)
    damage(workdir / "checkpoints" / str(STEPS))
    train.run(changed(reference, {}), workdir)
    assert rows(workdir) == rows(reference.workdir)
    assert not list(workdir.glob("checkpoints/*tmp*"))
    assert choose_step(workdir, "latest") == STEPS


def test_no_readable_checkpoint_is_one_line(reference, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(reference.workdir, workdir)
    for index, step in enumerate((4, 6, 8)):
        (truncate, lose_a_file, leave_empty)[index](workdir / "checkpoints" / str(step))
    before = sorted(str(path) for path in workdir.rglob("*"))
    with pytest.raises(UserError, match="none of the checkpoints 8, 6, 4 can .*delete") as e:
        train.run(changed(reference, {}), workdir)
    assert "\n" not in str(e.value)
    assert sorted(str(path) for path in workdir.rglob("*")) == before
    with pytest.raises(UserError, match="damaged"):
        load_arrays(workdir, 4)


# Which checkpoint is best


def test_the_best_is_kept_beside_the_latest(reference, tmp_path):
    """A checkpoint that was not validated has no rank, not an old one and not the lowest."""
    record = read_record(reference.workdir)
    with jax.set_mesh(make_mesh()):
        drafter = load_drafter(record, reference.workdir, STEPS)
        state = TrainState(jnp.int32(0), drafter, {"mu": drafter.norm[...]})
        with open_checkpoints(tmp_path, keep=2) as run:
            for step, length in enumerate((1.0, 3.0, None, 2.0, 2.5, None), start=1):
                save(run, state, step, length)
    ranks = checkpoint_steps(tmp_path)
    assert list(ranks) == [2, 5, 6] and ranks[2] == 3.0
    assert choose_step(tmp_path, "best") == 2 and choose_step(tmp_path, "latest") == 6


def test_checkpoints_are_ranked_by_their_own_validation(reference, uninterrupted, tmp_path):
    validation = rows(reference.workdir, "validation")
    name = "validation/expected_accepted_length"
    for step, rank in checkpoint_steps(reference.workdir).items():
        assert rank == validation[step][name]
    best = max(validation, key=lambda step: (validation[step][name], step))
    assert choose_step(reference.workdir, "best") == best
    # Every other checkpoint of this run falls between two validations.
    validation = rows(uninterrupted, "validation")
    for step, rank in checkpoint_steps(uninterrupted).items():
        assert rank == validation[step][name] if step in validation else rank == float("-inf")


def test_a_restored_state_is_the_saved_one_on_any_mesh(reference, tmp_path):
    config, record = reference.config, read_record(reference.workdir)
    tx = make_optimizer(config.train, STEPS)
    init = functools.partial(init_state, shape=record.shape, tx=tx)
    states = {}
    for mesh in ((1, 1), (2, 1), (2, 2)):
        with jax.set_mesh(make_mesh(*mesh)):
            target = open_target(config.target, config.target_dtype).model
            with open_checkpoints(reference.workdir, 3) as run:
                make = functools.partial(init, jax.random.key(0), target)
                state, step = restore_latest(run, abstract(make), jax.jit(make))
            assert step == STEPS and int(state.step) == STEPS
            fresh = jax.eval_shape(init, jax.random.key(0), target)
            assert jax.tree.structure(state) == jax.tree.structure(fresh)
            states[mesh] = jax.device_get(jax.tree.leaves(state))
            shardings = {x.sharding.num_devices for x in jax.tree.leaves(state)}
            assert shardings == {mesh[0] * mesh[1]}
    for leaves in states.values():
        assert all(map(np.array_equal, leaves, states[1, 1]))
    counts = [x for x in states[1, 1] if x.ndim == 0]
    assert [int(x) for x in counts] == [STEPS] * len(counts)  # every counter, the optimizer's too


# Weights from elsewhere

# The learning rate of the first update is 0: what is saved then is what a run began with.
FIRST = {"train.checkpoint_every": 1, "train.keep_checkpoints": STEPS}


@pytest.fixture(scope="module")
def kept(reference, tmp_path_factory):
    """The reference's drafter after 4 steps, in every layout."""
    folder = tmp_path_factory.mktemp("kept")
    for layout in ("speculators", "deepspec", "orbax"):
        convert(str(reference.workdir), layout, folder / layout, step="4")
    return folder


@pytest.mark.parametrize("layout", ["speculators", "deepspec", "orbax"])
def test_training_starts_from_a_drafter_in_any_layout(reference, kept, tmp_path, layout, capsys):
    """And after a kill it goes on without that folder."""
    start = shutil.copytree(kept / layout, tmp_path / "start")
    config = changed(reference, FIRST | {"drafter.init_from": str(start), "drafter.init": "target"})
    train.run(config, tmp_path / "run")
    ours, theirs = load_arrays(tmp_path / "run", 1), load_arrays(reference.workdir, 4)
    assert set(ours) == set(theirs)
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert "init_from: " in capsys.readouterr().out
    shutil.rmtree(start)
    train.run(dataclasses.replace(config, seed=config.seed), tmp_path / "run")
    with pytest.raises(UserError, match="drafter.init_from=''"):
        train.run(changed(reference, FIRST | {"drafter.init": "target"}), tmp_path / "run")


@pytest.mark.slow
def test_heads_that_are_not_there_start_anew_only_when_asked(reference, tmp_path, capsys):
    bare = changed(reference, {"drafter.confidence_head": False})
    start = tiny.make_run(tmp_path / "start", bare)
    fields = FIRST | {"drafter.init_from": str(start)}
    with pytest.raises(UserError, match=r"confidence_head=True \(there False\).*init_new='confid"):
        train.run(changed(reference, fields), tmp_path / "run")
    for part, reason in (("markov", "already has a markov head"), ("head", "must be one of")):
        with pytest.raises(UserError, match=reason):
            train.run(changed(reference, fields | {"drafter.init_new": part}), tmp_path / "run")
    with pytest.raises(UserError, match="the config has no confidence head"):
        new = {"drafter.init_new": "confidence", "drafter.confidence_head": False}
        train.run(changed(reference, fields | new), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    config = changed(reference, fields | {"drafter.init_new": "confidence"})
    train.run(config, tmp_path / "run")
    assert "it has no confidence head: that starts anew" in capsys.readouterr().out
    ours, theirs = load_arrays(tmp_path / "run", 1), load_arrays(start, 1)
    assert {name.split(".")[0] for name in set(ours) - set(theirs)} == {"confidence"}
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)
    with jax.set_mesh(make_mesh(1, 1)):  # what a run without init_from begins with
        target = open_target(config.target, config.target_dtype).model
        tx = make_optimizer(config.train, STEPS)
        init = functools.partial(init_state, shape=read_record(tmp_path / "run").shape, tx=tx)
        fresh = named(jax.jit(init)(jax.random.key(0), target).drafter)
    for name in set(ours) - set(theirs):
        np.testing.assert_array_equal(ours[name], fresh[name])


def test_a_drafter_to_start_from_keeps_its_vocabulary(reference, pruned, tmp_path):
    """The data would choose other tokens (R027)."""
    start = tiny.make_run(tmp_path / "start", changed(reference, PRUNED))
    ids = load_arrays(start, 1)["draft_ids"]
    assert not np.array_equal(ids, most_said(reference.workdir / "data"))
    train.run(changed(reference, PRUNED | {"drafter.init_from": str(start)}), tmp_path / "run")
    np.testing.assert_array_equal(load_arrays(tmp_path / "run", 4)["draft_ids"], ids)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"drafter.block_size": 4}, [r"drafter.block_size=4 \(there 3\)"]),
        (
            {"drafter.target_layer_ids": (0, 1), "drafter.num_layers": 2, "drafter.markov_rank": 4},
            [r"target_layer_ids=\(0, 1\) \(there", r"num_layers=2 \(there 1", "markov_rank=4"],
        ),
        ({"drafter.sample_from_anchor": False}, ["drafter.sample_from_anchor=False"]),
        ({"drafter.mask_token_id": 269}, [r"drafter.mask_token_id=269 \(there 270\)"]),
        ({"drafter.vocab_size": 64}, [r"drafter.vocab_size=64 \(there 0\)"]),
        ({"drafter.confidence_head": False}, ["drafter.confidence_head=False"]),
        ({"drafter.init_from": "no/such"}, ["drafter 'no/such': no such local folder"]),
    ],
)
def test_a_drafter_that_contradicts_the_config_is_refused(
    reference, kept, tmp_path, changes, expected
):
    fields = {"drafter.init_from": str(kept / "deepspec")} | changes
    with pytest.raises(UserError) as caught:
        train.run(changed(reference, fields), tmp_path / "run")
    for part in expected:
        assert re.search(part, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_an_import_is_trained_on_where_it_lies(reference, kept, tmp_path, capsys):
    """The loss of its next step is that of the run it came from; the optimizer starts anew."""
    workdir = shutil.copytree(kept / "orbax", tmp_path / "run")
    config = changed(reference, {})
    with jax.set_mesh(make_mesh(1, 1)):
        target = open_target(config.target, config.target_dtype).model
        tx = make_optimizer(config.train, STEPS)
        init = functools.partial(init_state, shape=read_record(workdir).shape, tx=tx)
        with open_checkpoints(workdir, 3) as run:
            make = functools.partial(init, jax.random.key(0), target)
            state, step = restore_latest(run, abstract(make), jax.jit(make))
        adam, schedule = (
            [x for x in jax.tree.leaves(state.opt_state, is_leaf=is_kind) if is_kind(x)]
            for is_kind in (
                lambda x: isinstance(x, optax.ScaleByAdamState),
                lambda x: isinstance(x, optax.ScaleByScheduleState),
            )
        )
        assert step == 4 and int(state.step) == 4
        assert [int(x.count) for x in schedule] == [4] and [int(x.count) for x in adam] == [0]
        assert not any(np.any(x) for x in jax.tree.leaves((adam[0].mu, adam[0].nu)))
    train.run(config, workdir)
    ours, theirs = rows(workdir), rows(reference.workdir)
    assert list(ours) == [5, 6, 7, 8]
    assert ours[5]["loss"] == theirs[5]["loss"] and ours[6]["loss"] != theirs[6]["loss"]
    for step in ours:
        assert ours[step]["learning_rate"] == theirs[step]["learning_rate"]


def test_a_strangers_import_may_be_trained_on(reference, kept, tmp_path):
    """Its files tell nothing of the recipe, and say outright what a config leaves to the target."""
    start = shutil.copytree(kept / "deepspec", tmp_path / "start")
    (start / "dspark_jax.json").unlink()
    with pytest.raises(UserError, match="--target"):
        convert(str(start), "orbax", tmp_path / "run")
    convert(str(start), "orbax", tmp_path / "run", target=reference.config.target)
    with pytest.raises(UserError, match=r"another drafter, drafter.block_size=4 \(there 3\)"):
        train.run(changed(reference, {"drafter.block_size": 4}), tmp_path / "run")
    train.run(changed(reference, {}), tmp_path / "run")
    assert list(rows(tmp_path / "run")) == list(range(1, STEPS + 1))
    assert rows(tmp_path / "run")[1]["loss"] < rows(reference.workdir)[1]["loss"]
    assert read_record(tmp_path / "run").config == changed(reference, {})


# What stops a run


POISON = 250  # a token whose embedding row is infinite


def infinite_row(weights: dict[str, np.ndarray]) -> None:
    weights["model.embed_tokens.weight"][POISON] = np.inf


def infinite_last_layer(weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.3.mlp.down_proj.weight"][:] = np.inf


def poisoned(reference, folder: pathlib.Path, change, where: int | None, seed=0) -> RunConfig:
    """Six documents, each a row, and one for validation (number 6); POISON is in one of them."""
    target = tiny.make_target(folder / "target", change=change)
    names, held_out = names_for(0.3, 6)
    rng = np.random.default_rng(0)
    documents = {name: rng.integers(3, 200, 60).tolist() for name in [*names, held_out]}
    if where is not None:
        documents[[*names, held_out][where]][20] = POISON
    tiny.make_data(folder / "data", target, documents)
    changes = {"target": str(target), "data.path": str(folder / "data"), "seed": seed}
    return changed(reference, changes | {"train.num_steps": 12, "train.checkpoint_every": 1})


def test_a_document_that_gives_nan_is_named_and_nothing_of_it_is_saved(reference, tmp_path):
    # Each document is a row. A seed that brings the bad one in the third batch:
    documents = [
        Row(name, "test", np.ones(60, np.int32), np.ones(60, bool)) for name in names_for(0.3, 6)[0]
    ]
    names = [name for (name,) in pack(documents, 96).names]
    bad = names.index(names_for(0.3, 6)[0][3])
    seed = next(
        seed
        for seed in range(100)
        if bad in batch_rows(2, num_rows=6, batch_size=2, seed=seed).tolist()
    )
    config = poisoned(reference, tmp_path, infinite_row, 3, seed)
    with pytest.raises(UserError) as error:
        train.run(config, tmp_path / "run")
    message = str(error.value)
    assert "step 3: tap of layer 0 has NaN or infinite values" in message
    assert f"in {names[bad]};" in message
    assert list(rows(tmp_path / "run")) == [1, 2]
    saved = checkpoint_steps(tmp_path / "run")
    assert max(saved) == 2
    for step in saved:
        arrays = load_arrays(tmp_path / "run", step)
        assert all(np.isfinite(array).all() for array in arrays.values())


def test_last_hidden_states_that_are_not_finite_stop_the_first_step(reference, tmp_path):
    config = poisoned(reference, tmp_path, infinite_last_layer, None)
    with pytest.raises(UserError, match="step 1: .*last hidden state .*NaN or infinite"):
        train.run(config, tmp_path / "run")
    assert not list(tmp_path.glob("run/checkpoints/[0-9]*"))


def test_a_validation_that_is_not_finite_stops_the_run(reference, tmp_path):
    config = poisoned(reference, tmp_path, infinite_row, 6)
    with pytest.raises(UserError, match="validation after step 2: .*not finite"):
        train.run(config, tmp_path / "run")
    assert max(checkpoint_steps(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"drafter.block_size": 4}, r"drafter.block_size=4 \(there 3\)"),
        ({"drafter.target_layer_ids": (0, 1)}, r"drafter.target_layer_ids=\(0, 1\) \(there"),
        ({"drafter.sample_from_anchor": False}, r"drafter.sample_from_anchor=False \(there True"),
        ({"drafter.vocab_size": 64}, r"drafter.vocab_size=64 \(there 0\)"),
    ],
)
def test_another_drafter_is_refused_by_name(reference, tmp_path, change, expected):
    workdir = tmp_path / "run"
    shutil.copytree(reference.workdir, workdir)
    with pytest.raises(UserError, match=expected):
        train.run(changed(reference, change), workdir)
    assert read_record(workdir).config == reference.config


@pytest.mark.slow
def test_a_run_that_never_began_may_change_its_mind(reference, tmp_path):
    """A mistake in the data does not tie the folder to the drafter of that attempt."""
    with pytest.raises(UserError, match="no existing file"):
        train.run(changed(reference, {"data.path": "", "data.prompts": "none.jsonl"}), tmp_path)
    assert not (tmp_path / "config.json").exists()
    train.run(changed(reference, {"drafter.block_size": 2, "train.num_steps": 1}), tmp_path)
    assert list(rows(tmp_path)) == [1]
