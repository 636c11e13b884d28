"""Question "layers": which areas of the model learn. Norms of gradient, update and weights; effective rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.collect.parameters import layer_of
from gradvitals.collect.reductions import odd_stride
from gradvitals.functional.norms import squared_norm

MOST_ROWS = 512
MOST_COLUMNS = 4096
"""Rows and columns of a gradient whose effective rank is taken; of larger ones every s-th."""


def effective_rank(matrix: Tensor) -> float:
    r"""How many directions a matrix has, weighted by their size.

    .. math:: \exp\Big(-\sum_i p_i \ln p_i\Big), \qquad p_i = \sigma_i / \sum_j \sigma_j

    with the singular values :math:`\sigma_i`. It is 1 for an outer product and n for n equal singular values. The
    singular values come from the smaller Gram matrix, in float64.

    Args:
        matrix: a weight's gradient; more than two dimensions are taken as rows and all the rest, as in a convolution.

    Returns:
        The effective rank; nan for a vector, for zeros and for what is not finite.

    Example:
        >>> round(effective_rank(torch.eye(3)), 6), round(effective_rank(torch.ones(3, 5)), 6)
        (3.0, 1.0)

    References:
        Roy and Vetterli, "The effective rank: a measure of effective dimensionality", EUSIPCO 2007.
    """
    rows = _as_matrix(matrix)
    largest = float(rows.abs().max()) if rows.numel() else 0.0
    if largest == 0 or not math.isfinite(largest):
        return math.nan
    scaled = rows.double() / largest
    gram = scaled @ scaled.T if len(scaled) <= scaled.shape[1] else scaled.T @ scaled
    values = torch.linalg.eigvalsh(gram).clamp_min(0)
    # What rounding leaves in place of a zero eigenvalue is not a direction.
    values = values[values > values.max() * len(gram) * torch.finfo(torch.float64).eps].sqrt()
    shares = values / values.sum()
    return math.exp(-float((shares * shares.log()).sum()))


def _as_matrix(tensor: Tensor) -> Tensor:
    """Rows and columns of a bounded number; empty for a vector."""
    if tensor.dim() < 2 or not tensor.numel():
        return tensor.new_zeros(0, 0)
    rows = tensor.detach().reshape(tensor.shape[0], -1)
    return rows[:: odd_stride(rows.shape[0], MOST_ROWS), :: odd_stride(rows.shape[1], MOST_COLUMNS)]


def planned_update(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], grads: Sequence[Tensor]
) -> list[Tensor]:
    """By how much one step of the optimizer with these gradients would change each parameter.

    The step is made by a copy of the optimizer, with its moments, on copies of the parameters.

    Raises:
        Exception: what the step of the copy raises, for instance that of an optimizer that wants a closure.
    """
    copies = {id(p): nn.Parameter(p.detach().clone()) for p in parameters}
    memo: dict[int, Any] = dict(copies)
    twin = copy.deepcopy(optimizer, memo)
    for p, grad in zip(parameters, grads, strict=True):
        copies[id(p)].grad = grad.to(p.dtype)
    with torch.enable_grad():
        twin.step()
    return [copies[id(p)].detach() - p.detach() for p in parameters]


def layers_record(
    parameters: Mapping[str, nn.Parameter],
    mean_grads: Sequence[Tensor],
    updates: Sequence[Tensor] | None,
    lr: float | None,
    activations: list[dict[str, Any]],
) -> dict[str, Any]:
    """The answer as a plain record.

    Args:
        parameters: By name.
        mean_grads: The mean gradient of each.
        updates: What one step of the optimizer would add to each, where there is an optimizer.
        lr: Else, the learning rate of plain gradient descent.
        activations: What `Activations.records` gave.
    """
    tensors = []
    for place, (name, parameter) in enumerate(parameters.items()):
        grad = mean_grads[place]
        grad_norm, weight_norm = math.sqrt(squared_norm(grad)), math.sqrt(squared_norm(parameter))
        update_norm = math.nan
        if updates is not None:
            update_norm = math.sqrt(squared_norm(updates[place]))
        elif lr is not None:
            update_norm = lr * grad_norm
        rank, full = effective_rank(grad), min(_as_matrix(grad).shape)
        tensors.append(
            {
                "name": name,
                "layer": layer_of(name),
                "grad_norm": grad_norm,
                "weight_norm": weight_norm,
                "update_norm": update_norm,
                "update_ratio": update_norm / weight_norm if weight_norm > 0 else math.nan,
                "effective_rank": rank,
                "full_rank": full,
                "rank_share": rank / full if full else math.nan,
            }
        )
    by = "optimizer" if updates is not None else "lr" if lr is not None else "none"
    return {"tensors": tensors, "update_by": by, "activations": activations}
