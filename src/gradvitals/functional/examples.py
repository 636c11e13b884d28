"""Gradients of single examples for the weight of a normalisation layer, from what its backward has at hand anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


def norm_example_gradients(
    normalised: Tensor, grad_output: Tensor, *, example_dim: int = 0, weight_dims: Sequence[int] = (-1,)
) -> Tensor:
    r"""What each example adds to the gradient of a weight that a normalised input is multiplied by.

    A layer :math:`y_{btc} = \gamma_c \hat x_{btc} + \beta_c` with examples b and positions t has

    .. math:: \frac{\partial L}{\partial \gamma_c} = \sum_b h_{bc}, \qquad
              h_{bc} = \sum_t \frac{\partial L}{\partial y_{btc}} \hat x_{btc}

    exactly, as long as examples do not enter each other's normalisation (LayerNorm, RMSNorm, GroupNorm; not batch
    norm). Where L is a mean over B examples, the gradient of an example's own loss is :math:`B h_b`. GSNR and noise
    scale do not depend on that factor, as it multiplies all of them.

    Args:
        normalised: :math:`\hat x`, before weight and bias.
        grad_output: gradient of the loss in the layer's output, of the same shape.
        example_dim: the dimension that runs over examples.
        weight_dims: the dimensions of the weight, in its order; all others are positions.

    Returns:
        `[B, n]`, for each example the n coordinates of its contribution.

    Raises:
        ValueError: when the shapes differ, or a dimension is named twice or is not there.

    Example:
        Two examples of two positions: the first adds 1*3 + 2*1, the second 4*1.

        >>> import torch
        >>> x_hat = torch.tensor([[[1.0], [2.0]], [[4.0], [0.0]]])
        >>> dy = torch.tensor([[[3.0], [1.0]], [[1.0], [5.0]]])
        >>> norm_example_gradients(x_hat, dy).tolist()
        [[5.0], [4.0]]

    References:
        Gray, Tiwari, Bergsma, Hestness, "Normalization layer per-example gradients are sufficient to predict gradient
        noise scale in transformers", NeurIPS 2024.
    """
    if normalised.shape != grad_output.shape:
        raise ValueError(
            f"the shapes are {tuple(normalised.shape)} and {tuple(grad_output.shape)}; expected equal ones"
        )
    kept = [dim % max(normalised.dim(), 1) for dim in (example_dim, *weight_dims)]
    if len(set(kept)) != len(kept) or any(
        not -normalised.dim() <= dim < normalised.dim() for dim in (example_dim, *weight_dims)
    ):
        raise ValueError(
            f"example_dim is {example_dim} and weight_dims are {tuple(weight_dims)}; expected different dimensions of "
            f"a tensor that has {normalised.dim()}"
        )
    product = normalised * grad_output
    positions = [dim for dim in range(product.dim()) if dim not in kept]
    summed = product.sum(positions, keepdim=True) if positions else product
    rows = summed.permute(*kept, *positions)
    return rows.reshape(rows.shape[0], -1)


def layer_shares(signal: NDArray[np.float64], noise: NDArray[np.float64]) -> tuple[float, float]:
    r"""Signal and noise of several layers together, where every layer counts the same.

    .. math:: S = \sum_l \frac{S_l}{S_l + N_l}, \qquad N = \sum_l \frac{N_l}{S_l + N_l}

    :math:`S_l + N_l` is the mean squared norm of one example's gradient in layer l. In plain sums the layer with the
    largest gradients speaks for all: early in training that is the last norm before the output, whose noise scale is
    far below the others'. N / S, the noise scale, is a mean over layers weighted by their shares of signal; where all
    layers have the same, it is that.

    Args:
        signal: of every layer, as from `signal_and_noise_of_sums`. May be below zero by chance.
        noise: likewise.

    Returns:
        S and N. Layers whose sum is not a positive number are left out; nan where none is left.

    Example:
        Noise scales of 1 and 3, with gradients of very different size.

        >>> layer_shares(np.array([100.0, 0.1]), np.array([100.0, 0.3]))
        (0.75, 1.25)
    """
    total = signal + noise
    known = (total > 0) & (total < np.inf)
    if not known.any():
        return float("nan"), float("nan")
    return float((signal[known] / total[known]).sum()), float((noise[known] / total[known]).sum())
