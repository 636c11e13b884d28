"""One stretch of steps, timed: bare, or with a monitor that is where it would be in the middle of a run.

A monitor is attached before a stretch and goes on with the run it has watched before, so that its rules have as much
to look at as in the middle of a run. The clock starts when the device is idle and stops when it is idle again; between
these nothing waits.

The monitor's thread writes about four times a second. It is not flushed inside the timed stretch: at the start some
readings of the untimed steps still wait to be written, at the end some of the timed ones do, and in the middle of a
long run it is no different. A flush at the end would make training wait for the disk, which it never does. How long
a flush takes after the stretch is reported apart, as `flush_ms`.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.lab.shapes import Observe, Training
from gradvitals.measure.cadence import YOUNG_STEPS
from gradvitals.monitor import Monitor
from gradvitals.monitor import watch

SETTLE_STEPS = 3
THINNING_STEPS = 800
"""Steps in which a monitor finds out how many of them it can read within its budget."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What one timed stretch of steps took."""

    wall_seconds: float
    """Per step."""
    cpu_seconds: float
    """Per step, of all threads of this process: also what ran beside training."""
    peak_bytes: int | None
    """Most device memory in use; None on a CPU."""
    flush_seconds: float | None = None
    """To bring the last readings to disk after the stretch; None without a monitor."""
    page_faults: float | None = None
    """Per step, pages of memory that the system had to give; None where they were not counted."""


@dataclass
class WatchedRun:
    """A run that is watched now and then, and has gone on in between without being seen."""

    path: Path
    state: dict[str, Any] | None = None
    """What its monitor knew at the end of its last stretch."""
    every: int = 0
    """Steps from one full reading to the next, as it has come to."""
    step_every: int = 1
    """The same for any reading."""
    pieces: int = 0
    """Stretches that were timed."""


def time_steps(training: Training, observe: Observe | None, steps: int) -> Stretch:
    """Time some steps, from when the device is idle until it is again."""
    on_gpu = training.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize(training.device)
        torch.cuda.reset_peak_memory_stats(training.device)
    cpu_started, started = time.process_time(), time.perf_counter()
    for _ in range(steps):
        training.step(observe)
    if on_gpu:
        torch.cuda.synchronize(training.device)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    peak = torch.cuda.max_memory_allocated(training.device) if on_gpu else None
    return Stretch(wall_seconds=wall / steps, cpu_seconds=cpu / steps, peak_bytes=peak)


def time_monitored(config: Config, training: Training, steps: int, run: WatchedRun) -> Stretch:
    """Time some steps of a run that is watched, or as many more as it reads single tensors more rarely by itself."""
    model, optimizer = training.model, training.optimizer
    with watch(model, optimizer, run=run.path, config=config, batch_size=training.batch_size) as monitor:
        settle(monitor, training, run)
        run.every, run.step_every = monitor.recorder.cadence
        stretch = time_steps(training, monitor.observe, steps * run.every // config.tensor_every)
        started = time.perf_counter()
        written = monitor.flush()
        flush_seconds = time.perf_counter() - started
        run.state = monitor.state_dict()
    expect_whole(monitor)
    if not written:
        raise GradvitalsError("the monitor failed while it was timed: it could not write")
    return replace(stretch, flush_seconds=flush_seconds)


def expect_whole(monitor: Monitor) -> None:
    """A monitor that has given up on something is cheap, and its time would mean nothing: raise."""
    broken = [finding for finding in monitor.findings if finding.id in ("monitor_error", "store_error")]
    if broken:
        raise GradvitalsError(f"the monitor failed while it was timed: {broken[0]}")


def grown_step(config: Config, every: int | None = None, since: int = YOUNG_STEPS) -> int:
    """A step at which a run is young no more, and everything is due."""
    cycle = (every or config.tensor_every) * config.detail_factor
    return math.ceil(since / cycle) * cycle


def settle(monitor: Monitor, training: Training, run: WatchedRun, thinning_steps: int | None = None) -> None:
    """Bring a monitor to where it is in the middle of a run.

    A young run is read more often, so a new one begins at a step where it is young no more. In the first step all is
    due, and set up, and the flush after it opens the file. On a CPU the steps that follow also fill the sliding
    windows, which only then begin to report; on a GPU that takes some microseconds every tenth step, and the wait for
    it would take longer than all the rest. There, too, a new monitor finds out what it can afford, as if the first
    seconds, in which all is read, were over. A run that was watched before goes on with all it knows.

    What is timed begins right after a step that was due, each time after another of those that make a cycle.
    """
    tap, config = monitor.recorder, monitor.config
    if run.state is None:
        tap.start(grown_step(config))
    else:
        monitor.load_state_dict(run.state)
        tap.start(grown_step(config, tap.cadence.every, tap.step))
    training.step(monitor.observe)
    monitor.flush()
    is_new = run.state is None and training.device.type == "cpu"
    for _ in range(config.window_steps if is_new else SETTLE_STEPS):
        training.step(monitor.observe)
    if is_new and tap.budget is not None and tap.budget.thins_tensors:
        tap.budget.free_seconds = 0.0
        for number in range(THINNING_STEPS if thinning_steps is None else thinning_steps):
            training.step(monitor.observe)
            if number % 100 == 99:
                monitor.flush()  # what they cost is known when they are written
    every = tap.cadence.every
    tap.start(grown_step(config, every, tap.step) + run.pieces % config.detail_factor * every + 1)
    run.pieces += 1
