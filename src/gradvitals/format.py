"""Numbers and names as people read them: what findings, reports, advice and alerts share. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def number(value: Any, digits: int = 3, *, missing: str = "NaN") -> str:
    """Returns a number with a few significant digits and thousands separators; anything else as its `str`.

    >>> [number(value) for value in (0.000123, 41.26, 12345.6, 3, True, float("nan"))]
    ['1.23e-04', '41.3', '12,346', '3', 'True', 'NaN']
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return missing
    if math.isinf(value):
        return str(value)
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e6):
        return f"{value:.{digits - 1}e}"
    return f"{value:,.0f}" if abs(value) >= 10 ** min(digits, 3) - 0.5 else f"{value:.{digits}g}"


def percent(share: float, digits: int = 3) -> str:
    """Returns a share as a percentage.

    >>> percent(0.2853), percent(0.95), percent(1.0, 2), percent(1e-6)
    ('28.5%', '95%', '100%', '0.0001%')
    """
    value = 100 * share
    if 1e-6 < abs(value) < 1e-3:
        return f"{value:.{digits - 1 - math.floor(math.log10(abs(value)))}f}".rstrip("0") + "%"
    return f"{number(value, digits)}%"


def listed(names: Iterable[object], most: int = 8) -> str:
    """Returns the first names, and how many more there are.

    >>> listed("abc", 2), listed([3, 4])
    ('a, b and 1 more', '3, 4')
    """
    texts = list(map(str, names))
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def clean(text: str) -> str:
    r"""Returns the text with everything that could move a cursor or break a line shown as its escape.

    >>> clean("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
