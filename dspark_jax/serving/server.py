"""The process: socket, signals and the order in which things end."""

import contextlib
import errno
import logging
import socket
from collections.abc import Callable, Iterator
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


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[socket.socket]:
    """Takes the port, so that a taken one is told before anything long; nobody can connect yet.

    Raises:
      UserError: it cannot be taken.
    """
    if not 0 <= port < 1 << 16:
        raise UserError(f"--port={port}: give 0 (a free one) to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
        except socket.gaierror as error:
            raise UserError(f"--host={host}: no such address ({error.strerror})") from None
        except OSError as error:
            raise _cannot_listen(host, port, error) from None
        yield found


def _cannot_listen(host: str, port: int, error: OSError) -> UserError:
    taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
    other = "--port" if taken else "--host"
    return UserError(
        f"cannot listen at {host}, port {port}: {error.strerror or error}; choose another {other}"
    )


def serve(
    listening: socket.socket,
    make_engine: Callable[[], Engine],
    target: OpenedTarget,
    mesh: jax.sharding.Mesh,
    name: str,
    options: Any,
) -> None:
    """Makes the engine, opens the port and serves until a signal.

    Args:
      listening: of `reserved`.
      options: `serve.Options`.

    Raises:
      UserError: another server was faster at this port, or the engine cannot be made.
    """
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
    try:
        listening.listen()
    except OSError as error:  # of two that took it at the same time
        raise _cannot_listen(options.host, port, error) from None
    print(f"{name} at http://{host}:{port}/v1, /health, /metrics", flush=True)
    server.run(sockets=[listening])
    if service.failure is not None:
        raise RuntimeError(f"the engine failed: {service.failure}")
