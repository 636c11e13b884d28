"""What a step costs after it is read: in the journal, in the worker, on disk, and when a series is read back."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.command_line import Command, json_option, print_result
from benchmarks.synthetic_run import transformer_layout
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Layout, Reading
from gradvitals.worker.channel import JournalChannel, ThreadChannel
from gradvitals.worker.journal import Journal
from gradvitals.worker.process import WorkerProcess
from gradvitals.worker.record import COMMAND, CONTEXT, STEP, Context, Encoder, OptimizerStep, Part, StepRecord
from gradvitals.worker.worker import Setup, Worker

JOURNAL_BYTES = 64 << 20
REPLY_BYTES = 1 << 20
WAIT_SECONDS = 60.0

PLAIN = ("norm",)
FULL = (
    "norm", "weight", "update", "change", "first_moment", "second_moment", "adam_step", "nonzero", "micro0",
    "micro1",
)  # fmt: skip
"""What a plain step and a full reading record of every tensor, by the names the worker knows them by."""


def measure_store(num_tensors: int = 500, steps: int = 400, series_steps: int = 20000) -> dict[str, float]:
    """Send synthetic steps through a journal and a worker, and write and read a long run, in a temporary folder.

    Args:
        num_tensors: Tensors of the model. A full reading has 10 metrics of each.
        steps: Plain steps, and full readings, to time.
        series_steps: Length of the run from which series are read; at the default sizes it takes 400 MB.

    Returns:
        ``journal_plain_us`` and ``journal_full_us``, the time to encode and append a step, medians;
        ``worker_plain_ms`` and ``worker_full_ms``, the worker's processor time per step;
        ``worker_mb``, the memory of a worker process after these steps;
        ``bytes_per_value`` of a finished run and ``bytes_per_value_live`` of one that is being written;
        ``series_ms_cold`` (open, read, close) and ``series_ms_warm`` to read one series of one tensor, medians of 20.
    """
    layout = transformer_layout(num_tensors)
    found: dict[str, float] = {"num_tensors": num_tensors, "series_steps": series_steps}
    with tempfile.TemporaryDirectory(prefix="gradvitals-") as name:
        folder = Path(name)
        for kind, names in (("plain", PLAIN), ("full", FULL)):
            made = _steps(layout, names, full=kind == "full", count=steps)
            found[f"journal_{kind}_us"] = _journal_microseconds(folder / f"{kind}.journal", made)
            made = _steps(layout, names, full=kind == "full", count=steps)
            found[f"worker_{kind}_ms"] = _worker_milliseconds(folder / f"worker-{kind}", layout, made)
        found["worker_mb"] = _worker_megabytes(folder / "process", layout, steps)
        found |= _measure_long_run(folder / "long", layout, series_steps)
    return found


def _steps(
    layout: Layout, names: tuple[str, ...], *, full: bool, count: int, first: int = 1001
) -> Iterator[tuple[StepRecord, list[Part]]]:
    rng = np.random.default_rng(0)
    rows = list(range(len(layout.tensors)))
    pool = rng.lognormal(size=(16, len(names), len(rows))).astype("<f4")
    for step in range(first, first + count):
        optimizer = OptimizerStep(micro_batches=2 if full else 0)
        record = StepRecord(
            step=step, time=1.7e9 + step, full=full, optimizers=[optimizer], losses=[(2.0, None)], passes=2, lr=3e-4
        )
        yield record, [(name, rows, numbers) for name, numbers in zip(names, pool[step % 16], strict=True)]


def _context(layout: Layout) -> bytes:
    rows = range(len(layout.tensors))
    betas = dict.fromkeys(rows, (0.9, 0.999))
    shares = {name: dict.fromkeys(rows, 1 / 64) for name in ("update", "change")}
    return Context(layout=layout, optimizer_rows=[list(rows)], betas=betas, shares=shares).to_bytes()


def _setup(folder: Path) -> Setup:
    return Setup(path=folder, config=Config(quiet=True), meta={}, facts={}, run_id="store-benchmark", first_step=1001)


def _journal_microseconds(path: Path, steps: Iterator[tuple[StepRecord, list[Part]]]) -> float:
    """Median time that the training process spends on one step."""
    journal, encoder = Journal.create(path, JOURNAL_BYTES), Encoder()
    took = []
    for record, parts in steps:
        start = time.perf_counter()
        fits = journal.append(STEP, encoder.encode(record, parts))
        took.append(time.perf_counter() - start)
        if not fits:
            raise GradvitalsError("the journal of this benchmark is too small for so many steps")
    journal.close()
    return 1e6 * statistics.median(took)


def _worker_milliseconds(folder: Path, layout: Layout, steps: Iterator[tuple[StepRecord, list[Part]]]) -> float:
    """Processor time per step to decode, aggregate, diagnose and write."""
    journal, encoder = Journal.in_memory(JOURNAL_BYTES), Encoder()
    worker = Worker(_setup(folder), journal, ThreadChannel())
    journal.append(CONTEXT, _context(layout))
    worker.drain()
    count = 0
    for record, parts in steps:
        count += journal.append(STEP, encoder.encode(record, parts))
    journal.append(COMMAND, json.dumps({"do": "close", "id": 1}).encode())
    start = time.process_time()
    worker.drain()
    seconds = time.process_time() - start
    _expect_steps(folder, count)
    return 1e3 * seconds / count


def _worker_megabytes(folder: Path, layout: Layout, steps: int) -> float:
    """Resident memory of a worker process that has dealt with plain steps and one full reading in ten."""
    with _worker_process(folder) as (journal, request, process):
        journal.append(CONTEXT, _context(layout))
        encoder = Encoder()
        for number in range(steps):
            full = number % 10 == 0
            (made,) = _steps(layout, FULL if full else PLAIN, full=full, count=1, first=1001 + number)
            while not journal.append(STEP, encoder.encode(*made)):
                time.sleep(0.001)
        request("flush")
        status = Path(f"/proc/{process.pid}/status").read_text("utf-8").splitlines()
        kilobytes = next(line for line in status if line.startswith("VmRSS")).split()[1]
        request("close")
        process.stop(WAIT_SECONDS)
    _expect_steps(folder, steps)
    return int(kilobytes) / 1024


@contextmanager
def _worker_process(folder: Path) -> Iterator[tuple[Journal, Callable[[str], None], WorkerProcess]]:
    """A worker process with its journal, and a function that sends it a command and waits for the answer."""
    folder.mkdir()
    journal = Journal.create(folder / "journal", JOURNAL_BYTES)
    replies = Journal.create(folder / "replies", REPLY_BYTES)
    channel = JournalChannel(replies, folder)
    process = WorkerProcess(_setup(folder), folder / "journal", folder / "replies")

    def request(what: str) -> None:
        journal.append(COMMAND, json.dumps({"do": what, "id": what}).encode())
        process.wake()
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(message.get("id") == what for message in channel.receive()):
            if not process.is_alive or time.monotonic() > deadline:
                raise GradvitalsError(f"the worker did not answer ({what})")
            time.sleep(0.001)

    try:
        yield journal, request, process
    finally:
        process.stop(WAIT_SECONDS)
        channel.close()
        journal.close()


def _expect_steps(folder: Path, count: int) -> None:
    """What lost steps, or gave up on something, was cheap: its time would mean nothing."""
    with open_run(folder) as run:
        broken = [finding for finding in run.findings if finding.id in ("monitor_error", "store_error")]
        stored = len(run.series("grad/norm")[0])
    if broken or stored != count:
        raise GradvitalsError(f"the worker stored {stored} of {count} steps {broken[:1] or ''}")


def _measure_long_run(folder: Path, layout: Layout, steps: int) -> dict[str, float]:
    num_tensors, num_metrics = len(layout.tensors), len(FULL)
    make = _reading_maker(num_tensors, num_metrics)
    writer = RunWriter(folder, meta={})
    writer.write(layout)
    for step in range(steps):
        writer.write(make(step))
        if step % 50 == 49:
            writer.commit()
    writer.commit()
    live = _folder_bytes(folder)
    writer.close()

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
        "series_ms_cold": statistics.median(cold),
        "series_ms_warm": statistics.median(warm),
    }


def _reading_maker(num_tensors: int, num_metrics: int) -> Callable[[int], Reading]:
    pool = np.random.default_rng(0).lognormal(size=(16, num_metrics, num_tensors))
    names = [f"metric/{number}" for number in range(num_metrics)]

    def make(step: int) -> Reading:
        tensors = dict(zip(names, pool[step % 16], strict=True))
        return Reading(step=step, time=time.time(), values=dict.fromkeys(names, float(step)), tensors=tensors)

    return make


def _milliseconds(call: Callable[[str], object], argument: str) -> float:
    start = time.perf_counter()
    call(argument)
    return 1e3 * (time.perf_counter() - start)


def _folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


LABELS = {
    "journal_plain_us": ("training process, to encode and append a plain step", "µs"),
    "journal_full_us": ("the same for a full reading", "µs"),
    "worker_plain_ms": ("worker, per plain step", "ms"),
    "worker_full_ms": ("worker, per full reading", "ms"),
    "worker_mb": ("memory of the worker process", "MB"),
    "bytes_per_value": ("on disk, everything included", "bytes per value"),
    "bytes_per_value_live": ("the same while it is being written", "bytes per value"),
    "series_ms_warm": ("to read one series of an open run", "ms"),
    "series_ms_cold": ("to open the run, read one series and close it", "ms"),
}


def format_store(result: dict[str, Any]) -> str:
    """The result as text."""
    tensors, steps = result["num_tensors"], result["series_steps"]
    head = f"{tensors} tensors; a full reading has {len(FULL)} metrics of each; the series is one of {steps:,} steps"
    lines = (f"  {label:<52} {result[name]:8.4g} {unit}" for name, (label, unit) in LABELS.items())
    return "\n".join([head, *lines])


@click.command(cls=Command)
@json_option
def main(as_json: bool) -> None:
    """Time the journal, the worker and the run file with synthetic steps in a temporary folder.

    \b
    Example:
      python -m benchmarks.store
    """
    print_result(measure_store(), as_json, format_store)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.store")
