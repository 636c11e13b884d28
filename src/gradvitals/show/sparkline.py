"""A series as one line of characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradvitals.types import FloatArray

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*%#"


def sparkline(values: Sequence[float] | FloatArray, width: int, *, robust: bool = False, blocks: str = BLOCKS) -> str:
    """A series as at most `width` characters, its spikes kept.

    Each character stands for one value, or, when there are more values than characters, for the value of its
    share that lies farthest from the middle of the series. A positive series that spans more than a factor of ten is
    drawn by its logarithm, so that a spike does not flatten everything else. Missing values (NaN) leave a gap;
    infinite ones show as `!`.

    Args:
        values: The series, in order.
        width: Most characters to use.
        robust: Take the height of the line from the middle 96 % of the values, so that one spike does not
            flatten everything else.
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
    middle = float(np.median(finite)) if finite.size else 0.0
    parts = np.array_split(series, min(width, series.size))
    points = np.array([_stand_in(part, middle) for part in parts])
    low, high = (0.0, 0.0)
    if finite.size:
        low, high = np.quantile(finite, [0.02, 0.98]) if robust else (finite.min(), finite.max())
    return "".join(_character(float(point), float(low), float(high), blocks) for point in points)


def _stand_in(part: FloatArray, middle: float) -> float:
    if np.isinf(part).any():
        return float("inf")
    present = part[~np.isnan(part)]
    return float(present[np.abs(present - middle).argmax()]) if present.size else float("nan")


def _character(point: float, low: float, high: float, blocks: str) -> str:
    if np.isnan(point):
        return " "
    if np.isinf(point):
        return "!"
    if high <= low:
        if point == low:
            return blocks[len(blocks) // 2 - 1]
        return blocks[-1] if point > high else blocks[0]
    share = min(max((point - low) / (high - low), 0.0), 1.0)
    return blocks[min(int(share * len(blocks)), len(blocks) - 1)]
