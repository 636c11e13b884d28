"""The part of a DTensor that this rank holds, read without going through DTensor's own operations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

PLAIN = (Tensor, nn.Parameter)
"""Types that are never spread over ranks: to look for attributes they do not have would take longer."""


def local(tensor: Tensor) -> Tensor:
    """The rank's own part of a tensor that is spread over ranks; any other tensor as it is.

    Operations on DTensors go through a dispatcher that takes longer than what we do, and may start collectives.
    """
    part: Any = None if type(tensor) in PLAIN else getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor
    # What an asynchronous collective has yet to fill; waiting is for the device, not for the host.
    wait = getattr(part, "trigger_wait", None)
    result: Tensor = part if wait is None else wait()
    return result


def placements(tensor: Tensor) -> tuple[Any, ...]:
    """How a tensor lies on each dimension of its mesh; nothing for a plain tensor."""
    if type(tensor) in PLAIN:
        return ()
    return tuple(getattr(tensor, "placements", ()) or ()) if hasattr(tensor, "_local_tensor") else ()


def is_sharded(placement: Any) -> bool:
    """Whether a tensor is cut along this dimension of the mesh."""
    return hasattr(placement, "dim")  # Shard, and what FSDP makes of it on top of tensor parallelism


def num_shards(tensor: Tensor) -> int:
    """Into how many different parts a tensor is cut."""
    count = 1
    for size, placement in zip(_mesh_shape(tensor), placements(tensor), strict=True):
        count *= size if is_sharded(placement) else 1
    return count


def shard_index(tensor: Tensor) -> int:
    """Which of its parts this rank holds: replicas have the same number."""
    if not placements(tensor):
        return 0
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    index = 0
    for size, here, placement in zip(mesh.shape, mesh.get_coordinate(), placements(tensor), strict=True):
        if is_sharded(placement):
            index = index * size + here
    return index


def rows_held(tensor: Tensor, dim: int) -> range:
    """Which of the tensor's rows along a dimension lie on this rank."""
    start, length = 0, tensor.shape[dim]
    if placements(tensor):
        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        cuts = [
            (size, here, type(placement).__name__ != "Shard")
            for size, here, placement in zip(mesh.shape, mesh.get_coordinate(), placements(tensor), strict=True)
            if is_sharded(placement) and placement.dim == dim
        ]
        # FSDP cuts what tensor parallelism has left, though its dimension of the mesh comes first.
        for size, here, _ in sorted(cuts, key=lambda cut: cut[2]):
            chunk = -(-length // size)
            first = min(here * chunk, length)
            start, length = start + first, min(chunk, length - first)
    return range(start, start + length)


def is_summand(grad: Tensor, leaf: Tensor) -> bool:
    """Whether all that keeps a gradient from lying like its parameter is a sum over ranks."""
    if type(grad) in PLAIN:
        return False
    lie, wanted = placements(grad), placements(leaf)
    others = [(here, there) for here, there in zip(lie, wanted, strict=False) if here != there]
    return bool(others) and all(here.is_partial() and there.is_replicate() for here, there in others)


def local_like(grad: Tensor, leaf: Tensor) -> Tensor:
    """This rank's part of a gradient, laid out like its parameter.

    Gradients of tensor-parallel embeddings may come in another layout: whole on every rank, or as summands of it.
    """
    if type(leaf) not in PLAIN and placements(leaf) and placements(grad) != placements(leaf):
        grad = grad.detach().redistribute(placements=placements(leaf))  # type: ignore[attr-defined]
    return local(grad)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers that only add a prefix to its names: DDP, DataParallel and torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (DataParallel, DistributedDataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def mesh_ranks(tensor: Tensor) -> tuple[int, ...]:
    """The ranks that a tensor is spread over; nothing for a plain tensor."""
    if not placements(tensor):
        return ()
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return tuple(mesh.mesh.flatten().tolist())


def _mesh_shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.device_mesh.shape) if placements(tensor) else ()  # type: ignore[attr-defined]


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
