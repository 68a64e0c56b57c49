"""Runs a script of tests/peers/scripts in a peer's own virtual environment.

To compare something else with a peer: write a script that reads `request` and writes `answer`
(scripts/exchange.py), and call `ask` from a test.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import exchange
import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
# What the project's own tests set for jax, or would lead a peer out of its environment.
_NOT_FOR_PEERS = ("JAX_", "XLA_", "TPU_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def environment(peer: str) -> Path:
    """The folder of a peer's virtual environment.

    Raises:
      RuntimeError: it was never made, or from other requirements; says what to run.
    """
    folder = ROOT / ".venv-peers" / peer
    ready, wanted = folder / ".ready", HERE / "requirements" / f"{peer}.txt"
    if not ready.is_file():
        raise RuntimeError(f"no {folder.relative_to(ROOT)}: run `make setup-peers` (minutes, GB)")
    if not ready.read_text().endswith(wanted.read_text()):
        raise RuntimeError(
            f"{folder.relative_to(ROOT)} was made from another {wanted.name}: `make setup-peers`"
        )
    return folder


def variables(**more: str) -> dict[str, str]:
    """Environment variables of a peer's process: offline, and nothing of ours that leads astray."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_PEERS)
    }
    return kept | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | more


def ask(
    peer: str,
    script: str,
    folder: Path,
    values: dict[str, Any],
    arrays: dict[str, np.ndarray] | None = None,
    *,
    timeout: float = 1800,
    **more: str,
) -> exchange.Message:
    """The answer of scripts/SCRIPT.py to a request, by way of `folder`.

    Raises:
      AssertionError: the script failed; with the end of what it said.
    """
    exchange.write(folder, "request", values, arrays or {})
    command = [environment(peer) / "bin/python", HERE / "scripts" / f"{script}.py", folder]
    done = subprocess.run(
        list(map(str, command)),
        env=variables(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    (folder / "log.txt").write_text(done.stdout)
    assert done.returncode == 0, f"{script} in {peer}:\n{done.stdout[-4000:]}"
    return exchange.read(folder, "answer")


@contextlib.contextmanager
def server(peer: str, command: Sequence[str], log: Path, *, ready: float = 900, **more: str):
    """The address of a server that a command of a peer's Python runs while the context lasts.

    --host and --port are added; the port is a free one. Every process of it is ended afterwards.

    Raises:
      AssertionError: it ended, or was not ready after `ready` seconds; with the end of its log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    python = environment(peer) / "bin/python"
    line = [str(python), *command, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            line, env=variables(**more), stdout=out, stderr=out, start_new_session=True
        )
        try:
            address, began = f"http://127.0.0.1:{port}", time.monotonic()
            while not _answers(f"{address}/health"):
                late = time.monotonic() - began > ready
                if late or process.poll() is not None:
                    what = f"not ready after {ready:.0f} s" if late else "ended"
                    raise AssertionError(f"{' '.join(line)}: {what}\n{log.read_text()[-4000:]}")
                time.sleep(1)
            yield address
        finally:
            _end(process)


def get(url: str, body: dict[str, Any] | None = None, timeout: float = 300) -> dict[str, Any]:
    """The JSON that a server answers, to `body` if given."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)


def metrics(address: str) -> dict[str, float]:
    """The counters of ADDRESS/metrics: "name" or 'name{label="value",...}' -> value."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    rows = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def _end(process: subprocess.Popen) -> None:
    """Ends the whole group: engine processes outlive their server when it is killed."""
    for kind, patience in ((signal.SIGTERM, 30), (signal.SIGKILL, 30)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    process.wait(1)
