"""Opening a run file, for reading or for writing: what is there, which SQLite journal suits its disk, who writes it."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sqlite3
import warnings
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from gradvitals.errors import RunNotFoundError
from gradvitals.format import listed
from gradvitals.store import schema

SHARED_FILESYSTEMS = (
    "nfs", "lustre", "gpfs", "beegfs", "cifs", "smb", "fuse", "ceph", "glusterfs", "afs", "9p", "panfs", "wekafs",
)  # fmt: skip
"""Prefixes of filesystem types without the shared memory that a write-ahead log needs."""

WAL_BYTES = 4 << 20
"""The log is folded back into the file at about this size."""

BUSY_SECONDS = 2.0
"""Longest time a connection waits for another one that holds the file."""


def filesystem_type(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Returns the type of the filesystem that holds `path`, or None if the system does not say.

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


def find_run_file(path: str | os.PathLike[str]) -> Path:
    """The file of the run at `path`, which may be its folder or the file itself.

    Raises:
        RunNotFoundError: If there is none; it names the runs below the folder, if there are any.
    """
    path = Path(path)
    if path.is_file():
        return path
    if (path / "journal.json").exists() and os.access(path, os.W_OK):
        _recover(path)
    file = path / schema.FILE_NAME
    if file.is_file():
        return file

    if below := _runs_in(path):
        raise RunNotFoundError(f"{path} is not a run, but has runs in it: {listed(below)}")
    why = f"the folder has no {schema.FILE_NAME}" if path.exists() else "no such folder"
    beside = _runs_in(path.parent)
    instead = f"; runs in {path.parent}: {listed(beside)}" if beside else ""
    if close := get_close_matches(path.name, beside, n=1):
        instead = f"; did you mean {path.parent / close[0]}?"
    raise RunNotFoundError(f"there is no run at {path}: {why}{instead}")


def is_run_file(path: Path) -> bool:
    """Returns whether a file is a run: another tool may keep something else under the same name."""
    try:
        with path.open("rb") as file:
            header = file.read(72)
    except OSError:
        return False
    return header.startswith(b"SQLite format 3\0") and int.from_bytes(header[68:72], "big") == schema.APPLICATION_ID


def _runs_in(folder: Path) -> list[str]:
    return sorted(found.parent.name for found in folder.glob(f"*/{schema.FILE_NAME}") if is_run_file(found))


def _recover(path: Path) -> None:
    """Write what a process that was killed, and its worker with it, left in the journal."""
    from gradvitals.worker.recover import recover

    try:
        recover(path)
    except Exception as error:
        warnings.warn(f"the last steps of {path} could not be recovered from its journal: {error}", stacklevel=4)


def connect(path: Path) -> sqlite3.Connection:
    """A connection that can only read, to a file that was checked to be a run of the current format."""
    with schema.translated(path):
        connection = _connect_read_only(path)
        try:
            schema.check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def _connect_read_only(path: Path) -> sqlite3.Connection:
    connection = _connect_uri(path, "mode=ro")
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return connection
    except sqlite3.Error as error:
        connection.close()
        name = getattr(error, "sqlite_errorname", "")
        # A log beside the file needs an index that SQLite cannot make in a folder nobody may write to.
        if not name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")) or not os.access(path, os.R_OK):
            raise
    log = path.with_name(path.name + "-wal")
    if log.exists() and log.stat().st_size:
        warnings.warn(
            f"{path} was not closed and its folder cannot be written to, so its last moments, still in {log.name}, "
            "are not shown; copy the folder to where you may write to see them",
            stacklevel=4,
        )
    return _connect_uri(path, "immutable=1")


def _connect_uri(path: Path, options: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{path.resolve().as_uri()}?{options}",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, schema.MAX_BLOB_BYTES)
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA query_only = ON")
    return connection


# -- whether the process that writes a run still exists, as far as this machine knows --------------------------------


def pid_space() -> str | None:
    """Names where process ids mean the same: one machine since it was started, and one container on it.

    None if that is not known. Containers may share the name of a machine but not its process ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        container = Path("/proc/self/ns/pid").readlink()
        return hashlib.sha256(f"{boot} {container}".encode()).hexdigest()[:16]
    except (OSError, UnicodeError):
        return None


def here() -> dict[str, Any]:
    """Returns the machine and namespace of this process, for `is_gone`."""
    return {"pid_space": pid_space(), "hostname": socket.gethostname()}


def is_gone(meta: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a run last, by what the run says of it, is known to have ended.

    The name of the machine must be the same too: copies of one that was running share its `pid_space`.
    """
    space = meta.get("pid_space")
    known = space is not None and space == pid_space() and meta["hostname"] == socket.gethostname()
    return known and not is_alive(meta["pid"])


def is_alive(pid: int) -> bool:
    """Whether there is a process of this id, and not only what is left of one until its parent asks for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, TypeError):
        return True  # there, and somebody else's; or not to be known
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")
