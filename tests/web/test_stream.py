"""News of runs: what is said, from which cursor on, and that a server ends with readers still listening."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio import to_thread
from click.testing import CliRunner

from benchmarks.synthetic_run import write_synthetic_run
from gradvitals.cli import main
from gradvitals.errors import ConfigError
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading
from gradvitals.web.app import addresses, bind
from gradvitals.web.run_index import RunIndex
from gradvitals.web.stream import Watcher


def events(answer: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line.startswith("data: ") and line != "data: {}":
            yield json.loads(line[6:])


def test_news_come_as_a_run_is_written(tmp_path: Path, serve: Callable[[Path], Any]) -> None:
    write_synthetic_run(tmp_path / "old", steps=5, num_tensors=14)
    writer = RunWriter(tmp_path / "live", meta={"facts": {}})
    writer.write(Reading(step=0, time=0.0, values={"loss": 1.0}))
    writer.commit()
    url = serve(tmp_path).url
    with httpx.stream("GET", f"{url}api/stream", timeout=10) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer)
        first = [next(found) for _ in range(2)]
        by_step = {news["last_step"]: news for news in first}
        assert set(by_step) == {0, 4}
        assert by_step[0]["live"]
        assert not by_step[4]["live"]
        live = by_step[0]["run"]
        writer.write(Reading(step=1, time=1.0, values={"loss": 1.0}))
        writer.write(Finding(id="x", severity="info", title="t"))
        writer.commit()
        assert next(found) == {"run": live, "last_step": 1, "findings": 1, "segments": 1, "live": True}
    writer.close()


def test_the_command_prints_its_address_and_ends_at_ctrl_c_with_a_reader_listening(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run", steps=5, num_tensors=14)
    command = [sys.executable, "-m", "gradvitals.cli", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[0]
        tunnel = process.stdout.readline()
        port = url.rstrip("/").rpartition(":")[2]
        assert url == f"http://127.0.0.1:{port}/"
        assert f"ssh -L {port}:127.0.0.1:{port} " in tunnel
        for _ in range(200):
            try:
                httpx.get(url, timeout=5)
                break
            except httpx.ConnectError:
                time.sleep(0.02)
        with httpx.stream("GET", f"{url}api/stream", timeout=10) as answer:
            assert next(events(answer))["last_step"] == 4
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(10) in (0, 130, -signal.SIGINT)
        assert "Traceback" not in process.stderr.read()


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["serve", str(tmp_path / "nowhere")])
    assert result.exit_code == 2
    assert "there is no folder" in result.output


def test_a_taken_port_is_an_error_and_the_default_one_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradvitals.web import app

    taken = bind("127.0.0.1", 0)
    port = taken.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"port {port} .*--port 0 takes a free one"):
        bind("127.0.0.1", port)
    monkeypatch.setattr(app, "DEFAULT_PORT", port)
    other = bind("127.0.0.1", None)
    assert other.getsockname()[1] != port
    assert addresses(other)[0] == f"http://127.0.0.1:{other.getsockname()[1]}/"
    for each in (taken, other):
        each.close()
    with pytest.raises(ConfigError, match="expected an address or name of this machine"):
        bind("no-such-host.invalid", 0)


def test_news_do_not_wait_behind_requests(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run", steps=5, num_tensors=14)
    watcher = Watcher(RunIndex(tmp_path))
    done = threading.Event()
    told: list[bytes] = []

    async def look_while_all_requests_are_busy() -> None:
        to_thread.current_default_thread_limiter().total_tokens = 1
        busy = asyncio.create_task(to_thread.run_sync(done.wait, 30))
        await asyncio.sleep(0)
        try:
            found = aiter(watcher.events())
            await anext(found)  # how long to wait before it connects again
            told.append(await asyncio.wait_for(anext(found), 10))
        finally:
            done.set()
            await busy

    with ThreadPoolExecutor(1) as thread:  # the browser of other tests keeps a loop in this one
        thread.submit(asyncio.run, look_while_all_requests_are_busy()).result(60)
    assert b'"last_step": 4' in told[0]
