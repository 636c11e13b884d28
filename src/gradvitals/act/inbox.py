"""The hand-over of readings from the monitor's thread to the training thread, at moments that speed does not change."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gradvitals.monitor import Monitor
from gradvitals.types import Action, Reading

KEPT_VALUES = ("loss", "grad/spike_ratio", "gsnr", "gsnr_low", "gsnr_high")
"""All of a reading that schedules decide by."""

CAPACITY = 4096
"""Readings that wait at most, for a loop that never looks."""


class Inbox:
    """Readings of a Monitor, in the order of steps, each given out at a step that is known beforehand.

    Readings are finished a moment after their step, sooner or later as the machine goes. What is given out at a step
    is everything up to `lag` steps before it, neither more nor less: newer readings stay, and where one of these has
    not arrived yet, the training thread waits for it. So a run that is repeated decides at the same steps.

    Args:
        monitor: Whose readings.
        lag: Steps from a reading to the moment it is given out. With 0 the training thread waits every time.
    """

    def __init__(self, monitor: Monitor, *, lag: int) -> None:
        self._monitor = monitor
        self._lag = lag
        self._queue: deque[Reading] = deque(maxlen=CAPACITY)
        if monitor.ranks is not None:  # ranks send their numbers at fixed steps, which may be far apart
            monitor.recorder.send_each_step()
        listen(monitor, self._queue)

    def take(self) -> list[list[Reading]]:
        """The readings that are due now, one list a step."""
        last = self._monitor.step - 1 - self._lag
        if last >= 0 and not (self._queue and self._queue[-1].step > last):
            self._monitor.flush()
        steps: dict[int, list[Reading]] = {}
        while self._queue and self._queue[0].step <= last:
            reading = self._queue.popleft()
            steps.setdefault(reading.step, []).append(reading)
        return list(steps.values())

    def state_dict(self) -> dict[str, Any]:
        """What has arrived, or is on its way, and was not given out."""
        self._monitor.flush()
        return {"waiting": [reading.to_json() for reading in self._queue.copy()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what a saved Inbox had not given out. What this one holds is of steps that no longer count."""
        self._monitor.flush()
        self._queue.clear()
        self._queue.extend(Reading.from_json(reading) for reading in state["waiting"])


def listen(monitor: Monitor, queue: deque[Reading]) -> None:
    """Put the readings of a Monitor, without their arrays, into a queue from now on."""

    def hear(reading: Reading) -> None:
        values = {name: reading.values[name] for name in KEPT_VALUES if name in reading.values}
        queue.append(replace(reading, values=values, tensors={}, layers={}, heads={}))

    monitor.add_reader(hear)


def leads(monitor: Monitor) -> bool:
    """Whether this process speaks for all: the first of several ranks does."""
    return monitor.ranks is None or monitor.ranks.rank == 0


def record(monitor: Monitor, actions: Sequence[Action]) -> None:
    """Keep actions with the run."""
    for action in actions:
        monitor.record(action)
