"""What is imported: rows of named cells out of a file that some other program wrote, and what was wrong with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gradvitals.errors import GradvitalsError

MAX_BYTES = 2 << 30
"""Of a source, all its files together."""
MAX_ROWS = 5_000_000
MAX_COLUMNS = 20_000


class ImportSourceError(GradvitalsError):
    """A source cannot be read, or not without being told more."""


class Row(NamedTuple):
    """One row: its step and time where the format has a place for them, and its cells by the name of their column."""

    cells: Mapping[str, Any]
    step: int | None = None
    time: float | None = None


@dataclass
class Notes:
    """What was met while reading."""

    unreadable: int = 0
    """Rows that could not be read."""
    cut_off: bool = False
    """Whether the last row is not whole: the program that wrote it was killed, or still writes."""
    others: list[str] = field(default_factory=list)

    def words(self) -> list[str]:
        """All of it, in sentences."""
        words = list(self.others)
        if self.unreadable:
            rows = "1 row" if self.unreadable == 1 else f"{self.unreadable:,} rows"
            words.append(f"{rows} could not be read and {'is' if self.unreadable == 1 else 'are'} left out")
        if self.cut_off:
            words.append("the file ends in the middle of a row; everything before it was read")
        return words


@dataclass(frozen=True)
class Source:
    """A file or folder, and how to go through its rows, as often as needed."""

    kind: str
    path: Path
    rows: Callable[[Notes], Iterator[Row]]


def number(cell: Any) -> float | None:
    """A cell as a number; None where it holds none. NaN and infinity are numbers: they may be the news.

    >>> number("1e-3"), number("nan") is None, number(""), number([1.0])
    (0.001, False, None, None)
    """
    if isinstance(cell, bool) or not isinstance(cell, (int, float, str)):
        return None
    try:
        return float(cell)
    except (ValueError, OverflowError):
        return None


def whole(cell: Any) -> int | None:
    """A cell as a step: a whole number that a run can hold, not below 0."""
    value = number(cell)
    if value is None or not math.isfinite(value) or value != int(value) or not 0 <= value < 1 << 53:
        return None
    return int(value)


def decoded(contents: Iterable[bytes], message_class: Any, notes: Notes) -> Iterator[Any]:
    """Messages of protobuf; what is none is counted."""
    from google.protobuf.message import DecodeError

    for content in contents:
        try:
            yield message_class.FromString(content)
        except DecodeError:
            notes.unreadable += 1
