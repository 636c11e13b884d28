"""The worker as a process: what happens to a run when things go wrong, each tried with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import gradvitals as gv

SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch
import gradvitals as gv

torch.manual_seed(0)
torch.set_num_threads(1)
how, run = sys.argv[1], sys.argv[2]
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
monitor = gv.watch(model, optimizer, run=run, config=gv.Config(worker="process", quiet=True, overhead_budget=1))
for step in range(10**9):
    loss = (model(torch.randn(16, 8)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    monitor.observe(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print(step, flush=True)
    if step == 60 and how == "raises":
        raise RuntimeError("as planned")
    if step == 60 and how == "exits":
        os._exit(3)
    if step == 60 and how == "ends":
        break
    if step == 60 and how == "worker killed":
        os.kill(json.loads((Path(run) / "journal.json").read_text())["worker"]["pid"], 9)
    if step == 200 and how == "worker killed":
        break
"""


def start(folder: Path, how: str) -> subprocess.Popen[str]:
    env = {**os.environ, "GRADVITALS_WORKER": "process"}
    command = [sys.executable, "-c", SCRIPT, how, str(folder / "run")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def steps_made(process: subprocess.Popen[str], seconds: float | None = None) -> int:
    """Let it run, kill it if asked, and return the last step it reported."""
    assert process.stdout is not None
    first = process.stdout.readline()
    if seconds is not None:
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
    output = first + process.stdout.read()
    process.wait()
    process.stdout.close()
    if process.stderr is not None:
        process.stderr.close()
    lines = output.split("\n")
    return int(lines[-2]) if lines[-1] == "" else int(lines[-1] or lines[-2])


def worker_of(run: Path) -> int:
    return int(json.loads((run / "journal.json").read_text())["worker"]["pid"])


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in ("Z", "X"):
            return
        time.sleep(0.01)
    raise AssertionError("the worker is still there")


def check_whole(run: Path, last: int) -> None:
    with gv.open_run(run) as opened:
        steps, _ = opened.series("loss")
        np.testing.assert_array_equal(steps, np.arange(len(steps)))
        assert steps[-1] in (last, last + 1), "a step may have ended after the last line was printed"
        np.testing.assert_array_equal(opened.series("grad/norm")[0], steps)
    assert sorted(path.name for path in run.iterdir() if not path.name.startswith("run.db")) == []


@pytest.mark.parametrize("seconds", [0.0, 0.15, 0.4, 0.9])
def test_a_killed_run_misses_no_step(tmp_path: Path, seconds: float) -> None:
    process = start(tmp_path, "for ever")
    last = steps_made(process, seconds)
    note = tmp_path / "run" / "journal.json"
    if note.exists():
        wait_until_gone(worker_of(tmp_path / "run"))
    check_whole(tmp_path / "run", last)
    with gv.open_run(tmp_path / "run") as run:
        assert run.meta["finished_at"] is None
        assert not run.is_live


def test_the_worker_does_not_load_torch(tmp_path: Path) -> None:
    process = start(tmp_path, "for ever")
    assert process.stdout is not None
    for _ in range(50):
        process.stdout.readline()
    worker = worker_of(tmp_path / "run")
    while not (tmp_path / "run" / "run.db").exists():  # it has drained the journal once, so all is imported
        process.stdout.readline()
    mapped = Path(f"/proc/{worker}/maps").read_text()
    steps_made(process, 0.0)
    assert "numpy" in mapped
    assert "torch" not in mapped


def test_killed_with_its_worker_nothing_is_lost_either(tmp_path: Path) -> None:
    process = start(tmp_path, "for ever")
    assert process.stdout is not None
    process.stdout.readline()
    while not (tmp_path / "run" / "journal.json").exists():
        time.sleep(0.01)
    worker = worker_of(tmp_path / "run")
    time.sleep(0.5)
    os.kill(worker, signal.SIGKILL)
    time.sleep(0.1)
    last = steps_made(process, 0.1)
    wait_until_gone(worker)
    check_whole(tmp_path / "run", last)


LATE = """
import json, os, sys
from pathlib import Path
import torch
import gradvitals as gv
import gradvitals.monitor

gradvitals.monitor.JOURNAL_BYTES = 1 << 17  # it wraps
how, killed_at, run = sys.argv[1:]
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
config = gv.Config(worker="process", quiet=True, tensor_every=1000, overhead_budget=1)
monitor = gv.watch(model, optimizer, run=run, config=config)
for step in range(1110):
    loss = (model(torch.randn(16, 8)) - 1).square().mean()
    optimizer.zero_grad()
    loss.backward()
    monitor.observe(loss)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 50 == 0 or step == int(killed_at):
        monitor.flush()
    if step == int(killed_at):
        os.kill(json.loads((Path(run) / "journal.json").read_text())["worker"]["pid"], 9)
if how == "both":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize(("how", "killed_at"), [("worker alone", "1100"), ("worker alone", "1109"), ("both", "1100")])
def test_a_worker_killed_late_takes_no_written_step_with_it(tmp_path: Path, how: str, killed_at: str) -> None:
    command = [sys.executable, "-c", LATE, how, killed_at, str(tmp_path / "run")]
    process = subprocess.run(command, check=False, capture_output=True)
    assert process.returncode == (-9 if how == "both" else 0), process.stderr.decode()
    with gv.open_run(tmp_path / "run") as run:
        np.testing.assert_array_equal(run.series("loss")[0], np.arange(1110))


def test_a_worker_that_dies_is_not_noticed_by_training(tmp_path: Path) -> None:
    process = start(tmp_path, "worker killed")
    last = steps_made(process)
    assert process.returncode == 0
    check_whole(tmp_path / "run", last)


@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("raises", 1), ("exits", 3)])
def test_however_the_script_ends_every_step_is_kept_and_no_process_stays(tmp_path: Path, how: str, status: int) -> None:
    process = start(tmp_path, how)
    last = steps_made(process)
    assert process.returncode == status
    if (tmp_path / "run" / "journal.json").exists():
        wait_until_gone(worker_of(tmp_path / "run"))
    check_whole(tmp_path / "run", last)
    with gv.open_run(tmp_path / "run") as run:
        stopped = [finding for finding in run.findings if finding.id == "training_stopped"]
        assert bool(stopped) == (how == "raises")
        assert (run.meta["finished_at"] is not None) == (how != "exits")


def test_no_process_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    def refuse(*args: object, **kwargs: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = gv.Config(worker="process")
    with gv.watch(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    assert capsys.readouterr().err.count("cannot be started") == 1
    with gv.open_run(monitor.run_path) as run:
        assert run.last_step == 2


def test_many_runs_in_one_process_leave_nothing_behind(tmp_path: Path) -> None:
    import torch

    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(10):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        config = gv.Config(worker="process", quiet=True)
        with gv.watch(model, optimizer, run=tmp_path / str(number), config=config):
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
        assert [path.name for path in (tmp_path / str(number)).iterdir()] == ["run.db"]
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors + 3
