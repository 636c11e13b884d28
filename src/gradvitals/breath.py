"""Breath: how a thread that computes beside training leaves it the interpreter."""

from __future__ import annotations

import time

WORK_SECONDS = 1e-4
"""Time that a thread computes in one go."""

REST_SECONDS = 5e-5
"""Time that it then sleeps, at least: long enough for another thread to wake up and take over."""


class Breath:
    """To be called between small pieces of work: now and then it sleeps for a moment.

    Python takes the interpreter away from a thread that computes only every 5 ms (`sys.getswitchinterval`). A training
    thread lets go of it in every operation of torch, wants it back right after, and would wait so long each time. A
    thread that sleeps hands it over.
    """

    def __init__(self) -> None:
        self.awaited = 0
        """Threads that wait for this one to be done, and would rather not have it sleep."""
        self.is_late = False
        """Whether more work comes in than gets done."""
        self._since = 0.0

    def __call__(self) -> None:
        """Sleep for a moment, if it is time to."""
        if time.perf_counter() - self._since < WORK_SECONDS or self.awaited or self.is_late:
            return
        time.sleep(REST_SECONDS)
        self._since = time.perf_counter()
