"""Reading a run while another thread or process writes it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from gradvitals.errors import RunError
from gradvitals.store import RunWriter, open_run


def test_a_cursor_sees_every_step_once(tmp_path, make_reading):
    """Follow a run with `since` across many compactions: no gap, no repeat, never half a reading."""
    started, done = threading.Event(), threading.Event()

    def work():
        with RunWriter(tmp_path, meta={}) as writer:
            for step in range(3000):
                writer.write(make_reading(step))
                if step % 20 == 0:
                    writer.commit()
                    started.set()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    seen, rows, replayed, last = [], [], [], -1
    with open_run(tmp_path) as run:
        while not done.is_set() or len(seen) < 3000:
            if "grad/norm" in run.metrics():
                steps, values = run.series("grad/norm", tensor="#2", since=last)
                seen += steps.tolist()
                np.testing.assert_array_equal(values, steps + 0.5)
                rows += run.matrix("grad/norm", since=last, until=seen[-1])[0].tolist()
                readings = [reading for reading in run.readings(since=last) if reading.step <= seen[-1]]
                assert all(reading.values and len(reading.tensors) == 2 for reading in readings)
                replayed += [reading.step for reading in readings]
                last = seen[-1]
    thread.join()
    assert seen == rows == replayed == list(range(3000))


def test_readings_can_be_taken_slowly_while_the_tail_moves(tmp_path, make_reading):
    writer = RunWriter(tmp_path, meta={})
    for step in range(400):
        writer.write(make_reading(step))
    writer.commit()
    with open_run(tmp_path) as run:
        slow = run.readings()
        first = next(slow)
        for step in range(400, 1200):
            writer.write(make_reading(step))
            if step % 50 == 0:
                writer.commit()
        writer.compact()
        assert [first.step] + [reading.step for reading in slow] == list(range(400))
        assert run.last_step == 1199
    writer.close()


def test_several_threads_may_share_a_run(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(600):
            writer.write(make_reading(step))
    results = []
    with open_run(tmp_path) as run:
        threads = [
            threading.Thread(target=lambda: results.append([run.series("loss")[1].sum() for _ in range(30)]))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 4
    assert {value for row in results for value in row} == {2.0 * sum(range(600))}


def test_closing_a_run_waits_for_the_thread_that_reads_it(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_reading(0))
    run = open_run(tmp_path)
    closed = threading.Event()

    def close():
        run.close()
        closed.set()

    with run._transaction():
        thread = threading.Thread(target=close)
        thread.start()
        time.sleep(0.05)
        assert not closed.is_set()
        assert run._db.execute("SELECT count(*) FROM segment").fetchone() == (1,)
    thread.join(10)
    assert closed.is_set()
    with pytest.raises(RunError, match=r"run\.db was closed"):
        run.series("loss")
    run.close()
