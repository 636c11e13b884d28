"""Clipping of gradients: to a fixed norm, by the z-score of the norm, or per tensor by its own history."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clip_factor(norm: Tensor, max_norm: Tensor | float) -> Tensor:
    r"""What a gradient is multiplied by so that its norm is at most `max_norm`.

    .. math:: \min(1, c / \|g\|)

    Args:
        norm: the norm of the gradient, or of each of several.
        max_norm: the largest norm allowed, c.

    Returns:
        The factor: 1 for a gradient of zeros, nan for one that is not a number.

    Example:
        >>> import torch
        >>> clip_factor(torch.tensor([0.5, 4.0, 0.0]), 2.0)
        tensor([1.0000, 0.5000, 1.0000])
    """
    return (max_norm / norm).clamp(max=1.0)


def zclip_norm(norm: Tensor, mean: float, std: float, threshold: float = 2.5) -> Tensor:
    r"""The norm that ZClip leaves of a gradient, from the mean and the deviation of earlier norms.

    With :math:`z = (\|g\| - \mu) / \sigma` over the threshold t, the gradient is clipped to
    :math:`\mu + t^2 \sigma / z`: the larger the spike, the less is left of it.

    Args:
        norm: the norm of the gradient.
        mean: moving average of earlier norms.
        std: their standard deviation.
        threshold: z-score from which on it is clipped.

    Example:
        At a z-score of 5, twice the threshold, half of the threshold is left: 10 + 1.25.

        >>> import torch
        >>> zclip_norm(torch.tensor([15.0, 12.0]), mean=10.0, std=1.0)
        tensor([11.2500, 12.0000])

    References:
        Kumar et al., "ZClip: adaptive spike mitigation for LLM pre-training", 2025, arXiv 2504.02507.
    """
    import torch

    z = (norm - mean) / std
    return torch.where(z > threshold, mean + threshold**2 * std / z, norm)


def adagc_factors(norms: Tensor, averages: Tensor, ratio: float = 1.05) -> Tensor:
    r"""AdaGC: each tensor is clipped to a multiple of the moving average of its own norm.

    .. math:: h_i = \min(1, \lambda \gamma_i / \|g_i\|)

    Args:
        norms: norm of each tensor's gradient.
        averages: moving average of each tensor's norm after clipping, gamma.
        ratio: how far over its average a norm may be, lambda.

    Example:
        >>> import torch
        >>> adagc_factors(torch.tensor([1.0, 4.2]), torch.tensor([1.0, 2.0]))
        tensor([1.0000, 0.5000])

    References:
        Wang et al., "AdaGC: improving training stability for large language model pretraining", 2025,
        arXiv 2502.11034.
    """
    return clip_factor(norms, ratio * averages)
