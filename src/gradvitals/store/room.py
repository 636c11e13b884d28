"""How many words a run may still take: a writer stops before readers would refuse the file for its size."""

from __future__ import annotations

import sqlite3

from gradvitals.store.census import LIMITS

SHARE = 0.9
"""Of what readers take, left to a writer; what it counts and what they count need not agree to the byte."""


class Room:
    """Counts the findings, or the actions, of one run.

    Args:
        db: The run.
        table: ``finding`` or ``action``.
    """

    def __init__(self, db: sqlite3.Connection, table: str) -> None:
        self._most = int(SHARE * LIMITS[f"{table}s"]), int(SHARE * LIMITS[f"{table}_bytes"])
        query = f"SELECT count(*), coalesce(sum(length(CAST(content AS BLOB))), 0) FROM {table}"
        self._count, self._bytes = db.execute(query).fetchone()

    def take(self, content: str, instead_of: str | None = None) -> bool:
        """Whether a record still fits, alone or in place of another; it counts from here on."""
        more = len(content.encode()) - (0 if instead_of is None else len(instead_of.encode()))
        count, held = self._count + (instead_of is None), self._bytes + more
        if more > 0 and (count > self._most[0] or held > self._most[1]):
            return False
        self._count, self._bytes = count, held
        return True
