"""Which SQLite journal suits the disk a run is on."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

SHARED_FILESYSTEMS = (
    "nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "fuse", "ceph", "glusterfs", "afs", "9p", "panfs", "wekafs",
)  # fmt: skip
"""Prefixes of filesystem types without the shared memory that a write-ahead log needs."""

WAL_BYTES = 4 << 20
"""The log is folded back into the file at about this size."""

BUSY_SECONDS = 2.0
"""How long a connection waits for another one that holds the file."""


def filesystem_type(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Type of the filesystem that holds `path`, or None where the system does not tell.

    Of all mount points above the path the longest one counts, and of equal ones the last mounted.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    path = path.resolve()
    found: tuple[int, str] | None = None
    for line in lines:
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[1]))
        if (path == point or point in path.parents) and (found is None or len(point.parts) >= found[0]):
            found = (len(point.parts), fields[2])
    return found[1] if found else None


def is_shared(kind: str | None) -> bool:
    """Whether a filesystem type is one that other machines may write to as well."""
    return kind is not None and kind.lower().startswith(SHARED_FILESYSTEMS)


def set_journal(connection: sqlite3.Connection, path: Path) -> str:
    """Choose the journal for a writing connection and return its name, ``wal`` or ``truncate``.

    A write-ahead log lets readers and the writer work at the same time. Where it cannot work the rollback
    journal is used: slower and one at a time, but it needs no more than file locks.
    """
    mode = ""
    if not is_shared(filesystem_type(path)):
        mode = str(connection.execute("PRAGMA journal_mode = wal").fetchone()[0])
    if mode == "wal":
        page_size = int(connection.execute("PRAGMA page_size").fetchone()[0])
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {WAL_BYTES // page_size}")
        connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        return mode
    mode = str(connection.execute("PRAGMA journal_mode = truncate").fetchone()[0])
    connection.execute("PRAGMA synchronous = FULL")
    return mode
