"""Going through a long run in parts that fit in memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gradvitals.store.frames import Kind
from gradvitals.store.reader import Run

NUMBERS_AT_A_TIME = 1 << 22


def windows(
    steps: NDArray[np.int64], numbers_per_step: int, at_a_time: int | None = None
) -> Iterator[NDArray[np.int64]]:
    """Cut steps into stretches that hold about `at_a_time` numbers each, or `NUMBERS_AT_A_TIME`."""
    size = max(1, (at_a_time or NUMBERS_AT_A_TIME) // max(1, numbers_per_step))
    for start in range(0, len(steps), size):
        yield steps[start : start + size]


def scan(
    run: Run, metric: str, kind: Kind = "tensors", source: str | None = None
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """One metric of all rows, stretch by stretch: steps and ``[steps, rows]``; nothing where the run has none."""
    if metric not in run.metrics(kind):
        return
    steps, _ = run.times(metric, kind=kind, source=source)
    for window in windows(steps, len(run.names(kind))):
        yield run.matrix(metric, kind, source=source, since=int(window[0]) - 1, until=int(window[-1]))
