"""The background writer never blocks, never raises, loses nothing it need not lose and counts what it must."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from gradvitals.errors import RunError, RunNotFoundError
from gradvitals.store import BackgroundWriter, RunWriter, background, open_run
from gradvitals.types import Finding, Reading


@pytest.fixture
def start(tmp_path):
    """Start background writers that are closed at the end; errors are gathered in `.errors`."""
    writers = []

    def make(path=tmp_path / "run", **options):
        errors = []
        writer = BackgroundWriter(path, **{"meta": {}, "commit_every": 0.01, "on_error": errors.append, **options})
        writer.errors = errors
        writers.append(writer)
        return writer

    yield make
    for writer in writers:
        writer.close(5)


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "gave up waiting"
        time.sleep(0.005)


def wide(step):
    return Reading(step=step, time=0.0, tensors={"m": np.full(5000, float(step))})


def test_everything_put_is_kept(start, make_layout, make_reading):
    writer = start()
    assert writer.put(make_layout("a", "b", "c"))
    assert all(writer.put(make_reading(step)) for step in range(500))
    assert writer.flush(30)
    with open_run(writer.path) as run:
        assert run.series("grad/norm", tensor="b")[0].tolist() == list(range(500))
        assert run.meta["run_id"] == writer.run_id
        assert run.is_live
        assert writer.close(30)
        assert not run.is_live
    assert writer.dropped == 0
    assert writer.errors == []


def test_callables_are_called_on_the_thread(start, make_reading):
    writer = start()
    threads = []

    def finish():
        threads.append(threading.current_thread())
        yield make_reading(1)
        yield make_reading(2)

    writer.put(finish)
    writer.put(lambda: [])
    assert writer.close(30)
    assert threads[0] is not threading.current_thread()
    with open_run(writer.path) as run:
        assert run.series("loss")[0].tolist() == [1, 2]


def test_a_callable_that_raises_is_reported_once_and_the_rest_goes_on(start, make_reading):
    writer = start()

    def fails():
        raise ZeroDivisionError("no")

    for step in range(5):
        writer.put(fails)
        writer.put(make_reading(step))
    writer.put(lambda: 3)  # not something to iterate over
    assert writer.close(30)
    assert [type(error) for error in writer.errors] == [ZeroDivisionError, TypeError]
    with open_run(writer.path) as run:
        assert run.series("loss")[0].size == 5
        assert run.dropped == writer.dropped == 6


def test_a_record_that_cannot_be_kept_does_not_hold_up_the_others(start, make_reading):
    writer = start()
    for record in (make_reading(0), make_reading(1 << 80), "text", make_reading(1)):
        writer.put(record)
    assert writer.flush(30)
    assert writer.dropped == 2
    assert [type(error) for error in writer.errors] == [ValueError]
    with open_run(writer.path) as run:
        assert run.series("loss")[0].tolist() == [0, 1]


def test_an_error_handler_that_raises_is_endured(start, make_reading):
    def handler(error):
        raise error

    writer = start(on_error=handler)
    writer.put(lambda: 1 / 0)
    writer.put(make_reading(0))
    assert writer.close(30)
    with open_run(writer.path) as run:
        assert run.last_step == 0


def test_a_stuck_disk_never_blocks_put(start, make_reading, monkeypatch):
    stuck, go = threading.Event(), threading.Event()
    commit = RunWriter.commit

    def slow(self):
        stuck.set()
        assert go.wait(30)
        commit(self)

    monkeypatch.setattr(RunWriter, "commit", slow)
    writer = start(queue_size=100)
    assert stuck.wait(30)
    accepted = sum(writer.put(make_reading(step)) for step in range(5000))
    assert accepted == 100
    assert writer.dropped == 4900
    assert not writer.flush(0.05)
    assert not writer.close(0.05)
    assert not writer.put(make_reading(5000))
    go.set()
    assert writer.close(30)
    with open_run(writer.path) as run:
        assert run.series("loss")[0].tolist() == list(range(100))
        assert run.dropped == 4901


def test_a_full_disk_is_reported_once_and_writing_goes_on_when_there_is_room(start, monkeypatch):
    limit = [60]
    opened = RunWriter._open

    def open_limited(self, **options):
        opened(self, **options)
        self._db.execute(f"PRAGMA max_page_count = {limit[0]}")

    monkeypatch.setattr(RunWriter, "_open", open_limited)
    writer = start(queue_size=20)
    for step in range(3):
        writer.put(wide(step))
    assert writer.flush(30)
    step = 3
    while not writer.dropped:  # far beyond what the pages and the bounded memory hold
        writer.put(wide(step))
        step += 1
        time.sleep(0.001)
        assert step < 5000
    assert [error.__cause__.sqlite_errorname for error in writer.errors] == ["SQLITE_FULL"]
    assert "could not be written" in str(writer.errors[0])
    assert len(writer._pending) <= 20
    with open_run(writer.path) as run:
        kept = run.series("m", tensor="#0")[0]
        assert kept.tolist() == list(range(len(kept)))
    limit[0] = 1 << 30
    wait_for(lambda: writer.flush(0.1))
    writer.put(wide(step))
    assert writer.close(30)
    assert len(writer.errors) == 1
    with open_run(writer.path) as run:
        steps = run.series("m", tensor="#0")[0]
        assert steps[-1] == step
        assert len(steps) > len(kept)
        assert run.dropped == writer.dropped == step + 1 - len(steps)


def test_a_small_disk_that_fills_up(start, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        writer = start(disk / "run", queue_size=10)
        for step in range(100):
            assert writer.put(wide(step))
            assert writer.drain(20)
        assert not writer.close(10)
        assert writer.dropped > 0
        assert writer.errors
        with open_run(disk / "run") as run:
            steps, values = run.series("m", tensor="#7")
            assert steps.size > 5
            np.testing.assert_array_equal(steps, values)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("place", ["/proc/gradvitals/run", "file"])
def test_a_folder_that_cannot_be_made(start, tmp_path, make_reading, place):
    (tmp_path / "file").write_text("in the way")
    writer = start(tmp_path / place, queue_size=10)  # an absolute path replaces the first part
    for step in range(100):
        writer.put(make_reading(step))
        time.sleep(0.001)
    assert not writer.flush(0.05)
    assert writer.run_id is None
    assert not writer.close(5)
    assert len(writer.errors) == 1
    assert isinstance(writer.errors[0], RunError)
    assert writer.dropped == 100


def test_a_locked_file_is_written_once_it_is_free(start, make_reading, monkeypatch):
    monkeypatch.setattr("gradvitals.store.journal.BUSY_SECONDS", 0.05)
    writer = start()
    writer.put(make_reading(0))
    assert writer.flush(30)
    other = sqlite3.connect(writer.path / "run.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for step in range(1, 20):
        writer.put(make_reading(step))
    wait_for(lambda: writer.errors)
    assert not writer.flush(0.2)
    other.execute("ROLLBACK")
    other.close()
    assert writer.flush(30)
    assert [error.__cause__.sqlite_errorname for error in writer.errors] == ["SQLITE_BUSY"]
    assert writer.dropped == 0
    with open_run(writer.path) as run:
        assert run.series("loss")[0].tolist() == list(range(20))


def test_a_run_deleted_under_the_writer_is_begun_anew(start, make_layout, make_reading):
    writer = start()
    writer.put(make_layout("a", "b", "c"))
    writer.put(make_reading(0))
    assert writer.flush(30)
    run_id = writer.run_id
    shutil.rmtree(writer.path)
    writer.put(make_reading(1))
    assert writer.flush(30)
    assert [type(error) for error in writer.errors] == [RunNotFoundError]
    with open_run(writer.path) as run:
        assert run.series("grad/norm", tensor="c")[0].tolist() == [1]
        assert run.meta["run_id"] == run_id


def test_a_run_replaced_under_the_writer_is_left_alone(start, make_reading):
    writer = start()
    assert writer.flush(30)
    shutil.rmtree(writer.path)
    RunWriter(writer.path, meta={"mine": True}).close()
    writer.put(make_reading(0))
    wait_for(lambda: len(writer.errors) == 2)
    assert not writer.close(5)
    assert "another run" in str(writer.errors[1])
    with open_run(writer.path) as run:
        assert run.last_step is None


def test_a_run_that_exists_is_not_touched(start, tmp_path, make_reading):
    with RunWriter(tmp_path / "run", meta={}) as old:
        old.write(make_reading(0))
    writer = start()
    writer.put(make_reading(1))
    assert not writer.close(5)
    assert "resume" in str(writer.errors[0])
    resumed = start(resume=True, first_step=1)
    resumed.put(make_reading(1))
    assert resumed.close(30)
    assert resumed.run_id == old.run_id
    with open_run(tmp_path / "run") as run:
        assert run.series("loss")[0].tolist() == [0, 1]


def test_readings_that_wait_are_bounded_in_bytes_and_findings_go_first(start, monkeypatch):
    monkeypatch.setattr(background, "MAX_PENDING_BYTES", 200_000)
    monkeypatch.setattr(RunWriter, "_open", lambda self, **_: (_ for _ in ()).throw(OSError("no disk")))
    writer = start(queue_size=100)
    for step in range(50):
        writer.put(wide(step))  # 40 kB each
    for step in range(20):
        writer.put(Finding(id="x", severity="info", title="x", first_step=step))
    wait_for(lambda: not writer._queue)
    wait_for(lambda: len(writer._pending) == 25)
    assert sum(isinstance(record, Finding) for record in writer._pending) == 20
    assert writer.dropped == 45
    assert not writer.close(5)
    assert writer.dropped == 70


def test_closing_twice_and_putting_after_is_harmless(start, make_reading):
    writer = start()
    assert writer.close(30)
    assert writer.close(30)
    assert not writer.put(make_reading(0))
    assert writer.flush(1)


def test_a_run_that_is_idle_stays_live(start, monkeypatch):
    monkeypatch.setattr(background, "HEARTBEAT_SECONDS", 0.02)
    writer = start()
    assert writer.flush(30)
    with open_run(writer.path) as run:
        first = run.meta["heartbeat"]
        wait_for(lambda: run.meta["heartbeat"] > first)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_writes_nor_waits(start, make_reading):
    writer = start()
    assert writer.flush(30)
    child = os.fork()
    if child == 0:
        fine = not writer.put(make_reading(0)) and not writer.flush() and not writer.close()
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_many_threads_may_put(start):
    writer = start(queue_size=100_000)

    def work(number):
        for step in range(200):
            writer.put(Reading(step=200 * number + step, time=0.0, values={"loss": 1.0}))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(30)
    with open_run(writer.path) as run:
        assert run.series("loss")[0].tolist() == list(range(1000))


def test_a_script_that_forgets_to_close_is_finished_at_exit(tmp_path):
    script = (
        "import sys; from gradvitals.store import BackgroundWriter; from gradvitals.types import Reading\n"
        "w = BackgroundWriter(sys.argv[1], meta={}, on_error=print, commit_every=30)\n"
        "w.put(Reading(step=5, time=0.0, values={'loss': 1.0}))\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "run"], check=True)
    with open_run(tmp_path / "run") as run:
        assert run.last_step == 5
        assert run.meta["finished_at"] is not None
