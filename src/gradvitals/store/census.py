"""How much a run file holds, counted without keeping it: for a reader that has to stay small."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from gradvitals.errors import RunError

LIMITS = {
    "findings": 100_000, "finding_bytes": 32 << 20,
    "actions": 100_000, "action_bytes": 32 << 20,
    "layouts": 1_000, "layout_bytes": 32 << 20,
    "meta": 10_000, "meta_bytes": 8 << 20,
    "groups": 20_000, "group_bytes": 32 << 20,
    "segments": 20_000, "segment_bytes": 16 << 20,
}  # fmt: skip
"""The most that a run may hold in words. They are read whole, and take up to some 12 times as much in memory."""

ENOUGH = 1 << 20
"""Records counted at the most; whoever asks has a lower limit than this."""

_RECORDS = {
    ("findings", "finding_bytes", "finding"): ("segment", "first_step", "content"),
    ("actions", "action_bytes", "action"): ("segment", "step", "content"),
    ("layouts", "layout_bytes", "layout"): ("tensors", "layers", "heads", "details"),
    ("meta", "meta_bytes", "meta"): ("key", "value"),
    ("groups", "group_bytes", "frame_group"): ("segment", "layout", "kind", "source", "stage", "columns", "num_rows"),
    ("segments", "segment_bytes", "segment"): (
        "first_step", "layout", "started_at", "heartbeat", "finished_at", "hostname", "pid", "dropped",
    ),
}  # fmt: skip
_TAIL = {("tail", "tail_bytes", "tail"): ("reading", "step", "time", "batch_size")}
"""What a count and a sum of bytes are called, the table, and every column of it that is fetched whole."""

_FRAMES = ("steps", "readings", "times", "batch_sizes")
_FEWEST = 16
"""Readings that a chunk counts for at the least: it takes memory even where it is empty."""


def check_words(db: sqlite3.Connection, path: Path) -> None:
    """Refuse a file whose words alone would fill the memory, before any of them is loaded.

    Raises:
        RunError: Naming what there is too much of.
    """
    for name, found in _counted(db, _RECORDS.items()).items():
        if found > LIMITS[name]:
            what = name.replace("_", " ")
            raise RunError(f"{path} is too large to be read: {found:,} {what}, and a run has up to {LIMITS[name]:,}")


def take_census(db: sqlite3.Connection) -> dict[str, int]:
    """Numbers of records and the bytes they hold; ``readings`` are the most that any kind of row has."""
    found = _counted(db, (*_RECORDS.items(), *_TAIL.items()))
    found["readings"] = found["tail"] + max(_chunked(db).values(), default=0)
    return found


def _counted(db: sqlite3.Connection, tables: Iterable[tuple[tuple[str, str, str], tuple[str, ...]]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for (number, size, table), columns in tables:
        # Of a text, length() counts what comes before the first NUL: only as bytes does all of it count.
        held = " + ".join(f"coalesce(length(CAST({column} AS BLOB)), 0)" for column in columns)
        query = f"SELECT count(*), sum(size) FROM (SELECT {held} AS size FROM {table} LIMIT ?)"
        counted, length = db.execute(query, (ENOUGH,)).fetchone()
        found[number], found[size] = int(counted or 0), int(length or 0)
    return found


def _chunked(db: sqlite3.Connection) -> dict[tuple[str, str], int]:
    """Readings in chunks, for each kind and source: by the bytes that are there, not by what a stranger's file claims.

    The length of a blob is known without reading it, as long as nothing is sorted; what is no blob is no chunk.
    """
    groups = {
        number: (str(kind), str(source))
        for number, kind, source in db.execute(
            "SELECT id, substr(kind, 1, 64), substr(source, 1, 64) FROM frame_group LIMIT ?", (ENOUGH,)
        )
    }
    held = " + ".join(f"iif(typeof({column}) = 'blob', length({column}), {1 << 40})" for column in _FRAMES)
    found: dict[tuple[str, str], int] = {}
    for group, size in db.execute(f"SELECT iif(typeof(group_id) = 'integer', group_id, 0), {held} FROM chunk"):
        where = groups.get(group, ("", ""))
        found[where] = found.get(where, 0) + max(size // (8 * len(_FRAMES)), _FEWEST)
    return found
