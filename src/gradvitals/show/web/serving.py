"""Starting the server: a socket of its own, the address for the reader, and an end that does not hang."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import uvicorn

from gradvitals.errors import ConfigError
from gradvitals.show.web.app import make_app

USUAL_PORT = 8484


class Server(uvicorn.Server):
    """A server that ends its streams when it is told to end, instead of waiting for the readers to go."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called on Ctrl-C and SIGTERM."""
        self._on_exit()
        super().handle_exit(sig, frame)


def bind(host: str, port: int | None) -> socket.socket:
    """A socket that listens on the port; with None on the usual one, or any other where that is taken.

    Raises:
        ConfigError: If the port or the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise ConfigError(f"host is {host!r}; expected an address or name of this machine ({error})") from None
    for wanted in [USUAL_PORT, 0] if port is None else [port]:
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, wanted))
            listening.listen(128)
        except OSError as error:
            listening.close()
            reason = error
            continue
        return listening
    raise ConfigError(f"cannot listen on {host}, port {wanted} ({reason.strerror}); --port 0 takes a free one")


def addresses(listening: socket.socket) -> tuple[str, str]:
    """The address to open, and the line that brings it to another machine."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    return f"http://{shown}:{port}/", f"ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"


def serve_runs(folder: Path, listening: socket.socket, *, host: str) -> None:
    """Serve the page until Ctrl-C."""
    app = make_app(folder, host=host)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, server_header=False, ws="none"
    )
    server = Server(config, on_exit=app.state.api.watcher.stop)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
