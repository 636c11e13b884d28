"""Gradient signal-to-noise ratio from samples of the gradient at one point.

All values stand for the batch each sample was averaged over: r of a batch of B is B times r of one example.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from gradvitals.functional.distributions import Array
from gradvitals.functional.intervals import Estimate, gsnr_interval
from gradvitals.functional.norms import double_chunks
from gradvitals.types import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

Number = TypeVar("Number", float, FloatArray, "Tensor")


def gsnr(samples: Tensor) -> Estimate:
    r"""Debiased GSNR over all coordinates, with a 95 % interval.

    .. math:: \hat R = \frac{\|\bar g\|^2 - S/T}{S}, \qquad S = \frac{1}{T-1} \sum_t \|g_t - \bar g\|^2

    estimates :math:`R = \|\mu\|^2 / \mathrm{tr}\,\Sigma`. Signal and noise are summed over coordinates first and
    divided after. The subtraction takes out the part of :math:`\|\bar g\|^2` that is noise, so pure noise gives 0 on
    average and a negative value half of the time: keep the sign, or averages of many values are too high. With few
    effective dimensions the division leaves a factor of about :math:`1 + 2/(d(T-1))`; for a single coordinate
    `gsnr_elementwise` has none.

    The interval is that of `gsnr_interval`. Its effective dimension comes from the samples' own Gram matrix, lowered by
    half of its jackknife standard error, and its allowance for tails heavier than Gaussian from the spread of the
    samples' own squared norms. With 2 or 3 samples neither can be estimated and the interval is that of one dimension,
    the widest. It reaches down to the value itself where that is negative.

    Args:
        samples: `[T, ...]`, T gradients of one tensor at the same parameters: micro-batches, ranks or examples.

    Returns:
        The estimate. The value is inf when all samples are equal and not zero, and nan when all are zero, one is not
        finite, T is below 2, or there are no coordinates; the ends are nan in all of these cases.

    Raises:
        ValueError: when `samples` has no dimension to run over.

    Example:
        The mean of 1, 2, 3, 4 is 2.5 and S is 5/3, so R is (6.25 - 5/12) / (5/3).

        >>> import torch
        >>> round(gsnr(torch.tensor([1.0, 2.0, 3.0, 4.0])).value, 12)
        3.5

    References:
        Liu et al., "Understanding why neural networks generalize well through GSNR of parameters", ICLR 2020.
    """
    rows = _rows(samples)
    num_samples = rows.shape[0]
    sums = _sums(rows)
    if num_samples < 2 or not math.isfinite(sums.spread) or sums.spread == 0:
        value = math.inf if num_samples >= 2 and sums.spread == 0 and sums.sq_norm_of_mean > 0 else math.nan
        return Estimate(value, math.nan, math.nan, num_samples)
    noise = sums.spread / (num_samples - 1)
    value = (sums.sq_norm_of_mean - noise / num_samples) / noise
    dimension, alignment, heaviness = _shape_of_noise(sums, num_samples)
    ratio = num_samples * sums.sq_norm_of_mean / noise
    low, high = gsnr_interval(ratio, dimension, alignment, num_samples, heaviness)
    return Estimate(value, min(float(low), value), max(float(high), value), num_samples)


def gsnr_plug_in(samples: Tensor) -> float:
    r"""GSNR with sample moments put in for the true ones, as the reference manual writes it.

    .. math:: \frac{\|\bar g\|^2}{\frac{1}{T} \sum_t \|g_t - \bar g\|^2}

    The expected value over many coordinates is :math:`(TR + 1)/(T - 1)`: pure noise reads 1/(T-1), not 0. Use `gsnr`
    unless you need this number.

    Args:
        samples: `[T, ...]`, T gradients of one tensor.

    Returns:
        The ratio; inf when the samples are equal and not zero, nan when all are zero or one is not finite.

    Raises:
        ValueError: when `samples` has no dimension to run over.

    Example:
        The mean of 3 and 1 is 2, their variance over T is 1.

        >>> import torch
        >>> gsnr_plug_in(torch.tensor([3.0, 1.0]))
        4.0
    """
    rows = _rows(samples)
    sums = _sums(rows, moments_only=True)
    if sums.spread == 0:
        return math.inf if sums.sq_norm_of_mean > 0 else math.nan
    return rows.shape[0] * sums.sq_norm_of_mean / sums.spread


def gsnr_elementwise(samples: Tensor) -> Tensor:
    r"""Unbiased GSNR of every coordinate by itself.

    .. math:: \hat r_j = \frac{T-3}{T-1} \frac{\bar g_j^2}{s_j^2} - \frac{1}{T}, \qquad
              s_j^2 = \frac{1}{T-1} \sum_t (g_{tj} - \bar g_j)^2

    Unbiased for Gaussian noise, since :math:`T \bar g^2 / s^2` is noncentral F with 1 and T - 1 degrees of freedom. A
    single coordinate says little below some hundred samples, and a mean over these ratios has heavy tails; to
    summarise a tensor use `gsnr`.

    Args:
        samples: `[T, ...]`, T gradients of one tensor.

    Returns:
        A tensor of the shape of one sample, float64 for float64 samples and float32 otherwise: nan where a coordinate
        is zero in every sample or not finite in one, inf where it is constant and not zero. With T of 3 or less the
        expected ratio is infinite, no unbiased estimate exists, and all is nan.

    Raises:
        ValueError: when `samples` has no dimension to run over.

    Example:
        Mean 2.5 and variance 5/3 of four samples: (1/3) * 6.25 / (5/3) - 1/4.

        >>> import torch
        >>> gsnr_elementwise(torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]]))
        tensor([1., nan])
    """
    import torch

    rows = _rows(samples)
    num_samples = rows.shape[0]
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32
    if num_samples <= 3 or not samples.numel():
        return torch.full(samples.shape[1:], math.nan, dtype=dtype, device=samples.device)
    ratios = []
    for chunk in double_chunks(rows):
        mean, centred = _centre(chunk)
        variance = centred.square().sum(0) / (num_samples - 1)
        # x/0 is inf and 0/0 is nan, which are the answers wanted.
        ratio = (num_samples - 3) / (num_samples - 1) * mean.square() / variance - 1 / num_samples
        ratios.append(ratio.to(dtype))
    return torch.cat(ratios).reshape(samples.shape[1:]).to(samples.device)


def gsnr_from_norms(mean_sq_norm: Number, sq_norm_of_mean: Number, num_samples: float | FloatArray) -> Number:
    r"""The value of `gsnr` from two squared norms, for callers that never hold all samples at once.

    .. math:: S = \frac{T}{T-1} \left(\frac{1}{T}\sum_t \|g_t\|^2 - \|\bar g\|^2\right), \qquad
              \hat R = \frac{\|\bar g\|^2 - S/T}{S}

    The difference loses digits when the GSNR is large: with inputs right to a relative error e, the answer is right
    to about e times R. Sum in float64.

    Args:
        mean_sq_norm: mean of the samples' squared norms.
        sq_norm_of_mean: squared norm of the samples' mean.
        num_samples: T, a number or one for each element.

    Returns:
        A float for floats, else an array or tensor in float64, elementwise: inf where the difference is not above 0 and
        the mean is not 0, nan where both are 0, an input is nan, or T is below 2.

    Example:
        1, 2, 3, 4 have a mean square of 7.5 and a squared mean of 6.25.

        >>> round(gsnr_from_norms(7.5, 6.25, 4), 12)
        3.5
    """
    if not isinstance(mean_sq_norm, (float, int, np.ndarray, np.generic)):
        import torch

        # Stays on the device: no value is brought to the host.
        total = mean_sq_norm.double()
        mean = torch.as_tensor(sq_norm_of_mean, dtype=torch.float64, device=total.device)
        count = torch.as_tensor(num_samples, dtype=torch.float64, device=total.device)
        noise = torch.where(count >= 2, count / (count - 1), math.nan) * (total - mean)
        no_noise = torch.where(mean > 0, math.inf, math.nan).double()
        return torch.where(noise <= 0, no_noise, (mean - noise / count) / noise)
    value = _from_norms(mean_sq_norm, sq_norm_of_mean, num_samples)
    return value if isinstance(mean_sq_norm, np.ndarray) else float(value)


def _from_norms(mean_sq_norm: ArrayLike, sq_norm_of_mean: ArrayLike, num_samples: ArrayLike) -> Array:
    total, mean, count = (np.asarray(v, dtype=np.float64) for v in (mean_sq_norm, sq_norm_of_mean, num_samples))
    with np.errstate(divide="ignore", invalid="ignore"):
        noise = np.where(count >= 2, count / (count - 1), np.nan) * (total - mean)
        value = (mean - noise / count) / noise
    result: Array = np.where(noise <= 0, np.where(mean > 0, np.inf, np.nan), value)
    return result


class _Sums(NamedTuple):
    """Sums from one pass over the samples; c_t is sample t minus the mean, A the sum of c_t c_t'."""

    sq_norm_of_mean: float
    spread: float
    """Trace of A."""
    sq_norms: Array
    """Each ``|c_t|^2``, over the trace of A."""
    quadratic: Array
    """Each ``c_t' A c_t``, over the squared trace of A."""
    along_mean: float
    """``m' A m`` over ``|m|^2 tr A``, with m the mean; nan when the mean is 0."""


def _rows(samples: Tensor) -> Tensor:
    if samples.dim() == 0:
        raise ValueError(
            "samples has 0 dimensions; expected [T, ...] with one gradient in each row: stack them with torch.stack"
        )
    return samples.detach().reshape(samples.shape[0], -1) if samples.numel() else samples.new_zeros(samples.shape[0], 0)


def _centre(chunk: Tensor) -> tuple[Tensor, Tensor]:
    # Taken relative to the first sample, equal samples have a spread of exactly zero.
    shifted = chunk - chunk[0]
    shift = shifted.mean(0)
    return chunk[0] + shift, shifted - shift


def _sums(rows: Tensor, *, moments_only: bool = False) -> _Sums:
    import torch

    num_samples, num_coordinates = rows.shape
    none = np.zeros(0)
    if num_samples == 0 or num_coordinates == 0:
        return _Sums(0.0, 0.0, none, none, math.nan)
    sq_norm_of_mean = spread = 0.0
    # A and the Gram matrix of the centred samples share their spectrum: the smaller of the two is formed.
    narrow = num_coordinates <= num_samples
    chunks = [torch.cat(list(double_chunks(rows)), dim=1)] if narrow else double_chunks(rows)
    gram: Tensor | float = 0.0
    along: Tensor | float = 0.0
    sq_norms: Tensor | float = 0.0
    for chunk in chunks:
        mean, centred = _centre(chunk)
        sq_norm_of_mean += float(mean @ mean)
        spread += float(centred.square().sum())
        if not moments_only:
            gram = (centred.T @ centred if narrow else centred @ centred.T) + gram
            along = centred @ mean + along
            sq_norms = centred.square().sum(1) + sq_norms
    if moments_only or spread == 0 or not math.isfinite(spread):
        return _Sums(sq_norm_of_mean, spread, none, none, math.nan)
    scaled = torch.as_tensor(gram) / spread
    quadratic = (centred @ scaled * centred).sum(1) / spread if narrow else scaled.square().sum(1)
    along_square = float(torch.as_tensor(along).square().sum())
    along_mean = along_square / spread / sq_norm_of_mean if sq_norm_of_mean > 0 else math.nan
    shares = torch.as_tensor(sq_norms) / spread
    return _Sums(sq_norm_of_mean, spread, shares.cpu().numpy(), quadratic.cpu().numpy(), along_mean)


def _shape_of_noise(sums: _Sums, num_samples: int) -> tuple[float, float, float]:
    """The inputs of `gsnr_interval`: effective dimension, alignment of the mean with the noise, heaviness."""
    if num_samples < 4:
        return 1.0, 1.0, 0.0
    n = num_samples - 1
    square = float(sums.quadratic.sum())
    dimension = float(_effective_dimension(np.array(square), num_samples))
    alignment = 1.0 if math.isnan(sums.along_mean) else sums.along_mean * dimension
    # The squared norms of Gaussian samples, over their mean, have the variance 2 tr Sigma^2 / (tr Sigma)^2. Only what
    # exceeds it by more than the error of a variance from T numbers counts.
    variance_ratio = float(np.var(num_samples * sums.sq_norms, ddof=1)) * (n * dimension + 2) / (2 * n)
    heaviness = max(0.0, variance_ratio - 1 - math.sqrt(2 / n))
    # Leaving sample t out takes T/(T-1) c_t c_t' from A.
    weight = num_samples / n
    trace = 1 - weight * sums.sq_norms
    without = square - 2 * weight * sums.quadratic + weight**2 * sums.sq_norms**2
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(_effective_dimension(without / trace**2, n))
    error = math.sqrt(n / num_samples * float(((logs - logs.mean()) ** 2).sum()))
    return max(1.0, dimension * math.exp(-error / 2)), alignment, heaviness


def _effective_dimension(square: Array, num_samples: int) -> Array:
    r"""Estimate of ``(tr Sigma)^2 / tr Sigma^2`` from ``tr A^2 / (tr A)^2``.

    A is Wishart with n = T - 1 degrees of freedom, so that

    .. math:: \frac{\mathrm{tr} A^2 - (\mathrm{tr} A)^2 / n}{(n-1)(n+2)}

    is unbiased for the trace of Sigma squared, and the like for the square of its trace.
    One coordinate gives exactly 1.
    """
    n = num_samples - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        of_square = (square - 1 / n) / ((n - 1) * (n + 2))
        dimension = (1 / n**2 - 2 / n * of_square) / of_square
    # In very many dimensions the difference is lost in rounding: then the dimension is as good as infinite.
    dimension = np.where(of_square * n**2 > 1e-13, np.maximum(dimension, 1.0), 1e13)
    return np.where(np.isfinite(square), dimension, 1.0)
