"""The factors that variance-reduced gradient descent puts on each element of the gradient, and Wiener's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor


WienerLevel = Literal["element", "row", "tensor", "hierarchical"]


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
        The factors, of the shape and dtype of `mean`. An element without variance (nothing says that it is noise), or
        with nan, gets 1 and does not enter the mean of r.

    Raises:
        ValueError: when `gamma` is not in [0, 1], or the shapes differ.

    Example:
        Means 2 and 1 with variances 1 and 1: r is 4 and 1, their mean 2.5, so the factors are 1 and 0.4.

        >>> import torch
        >>> vrgd_scale(torch.tensor([2.0, 1.0]), torch.tensor([5.0, 2.0]))
        tensor([1.0000, 0.4000])

    References:
        Jiang et al., "Accelerating large batch training via gradient signal to noise ratio (GSNR)", 2023.
    """
    _check(mean, mean_of_squares, "mean_of_squares", gamma)
    # float32 is enough: rounding matters only where r is above 1e5 or so, and such elements are clipped at 1.
    import torch

    dtype = torch.promote_types(mean.dtype, torch.float32)
    exact = mean.to(dtype)
    return vrgd_scale_from_variance(exact, mean_of_squares.to(dtype) - exact.square(), gamma).to(mean.dtype)


def vrgd_scale_from_variance(mean: Tensor, variance: Tensor, gamma: float = 0.1, *, by_row: bool = False) -> Tensor:
    r"""The same factor as `vrgd_scale`, from the biased variance over the parts.

    The factor does not change when both gradient and deviation are multiplied by a number, so `mean` may also be the
    sum of the parts, and `variance` the sum of their squared deviations.

    Args:
        mean: mean gradient over the parts.
        variance: biased variance of the parts, elementwise.
        gamma: smallest factor.
        by_row: divide r by its mean over each row (the first dimension) and not over the whole tensor. A tensor of
            fewer than two dimensions is one row.

    Example:
        >>> import torch
        >>> mean, variance = torch.tensor([[2.0, 1.0], [0.2, 0.1]]), torch.ones(2, 2)
        >>> vrgd_scale_from_variance(mean, variance, by_row=True)
        tensor([[1.0000, 0.4000],
                [1.0000, 0.4000]])
    """
    import torch

    _check(mean, variance, "variance", gamma)
    dims = _dims(mean, by_row)
    ratio = torch.where(variance > 0, mean.square() / variance, torch.nan)
    counted = torch.isfinite(ratio)
    total = torch.where(counted, ratio, 0.0).sum(dims, keepdim=True, dtype=_sum_dtype(mean))
    average = (total / counted.sum(dims, keepdim=True)).to(ratio.dtype)
    return (ratio / average).clamp(gamma, 1.0).nan_to_num(nan=1.0)


def wiener_scale(
    mean: Tensor, variance: Tensor, num_parts: int, *, level: WienerLevel = "hierarchical", gamma: float = 0.0
) -> Tensor:
    r"""Factor that brings a noisy mean nearest to the truth: signal power over signal plus noise power.

    The mean of k parts has noise :math:`\nu_j`, the unbiased variance of the parts over k, and its square is the
    signal's plus that noise, so the debiased GSNR of the whole batch is :math:`R = (\bar g^2 - \nu) / \nu` and

    .. math:: s = \frac{R}{1 + R} = \max\left(0, 1 - \frac{\nu}{\bar g^2}\right)

    Args:
        mean: mean gradient over the parts.
        variance: biased variance of the parts, elementwise.
        num_parts: k.
        level: over what both powers are estimated. "element": each by itself, from a single square, so that it is a
            hard threshold more than an estimate. "row" and "tensor": one factor each, from sums. "hierarchical":
            the signal's power is the tensor's mean and the noise the element's own, :math:`\tau^2/(\tau^2+\nu_j)`.
        gamma: smallest factor.

    Returns:
        The factors, of the shape of `mean`. Without noise, and where it is nan, the factor is 1.

    Raises:
        ValueError: when `gamma` is not in [0, 1], the shapes differ, there are fewer than 2 parts, or the level is
            unknown.

    Example:
        Two parts with mean 2 and biased variance 1: the noise of their mean is 2/2 = 1, so 1 - 1/4.

        >>> import torch
        >>> wiener_scale(torch.tensor([2.0]), torch.tensor([1.0]), 2, level="element")
        tensor([0.7500])

    References:
        Wiener, "Extrapolation, interpolation, and smoothing of stationary time series", 1949; the positive-part form
        is that of James and Stein, "Estimation with quadratic loss", 1961.
    """
    import torch

    _check(mean, variance, "variance", gamma)
    if num_parts < 2:
        raise ValueError(f"num_parts is {num_parts}; expected at least 2 gradients to tell signal from noise")
    power = mean.square()
    noise = variance / (num_parts - 1)
    # A nan must not spread to the other elements of its tensor.
    known = torch.isfinite(power) & torch.isfinite(noise)
    if level == "element":
        factor = 1 - noise / power
    elif level in ("row", "tensor"):
        dims = _dims(mean, level == "row")
        factor = 1 - _sum(noise, known, dims) / _sum(power, known, dims)
    elif level == "hierarchical":
        dims = _dims(mean, False)
        signal = (_sum(power - noise, known, dims) / known.sum(dims, keepdim=True)).clamp(min=0).to(mean.dtype)
        factor = signal / (signal + noise)
    else:
        raise ValueError(f"level is {level!r}; expected 'element', 'row', 'tensor' or 'hierarchical'")
    factor = factor.to(mean.dtype).clamp(gamma, 1.0)
    return torch.where(known & (noise > 0), factor, 1.0).nan_to_num(nan=1.0)


def _sum(values: Tensor, known: Tensor, dims: tuple[int, ...]) -> Tensor:
    import torch

    return torch.where(known, values, 0.0).sum(dims, keepdim=True, dtype=_sum_dtype(values))


def _dims(tensor: Tensor, by_row: bool) -> tuple[int, ...]:
    return tuple(range(1 if by_row and tensor.dim() > 1 else 0, tensor.dim()))


def _check(mean: Tensor, second: Tensor, name: str, gamma: float) -> None:
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma!r}; expected a factor in [0, 1], e.g. 0.1")
    if mean.shape != second.shape:
        raise ValueError(
            f"mean has shape {tuple(mean.shape)} and {name} {tuple(second.shape)}; "
            "expected two statistics of one gradient"
        )


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    import torch

    return torch.float32 if tensor.device.type == "mps" else torch.float64
