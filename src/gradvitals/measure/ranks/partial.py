"""Gradients of which every rank holds a summand: norm layers under sequence parallelism, before anybody sums them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from gradvitals.measure.ranks.shards import local, placements


class Summand(NamedTuple):
    """A rank's summand of a tensor, and over which ranks it is to be summed."""

    part: Tensor
    mesh: Any
    placements: tuple[Any, ...]


@torch.no_grad()
def set_aside(tensor: Tensor) -> Summand:
    """Keep a rank's summand as it is now. DTensor's own clone would sum it, with a collective of its own."""
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return Summand(local(tensor).detach().clone(), mesh, placements(tensor))


@torch.no_grad()
def sums_of_partial(summands: Mapping[int, Summand]) -> dict[int, Tensor]:
    """The sum of each.

    One collective a process group sums all of them; they are few and small, and the ranks of a group hold the same.
    """
    sums = {row: summand.part for row, summand in summands.items()}
    by_group: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
    for row, (part, mesh, laid) in summands.items():
        for dim, placement in enumerate(laid):
            if placement.is_partial() and mesh.shape[dim] > 1:
                by_group.setdefault((mesh.get_group(dim), part.dtype), []).append(row)
    for (group, _), rows in by_group.items():
        joined = torch.cat([sums[row].reshape(-1) for row in rows])
        dist.all_reduce(joined, group=group)
        pieces = joined.split([sums[row].numel() for row in rows])
        for row, piece in zip(rows, pieces, strict=True):
            sums[row] = piece.view(sums[row].shape)
    return sums
