"""Several processes, other meshes, a mesh of the target's own: the same run, and one end for all.

pytest tests/test_processes.py
"""

import contextlib
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import jax
import numpy as np
import pytest
import tiny
from test_train import compile_once, logged, rows, saving  # noqa: F401 (a fixture)

from dspark_jax import train
from dspark_jax.core import processes
from dspark_jax.core.config import MeshConfig, RunConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.processes import HEARTBEAT_SECONDS
from dspark_jax.core.sharding import make_meshes
from dspark_jax.training.checkpoint import checkpoint_steps, load_arrays

TESTS = pathlib.Path(__file__).resolve().parent
ROUNDING = {"rtol": 3e-4, "atol": 2e-6}
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and data of 30 documents of many lengths: rows that are full and rows that are not.

    Three rows are for validation, which eight devices cannot share evenly.
    """
    folder = tmp_path_factory.mktemp("processes")
    target = tiny.make_target(folder / "target")
    rng = np.random.default_rng(0)
    sizes = rng.integers(8, 90, 40)
    documents = {f"d{i}": rng.integers(3, 200, n).tolist() for i, n in enumerate(sizes)}
    tiny.make_data(folder / "data", target, documents)
    return folder


def config_of(folder: pathlib.Path, changes: dict) -> RunConfig:
    fields = {
        "train.global_batch_size": 8,
        "train.num_steps": STEPS,
        "train.validate_every": 4,
        "train.checkpoint_every": 3,
        "train.keep_checkpoints": 2,
        "train.validation_rows": 3,
        "train.ema": 0.9,
        "data.path": str(folder / "data"),
        "mesh": {"fsdp": -1, "tp": 1},
    }
    return tiny.make_config(folder / "target", folder / "none.jsonl", fields | changes)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


class Together:
    """Processes of one command, with some CPU devices each.

    Args:
      each: flags of one process only, by its index; it may take those that join it to the others.
      variables: of the environment, in place of those flags.
    """

    def __init__(
        self,
        arguments: list[str],
        cache: dict,
        number: int = 2,
        devices: int = 4,
        each: Callable[[int], list[str]] = lambda index: [],
        variables: Callable[[int], dict[str, str]] | None = None,
    ):
        environment = {
            **os.environ,
            "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
            "JAX_NUM_CPU_DEVICES": str(devices),
            **{name.upper(): str(value) for name, value in cache.items()},
        }
        address = f"localhost:{free_port()}"
        self.processes = []
        for index in range(number):
            flags = [f"--coordinator={address}", f"--num_processes={number}"]
            flags.append(f"--process_id={index}")
            flags = ["--distributed"] if variables else flags if number > 1 else []
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments, *flags, *each(index)],
                    cwd=TESTS.parent,
                    env=environment | (variables(index) if variables else {}),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def end(self, limit: float = 300.0) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) of each; they have to end within `limit` seconds."""
        until, found = time.monotonic() + limit, []
        try:
            for process in self.processes:
                out, error = process.communicate(timeout=max(until - time.monotonic(), 1))
                found.append((process.returncode, out, error))
        finally:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        return found

    def when(self, ready: Callable[[], bool], limit: float = 250.0) -> bool:
        """Waits until `ready()`; False if one of them ended before."""
        until = time.monotonic() + limit
        while time.monotonic() < until and all(p.poll() is None for p in self.processes):
            if ready():
                return True
            time.sleep(0.001)
        return False


def training(folder: pathlib.Path, workdir: pathlib.Path, changes: dict) -> list[str]:
    """The command."""
    workdir.parent.mkdir(parents=True, exist_ok=True)
    config = tiny.write_config(workdir.parent / f"{workdir.name}.py", config_of(folder, changes))
    return ["-m", "dspark_jax.train", f"--config={config}", f"--workdir={workdir}"]


def assert_near(workdir: pathlib.Path, whole: pathlib.Path, steps: int = STEPS) -> None:
    """Every step, validation and the last weights are those of the other run, to rounding."""
    for kind in ("", "validation"):
        ours, theirs = rows(workdir, kind), rows(whole, kind)
        assert list(ours) == [step for step in theirs if step <= steps]
        for step, values in ours.items():
            for name, value in values.items():
                np.testing.assert_allclose(
                    value, theirs[step][name], **ROUNDING, err_msg=f"step {step}: {name}"
                )
    if steps == STEPS:
        ours, theirs = load_arrays(workdir, STEPS), load_arrays(whole, STEPS)
        for name, array in theirs.items():
            np.testing.assert_allclose(ours[name], array, rtol=2e-3, atol=2e-4, err_msg=name)


def assert_one_line(error: str, expected: str) -> None:
    assert error.startswith("dspark_jax: ") and error.count("\n") == 1, error
    assert expected in error


@pytest.fixture(scope="module")
def whole(folder, compile_once, tmp_path_factory):  # noqa: F811
    """The run in one process on one device."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    train.run(config_of(folder, {"mesh": {"fsdp": 1, "tp": 1}}), workdir)
    return workdir


# The same run.


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{"fsdp": 8, "tp": 1}, {"fsdp": 2, "tp": 2, "target_fsdp": 2, "target_tp": 2}]
)
def test_two_processes_of_four_devices_are_one_run(folder, whole, tmp_path, compile_once, mesh):  # noqa: F811
    """Losses, validation and weights are those of one device; one of them prints and writes.

    Three rows are validated, which eight devices cannot share evenly.
    """
    command = training(folder, tmp_path / "run", {"mesh": mesh})
    first, second = Together(command, compile_once).end()
    assert first[0] == 0, first
    assert second == (0, "", "")
    assert "validation: expected accepted length" in first[1]
    assert f"100%, {STEPS}/{STEPS}" in first[2]
    assert_near(tmp_path / "run", whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"fsdp": 4, "tp": 1, "target_fsdp": 4},
        {"fsdp": 4, "tp": 1, "target_fsdp": 2, "target_tp": 2},
        {"fsdp": 2, "tp": 2},
    ],
)
def test_on_any_mesh_and_beside_the_target(folder, whole, tmp_path, mesh):
    """On four devices with the target on four others, or all on four."""
    train.run(config_of(folder, {"mesh": mesh}), tmp_path / "run")
    assert_near(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_drafter_may_start_as_layers_of_a_target_elsewhere(folder, tmp_path):
    """They are taken over where the target is, and moved."""
    changes = {"drafter.init": "target", "train.num_steps": 1, "train.checkpoint_every": 1}
    for name, mesh in (("one", {"fsdp": 1, "tp": 1}), ("two", {"fsdp": 4, "target_fsdp": 4})):
        train.run(config_of(folder, changes | {"mesh": mesh}), tmp_path / name)
    one, two = (load_arrays(tmp_path / name, 1) for name in ("one", "two"))
    for name, array in one.items():  # the first learning rate is 0
        np.testing.assert_allclose(two[name], array, rtol=1e-6, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_two_processes_prepare_the_same_data(folder, tmp_path, compile_once):  # noqa: F811
    """Each runs the target on its share of the prompts; one writes."""
    prompts = tiny.write_prompts(tmp_path / "prompts.jsonl", 11)
    changes = {"data.path": "", "data.prompts": str(prompts), "data.generation_batch": 8}
    train.run(config_of(folder, changes | {"train.num_steps": 1}), tmp_path / "one")
    command = training(folder, tmp_path / "two", changes | {"train.num_steps": 1})
    first, second = Together(command, compile_once).end()
    assert (first[0], second) == (0, (0, "", "")), first
    one, two = (tmp_path / name / "data" / "responses.jsonl" for name in ("one", "two"))
    assert one.read_text() == two.read_text() and one.read_text().count("\n") == 11
    assert rows(tmp_path / "two")[1]["loss"] == pytest.approx(rows(tmp_path / "one")[1]["loss"])


@pytest.mark.slow
def test_slurm_says_who_they_are(folder, whole, tmp_path, compile_once):  # noqa: F811
    """--distributed alone, with the variables that srun sets."""
    job = free_port()

    def variables(index: int) -> dict[str, str]:
        names = ("JOB_ID", "STEP_NODELIST", "NTASKS", "PROCID", "LOCALID", "STEP_NUM_NODES")
        values = (job, "localhost", 2, index, 0, 2)
        return {f"SLURM_{name}": str(value) for name, value in zip(names, values, strict=True)}

    command = training(folder, tmp_path / "run", {"train.num_steps": 1})
    first, second = Together(command, compile_once, variables=variables).end()
    assert (first[0], second) == (0, (0, "", "")), first
    loss = rows(whole)[1]["loss"]
    np.testing.assert_allclose(rows(tmp_path / "run")[1]["loss"], loss, **ROUNDING)


# Going on elsewhere.

# Processes, devices of each, mesh.
PLACES = [
    (2, 4, {"fsdp": 8, "tp": 1}),
    (1, 1, {"fsdp": 1, "tp": 1}),
    (2, 2, {"fsdp": 2, "tp": 2}),
    (1, 8, {"fsdp": 4, "tp": 1, "target_fsdp": 4}),
    (4, 1, {"fsdp": 4, "tp": 1}),
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_moments_it_goes_on_elsewhere(
    folder,
    whole,
    tmp_path,
    compile_once,  # noqa: F811
    seed,
):
    """Optimizer, average, anchors and data position come along: the run of one device, to rounding.

    All are killed, or one of them, whose end the others notice.
    """
    workdir, rng = tmp_path / "run", random.Random(seed)
    places = rng.sample(PLACES, len(PLACES))
    killed = 0
    for number, devices, mesh in places[:-1]:
        command = training(folder, workdir, {"mesh": mesh})
        run = Together(command, compile_once, number, devices)
        step = rng.randrange(1, STEPS - 2)
        if run.when(rng.choice([saving(workdir), logged(workdir, step)])):
            time.sleep(rng.choice([0, 0, 0.01, 0.1]))
            for process in rng.choice([run.processes, [rng.choice(run.processes)]]):
                process.kill()
        codes = [code for code, _, _ in run.end(150)]
        print(f"{number} x {devices} {mesh}: {codes}, {sorted(checkpoint_steps_or_none(workdir))}")
        killed += -signal.SIGKILL in codes
        assert all(codes) or not any(codes)
    assert killed >= 2
    number, devices, mesh = places[-1]
    codes = [
        code
        for code, *_ in Together(
            training(folder, workdir, {"mesh": mesh}), compile_once, number, devices
        ).end()
    ]
    assert not any(codes)
    assert_near(workdir, whole)


def checkpoint_steps_or_none(workdir: pathlib.Path) -> list[int]:
    return [int(path.name) for path in workdir.glob("checkpoints/*") if path.name.isdigit()]


@pytest.mark.slow
def test_sigterm_to_one_process_saves_and_ends_all(folder, tmp_path, compile_once):  # noqa: F811
    """All save the same step; one process goes on with it, and the losses are those of one run."""
    changes = {"train.num_steps": 600, "train.checkpoint_every": 500, "train.validate_every": 500}
    workdir, other = tmp_path / "run", tmp_path / "other"
    run = Together(training(folder, workdir, changes), compile_once)
    assert run.when(logged(workdir, 2))
    run.processes[1].send_signal(signal.SIGTERM)
    (code, _, error), second = run.end()
    assert (code, second[0], second[1]) == (143, 143, ""), (error, second)
    (step,) = checkpoint_steps(workdir)
    line = f"dspark_jax: SIGTERM: step {step} of 600 is saved in {workdir}; the same command"
    assert error.splitlines()[-1].startswith(line)
    assert second[2].startswith(line) and second[2].count("\n") == 1
    for place, last in ((workdir, step + 3), (other, step + 6)):
        mesh = {"mesh": {"fsdp": 1, "tp": 1}}
        alone = Together(training(folder, place, changes | mesh), compile_once, 1, 1)
        assert alone.when(logged(place, last))
        alone.processes[0].send_signal(signal.SIGTERM)
        assert alone.end()[0][0] == 143
    ours, theirs = rows(workdir), rows(other)
    steps = sorted(set(ours) & set(theirs))
    assert steps[: step + 3] == list(range(1, step + 4))
    for name in ("loss", "grad_norm", "learning_rate"):
        values = ([found[at][name] for at in steps] for found in (ours, theirs))
        np.testing.assert_allclose(*values, **ROUNDING)


# One end for all.


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_others(folder, tmp_path, compile_once, victim):  # noqa: F811
    workdir = tmp_path / "run"
    changes = {"train.num_steps": 5000, "train.checkpoint_every": 2}
    run = Together(training(folder, workdir, changes), compile_once)
    assert run.when(logged(workdir, 5))
    run.processes[victim].kill()
    began = time.monotonic()
    codes = [code for code, _, _ in run.end(HEARTBEAT_SECONDS + 60)]
    print(f"process {victim} killed; the other one ended {time.monotonic() - began:.1f} s later")
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim] not in (0, None)
    assert checkpoint_steps(workdir)


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_mistake_on_one_process_is_one_line_on_each(folder, tmp_path, compile_once, culprit):  # noqa: F811
    """Another flag, noticed before anything is computed."""
    mistake = lambda index: ["--config.seed=5"] * (index == culprit)  # noqa: E731
    run = Together(training(folder, tmp_path / "run", {}), compile_once, each=mistake)
    first, second = run.end(120)
    expected = "process 1 has another config than process 0: give every process the same files"
    assert (first[0], second[0]) == (2, 2)
    assert_one_line(second[2], expected)
    assert_one_line(first[2], f"process 1: {expected}")
    assert not (tmp_path / "run" / "config.json").exists()


LATE = """
import sys, time
import jax, jax.numpy as jnp
from absl import flags
from dspark_jax.core import processes
from dspark_jax.core.command import run_main
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh, place, to_host

def main():
    join()
    with jax.set_mesh(make_mesh(-1, 1)):
        x = place(jnp.arange(8.0), "batch")
        assert to_host(x).tolist() == list(range(8)) and x.sum() == 28
        if jax.process_index() == {culprit}:
            time.sleep(1)
            {what}
        print(x.sum() * 2)  # waits for the other process

join = processes.define_flags()
run_main(main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("culprit", [0, 1])
def test_a_late_mistake_ends_those_that_wait_for_it(compile_once, culprit):  # noqa: F811
    script = LATE.format(culprit=culprit, what="raise UserError('row 7 is\\nno row')")
    found = Together(["-c", script], compile_once).end(120)
    assert [code for code, *_ in found] == [2, 2], found
    assert_one_line(found[culprit][2], "row 7 is no row")
    assert_one_line(found[1 - culprit][2], f"process {culprit}: row 7 is no row")


@pytest.mark.slow
def test_a_fault_ends_all_with_its_traceback_on_one(compile_once):  # noqa: F811
    script = LATE.format(culprit=1, what="1 / 0")
    first, second = Together(["-c", script], compile_once).end(120)
    assert (first[0], second[0]) == (1, 1), (first, second)
    assert "Traceback" in second[2] and "ZeroDivisionError" in second[2]
    assert_one_line(first[2], "process 1: failed (ZeroDivisionError)")


def test_who_they_are_is_said_wholly_or_not_at_all():
    for arguments, expected in (
        ((False, None, 2, None), "need --coordinator"),
        ((False, "localhost:1", 2, None), "--coordinator needs --num_processes and"),
        ((False, "localhost:1", 2, 2), "did not come together .*process_id"),
    ):
        with pytest.raises(UserError, match=expected):
            processes.start(*arguments)


# What docs/scale.md says.


def test_every_claim_names_a_test_that_exists():
    named = set(re.findall(r"`(test_\w+)`", (TESTS.parent / "docs" / "scale.md").read_text()))
    there = {
        name
        for path in TESTS.glob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 15 and named <= there, named - there


# Meshes.


def test_the_target_gets_devices_of_its_own():
    ours, theirs = make_meshes(MeshConfig(fsdp=-1, tp=2, target_fsdp=1, target_tp=2))
    assert dict(ours.shape) == {"fsdp": 3, "tp": 2} and dict(theirs.shape) == {"fsdp": 1, "tp": 2}
    assert [*ours.devices.flat, *theirs.devices.flat] == jax.devices()
    same, other = make_meshes(MeshConfig(fsdp=2, tp=1))
    assert same is other


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({"fsdp": 4, "tp": 2, "target_fsdp": 1}, "need 9 devices, there are 8"),
        ({"fsdp": -1, "tp": 1, "target_fsdp": 8}, "need 8 devices, there are 8|fsdp=0"),
        ({"fsdp": 0, "tp": 1}, "mesh.fsdp=0: a number of devices is needed"),
        ({"fsdp": 1, "tp": 1, "target_tp": 0}, "mesh.target_tp=0: a number of"),
    ],
)
def test_meshes_that_cannot_be_are_refused(sizes, expected):
    with pytest.raises(UserError, match=expected):
        make_meshes(MeshConfig(**sizes))
