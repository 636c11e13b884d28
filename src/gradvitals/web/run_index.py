"""The runs in one or more folders, each requested by its id, and their changes as events.

An address never becomes a path.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from anyio import CapacityLimiter, to_thread

from gradvitals.errors import RunNotFoundError
from gradvitals.report.listing import RunFile, find_runs, is_inside
from gradvitals.store.reader import Run, open_run

SCAN_SECONDS = 1.0
"""Minimum time between two scans of the folder."""
SCAN_SHARE = 20
"""The time between two scans is at least this many times as long as a scan takes."""


class RunIndex:
    """The runs in one or more folders, which may appear later. Safe to use from several threads."""

    def __init__(self, *folders: Path) -> None:
        self.folders = list(dict.fromkeys(folder.resolve() for folder in folders))
        self._lock = threading.Lock()
        self._files: dict[str, RunFile] = {}
        self._scanned = 0.0
        self._scan_took = 0.0

    def files(self, *, max_age: float = SCAN_SECONDS) -> list[RunFile]:
        """Returns every run, by name; scans the folder if the last scan is older than `max_age` seconds."""
        with self._lock:
            start = time.monotonic()
            if not self._scanned or start - self._scanned > max(max_age, SCAN_SHARE * self._scan_took):
                self._files = {file.id: file for file in self._find()}
                self._scanned = time.monotonic()
                self._scan_took = self._scanned - start
            return list(self._files.values())

    def _find(self) -> Iterator[RunFile]:
        """Yields every run; the names of those that are not in the first folder begin with their folder's."""
        for place, folder in enumerate(self.folders):
            for file in find_runs(folder):
                is_folder = file.path.parent == folder
                name = file.name if place == 0 or is_folder else f"{folder.name}/{file.name}"
                run_id = file.id if len(self.folders) == 1 else f"{folder.name}-{file.id}"
                yield RunFile(run_id, name, file.path)

    def file(self, run_id: str) -> RunFile:
        """Returns the run with this id.

        Raises:
            RunNotFoundError: If there is none.
        """
        for max_age in (60.0, SCAN_SECONDS):  # a new run may have appeared since the last scan
            found = next((file for file in self.files(max_age=max_age) if file.id == run_id), None)
            if found is not None and any(is_inside(found.path, folder) for folder in self.folders):
                return found
        raise RunNotFoundError("there is no such run in the served folder (any more); the list shows all runs")

    @property
    def title(self) -> str:
        """The names of the folders that exist; of the first one if none does."""
        return " and ".join(folder.name for folder in self.folders if folder.exists()) or self.folders[0].name

    def without_paths(self, text: str) -> str:
        """Returns a text that does not tell where the folders are."""
        for folder in map(str, self.folders):
            text = text.replace(f"{folder}/", "").replace(folder, "the served folder")
        return text

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


# -- changes of runs for the page, sent as server-sent events --------------------------------------------------------

LOOK_SECONDS = 0.2
"""Between two looks at the runs, while anybody listens."""
SLOW_SECONDS = 2.0
"""Between two looks for new runs."""
HEARTBEAT_SECONDS = 5.0
"""Between two events if there is no news, by which both ends notice that the other is gone."""
MAX_READERS = 16

News = dict[str, Any]


class Watcher:
    """Looks at the runs while anybody listens, and streams what changed."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._latest: dict[str, tuple[tuple[int, ...], News]] = {}
        self._limiter: CapacityLimiter | None = None
        self._readers = 0
        self.stopped = False

    async def events(self) -> AsyncIterator[bytes]:
        """Yields how each run is, and then whatever changes."""
        self._readers += 1
        if self._limiter is None:
            self._limiter = CapacityLimiter(1)  # its own, so that looks and requests do not wait for each other
        sent: dict[str, News] = {}
        when = time.monotonic()
        try:
            yield b"retry: 1000\n\n"
            while not self.stopped:
                latest = await to_thread.run_sync(self.look, limiter=self._limiter)
                changed = [news for run, news in latest.items() if sent.get(run) != news]
                changed += [{**_nothing(run), "gone": True} for run in sent.keys() - latest.keys()]
                for news in changed:
                    yield f"data: {json.dumps(news)}\n\n".encode()
                if not changed and time.monotonic() - when > HEARTBEAT_SECONDS:
                    yield b"event: beat\ndata: {}\n\n"
                    changed = [{}]
                when = time.monotonic() if changed else when
                sent = latest
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            self._readers -= 1

    @property
    def is_full(self) -> bool:
        """Whether a further reader is turned away."""
        return self._readers >= MAX_READERS

    def is_live(self, run_id: str) -> bool:
        """Returns whether a run was live at the last look."""
        return run_id in self._latest and bool(self._latest[run_id][1]["live"])

    def stop(self) -> None:
        """Ends all streams."""
        self.stopped = True

    def look(self) -> dict[str, News]:
        """Returns how each run is; opens those that are live or were written to since the last look."""
        files = self._index.files(max_age=SLOW_SECONDS)
        for file in files:
            now = stamp(file.path)
            before, news = self._latest.get(file.id, ((), None))
            if news is not None and not news["live"] and before == now:
                continue
            news = _nothing(file.id)
            # A damaged file must not hide the news of others; the list shows what is wrong.
            with suppress(Exception), self._index.opened(file.id) as run, run.moment():
                counts = {"findings": run.num_records(), "segments": len(run.segments)}
                news = {**news, "last_step": run.last_step, **counts, "live": run.is_live}
            self._latest[file.id] = now, news
        return {file.id: self._latest[file.id][1] for file in files}


def _nothing(run_id: str) -> News:
    return {"run": run_id, "last_step": None, "findings": 0, "segments": 0, "live": False}
