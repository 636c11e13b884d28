"""Where squared deviations are summed: parameters of one kind lie one after the other in one flat tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 256 * 2**20
"""Parameters that are worked on together in a step: it bounds what a step takes of memory for a moment."""


@dataclass(frozen=True)
class Kind:
    """What parameters must have in common to be worked on together."""

    group: int
    device: torch.device
    dtype: torch.dtype
    noise_dtype: torch.dtype
    odd: bool
    """Whether it has a number of elements that no vector instruction likes, and would shift all that follow."""


class Block:
    """The sums of squared deviations of some parameters of one kind, one after the other in one flat tensor."""

    def __init__(self, kind: Kind, parameters: Sequence[Tensor]) -> None:
        self.kind = kind
        self.parameters = list(parameters)
        sizes = [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(sizes), dtype=kind.noise_dtype, device=kind.device)
        pieces = self.flat.split(sizes)
        self.noises = [like_in_memory(p, piece) for p, piece in zip(parameters, pieces, strict=True)]
        self.cache: dict[str, Any] = {}
        """What others work out once for this block."""

    def fits(self) -> bool:
        """Whether the parameters still are where and what they were."""
        return all(
            p.device == self.kind.device and p.dtype == self.kind.dtype and p.shape == noise.shape
            for p, noise in zip(self.parameters, self.noises, strict=True)
        )


def in_blocks(parameters: Iterable[Tensor], key: Callable[[Tensor], Kind]) -> list[tuple[Kind, list[Tensor]]]:
    """Parameters of one kind together, in the order given, `BLOCK_BYTES` or one parameter at a time."""
    found: list[tuple[Kind, list[Tensor]]] = []
    open_chunks: dict[Kind, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind, size = key(parameter), parameter.numel() * parameter.element_size()
        chunk, used = open_chunks.get(kind, ([], BLOCK_BYTES + 1))
        if used + size > BLOCK_BYTES:
            chunk, used = [], 0
            found.append((kind, chunk))
        chunk.append(parameter)
        open_chunks[kind] = (chunk, used + size)
    return found


def like_in_memory(tensor: Tensor, piece: Tensor) -> Tensor:
    """A view of flat memory with a tensor's shape, and its order of elements where it has no gaps in memory."""
    places = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in places:
        if stride != expected:
            return piece.view(tensor.shape)
        expected *= size
    return piece.as_strided(tensor.shape, tensor.stride(), piece.storage_offset())


def in_memory_order(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, flat, as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def refuse_what_has_no_elements_here(parameter: Tensor) -> None:
    """Refuse a parameter of which no squares of elements can be summed here."""
    if not parameter.is_floating_point():
        raise TypeError(
            f"a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; expected real floating-point numbers"
        )
    if hasattr(parameter, "placements"):
        raise TypeError(
            "a parameter is a DTensor, sharded by FSDP2 or tensor parallelism; variance-reduced optimizers know only "
            "whole parameters: use DistributedDataParallel and use_ranks(model)"
        )
