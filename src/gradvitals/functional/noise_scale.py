"""The gradient noise scale, in samples, and its two parts: squared signal and trace of the noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from gradvitals.functional.distributions import Array
from gradvitals.functional.intervals import ratio_of_means


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The simple noise scale with its 95 % interval and the two means it is the ratio of."""

    value: float
    """tr(Sigma) / |mu|^2 in samples; nan where the data cannot tell."""
    low: float
    high: float
    signal_sq: float
    """Mean unbiased estimate of |mu|^2."""
    noise_trace: float
    """Mean unbiased estimate of tr(Sigma), of one sample."""
    identifiable: bool
    """Whether the signal stands two standard errors above zero; for a single pair, whether it is above zero."""


def noise_scale(
    sq_norm_small: ArrayLike, sq_norm_big: ArrayLike, batch_small: ArrayLike, batch_big: ArrayLike
) -> NoiseScale:
    r"""Simple noise scale :math:`B_{simple} = \mathrm{tr}\,\Sigma / \|\mu\|^2` from gradients of two batch sizes.

    .. math:: \widehat{\|\mu\|^2} = \frac{B \|G_B\|^2 - b \|G_b\|^2}{B - b}, \qquad
              \widehat{\mathrm{tr}\,\Sigma} = \frac{\|G_b\|^2 - \|G_B\|^2}{1/b - 1/B}

    Each is unbiased; over a series both are averaged first and divided after. The interval is the delta method's on
    :math:`\|\mu\|^2 / \mathrm{tr}\,\Sigma`, whose denominator is the well-determined one, turned over. It takes the
    pairs of a series as independent.

    The noise scale is a proxy of the critical batch size, and a low one in practice: it equals the one that matters for
    the loss only when the Hessian is a multiple of the identity.

    Args:
        sq_norm_small: squared norm of a gradient of the small batch, preferably the mean over all of them at one step.
        sq_norm_big: squared norm of a gradient of the big batch.
        batch_small: samples in the small batch.
        batch_big: samples in the big batch. Each argument is a number or a series, one element a step.

    Returns:
        The noise scale. When the mean signal is less than two standard errors above zero it is not identifiable: the
        value is nan, `low` still bounds it from below and `high` is inf. A single pair has no interval: the ends are
        nan, and the value is too unless both parts come out positive. Steps with a non-finite part are ignored.

    Raises:
        ValueError: when a batch is not positive, or the big one is not the bigger.

    Example:
        |mu|^2 = 1 and tr Sigma = 8 give E|G|^2 = 1 + 8/2 = 5 at batch 2, and 1 + 8/8 = 2 at batch 8.

        >>> result = noise_scale(5.0, 2.0, 2, 8)
        >>> result.value, result.signal_sq, result.noise_trace
        (8.0, 1.0, 8.0)

    References:
        McCandlish et al., "An empirical model of large-batch training", 2018.
    """
    small, big, b, B = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.float64) for x in (sq_norm_small, sq_norm_big, batch_small, batch_big))
    )
    if not np.all((b > 0) & (b < B)):
        raise ValueError(
            f"batch_small is {np.asarray(batch_small).tolist()!r} and batch_big {np.asarray(batch_big).tolist()!r}; "
            "expected 0 < batch_small < batch_big, in samples"
        )
    signal = np.ravel((B * big - b * small) / (B - b))
    noise = np.ravel((small - big) / (1 / b - 1 / B))
    finite = np.isfinite(signal) & np.isfinite(noise)
    signal, noise = signal[finite], noise[finite]
    n = len(signal)
    if n == 0:
        return NoiseScale(math.nan, math.nan, math.nan, math.nan, math.nan, False)
    x, y = float(signal.mean()), float(noise.mean())
    if n == 1:
        value = y / x if x > 0 and y >= 0 else math.nan
        return NoiseScale(value, math.nan, math.nan, x, y, x > 0)
    (xx, xy), (_, yy) = np.cov(signal, noise)
    ratio, low, high = (float(v) for v in ratio_of_means(x, y, xx, yy, xy, n))
    identifiable = x > 0 and x >= 2 * math.sqrt(xx / n)
    # Half a width above zero still bounds the signal when its mean has come out negative.
    most_signal = max(high, high - ratio)
    return NoiseScale(
        value=y / x if identifiable and y >= 0 else math.nan,
        low=1 / most_signal if most_signal > 0 else math.nan,
        high=(1 / low if low > 0 else math.inf) if not math.isnan(low) else math.nan,
        signal_sq=x,
        noise_trace=y,
        identifiable=identifiable,
    )


def signal_and_noise(
    sq_norms: ArrayLike, sq_norm_of_sum: ArrayLike, batch_sizes: ArrayLike, weights: ArrayLike
) -> tuple[Array, Array]:
    r"""Unbiased squared signal and noise trace from micro-batches of any sizes and weights.

    Micro-batch i of :math:`b_i` samples has the mean gradient :math:`g_i` and enters the accumulated gradient as
    :math:`h_i = w_i g_i`. With :math:`W = \sum w_i`, :math:`P = \sum w_i/b_i`, :math:`V = \sum w_i^2/b_i`,

    .. math:: A = \sum_i \frac{\|h_i\|^2}{w_i}, \quad E A = W\|\mu\|^2 + P\,\mathrm{tr}\,\Sigma, \qquad
              Q = \Big\|\sum_i h_i\Big\|^2, \quad E Q = W^2\|\mu\|^2 + V\,\mathrm{tr}\,\Sigma

    and solving for the two unknowns

    .. math:: \widehat{\mathrm{tr}\,\Sigma} = \frac{W A - Q}{W P - V}, \qquad
              \widehat{\|\mu\|^2} = \frac{P Q - V A}{W (W P - V)}

    The numerator of the first is W times the weighted scatter :math:`\sum w_i \|g_i - \bar g\|^2`, never negative,
    and the denominator is positive for two micro-batches or more. When :math:`w_i = b_i/N` this is the analysis of
    variance, :math:`(N^2 \sum \|h_i\|^2/b_i - N Q)/(k - 1)`.

    Args:
        sq_norms: :math:`\|h_i\|^2`, `[k]` or `[k, rows]` with one row a tensor.
        sq_norm_of_sum: :math:`\|\sum h_i\|^2`, a number or `[rows]`.
        batch_sizes: samples in each micro-batch, `[k]`.
        weights: weight of each micro-batch's mean gradient, `[k]`. Those of weight 0 are ignored.

    Returns:
        `(signal_sq, noise_trace)` in float64, of the shape of `sq_norm_of_sum`: the estimates of :math:`\|\mu\|^2`,
        which can be negative, and of :math:`\mathrm{tr}\,\Sigma` of one sample. Both are nan with fewer than two
        micro-batches.

    Raises:
        ValueError: when the lengths differ, a weight is negative, or a weighted batch is not positive.

    Example:
        Two samples, one a batch: g = 1 and g = 3, each with weight 1/2. The variance is 2 and mean^2 - variance/2 is 3.

        >>> signal_sq, noise_trace = signal_and_noise([0.25, 2.25], 4.0, [1, 1], [0.5, 0.5])
        >>> float(signal_sq), float(noise_trace)
        (3.0, 2.0)
    """
    h, b, w = (np.asarray(x, dtype=np.float64) for x in (sq_norms, batch_sizes, weights))
    q = np.asarray(sq_norm_of_sum, dtype=np.float64)
    if b.ndim != 1 or w.shape != b.shape or h.ndim < 1 or len(h) != len(b):
        raise ValueError(
            f"sq_norms, batch_sizes and weights have shapes {h.shape}, {b.shape} and {w.shape}; "
            "expected [k] or [k, rows], [k] and [k], with one element for each micro-batch"
        )
    if np.any(w < 0) or np.any(b[w > 0] <= 0):
        raise ValueError(
            f"batch_sizes is {b.tolist()!r} and weights {w.tolist()!r}; expected weights of 0 or above, "
            "and positive sizes where the weight is not 0"
        )
    h, b, w = h[w > 0], b[w > 0], w[w > 0]
    if len(w) < 2:
        nothing = np.full(np.broadcast_shapes(h.shape[1:], q.shape), np.nan)
        return nothing, nothing.copy()
    return signal_and_noise_of_sums(np.tensordot(1 / w, h, axes=1), q, w.sum(), (w / b).sum(), (w**2 / b).sum())


def signal_and_noise_of_sums(
    parts: ArrayLike, sq_norm_of_sum: ArrayLike, weight: float, weight_per_sample: float, square_per_sample: float
) -> tuple[Array, Array]:
    r"""The same from sums over micro-batches, which those of many ranks add up to.

    Args:
        parts: :math:`A = \sum \|h_i\|^2 / w_i`, a number or `[rows]`.
        sq_norm_of_sum: :math:`Q = \|\sum h_i\|^2`.
        weight: :math:`W = \sum w_i`.
        weight_per_sample: :math:`P = \sum w_i / b_i`.
        square_per_sample: :math:`V = \sum w_i^2 / b_i`.

    Returns:
        `(signal_sq, noise_trace)` as `signal_and_noise` gives them.

    Example:
        g = 1 and g = 3 again: A = 0.5 (1 + 9), Q = 4, and W, P, V = 1, 1, 0.5.

        >>> signal_sq, noise_trace = signal_and_noise_of_sums(5.0, 4.0, 1.0, 1.0, 0.5)
        >>> float(signal_sq), float(noise_trace)
        (3.0, 2.0)
    """
    a, q = np.asarray(parts, dtype=np.float64), np.asarray(sq_norm_of_sum, dtype=np.float64)
    scale = weight * weight_per_sample - square_per_sample
    noise_trace = (weight * a - q) / scale
    signal_sq = (weight_per_sample * q - square_per_sample * a) / (weight * scale)
    return np.asarray(signal_sq), np.asarray(noise_trace)
