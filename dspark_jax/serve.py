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

How many drafts of a request are verified in a round is --policy:
  fixed         all of them, or --verify of each request
  threshold     up to the first of less confidence than --threshold
  load          those likely to survive: above --threshold when idle, --highest when full
  hardware      those that make the most tokens per second, by the paper's Algorithm 1 and the
                measured costs of a round; stops drafting while that does not pay
  asynchronous  the same with a budget of two rounds before, for devices that must not wait
  off           none: plain decoding
The text of a request at temperature 0 is that of plain decoding under every policy. Ctrl-C or
SIGTERM lets running requests finish for --grace seconds.
"""

import dataclasses
import logging
import os
import sys
from pathlib import Path

import jax
import numpy as np
from absl import flags

from dspark_jax.core.command import run_main
from dspark_jax.core.errors import UserError
from dspark_jax.core.sharding import make_mesh
from dspark_jax.data.opened import OpenedTarget, check_drafter, open_target_of
from dspark_jax.decoding.engine import Engine, EngineOptions
from dspark_jax.decoding.step_seconds import measure_steps
from dspark_jax.models.drafters import AnyDrafter
from dspark_jax.scheduling.calibration import Calibration
from dspark_jax.scheduling.policy import BY_CONFIDENCE, BY_COSTS, Policy
from dspark_jax.training.checkpoint import choose_step, load_drafter, read_record
from dspark_jax.weights.fingerprint import check_same_target

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
    policy: str = "hardware"
    verify: int = 0  # 0 = all that are drafted
    threshold: float = 0.5
    highest: float = 0.9
    calibration: str | None = None  # None = WORKDIR/calibration.json, if there is one
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
        from dspark_jax.serving.server import serve
    except ImportError as error:
        raise UserError(f"serve needs {error.name}: {INSTALL}") from None
    if options.grace < 0 or options.max_body_bytes < 1:
        raise UserError("--grace must not be negative and --max_body_bytes at least 1")
    if options.host not in ("127.0.0.1", "localhost", "::1") and options.api_key is None:
        print(
            f"dspark_jax: --host={options.host} serves everybody who can reach it; "
            "consider --api_key_file",
            file=sys.stderr,
        )
    record = read_record(workdir)
    # Before anything is loaded, measured or compiled.
    policy = make_policy(options, record.config.drafter.num_proposals)
    options.engine.check(record.target_config.max_positions)
    mesh = make_mesh(1, record.config.mesh.tp if jax.device_count() > 1 else 1)
    with jax.set_mesh(mesh):
        target = open_target_of(record.config, options.target)
        check_same_target(record.fingerprint, target.fingerprint, f"the drafter in {workdir}")
        drafter = None
        if options.policy != "off":
            check_drafter(record.shape, target, f"{workdir}/config.json: ", record.fingerprint)
            drafter = load_drafter(record, workdir, choose_step(workdir, options.step))

    def make() -> Engine:
        return make_engine(target, drafter, options, policy, workdir)

    name = options.name or Path(record.config.target).name
    serve(make, target, mesh, name, options)


def make_policy(options: Options, proposals: int) -> Policy:
    """What the options ask for, for a drafter of so many proposals; without tables."""
    if options.verify > proposals:
        raise UserError(f"--verify={options.verify}: the drafter proposes {proposals} tokens")
    return Policy(
        options.policy,
        length=(options.verify or proposals) if options.policy == "fixed" else 0,
        threshold=options.threshold,
        highest=options.highest,
    )


def make_engine(
    target: OpenedTarget,
    drafter: AnyDrafter | None,
    options: Options,
    policy: Policy,
    workdir: Path,
) -> Engine:
    """The engine on the current mesh, ready for requests; measures costs if the policy asks."""
    rows, proposals = options.engine.rows, drafter.config.num_proposals if drafter else 0
    if policy.kind in BY_CONFIDENCE:
        path = Path(options.calibration or workdir / "calibration.json")
        if options.calibration or path.exists():
            calibration = Calibration.read(path, proposals)
            temperatures = np.asarray(calibration.temperatures, np.float32)
            policy = dataclasses.replace(policy, temperatures=temperatures)
    if policy.kind in BY_COSTS:
        longest = options.engine.max_context
        costs = measure_steps(
            target.model,
            drafter,
            target_name=target.name,
            batches=(rows,),
            sizes=options.engine.sizes,
            context=longest // 2,
            capacity=longest + proposals + 1,
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
        policy=_POLICY.value,
        verify=_VERIFY.value,
        threshold=_THRESHOLD.value,
        highest=_HIGHEST.value,
        calibration=_CALIBRATION.value,
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
    _POLICY = flags.DEFINE_string("policy", "hardware", "How many drafts are verified, see above.")
    _VERIFY = flags.DEFINE_integer("verify", 0, "With --policy=fixed; 0 = all that are drafted.")
    _THRESHOLD = flags.DEFINE_float("threshold", 0.5, "With --policy=threshold or load.")
    _HIGHEST = flags.DEFINE_float("highest", 0.9, "With --policy=load, of a full server.")
    _CALIBRATION = flags.DEFINE_string(
        "calibration", None, "Temperatures of the confidence; default WORKDIR/calibration.json."
    )
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
