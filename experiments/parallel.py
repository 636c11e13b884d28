"""Jobs on several processes, up to a time limit."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """Processes that stay for several rounds of jobs, each with one torch thread; 1: this process.

    Args:
        count: How many.
        seconds: Time limit from now. Jobs that run when it is over are ended, and their results lost.
    """

    def __init__(self, count: int, seconds: float | None = None) -> None:
        self.deadline = math.inf if seconds is None else time.monotonic() + seconds
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        self._processes: tuple[Any, ...] = ()

    def __enter__(self) -> Workers:
        if self._count > 1:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            # Spawned, not forked: a fork of a process in which torch has threads may hang.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(
                self._count, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            processes = tuple((self._pool._processes or {}).values())
            if self.is_over:
                for process in processes:
                    process.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def is_over(self) -> bool:
        """Whether the time limit has passed."""
        return time.monotonic() >= self.deadline

    def run(self, job: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[tuple[Item, Result]]:
        """Yields items with their results as they finish; fewer than all if the time limit passes."""
        if self._pool is None:
            for item in items:
                if self.is_over:
                    return
                yield item, job(item)
            return
        pending: dict[Future[Result], Item] = {self._pool.submit(job, item): item for item in items}
        while pending and not self.is_over:
            left = self.deadline - time.monotonic()
            done, _ = wait(pending, timeout=None if math.isinf(left) else max(left, 0), return_when=FIRST_COMPLETED)
            for future in done:
                yield pending.pop(future), future.result()
