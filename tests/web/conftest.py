"""A folder of made-up runs, the page served from a thread, and one Chromium for all tests of a worker."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient

from benchmarks.synthetic_run import write_synthetic_run
from gradvitals.web.app import Server, bind, make_app

sys.path.insert(0, str(Path(__file__).parent))  # for `web_runs`, which these tests share
from web_runs import LONG, STEPS, TENSORS


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs: ``gpt`` and, in a folder of its own, ``sweep/wide``."""
    made = tmp_path_factory.mktemp("served")
    write_synthetic_run(made / "gpt", steps=STEPS, num_tensors=TENSORS)
    write_synthetic_run(made / "sweep" / "wide", steps=LONG, num_tensors=TENSORS, seed=1)
    return made


@pytest.fixture
def client_of() -> Iterator[Callable[..., TestClient]]:
    """The page for one or more folders, without a socket."""
    clients = []

    def make(*folders: Path, **options: Any) -> TestClient:
        client = TestClient(make_app(*folders, **options), base_url="http://127.0.0.1")
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.app.state.api.close()  # type: ignore[attr-defined]
        client.close()


@pytest.fixture
def client(client_of: Callable[..., TestClient], folder: Path) -> TestClient:
    return client_of(folder)


@dataclass
class Served:
    """A server in a thread."""

    folder: Path
    url: str = ""
    server: Server | None = None
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, port: int = 0) -> None:
        listening = bind("127.0.0.1", port)
        app = make_app(self.folder)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2, ws="none")
        self.server = Server(config, on_exit=app.state.api.watcher.stop)

        def work() -> None:
            assert self.server is not None
            self.server.run(sockets=[listening])
            listening.close()

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self) -> None:
        if self.server is not None:
            self.server.handle_exit(2, None)
            self.threads[-1].join(20)
            assert not self.threads[-1].is_alive()
            self.server = None


@pytest.fixture(scope="session")
def served(folder: Path) -> Iterator[Served]:
    """The page of the two runs, on a port of its own."""
    page = Served(folder)
    page.start()
    yield page
    page.stop()


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Served]]:
    """Serves a folder of a test's own."""
    pages = []

    def start(folder: Path) -> Served:
        page = Served(folder)
        page.start()
        pages.append(page)
        return page

    yield start
    for page in pages:
        page.stop()


def chromium() -> str | None:
    return os.environ.get("GRADVITALS_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A real Chromium; tests without one are skipped, unless GRADVITALS_REQUIRE_BROWSER or CI is set."""
    path = chromium()
    required = os.environ.get("GRADVITALS_REQUIRE_BROWSER") or os.environ.get("CI")
    if path is None and not required:
        pytest.skip("needs a Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def first_page(browser: Any) -> Any:
    """What tests open first, one after the other: a new page takes the time of two that were there before."""
    page = browser.new_context().new_page()
    page.set_default_timeout(60_000)
    return page


def forget(page: Any, site: str) -> None:
    """Leave a page as if it were new, at an address of the same site, so that Chromium keeps its process."""
    page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    page.mouse.move(0, 0)
    # With an icon of its own: Chromium would ask for /favicon.ico, and name it missing on the console of the next test.
    empty = {"content_type": "text/html", "body": '<link rel="icon" href="data:,">'}
    page.route(f"{site}rest", lambda route: route.fulfill(**empty))
    page.goto(f"{site}rest")
    page.unroute_all()
    page.context.clear_cookies()


@pytest.fixture
def open_page(browser: Any, first_page: Any, served: Served) -> Iterator[Callable[..., Any]]:
    """Opens pages that must not say a word to the console, nor ask any other machine for anything.

    All that a test opens is new to it: what its first page may remember of tests before is wiped.
    """
    pages, listeners, troubles, asked = [], [], [], []

    def listen(page: Any, event: str, hear: Callable[[Any], None]) -> None:
        page.on(event, hear)
        listeners.append((page, event, hear))

    def blank(width: int, height: int, color_scheme: str = "light", **options: Any) -> Any:
        size = {"width": width, "height": height}
        if pages or options:
            context = browser.new_context(viewport=size, color_scheme=color_scheme, **options)
            page = context.new_page()
            page.set_default_timeout(60_000)
            return page
        first_page.set_viewport_size(size)
        first_page.emulate_media(color_scheme=color_scheme)
        return first_page

    def open_(url: str, *, width: int = 1280, height: int = 800, quiet: bool = True, **options: Any) -> Any:
        page = blank(width, height, **options)
        pages.append(page)
        listen(page, "request", lambda request: asked.append(request.url))
        if quiet:
            listen(
                page, "console", lambda message: troubles.append(f"{message.text} {message.location.get('url', '')}")
            )
            listen(page, "pageerror", lambda error: troubles.append(str(error)))
        page.requested = asked
        page.goto(url)
        return page

    yield open_
    for page, event, hear in listeners:
        page.remove_listener(event, hear)
    for page in pages:
        if page is first_page:
            forget(page, served.url)
        else:
            page.context.close()
    assert troubles == []
    assert [url for url in asked if not re.match(r"http://127\.0\.0\.1:\d+/", url)] == []
