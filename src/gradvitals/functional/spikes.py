"""Spikes of the gradient: of its norm against its own past, and of single elements against theirs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from gradvitals.functional.distributions import Array

if TYPE_CHECKING:
    from torch import Tensor


def spike_ratio(norm: ArrayLike, history: ArrayLike) -> Array:
    r"""Norm over the mean of the norms before it.

    .. math:: \frac{\|g_t\|}{\frac{1}{n} \sum_{i=1}^{n} \|g_{t-i}\|}

    A value above 2 is the reference manual's sign of an explosion. It is not the GSS of SPAM, for which see `gss`.

    Args:
        norm: the norm now, a number or one for each tensor.
        history: the norms before it, `[n]` or `[n, tensors]`, the present one not among them. Those that are not finite
            are ignored: one broken step must not blind the steps after it.

    Returns:
        The ratio, of the shape of `norm`: nan without history or when the norm and its history are all 0, inf when only
        the history is 0.

    Example:
        >>> float(spike_ratio(6.0, [1.0, 2.0, 3.0]))
        3.0
    """
    now, past = np.asarray(norm, dtype=np.float64), np.asarray(history, dtype=np.float64)
    finite = np.isfinite(past)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(finite, past, 0.0).sum(axis=0) / finite.sum(axis=0)
        return np.asarray(now / mean)


def gss(grad: Tensor, history: Tensor) -> Tensor:
    r"""Gradient spike score of SPAM: each element against the mean size of that element over time.

    .. math:: \mathrm{GSS}(g_T) = \frac{|g_T|}{\frac{1}{T+1} \sum_{j=0}^{T} |g_j|}

    The present gradient is part of the mean, so a score cannot exceed T + 1: the paper's threshold of 50 is out of
    reach with fewer than 50 past gradients.

    Args:
        grad: the gradient now.
        history: the gradients before it, `[T, ...]`.

    Returns:
        The scores, elementwise, float64 for float64 gradients and float32 otherwise; nan where an element was always 0.

    Raises:
        ValueError: when the rows of `history` do not have the shape of `grad`.

    Example:
        Sizes 1, 1, 1 and then 5 have the mean 2.

        >>> import torch
        >>> gss(torch.tensor([5.0]), torch.tensor([[1.0], [-1.0], [1.0]]))
        tensor([2.5000])

    References:
        Huang et al., "SPAM: spike-aware Adam with momentum reset for stable LLM training", ICLR 2025.
    """
    if history.dim() == 0 or history.shape[1:] != grad.shape:
        raise ValueError(
            f"history has shape {tuple(history.shape)} and grad {tuple(grad.shape)}; "
            "expected [T, ...] with past gradients of the same shape in its rows"
        )
    import torch

    dtype = torch.float64 if grad.dtype == torch.float64 else torch.float32
    now = grad.detach().to(dtype).abs()
    total = history.detach().abs().sum(dim=0, dtype=dtype) + now
    # Multiplied last: the sum of T + 1 gradients can leave the range of float32 only if their mean is near its end.
    return now / total * (len(history) + 1)


def coefficient_of_variation(norms: ArrayLike) -> Array:
    r"""Standard deviation over mean of a series of norms.

    .. math:: \mathrm{CV} = \frac{1}{\bar x} \sqrt{\frac{1}{n-1} \sum_i (x_i - \bar x)^2}

    Args:
        norms: `[n]` or `[n, tensors]`; values that are not finite are ignored.

    Returns:
        The coefficient, one number or one for each tensor: nan with fewer than 2 finite norms or a mean of 0.

    Example:
        >>> float(coefficient_of_variation([1.0, 2.0, 3.0]))
        0.5
    """
    x = np.asarray(norms, dtype=np.float64)
    finite = np.isfinite(x)
    count = finite.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(finite, x, 0.0).sum(axis=0) / count
        squares = np.where(finite, (x - mean) ** 2, 0.0).sum(axis=0)
        deviation = np.sqrt(squares / (count - 1))
        return np.where((count >= 2) & (mean > 0), deviation / mean, math.nan)
