"""Which processes wrote a run, one after the other, and the records they left: findings and actions."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from gradvitals.store.schema import check_nesting
from gradvitals.types import Action, Finding

LAST_INSTANT = 2e11
"""A moment after which no calendar goes on."""

Record = TypeVar("Record", Finding, Action)


class Segment(NamedTuple):
    """What one process wrote of a run: from its start, or from where a resumed one went on."""

    first_step: int
    started_at: float
    heartbeat: float
    """When it was last heard of."""
    finished_at: float | None
    """None where it was not closed."""
    hidden: tuple[Finding, ...]
    """What it found in steps that a later segment did again."""


def read_segments(db: sqlite3.Connection, cutoffs: Mapping[int, int]) -> tuple[Segment, ...]:
    """All of them; `cutoffs` has for each the first step that a later one did again."""
    hidden: dict[int, list[str]] = {}
    for segment, first, text in db.execute("SELECT segment, first_step, content FROM finding ORDER BY id").fetchall():
        if first >= cutoffs[segment]:
            hidden.setdefault(segment, []).append(text)
    query = "SELECT id, first_step, started_at, heartbeat, finished_at FROM segment ORDER BY id"
    return tuple(
        Segment(
            int(first),
            instant(started),
            instant(heartbeat),
            None if finished is None else instant(finished),
            tuple(parsed(Finding, hidden.get(number, ()))),
        )
        for number, first, started, heartbeat, finished in db.execute(query).fetchall()
    )


def instant(value: object) -> float:
    """A time in seconds since the epoch, as it stands in a file that anybody may have written.

    Raises:
        TypeError: If it is none.
    """
    if not isinstance(value, int | float) or not abs(value) < LAST_INSTANT:
        raise TypeError(f"a time is {str(value)[:80]!r}; expected seconds since the epoch")
    return float(value)


def parsed(record: type[Record], texts: Iterable[str]) -> list[Record]:
    """Findings or actions as they were kept. What a later minor version knows more of is left out."""
    fields = record.__dataclass_fields__
    texts = list(texts)
    check_nesting(texts)
    return [record.from_json({k: v for k, v in json.loads(text).items() if k in fields}) for text in texts]
