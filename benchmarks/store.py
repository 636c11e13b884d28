"""What the store costs on this machine: bytes a value, time of the training thread, time to read a series."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from gradvitals.store.background import BackgroundWriter

from benchmarks.command_line import Command, json_option, print_result
from benchmarks.synthetic_run import transformer_layout
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Reading


def measure_store(
    num_tensors: int = 500, num_metrics: int = 10, steps: int = 2000, series_steps: int = 20000
) -> dict[str, float]:
    """Write synthetic runs to a temporary folder and time it.

    Args:
        num_tensors: Tensors a reading has.
        num_metrics: Metrics of each tensor; the run as a whole has as many values again.
        steps: Steps to put through the background writer, one every 2 ms.
        series_steps: Length of the run from which series are read; at the default sizes it takes 400 MB.

    Returns:
        ``bytes_per_value`` of everything in the folder of a finished run and ``bytes_per_value_live`` of one that is
        being written; ``put_ms_median`` and ``put_ms_p99`` of the training thread; ``dropped`` by the background
        writer; ``write_ms_per_step`` of the writing thread; ``series_ms_cold`` (open, read, close) and
        ``series_ms_warm`` to read one series of one tensor, medians of 20.
    """
    make = _reading_maker(num_tensors, num_metrics)
    with tempfile.TemporaryDirectory(prefix="gradvitals-") as folder:
        found = _measure_put(Path(folder) / "put", make, steps)
        found |= _measure_long_run(Path(folder) / "long", make, num_tensors, num_metrics, series_steps)
    return found


def _reading_maker(num_tensors: int, num_metrics: int) -> Callable[[int], Reading]:
    rng = np.random.default_rng(0)
    pool = rng.lognormal(size=(16, num_metrics, num_tensors))
    names = [f"metric/{number}" for number in range(num_metrics)]

    def make(step: int) -> Reading:
        tensors = dict(zip(names, pool[step % 16], strict=True))
        return Reading(step=step, time=time.time(), values=dict.fromkeys(names, float(step)), tensors=tensors)

    return make


def _measure_put(folder: Path, make: Callable[[int], Reading], steps: int) -> dict[str, float]:
    errors: list[BaseException] = []
    writer = BackgroundWriter(folder, meta={}, on_error=errors.append)
    took = []
    for step in range(steps):
        reading = make(step)
        start = time.perf_counter()
        writer.put(reading)
        took.append(time.perf_counter() - start)
        time.sleep(0.002)
    writer.close(60)
    if errors:
        raise errors[0]
    median, p99 = (1e3 * float(np.quantile(took, q)) for q in (0.5, 0.99))
    return {"put_ms_median": median, "put_ms_p99": p99, "dropped": float(writer.dropped)}


def _measure_long_run(
    folder: Path, make: Callable[[int], Reading], num_tensors: int, num_metrics: int, steps: int
) -> dict[str, float]:
    layout = transformer_layout(num_tensors)
    start = time.perf_counter()
    writer = RunWriter(folder, meta={})
    writer.write(layout)
    for step in range(steps):
        writer.write(make(step))
        if step % 50 == 49:
            writer.commit()
    writer.commit()
    live = _folder_bytes(folder)
    writer.close()
    write_seconds = time.perf_counter() - start

    def read_cold(name: str) -> None:
        with open_run(folder) as run:
            run.series("metric/0", tensor=name)

    names = [info.name for info in layout.tensors][:: max(1, num_tensors // 20)][:20]
    cold = [_milliseconds(read_cold, name) for name in names]
    with open_run(folder) as run:
        warm = [_milliseconds(lambda each: run.series("metric/0", tensor=each), name) for name in names]
    num_values = steps * num_metrics * (num_tensors + 1)
    return {
        "bytes_per_value": _folder_bytes(folder) / num_values,
        "bytes_per_value_live": live / num_values,
        "write_ms_per_step": 1e3 * write_seconds / steps,
        "series_ms_cold": statistics.median(cold),
        "series_ms_warm": statistics.median(warm),
    }


def _milliseconds(call: Callable[[str], object], argument: str) -> float:
    start = time.perf_counter()
    call(argument)
    return 1e3 * (time.perf_counter() - start)


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


LABELS = {
    "put_ms_median": ("training thread, to hand over one step, median", "ms"),
    "put_ms_p99": ("training thread, to hand over one step, 99th percentile", "ms"),
    "write_ms_per_step": ("writer's thread, to write one step", "ms"),
    "bytes_per_value": ("on disk, everything included", "bytes a value"),
    "bytes_per_value_live": ("the same while it is being written", "bytes a value"),
    "series_ms_warm": ("to read one series of an open run", "ms"),
    "series_ms_cold": ("to open the run, read one series and close it", "ms"),
    "dropped": ("readings dropped", ""),
}


def format_store(result: dict[str, float]) -> str:
    """The result as text."""
    head = "500 tensors x 10 metrics a step; the series is one of 20,000 steps"
    lines = (f"  {label:<52} {result[name]:8.4g} {unit}" for name, (label, unit) in LABELS.items())
    return "\n".join([head, *lines])


@click.command(cls=Command)
@json_option
def main(as_json: bool) -> None:
    """Time writing and reading a run in a temporary folder: bytes per value, milliseconds per step.

    \b
    Example:
      python -m benchmarks.store
    """
    print_result(measure_store(), as_json, format_store)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.store")
