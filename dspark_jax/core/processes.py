"""One program on several processes: how they start, agree, stop and end together.

Every process runs the same steps in the same order; what only one of them may do or decide (print,
write, look at a folder that another may change) is done by process 0. With one process nothing here
costs anything. Messages travel through jax's coordination service, which process 0 hosts, and not
through the devices, so they arrive while those wait for one another.
"""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import flags

# The client is not public, but what checkpoint libraries use as well.
from jax._src import distributed

from dspark_jax.core.errors import UserError

HEARTBEAT_SECONDS = 60  # a process that was killed ends the others within about this
_FAULT, _LEFT = "dspark_jax/fault", "dspark_jax/left"
_PATIENCE = 10.0  # seconds that a process which ends waits for the others to take notice
_numbers = itertools.count()  # of questions asked, the same on all processes
_ending = threading.Lock()  # whoever holds it has the last word of this process


def define_flags() -> Callable[[], None]:
    """Defines the flags of a command on several processes; call the result first in its `main`."""
    program = sys.argv[0]  # whose flags they are in its --help
    found = flags.DEFINE_bool(
        "distributed",
        False,
        "One of several processes, on Cloud TPU, GKE, SLURM or Open MPI, which say the rest.",
        module_name=program,
    )
    coordinator = flags.DEFINE_string(
        "coordinator", None, "HOST:PORT of process 0, elsewhere.", module_name=program
    )
    number = flags.DEFINE_integer(
        "num_processes", None, "How many there are, with --coordinator.", module_name=program
    )
    index = flags.DEFINE_integer(
        "process_id", None, "Which one this is, with --coordinator.", module_name=program
    )
    return lambda: start(found.value, coordinator.value, number.value, index.value)


def start(detect: bool, coordinator: str | None, number: int | None, index: int | None) -> None:
    """Joins the other processes, before anything else touches jax; at once if there are none.

    Args:
      detect: ask the surroundings (Cloud TPU, GKE, SLURM, Open MPI) for the other three.

    Raises:
      UserError: contradictory arguments, nothing detected, or the others did not come.
    """
    if coordinator is None and not detect:
        if number is not None or index is not None:
            raise UserError("--num_processes and --process_id need --coordinator=HOST:PORT")
        return
    if coordinator is not None and (number is None or index is None):
        raise UserError("--coordinator needs --num_processes and --process_id too")
    try:
        jax.distributed.initialize(
            coordinator, number, index, heartbeat_timeout_seconds=HEARTBEAT_SECONDS
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"the processes did not come together ({reason}): check --coordinator, "
            "--num_processes and --process_id, or what the cluster says of itself"
        ) from None
    if not is_first():
        sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # libraries write there as well
    threading.Thread(target=_watch, args=(distributed.global_state.client,), daemon=True).start()


def is_first() -> bool:
    """Whether this process prints, writes and decides."""
    return jax.process_index() == 0


def barrier(what: str) -> None:
    """Waits until every process has come here."""
    if (client := _client()) is not None:  # if one of them fails, `_watch` ends this one
        client.wait_at_barrier(f"dspark_jax/{next(_numbers)}: {what}", 24 * 3_600_000)


def first_says(decide: Callable[[], Any]) -> Any:
    """What `decide()` returns on process 0, anything that JSON has; the others do not call it."""
    client = _client()
    if client is None:
        return decide()
    key = f"dspark_jax/said/{next(_numbers)}"
    if is_first():
        value = decide()
        client.key_value_set(key, json.dumps(value))
        return value
    while True:  # if process 0 fails, `_watch` ends this one
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # not yet
            return json.loads(client.blocking_key_value_get(key, 60_000))


def check_same(what: str, value: str, remedy: str) -> None:
    """Refuses to go on when a process has another `value` than process 0.

    Raises:
      UserError: on the process that differs, which ends them all.
    """
    own = hashlib.sha256(value.encode()).hexdigest()
    if first_says(lambda: own) != own:
        raise UserError(
            f"process {jax.process_index()} has another {what} than process 0: {remedy}"
        )


def _client() -> Any:
    return distributed.global_state.client


# Stopping: SIGTERM to any process stops all of them after the same step.


@contextlib.contextmanager
def sigterm() -> Iterator[Callable[[int], bool]]:
    """Yields `asked(step)`: whether to stop now, because SIGTERM came. Call it at every step.

    With several processes jax's preemption service chooses the step, for all the same one.
    """
    if _client() is not None:
        from jax.experimental import multihost_utils

        yield multihost_utils.reached_preemption_sync_point
        return
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # of a notebook, perhaps
        yield lambda step: False
        return
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield lambda step: came.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


# Ending: what stops one process stops all of them, each with one line.


@contextlib.contextmanager
def ending(message: str, code: int) -> Iterator[None]:
    """Around the last words of a process that cannot go on: the others then say so, and end.

    Args:
      message: for the others; code: their exit code.
    """
    client = _client()
    if client is None:
        yield
        return
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # `_watch` is ending this process with another one's message
    fault = {"process": jax.process_index(), "message": " ".join(message.split()), "code": code}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one was quicker
        client.key_value_set(_FAULT, json.dumps(fault))
    try:
        yield
    finally:
        _leave(client, code)


def fail(error: Exception) -> None:
    """Ends all processes for an error that is no user's; returns at once if there is only one.

    A process that has lost another one fails as well; it first waits for what that one has to say.
    """
    if _client() is None:
        return
    time.sleep(3.0)
    with ending(f"failed ({type(error).__name__}); its own output says why", 1):
        traceback.print_exc()


def _watch(client: Any) -> None:
    """Ends this process when another one cannot go on, whatever this one waits for."""
    while True:
        time.sleep(0.3)
        try:
            fault = json.loads(client.key_value_try_get(_FAULT))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                continue
            return  # the service is gone, at a regular end
        if not _ending.acquire(blocking=False):
            return
        print(
            f"dspark_jax: process {fault['process']}: {fault['message']}",
            file=sys.__stderr__,
            flush=True,
        )
        _leave(client, fault["code"])


def _leave(client: Any, code: int) -> None:
    """Ends this process once every other one knows, or after a while."""
    sys.stdout.flush()
    sys.stderr.flush()
    until = time.monotonic() + _PATIENCE
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(f"{_LEFT}/{jax.process_index()}", "")
        for index in range(jax.process_count()):
            left = max(until - time.monotonic(), 0.001)
            client.blocking_key_value_get(f"{_LEFT}/{index}", int(1000 * left) + 1)
    os._exit(code)  # regular shutdown would wait for those that have gone
