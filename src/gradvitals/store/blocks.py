"""The layout of readings as bytes: frames, the groups that hold them, blocks and the tail."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from gradvitals.store.schema import MAX_BLOB_BYTES, MAX_ROWS, ROW_BITS
from gradvitals.types import Finding, Layout, PlainReadings, Reading, TensorInfo, json_ready

Kind = Literal["values", "tensors", "layers", "heads", "ranks"]
KINDS: tuple[Kind, ...] = ("values", "tensors", "layers", "heads", "ranks")

FLOAT = np.dtype("<f4")
PAGE_SIZE = 4096
MAX_CHUNK_BYTES = 32 << 20


class GroupKey(NamedTuple):
    """The properties that frames of the same blocks share."""

    kind: Kind
    source: str | None
    stage: str
    columns: tuple[str, ...]
    num_rows: int


class Frame(NamedTuple):
    """The numbers of one kind from one Reading: float32, column after column."""

    key: GroupKey
    data: bytes


def frames_of(reading: Reading) -> list[Frame]:
    """Lay out a reading; arrays of unequal length go to frames of their own.

    Raises:
        ValueError: If it cannot be stored: not numbers, a step beyond 64 bits, or far too many rows.
    """
    if not -(1 << 62) < int(reading.step) < 1 << 62:
        raise ValueError(f"step is {reading.step}; expected less than 2**62")
    source = None if reading.source is None else str(reading.source)
    stage = str(reading.stage)
    frames: list[Frame] = []
    if reading.values:
        metrics = tuple(sorted(reading.values))
        numbers = [reading.values[metric] for metric in metrics]
        row = _as_floats(numbers)
        if row.ndim != 1:
            raise ValueError(f"values are {numbers!r}; expected one number for each metric")
        frames.append(Frame(GroupKey("values", source, stage, metrics, 1), row.tobytes()))
    for kind in KINDS[1:]:
        by_length: dict[int, dict[str, NDArray[np.float32]]] = {}
        content: Mapping[str, Any] = getattr(reading, kind)
        for metric in sorted(content):
            column = _as_floats(content[metric]).reshape(-1)
            by_length.setdefault(column.size, {})[metric] = column
        for num_rows, columns in by_length.items():
            if num_rows > MAX_ROWS or num_rows * len(columns) * FLOAT.itemsize > MAX_BLOB_BYTES:
                raise ValueError(f"{kind} has {num_rows} rows and {len(columns)} metrics, more than a run can hold")
            key = GroupKey(kind, source, stage, tuple(columns), num_rows)
            frames.append(Frame(key, np.concatenate(list(columns.values())).tobytes()))
    return frames or [Frame(GroupKey("values", source, stage, (), 1), b"")]


def plain_frames(plain: PlainReadings) -> list[Frame]:
    """Lay out the global values of plain steps, a frame for each."""
    names = tuple(sorted(plain.values))
    if not names:
        return []
    has = np.stack([plain.present[name] for name in names], axis=1)
    numbers = _as_floats(np.stack([plain.values[name] for name in names], axis=1))
    frames = []
    keys: dict[bytes, GroupKey] = {}
    for row, here in zip(numbers, has, strict=True):
        key = keys.get(pattern := here.tobytes())
        if key is None:
            columns = tuple(name for name, is_there in zip(names, here, strict=True) if is_there)
            key = keys[pattern] = GroupKey("values", None, "raw", columns, 1)
        frames.append(Frame(key, row[here].tobytes()))
    return frames


def _as_floats(numbers: Any) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which is what it means
        return np.asarray(numbers, dtype=FLOAT)


def transposed(blobs: list[bytes], key: GroupKey) -> list[bytes]:
    """Turn frames of one group into one block for each row, ``float32 [columns, frames]``."""
    shape = (len(blobs), len(key.columns), key.num_rows)
    stacked = np.frombuffer(b"".join(blobs), dtype=FLOAT).reshape(shape)
    return [row.tobytes() for row in np.ascontiguousarray(stacked.transpose(2, 1, 0))]


@lru_cache(maxsize=256)
def block_frames(num_columns: int, num_rows: int) -> int:
    """Returns the number of frames per block: about 256, chosen so that blocks fill SQLite's pages.

    A cell that is a little over half a page leaves the other half empty: 256 frames of 2 columns would take
    8 bytes a value. The sizes follow "B-tree Pages" and "Overflow" in SQLite's file format document.
    """
    most = MAX_CHUNK_BYTES // max(1, num_columns * num_rows * FLOAT.itemsize)
    if most < 192:
        return max(16, most)

    def bytes_per_frame(frames: int) -> float:
        payload = num_columns * frames * FLOAT.itemsize + 5
        local, overflow_pages = payload, 0
        if payload > PAGE_SIZE - 35:
            least = (PAGE_SIZE - 12) * 32 // 255 - 23
            local = least + (payload - least) % (PAGE_SIZE - 4)
            local = local if local <= PAGE_SIZE - 35 else least
            overflow_pages = -(-(payload - local) // (PAGE_SIZE - 4))
        cells_per_page = (PAGE_SIZE - 8) // (local + 16)
        return PAGE_SIZE * (overflow_pages + 1 / max(1, cells_per_page)) / frames

    return min(range(192, min(most, 320) + 1), key=bytes_per_frame)


def dump_json(value: Any) -> str:
    """Returns strict JSON; what JSON cannot hold becomes its text."""
    return json.dumps(json_ready(value), allow_nan=False, ensure_ascii=True, default=str)


def dump_layout(layout: Layout) -> tuple[str, str, str, str]:
    """A layout as JSON: the names of tensors, layers and heads, and what else is known of each tensor."""
    names = [layout.names(kind) for kind in ("tensors", "layers", "heads")]
    details = [info.to_json() for info in layout.tensors]
    tensors, layers, heads = map(dump_json, names)
    return tensors, layers, heads, dump_json(details)


def load_layout(layers: str, heads: str, details: str) -> Layout:
    """The inverse of `dump_layout`."""
    tensors = tuple(TensorInfo.from_json(item) for item in json.loads(details))
    return Layout(tensors=tensors, layers=tuple(map(str, json.loads(layers))), heads=tuple(map(str, json.loads(heads))))


def finding_key(finding: Finding) -> str:
    """Returns what identifies a finding over time: its id, rank, first step and subject."""
    identity = dump_json([finding.id, finding.rank, finding.first_step, finding.evidence.get("about")])
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


# -- reading them back ------------------------------------------------------------------------------------------------

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
    """Some frames of one group; the first axis of `data` goes with `steps`."""

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
    return [
        Group(number, segment, layout, kind, source, stage, tuple(json.loads(columns)), num_rows)
        for number, segment, layout, kind, source, stage, columns, num_rows in db.execute(query, (after,)).fetchall()
    ]


def read_extent(db: sqlite3.Connection, group: Group) -> tuple[int, int, int] | None:
    """Returns the first and the last step of a group, and how many frames it has; None if it has none."""
    queries = (
        "SELECT min(first_step), max(last_step), sum(num_frames) FROM chunk WHERE group_id = ?",
        "SELECT min(step), max(step), count(*) FROM tail WHERE group_id = ?",
    )
    parts = [db.execute(query, (group.id,)).fetchone() for query in queries]
    found = [tuple(map(int, part)) for part in parts if part[0] is not None]
    firsts, lasts, counts = zip(*found, strict=True) if found else ((), (), ())
    return (min(firsts), max(lasts), sum(counts)) if firsts else None


def _chunks_and_tail(
    db: sqlite3.Connection, group: Group, span: Span, chunk: str, tail: str
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Some columns of the chunks and of the tail of a group that may hold steps of the span."""
    chunks = db.execute(
        f"SELECT {chunk} FROM chunk WHERE group_id = ? AND last_step > ? AND first_step <= ? ORDER BY id",
        (group.id, *span),
    )
    rows = db.execute(
        f"SELECT {tail} FROM tail WHERE group_id = ? AND step > ? AND step <= ? ORDER BY id", (group.id, *span)
    )
    return chunks.fetchall(), rows.fetchall()


def read_row(db: sqlite3.Connection, group: Group, column: int, row: int, span: Span) -> Found:
    """One number a frame: the metric in `column` for the tensor, layer or head in `row`."""
    size = FLOAT.itemsize
    block = f"SELECT substr(data, {column * size} * num_frames + 1, {size} * num_frames) FROM block"
    chunk = f"num_frames, steps, readings, ({block} WHERE block.id = (chunk.id << {ROW_BITS}) | {row})"
    tail = f"step, reading, substr(data, {(column * group.num_rows + row) * size + 1}, {size})"
    found = _chunks_and_tail(db, group, span, chunk, tail)
    return _join(group, *found, span, lambda blob, frames: _floats(blob, (frames,)))


def read_rows(db: sqlite3.Connection, group: Group, column: int, span: Span) -> Found:
    """One number a frame and row, ``[frames, rows]``: the metric in `column` for all tensors, layers or heads."""
    size, rows = FLOAT.itemsize, group.num_rows
    tail_part = f"step, reading, substr(data, {column * rows * size + 1}, {rows * size})"
    chunks, tail = _chunks_and_tail(db, group, span, "num_frames, steps, readings, id", tail_part)
    one = slice(column, column + 1)
    blocks = [
        (frames, steps, readings, read_chunk(db, group, id, frames, one)) for frames, steps, readings, id in chunks
    ]

    def decode(data: Any, frames: int) -> Array:
        return cast(Array, data[:, 0]) if isinstance(data, np.ndarray) else _floats(data, (frames, rows))

    return _join(group, blocks, tail, span, decode)


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
    """Reads what is stored once per frame: ``time`` or ``batch_size``."""
    found = f"num_frames, steps, readings, {name}s", f"step, reading, {name}"
    chunks, rows = _chunks_and_tail(db, group, span, *found)
    tail = [(step, reading, np.array([number], "<f8").tobytes()) for step, reading, number in rows]
    return _join(group, chunks, tail, span, lambda blob, frames: _numbers(blob, "<f8", frames))


def read_places(db: sqlite3.Connection, group: Group, span: Span) -> list[Place]:
    """Places of a group's frames; those in the tail come with numbers, as the writer may move them any time."""
    places = []
    chunk_part = "id, num_frames, steps, readings, times, batch_sizes"
    chunks, tail = _chunks_and_tail(db, group, span, chunk_part, "step, reading, time, batch_size, data")
    for chunk, frames, *blobs in chunks:
        dtypes = ("<i8", "<i8", "<f8", "<f8")
        columns = [_numbers(blob, dtype, frames).tolist() for blob, dtype in zip(blobs, dtypes, strict=True)]
        for position, (step, reading, time, size) in enumerate(zip(*columns, strict=True)):
            if span.since < step <= span.until:
                places.append(Place(step, reading, time, size, group, (chunk, frames, position)))
    for step, reading, time, size, data in tail:
        numbers = _floats(data, (len(group.columns), group.num_rows))
        time, size = (float("nan") if number is None else float(number) for number in (time, size))
        places.append(Place(int(step), int(reading), time, size, group, numbers))
    return places


def _join(
    group: Group, chunks: list[tuple[Any, ...]], tail: list[tuple[Any, ...]], span: Span, decode: Callable[..., Array]
) -> Found:
    parts = [Found(np.zeros(0, np.int64), np.zeros(0, np.int64), decode(b"", 0))]
    for frames, steps, readings, content in chunks:
        if not isinstance(frames, int) or frames < 1:
            raise ValueError(f"a chunk of group {group.id} has {frames} frames")
        own, numbers = _numbers(steps, "<i8", frames), _numbers(readings, "<i8", frames)
        parts.append(Found(own, numbers, decode(content, frames)))
    if tail:
        own, numbers = (np.array([row[at] for row in tail], np.int64) for at in (0, 1))
        parts.append(Found(own, numbers, decode(b"".join(row[2] or b"" for row in tail), len(tail))))
    found = Found(*map(np.concatenate, zip(*parts, strict=True)))
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
