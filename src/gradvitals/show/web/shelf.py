"""Which runs a folder holds, found again and again, and a bounded number of them open at a time."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gradvitals.errors import RunNotFoundError
from gradvitals.show.web.limits import check_size
from gradvitals.store.reader import Run, open_run
from gradvitals.store.schema import FILE_NAME

MAX_DEPTH = 6
"""Folders between the served one and a run, at the most."""
MAX_FOLDERS = 20_000
MAX_RUNS = 2_000
MOST_OPEN = 8
"""Runs held open; a further one closes the one used longest ago."""
LOOK_AGAIN_SECONDS = 1.0
LOOK_SHARE = 20
"""A folder that takes long to look through is looked through more rarely: so many times as long lies between."""

Stamp = tuple[int, ...]
"""Changes whenever a run file, or its log, was written to."""


@dataclass(frozen=True)
class Place:
    """A run that was found: the id it has in addresses, the name it is shown by, its file."""

    id: str
    name: str
    file: Path


class Shelf:
    """The runs in a folder. Safe to use from several threads.

    A run is asked for by its id, which is looked up among those that were found: what stands in an address never
    becomes part of a path.
    """

    def __init__(self, folder: Path, *, most_open: int = MOST_OPEN) -> None:
        self.folder = folder.resolve()
        self._most_open = most_open
        self._lock = threading.Lock()
        self._places: dict[str, Place] = {}
        self._looked = 0.0
        self._look_took = 0.0
        self._open: OrderedDict[str, _Handle] = OrderedDict()
        self._is_closed = False

    def places(self, *, most_age: float = LOOK_AGAIN_SECONDS) -> list[Place]:
        """Every run there is, by name; looked for again where the last look is older than `most_age` seconds."""
        with self._lock:
            began = time.monotonic()
            if not self._looked or began - self._looked > max(most_age, LOOK_SHARE * self._look_took):
                self._places = {place.id: place for place in find_runs(self.folder)}
                self._looked = time.monotonic()
                self._look_took = self._looked - began
            return list(self._places.values())

    def place(self, run_id: str) -> Place:
        """The run of an id.

        Raises:
            RunNotFoundError: If none of the runs that were found has it.
        """
        for most_age in (60.0, LOOK_AGAIN_SECONDS):  # a new one may have come since the last look
            found = next((place for place in self.places(most_age=most_age) if place.id == run_id), None)
            if found is not None and _inside(found.file, self.folder):
                return found
        raise RunNotFoundError(
            "there is no such run in the served folder (any more); the list of runs has those there are"
        )

    @contextmanager
    def opened(self, run_id: str) -> Iterator[Run]:
        """The run of an id, open for as long as the block lasts, perhaps shared with others."""
        handle = self._take(self.place(run_id))
        try:
            yield handle.run
        finally:
            self._give_back(handle)

    def close(self) -> None:
        """Let go of all files; of those in use as soon as they are given back."""
        with self._lock:
            self._is_closed = True
            handles, self._open = list(self._open.values()), OrderedDict()
            for handle in handles:
                _retire(handle)

    @property
    def num_open(self) -> int:
        """How many runs are open now."""
        return len(self._open)

    def _take(self, place: Place) -> _Handle:
        identity = _identity(place.file)
        with self._lock:
            handle = self._open.get(place.id)
            if handle is not None and handle.identity == identity:
                self._open.move_to_end(place.id)
                handle.users += 1
                return handle
        run = open_run(place.file)
        try:
            check_size(run)
        except BaseException:
            run.close()
            raise
        fresh = _Handle(run, identity)
        with self._lock:
            if self._is_closed:
                fresh.retired = True
                return fresh
            replaced = self._open.pop(place.id, None)
            self._open[place.id] = fresh
            for stale in [replaced, *self._beyond()]:
                if stale is not None:
                    _retire(stale)
        return fresh

    def _beyond(self) -> Iterator[_Handle]:
        while len(self._open) > self._most_open:
            yield self._open.popitem(last=False)[1]

    def _give_back(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if handle.retired and not handle.users:
                handle.run.close()


@dataclass
class _Handle:
    run: Run
    identity: tuple[int, int]
    users: int = 1
    retired: bool = False
    """Whether it is to be closed when the last user gives it back."""


def _retire(handle: _Handle) -> None:
    handle.retired = True
    if not handle.users:
        handle.run.close()


def stamp(file: Path) -> Stamp:
    """What changes whenever the run is written to; empty where it is gone."""
    try:
        found = file.stat()
    except OSError:
        return ()
    parts = [found.st_ino, found.st_mtime_ns, found.st_size]
    with suppress(OSError):
        log = file.with_name(file.name + "-wal").stat()
        parts += [log.st_mtime_ns, log.st_size]
    return tuple(parts)


def find_runs(folder: Path) -> list[Place]:
    """The runs in a folder, or the one that it is, in order of their names.

    Hidden folders are left out. A link is followed only where it stays inside the folder.
    """
    root = folder.resolve()
    found: dict[Path, Place] = {}
    pending, seen = [(root, 0)], {root}
    for number, (here, depth) in enumerate(pending):
        if number >= MAX_FOLDERS or len(found) >= MAX_RUNS:
            break
        file = here / FILE_NAME
        if file.is_file() and _inside(file, root):
            name = root.name if here == root else here.relative_to(root).as_posix()
            found[here] = Place(_id_of(name), name, file)
            if here != root:
                continue  # snapshots and the like are below it, no further runs
        if depth < MAX_DEPTH:
            for below in _folders(here, root):
                if below not in seen:
                    seen.add(below)
                    pending.append((below, depth + 1))
    return sorted(found.values(), key=lambda place: place.name)


def _folders(here: Path, root: Path) -> list[Path]:
    try:
        with os.scandir(here) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    except OSError:
        return []
    folders = (Path(os.path.realpath(here / name)) for name in names)
    return [folder for folder in folders if folder.is_relative_to(root)]


def _inside(file: Path, root: Path) -> bool:
    return Path(os.path.realpath(file)).is_relative_to(root)


def _id_of(name: str) -> str:
    return hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()


def _identity(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        raise RunNotFoundError(f"{file.parent.name} is gone; the list of runs has those there are") from None
    return found.st_dev, found.st_ino
