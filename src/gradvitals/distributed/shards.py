"""Access to a rank's own part of a DTensor, without DTensor operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

PLAIN = (Tensor, nn.Parameter)
"""Types that are never DTensors: checking them first is faster than looking for missing attributes."""


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a DTensor; any other tensor as it is.

    Operations on DTensors go through a slow dispatcher, and may start collectives.
    """
    part: Any = None if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor
    # An asynchronous collective may still be filling it. This waits on the device, not on the host.
    wait = getattr(part, "trigger_wait", None)
    result: Tensor = part if wait is None else wait()
    return result


def placements(tensor: Tensor) -> tuple[Any, ...]:
    """Returns the placements of a DTensor; nothing for a plain tensor."""
    if type(tensor) in PLAIN:
        return ()
    return tuple(getattr(tensor, "placements", ()) or ()) if hasattr(tensor, "_local_tensor") else ()


def is_sharded(placement: Any) -> bool:
    """Returns whether a placement shards the tensor."""
    return hasattr(placement, "dim")  # Shard, and the strided shards of FSDP on top of tensor parallelism


def num_shards(tensor: Tensor) -> int:
    """Returns the number of different shards of a tensor."""
    count = 1
    for dim, placement in enumerate(placements(tensor)):
        count *= tensor.device_mesh.shape[dim] if is_sharded(placement) else 1  # type: ignore[attr-defined]
    return count


def shard_index(tensor: Tensor) -> int:
    """Returns the index of the shard that this rank holds. Replicas have the same index."""
    if not placements(tensor):
        return 0
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    index = 0
    for size, here, placement in zip(mesh.shape, mesh.get_coordinate(), placements(tensor), strict=True):
        if is_sharded(placement):
            index = index * size + here
    return index


def rows_held(tensor: Tensor, dim: int) -> range:
    """Returns the range along a dimension that this rank holds."""
    start, length = 0, tensor.shape[dim]
    if placements(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        cuts = [
            (size, here, type(placement).__name__ != "Shard")
            for size, here, placement in zip(mesh.shape, mesh.get_coordinate(), placements(tensor), strict=True)
            if is_sharded(placement) and placement.dim == dim
        ]
        # FSDP shards the shards of tensor parallelism, although its mesh dimension comes first.
        for size, here, _ in sorted(cuts, key=lambda cut: cut[2]):
            chunk = -(-length // size)
            first = min(here * chunk, length)
            start, length = start + first, min(chunk, length - first)
    return range(start, start + length)


def is_summand(grad: Tensor, leaf: Tensor) -> bool:
    """Returns whether a gradient only needs a sum over ranks to have its parameter's placements."""
    if type(grad) in PLAIN:
        return False
    lie, wanted = placements(grad), placements(leaf)
    others = [(here, there) for here, there in zip(lie, wanted, strict=False) if here != there]
    return bool(others) and all(here.is_partial() and there.is_replicate() for here, there in others)


def local_like(grad: Tensor, leaf: Tensor) -> Tensor:
    """Returns this rank's part of a gradient, in the placements of its parameter.

    Gradients of tensor-parallel embeddings may have other placements: replicated, or partial sums.
    """
    if type(leaf) not in PLAIN and placements(leaf) and placements(grad) != placements(leaf):
        grad = grad.detach().redistribute(placements=placements(leaf))  # type: ignore[attr-defined]
    return local(grad)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the module inside DDP, DataParallel and torch.compile, which only add a prefix to its names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (DataParallel, DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def mesh_ranks(tensor: Tensor) -> tuple[int, ...]:
    """Returns the ranks of a DTensor's mesh; nothing for a plain tensor."""
    if not placements(tensor):
        return ()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return tuple(mesh.mesh.flatten().tolist())


class Summand(NamedTuple):
    """A rank's partial sum of a tensor, and the mesh to sum it over."""

    part: Tensor
    mesh: Any
    placements: tuple[Any, ...]


@torch.no_grad()
def set_aside(tensor: Tensor) -> Summand:
    """Returns a copy of a rank's partial sum. DTensor's own clone would start a collective."""
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    return Summand(local(tensor).detach().clone(), mesh, placements(tensor))


@torch.no_grad()
def sums_of_partial(summands: Mapping[int, Summand]) -> dict[int, Tensor]:
    """Returns the sum of each over its ranks, by one collective per process group.

    They are few and small, and all ranks of a group hold the same ones.
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
