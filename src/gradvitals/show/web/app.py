"""The page as an ASGI application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from anyio import to_thread
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount, Route

from gradvitals.show.web.api import Api
from gradvitals.show.web.files import Files
from gradvitals.show.web.security import Guarded
from gradvitals.show.web.shelf import Shelf

STATIC = Path(__file__).parent / "static"
THREADS = 4
"""Requests worked on at the same time: each may hold some megabytes while it reads."""


def make_app(folder: Path, *, host: str = "127.0.0.1") -> Starlette:
    """The page for the runs in a folder.

    Args:
        folder: Holds runs, or is one; it may appear later.
        host: The address that is listened on: requests under other names are refused.
    """
    api, files = Api(Shelf(folder)), Files(STATIC)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        yield
        api.close()

    app = Starlette(
        routes=[
            Route("/", files.index),
            Mount("/api", routes=api.routes()),
            Route("/static/{name:path}", files.file),
        ],
        middleware=[
            Middleware(Guarded, host=host),
            Middleware(GZipMiddleware, minimum_size=1024, compresslevel=1),
        ],
        lifespan=lifespan,
    )
    app.state.api = api
    return app
