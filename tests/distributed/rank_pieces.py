"""Whole tensors from the parts that ranks hold, put together afterwards, so that looking needs no collective."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch


class Piece(NamedTuple):
    """What one rank has of a tensor that is spread over ranks."""

    values: np.ndarray
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""
    parts: int
    """Different pieces, or summands, that make the whole."""


def piece_of(tensor: torch.Tensor) -> np.ndarray | Piece:
    """A tensor in float64, or this rank's part of it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.double().clone().numpy()
    mesh, placements = tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    parts = 1
    for size, placement in zip(mesh.shape, placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    values = (tensor.to_local() + 0).double().numpy()
    return Piece(values, tuple(offset), tuple(tensor.shape), parts)


def put_together(parts: Sequence[Any]) -> Any:
    """What several ranks have of one thing: parts of a tensor are put in place, summands added; else the first's."""
    if isinstance(parts[0], tuple) and not isinstance(parts[0], Piece):
        return tuple(put_together(members) for members in zip(*parts, strict=True))
    if not isinstance(parts[0], Piece):
        return parts[0]
    whole = np.zeros(parts[0].shape)
    for piece in parts:
        place = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.values.shape, strict=True))
        whole[place] += piece.values * (piece.parts / len(parts))  # as many have the same
    return whole
