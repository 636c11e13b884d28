"""The tables of a run file, and its version."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gradvitals.errors import GradvitalsError, RunError, RunFormatError

FILE_NAME = "run.db"
APPLICATION_ID = 0x4756524E
"""In the header of every run file ("GVRN"), so that any other SQLite file is recognised as foreign."""

SCHEMA_VERSION = 1

ROW_BITS = 20
"""A block's id is ``chunk id << 20 | row``: appended in order, found without an index."""
MAX_ROWS = 1 << ROW_BITS

MAX_BLOB_BYTES = 64 << 20
"""Nothing a run holds is larger; a reader refuses to load more in one piece."""

DDL = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE segment (
    id INTEGER PRIMARY KEY, first_step INTEGER NOT NULL, layout INTEGER NOT NULL,
    started_at REAL NOT NULL, heartbeat REAL NOT NULL, finished_at REAL,
    hostname TEXT NOT NULL, pid INTEGER NOT NULL, dropped INTEGER NOT NULL
);
CREATE TABLE layout (
    id INTEGER PRIMARY KEY, tensors TEXT NOT NULL, layers TEXT NOT NULL, heads TEXT NOT NULL, details TEXT NOT NULL
);
CREATE TABLE frame_group (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, layout INTEGER NOT NULL,
    kind TEXT NOT NULL, source TEXT, stage TEXT NOT NULL, columns TEXT NOT NULL, num_rows INTEGER NOT NULL
);
CREATE TABLE tail (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, reading INTEGER NOT NULL,
    step INTEGER NOT NULL, time REAL, batch_size REAL, data BLOB NOT NULL
);
CREATE INDEX tail_by_group ON tail (group_id);
CREATE TABLE chunk (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL, num_frames INTEGER NOT NULL,
    first_step INTEGER NOT NULL, last_step INTEGER NOT NULL, last_reading INTEGER NOT NULL,
    steps BLOB NOT NULL, readings BLOB NOT NULL, times BLOB NOT NULL, batch_sizes BLOB NOT NULL
);
CREATE INDEX chunk_by_group ON chunk (group_id);
CREATE TABLE block (id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE finding (
    id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE, segment INTEGER NOT NULL,
    first_step INTEGER NOT NULL, content TEXT NOT NULL
);
CREATE TABLE action (id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, step INTEGER NOT NULL, content TEXT NOT NULL);
"""


def create(connection: sqlite3.Connection) -> None:
    """Make the tables in an empty file. The caller holds the transaction."""
    for statement in DDL.split(";"):
        if statement.strip():
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def is_blank(connection: sqlite3.Connection) -> bool:
    """Whether the file has no tables at all, as one that was only just created."""
    has_tables = connection.execute("SELECT 1 FROM sqlite_master").fetchone() is not None
    return not has_tables and _pragma(connection, "application_id") == 0


def check(connection: sqlite3.Connection, path: Path) -> None:
    """Raise unless the file is a run of the format that is read here."""
    if is_blank(connection):
        raise RunFormatError(f"{path} is empty: the run was started but nothing was written to it")
    if _pragma(connection, "application_id") != APPLICATION_ID:
        raise RunFormatError(f"{path} is a SQLite file, but not a gradvitals run")
    version = _pragma(connection, "user_version")
    if version > SCHEMA_VERSION:
        raise RunFormatError(
            f"{path} has format version {version}, and this gradvitals reads {SCHEMA_VERSION}; "
            f"install a newer gradvitals that reads version {version}"
        )
    if version != SCHEMA_VERSION:
        raise RunFormatError(f"{path} has format version {version}; expected {SCHEMA_VERSION}")


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what SQLite, or decoding the content of a run, raises into a RunError that names the file."""
    try:
        yield
    except GradvitalsError:
        raise
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        if name == "SQLITE_NOTADB":
            raise RunFormatError(f"{path} is not a gradvitals run (it is not a SQLite file)") from error
        if name.startswith("SQLITE_CORRUPT"):
            raise RunFormatError(f"{path} is damaged or was cut short ({error})") from error
        if isinstance(error, sqlite3.DataError) or name == "SQLITE_TOOBIG":
            raise RunFormatError(f"{path} is damaged: it declares more data than a run can hold ({error})") from error
        raise RunError(f"{path} could not be read ({error})") from error
    except (TypeError, ValueError, KeyError, OverflowError, AttributeError, RecursionError) as error:
        raise RunFormatError(f"{path} is damaged: its content does not fit its own description ({error})") from error
