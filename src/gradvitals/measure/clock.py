"""What monitoring itself costs, measured without waiting for anything."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType

import torch


@dataclass
class Lap:
    """The cost of one step's reading."""

    wall_seconds: float = 0.0
    """From the end of the last step that was read to the end of this one."""
    steps: int = 1
    """The steps in this time: this one, and those before it that were passed over."""
    host_seconds: float = 0.0
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def cost_seconds(self) -> float:
        """Time taken from training: on the GPU where one is used, else on the host. Call when the step is done."""
        if not self.events:
            return self.host_seconds
        return sum(float(start.elapsed_time(end)) for start, end in self.events) / 1000


class Clock:
    """A context manager around every piece of our own work; `lap` closes a step's account.

    On a GPU the host's time is mostly hidden behind queued kernels, so what counts is the time the stream spends on
    our work; events measure it.

    Args:
        keeps: Whether somebody wants to know what it costs; else only the length of steps is measured.
        use_events: Whether work is done on a GPU.
    """

    def __init__(self, *, keeps: bool = True, use_events: bool = False) -> None:
        self.keeps = keeps
        self._use_events = use_events
        self._lap = Lap()
        self._depth = 0
        self._entered = 0.0
        self._start_event: torch.cuda.Event | None = None
        self._last_lap = time.perf_counter()

    def __enter__(self) -> None:
        if not self.keeps:
            return
        self._depth += 1
        if self._depth == 1:
            self._entered = time.perf_counter()
            if self._use_events:
                self._start_event = torch.cuda.Event(enable_timing=True)
                self._start_event.record()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth or not self.keeps:
            return
        self._lap.host_seconds += time.perf_counter() - self._entered
        if self._start_event is not None:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._lap.events.append((self._start_event, end))

    def pass_over(self, steps: int) -> None:
        """Some steps have ended that were not read: what they took belongs to the next one that is."""
        self._lap.steps += steps

    def lap(self) -> Lap:
        """The cost since the last call."""
        now = time.perf_counter()
        lap, self._lap = self._lap, Lap()
        lap.wall_seconds, self._last_lap = now - self._last_lap, now
        return lap
