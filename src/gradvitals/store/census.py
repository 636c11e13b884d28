"""How much a run file holds, counted without loading it: for a reader that has to stay small."""

from __future__ import annotations

import sqlite3

ENOUGH = 1 << 20
"""Records counted at the most; whoever asks has a lower limit than this."""

_QUERIES = {
    (
        "findings",
        "finding_bytes",
    ): "SELECT count(*), sum(size) FROM (SELECT length(content) AS size FROM finding LIMIT ?)",
    ("actions", "action_bytes"): "SELECT count(*), sum(size) FROM (SELECT length(content) AS size FROM action LIMIT ?)",
    ("layouts", "layout_bytes"): "SELECT count(*), sum(size) FROM (SELECT length(tensors) + length(layers) "
    "+ length(heads) + length(details) AS size FROM layout LIMIT ?)",
    (
        "meta",
        "meta_bytes",
    ): "SELECT count(*), sum(size) FROM (SELECT length(key) + length(value) AS size FROM meta LIMIT ?)",
    (
        "groups",
        "group_bytes",
    ): "SELECT count(*), sum(size) FROM (SELECT length(columns) AS size FROM frame_group LIMIT ?)",
}


def take_census(db: sqlite3.Connection) -> dict[str, int]:
    """Numbers of records and the length of their texts; ``readings`` are the most that any kind of row has."""
    found: dict[str, int] = {}
    for (number, size), query in _QUERIES.items():
        counted, length = db.execute(query, (ENOUGH,)).fetchone()
        found[number], found[size] = int(counted or 0), int(length or 0)
    # The bytes that are there, not the number of frames a stranger's file claims.
    chunks = (
        "SELECT kind, sum(length(steps)) / 8 FROM chunk JOIN frame_group ON frame_group.id = group_id "
        "GROUP BY kind, source"
    )
    tail = "SELECT count(*) FROM tail"
    found["segments"] = int(db.execute("SELECT count(*) FROM segment").fetchone()[0])
    most = max((int(count or 0) for _, count in db.execute(chunks).fetchall()), default=0)
    found["readings"] = most + int(db.execute(tail).fetchone()[0])
    return found
