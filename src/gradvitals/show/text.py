"""Numbers and names as text that is safe to print."""

from __future__ import annotations

import math


def clean(text: str) -> str:
    r"""The text with everything that could move a cursor or break a line shown as its escape.

    >>> clean("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def number(value: float, digits: int = 3) -> str:
    """A number in few characters; a dash where there is none.

    >>> number(0.012345), number(1234567.0), number(float("nan"))
    ('0.0123', '1.23e+06', '-')
    """
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    if 1000 <= abs(value) < 100_000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def interval(value: float, low: float, high: float) -> str:
    """A value and its 95 % interval.

    >>> interval(1.5, 1.0, 2.0)
    '1.5 (1 to 2)'
    """
    if math.isnan(value) or (math.isnan(low) and math.isnan(high)):
        return number(value)
    return f"{number(value)} ({number(low)} to {number(high)})"


def duration(seconds: float) -> str:
    """A length of time in its two largest units.

    >>> duration(3.21), duration(75), duration(7380)
    ('3.2 s', '1 min 15 s', '2 h 3 min')
    """
    if not math.isfinite(seconds) or seconds < 0:
        return "-"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


def cut(text: str, most: int = 120) -> str:
    """A text of any length in at most so many characters, its middle left out.

    >>> cut("blocks.0.attn.qkv.weight", 13)
    'blocks…weight'
    """
    if len(text) <= most:
        return text
    kept = most - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
