"""Intervals for what the package estimates: a GSNR from samples, and a ratio of two means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from gradvitals.functional.distributions import Array, f_cdf, normal_quantile, student_t_quantile

_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, its 95 % interval, and how many samples stand behind it.

    Example:
        >>> Estimate(value=3.5, low=0.1, high=14.0, num_samples=4).value
        3.5
    """

    value: float
    low: float
    high: float
    num_samples: int


def ratio_of_means(
    mean_x: ArrayLike,
    mean_y: ArrayLike,
    var_x: ArrayLike,
    var_y: ArrayLike,
    cov_xy: ArrayLike,
    num_samples: ArrayLike,
    level: float = 0.95,
) -> tuple[Array, Array, Array]:
    r"""Ratio of two means with its delta-method interval.

    With n pairs whose means are :math:`\bar x, \bar y` and :math:`r = \bar x / \bar y`,

    .. math:: \mathrm{se}^2 = \frac{s_x^2 - 2 r s_{xy} + r^2 s_y^2}{n \bar y^2}, \qquad r \pm t_{n-1}\,\mathrm{se}

    Means are taken before dividing: a mean of ratios has heavy tails and a bias that more samples do not cure. The
    interval assumes that `mean_y` is well away from zero, several standard errors; it is the caller who knows that.

    Args:
        mean_x: mean of the numerator.
        mean_y: mean of the denominator.
        var_x: variance of one x, unbiased.
        var_y: variance of one y, unbiased.
        cov_xy: covariance of one pair, unbiased.
        num_samples: number of pairs, or an effective number for weighted or smoothed means; not necessarily whole.
        level: share of repetitions in which the interval is to hold the true ratio.

    Returns:
        `(value, low, high)`, elementwise. The value is nan where `mean_y` is not above 0. The ends are nan there too,
        and where there are fewer than 2 samples.

    Raises:
        ValueError: when `level` is not between 0 and 1.

    Example:
        Five pairs, x varies with variance 5 and y not at all: se = 1/2, and t with 4 degrees of freedom is 2.776.

        >>> value, low, high = ratio_of_means(6.0, 2.0, 5.0, 0.0, 0.0, 5)
        >>> float(value), round(float(low), 3), round(float(high), 3)
        (3.0, 1.612, 4.388)
    """
    if not 0 < level < 1:
        raise ValueError(f"level is {level!r}; expected a share between 0 and 1, e.g. 0.95")
    x, y, xx, yy, xy, n = np.broadcast_arrays(
        *(np.asarray(v, dtype=np.float64) for v in (mean_x, mean_y, var_x, var_y, cov_xy, num_samples))
    )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        value = np.where(y > 0, x / y, np.nan)
        # Rounding can leave the variance of x - r*y a hair below zero when the pairs are all alike.
        variance = np.maximum(xx - 2 * value * xy + value**2 * yy, 0.0)
        half_width = student_t_quantile((1 + level) / 2, n - 1) * np.sqrt(variance / n) / y
    return value, value - half_width, value + half_width


def gsnr_interval(
    mean_ratio: ArrayLike,
    dimension: ArrayLike,
    alignment: ArrayLike,
    num_samples: ArrayLike,
    heaviness: ArrayLike = 0.0,
) -> tuple[Array, Array]:
    r"""95 % interval of an aggregate GSNR from T samples with any covariance.

    Write :math:`t_1 = \mathrm{tr}\,\Sigma`, :math:`t_2 = \mathrm{tr}\,\Sigma^2`, :math:`d = t_1^2 / t_2` for the
    effective dimension and S for the unbiased estimate of :math:`t_1`. The statistic :math:`q = T\|\bar g\|^2 / S`
    has a denominator that is close to :math:`t_1 \chi^2_{d(T-1)} / (d(T-1))` (Satterthwaite), and a numerator of mean
    :math:`t_1 (1 + TR)` and variance :math:`2 t_2 + 4 T \mu'\Sigma\mu`, which a noncentral chi-square matches with

    .. math:: c = \frac{1 + \beta}{1 + TR}, \quad \nu = \frac{d}{c^2}, \quad \lambda = \frac{\beta d}{c^2},
              \quad \beta = T \mu'\Sigma\mu / t_2,

    so that :math:`c q` is about noncentral F with :math:`(\nu, d(T-1); \lambda)`. The interval is the set of R whose
    law holds the observed q. For one coordinate, or for uncorrelated ones of equal variance, :math:`\beta = TR` and
    the law is exact. Otherwise :math:`\beta` follows from `alignment`, which estimates :math:`c`: it has only T - 1
    degrees of freedom, which widens it by the square of the ratio of the t to the normal quantile, and it may not
    fall far below the isotropic case while the signal is weak, where low q and low alignment come together.

    The 5 % of error lie all at the lower end for R = 0, since R cannot be negative, and in equal halves once
    :math:`TR\sqrt{d/2}`, the signal in units of its noise, is well above 1. So the interval is never empty.

    Args:
        mean_ratio: q, the squared norm of the mean times T over S.
        dimension: effective dimension d, 1 or more.
        alignment: estimate of :math:`\bar g' \Sigma \bar g\, t_1 / (\|\bar g\|^2 t_2)`, which is 1 for isotropic noise.
        num_samples: T, 2 or more.
        heaviness: by how much the variance of S exceeds that under Gaussian noise, as a share of the latter. It divides
            the degrees of freedom of the denominator by 1 + heaviness.

    Returns:
        `(low, high)`, elementwise, 0 or above; nan where an argument is nan or T is below 2.

    Example:
        >>> low, high = gsnr_interval(10.0, 1.0, 1.0, 8)  # t = sqrt(10) with 7 degrees of freedom
        >>> round(float(low), 3), round(float(high), 3)
        (0.082, 3.981)

    References:
        Satterthwaite, "An approximate distribution of estimates of variance components", 1946.
    """
    q, d, rho, n, heavy = np.broadcast_arrays(
        *(np.asarray(v, dtype=np.float64) for v in (mean_ratio, dimension, alignment, num_samples, heaviness))
    )
    fine = np.isfinite(q + d + rho + heavy) & (n >= 2)
    low, high = np.full(q.shape, np.nan), np.full(q.shape, np.nan)
    if not fine.any():
        return low, high
    # Both ends are searched for together, as two rows of one array.
    q, d, rho, n, heavy = (np.stack([v[fine], v[fine]]) for v in (q, d, rho, n, heavy))
    # One coordinate knows its alignment exactly: nothing to widen.
    widening = (student_t_quantile((1 + _LEVEL) / 2, n - 1) / student_t_quantile((1 + _LEVEL) / 2, np.inf)) ** 2
    rho = rho * (1 + (1 - 1 / d) * (widening - 1))
    # R in units that are of order 1 where the signal equals the noise of its own estimate.
    unit = 1 / (n * np.sqrt(d / 2))
    at_low_end = np.array([[_LEVEL], [0.0]])

    def excess(signal: Array) -> Array:
        """Normal score of the observed q at R = signal * unit, less that of the end of what is acceptable."""
        tr = n * signal * unit
        two_sided = -np.expm1(-signal)
        c = 1 + (rho - 1) * two_sided
        beta = np.maximum(c * (1 + tr) - 1, tr / np.sqrt(1 + tr))
        c = (1 + beta) / (1 + tr)
        observed = f_cdf(c * q, d / c**2, d * (n - 1) / (1 + heavy), beta * d / c**2)
        return _score(observed) - _score(at_low_end + (1 - _LEVEL) / 2 * two_sided)

    low[fine], high[fine] = unit * _falling_root(excess, np.maximum(q - 1, 0.0) / n / unit)
    return low, high


def _score(probability: Array) -> Array:
    # Scores make the curve nearly straight for the root finder; the clip keeps them finite.
    return normal_quantile(np.clip(probability, 1e-12, 1 - 1e-12))


def _falling_root(f: Callable[[Array], Array], start: Array) -> Array:
    """Where `f`, positive left of its root, crosses zero on [0, inf); 0 where it does not start positive.

    The search is by false position with the Illinois weights, in the coordinate ``log(1 + x)``.
    """
    left, f_left = np.zeros_like(start), f(np.zeros_like(start))
    none = f_left <= 0
    right = np.log1p(start) + 1.0
    f_right = f(np.expm1(right))
    for _ in range(200):
        beyond = (f_right > 0) & ~none
        if not beyond.any():
            break
        left, f_left = np.where(beyond, right, left), np.where(beyond, f_right, f_left)
        right = np.where(beyond, right + 1.0, right)
        f_right = f(np.expm1(right))
    side = np.zeros_like(start)
    for _ in range(60):
        with np.errstate(divide="ignore", invalid="ignore"):
            x = (left * f_right - right * f_left) / (f_right - f_left)
        x = np.where((x > left) & (x < right), x, (left + right) / 2)
        f_x = f(np.expm1(x))
        goes_left = f_x > 0
        # Illinois: an end that stays twice has its value halved, so that it moves next time.
        f_right = np.where(goes_left & (side == 1), f_right / 2, np.where(goes_left, f_right, f_x))
        f_left = np.where(~goes_left & (side == -1), f_left / 2, np.where(goes_left, f_x, f_left))
        left, right = np.where(goes_left, x, left), np.where(goes_left, right, x)
        side = np.where(goes_left, 1.0, -1.0)
        if not np.any((right - left > 1e-9 * (1 + right)) & (np.abs(f_x) > 1e-7) & ~none):
            break
    result: Array = np.where(none, 0.0, np.expm1(x))
    return result
