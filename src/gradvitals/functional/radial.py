"""The gradient along the weights: what a learnable multiplier on the tensor would see."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gradvitals.functional.gsnr import gsnr, gsnr_elementwise
from gradvitals.functional.intervals import Estimate
from gradvitals.functional.norms import double_chunks, squared_norm

if TYPE_CHECKING:
    from torch import Tensor


def radial(weight: Tensor, grad: Tensor) -> float:
    r"""Component of the gradient along the weights.

    .. math:: q = \frac{\langle W, g \rangle}{\|W\|}

    It is the derivative of the loss by the norm of W, and up to a constant that by a multiplier s in sW.

    Args:
        weight: the weights.
        grad: their gradient, of the same shape.

    Returns:
        The component, summed in float64; nan when the weights are all 0.

    Raises:
        ValueError: when the shapes differ.

    Example:
        >>> import torch
        >>> radial(torch.tensor([3.0, 4.0]), torch.tensor([5.0, 0.0]))
        3.0
    """
    return float(_components(weight, grad[None])[0])


def radial_gsnr(weight: Tensor, grads: Tensor) -> Estimate:
    r"""GSNR of the gradient's component along the weights.

    .. math:: q_t = \frac{\langle W, g_t \rangle}{\|W\|}, \qquad
              \hat r = \frac{T-3}{T-1} \frac{\bar q^2}{s_q^2} - \frac{1}{T}

    Under noise alike in all directions it is :math:`n \bar r \cos^2(W, \mu)` with n elements of mean GSNR
    :math:`\bar r`: many times that of one element when the gradient points along the weights, and the same on average
    when it does not. It is one number a sample, so the value is the unbiased one of a single coordinate.

    Args:
        weight: the weights.
        grads: `[T, ...]`, T gradients at these weights.

    Returns:
        The estimate; the value is nan for T of 3 or less, where no unbiased one exists, and all is nan for zero
        weights.

    Raises:
        ValueError: when the rows of `grads` do not have the shape of `weight`.

    Example:
        Components 1, 2, 3, 4: (1/3) * 6.25 / (5/3) - 1/4.

        >>> import torch
        >>> estimate = radial_gsnr(torch.tensor([2.0, 0.0]), torch.tensor([[1.0, 9], [2, 9], [3, 9], [4, 9]]))
        >>> round(estimate.value, 12)
        1.0
    """
    components = _components(weight, grads)
    interval = gsnr(components)
    value = float(gsnr_elementwise(components))
    return Estimate(value, interval.low, interval.high, interval.num_samples)


def _components(weight: Tensor, grads: Tensor) -> Tensor:
    if grads.dim() == 0 or grads.shape[1:] != weight.shape:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)} and the gradient {tuple(grads.shape[1:])}; expected equal ones"
        )
    import torch

    norm = math.sqrt(squared_norm(weight))
    if norm == 0 or not len(grads):
        return torch.full((len(grads),), math.nan, dtype=torch.float64)
    return torch.tensor([_inner(weight, grad) / norm for grad in grads], dtype=torch.float64)


def _inner(x: Tensor, y: Tensor) -> float:
    pieces = zip(double_chunks(x.reshape(1, -1)), double_chunks(y.reshape(1, -1)), strict=True)
    return sum(float(a[0] @ b[0]) for a, b in pieces)
