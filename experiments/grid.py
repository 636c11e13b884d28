"""Searches a grid, one or two steps wide around the best, until the best lies inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product

Point = tuple[int, ...]
"""A place in the grid: steps from the start in each direction."""


def best_point(tried: Mapping[Point, float]) -> Point:
    """Returns the point with the lowest loss; NaN is worse than any."""
    return min(tried, key=lambda point: math.inf if math.isnan(tried[point]) else tried[point])


def untried(tried: Mapping[Point, float], size: int, allowed: Callable[[Point], bool] = lambda _: True) -> list[Point]:
    """Returns the points around the best that are to be tried next; none once it lies inside.

    >>> untried({}, 1)
    [(-1,), (0,), (1,)]
    >>> untried({(-1,): 2.0, (0,): 1.0, (1,): 0.5}, 1), untried({(-1,): 2.0, (0,): 1.0, (1,): 1.5}, 1)
    ([(2,)], [])
    """
    middle = best_point(tried) if tried else (0,) * size
    around = (tuple(map(sum, zip(middle, step, strict=True))) for step in product((-1, 0, 1), repeat=size))
    return [point for point in around if point not in tried and allowed(point)]
