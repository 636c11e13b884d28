"""Whole tensors from the parts that ranks hold, put together afterwards, so that looking needs no collective."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch


class Piece(NamedTuple):
    """What one rank has of a tensor that is spread over ranks."""

    values: np.ndarray
    parts: int
    """Different pieces, or summands, that make the whole."""
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the whole."""


def piece_of(tensor: torch.Tensor) -> np.ndarray | Piece:
    """A tensor in float64, or this rank's part of it."""
    if not hasattr(tensor, "_local_tensor"):
        return _in_double(tensor)
    # Not by operations of DTensor, whose dispatcher takes longer than all else here.
    values = _in_double(tensor._local_tensor)
    shape = tuple(tensor.shape)
    return Piece(values, *_place(shape, tensor.device_mesh, tensor.placements), shape=shape)


def _in_double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64, copy=True).numpy()


@cache
def _place(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[int, tuple[int, ...]]:
    """How many parts make a tensor of this shape, and where this rank's begins in it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    parts = 1
    for size, placement in zip(mesh.shape, placements, strict=True):
        parts *= 1 if placement.is_replicate() else size
    return parts, tuple(offset)


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
