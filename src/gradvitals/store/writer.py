"""RunWriter: puts readings, findings, actions and layouts into a run file, one transaction at a time."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import gradvitals
from gradvitals.errors import RunError, RunNotFoundError
from gradvitals.store import opening, schema
from gradvitals.store.blocks import (
    PAGE_SIZE,
    GroupKey,
    block_frames,
    dump_json,
    dump_layout,
    finding_key,
    frames_of,
    plain_frames,
    transposed,
)
from gradvitals.store.opening import is_alive, pid_space
from gradvitals.types import Action, Finding, Layout, PlainReadings, Reading

Record = Reading | PlainReadings | Finding | Action | Layout

LIVE_SECONDS = 5.0
"""A run whose heartbeat is younger than this is being written."""

MIN_COMPACT = 32
"""Frames below which blocks would take more room than the tail rows they replace."""


def run_file(path: str | os.PathLike[str]) -> Path:
    """The file of a run that is named by its folder or by the file itself."""
    path = Path(path)
    return path if path.name == schema.FILE_NAME else path / schema.FILE_NAME


def free_run_path(path: str | os.PathLike[str]) -> Path:
    """Return `path` if no run is there yet, else the first free one of ``path-2``, ``path-3``, ..."""
    path = Path(path)
    candidate, number = path, 1
    while (candidate / schema.FILE_NAME).exists() or candidate.is_file():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


class RunWriter:
    """Writes one run. Nothing is safe until `commit`; an error in between undoes what came after the last one.

    Args:
        path: Folder of the run, made if needed.
        meta: Anything JSON can hold, kept with the run.
        resume: Go on with the run that is there, as a new segment; without one, start a new run.
        first_step: First step of this segment. Readers hide what earlier segments say about it and later steps.
        run_id: Identity of a new run; None makes one up.

    Raises:
        RunError: If there is a run already and `resume` is False, or if another process is writing it.
        sqlite3.Error: If the disk does not let it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        meta: Mapping[str, Any],
        resume: bool = False,
        first_step: int = 0,
        run_id: str | None = None,
    ) -> None:
        self.path = run_file(path)
        self.run_id = run_id or uuid.uuid4().hex
        self.dropped = 0
        """Records that this segment was never given; written with every commit."""
        self._meta = {**meta, "pid_space": pid_space()}
        self._first_step = first_step
        self._started_at = time.time()
        self._layout = Layout()
        self._segment: int | None = None
        self._open(resume=resume)

    def _open(self, *, resume: bool) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(
            self.path, timeout=opening.BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        try:
            self._db.execute(f"PRAGMA page_size = {PAGE_SIZE}")
            if not schema.is_blank(self._db):
                schema.check(self._db, self.path)
            self._db.execute("BEGIN IMMEDIATE")
            if schema.is_blank(self._db):
                self._create()
            else:
                self._join(resume=resume)
            self._db.execute("COMMIT")
            # Only now: a file that has a log from its birth could be seen without its tables.
            self.journal_mode = opening.set_journal(self._db, self.path)
            self._identity = self._file_identity()
            self._load()
            self._compact_left_behind()
            if self._layout != Layout():
                self.write(self._layout)
        except BaseException:
            self._db.close()
            raise

    def _create(self) -> None:
        schema.create(self._db)
        own = {"run_id": self.run_id, "version": gradvitals.__version__}
        entries = [(str(key), dump_json(value)) for key, value in {**self._meta, **own}.items()]
        self._db.executemany("INSERT INTO meta VALUES (?, ?)", entries)
        self._segment = None
        self._add_segment()

    def _join(self, *, resume: bool) -> None:
        row = self._db.execute("SELECT value FROM meta WHERE key = 'run_id'").fetchone()
        found = str(row[0]).strip('"') if row else ""
        if self._segment is not None:  # coming back after an error
            if found != self.run_id:
                raise RunError(f"{self.path} holds another run now")
            return
        if not resume and found == self.run_id:  # we made the tables, and then an error came between
            self._segment = self._db.execute("SELECT max(id) FROM segment").fetchone()[0]
            return
        if not resume:
            raise RunError(f"there is a run in {self.path.parent} already; resume it or write to another folder")
        query = "SELECT pid, hostname, heartbeat FROM segment WHERE finished_at IS NULL ORDER BY id DESC LIMIT 1"
        for pid, hostname, heartbeat in self._db.execute(query).fetchall():
            here = hostname == socket.gethostname() and pid != os.getpid() and os.name == "posix"
            if here and time.time() - heartbeat < LIVE_SECONDS and is_alive(pid):
                raise RunError(f"{self.path} is being written by process {pid}; give each process a run of its own")
        self.run_id = found
        entries = [(str(key), dump_json(value)) for key, value in self._meta.items() if key != "run_id"]
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", entries)
        self._add_segment()

    def _add_segment(self) -> None:
        now = self._started_at
        self._segment = self._db.execute(
            "INSERT INTO segment VALUES (NULL, ?, 0, ?, ?, NULL, ?, ?, 0)",
            (self._first_step, now, now, socket.gethostname(), os.getpid()),
        ).lastrowid

    def _load(self) -> None:
        """Learn from the file what the next write needs to know."""
        one = self._db.execute("SELECT layout FROM segment WHERE id = ?", (self._segment,)).fetchone()
        self._layout_id = int(one[0])
        queries = ("SELECT max(reading) FROM tail", "SELECT max(last_reading) FROM chunk")
        self._next_reading = 1 + max(int(self._db.execute(query).fetchone()[0] or 0) for query in queries)
        # Groups of this segment are found again as their frames come; only their rows in the tail matter.
        self._groups: dict[tuple[int, GroupKey], int] = {}
        self._keys: dict[int, GroupKey] = {}
        self._in_tail: dict[int, int] = {}

    def _compact_left_behind(self) -> None:
        """Finish the blocks of segments that ended without `close`."""
        query = "SELECT group_id, count(*) FROM tail GROUP BY group_id HAVING count(*) >= ?"
        for group, count in self._db.execute(query, (MIN_COMPACT,)).fetchall():
            row = self._db.execute(
                "SELECT kind, source, stage, columns, num_rows FROM frame_group WHERE id = ? AND segment < ?",
                (group, self._segment),
            ).fetchone()
            if row is not None:
                self._keys[group] = GroupKey(row[0], row[1], row[2], tuple(json.loads(row[3])), row[4])
                self._in_tail[group] = count
                self._compact_group(group, count)
        if self._db.in_transaction:
            self._db.execute("COMMIT")

    def reopen(self) -> None:
        """Connect again after an error, as the same run and the same segment.

        A file that was deleted meanwhile is begun anew, with the same run id and layout.
        """
        with suppress(sqlite3.Error):
            self._db.close()
        self._open(resume=True)

    def write(self, record: Record) -> None:
        """Add one record to the open transaction.

        Raises:
            ValueError: If the record is of no known type or holds what cannot be stored; nothing was written of it.
            sqlite3.Error: If the disk does not let it; everything since the last `commit` is undone.
        """
        if isinstance(record, Reading):
            self._write_reading(record)
        elif isinstance(record, PlainReadings):
            self._write_plain(record)
        elif isinstance(record, Finding):
            self._execute(
                "INSERT INTO finding VALUES (NULL, ?, ?, ?, ?) "
                "ON CONFLICT (key) DO UPDATE SET segment = excluded.segment, content = excluded.content",
                (finding_key(record), self._segment, int(record.first_step), dump_json(record.to_json())),
            )
        elif isinstance(record, Action):
            step, content = int(record.step), dump_json(record.to_json())
            self._execute("INSERT INTO action VALUES (NULL, ?, ?, ?)", (self._segment, step, content))
        elif isinstance(record, Layout):
            self._write_layout(record)
        else:
            raise ValueError(f"a run keeps readings, findings, actions and layouts; got {type(record).__name__}")

    def _write_reading(self, reading: Reading) -> None:
        frames = frames_of(reading)
        number = self._next_reading
        self._next_reading += 1
        batch_size = None if reading.batch_size is None else float(reading.batch_size)
        step, when = int(reading.step), float(reading.time)
        for key, data in frames:
            group = self._group(key)
            row = (group, number, step, when, batch_size, data)
            self._execute("INSERT INTO tail VALUES (NULL, ?, ?, ?, ?, ?, ?)", row)
            self._in_tail[group] = self._in_tail.get(group, 0) + 1

    def _write_plain(self, plain: PlainReadings) -> None:
        frames = plain_frames(plain)
        groups = [self._group(key) for key, _ in frames]
        for group in groups:
            self._in_tail[group] = self._in_tail.get(group, 0) + 1
        numbers = range(self._next_reading, self._next_reading + len(frames))
        self._next_reading = numbers.stop
        sizes = [None if size != size else size for size in plain.batch_sizes.tolist()]
        steps, times, data = plain.steps.tolist(), plain.times.tolist(), [data for _, data in frames]
        rows = zip(groups, numbers, steps, times, sizes, data, strict=True)
        self._execute("INSERT INTO tail VALUES (NULL, ?, ?, ?, ?, ?, ?)", many=rows)

    def _write_layout(self, layout: Layout) -> None:
        texts = dump_layout(layout)
        row = self._execute(
            "SELECT id FROM layout WHERE tensors = ? AND layers = ? AND heads = ? AND details = ?", texts
        ).fetchone()
        new = row[0] if row else self._execute("INSERT INTO layout VALUES (NULL, ?, ?, ?, ?)", texts).lastrowid
        assert new is not None
        self._layout, self._layout_id = layout, int(new)
        self._execute("UPDATE segment SET layout = ? WHERE id = ?", (self._layout_id, self._segment))

    def _group(self, key: GroupKey) -> int:
        known = self._groups.get((self._layout_id, key))
        if known is not None:
            return known
        row = (self._segment, self._layout_id, key.kind, key.source, key.stage, dump_json(key.columns), key.num_rows)
        found = self._execute(
            "SELECT id FROM frame_group WHERE segment = ? AND layout = ? AND kind = ? AND source IS ? AND stage = ? "
            "AND columns = ? AND num_rows = ?",
            row,
        ).fetchone()
        group = (
            found[0] if found else self._execute("INSERT INTO frame_group VALUES (NULL,?,?,?,?,?,?,?)", row).lastrowid
        )
        assert group is not None
        self._groups[self._layout_id, key] = int(group)
        self._keys[int(group)] = key
        count = self._execute("SELECT count(*) FROM tail WHERE group_id = ?", (group,)).fetchone()
        self._in_tail[int(group)] = int(count[0])
        return int(group)

    def commit(self) -> None:
        """Make everything written so far safe, and renew the heartbeat."""
        if self._file_identity() != self._identity:
            raise RunNotFoundError(f"{self.path} was deleted or replaced while the run was being written")
        now = time.time()
        self._execute("UPDATE segment SET heartbeat = ?, dropped = ? WHERE id = ?", (now, self.dropped, self._segment))
        for group, count in self._in_tail.items():
            key = self._keys[group]
            size = block_frames(len(key.columns), key.num_rows)
            for _ in range(count // size):
                self._compact_group(group, size)
        self._execute("COMMIT")

    def compact(self) -> None:
        """Turn what is in the tail into blocks now rather than when a block is full."""
        for group, count in self._in_tail.items():
            if count >= MIN_COMPACT:
                self._compact_group(group, count)
        self.commit()

    def _compact_group(self, group: int, size: int) -> None:
        rows = self._execute(
            "SELECT id, reading, step, time, batch_size, data FROM tail WHERE group_id = ? ORDER BY id LIMIT ?",
            (group, size),
        ).fetchall()
        ids, readings, steps, times, batch_sizes, blobs = zip(*rows, strict=True)
        # Deleting first lets the blocks take the pages of the rows they replace, so the file does not grow.
        self._execute("DELETE FROM tail WHERE group_id = ? AND id <= ?", (group, ids[-1]))
        self._in_tail[group] -= len(rows)
        info = ((steps, "<i8"), (readings, "<i8"), (times, "<f8"), (batch_sizes, "<f8"))
        info_blobs = (np.array(numbers, dtype).tobytes() for numbers, dtype in info)
        chunk = self._execute(
            "INSERT INTO chunk VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (group, len(rows), min(steps), max(steps), max(readings), *info_blobs),
        ).lastrowid
        assert chunk is not None
        first = chunk << schema.ROW_BITS
        for row, data in enumerate(transposed(list(blobs), self._keys[group])):
            self._execute("INSERT INTO block VALUES (?, ?)", (first + row, data))

    def close(self) -> None:
        """Commit, note that the run is finished, and leave one plain file that needs no log beside it."""
        try:
            self._db.execute("SELECT 1")
        except sqlite3.ProgrammingError:  # closed already
            return
        try:
            self.compact()
            now = time.time()
            self._execute("UPDATE segment SET finished_at = ?, heartbeat = ? WHERE id = ?", (now, now, self._segment))
            self._execute("COMMIT")
            with suppress(sqlite3.OperationalError):  # a reader has it open: the log stays, and is as good
                self._db.execute("PRAGMA busy_timeout = 0")
                self._db.execute("PRAGMA journal_mode = delete")
        finally:
            self._db.close()

    def discard(self) -> None:
        """Drop the connection, and with it what was not committed."""
        with suppress(sqlite3.Error):
            self._db.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _execute(
        self, sql: str, values: tuple[Any, ...] = (), *, many: Iterable[tuple[Any, ...]] | None = None
    ) -> sqlite3.Cursor:
        try:
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            return self._db.execute(sql, values) if many is None else self._db.executemany(sql, many)
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                self._load()
            raise

    def _file_identity(self) -> tuple[int, int] | None:
        try:
            status = self.path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino
