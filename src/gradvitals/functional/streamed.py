"""GSNR of a stream of gradients, of which only sums and some coordinates were kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from gradvitals.functional.gsnr import _rows, _shape_of_noise, _sums
from gradvitals.functional.intervals import Estimate, gsnr_interval

if TYPE_CHECKING:
    from torch import Tensor


class Sums(NamedTuple):
    """Sums over T samples of one or several tensors."""

    sq_norm_of_mean: float
    """Squared norm of the samples' mean."""
    spread: float
    """Sum of the squared distances from the mean."""
    num_samples: int
    """T."""
    coordinates: Tensor
    """`[t, m]`, the same m coordinates of t of the samples."""


def gsnr_streamed(streams: Sequence[Sums]) -> list[Estimate]:
    r"""The value of `gsnr` from two sums over all coordinates, its interval from some of the coordinates.

    .. math:: \hat R = \frac{\|\bar g\|^2 - S/T}{S}, \qquad S = \frac{1}{T-1} \sum_t \|g_t - \bar g\|^2

    Effective dimension, alignment and heaviness of the noise, which `gsnr_interval` asks for, are those of the
    coordinates that were kept. Fewer coordinates have a lower effective dimension than all of them, so the interval is
    too wide rather than too narrow, unless most of the noise is in coordinates that were not kept: the caller has to
    leave the kept ones out then. With all of them it is that of `gsnr`.

    Args:
        streams: One for each answer that is wanted; their intervals are searched for together, which is much quicker.

    Returns:
        The estimates; inf when all samples are equal and not zero, nan when all are zero, one is not finite, or T is
        below 2.

    Example:
        1, 2, 3, 4 have the mean 2.5 and squared distances that sum to 5.

        >>> import torch
        >>> [found] = gsnr_streamed([Sums(6.25, 5.0, 4, torch.tensor([[1.0], [2.0], [3.0], [4.0]]))])
        >>> round(found.value, 12)
        3.5
    """
    if not streams:
        return []
    shapes = [_interval_arguments(stream) for stream in streams]
    lows, highs = gsnr_interval(*(list(column) for column in zip(*shapes, strict=True)))
    found = []
    for stream, low, high in zip(streams, lows, highs, strict=True):
        value = _value(stream)
        if math.isfinite(value) and math.isfinite(low) and math.isfinite(high):
            low, high = min(float(low), value), max(float(high), value)
        else:
            low = high = math.nan
        found.append(Estimate(value, low, high, stream.num_samples))
    return found


def _value(stream: Sums) -> float:
    square, spread, count, _ = stream
    if count < 2 or not math.isfinite(spread) or spread == 0:
        return math.inf if count >= 2 and spread == 0 and square > 0 else math.nan
    noise = spread / (count - 1)
    return (square - noise / count) / noise


def _interval_arguments(stream: Sums) -> tuple[float, float, float, float, float]:
    square, spread, count, coordinates = stream
    if count < 2 or not math.isfinite(spread) or spread == 0:
        return math.nan, 1.0, 1.0, 2.0, 0.0
    rows = _rows(coordinates)
    sums = _sums(rows)
    # Coordinates that never moved say nothing on the noise of the others: then the widest interval.
    known = len(rows) >= 4 and math.isfinite(sums.spread) and sums.spread > 0
    dimension, alignment, heaviness = _shape_of_noise(sums, len(rows)) if known else (1.0, 1.0, 0.0)
    return count * square * (count - 1) / spread, dimension, alignment, float(count), heaviness
