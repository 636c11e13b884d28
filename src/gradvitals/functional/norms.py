"""Norms that neither overflow, underflow nor lose digits in the precision gradients come in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Columns are taken to float64 a piece at a time, so that a large half-precision tensor is never copied whole.
_CHUNK_ELEMENTS = 1 << 22


def double_chunks(rows: Tensor) -> Iterator[Tensor]:
    """The columns of a matrix in order, in float64, a few million elements at a time."""
    if rows.device.type == "mps":
        rows = rows.cpu()  # Metal has no float64.
    width = max(1, _CHUNK_ELEMENTS // max(1, rows.shape[0]))
    for piece in rows.detach().split(width, dim=1):
        yield piece.double()


def squared_norm(tensor: Tensor) -> float:
    r"""Squared L2 norm, summed in float64.

    .. math:: \|x\|^2 = \sum_i x_i^2

    Squares of float16 leave its range from 256 upwards and below 2e-4; here every element is squared in float64.

    Args:
        tensor: any shape, any real dtype.

    Returns:
        The sum of squares; 0 for an empty tensor, nan or inf where the tensor holds one.

    Example:
        >>> import torch
        >>> squared_norm(torch.tensor([3.0, 4.0], dtype=torch.float16))
        25.0
    """
    return sum(float(piece[0] @ piece[0]) for piece in double_chunks(tensor.reshape(1, -1)))


def global_norm(tensors: Iterable[Tensor | None]) -> float:
    r"""L2 norm of several tensors taken as one vector.

    .. math:: \|g\| = \sqrt{\sum_l \|g_l\|^2}

    Args:
        tensors: for instance the gradients of a model; those that are None are passed over.

    Returns:
        The norm; 0 when there is nothing to sum.

    Example:
        >>> import torch
        >>> global_norm([torch.tensor([3.0]), None, torch.tensor([[0.0, 4.0]])])
        5.0
    """
    return math.sqrt(sum(squared_norm(tensor) for tensor in tensors if tensor is not None))
