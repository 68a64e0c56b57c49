"""Serve a target with its drafter behind OpenAI's API, many requests at a time.

    pip install -r requirements-serve.txt      # starlette, uvicorn, prometheus_client
    python -m dspark_jax.serve --workdir=runs/a
    curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hi!"}]}'

Endpoints: /v1/chat/completions and /v1/completions (streamed with "stream": true, the usage with
what speculation did), /v1/models, /health, and /metrics for Prometheus. Any OpenAI client works:

    OpenAI(base_url="http://localhost:8000/v1", api_key="none")

What is asked for is honoured or refused with a reason, never ignored. One answer per request (n=1),
no log probabilities, no tools. Beyond OpenAI's options there are top_k, min_p, repetition_penalty,
min_tokens and timeout (seconds until the answer has to be finished).

How many drafts of a request are verified in a round is --scheduler, as for generate:
  all           every one of them; fixed:N the first N
  threshold:C   up to the first of less confidence than C
  load:LOW:HIGH those likely to survive: above LOW when idle, HIGH when full
  hardware      those that make the most tokens per second, by the paper's Algorithm 1 and
                WORKDIR/costs.json (calibrate; measured at the start where there is none); stops
                drafting while that does not pay
  asynchronous  the same with a budget of two rounds before, for devices that must not wait
  off           none: plain decoding
The text of a request at temperature 0 is that of plain decoding under every scheduler. Ctrl-C or
SIGTERM lets running requests finish for --grace seconds.
"""

import dataclasses
import logging
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import jax
from absl import flags

from dspark_jax.core.command import run_main
from dspark_jax.core.config import DrafterConfig
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.opened import OpenedTarget, check_drafter, open_target_of
from dspark_jax.decoding.engine import Engine, EngineOptions
from dspark_jax.decoding.step_seconds import measure_steps
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.scheduling.by_name import HELP, read_policy
from dspark_jax.scheduling.policy import BY_COSTS, Policy
from dspark_jax.training.checkpoint import RunRecord, choose_step, load_drafter, read_record
from dspark_jax.weights.fingerprint import check_same_target

MOST_GRACE = 86400  # seconds
INSTALL = "pip install -r requirements-serve.txt (or: pip install 'dspark_jax[serve]')"


@dataclasses.dataclass(frozen=True)
class Options:
    """How to serve."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None  # of the model; None = the run's target
    target: str | None = None  # None = where the run says it is
    step: str = "best"
    engine: EngineOptions = EngineOptions()
    max_tokens: int = 0  # of one answer; 0 = as many as the context holds
    scheduler: str = ""  # see scheduling/by_name.py; "" = what the drafter can follow
    force_costs: bool = False  # take costs of another device
    api_key: str | None = None
    max_body_bytes: int = 1 << 20
    warm_up: bool = True
    grace: float = 30.0


def run(workdir: Path, options: Options) -> None:
    """Serves until it is told to end.

    Raises:
      UserError: no run, another target, a policy or size that does not fit, a port that is taken,
        or a library that is missing.
    """
    try:
        from dspark_jax.serving.server import reserved, serve
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: {INSTALL}") from None
    if not 0 <= options.grace <= MOST_GRACE:
        raise UserError(f"--grace={options.grace:g}: give 0 to {MOST_GRACE} seconds")
    if options.max_body_bytes < 1:
        raise UserError(f"--max_body_bytes={options.max_body_bytes}: give at least 1")
    if options.max_tokens < 0:
        raise UserError(
            f"--max_new_tokens={options.max_tokens}: give 0 (what the context holds) or more"
        )
    if options.host not in ("127.0.0.1", "localhost", "::1") and options.api_key is None:
        print(
            f"dspark_jax: --host={options.host} serves everybody who can reach it; "
            "consider --api_key_file",
            file=sys.stderr,
        )
    record = read_record(workdir)
    options.engine.check(record.target_config.max_positions)
    with reserved(options.host, options.port) as listening:
        _serve(listening, serve, workdir, record, options)


def _serve(
    listening: socket.socket, serve: Callable, workdir: Path, record: RunRecord, options: Options
) -> None:
    """Loads and serves."""
    step = choose_step(workdir, options.step)
    policy = make_policy(options, workdir, step, record.config.drafter)  # before what takes long
    mesh = make_mesh(1, record.config.mesh.tp if jax.device_count() > 1 else 1)
    with jax.set_mesh(mesh):
        target = open_target_of(record.config, options.target)
        check_same_target(record.fingerprint, target.fingerprint, f"the drafter in {workdir}")
        drafter = None
        if policy.drafts:
            check_drafter(record.shape, target, f"{workdir}/config.json: ", record.fingerprint)
            drafter = load_drafter(record, workdir, step)

    def make() -> Engine:
        return make_engine(target, drafter, options, policy)

    name = options.name or Path(record.config.target).name
    serve(listening, make, target, mesh, name, options)


def make_policy(options: Options, workdir: Path, step: int, drafter: DrafterConfig) -> Policy:
    """What the options ask for; costs that are not there are left out."""
    default = "hardware" if drafter.confidence_head else "all"
    policy = read_policy(
        options.scheduler or default,
        workdir,
        step=step,
        proposals=drafter.num_proposals,
        has_confidence=drafter.confidence_head,
        rows=options.engine.rows,
        force=options.force_costs,
        measured_later=True,
    )
    return policy or Policy("fixed", drafter.num_proposals)


def make_engine(
    target: OpenedTarget, drafter: AnyDrafter | None, options: Options, policy: Policy
) -> Engine:
    """The engine on the current mesh, ready for requests; measures costs that the policy lacks."""
    rows, longest = options.engine.rows, options.engine.max_context
    if policy.kind in BY_COSTS and policy.costs is None:
        costs = measure_steps(
            target.model,
            drafter,
            target_name=target.name,
            batches=(rows,),
            sizes=options.engine.sizes,
            context=longest // 2,
            capacity=longest + drafter.config.num_proposals + 1,
        )
        tables = {"costs": costs.rounds(rows), "plain": costs.plain(rows)}
        policy = dataclasses.replace(policy, **tables)
    models = target.model, drafter
    engine = Engine(*models, target.stop_ids, options.engine, policy, target.tokenizer)
    if options.warm_up:
        engine.warm_up()
    return engine


def _api_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--api_key_file={path}: cannot be read ({error})") from None
    if not key:
        raise UserError(f"--api_key_file={path}: the file is empty")
    if not all("!" <= letter <= "~" for letter in key):
        raise UserError(
            f"--api_key_file={path}: no client could send it; give one line of ASCII letters, "
            "digits and signs, without spaces"
        )
    return key


def main() -> None:
    """Entry point."""
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    options = Options(
        host=_HOST.value,
        port=_PORT.value,
        name=_NAME.value,
        target=_TARGET.value,
        step=_STEP.value,
        engine=EngineOptions(
            rows=_ROWS.value, max_context=_MAX_CONTEXT.value, queue_limit=_QUEUE_LIMIT.value
        ),
        max_tokens=_MAX_NEW_TOKENS.value,
        scheduler=_SCHEDULER.value,
        force_costs=_FORCE_COSTS.value,
        api_key=_api_key(_API_KEY_FILE.value),
        max_body_bytes=_MAX_BODY_BYTES.value,
        warm_up=_WARM_UP.value,
        grace=_GRACE.value,
    )
    run(Path(_WORKDIR.value), options)
    sys.stdout.flush()
    os._exit(0)  # threads of the runtime may still be at work, and there is nothing left to save


if __name__ == "__main__":  # flags too: several commands may be imported into one program
    _WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
    _HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen at; 0.0.0.0 = everywhere.")
    _PORT = flags.DEFINE_integer("port", 8000, "Port; 0 takes a free one and prints it.")
    _NAME = flags.DEFINE_string("name", None, "Model name for clients; by default the target's.")
    _TARGET = flags.DEFINE_string("target", None, "Where the run's target now is, if it has moved.")
    _STEP = flags.DEFINE_string("step", "best", "Checkpoint: best, latest or a step number.")
    _ROWS = flags.DEFINE_integer("rows", 8, "Requests answered at a time; others wait.")
    _MAX_CONTEXT = flags.DEFINE_integer(
        "max_context", 1024, "Tokens of a prompt and its answer together; memory is set aside."
    )
    _QUEUE_LIMIT = flags.DEFINE_integer(
        "queue_limit", 64, "Requests that may wait; those beyond get 429."
    )
    _MAX_NEW_TOKENS = flags.DEFINE_integer(
        "max_new_tokens", 0, "At most so many tokens an answer; 0 = what the context holds."
    )
    _SCHEDULER = flags.DEFINE_string(
        "scheduler", "", f"{HELP} Default: hardware; all for a drafter without confidence head."
    )
    _FORCE_COSTS = flags.DEFINE_bool("force_costs", False, "Take costs.json of another device.")
    _API_KEY_FILE = flags.DEFINE_string(
        "api_key_file", None, "File with a key that clients of /v1 have to send."
    )
    _MAX_BODY_BYTES = flags.DEFINE_integer(
        "max_body_bytes", 1 << 20, "Larger requests are refused."
    )
    _WARM_UP = flags.DEFINE_bool(
        "warm_up",
        True,
        "Compile before the first request. JAX_COMPILATION_CACHE_DIR keeps what was compiled for "
        "the next start.",
    )
    _GRACE = flags.DEFINE_float("grace", 30.0, "Seconds for running requests to finish at the end.")
    flags.mark_flags_as_required(["workdir"])
    run_main(main)
