"""The beta, F and Student t laws that the intervals rest on: numpy in float64, whole arrays, no scipy."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# Above this many degrees of freedom the cube-root normal law of F is right to about 1e-5.
_LARGE_DOF = 1000.0

# Above this a noncentral chi-square is near enough to a central one to move the F law by less than 0.002.
_LONGEST_SUM = 400.0


def _elementwise(function: Callable[[float], float], values: ArrayLike) -> Array:
    """A function of one number, of every element: numpy has none of these, and scipy or torch would take long to load."""
    array = np.asarray(values, dtype=np.float64)
    result: Array = np.array([function(value) for value in array.ravel().tolist()]).reshape(array.shape)
    return result


def _lgamma(x: ArrayLike) -> Array:
    return _elementwise(lambda value: math.lgamma(value) if value > 0 else math.nan, x)


def normal_cdf(z: Array) -> Array:
    """CDF of the standard normal law."""
    return _elementwise(lambda value: 0.5 * math.erfc(-value / math.sqrt(2)), z)


def normal_quantile(p: Array) -> Array:
    """Quantile of the standard normal law."""
    return _elementwise(_normal_quantile, p)


def _normal_quantile(p: float) -> float:
    if 0 < p < 1:
        return NormalDist().inv_cdf(p)
    return {0.0: -math.inf, 1.0: math.inf}.get(p, math.nan)


def _log_beta_density(a: Array, b: Array, log_x: Array, log_y: Array) -> Array:
    """Log of ``x**a * y**b / B(a, b)``, where ``y = 1 - x``."""
    return a * log_x + b * log_y - _lgamma(a) - _lgamma(b) + _lgamma(a + b)


def beta_cdf(x: ArrayLike, a: ArrayLike, b: ArrayLike) -> Array:
    r"""Regularised incomplete beta function, the CDF of a Beta(a, b) variable.

    .. math:: I_x(a, b) = \frac{1}{B(a, b)} \int_0^x u^{a-1} (1-u)^{b-1} du

    Evaluated by its continued fraction with Lentz's method, on the side of the mean where that converges fast.

    Args:
        x: points in [0, 1].
        a: first shape, above 0.
        b: second shape, above 0.

    Returns:
        The probability below `x`, elementwise.

    Example:
        >>> float(beta_cdf(0.25, 1.0, 1.0))  # the uniform law
        0.25
    """
    x, a, b = np.broadcast_arrays(*(np.asarray(v, dtype=np.float64) for v in (x, a, b)))
    return _beta_cdf_pair(x, 1.0 - x, a, b)


def _beta_cdf_pair(x: Array, y: Array, a: Array, b: Array) -> Array:
    """`beta_cdf` for a caller that knows ``y = 1 - x`` to full precision."""
    swap = x > (a + 1.0) / (a + b + 2.0)
    x, y = np.where(swap, y, x), np.where(swap, x, y)
    a, b = np.where(swap, b, a), np.where(swap, a, b)
    with np.errstate(divide="ignore", invalid="ignore"):
        front = np.exp(_log_beta_density(a, b, np.log(x), np.log(y))) / a
    tail = np.where((x > 0) & (front > 0), front / _beta_fraction(x, a, b), 0.0)
    tail = np.where(np.isnan(x + a + b), np.nan, np.clip(tail, 0.0, 1.0))
    result: Array = np.where(swap, 1.0 - tail, tail)
    return result


def _beta_fraction(x: Array, a: Array, b: Array) -> Array:
    """The continued fraction ``1 + d1/(1 + d2/(1 + ...))`` that divides the front factor of `beta_cdf`."""
    # Lentz: the value is a running product of two ratios, 1e-300 stands in where one of them is exactly zero.
    value, upper, lower = np.ones_like(x), np.ones_like(x), np.zeros_like(x)
    for i in range(1, 2000):
        m = i // 2
        if i % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        upper = 1.0 + term / upper
        lower = 1.0 + term * lower
        upper = np.where(upper == 0, 1e-300, upper)
        lower = 1.0 / np.where(lower == 0, 1e-300, lower)
        change = upper * lower
        value = value * change
        if not np.any(np.abs(change - 1.0) > 1e-14):
            break
    return value


def f_cdf(f: ArrayLike, dof1: ArrayLike, dof2: ArrayLike, noncentrality: ArrayLike = 0.0) -> Array:
    r"""CDF of the noncentral F law: of ``(U / dof1) / (V / dof2)`` with U noncentral and V central chi-square.

    .. math:: P(F \le f) = \sum_j e^{-\lambda/2} \frac{(\lambda/2)^j}{j!}
              I_x\left(\tfrac{\nu_1}{2} + j, \tfrac{\nu_2}{2}\right), \quad x = \frac{\nu_1 f}{\nu_1 f + \nu_2}

    The sum is taken as written while ``dof1 + noncentrality`` is at most 400. Beyond, the numerator is near normal and
    Patnaik's central chi-square with the same mean and variance stands in for it; where both degrees of freedom of a
    central F are above 1000, Paulson's normal law of its cube root does.

    Args:
        f: points, 0 or above.
        dof1: degrees of freedom of the numerator, above 0, not necessarily whole.
        dof2: degrees of freedom of the denominator, above 0, not necessarily whole.
        noncentrality: squared mean of the numerator in units of its variance.

    Returns:
        The probability below `f`, elementwise; nan where an argument is.

    Example:
        >>> round(float(f_cdf(1.0, 4.0, 4.0)), 12)  # the median of F(n, n) is 1
        0.5

    References:
        Patnaik, "The non-central chi-square and F-distributions and their applications", 1949.
        Paulson, "An approximate normalization of the analysis of variance distribution", 1942.
    """
    arrays = (np.asarray(v, dtype=np.float64) for v in (f, dof1, dof2, noncentrality))
    f, dof1, dof2, shift = np.broadcast_arrays(*arrays)
    summed = (shift > 0) & (dof1 + shift <= _LONGEST_SUM)
    rest = ~summed
    result = np.empty(f.shape)
    if summed.any():
        result[summed] = _noncentral_f_sum(f[summed], dof1[summed], dof2[summed], shift[summed])
    if rest.any():
        # With no shift this changes nothing.
        mean = dof1[rest] + shift[rest]
        result[rest] = _central_f_cdf(f[rest] * dof1[rest] / mean, mean**2 / (mean + shift[rest]), dof2[rest])
    return result


def _central_f_cdf(f: Array, dof1: Array, dof2: Array) -> Array:
    large = (dof1 > _LARGE_DOF) & (dof2 > _LARGE_DOF)
    # Past 1e8 degrees of freedom log-gamma loses digits, and beside fewer than 1000 a chi-square of 1e8 is a constant.
    dof1, dof2 = (np.where(large, dof, np.minimum(dof, 1e8)) for dof in (dof1, dof2))
    total = dof1 * f + dof2
    with np.errstate(invalid="ignore"):
        x, y = dof1 * f / total, dof2 / total
    x, y = np.where(np.isinf(f), 1.0, x), np.where(np.isinf(f), 0.0, y)
    # The continued fraction slows down with the degrees of freedom, so it is not run where it is not wanted.
    exact = _beta_cdf_pair(x, y, np.where(large, 1.0, dof1) / 2, np.where(large, 1.0, dof2) / 2)
    if not large.any():
        return exact
    root, s1, s2 = np.cbrt(f), 2 / (9 * dof1), 2 / (9 * dof2)
    cube_root = normal_cdf(((1 - s2) * root - (1 - s1)) / np.sqrt(s2 * root**2 + s1))
    result: Array = np.where(large, cube_root, exact)
    return result


def _noncentral_f_sum(f: Array, dof1: Array, dof2: Array, noncentrality: Array) -> Array:
    half = noncentrality[:, None] / 2
    a, b = dof1[:, None] / 2, np.minimum(dof2, 1e8)[:, None] / 2
    ratio = (f * dof1)[:, None] / (2 * b)
    x, y = ratio / (1 + ratio), 1 / (1 + ratio)
    top = float(half.max())
    j = np.arange(int(top + 9 * math.sqrt(top) + 30), dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        weights = np.exp(j * np.log(half) - half - _lgamma(j + 1))
        first = _log_beta_density(a, b, np.log(x), np.log(y)) - np.log(a)
        growth = np.log(x) + np.log((a + b + j) / (a + j + 1))
        drops = np.exp(first + np.cumsum(growth, axis=1) - growth)  # each from the one before it
    drops = np.where(x > 0, drops, 0.0)
    # I_x(a + j, b) loses `drops` with each j: summing from the far end adds only positive terms.
    last = _beta_cdf_pair(x, y, a + len(j), b)
    probabilities = last + np.cumsum(drops[:, ::-1], axis=1)[:, ::-1]
    result: Array = np.clip((weights * probabilities).sum(axis=1), 0.0, 1.0)
    return result


def student_t_quantile(probability: float, dof: ArrayLike) -> Array:
    r"""Quantile of Student's t law, right to about 1e-9 for one degree of freedom or more.

    The tail of the law is an incomplete beta function,

    .. math:: P(|t| > q) = I_x\left(\tfrac{\nu}{2}, \tfrac12\right), \quad x = \frac{\nu}{\nu + q^2},

    and Newton's method solves for q in log-log coordinates, where the tail is concave and nearly straight. Above 1000
    degrees of freedom the Cornish-Fisher expansion around the normal quantile is used instead.

    Args:
        probability: share of the law below the answer, between 0 and 1, both excluded.
        dof: degrees of freedom, not necessarily whole.

    Returns:
        The quantiles, elementwise; nan where `dof` is below 1 or nan.

    Raises:
        ValueError: when `probability` is not between 0 and 1.

    Example:
        >>> round(float(student_t_quantile(0.975, 7)), 4)
        2.3646
    """
    if not 0 < probability < 1:
        raise ValueError(f"probability is {probability!r}; expected a number between 0 and 1, e.g. 0.975")
    nu = np.asarray(dof, dtype=np.float64)
    if probability == 0.5:
        return np.where(nu >= 1, 0.0, np.nan)
    tail, sign = 2 * min(probability, 1 - probability), math.copysign(1.0, probability - 0.5)
    # Live readings ask for the same few degrees of freedom again and again, and often for one alone.
    if nu.size and (nu == nu.flat[0]).all():
        return np.full(nu.shape, sign * _t_tail_quantile(tail, float(nu.flat[0])))
    unique, inverse = np.unique(nu, return_inverse=True)
    q = np.array([_t_tail_quantile(tail, float(v)) for v in unique])
    result: Array = sign * q[inverse].reshape(nu.shape)
    return result


@lru_cache(maxsize=4096)
def _t_tail_quantile(tail: float, nu: float) -> float:
    """The q with ``P(|t| > q) = tail``."""
    if not nu >= 1:
        return math.nan
    z = NormalDist().inv_cdf(1 - tail / 2) if tail > 1e-15 else -NormalDist().inv_cdf(tail / 2)
    expansion = (
        z
        + (z**3 + z) / (4 * nu)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    )
    if nu > _LARGE_DOF:
        return expansion
    half = np.array([nu / 2])
    log_norm = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    q = expansion
    for _ in range(50):
        total = nu + q * q
        tail_at_q = float(_beta_cdf_pair(np.array([nu / total]), np.array([q * q / total]), half, np.array([0.5]))[0])
        density = math.exp(log_norm - (nu + 1) / 2 * math.log1p(q * q / nu))
        step = math.log(tail_at_q / tail) * tail_at_q / (2 * q * density)
        q *= math.exp(max(-5.0, min(5.0, step)))
        if abs(step) < 1e-12:
            break
    return q
