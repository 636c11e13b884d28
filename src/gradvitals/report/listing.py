"""The runs in a folder: which there are, the newest, and a line about each for `gradvitals ls`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradvitals.errors import GradvitalsError, RunNotFoundError
from gradvitals.places import searched_folders
from gradvitals.report.catalog import name_of
from gradvitals.report.format import in_sentence
from gradvitals.report.replay import was_diagnosed
from gradvitals.report.state import State, state_of
from gradvitals.report.verdict import Level, judge_run
from gradvitals.store.opening import is_run_file
from gradvitals.store.reader import open_run
from gradvitals.store.schema import FILE_NAME

MAX_DEPTH = 6
"""Folders between the listed one and a run."""
MAX_FOLDERS = 20_000
MAX_RUNS = 2_000


@dataclass(frozen=True)
class RunFile:
    """A run that was found: its id in addresses, its name, its file."""

    id: str
    name: str
    path: Path

    @property
    def modified(self) -> float:
        """When it was last written to, in seconds since the epoch; 0 if the file is gone."""
        times = [0.0]
        for file in (self.path, self.path.with_name(f"{FILE_NAME}-wal")):
            with suppress(OSError):
                times.append(file.stat().st_mtime)
        return max(times)


def find_runs(folder: Path) -> list[RunFile]:
    """Returns the runs in a folder, or the one that it is, in order of their names.

    Skips hidden folders, links that lead out of the folder, and files of other tools.
    """
    root = folder.resolve()
    found: list[RunFile] = []
    depths = {root: 0}
    pending = [root]
    for count, here in enumerate(pending):
        if count >= MAX_FOLDERS or len(found) >= MAX_RUNS:
            break
        path = here / FILE_NAME
        if is_run_file(path) and is_inside(path, root):
            name = root.name if here == root else here.relative_to(root).as_posix()
            run_id = hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()
            found.append(RunFile(run_id, name, path))
            if here != root:
                continue  # below a run are snapshots and the like, no further runs
        names: list[str] = []
        with suppress(OSError), os.scandir(here) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        for below in (Path(os.path.realpath(here / name)) for name in names if depths[here] < MAX_DEPTH):
            if below.is_relative_to(root) and below not in depths:
                depths[below] = depths[here] + 1
                pending.append(below)
    return sorted(found, key=lambda file: file.name)


def newest_runs(count: int, *, without: Iterable[Path] = ()) -> list[Path]:
    """Returns the folders of the runs in `gradvitals_runs` and `runs` that were written to last, the oldest first.

    Args:
        count: How many.
        without: Runs that do not count.

    Raises:
        RunNotFoundError: If there are fewer.
    """
    folders = searched_folders()
    skipped = {path.resolve() for path in without}
    found = [(file, place) for place in folders for file in find_runs(place) if file.path.parent not in skipped]
    if len(found) < count:
        there = f"are no {'other ' if skipped else ''}runs" if not found else "is only one run"
        raise RunNotFoundError(
            f"there {there} in {' or '.join(map(str, folders))}; record one with `gradvitals run train.py`, try "
            "`gradvitals demo`, or name the folder of a run"
        )
    newest = sorted(found, key=lambda one: one[0].modified)[-count:]
    return [place if file.path.parent == place.resolve() else place / file.name for file, place in newest]


@dataclass(frozen=True, kw_only=True)
class RunLine:
    """A line of `gradvitals ls`."""

    name: str
    path: str
    level: Level | None
    """None if the run was not judged or cannot be read."""
    state: State | None
    steps: int
    loss: float | None
    modified: float
    text: str
    """The worst finding, or why the run cannot be read."""
    short: str = ""
    """The same in a few words."""

    @property
    def age(self) -> float:
        """Seconds since it was last written to."""
        return max(0.0, time.time() - self.modified)

    def to_json(self) -> dict[str, Any]:
        """Returns the line as plain JSON values."""
        return {**asdict(self), "age": self.age}


def list_runs(files: Iterable[RunFile], folder: Path) -> list[RunLine]:
    """Returns a line about each run, the one written to last first."""
    return [_line(file, folder) for file in sorted(files, key=lambda file: -file.modified)]


def _line(file: RunFile, folder: Path) -> RunLine:
    path = folder if file.path.parent == folder.resolve() else folder / file.name
    about = partial(RunLine, name=file.name, path=str(path), modified=file.modified)
    try:
        with open_run(file.path) as run:
            verdict = judge_run(run, run.findings)
            level = verdict.level if was_diagnosed(run.meta) and verdict.steps else None
            losses = run.series("loss")[1].tolist() if "loss" in run.metrics("values") else []
            loss = losses[-1] if losses else None
            text, short = "not judged: see gradvitals doctor", ""
            if level is not None:
                worst = verdict.worst if level != "healthy" else None
                text = worst.finding.title if worst is not None else ""
                short = in_sentence(name_of(worst.finding.id)) if worst is not None else ""
            return about(level=level, state=state_of(run), steps=verdict.steps, loss=loss, text=text, short=short)
    except (GradvitalsError, OSError) as error:
        return about(level=None, state=None, steps=0, loss=None, text=str(error))


def is_inside(file: Path, root: Path) -> bool:
    """Returns whether a file is in a folder, with all links followed."""
    return Path(os.path.realpath(file)).is_relative_to(root)
