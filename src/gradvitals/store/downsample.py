"""Fewer points that still show every peak."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def min_max_buckets(
    steps: ArrayLike, values: ArrayLike, buckets: int
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Cut a series into at most `buckets` runs of neighbours and keep the lowest and highest value of each.

    Args:
        steps: Steps in order.
        values: One number a step. NaN counts only where a bucket has nothing else.
        buckets: The most points wanted, 1 or more.

    Returns:
        The first step, the lowest and the highest value of each bucket.

    Example:
        >>> steps, low, high = min_max_buckets([0, 1, 2, 3], [5.0, 1.0, float("nan"), 2.0], 2)
        >>> steps.tolist(), low.tolist(), high.tolist()
        ([0, 2], [1.0, 2.0], [5.0, 2.0])
    """
    step_array: NDArray[np.int64] = np.asarray(steps, dtype=np.int64)
    value_array: NDArray[np.float64] = np.asarray(values, dtype=np.float64)
    if step_array.shape != value_array.shape or step_array.ndim != 1:
        raise ValueError(f"steps have shape {step_array.shape} and values {value_array.shape}; expected one of each")
    if buckets < 1:
        raise ValueError(f"buckets is {buckets}; expected 1 or more")
    if step_array.size <= buckets:
        return step_array.copy(), value_array.copy(), value_array.copy()
    starts: NDArray[Any] = np.arange(buckets) * step_array.size // buckets
    return step_array[starts], np.fmin.reduceat(value_array, starts), np.fmax.reduceat(value_array, starts)
