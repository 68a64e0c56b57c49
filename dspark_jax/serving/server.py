"""The process: socket, signals and the order in which things end."""

import logging
import socket
from collections.abc import Callable
from typing import Any

import jax
import uvicorn

from dspark_jax.core.errors import UserError
from dspark_jax.data.opened import OpenedTarget
from dspark_jax.decoding.engine import Engine
from dspark_jax.serving.app import make_app
from dspark_jax.serving.service import Service


class _Server(uvicorn.Server):
    """Ends with exit code 0 on SIGTERM and Ctrl-C: uvicorn's own raises the signal once more."""

    service: Service
    grace: float

    def handle_exit(self, sig: int, frame: Any) -> None:
        """The first signal lets requests finish, the second does not."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self.service.drain(0 if self.force_exit else self.grace)


def serve(
    make_engine: Callable[[], Engine],
    target: OpenedTarget,
    mesh: jax.sharding.Mesh,
    name: str,
    options: Any,
) -> None:
    """Makes the engine, opens the port and serves until a signal.

    Args:
      options: `serve.Options`.

    Raises:
      UserError: the port cannot be opened, or the engine cannot be made.
    """
    try:
        listening = socket.create_server(
            (options.host, options.port),
            family=socket.AF_INET6 if ":" in options.host else socket.AF_INET,
        )
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot listen at {options.host}, port {options.port}: {reason}; choose another --port"
        ) from None
    with listening:
        most = options.max_tokens or options.engine.max_context
        service = Service(make_engine, target, mesh, name, most)
        service.start()
        app = make_app(service, options.api_key, options.max_body_bytes)
        config = uvicorn.Config(
            app,
            log_level=logging.WARNING,
            access_log=False,
            lifespan="on",
            # Those that are still here then have been told that the server is stopping.
            timeout_graceful_shutdown=int(options.grace) + 5,
            server_header=False,
        )
        server = _Server(config)
        server.service, server.grace = service, options.grace
        host = f"[{options.host}]" if ":" in options.host else options.host
        port = listening.getsockname()[1]
        print(f"{name} at http://{host}:{port}/v1, /health, /metrics", flush=True)
        server.run(sockets=[listening])
    if service.failure is not None:
        raise RuntimeError(f"the engine failed: {service.failure}")
