"""One pass over many tensors at once: norms, extremes, counts, inner products, evenly spread samples.

Everything here stays on the device, allocates a bounded workspace and never waits for the host. On a GPU launches are
what costs, so many tensors share one; on a CPU the plain call for each tensor is the fastest there is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gradvitals.measure.packet import Known, Packet

CHUNK_ELEMENTS = 2**21
"""Elements looked at together where an elementwise result is needed: 8 MB of float32."""

SMALL_ELEMENTS = 2**16
"""Tensors of up to this size are handled many at a time; for larger ones a launch of their own does not matter."""

SAMPLE_ELEMENTS = 2**12
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
    if len({(tensor.device, tensor.dtype, tensor.layout) for tensor in tensors}) == 1 and not tensors[0].is_sparse:
        yield list(rows), list(tensors)  # nearly always
        return
    groups: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for row, tensor in zip(rows, tensors, strict=True):
        tensor = dense(tensor)
        group_rows, group = groups.setdefault((tensor.device, tensor.dtype), ([], []))
        group_rows.append(row)
        group.append(tensor)
    yield from groups.values()


def norm_of_all(known: Known) -> Tensor | None:
    """The norm of everything whose norms a packet has; None where there are none, or on several devices."""
    norms = [numbers if isinstance(numbers, Tensor) else torch.stack(list(numbers)) for _, numbers in known]
    if len({some.device for some in norms}) != 1:
        return None
    whole: Tensor = torch.linalg.vector_norm(torch.cat(norms))
    return whole


def norms(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """L2 norm of every tensor of one device and dtype, as one multi-tensor call."""
    kind = accumulator(tensors[0].dtype)
    # Naming the dtype it would use anyway makes the call half again as slow on a CPU.
    return torch._foreach_norm(list(tensors), 2.0, dtype=None if tensors[0].dtype == kind else kind)


def add_norms(packet: Packet, name: str, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """L2 norm of every tensor: one multi-tensor call for each device and dtype."""
    for group_rows, group in by_device_and_dtype(rows, tensors):
        packet.add_each(name, norms(group), group_rows)


def add_sums_of_positive(packet: Packet, name: str, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Sum of every tensor whose elements are not negative."""
    for group_rows, group in by_device_and_dtype(rows, tensors):
        kind = accumulator(group[0].dtype)
        if group[0].is_cuda:
            packet.add_each(name, torch._foreach_norm(group, 1.0, dtype=kind), group_rows)
        else:
            packet.add_each(name, [tensor.sum(dtype=kind) for tensor in group], group_rows)


def add_largest(packet: Packet, name: str, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Largest absolute value of every tensor; nan where it holds one."""
    for group_rows, group in by_device_and_dtype(rows, tensors):
        if group[0].is_cuda:
            kind = accumulator(group[0].dtype)
            packet.add_each(name, torch._foreach_norm(group, float("inf"), dtype=kind), group_rows)
        else:
            extremes = [torch.stack(torch.aminmax(tensor)).abs().amax() for tensor in group]
            packet.add_each(name, extremes, group_rows)


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
    """Number of elements of every tensor that are not zero; for small ones on a GPU the sum of |sign|."""
    for group_rows, group in by_device_and_dtype(rows, tensors):
        kind = accumulator(group[0].dtype)
        if not group[0].is_cuda:
            packet.add_each(name, [torch.count_nonzero(tensor) for tensor in group], group_rows)
            continue
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

    For small tensors on a GPU there is no multi-tensor sum, but one of absolute values: the positive products less
    the negative ones.
    """
    together = {
        row: (a, b if a.stride() == b.stride() else torch.empty_like(a, dtype=b.dtype).copy_(b))
        for row, a, b in zip(rows, left, right, strict=True)
        if not b.is_sparse
    }
    for group_rows, group in by_device_and_dtype(list(together), [b for _, b in together.values()]):
        kind = accumulator(group[0].dtype)
        weights = [together[row][0] for row in group_rows]
        batches, large = batches_of_small(group_rows, group) if group[0].is_cuda else ([], range(len(group)))
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

    Tensors of up to `most` elements are read whole; of larger ones every s-th element in storage order is read,
    with s odd so that it does not fall into step with rows of even length.
    """

    def __init__(self, rows: Sequence[int], tensors: Sequence[Tensor], most: int) -> None:
        # Whole tensors first: they can be joined in one launch, strided ones take one each.
        self.order = sorted(range(len(rows)), key=lambda p: tensors[p].numel() > most)
        self.rows = [rows[p] for p in self.order]
        sizes = [tensors[p].numel() for p in self.order]
        self.strides = [odd_stride(size, most) for size in sizes]
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


def samplers(
    rows: Sequence[int], tensors: Sequence[Tensor], most: int = SAMPLE_ELEMENTS
) -> list[tuple[Sampler, list[int]]]:
    """A Sampler for each device and dtype, with the positions of its tensors in the list given."""
    position = {row: index for index, row in enumerate(rows)}
    return [
        (Sampler(group_rows, group, most), [position[row] for row in group_rows])
        for group_rows, group in by_device_and_dtype(rows, tensors)
    ]


def odd_stride(numel: int, most: int) -> int:
    """The step that leaves at most `most` of `numel` elements."""
    return math.ceil(numel / most) | 1 if numel > most else 1


def _whole(tensor: Tensor) -> tuple[Tensor]:
    return (flat(tensor),)
