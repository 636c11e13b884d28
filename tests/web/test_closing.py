"""Files that are let go of while somebody reads from them: nothing is closed under a reader's hands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from benchmarks.synthetic_run import write_synthetic_run
from gradvitals.errors import RunError
from gradvitals.store import RunWriter, open_run
from gradvitals.types import Reading
from gradvitals.web import run_index
from gradvitals.web.run_index import Judge, RunIndex

UNJUDGED = 20_000
"""Steps of a run recorded without diagnosis that is still being judged when the server is told to end."""


def write_unjudged(path: Path, steps: int = UNJUDGED) -> None:
    with RunWriter(path, meta={}) as writer:
        for step in range(steps):
            writer.write(Reading(step=step, time=float(step), values={"loss": 1.0, "grad/norm": 1.0}))


def test_ctrl_c_while_a_run_is_judged_ends_the_server_without_a_crash(tmp_path: Path) -> None:
    write_unjudged(tmp_path / "run")
    command = [sys.executable, "-m", "gradvitals.cli", "serve", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().split()[0]
        with httpx.Client(base_url=url, timeout=30, transport=httpx.HTTPTransport(retries=5)) as client:
            [run] = client.get("/api/runs").json()["runs"]
            assert client.get(f"/api/runs/{run['id']}").json()["level"] == "pending"
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) in (0, 130, -signal.SIGINT)
        assert "Traceback" not in process.stderr.read()


def test_a_run_that_the_rules_cannot_read_is_not_called_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_unjudged(tmp_path / "run", 300)
    index = RunIndex(tmp_path)
    judge = Judge(index)
    monkeypatch.setattr(run_index, "replay", lambda run, on_step: 1 / 0)
    [file] = index.files()
    with index.opened(file.id) as run:
        while (found := judge.judged(file.id, run)).is_pending:
            time.sleep(0.01)
    index.close()
    assert found.level == "unknown"
    assert found.note.startswith("Not judged")


def test_closing_a_run_waits_for_the_thread_that_reads_it(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, steps=5, num_tensors=14)
    run = open_run(tmp_path)
    closed = threading.Event()

    def close() -> None:
        run.close()
        closed.set()

    with run._transaction():
        thread = threading.Thread(target=close)
        thread.start()
        time.sleep(0.05)
        assert not closed.is_set()
        assert run._db.execute("SELECT count(*) FROM segment").fetchone() == (1,)
    thread.join(10)
    assert closed.is_set()
    with pytest.raises(RunError, match=r"run\.db was closed"):
        run.series("loss")
    run.close()


def test_a_closed_index_leaves_a_run_open_until_its_user_releases_it(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path / "run", steps=5, num_tensors=14)
    index = RunIndex(tmp_path)
    [file] = index.files()
    with index.opened(file.id) as run:
        index.close()
        assert run.last_step == 4
        with index.opened(file.id) as late:  # a request that was under way
            assert late.last_step == 4
    for closed in (run, late):
        with pytest.raises(RunError, match="was closed"):
            _ = closed.last_step
