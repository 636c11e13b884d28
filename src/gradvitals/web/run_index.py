"""The runs in a folder, each requested by its id: an address never becomes a path."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gradvitals.errors import RunNotFoundError
from gradvitals.report.listing import RunFile, find_runs, is_inside
from gradvitals.store.reader import Run, open_run

SCAN_SECONDS = 1.0
"""Minimum time between two scans of the folder."""
SCAN_SHARE = 20
"""The time between two scans is at least this many times as long as a scan takes."""


class RunIndex:
    """The runs in a folder, which may appear later. Safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._lock = threading.Lock()
        self._files: dict[str, RunFile] = {}
        self._scanned = 0.0
        self._scan_took = 0.0

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
        """Opens the run with this id for the length of the block."""
        file = self.file(run_id)
        if not file.path.exists():
            raise RunNotFoundError(f"{file.path.parent.name} is gone; the list shows all runs")
        with open_run(file.path) as run:
            yield run


def stamp(file: Path) -> tuple[int, ...]:
    """Returns what changes whenever the run, or its log, is written to; empty if the file is gone."""
    try:
        found = file.stat()
    except OSError:
        return ()
    parts = [found.st_ino, found.st_mtime_ns, found.st_size]
    with suppress(OSError):
        log = file.with_name(file.name + "-wal").stat()
        parts += [log.st_mtime_ns, log.st_size]
    return tuple(parts)
