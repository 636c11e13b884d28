"""The runs in a folder: which there are, a bounded number of them open, and the verdict on each."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gradvitals.errors import RunNotFoundError
from gradvitals.report.listing import RunFile, find_runs, is_inside
from gradvitals.report.verdict import Verdict, judge_run, replay, was_diagnosed
from gradvitals.store.reader import Run, open_run
from gradvitals.types import Finding

MAX_OPEN = 8
"""Runs held open; a further one closes the least recently used."""
SCAN_SECONDS = 1.0
"""Minimum time between two scans of the folder."""
SCAN_SHARE = 20
"""The time between two scans is at least this many times as long as a scan takes."""
MAX_REPLAYED_STEPS = 30_000
"""The page replays longer runs that were recorded without diagnosis only on request: it takes a while."""
REPLAY_GROWTH = 1.25
"""A live run without diagnosis is replayed again when it has grown by this factor."""

Stamp = tuple[int, ...]
"""Changes whenever a run file, or its log, was written to."""


@dataclass
class _Handle:
    run: Run
    identity: tuple[int, int]
    users: int = 1
    retired: bool = False
    """Whether to close it when its last user releases it."""

    def retire(self) -> None:
        self.retired = True
        if not self.users:
            self.run.close()


class RunIndex:
    """The runs in a folder. Safe to use from several threads.

    A run is requested by its id, which is looked up among those that were found: an address never becomes a path.
    """

    def __init__(self, folder: Path, *, max_open: int = MAX_OPEN) -> None:
        self.folder = folder.resolve()
        self._max_open = max_open
        self._lock = threading.Lock()
        self._files: dict[str, RunFile] = {}
        self._scanned = 0.0
        self._scan_took = 0.0
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._is_closed = False

    def files(self, *, max_age: float = SCAN_SECONDS) -> list[RunFile]:
        """Returns every run, by name; scans the folder if the last scan is older than `max_age` seconds."""
        with self._lock:
            start = time.monotonic()
            if not self._scanned or start - self._scanned > max(max_age, SCAN_SHARE * self._scan_took):
                self._files = {file.id: file for file in find_runs(self.folder)}
                self._scanned = time.monotonic()
                self._scan_took = self._scanned - start
            return list(self._files.values())

    def file(self, run_id: str) -> RunFile:
        """Returns the run with this id.

        Raises:
            RunNotFoundError: If there is none.
        """
        for max_age in (60.0, SCAN_SECONDS):  # a new run may have appeared since the last scan
            found = next((file for file in self.files(max_age=max_age) if file.id == run_id), None)
            if found is not None and is_inside(found.path, self.folder):
                return found
        raise RunNotFoundError("there is no such run in the served folder (any more); the list shows all runs")

    @contextmanager
    def opened(self, run_id: str) -> Iterator[Run]:
        """Opens the run with this id for the length of the block; others may share it."""
        handle = self._acquire(self.file(run_id))
        try:
            yield handle.run
        finally:
            with self._lock:
                handle.users -= 1
                if handle.retired and not handle.users:
                    handle.run.close()

    def close(self) -> None:
        """Closes all files; those in use as soon as they are released."""
        with self._lock:
            self._is_closed = True
            handles, self._open = list(self._open.values()), OrderedDict()
            for handle in handles:
                handle.retire()

    @property
    def num_open(self) -> int:
        """How many runs are open."""
        return len(self._open)

    def _acquire(self, file: RunFile) -> _Handle:
        identity = _identity(file.path)
        with self._lock:
            handle = self._open.get(file.id)
            if handle is not None and handle.identity == identity:
                self._open.move_to_end(file.id)
                handle.users += 1
                return handle
        fresh = _Handle(open_run(file.path), identity)
        with self._lock:
            if self._is_closed:
                fresh.retired = True
                return fresh
            replaced = self._open.pop(file.id, None)
            if replaced is not None:
                replaced.retire()
            self._open[file.id] = fresh
            while len(self._open) > self._max_open:
                self._open.popitem(last=False)[1].retire()
        return fresh


def stamp(file: Path) -> Stamp:
    """Returns what changes whenever the run is written to; empty if the file is gone."""
    try:
        found = file.stat()
    except OSError:
        return ()
    parts = [found.st_ino, found.st_mtime_ns, found.st_size]
    with suppress(OSError):
        log = file.with_name(file.name + "-wal").stat()
        parts += [log.st_mtime_ns, log.st_size]
    return tuple(parts)


def _identity(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        raise RunNotFoundError(f"{file.parent.name} is gone; the list shows all runs") from None
    return found.st_dev, found.st_ino


# -- verdicts ------------------------------------------------------------------------------------------------------


class _Stopped(Exception):
    """The server is closing; nobody waits for the verdict."""


@dataclass(frozen=True)
class Judged:
    """The verdict on a run, and what it is based on."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    note: str = ""
    """How the verdict came about, if it is not by the findings recorded with the run."""
    is_pending: bool = False
    """Whether the run is still being replayed."""
    is_judged: bool = True

    @property
    def level(self) -> str:
        """The verdict's level, or ``pending`` or ``unknown`` if there is no verdict."""
        if self.is_pending:
            return "pending"
        return self.verdict.level if self.is_judged and self.verdict.steps else "unknown"


class Judge:
    """Judges runs as `gradvitals doctor` does; replays those without diagnosis in a thread, one at a time."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._done: dict[str, tuple[int, tuple[Finding, ...]]] = {}
        self._busy: set[str] = set()
        self._failed: set[str] = set()
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradvitals-judge")

    def judged(self, run_id: str, run: Run, *, start: bool = True) -> Judged:
        """Returns the verdict on a run so far.

        Args:
            run_id: Its id.
            run: The run.
            start: Whether to start replaying a run that was recorded without diagnosis; the list does not.
        """
        recorded = tuple(run.findings)
        verdict = judge_run(run, recorded)
        last_step = run.last_step
        if was_diagnosed(run.meta) or last_step is None:
            return Judged(verdict, recorded)
        if last_step >= MAX_REPLAYED_STEPS:
            note = "Not judged: recorded without diagnosis, and too long to replay here. Run gradvitals doctor."
            return Judged(verdict, recorded, note, is_judged=False)
        replayed = self._replayed(run_id, last_step, start=start)
        if replayed is None and not start:
            return Judged(verdict, recorded, "Not judged yet: open the run.", is_judged=False)
        if replayed is None:
            return Judged(verdict, recorded, "Replaying with the current rules.", is_pending=True)
        if run_id in self._failed:
            return Judged(verdict, recorded, "Not judged: the rules could not read it to its end.", is_judged=False)
        findings = (*recorded, *replayed)
        note = "Replayed with the current rules: it was recorded without diagnosis."
        return Judged(judge_run(run, findings), findings, note)

    def version(self, run_id: str) -> int:
        """Returns a number that changes when the replay of a run has finished."""
        with self._lock:
            return self._done[run_id][0] if run_id in self._done else -1

    def close(self) -> None:
        """Cancels replays."""
        self._stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _replayed(self, run_id: str, last_step: int, *, start: bool) -> tuple[Finding, ...] | None:
        """Returns the findings of the last replay; None until there is one."""
        with self._lock:
            step, found = self._done.get(run_id, (-1, None))
            outdated = last_step < step or (last_step > step and last_step > REPLAY_GROWTH * step + 50)
            if start and (found is None or outdated) and run_id not in self._busy:
                self._busy.add(run_id)
                self._thread.submit(self._replay, run_id, last_step)
        return found

    def _on_step(self, step: int) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _replay(self, run_id: str, last_step: int) -> None:
        found: tuple[Finding, ...] = ()
        failed = False
        try:
            with self._index.opened(run_id) as run:
                found = replay(run, on_step=self._on_step).findings
        except Exception:  # the run is gone or damaged, or the server is closing
            failed = True
        finally:
            with self._lock:
                self._done[run_id] = (last_step, found)
                (self._failed.add if failed else self._failed.discard)(run_id)
                self._busy.discard(run_id)
