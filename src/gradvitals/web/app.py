"""The page as an ASGI application, and the server that runs it."""

from __future__ import annotations

import getpass
import ipaddress
import mimetypes
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gradvitals.errors import ConfigError
from gradvitals.web.api import Api
from gradvitals.web.run_index import RunIndex

STATIC = Path(__file__).parent / "static"
mimetypes.add_type("text/javascript", ".js")  # some machines say otherwise, and browsers then refuse the scripts
DEFAULT_PORT = 8484
THREADS = 4
"""Requests worked on at the same time: each may hold some megabytes while it reads."""


def make_app(*folders: Path, host: str = "127.0.0.1") -> Starlette:
    """Returns the page for the runs in one or more folders.

    Args:
        folders: Each holds runs, or is one; it may appear later.
        host: The address that the server listens on: requests for other hosts are refused.
    """
    api = Api(RunIndex(*folders))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        yield
        api.close()

    app = Starlette(
        routes=[
            Route("/", index),
            Mount("/api", routes=api.routes()),
            Mount("/static", StaticFiles(directory=STATIC)),
        ],
        middleware=[*middleware(host), Middleware(GZipMiddleware, minimum_size=1024, compresslevel=1)],
        lifespan=lifespan,
    )
    app.state.api = api
    return app


async def index(request: Request) -> Response:
    """Returns the page itself."""
    return FileResponse(STATIC / "index.html")


# -- which hosts the server answers --------------------------------------------------------------------------------

LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}


def middleware(host: str) -> list[Middleware]:
    """Returns the middleware for a server that listens on `host`.

    A page elsewhere can make its own name point to 127.0.0.1 (DNS rebinding), and the browser would let it in; its
    requests still carry its name in the Host header.
    """
    names = {*LOOPBACK, host.lower()}
    if is_loopback(host):
        return [Middleware(SecurityHeaders), Middleware(TrustedHostMiddleware, allowed_hosts=[*names, "[::1]"])]
    names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    return [Middleware(SecurityHeaders), Middleware(TrustedHostOrAddress, allowed_hosts=[*names, "[::1]"])]


class TrustedHostOrAddress(TrustedHostMiddleware):
    """Also answers requests to any IP address: unlike a name, nobody else can point an address here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if _is_address(host) or _is_address(host.rpartition(":")[0].strip("[]")):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class SecurityHeaders:
    """Adds `HEADERS` to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("cache-control", "no-cache")
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach the address."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# -- serving -------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """A server that ends its streams on exit, instead of waiting for their readers to leave."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles Ctrl-C and SIGTERM."""
        self._on_exit()
        super().handle_exit(sig, frame)


def bind(host: str, port: int | None) -> socket.socket:
    """Returns a socket that listens on the port; None means the default one, or a free one if that is taken.

    Raises:
        ConfigError: If the port or the address is not available.
    """
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise ConfigError(f"host is {host!r}; expected an address or name of this machine ({error})") from None
    for wanted in [DEFAULT_PORT, 0] if port is None else [port]:
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
    """Returns the address to open, and the command that forwards it to another machine."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    if host in ("0.0.0.0", "::"):
        shown = socket.gethostname()
    return f"http://{shown}:{port}/", f"ssh -L {port}:127.0.0.1:{port} {getpass.getuser()}@{socket.gethostname()}"


def serve_runs(folders: Iterable[Path], listening: socket.socket, *, host: str) -> None:
    """Serves the page until Ctrl-C."""
    app = make_app(*folders, host=host)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, server_header=False, ws="none"
    )
    server = Server(config, on_exit=app.state.api.watcher.stop)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
