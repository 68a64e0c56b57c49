"""Commands end as promised: 0, or one clear line and 2, or 130; tracebacks only for our faults."""

import fcntl
import os
import pathlib
import pty
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from dspark_jax.core.progress import Progress, clock, progress

ROOT = pathlib.Path(__file__).resolve().parent.parent

COMMAND = '''
"""Does one thing.

    python act.py --config=good.py --workdir=runs/a
"""
import time
from absl import flags
from ml_collections import config_flags
from dspark_jax.core.command import run_main
from dspark_jax.core.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "What to do.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", "runs/a", "Where to.")
DO = flags.DEFINE_enum("do", "print", ["print", "user", "crash", "wait"], "How to end.")
flags.mark_flag_as_required("config")


def main():
    print(CONFIG.value.train.learning_rate, CONFIG.value.taps, flush=True)
    if DO.value == "user":
        raise UserError("no prompts in x.jsonl\\n  line 3: write some")
    if DO.value == "crash":
        raise ValueError("our fault")
    if DO.value == "wait":
        time.sleep(60)


if __name__ == "__main__":
    run_main(main)
'''

CONFIGS = {
    "good.py": """
from ml_collections import config_dict

def get_config(variant=""):
    if variant not in ("", "no_markov"):
        raise ValueError(f"no variant {variant!r}; there is no_markov")
    return config_dict.create(train=dict(learning_rate=1e-3, steps=3, fast=True), taps=(1, 2))
""",
    "raises.py": 'def get_config():\n    return {}["rank"]\n',
    "opens.py": 'def get_config():\n    return open("prompts.txt")\n',
    "syntax.py": "def get_config(:\n",
    "imports.py": "import no_such_module\n",
    "empty.py": "",
    "plain.py": "def get_config():\n    return None\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    (folder / "act.py").write_text(COMMAND)
    for name, text in CONFIGS.items():
        (folder / name).write_text(text)
    return folder


def run(folder, *args):
    return subprocess.run(
        [sys.executable, "act.py", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_success_says_nothing_on_stderr(folder):
    done = run(folder, "--config=good.py:no_markov", "--config.train.learning_rate=0.5")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0.5 (1, 2)\n", "")


def test_help_teaches_and_succeeds(folder):
    done = run(folder, "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Does one thing.")
    for text in ["--config=good.py --workdir=runs/a", "--workdir=...", "Where to. (default: 'run"]:
        assert text in done.stdout


@pytest.mark.parametrize(
    "args, expected",
    [
        (["--config=good.py", "--do=user"], "no prompts in x.jsonl line 3: write some"),
        ([], "--config is missing"),
        (["--config=good.py", "--config.train.lernin_rate=1"], "--config.train.lernin_rate: "),
        (["--config=good.py", "--config.train.lernin_rate=1"], "did you mean 'learning_rate'?"),
        (["--config=good.py", "--config.trian.steps=1"], "--config.trian.steps: "),
        (["--config=good.py", "--config.train.learning_rate=abc"], "rate=abc: must be a number"),
        (["--config=good.py", "--config.train.steps=1.5"], "steps=1.5: must be a whole number"),
        (["--config=good.py", "--config.train.fast=maybe"], "fast=maybe: must be true or false"),
        (["--config=good.py", "--config.train=3"], "--config.train=3: must be a group of fields"),
        (["--config=good.py", "--wokdir=a"], "'wokdir'. Did you mean: workdir"),
        (["--config=good.py", "--workdir"], "Missing value for flag --workdir"),
        (["--config=good.py", "--do=nothing"], "--do=nothing: "),
        (["--config=good.py", "runs/a"], "unexpected argument 'runs/a'"),
        (["--config=good.py:rank_0"], "good.py line 6: ValueError: no variant 'rank_0'"),
        (["--config=absent.py"], "no config file 'absent.py'"),
        (["--config", "absent.py", "--config.train.steps=1"], "no config file 'absent.py'"),
        (["--config=raises.py"], "raises.py line 2: KeyError: 'rank'"),
        (["--config=raises.py:a"], "raises.py: get_config() takes 0 positional arguments"),
        (["--config=opens.py"], "opens.py line 2: FileNotFoundError"),
        (["--config=syntax.py"], "syntax.py line 1: "),
        (["--config=imports.py"], "imports.py line 1: ModuleNotFoundError"),
        (["--config=empty.py"], "no attribute 'get_config'"),
        (["--config=plain.py"], "plain.py: get_config() returned None"),
    ],
)
def test_a_users_mistake_is_one_line_and_code_2(folder, args, expected):
    done = run(folder, *args)
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("dspark_jax: ") and expected in lines[0]


def test_our_fault_keeps_its_traceback(folder):
    done = run(folder, "--config=good.py", "--do=crash")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and done.stderr.endswith("ValueError: our fault\n")


def test_interrupt_ends_with_130(folder):
    process = subprocess.Popen(
        [sys.executable, "act.py", "--config=good.py", "--do=wait"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell inherit that interrupts are ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout.readline()  # main has begun
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=180)
    assert (process.returncode, stderr) == (130, "dspark_jax: interrupted\n")


def test_an_interrupt_in_a_callback_of_the_garbage_collector_is_not_lost(tmp_path):
    """jax registers one, and Python prints and forgets what is raised in it."""
    (tmp_path / "collects.py").write_text(
        "import gc, os, signal, time\n"
        "from dspark_jax.core.command import run_main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def _xla_gc_callback(phase, info):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(100): pass\n"
        "def main():\n"
        "    gc.disable()\n"
        "    gc.callbacks.append(_xla_gc_callback)\n"
        "    gc.collect()\n"
        "    gc.callbacks.remove(_xla_gc_callback)\n"
        "    print('collected', flush=True)\n"
        "    time.sleep(60)\n"
        "run_main(main)\n"
    )
    done = subprocess.run(
        [sys.executable, "collects.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 130
    assert (done.stdout, done.stderr) == ("collected\n", "dspark_jax: interrupted\n")


def test_progress_lines_where_there_is_no_terminal(capsys):
    with progress(total=10, desc="train", unit="step", initial=4) as bar:
        for _ in range(3):
            bar.note("loss 1.25")
            time.sleep(0.01)
            bar.update(2)
    first, last = capsys.readouterr().err.splitlines()  # nothing in between: under ten seconds
    assert first == "train: 40%, 4/10 step"
    assert last.startswith("train: 100%, 10/10 step, ") and last.endswith("took 0:00, loss 1.25")
    # 4 steps in 20 ms after the first update: at most 200 a second, whatever was done before.
    assert 1 < float(last.split(", ")[2].removesuffix(" step/s").replace(",", "")) <= 200


def test_progress_lines_tell_the_time_left(capsys):
    bar = Progress(None, 1000, "train", "step", every_seconds=0.0)
    bar.update()
    time.sleep(0.05)
    bar.update(9)
    assert " left" in capsys.readouterr().err.splitlines()[-1]


def test_progress_iterates_and_counts_once(capsys):
    assert list(progress([3, 4], desc="rows", unit="row")) == [3, 4]
    assert "rows: 100%, 2/2 row" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(TypeError):
        list(progress(total=3))


def test_progress_of_unknown_length(capsys):
    assert list(progress(iter("ab"), desc="rows", unit="row")) == ["a", "b"]
    assert capsys.readouterr().err.splitlines()[0] == "rows: 0 row"


def on_terminal(columns: int) -> str:
    """What a bar leaves on a terminal that is `columns` wide."""
    main, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(side, "w") as stream:
        bar = Progress(None, 10, "train", "step", 4, stream)
        bar.note("loss 1.25")
        bar.update(6)
        bar.close()
        shown = b""
        while b"10/10" not in shown:
            shown += os.read(main, 10_000)
    os.close(main)
    return shown.decode()


def test_progress_bar_on_a_terminal():
    shown = on_terminal(columns=100)
    assert "100%|" in shown and "10/10" in shown and "loss 1.25" in shown and "<00:00" in shown


def test_progress_lines_on_a_terminal_that_has_no_width():
    assert "train: 100%, 10/10 step" in on_terminal(columns=0)


def test_clock():
    assert [clock(s) for s in (0, 59.6, 61, 3725)] == ["0:00", "1:00", "1:01", "1:02:05"]
