"""SIGKILL at random moments under full load: the run opens with every step that was committed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from gradvitals.store import RunWriter, open_run
from gradvitals.types import Layout, Reading, TensorInfo

NUM_TENSORS, NUM_METRICS, STEPS_PER_COMMIT = 500, 10, 20
MARK = struct.Struct("<q")
LAYOUT = Layout(
    tensors=tuple(
        TensorInfo(index=i, name=f"t{i}", shape=(4, 4), dtype="float32", layer="l", depth=0) for i in range(NUM_TENSORS)
    )
)


def write(folder: Path, marks: Path, first_step: int) -> None:
    """Write readings without end, and note every step that was committed in a file of its own."""
    writer = RunWriter(folder, meta={}, resume=True, first_step=first_step)
    writer.write(LAYOUT)
    noted = os.open(marks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    step = first_step
    while True:
        row = np.arange(NUM_TENSORS) + step
        tensors = {f"metric/{number}": row for number in range(NUM_METRICS)}
        writer.write(Reading(step=step, time=time.time(), values={"loss": float(step)}, tensors=tensors))
        if (step - first_step) % STEPS_PER_COMMIT == 0:
            writer.commit()
            os.write(noted, MARK.pack(step))
        step += 1


def start(folder: Path, marks: Path, first_step: int = 0) -> multiprocessing.process.BaseProcess:
    """Start a writer and wait for its first commit."""
    process = multiprocessing.get_context("fork").Process(target=write, args=(folder, marks, first_step))
    process.start()
    while not marks.exists() or marks.stat().st_size < MARK.size:
        time.sleep(0.002)
        assert process.is_alive()
    return process


def kill(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("number", range(2))
def test_a_killed_run_opens_with_all_that_was_committed(tmp_path: Path, number: int) -> None:
    """Ten kills of one run, resumed after each, many of them amid compaction."""
    rng = random.Random(number)
    folder, marks, first_step = tmp_path / "run", tmp_path / "marks", 0
    for _ in range(10):
        process = start(folder, marks, first_step)
        time.sleep(rng.uniform(0.0, 0.5))
        kill(process)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        content = marks.read_bytes()
        marks.unlink()
        (committed,) = MARK.unpack_from(content, (len(content) // MARK.size - 1) * MARK.size)
        with open_run(folder) as run:
            steps, values = run.series("metric/7", tensor="t123")
            last = int(steps[-1])
            assert last >= committed
            np.testing.assert_array_equal(steps, np.arange(last + 1))
            np.testing.assert_array_equal(values, steps + 123)
            assert run.last_step == last
            assert run.series("loss")[0].size == last + 1
            _, row = run.table("metric/3")
            np.testing.assert_array_equal(row, np.arange(NUM_TENSORS) + last)
            assert run.meta["finished_at"] is None
        first_step = last + 1
    with open_run(folder) as run:
        assert sum(1 for _ in run.readings()) == first_step


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_writer_is_known_to_be_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while its parent has not reaped it; by its silence alone it would count as live for seconds more."""
    monkeypatch.setattr("gradvitals.store.reader.LIVE_SECONDS", 1e9)
    process = start(tmp_path / "run", tmp_path / "marks")
    with open_run(tmp_path / "run") as run:
        assert run.is_live
        kill(process)
        os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
        assert not run.is_live
        process.join()
        assert not run.is_live
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("gradvitals.store.process.pid_space", lambda: "another machine, or another container")
            assert run.is_live
        with monkeypatch.context() as elsewhere:  # a copy of a machine that was running has its process ids, and a name
            elsewhere.setattr("socket.gethostname", lambda: "another machine")
            assert run.is_live
        assert not run.is_live
