"""How tensors are split into chunks for one launch, and tables of their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Bytes to which addresses, and elements to which chunks must be aligned for wide loads."""


class Cut:
    """Chunks of at most `span` elements, each of one tensor, on the device: built once for a set of tensors.

    Args:
        sizes: Elements of each tensor.
        device: Where the tables go.
        span: Elements of a chunk.
        slices: Tensors, by position, that are also to be summed in so many equal parts, e.g. attention heads. A chunk
            then lies in one part.
    """

    def __init__(
        self, sizes: Sequence[int], device: torch.device, span: int, slices: Mapping[int, int] | None = None
    ) -> None:
        slices = {position: number for position, number in (slices or {}).items() if sliceable(sizes[position], number)}
        tensors, starts, ends = [], [], []
        ranges: list[tuple[int, int]] = []
        of_slices: list[tuple[int, int]] = []
        first = 0
        for position, size in enumerate(sizes):
            number = slices.get(position, 1)
            length = size // number
            per_slice = -(-length // span)
            inside = np.arange(per_slice, dtype=np.int64) * span
            begin = (np.arange(number, dtype=np.int64)[:, None] * length + inside).ravel()
            limit = np.repeat(np.arange(1, number + 1, dtype=np.int64) * length, per_slice)
            starts.append(begin)
            ends.append(np.minimum(begin + span, limit))
            tensors.append(np.full(len(begin), position, dtype=np.int64))
            ranges.append((first, first + len(begin)))
            if position in slices:
                of_slices += [(first + k * per_slice, first + (k + 1) * per_slice) for k in range(number)]
            first += len(begin)
        self.num_tensors, self.num_chunks = len(sizes), first
        self.firsts = [begin for begin, _ in ranges]
        """The first chunk of each tensor."""
        self.slices = slices
        self.num_ranges = len(ranges) + len(of_slices)
        """Sums that come out: one for each tensor, then one for each slice."""
        table = np.stack([np.concatenate(column) if column else np.zeros(0) for column in (tensors, starts, ends)])
        self.chunks = upload(torch.from_numpy(table.astype(np.int64)), device)
        """For each chunk its tensor, where in it the chunk begins, and where it ends."""
        self.ranges = upload(torch.tensor([*ranges, *of_slices], dtype=torch.int64).reshape(-1, 2), device)
        """For each sum, its first chunk and the one after its last."""


def sliceable(size: int, number: int) -> bool:
    """Whether a tensor can be cut into so many parts that all begin where wide loads may."""
    return number > 1 and size % number == 0 and (size // number) % ALIGNMENT == 0


class Addresses:
    """A table of where tensors lie, on the device; sent again only when something has moved."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._table: Tensor | None = None
        self.aligned = True
        """Whether all of them begin where wide loads may."""

    def table(self, tensors: Sequence[Tensor]) -> Tensor:
        """The addresses of some tensors of one device."""
        found = [tensor.data_ptr() for tensor in tensors]
        if self._table is None or found != self._known:
            self.aligned = not any(address % ALIGNMENT for address in found)
            sent = send(found, tensors[0].device)
            if is_capturing(tensors[0].device):  # a graph's replay would write its addresses over later ones
                return sent
            self._known, self._table = found, sent
        return self._table


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def send(addresses: Sequence[int], device: torch.device) -> Tensor:
    """Addresses to the device, without waiting."""
    if is_capturing(device):
        from gradvitals.kernels.reductions import put_table

        return put_table(addresses, device)
    return upload(torch.tensor(addresses, dtype=torch.int64), device)


def upload(table: Tensor, device: torch.device) -> Tensor:
    """A table to the device, without waiting: a wait would empty the queue of all that is to come."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
