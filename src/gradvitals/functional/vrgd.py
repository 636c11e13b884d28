"""The scale that variance-reduced gradient descent puts on each element of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor


def vrgd_scale(mean: Tensor, mean_of_squares: Tensor, gamma: float = 0.1) -> Tensor:
    r"""Elementwise factor of one tensor from the mean and mean square of its gradient over k devices or micro-batches.

    .. math:: r_j = \frac{\bar g_j^2}{\overline{g_j^2} - \bar g_j^2}, \qquad
              s_j = \mathrm{clip}\left(\frac{r_j}{\frac{1}{J}\sum_i r_i}, \gamma, 1\right)

    The variance is the biased one, over k, as in the paper. Elements with more signal than the tensor's average keep
    their gradient and the others are damped, down to `gamma`. Because the clip comes after the normalisation the mean
    factor is below 1: under pure noise about 0.49 for k = 8. With k of 3 or less the mean of r is infinite and every
    element ends at `gamma`; use 6 or more.

    Args:
        mean: mean gradient over the k parts.
        mean_of_squares: mean of the parts' squared gradients, elementwise.
        gamma: smallest factor.

    Returns:
        The factors, of the shape and dtype of `mean`. An element without variance gets 1 if its mean is not 0 and
        `gamma` if it is (its gradient is 0 either way), and `gamma` if it is nan; none of these enters the mean of r.

    Raises:
        ValueError: when `gamma` is not in [0, 1], or the shapes differ.

    Example:
        Means 2 and 1 with variances 1 and 1: r is 4 and 1, their mean 2.5, so the factors are 1 and 0.4.

        >>> vrgd_scale(torch.tensor([2.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([1.0000, 0.4000])

    References:
        Jiang et al., "Accelerating large batch training via gradient signal to noise ratio (GSNR)", 2023.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma!r}; expected a factor in [0, 1], e.g. 0.1")
    if mean.shape != mean_of_squares.shape:
        raise ValueError(
            f"mean has shape {tuple(mean.shape)} and mean_of_squares {tuple(mean_of_squares.shape)}; "
            "expected the two means of one gradient"
        )
    # float32 is enough: rounding matters only where r is above 1e5 or so, and such elements are clipped at 1.
    dtype = torch.promote_types(mean.dtype, torch.float32)
    squared_mean = mean.to(dtype).square()
    variance = mean_of_squares.to(dtype) - squared_mean
    steady = (variance <= 0) & (squared_mean > 0)
    ratio = squared_mean / variance
    counted = torch.isfinite(ratio) & (variance > 0)
    ratio = torch.where(counted, ratio, 0.0)
    average = ratio.sum(dtype=_sum_dtype(mean)) / counted.sum()
    scale = (ratio / average.to(dtype)).nan_to_num(nan=gamma, posinf=1.0).clamp(gamma, 1.0)
    return torch.where(steady, 1.0, scale).to(mean.dtype)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
