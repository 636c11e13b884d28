"""The spread of the workers of a distributed run, from the norms of their own gradients before the reduction."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gradvitals.functional.distributions import Array
from gradvitals.functional.spikes import coefficient_of_variation

MAD_TO_STD = 1.4826
"""Standard deviation over median absolute deviation, of a normal distribution."""

LEAST_SPREAD = 0.05
"""Norms that happen to agree may still differ the next time: their spread counts as at least this, in units of log."""

CAUTION = 4.0
"""How many others it takes until their spread is about as good as known: its square grows by this over their number."""

ZERO_RATIO = 1e-3
"""A norm of 0 counts as this part of the smallest other one: it has no logarithm."""


def norm_dispersion(norms: ArrayLike) -> float:
    r"""Standard deviation over mean of the workers' local gradient norms.

    .. math:: \frac{1}{\bar n} \sqrt{\frac{1}{D-1} \sum_d (n_d - \bar n)^2}

    It is never 0 where workers have samples of their own: :math:`E \|g_d\|^2 = \|G\|^2 + \mathrm{tr}\,\Sigma / b` holds
    on average only. Identical norms mean identical samples; one norm far off means a worker unlike the others.

    Args:
        norms: one per worker; those that are not finite are ignored.

    Returns:
        nan with fewer than 2 finite norms, or where all are 0.

    Example:
        >>> norm_dispersion([1.0, 2.0, 3.0])
        0.5

    References:
        McCandlish et al., "An empirical model of large-batch training", 2018, appendix A, for the expectation.
    """
    return float(coefficient_of_variation(norms))


def norm_ratios(norms: ArrayLike) -> Array:
    """Every worker's norm over the (geometric) median of the others'.

    Args:
        norms: one a worker.

    Returns:
        One a worker; nan where its norm is not finite, or where there is no other. A norm of 0 gives 0.

    Example:
        >>> norm_ratios([1.0, 1.0, 8.0, 1.0]).round(6).tolist()
        [1.0, 1.0, 8.0, 1.0]
    """
    x = np.asarray(norms, dtype=np.float64)
    known, logs = _logs(x)
    result = np.full(x.shape, math.nan)
    if len(logs) >= 2:
        result[known] = np.where(x[known] > 0, np.exp(logs - _median_of_others(logs)), 0.0)
    return result


def leave_one_out_z(norms: ArrayLike) -> Array:
    r"""How far every worker's norm is from those of the others, in robust standard deviations of the logarithm.

    .. math::
        z_d = \frac{\ln n_d - \mathrm{med}_{e \ne d} \ln n_e}{s_d}, \qquad
        s_d = \sqrt{1 + c/m} \; \max(1.4826\,\mathrm{MAD}_{e \ne d} \ln n_e,\; s_{min})

    The worker itself is not among those it is held against, so that even one of three cannot hide itself by widening
    the spread. The spread of :math:`m` others is hardly known where they are few: it has a floor, `LEAST_SPREAD`, and
    is widened by `CAUTION` over their number. So between two workers, each unit of z is a difference of some 12 %.

    Args:
        norms: one a worker.

    Returns:
        One a worker; nan where its norm is not finite, or where there is no other. Takes O(D log D) for D workers.

    Example:
        >>> [round(z) for z in leave_one_out_z([1.0, 1.02, 0.99, 1.01, 3.0]).tolist()]
        [0, 0, 0, 0, 15]

    References:
        Rousseeuw and Croux, "Alternatives to the median absolute deviation", 1993, for the factor of the MAD.
    """
    x = np.asarray(norms, dtype=np.float64)
    known, logs = _logs(x)
    result = np.full(x.shape, math.nan)
    others = len(logs) - 1
    if others < 1:
        return result
    centre = _median_of_others(logs)
    spread = np.empty_like(logs)
    for value in np.unique(centre):  # leaving one out moves a median to one of three values at most
        mine = centre == value
        spread[mine] = _median_of_others(np.abs(logs - value))[mine]
    spread = np.maximum(MAD_TO_STD * spread, LEAST_SPREAD) * math.sqrt(1 + CAUTION / others)
    result[known] = (logs - centre) / spread
    return result


def _logs(norms: Array) -> tuple[NDArray[np.bool_], Array]:
    """Which norms can be compared, and their logarithms; none where all are 0."""
    known: NDArray[np.bool_] = np.isfinite(norms) & (norms >= 0)
    values = norms[known]
    if not (values > 0).any():
        return np.zeros(norms.shape, dtype=bool), values[:0]
    least = values[values > 0].min()
    # In logarithms, as the product could leave the range of floats.
    return known, np.where(values > 0, np.log(np.maximum(values, least)), math.log(least) + math.log(ZERO_RATIO))


def _median_of_others(values: Array) -> Array:
    """For every value, the median of all but itself."""
    order = np.argsort(values)
    ordered, others = values[order], len(values) - 1
    place = np.arange(len(values))

    def other(index: int) -> Array:
        """The value at this place in the order of the others."""
        return np.asarray(ordered[index + (place <= index)])

    result = np.empty_like(values)
    result[order] = (other((others - 1) // 2) + other(others // 2)) / 2
    return result
