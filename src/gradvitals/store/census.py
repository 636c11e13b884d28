"""How much a run file holds, counted without keeping it: for a reader that has to stay small."""

from __future__ import annotations

import sqlite3

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
    ("tail", "tail_bytes", "tail"): ("reading", "step", "time", "batch_size"),
}  # fmt: skip
"""What a count and a sum of bytes are called, the table, and every column of it that is fetched whole."""

_FRAMES = ("steps", "readings", "times", "batch_sizes")
_FEWEST = 16
"""Readings that a chunk counts for at the least: it takes memory even where it is empty."""


def take_census(db: sqlite3.Connection) -> dict[str, int]:
    """Numbers of records and the bytes they hold; ``readings`` are the most that any kind of row has."""
    found: dict[str, int] = {}
    for (number, size, table), columns in _RECORDS.items():
        # Of a text, length() counts what comes before the first NUL: only as bytes does all of it count.
        held = " + ".join(f"coalesce(length(CAST({column} AS BLOB)), 0)" for column in columns)
        query = f"SELECT count(*), sum(size) FROM (SELECT {held} AS size FROM {table} LIMIT ?)"
        counted, length = db.execute(query, (ENOUGH,)).fetchone()
        found[number], found[size] = int(counted or 0), int(length or 0)
    found["readings"] = found["tail"] + max(_chunked(db).values(), default=0)
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
