"""Gradients of which every rank holds a summand: norm layers under sequence parallelism, before anybody sums them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch import distributed as dist

from gradvitals.measure.ranks.shards import is_partial, local, placements


@torch.no_grad()
def sums_of_partial(tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """This rank's part of the sum of each tensor that is still to be summed over ranks.

    DTensor's own operations would sum them one by one, and again in every operation. Here one collective a process
    group sums all of them; they are few and small, and the ranks of a group hold the same ones.
    """
    sums = {row: local(tensor).detach() for row, tensor in tensors.items() if is_partial(tensor)}
    if not sums:
        return {}
    meshes = {row: tensors[row].device_mesh for row in sums}  # type: ignore[attr-defined]
    by_group: dict[tuple[dist.ProcessGroup, torch.dtype], list[int]] = {}
    for row in sums:
        for dim, placement in enumerate(placements(tensors[row])):
            if placement.is_partial() and meshes[row].shape[dim] > 1:
                by_group.setdefault((meshes[row].get_group(dim), sums[row].dtype), []).append(row)
    for (group, _), rows in by_group.items():
        joined = torch.cat([sums[row].reshape(-1) for row in rows])
        dist.all_reduce(joined, group=group)
        pieces = joined.split([sums[row].numel() for row in rows])
        for row, piece in zip(rows, pieces, strict=True):
            sums[row] = piece.view(sums[row].shape)
    return sums
