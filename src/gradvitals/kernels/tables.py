"""Tables that let one launch process many tensors: their chunks and their addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16
"""Alignment for wide loads: of addresses in bytes, of chunks in elements."""


class Chunks:
    """Tensors split into chunks of at most `span` elements, as tables on the device. Built once per set of tensors.

    Args:
        sizes: Number of elements of each tensor.
        device: For the tables.
        span: Most elements per chunk.
        slices: Number of equal slices, e.g. attention heads, by position, of the tensors to sum by slice too. A chunk
            then lies within one slice.
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
            start = (np.arange(number, dtype=np.int64)[:, None] * length + inside).ravel()
            limit = np.repeat(np.arange(1, number + 1, dtype=np.int64) * length, per_slice)
            starts.append(start)
            ends.append(np.minimum(start + span, limit))
            tensors.append(np.full(len(start), position, dtype=np.int64))
            ranges.append((first, first + len(start)))
            if position in slices:
                of_slices += [(first + k * per_slice, first + (k + 1) * per_slice) for k in range(number)]
            first += len(start)
        self.num_tensors, self.num_chunks = len(sizes), first
        self.firsts = [start for start, _ in ranges]
        """Index of the first chunk of each tensor."""
        self.slices = slices
        self.num_ranges = len(ranges) + len(of_slices)
        """Number of sums: one per tensor, then one per slice."""
        columns = np.stack([np.concatenate(column) if column else np.zeros(0) for column in (tensors, starts, ends)])
        self.table = upload(torch.from_numpy(columns.astype(np.int64)), device)
        """For each chunk: its tensor, its start and its end."""
        self.ranges = upload(torch.tensor([*ranges, *of_slices], dtype=torch.int64).reshape(-1, 2), device)
        """For each sum: its first chunk, and the one after its last."""


def sliceable(size: int, number: int) -> bool:
    """Return whether a tensor splits into this many equal slices that all are aligned."""
    return number > 1 and size % number == 0 and (size // number) % ALIGNMENT == 0


class Addresses:
    """A table of tensor addresses on the device, uploaded again only if an address changed."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._table: Tensor | None = None
        self.aligned = True
        """Whether all addresses are aligned."""

    def table(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the table of some tensors of one device."""
        found = [tensor.data_ptr() for tensor in tensors]
        if self._table is None or found != self._known:
            self.aligned = not any(address % ALIGNMENT for address in found)
            sent = _send(found, tensors[0].device)
            if is_capturing(tensors[0].device):  # a replay would overwrite later addresses
                return sent
            self._known, self._table = found, sent
        return self._table


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream captures a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _send(addresses: Sequence[int], device: torch.device) -> Tensor:
    """Return addresses as a table on the device, without a wait."""
    if is_capturing(device):
        from gradvitals.kernels.reductions import put_table

        return put_table(addresses, device)
    return upload(torch.tensor(addresses, dtype=torch.int64), device)


def upload(table: Tensor, device: torch.device) -> Tensor:
    """Return a table on the device, without a wait, which would drain the launch queue."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
