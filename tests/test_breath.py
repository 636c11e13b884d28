"""A thread that computes beside training rests now and then, unless somebody waits for it or it is behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradvitals import breath
from gradvitals.breath import Breath
from gradvitals.store import background
from gradvitals.store.background import BackgroundWriter
from gradvitals.types import Reading

Work = Callable[[Breath, int, float], list[float]]


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> Work:
    """Does so many pieces of work of so many seconds, and tells when it has slept."""
    slept: list[float] = []
    now = [0.0]
    monkeypatch.setattr(breath.time, "perf_counter", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(now[0])
        now[0] += seconds

    monkeypatch.setattr(breath.time, "sleep", sleep)

    def work(rest: Breath, pieces: int, seconds: float) -> list[float]:
        slept.clear()
        for _ in range(pieces):
            now[0] += seconds
            rest()
        return list(slept)

    return work


def test_it_rests_once_for_so_much_work(sleeps: Work) -> None:
    rest = Breath()
    sleeps(rest, 1, 1.0)
    assert len(sleeps(rest, 100, breath.WORK_SECONDS / 9.5)) == 10
    assert len(sleeps(rest, 10, 2 * breath.WORK_SECONDS)) == 10
    assert sleeps(rest, 5, breath.WORK_SECONDS / 10) == []


def test_it_does_not_rest_while_others_wait(sleeps: Work) -> None:
    rest = Breath()
    rest.awaited = 1
    assert sleeps(rest, 10, 1.0) == []
    rest.awaited, rest.is_late = 0, True
    assert sleeps(rest, 10, 1.0) == []
    rest.is_late = False
    assert len(sleeps(rest, 10, 1.0)) == 10


def test_who_flushes_is_waited_for(tmp_path: Path) -> None:
    rest = Breath()
    writer = BackgroundWriter(tmp_path / "run", meta={}, on_error=lambda error: None, breath=rest)
    seen: list[int] = []

    def slow() -> list[Reading]:
        deadline = time.monotonic() + 30.0
        while not rest.awaited and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(rest.awaited)
        return []

    writer.put(slow)
    assert writer.flush(30.0)
    assert (seen, rest.awaited) == ([1], 0)
    writer.put(slow)
    assert writer.drain(30.0)
    assert (seen, rest.awaited) == ([1, 1], 0)
    assert writer.close()


def test_a_writer_that_falls_behind_rests_no_more(tmp_path: Path) -> None:
    rest = Breath()
    writer = BackgroundWriter(tmp_path / "run", meta={}, on_error=lambda error: None, breath=rest)
    assert writer.flush(30.0)
    late: list[bool] = []
    all_put = threading.Event()

    def hold() -> list[Reading]:
        all_put.wait(30.0)
        return []

    def work() -> list[Reading]:
        late.append(rest.is_late)
        time.sleep(1.2 * background.LATE_SECONDS)
        return []

    writer.put(hold)
    writer.hurry()
    time.sleep(0.3)  # longer than from one look at the queue to the next: what comes now is taken together
    for _ in range(2):
        writer.put(work)
    all_put.set()
    assert writer.flush(30.0)
    assert late == [False, True]
    writer.put(work)
    assert writer.flush(30.0)
    assert late[-1] is False
    assert writer.close()
