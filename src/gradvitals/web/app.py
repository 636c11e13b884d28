"""The page as an ASGI application, and the server that runs it."""

from __future__ import annotations

import getpass
import gzip
import hashlib
import mimetypes
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from gradvitals.errors import ConfigError
from gradvitals.web.api import Api
from gradvitals.web.run_index import RunIndex
from gradvitals.web.security import middleware

STATIC = Path(__file__).parent / "static"
DEFAULT_PORT = 8484
THREADS = 4
"""Requests worked on at the same time: each may hold some megabytes while it reads."""


def make_app(folder: Path, *, host: str = "127.0.0.1") -> Starlette:
    """Returns the page for the runs in a folder.

    Args:
        folder: Holds runs, or is one; it may appear later.
        host: The address that the server listens on: requests for other hosts are refused.
    """
    api, static = Api(RunIndex(folder)), StaticFiles(STATIC)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        yield
        api.close()

    app = Starlette(
        routes=[
            Route("/", static.index),
            Mount("/api", routes=api.routes()),
            Route("/static/{name:path}", static.file),
        ],
        middleware=[*middleware(host), Middleware(GZipMiddleware, minimum_size=1024, compresslevel=1)],
        lifespan=lifespan,
    )
    app.state.api = api
    return app


class StaticFiles:
    """The files of the page, held in memory, so that they never wait for the threads that read runs."""

    @dataclass(frozen=True)
    class File:
        """One file, plain and compressed."""

        content: bytes
        compressed: bytes
        type: str
        etag: str

    def __init__(self, folder: Path) -> None:
        self._files = {
            path.relative_to(folder).as_posix(): self._load(path) for path in folder.rglob("*") if path.is_file()
        }

    async def index(self, request: Request) -> Response:
        """Returns the page itself."""
        return self._respond(request, "index.html")

    async def file(self, request: Request) -> Response:
        """Returns a file by its name, which is looked up and never becomes a path."""
        return self._respond(request, request.path_params["name"])

    def _respond(self, request: Request, name: str) -> Response:
        file = self._files.get(name)
        if file is None:
            return PlainTextResponse("There is no such file.\n", status_code=404)
        headers = {"etag": file.etag, "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.compressed, headers={**headers, "content-encoding": "gzip"}, media_type=file.type)
        return Response(file.content, headers=headers, media_type=file.type)

    @classmethod
    def _load(cls, path: Path) -> File:
        content = path.read_bytes()
        known = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
        kind = known.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "text/plain"
        etag = f'"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
        return cls.File(content, gzip.compress(content, 9, mtime=0), kind, etag)


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


def serve_runs(folder: Path, listening: socket.socket, *, host: str) -> None:
    """Serves the page until Ctrl-C."""
    app = make_app(folder, host=host)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, server_header=False, ws="none"
    )
    server = Server(config, on_exit=app.state.api.watcher.stop)
    try:
        server.run(sockets=[listening])
    finally:
        listening.close()
