"""Multi-tensor reductions: norms, extremes, counts, inner products and evenly spread samples of many tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradvitals import kernels
from gradvitals.collect.transfer import Known, ReadingBuffer
from gradvitals.kernels.tables import sliceable

if TYPE_CHECKING:
    from gradvitals.collect.parameters import HeadView

CHUNK_ELEMENTS = 2**21
"""Elements processed together if an elementwise result is needed: 8 MB of float32."""

SMALL_ELEMENTS = 2**16
"""Tensors up to this size are processed many at a time; for larger ones a launch of their own does not matter."""

SAMPLE_ELEMENTS = 2**12
"""Coordinates sampled per tensor, if not all are read."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums: float32, or float64 for float64 tensors."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense(tensor: Tensor) -> Tensor:
    """Returns the coalesced values of a sparse tensor; a dense tensor as it is.

    On a GPU `coalesce` synchronizes, as every optimizer for sparse gradients does too.
    """
    if not tensor.is_sparse:
        return tensor
    values = tensor.coalesce().values()
    return values if values.numel() else values.new_zeros(1)


def by_device_and_dtype(rows: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Yield tensors in groups that one multi-tensor call can take."""
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
    """Returns the norm over all given norms; None if there are none, or on several devices."""
    norms = [numbers if isinstance(numbers, Tensor) else torch.stack(list(numbers)) for _, numbers in known]
    if len({some.device for some in norms}) != 1:
        return None
    whole: Tensor = torch.linalg.vector_norm(torch.cat(norms))
    return whole


Reduction = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""Reduces each tensor, all of one device and dtype, to a number; all numbers have one dtype."""

REDUCTIONS: dict[str, Reduction] = {}
"""The reductions of gradients, by their names in `metrics.SUMS`."""


def of_gradients(reduction: Reduction) -> Reduction:
    """Register a reduction of gradients. `metrics.SUMS` has its name and says when it is due."""
    REDUCTIONS[reduction.__name__] = reduction
    return reduction


def add(buffer: ReadingBuffer, name: str, reduction: Reduction, rows: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Put a number of every tensor into the buffer, by one call for each device and dtype."""
    for group_rows, group in by_device_and_dtype(rows, tensors):
        buffer.add_each(name, reduction(group), group_rows)


def norms(tensors: Sequence[Tensor], *, wide: bool = False) -> Sequence[Tensor]:
    """Returns the L2 norm of every tensor, by one multi-tensor call.

    In float32, squares of elements above 2e19 overflow, and those below 1e-19 lose digits. `wide` sums in float64 if
    the device has it, at ten times the cost on a CPU.
    """
    kind = accumulator(tensors[0].dtype)
    if wide and tensors[0].device.type in ("cpu", "cuda"):
        kind = torch.float64
    # Passing the dtype that it uses anyway makes the call 50 % slower on a CPU.
    return torch._foreach_norm(list(tensors), 2.0, dtype=None if tensors[0].dtype == kind else kind)


def sums_of_positive(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the sum of every tensor; no element may be negative."""
    kind = accumulator(tensors[0].dtype)
    if tensors[0].is_cuda:
        return torch._foreach_norm(list(tensors), 1.0, dtype=kind)
    return [tensor.sum(dtype=kind) for tensor in tensors]


@of_gradients
def largest(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the largest absolute value of every tensor; NaN if it holds one."""
    if tensors[0].is_cuda:
        return torch._foreach_norm(list(tensors), float("inf"), dtype=accumulator(tensors[0].dtype))
    return [torch.stack(torch.aminmax(tensor)).abs().amax() for tensor in tensors]


@of_gradients
def nonzero(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the number of nonzero elements of every tensor; for small ones on a GPU, the sum of |sign|."""
    if not tensors[0].is_cuda:
        return [torch.count_nonzero(tensor) for tensor in tensors]
    kind = accumulator(tensors[0].dtype)
    batches, large = batches_of_small(tensors)
    counts = {p: torch.linalg.vector_norm(tensors[p], 0, dtype=kind) for p in large}
    for batch in batches:
        signs = torch._foreach_sign([tensors[p] for p in batch])
        counts |= dict(zip(batch, torch._foreach_norm(signs, 1.0, dtype=kind), strict=True))
    return [counts[p] for p in range(len(tensors))]


@of_gradients
def nonfinite(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the number of NaN and infinite elements of every tensor: x - x is 0 for all others."""
    kind = torch.float64 if tensors[0].device.type in ("cpu", "cuda") else accumulator(tensors[0].dtype)
    counts = []
    for tensor in tensors:
        pieces = [
            torch.linalg.vector_norm(piece - piece, 0, dtype=accumulator(piece.dtype)) for piece in chunks(tensor)
        ]
        counts.append(torch.stack(pieces).sum(dtype=kind))
    return counts


def flat(tensor: Tensor) -> Tensor:
    """Returns a one-dimensional view in storage order; a copy only if no view exists."""
    if tensor.is_contiguous():
        return tensor.view(-1)
    storage_order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(storage_order).reshape(-1)


def chunks(tensor: Tensor) -> Sequence[Tensor]:
    """Returns a tensor in flat pieces of bounded size."""
    return list(flat(tensor).split(CHUNK_ELEMENTS))


def batches_of_small(tensors: Sequence[Tensor]) -> tuple[list[list[int]], list[int]]:
    """Sort tensors by size.

    Returns:
        The positions of small tensors, in batches of bounded size, and those of the large ones.
    """
    batches: list[list[int]] = []
    large: list[int] = []
    room = 0
    for position, tensor in enumerate(tensors):
        if tensor.numel() > SMALL_ELEMENTS:
            large.append(position)
            continue
        if tensor.numel() > room:
            batches.append([])
            room = CHUNK_ELEMENTS
        room -= tensor.numel()
        batches[-1].append(position)
    return batches, large


def add_inner_products(
    buffer: ReadingBuffer, name: str, rows: Sequence[int], left: Sequence[Tensor], right: Sequence[Tensor]
) -> None:
    """Add the inner product of each pair of tensors, accumulated in float32 or better. Skips sparse ones.

    On a GPU, small tensors use the multi-tensor sum of absolute values: of the positive products, then of the negative
    ones.
    """
    together = {
        row: (a, b if a.stride() == b.stride() else torch.empty_like(a, dtype=b.dtype).copy_(b))
        for row, a, b in zip(rows, left, right, strict=True)
        if not b.is_sparse
    }
    for group_rows, group in by_device_and_dtype(list(together), [b for _, b in together.values()]):
        kind = accumulator(group[0].dtype)
        weights = [together[row][0] for row in group_rows]
        batches, large = batches_of_small(group) if group[0].is_cuda else ([], range(len(group)))
        for chosen in batches:
            batch_rows = [group_rows[p] for p in chosen]
            products = torch._foreach_mul([weights[p].to(kind) for p in chosen], [group[p].to(kind) for p in chosen])
            buffer.add_each(name, torch._foreach_norm(torch._foreach_clamp_min(products, 0.0), 1.0), batch_rows)
            negative = torch._foreach_norm(torch._foreach_clamp_max(products, 0.0), 1.0)
            buffer.add_each(name, torch._foreach_neg(negative), batch_rows)
        for p in large:
            converts = group[p].dtype != kind or weights[p].dtype != kind
            cut: Callable[[Tensor], Sequence[Tensor]] = chunks if converts else _whole  # converting needs memory
            for x, y in zip(cut(weights[p]), cut(group[p]), strict=True):
                buffer.add(name, torch.dot(x.to(kind), y.to(kind)), [group_rows[p]])


class Sampler:
    """Reads the same evenly spread coordinates of many tensors into one flat buffer.

    Tensors of up to `most` elements are read whole, larger ones with a stride in storage order: see `sample_stride`.
    """

    def __init__(self, rows: Sequence[int], tensors: Sequence[Tensor], most: int) -> None:
        # Whole tensors first: one launch joins them all, strided views take one each.
        self.order = sorted(range(len(rows)), key=lambda p: tensors[p].numel() > most)
        self.rows = [rows[p] for p in self.order]
        sizes = [tensors[p].numel() for p in self.order]
        self.strides = [sample_stride(tensors[p], most) for p in self.order]
        lengths = [math.ceil(size / stride) for size, stride in zip(sizes, self.strides, strict=True)]
        self.fractions = [length / size for length, size in zip(lengths, sizes, strict=True)]
        self.num_whole = self.strides.count(1)
        self.num_samples = sum(lengths)
        self.lengths = torch.tensor(lengths).to(tensors[0].device, non_blocking=True)

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the sampled coordinates of all tensors, in the order of `rows`."""
        flats = [flat(tensors[p]) for p in self.order]
        whole = flats[: self.num_whole]
        strided = [t[::s] for t, s in zip(flats[self.num_whole :], self.strides[self.num_whole :], strict=True)]
        joined = [torch.cat(part) for part in (whole, strided) if part]
        samples = torch.cat(joined) if len(joined) > 1 else joined[0]
        return samples.to(accumulator(samples.dtype))

    def sums(self, samples: Tensor) -> Tensor:
        """Returns the sum of each tensor's samples."""
        return torch.segment_reduce(samples, "sum", lengths=self.lengths, axis=0, unsafe=True)


def samplers(
    rows: Sequence[int], tensors: Sequence[Tensor], most: int = SAMPLE_ELEMENTS
) -> list[tuple[Sampler, list[int]]]:
    """Returns a Sampler per device and dtype, with the positions of its tensors in the given list."""
    position = {row: index for index, row in enumerate(rows)}
    return [
        (Sampler(group_rows, group, most), [position[row] for row in group_rows])
        for group_rows, group in by_device_and_dtype(rows, tensors)
    ]


GOLDEN = (0.382, 0.618)
"""Golden sections of a row: points spaced by these shares never cluster."""


def sample_stride(tensor: Tensor, most: int) -> int:
    """Returns the stride, in storage order, that samples at most `most` elements.

    A stride close to a multiple of a row would sample only a few neighboring columns: pixels at the edge of an image,
    say, whose weights never change. So it is shifted by a golden section of a row.

    >>> sample_stride(torch.zeros(128, 784), 64) % 784  # of 784 columns
    299
    """
    size = tensor.numel()
    if size <= most:
        return 1
    stride = math.ceil(size / most) | 1
    row = size // max(zip(tensor.stride(), tensor.shape, strict=True))[1]
    if row > 2 and 4 * stride > row:
        stride += min((round(share * row) - stride) % row for share in GOLDEN)
        while math.gcd(stride, row) > 1:  # otherwise it misses some columns
            stride += 1
    return stride


def odd_stride(numel: int, most: int) -> int:
    """Returns the stride that samples at most `most` of `numel` elements without rows."""
    return math.ceil(numel / most) | 1 if numel > most else 1


def _whole(tensor: Tensor) -> tuple[Tensor]:
    return (flat(tensor),)


MOST_SETS = 256
"""Sets of tensors whose chunks are remembered: gradients may come in different portions."""

MOST_LAYOUTS = 2**16
"""Memory layouts that are remembered."""

FUSED = ("norm", "largest", "nonzero", "nonfinite", "inner")
"""The sums that kernels read of a tensor in one pass, in their order of rows."""


class FusedReducer:
    """Reads tensors by kernels, and remembers how each set of them is cut into chunks."""

    def __init__(self) -> None:
        self._readers: dict[tuple[Any, ...], Any] = {}
        self._known: dict[tuple[Any, ...], bool] = {}  # whether kernels can read this layout

    def read(
        self,
        buffer: ReadingBuffer,
        names: Mapping[str, str],
        rows: Sequence[int],
        tensors: Sequence[Tensor],
        *,
        others: Sequence[Tensor | None] | None = None,
        heads: Mapping[int, HeadView] | None = None,
        name_of_heads: str = "",
        heads_instead: bool = False,
    ) -> list[int]:
        """Put the sums that are asked for into the buffer.

        Args:
            buffer: Takes the numbers.
            names: The names of `FUSED` that are asked for, each with its name in the buffer.
            rows: Of the tensors.
            tensors: To read.
            others: The tensors to take ``inner`` products with; None for tensors without one.
            heads: Views of rows to read head by head as well.
            name_of_heads: The name of the heads' norms in the buffer.
            heads_instead: Whether to leave out the norm of a tensor with heads.

        Returns:
            Positions of the tensors that kernels cannot read; all of them if there are no kernels.
        """
        every = list(range(len(rows)))
        if not tensors or not kernels.on_device(tensors[0]) or kernels.ready("reductions") is None:
            return every
        others = others or [None] * len(rows)
        alike: dict[tuple[Any, ...], list[int]] = {}
        left = []
        for position, (row, tensor, other) in enumerate(zip(rows, tensors, others, strict=True)):
            view = heads.get(row) if heads else None
            # Runs for every tensor in every reading.
            layout = (row, view is None, *layout_of(tensor), *(() if other is None else layout_of(other)))
            well = self._known.get(layout)
            if well is None:
                well = self._note(layout, _readable(tensor, other, view))
            if not well:
                left.append(position)
                continue
            kind = (tensor.get_device(), tensor.dtype, None if other is None else other.dtype)
            alike.setdefault(kind, []).append(position)
        for places in alike.values():
            if heads:
                places.sort(key=lambda p: rows[p] in heads)
            some = [rows[p] for p in places]
            beside = [other for p in places if (other := others[p]) is not None]
            views = {i: heads[row] for i, row in enumerate(some) if row in heads} if heads else {}
            try:
                numbers = self._numbers(names, some, [tensors[p] for p in places], beside, views)
            except Exception as error:
                kernels.give_up("reductions", error, "gradients are read by torch")
                left += places
                continue
            self._add(buffer, names, some, numbers, views, name_of_heads, heads_instead, bool(beside))
        return sorted(left)

    def _note(self, layout: tuple[Any, ...], well: bool) -> bool:
        if len(self._known) >= MOST_LAYOUTS:
            self._known.clear()
        self._known[layout] = well
        return well

    def _numbers(
        self,
        names: Mapping[str, str],
        rows: Sequence[int],
        tensors: Sequence[Tensor],
        beside: Sequence[Tensor],
        views: Mapping[int, HeadView],
    ) -> Tensor:
        key = (bool(views), tensors[0].device, tensors[0].dtype, tuple(rows))
        if key not in self._readers:
            if len(self._readers) >= MOST_SETS:
                self._readers.clear()
            reader: Any = kernels.ready("reductions")
            self._readers[key] = reader.Reader()
        slices = {place: len(view.heads) for place, view in views.items()}
        counts = any(which in names for which in REDUCTIONS)
        numbers: Tensor = self._readers[key].read(tensors, counts=counts, others=beside or None, slices=slices)
        return numbers

    @staticmethod
    def _add(
        buffer: ReadingBuffer,
        names: Mapping[str, str],
        rows: Sequence[int],
        numbers: Tensor,
        views: Mapping[int, HeadView],
        name_of_heads: str,
        heads_instead: bool,
        has_others: bool,
    ) -> None:
        for which, name in names.items():
            if which == "inner" and not has_others:
                continue
            values = numbers[FUSED.index(which), : len(rows)]
            number = len(rows) - len(views) if which == "norm" and heads_instead else len(rows)
            if number:
                buffer.add(name, values[:number], rows[:number])
        begin = len(rows)
        for view in views.values():
            buffer.add(name_of_heads, numbers[0, begin : begin + len(view.heads)], view.slots)
            begin += len(view.heads)


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    """Returns how a tensor lies in memory, which decides whether kernels can read it."""
    if tensor.layout is not torch.strided:
        return (tensor.layout,)
    return type(tensor), tensor.dtype, tensor.get_device(), tensor.shape, tensor.stride()


def _readable(tensor: Tensor, other: Tensor | None, view: HeadView | None) -> bool:
    if not kernels.usable(tensor):
        return False
    if other is not None and not (kernels.usable(other) and other.stride() == tensor.stride()):
        return False
    return view is None or (view.lie_apart(tensor) and sliceable(tensor.numel(), len(view.heads)))
