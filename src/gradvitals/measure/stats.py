"""One pass over many tensors at once: norms, extremes, counts, inner products, evenly spread samples.

Everything here stays on the device, allocates a bounded workspace and never waits for the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradvitals.measure.packet import Packet

CHUNK_ELEMENTS = 2**21
"""Elements looked at together where an elementwise result is needed: 8 MB of float32."""

SMALL_ELEMENTS = 2**16
"""Tensors of up to this size are handled many at a time; for larger ones a launch of their own does not matter."""

SAMPLE_ELEMENTS = 2**13
"""Coordinates that stand for a whole tensor where only a sample is read."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float32, or float64 for float64 tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense(tensor: Tensor) -> Tensor:
    """The stored values of a sparse tensor, each index once; a dense tensor as it is.

    On a GPU `coalesce` waits for the device, as every optimizer for sparse gradients does too.
    """
    if not tensor.is_sparse:
        return tensor
    values = tensor.coalesce().values()
    return values if values.numel() else values.new_zeros(1)


def by_device_and_dtype(rows: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Split tensors into lists that one multi-tensor call can take."""
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for row, tensor in zip(rows, tensors, strict=True):
        tensor = dense(tensor)
        group_rows, group = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        group_rows.append(row)
        group.append(tensor)
    yield from groups.values()


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> Sequence[Tensor]:
    """Norm of every tensor of one device and dtype, as one multi-tensor launch."""
    return list(torch._foreach_norm(list(tensors), order, dtype=accumulator(tensors[0].dtype)))


def add_norms(packet: Packet, name: str, rows: Sequence[int], tensors: Sequence[Tensor], order: float = 2.0) -> None:
    """Norm of every tensor: one multi-tensor launch for each device and dtype."""
    for group_rows, group in by_device_and_dtype(rows, tensors):
        packet.add_each(name, norms(group, order), group_rows)


def flat(tensor: Tensor) -> Tensor:
    """A one-dimensional view in storage order, whatever the strides; a copy only where none exists."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    storage_order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(storage_order).reshape(-1)


def chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Cut a tensor into flat pieces of bounded size."""
    return list(flat(tensor).split(CHUNK_ELEMENTS))


def batches_of_small(
    rows: Sequence[int], tensors: Sequence[Tensor]
) -> tuple[list[tuple[list[int], list[int]]], list[int]]:
    """Sort tensors by size.

    Returns:
        Batches of small tensors, each of bounded size, as (rows, positions in the list given), and the positions of
        the large ones.
    """
    batches: list[tuple[list[int], list[int]]] = []
    large: list[int] = []
    room = 0
    for position, (row, tensor) in enumerate(zip(rows, tensors, strict=True)):
        if tensor.numel() > SMALL_ELEMENTS:
            large.append(position)
            continue
        if tensor.numel() > room:
            batches.append(([], []))
            room = CHUNK_ELEMENTS
        room -= tensor.numel()
        batches[-1][0].append(row)
        batches[-1][1].append(position)
    return batches, large


def add_nonzero_counts(packet: Packet, name: str, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Number of elements of every tensor that are not zero; for small tensors the sum of |sign|."""
    for group_rows, group in by_device_and_dtype(rows, tensors):
        kind = accumulator(group[0].dtype)
        batches, large = batches_of_small(group_rows, group)
        for batch_rows, positions in batches:
            signs = torch._foreach_sign([group[p] for p in positions])
            packet.add_each(name, torch._foreach_norm(signs, 1.0, dtype=kind), batch_rows)
        counts = [torch.linalg.vector_norm(group[p], 0, dtype=kind) for p in large]
        packet.add_each(name, counts, [group_rows[p] for p in large])


def add_nonfinite_counts(packet: Packet, name: str, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Number of NaN and infinite elements of every tensor: x - x is 0 for all others."""
    for row, tensor in zip(rows, tensors, strict=True):
        for piece in chunks(dense(tensor)):
            packet.add(name, torch.linalg.vector_norm(piece - piece, 0, dtype=accumulator(piece.dtype)), [row])


def add_inner_products(
    packet: Packet, name: str, rows: Sequence[int], left: Sequence[Tensor], right: Sequence[Tensor]
) -> None:
    """Inner product of each pair of tensors, accumulated in float32 or better. Sparse ones are left out.

    For small tensors there is no multi-tensor sum, but one of absolute values: the positive products less the
    negative ones.
    """
    together = [
        (row, a, b if a.stride() == b.stride() else torch.empty_like(a, dtype=b.dtype).copy_(b))
        for row, a, b in zip(rows, left, right, strict=True)
        if not b.is_sparse
    ]
    position = {row: index for index, (row, _, _) in enumerate(together)}
    for group_rows, group in by_device_and_dtype([row for row, _, _ in together], [b for _, _, b in together]):
        kind = accumulator(group[0].dtype)
        weights = [together[position[row]][1] for row in group_rows]
        batches, large = batches_of_small(group_rows, group)
        for batch_rows, chosen in batches:
            products = torch._foreach_mul([weights[p].to(kind) for p in chosen], [group[p].to(kind) for p in chosen])
            packet.add_each(name, torch._foreach_norm(torch._foreach_clamp_min(products, 0.0), 1.0), batch_rows)
            negative = torch._foreach_norm(torch._foreach_clamp_max(products, 0.0), 1.0)
            packet.add_each(name, torch._foreach_neg(negative), batch_rows)
        for p in large:
            converts = group[p].dtype != kind or weights[p].dtype != kind
            cut: Callable[[Tensor], Sequence[Tensor]] = chunks if converts else _whole  # converting takes memory
            for x, y in zip(cut(weights[p]), cut(group[p]), strict=True):
                packet.add(name, torch.dot(x.to(kind), y.to(kind)), [group_rows[p]])


class Sampler:
    """Reads the same evenly spread coordinates of many tensors into one flat buffer.

    Tensors of up to `SAMPLE_ELEMENTS` are read whole; of larger ones every s-th element in storage order is
    read, with s odd so that it does not fall into step with rows of even length.
    """

    def __init__(self, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
        # Whole tensors first: they can be joined in one launch, strided ones take one each.
        self.order = sorted(range(len(rows)), key=lambda p: tensors[p].numel() > SAMPLE_ELEMENTS)
        self.rows = [rows[p] for p in self.order]
        sizes = [tensors[p].numel() for p in self.order]
        self.strides = [_odd_stride(size) for size in sizes]
        lengths = [math.ceil(size / stride) for size, stride in zip(sizes, self.strides, strict=True)]
        self.fractions = [length / size for length, size in zip(lengths, sizes, strict=True)]
        self.num_whole = self.strides.count(1)
        self.num_samples = sum(lengths)
        self.lengths = torch.tensor(lengths).to(tensors[0].device, non_blocking=True)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sampled coordinates of all tensors, in the order of `rows`."""
        flats = [flat(tensors[p]) for p in self.order]
        whole = flats[: self.num_whole]
        strided = [t[::s] for t, s in zip(flats[self.num_whole :], self.strides[self.num_whole :], strict=True)]
        joined = [torch.cat(part) for part in (whole, strided) if part]
        samples = torch.cat(joined) if len(joined) > 1 else joined[0]
        return samples.to(accumulator(samples.dtype))

    def sums(self, samples: Tensor) -> Tensor:
        """Sum of the samples of each tensor."""
        return torch.segment_reduce(samples, "sum", lengths=self.lengths, axis=0, unsafe=True)


def samplers(rows: Sequence[int], tensors: Sequence[Tensor]) -> list[tuple[Sampler, list[int]]]:
    """A Sampler for each device and dtype, with the positions of its tensors in the list given."""
    position = {row: index for index, row in enumerate(rows)}
    return [
        (Sampler(group_rows, group), [position[row] for row in group_rows])
        for group_rows, group in by_device_and_dtype(rows, tensors)
    ]


def _odd_stride(numel: int) -> int:
    return math.ceil(numel / SAMPLE_ELEMENTS) | 1 if numel > SAMPLE_ELEMENTS else 1


def _whole(tensor: Tensor) -> tuple[Tensor]:
    return (flat(tensor),)
