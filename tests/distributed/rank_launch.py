"""Starts the processes that `rank_worker` is, and again where a job has ended them, until all jobs have an answer."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("rank_worker.py")
LIMIT = 500.0
"""Seconds for all jobs of one world."""


def start(command: Sequence[object], log: Path, **environment: str) -> subprocess.Popen[bytes]:
    """A Python process that writes to a log."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, *map(str, command)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **environment},
        )


def end(processes: Sequence[subprocess.Popen[bytes]], deadline: float, grace: float = 8.0) -> None:
    """Wait for all; when one has failed, the others have a few seconds more."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.02)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def run_jobs(folder: Path, world: int, names: Sequence[str]) -> None:
    """Have every job done by all ranks; a job without an answer gets one that says so."""
    folder.mkdir(exist_ok=True)
    (folder / "runs").mkdir(exist_ok=True)
    deadline = time.monotonic() + LIMIT
    pending = dict(enumerate(names))
    attempt = 0
    while pending and time.monotonic() < deadline:
        (folder / "todo.json").write_text(json.dumps(pending), "utf-8")
        processes = [
            start([WORKER, folder, rank, world, attempt], folder / f"log{attempt}.{rank}") for rank in range(world)
        ]
        end(processes, deadline)
        attempt += 1
        begun = [number for number in pending if any(_file(folder, number, rank).exists() for rank in range(world))]
        if not begun:
            begun = [min(pending)]  # all ranks hang, or died, in the first
        for number in begun:
            del pending[number]
            for rank in range(world):
                if not _file(folder, number, rank).exists():
                    answer = {"error": f"rank {rank} gave no answer; see {folder}/log{attempt - 1}.{rank}"}
                    _file(folder, number, rank).write_bytes(pickle.dumps(answer))
    for number in pending:
        for rank in range(world):
            _file(folder, number, rank).write_bytes(pickle.dumps({"error": "not reached: out of time"}))


def answers(folder: Path, world: int, number: int) -> list[dict[str, Any]]:
    """What each rank has left of a job."""
    return [pickle.loads(_file(folder, number, rank).read_bytes()) for rank in range(world)]


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}.{rank}.pkl"
