"""How much of a run the page is ready to hold, so that a file from a stranger cannot use up the memory or the time."""

from __future__ import annotations

import sqlite3

from gradvitals.errors import RunError
from gradvitals.show.text import clean
from gradvitals.store.reader import Run

MAX_RECORDS = 20_000
"""Findings, and actions, of one run."""
MAX_RECORD_BYTES = 8 << 20
MAX_LAYOUT_BYTES = 16 << 20
MAX_META_BYTES = 4 << 20
MAX_GROUPS = 20_000
MAX_GROUP_BYTES = 16 << 20
MAX_SEGMENTS = 5_000
MAX_SEGMENT_BYTES = 4 << 20
MAX_TAIL_BYTES = 64 << 20
MAX_READINGS = 5_000_000
"""Readings of one kind: a series is read whole before it is cut into buckets."""
MAX_NUMBERS = 4_000_000
"""Rows × steps of one table, as long as it is held in memory."""

NAME = 300
"""Characters of a name that are shown."""
TEXT = 2_000
"""Characters of a sentence that are shown."""


def check_size(run: Run) -> None:
    """Refuse a run that would take too much memory to show.

    Raises:
        RunError: Naming what there is too much of.
    """
    census = run.census()
    for name, most in (
        ("findings", MAX_RECORDS),
        ("finding_bytes", MAX_RECORD_BYTES),
        ("actions", MAX_RECORDS),
        ("action_bytes", MAX_RECORD_BYTES),
        ("layout_bytes", MAX_LAYOUT_BYTES),
        ("meta_bytes", MAX_META_BYTES),
        ("groups", MAX_GROUPS),
        ("group_bytes", MAX_GROUP_BYTES),
        ("segments", MAX_SEGMENTS),
        ("segment_bytes", MAX_SEGMENT_BYTES),
        ("tail_bytes", MAX_TAIL_BYTES),
        ("readings", MAX_READINGS),
    ):
        found = census[name]
        if found > most:
            what = name.replace("_", " ")
            raise RunError(f"this run is too large for the page: {found:,} {what}, and it shows up to {most:,}")


def may_pass(error: BaseException) -> bool:
    """Whether what could not be read now may be read later, though nobody changes the file.

    It is locked, or there are too many files open, or no memory is left; else the content is at fault.
    """
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, sqlite3.OperationalError | OSError | MemoryError):
            return True
        found = found.__cause__
    return False


def short(text: str, most: int = NAME) -> str:
    """A text as it is shown: control characters as escapes, its middle left out where it is very long."""
    if len(text) > most:
        text = f"{text[: most - 60]} … {text[-50:]}"
    return clean(text)
