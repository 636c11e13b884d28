"""Starts the processes that `rank_worker` is, and again where a job has ended them, until all jobs have an answer.

    python rank_launch.py FOLDER

The folder has `jobs.json`: for each world its jobs, in their order; what is left of them is in `world2` and `world4`.
All ranks of both worlds are forks of this process, which has imported what takes each of them seconds to import;
and both worlds run at once, so that one works where the other waits. A file `stop` ends them before they are done.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

LIMIT = 500.0
"""Seconds for all jobs of one world."""


class Process(Protocol):
    def poll(self) -> int | None: ...

    def kill(self) -> None: ...

    def wait(self) -> object: ...


class Fork:
    """A process that begins where this one is, and writes to a log."""

    def __init__(self, log: Path, work: Callable[..., None], *arguments: object) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(log, work, *arguments))
        self._process.start()
        self.kill = self._process.kill
        self.wait = self._process.join

    @staticmethod
    def _run(log: Path, work: Callable[..., None], *arguments: object) -> None:
        with log.open("ab") as out:
            for stream in (1, 2):
                os.dup2(out.fileno(), stream)
        work(*arguments)

    def poll(self) -> int | None:
        return self._process.exitcode


def end(
    processes: Sequence[Process],
    deadline: float,
    grace: float = 8.0,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Wait for all; when one has failed, the others have a few seconds more."""
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline and not stopped():
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def run_jobs(
    folder: Path, names: Sequence[str], ranks: Callable[[dict[int, str], int], Sequence[Process]], world: int
) -> None:
    """Have every job done by all ranks; a job without an answer gets one that says so."""
    deadline = time.monotonic() + LIMIT
    pending = dict(enumerate(names))
    attempt = 0
    stop = folder.with_name("stop")
    while pending and time.monotonic() < deadline:
        end(ranks(pending, attempt), deadline, stopped=stop.exists)
        if stop.exists():
            return
        attempt += 1
        begun = [number for number in pending if any(_file(folder, number, rank).exists() for rank in range(world))]
        if not begun:
            begun = [min(pending)]  # all ranks hang, or died, in the first
        for number in begun:
            del pending[number]
            for rank in range(world):
                if not _file(folder, number, rank).exists():
                    _answer(folder, number, rank, f"rank {rank} gave no answer; see {folder}/log{attempt - 1}.{rank}")
    for number in pending:
        for rank in range(world):
            _answer(folder, number, rank, "not reached: out of time")


def answers(folder: Path, world: int, number: int) -> list[dict[str, Any]]:
    """What each rank has left of a job, when all have."""
    files = [_file(folder, number, rank) for rank in range(world)]
    deadline = time.monotonic() + LIMIT + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, f"the ranks have left no {files[0].name}; see {folder.parent}/log"
        time.sleep(0.05)
    return [pickle.loads(file.read_bytes()) for file in files]


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}.{rank}.pkl"


def _answer(folder: Path, number: int, rank: int, error: str) -> None:
    part = _file(folder, number, rank).with_suffix(".part")
    part.write_bytes(pickle.dumps({"error": error}))
    part.rename(part.with_suffix(".pkl"))


def main() -> None:
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(Path(__file__).parent))
    import rank_worker

    rank_worker.prepare()
    worlds = {int(world): names for world, names in json.loads((folder / "jobs.json").read_text("utf-8")).items()}

    def run_world(world: int) -> None:
        home = folder / f"world{world}"

        def ranks(pending: dict[int, str], attempt: int) -> list[Fork]:
            return [
                Fork(home / f"log{attempt}.{rank}", rank_worker.work, home, rank, world, attempt, pending)
                for rank in range(world)
            ]

        run_jobs(home, worlds[world], ranks, world)

    for world in worlds:
        (folder / f"world{world}" / "runs").mkdir(parents=True, exist_ok=True)
    managers = [Fork(folder / "log", run_world, world) for world in worlds]
    end(managers, time.monotonic() + LIMIT + 20)


if __name__ == "__main__":
    main()
