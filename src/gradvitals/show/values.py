"""Numbers out of a plain record, which may have been through JSON, and the row of facts that a section begins with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from gradvitals.show.html import Html, tag
from gradvitals.show.text import number


def as_float(value: Any) -> float:
    """A number from a record: JSON keeps `nan` and `inf` as strings; what is missing or no number is nan.

    >>> as_float("inf"), as_float(None), as_float("three")
    (inf, nan, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def as_floats(values: Iterable[Any] | None) -> list[float]:
    """Each as `as_float`; none where there is no list."""
    return [as_float(value) for value in values] if isinstance(values, (list, tuple)) else []


def facts(rows: Iterable[tuple[str, str, str]]) -> Html | None:
    """Name, value and a word more, each in its own small box; None where there are none."""
    boxes = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", more) if more else None))
        for name, value, more in rows
    ]
    return tag("dl", *boxes, class_="facts") if boxes else None


def span(row: Mapping[str, Any], low: str, high: str) -> str:
    """The two ends of an interval in words; empty where there is none."""
    ends = (as_float(row.get(low)), as_float(row.get(high)))
    return "" if all(math.isnan(end) for end in ends) else f"{number(ends[0])} to {number(ends[1])}"


def known(value: Any) -> str:
    """A number, or that it cannot be told."""
    return "cannot tell" if math.isnan(as_float(value)) else number(as_float(value))


def percent(value: Any) -> str:
    """A share as a percentage.

    >>> percent(0.125), percent(None)
    ('12.5 %', '-')
    """
    share = as_float(value)
    return "-" if math.isnan(share) else f"{100 * share:.3g} %"
