"""Numbers, durations and names as short text that is safe to print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradvitals import format
from gradvitals.format import clean as clean
from gradvitals.types import FloatArray

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"


def number(value: Any, digits: int = 3, *, missing: str = "-") -> str:
    """Returns a number in a few characters; `missing` for NaN and for what is not a number.

    JSON keeps NaN and infinity as strings, so these count as numbers too.

    >>> number(0.012345), number(234567.8), number(12000), number(float("nan")), number("inf")
    ('0.0123', '234,568', '12,000', '-', 'Inf')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    value = as_float(value)
    if math.isinf(value):
        return "Inf" if value > 0 else "-Inf"
    return format.number(value, digits, missing=missing)


def interval(value: float, low: float, high: float) -> str:
    """Returns a value and its 95% interval.

    >>> interval(1.5, 1.0, 2.0)
    '1.5 (1 to 2)'
    """
    if math.isnan(value) or (math.isnan(low) and math.isnan(high)):
        return number(value)
    return f"{number(value)} ({number(low)} to {number(high)})"


def percent(share: float, digits: int = 3) -> str:
    """Returns a share as a percentage.

    >>> percent(0.125), percent(float("nan"))
    ('12.5%', '-')
    """
    return "-" if math.isnan(share) else format.percent(share, digits)


def duration(seconds: float) -> str:
    """Returns a length of time in its two largest units.

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


def ago(seconds: float) -> str:
    """Returns how long ago something was, in its largest unit.

    >>> ago(20), ago(3700), ago(200_000)
    ('20 s', '1 h', '2 d')
    """
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds:.0f} s"


def plural(count: int, noun: str) -> str:
    """Returns a count and its noun.

    >>> plural(1, "step"), plural(1200, "step")
    ('1 step', '1,200 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def cut(text: str, limit: int = 120) -> str:
    """Returns the text in at most `limit` characters, without its middle if it is longer.

    >>> cut("blocks.0.attn.qkv.weight", 13)
    'blocks…weight'
    """
    if len(text) <= limit:
        return text
    kept = limit - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


def capitalized(text: str) -> str:
    """Returns the text with a capital first letter and the rest as it is."""
    return text[:1].upper() + text[1:]


def fix_snippet(fix: str | None) -> str:
    """Returns the lines to paste of a fix; empty if it has none."""
    return str(getattr(fix, "snippet", None) or "")


def as_float(value: Any) -> float:
    """Returns a number from a JSON record: "nan" and "inf" are strings there, and what is no number becomes NaN.

    >>> as_float("inf"), as_float(None), as_float("three")
    (inf, nan, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def sparkline(values: Sequence[float] | FloatArray, width: int, *, robust: bool = False, blocks: str = BLOCKS) -> str:
    """Returns a series as at most `width` characters that keep its spikes.

    Each character stands for one value or, if there are more values than characters, for the value of its share that
    lies farthest from the median. A positive series that spans more than a factor of ten is drawn by its logarithm.
    NaN leaves a gap; infinity shows as ``!``.

    Args:
        values: The series, in order.
        width: The most characters to use.
        robust: Scale to the middle 96% of the values, so that one spike does not flatten the rest.
        blocks: Characters from low to high.

    >>> sparkline([1, 2, 3, 4, 5, 6, 7, 8], width=8)
    '▁▂▃▄▅▆▇█'
    >>> sparkline([0, 0, 0, 9, 0, 0, 0, 0], width=4)
    '▁█▁▁'
    >>> sparkline([1, 10, 100, 1000], width=4)
    '▁▃▆█'
    """
    series = np.asarray(values, dtype=np.float64)
    if width < 1 or series.size == 0:
        return ""
    finite = series[np.isfinite(series)]
    if finite.size and finite.min() > 0 and finite.max() > 10 * finite.min():
        series = np.log(series, where=np.isfinite(series), out=series.copy())
        finite = series[np.isfinite(series)]
    median = float(np.median(finite)) if finite.size else 0.0
    low, high = 0.0, 0.0
    if finite.size:
        low, high = np.quantile(finite, [0.02, 0.98]) if robust else (finite.min(), finite.max())

    def character(part: FloatArray) -> str:
        if np.isinf(part).any():
            return "!"
        present = part[~np.isnan(part)]
        if not present.size:
            return " "
        point = float(present[np.abs(present - median).argmax()])
        if high <= low:
            return blocks[len(blocks) // 2 - 1] if point == low else blocks[-1] if point > high else blocks[0]
        share = min(max((point - low) / (high - low), 0.0), 1.0)
        return blocks[min(int(share * len(blocks)), len(blocks) - 1)]

    return "".join(character(part) for part in np.array_split(series, min(width, series.size)))
