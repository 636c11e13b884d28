"""Processes that train together: started here, watched while they work, and never left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

from gradvitals.errors import GradvitalsError

POLL_SECONDS = 0.1
GRACE_SECONDS = 30.0
"""For processes that have done their work to end."""

STORE_TIMEOUT = timedelta(seconds=300)
ORPHAN_SECONDS = 1.0
"""How often a process looks whether the one that started it still lives."""


class Team:
    """The processes of all ranks.

    Args:
        processes: In the order of ranks.
        may_be_killed: The rank whose death is part of the experiment; None for nobody's.
    """

    def __init__(self, processes: list[BaseProcess], may_be_killed: int | None) -> None:
        self.processes = processes
        self._may_be_killed = may_be_killed

    def wait_until(self, is_done: Callable[[], bool], what: str, seconds: float) -> None:
        """Wait for something that the processes do.

        Raises:
            GradvitalsError: Where one of them ends before that, or it takes too long.
        """
        deadline = time.monotonic() + seconds
        while not is_done():
            self._check(what)
            if time.monotonic() > deadline:
                raise GradvitalsError(f"{what}: not done within {seconds:.0f} s; is the machine very busy?")
            time.sleep(POLL_SECONDS)

    def _check(self, what: str) -> None:
        for rank, process in enumerate(self.processes):
            code = process.exitcode
            if code == -signal.SIGKILL and rank == self._may_be_killed:
                continue
            if code:
                raise GradvitalsError(f"{what}: the process of rank {rank} ended with {code}; its output says why")


@contextmanager
def team(world: int, work: Callable[..., Any], *arguments: Any, may_be_killed: int | None = None) -> Iterator[Team]:
    """Start a process for each rank, which calls ``work(rank, world, port, *arguments)``.

    The store that ranks meet in is in this process: it outlives any of them, as under torchrun.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
    # Spawned, not forked: a fork of a process in which torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    try:
        for rank in range(world):
            everything = (os.getpid(), work, rank, world, store.port, *arguments)
            started = context.Process(target=_one, args=everything, daemon=True)
            started.start()
            processes.append(started)
        yield Team(processes, may_be_killed)
        deadline = time.monotonic() + GRACE_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        del store


def _one(parent: int, work: Callable[..., Any], *arguments: Any) -> None:
    """What each process runs. It ends where the one that started it was killed and could not end it."""

    def watch_parent() -> None:
        while os.getppid() == parent:
            time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch_parent, daemon=True).start()
    work(*arguments)
