"""Readings, averages and a Monitor synthetic, for the tests of schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gradvitals as gv
from gradvitals.diagnose.history import Average
from gradvitals.types import Action, Reading


def average(step: int, value: float, half: float, *, begins: int | None = None, **other: Any) -> Average:
    """GSNR value ± half over ten readings, of micro-batches of 8 in a batch of 32."""
    told = {"count": 10, "batch_size": 8.0, "step_size": 32.0, **other}
    first = step - 9 if begins is None else begins
    return Average(step=step, begins=first, value=value, low=value - half, high=value + half, **told)


def readings(
    step: int,
    value: float,
    half: float,
    *,
    source: Any = "microbatch",
    size: float | None = 8.0,
    whole: float | None = 32.0,
    loss: float = 1.0,
) -> list[Reading]:
    """What a Monitor says of one step."""
    general = Reading(step=step, time=0.0, batch_size=whole, values={"loss": loss, "grad/spike_ratio": 1.0})
    values = {"gsnr": value, "gsnr_low": value - half, "gsnr_high": value + half}
    return [general, Reading(step=step, time=0.0, source=source, batch_size=size, values=values)]


class SyntheticMonitor:
    """Has a step, takes what is read as finished late or early, and hands it out as a Monitor would."""

    def __init__(self, *, window: int = 20) -> None:
        self.step = 0
        self.ranks = None
        self.config = gv.Config(quiet=True, gsnr_window=window)
        self.recorded: list[Action] = []
        self.flushes = 0
        self.readers: list[Callable[[Reading], object]] = []
        self._on_its_way: list[Reading] = []

    def made(self, found: Sequence[Reading], *, arrives: bool = True) -> None:
        """A step was made and read."""
        self.step += 1
        self._on_its_way += found
        if arrives:
            self.arrive()

    def arrive(self) -> None:
        waiting, self._on_its_way = self._on_its_way, []
        for reading in waiting:
            assert self.readers
            for reader in self.readers:
                reader(reading)

    def add_reader(self, reader: Callable[[Reading], object]) -> None:
        self.readers.append(reader)

    def flush(self) -> bool:
        self.flushes += 1
        self.arrive()
        return True

    def record(self, action: Action) -> None:
        self.recorded.append(action)
