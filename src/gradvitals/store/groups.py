"""Reading frames back: which groups hold a metric, and their numbers out of blocks and tail."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradvitals.store.frames import FLOAT, KINDS, Kind
from gradvitals.store.schema import MAX_ROWS, ROW_BITS

Array = NDArray[Any]

ALWAYS = -(1 << 63)
NEVER = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Group:
    """Frames of the same columns and rows, of one segment."""

    id: int
    segment: int
    layout: int
    kind: Kind
    source: str | None
    stage: str
    columns: tuple[str, ...]
    num_rows: int


class Span(NamedTuple):
    """Steps to read: those after `since`, up to and with `until`."""

    since: int = ALWAYS
    until: int = NEVER


class Found(NamedTuple):
    """What some frames of one group hold; the first axis of `data` goes with `steps`."""

    steps: NDArray[np.int64]
    readings: NDArray[np.int64]
    """Number of the reading each frame is from: later ones win over earlier ones of the same step."""
    data: Array


class Place(NamedTuple):
    """One frame: its step, the reading it is from, and where its numbers are."""

    step: int
    reading: int
    time: float
    batch_size: float
    group: Group
    numbers: tuple[int, int, int] | NDArray[np.float32]
    """Chunk, its number of frames and the position in it; or the numbers themselves, from the tail."""


def load_groups(db: sqlite3.Connection, after: int = 0) -> list[Group]:
    """All groups with an id above `after`."""
    query = (
        "SELECT id, segment, layout, kind, source, stage, columns, num_rows FROM frame_group WHERE id > ? ORDER BY id"
    )
    groups = []
    for number, segment, layout, kind, source, stage, columns, num_rows in db.execute(query, (after,)).fetchall():
        group = Group(number, segment, layout, kind, source, stage, tuple(json.loads(columns)), num_rows)
        names = (group.stage, *group.columns)
        if group.kind not in KINDS or not isinstance(group.num_rows, int) or not 0 <= group.num_rows <= MAX_ROWS:
            raise ValueError(f"group {group.id} has {group.num_rows} rows of kind {group.kind}")
        if not all(isinstance(name, str) for name in names) or not isinstance(group.source, str | None):
            raise ValueError(f"group {group.id} has names that are not text")
        groups.append(group)
    return groups


def has_rows(db: sqlite3.Connection, group: Group) -> bool:
    """Whether there is a frame with as many rows as the group says, and the file is large enough to hold one."""
    size = group.num_rows * FLOAT.itemsize
    pages, page_size = (int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size"))
    if size > pages * page_size:
        return False
    tail = "SELECT 1 FROM tail WHERE group_id = ? AND length(data) >= ? LIMIT 1"
    if db.execute(tail, (group.id, size)).fetchone():
        return True
    chunk = db.execute("SELECT id FROM chunk WHERE group_id = ? ORDER BY id DESC LIMIT 1", (group.id,)).fetchone()
    last = "SELECT count(*) FROM block WHERE id BETWEEN ? AND ?"
    first = int(chunk[0]) << ROW_BITS if chunk else 0
    return bool(chunk) and db.execute(last, (first, first + group.num_rows - 1)).fetchone()[0] == group.num_rows


def last_step(db: sqlite3.Connection, group: Group) -> int | None:
    """The last step of any frame of a group, from the index of its chunks and its tail."""
    chunk = db.execute("SELECT max(last_step) FROM chunk WHERE group_id = ?", (group.id,)).fetchone()[0]
    tail = db.execute("SELECT max(step) FROM tail WHERE group_id = ?", (group.id,)).fetchone()[0]
    found = [int(step) for step in (chunk, tail) if step is not None]
    return max(found) if found else None


def read_extent(db: sqlite3.Connection, group: Group) -> tuple[int, int, int] | None:
    """The first and the last step of a group, and how many frames it has; None where it has none."""
    parts = [
        db.execute(query, (group.id,)).fetchone()
        for query in (
            "SELECT min(first_step), max(last_step), sum(num_frames) FROM chunk WHERE group_id = ?",
            "SELECT min(step), max(step), count(*) FROM tail WHERE group_id = ?",
        )
    ]
    found = [tuple(map(int, part)) for part in parts if part[0] is not None]
    if not found:
        return None
    return min(part[0] for part in found), max(part[1] for part in found), sum(part[2] for part in found)


def read_row(db: sqlite3.Connection, group: Group, column: int, row: int, span: Span) -> Found:
    """One number a frame: the metric in `column` for the tensor, layer or head in `row`."""
    size = FLOAT.itemsize
    chunks = db.execute(
        f"SELECT num_frames, steps, readings, substr(block.data, ? * num_frames + 1, ? * {_BORNE_OUT}) "
        "FROM chunk LEFT JOIN block ON block.id = (chunk.id << ?) | ? "
        "WHERE group_id = ? AND last_step > ? AND first_step <= ? ORDER BY chunk.id",
        (column * size, size, ROW_BITS, row, group.id, *span),
    ).fetchall()
    tail = db.execute(
        "SELECT step, reading, substr(data, ?, ?) FROM tail WHERE group_id = ? AND step > ? AND step <= ? ORDER BY id",
        ((column * group.num_rows + row) * size + 1, size, group.id, *span),
    ).fetchall()
    return _join(group, chunks, tail, span, lambda blob, frames: _floats(blob, (frames,)))


def read_columns(db: sqlite3.Connection, group: Group, columns: list[int | None], row: int, span: Span) -> Found:
    """Several metrics of one row in one pass, ``[frames, 1 + columns]``: the time, then each metric, nan for None."""
    size, known = FLOAT.itemsize, [column for column in columns if column is not None]
    parts = "".join(
        f", substr(block.data, {column * size} * num_frames + 1, {size} * {_BORNE_OUT})" for column in known
    )
    chunks = db.execute(
        f"SELECT num_frames, steps, readings, times{parts} "
        "FROM chunk LEFT JOIN block ON block.id = (chunk.id << ?) | ? "
        "WHERE group_id = ? AND last_step > ? AND first_step <= ? ORDER BY chunk.id",
        (ROW_BITS, row, group.id, *span),
    ).fetchall()
    parts = "".join(f", substr(data, {(column * group.num_rows + row) * size + 1}, {size})" for column in known)
    tail = db.execute(
        f"SELECT step, reading, time{parts} FROM tail WHERE group_id = ? AND step > ? AND step <= ? ORDER BY id",
        (group.id, *span),
    ).fetchall()
    wide = 1 + len(columns)

    def packed(frames: int, times: Array, blobs: list[Any]) -> bytes:
        data = np.full((frames, wide), np.nan)
        data[:, 0] = times
        own = iter(blobs)
        for at, column in enumerate(columns, 1):
            if column is not None:
                data[:, at] = _floats(next(own), (frames,))
        return data.tobytes()

    def decode(content: bytes, frames: int) -> Array:
        return np.frombuffer(content).reshape(frames, wide)

    return _join(
        group,
        [(frames, steps, readings, packed(frames, _numbers(times, "<f8", frames), blobs))
         for frames, steps, readings, times, *blobs in chunks],
        [(step, reading, packed(1, np.array([time], dtype="<f8"), blobs)) for step, reading, time, *blobs in tail],
        span, decode,
    )  # fmt: skip


def read_rows(db: sqlite3.Connection, group: Group, column: int, span: Span) -> Found:
    """One number a frame and row, ``[frames, rows]``: the metric in `column` for all tensors, layers or heads."""
    size, rows = FLOAT.itemsize, group.num_rows
    chunks = [
        (frames, steps, readings, read_chunk(db, group, chunk, _borne_out(frames, steps), slice(column, column + 1)))
        for chunk, frames, steps, readings in db.execute(
            "SELECT id, num_frames, steps, readings FROM chunk "
            "WHERE group_id = ? AND last_step > ? AND first_step <= ? ORDER BY id",
            (group.id, *span),
        ).fetchall()
    ]
    tail = db.execute(
        "SELECT step, reading, substr(data, ?, ?) FROM tail WHERE group_id = ? AND step > ? AND step <= ? ORDER BY id",
        (column * rows * size + 1, rows * size, group.id, *span),
    ).fetchall()

    def decode(data: Any, frames: int) -> Array:
        return cast(Array, data[:, 0]) if isinstance(data, np.ndarray) else _floats(data, (frames, rows))

    return _join(group, chunks, tail, span, decode)


def read_chunk(
    db: sqlite3.Connection, group: Group, chunk: int, num_frames: int, columns: slice = slice(None)
) -> NDArray[np.float32]:
    """The frames of one chunk, ``[frames, columns, rows]``."""
    start, stop, _ = columns.indices(len(group.columns))
    size = num_frames * FLOAT.itemsize
    first = chunk << ROW_BITS
    blobs = db.execute(
        "SELECT substr(data, ?, ?) FROM block WHERE id BETWEEN ? AND ? ORDER BY id",
        (start * size + 1, (stop - start) * size, first, first + group.num_rows - 1),
    ).fetchall()
    content = b"".join(blob or b"" for (blob,) in blobs)  # an empty substr is NULL
    return _floats(content, (group.num_rows, stop - start, num_frames)).transpose(2, 1, 0)


def read_info(db: sqlite3.Connection, group: Group, span: Span, *, name: Literal["time", "batch_size"]) -> Found:
    """What is kept once a frame: ``time`` or ``batch_size``."""
    chunks = db.execute(
        f"SELECT num_frames, steps, readings, {name}s FROM chunk "
        "WHERE group_id = ? AND last_step > ? AND first_step <= ? ORDER BY id",
        (group.id, *span),
    ).fetchall()
    rows = db.execute(
        f"SELECT step, reading, {name} FROM tail WHERE group_id = ? AND step > ? AND step <= ? ORDER BY id",
        (group.id, *span),
    ).fetchall()
    tail = [(step, reading, np.array([number], "<f8").tobytes()) for step, reading, number in rows]
    return _join(group, chunks, tail, span, lambda blob, frames: _numbers(blob, "<f8", frames))


def read_places(db: sqlite3.Connection, group: Group, span: Span) -> list[Place]:
    """Where the frames of a group are; those of the tail with their numbers, as the writer may move them any time."""
    places = []
    for chunk, frames, *blobs in db.execute(
        "SELECT id, num_frames, steps, readings, times, batch_sizes FROM chunk "
        "WHERE group_id = ? AND last_step > ? AND first_step <= ? ORDER BY id",
        (group.id, *span),
    ).fetchall():
        dtypes = ("<i8", "<i8", "<f8", "<f8")
        columns = [_numbers(blob, dtype, frames).tolist() for blob, dtype in zip(blobs, dtypes, strict=True)]
        for position, (step, reading, time, size) in enumerate(zip(*columns, strict=True)):
            if span.since < step <= span.until:
                places.append(Place(step, reading, time, size, group, (chunk, frames, position)))
    for step, reading, time, size, data in db.execute(
        "SELECT step, reading, time, batch_size, data FROM tail "
        "WHERE group_id = ? AND step > ? AND step <= ? ORDER BY id",
        (group.id, *span),
    ).fetchall():
        numbers = _floats(data, (len(group.columns), group.num_rows))
        time, size = (float("nan") if number is None else float(number) for number in (time, size))
        places.append(Place(int(step), int(reading), time, size, group, numbers))
    return places


_BORNE_OUT = "min(num_frames, length(steps) / 8)"
"""Frames of a chunk: as many as it says, and no more than it has steps, or a stranger's file fetches whole blocks."""


def _borne_out(frames: Any, steps: Any) -> int:
    return len(_numbers(steps, "<i8", frames))


def _join(
    group: Group, chunks: list[tuple[Any, ...]], tail: list[tuple[Any, ...]], span: Span, decode: Callable[..., Array]
) -> Found:
    steps, readings, data = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [decode(b"", 0)]
    for frames, step_blob, reading_blob, content in chunks:
        if not isinstance(frames, int) or frames < 1:
            raise ValueError(f"a chunk of group {group.id} has {frames} frames")
        steps.append(_numbers(step_blob, "<i8", frames))
        readings.append(_numbers(reading_blob, "<i8", frames))
        data.append(decode(content, frames))
    if tail:
        steps.append(np.array([row[0] for row in tail], dtype=np.int64))
        readings.append(np.array([row[1] for row in tail], dtype=np.int64))
        data.append(decode(b"".join(row[2] or b"" for row in tail), len(tail)))
    found = Found(np.concatenate(steps), np.concatenate(readings), np.concatenate(data))
    wanted = (found.steps > span.since) & (found.steps <= span.until)
    return found if wanted.all() else Found(*(part[wanted] for part in found))


def _numbers(blob: Any, dtype: str, count: int) -> Array:
    if not isinstance(blob, bytes) or not isinstance(count, int) or len(blob) != count * 8:
        raise ValueError(f"expected {count} numbers of 8 bytes")
    return np.frombuffer(blob, dtype=dtype)


def _floats(blob: Any, shape: tuple[int, ...]) -> Array:
    expected = math.prod(shape) * FLOAT.itemsize
    if not isinstance(blob, bytes) or len(blob) != expected:
        raise ValueError(f"expected {expected} bytes of numbers")
    return np.frombuffer(blob, dtype=FLOAT).reshape(shape)
