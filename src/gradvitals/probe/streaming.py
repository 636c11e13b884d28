"""Mean and spread of gradients in one pass: two accumulators a parameter, however many gradients there are.

Welford's update for the n-th gradient, with d = g - mean:

    mean += d / n        M2 += (n - 1) / n * d^2

so that M2 / (T - 1) is the unbiased variance of each coordinate. It is made a piece at a time, while the piece is in
the cache, and loses no digits where the mean is large against the spread.

Reference: Welford, "Note on a method for calculating corrected sums of squares and products", 1962.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradvitals.collect.reductions import accumulator, odd_stride
from gradvitals.functional.intervals import Estimate
from gradvitals.functional.streamed import Sums, gsnr_streamed

PIECE = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements of one piece: on a CPU of one thread, in whose cache they stay; on a GPU a bound on extra memory."""

MOST_KEPT = 64
"""Gradients of which some coordinates are kept, for the interval."""

MOST_COORDINATES = 1024
SMALL = 4096
"""Kept coordinates of one tensor over all gradients, where half of its size is less."""

LEAST_SEEN = 0.5
"""Share of a tensor's noise that the kept coordinates have to show, for their shape to stand for that of all."""

EXACT_MEDIAN = 1 << 22
"""Coordinates up to which medians and shares are those of all; beyond, of every s-th."""

PLUG_IN_EPSILON = 1e-8


@dataclass(frozen=True)
class PerCoordinate:
    """GSNR of every coordinate by itself, summarised over one tensor."""

    plug_in_median: float
    """Plug-in with 1e-8 added to the variance."""
    plug_in_mean: float
    plug_in_below_one: float
    median: float
    """Debiased, without an epsilon."""
    mean: float
    below_one: float
    zero_share: float
    """Share of the coordinates that were zero in every gradient."""


class Stream:
    """Takes gradients of the same parameters one after the other.

    A gradient that is NaN or infinite anywhere is left out as a whole, and counted for the parameters where it is.
    """

    def __init__(self, parameters: Sequence[Tensor], num_expected: int) -> None:
        self.parameters = list(parameters)
        self.count = 0
        """Gradients taken, T."""
        self.nonfinite = [0] * len(self.parameters)
        self.norms: list[list[float]] = []
        """One list a gradient, with one norm a parameter."""
        self.mean: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        self.m2: list[Tensor] = [torch.empty(0)] * len(self.parameters)
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for row, p in enumerate(self.parameters):
            places.setdefault((p.device, accumulator(p.dtype)), []).append(row)
        self._groups = [_Group([self.parameters[i] for i in rows], rows, num_expected) for rows in places.values()]
        for group in self._groups:
            for row, mean, m2 in group.views():
                self.mean[row], self.m2[row] = mean, m2
        self._sums: list[tuple[float, float]] | None = None

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Take one gradient; that of a parameter that was not used, None, is zero."""
        with torch.no_grad():
            present = [
                torch.zeros_like(m) if g is None else (g.to_dense() if g.is_sparse else g).detach()
                for g, m in zip(grads, self.mean, strict=True)
            ]
            norms = _norms(present)
            self.norms.append(norms)
            self._sums = None
            if not all(map(math.isfinite, norms)):
                self.nonfinite = [n + (not math.isfinite(norm)) for n, norm in zip(self.nonfinite, norms, strict=True)]
                return
            self.count += 1
            for group in self._groups:
                group.add([present[row].reshape(-1) for row in group.rows], self.count)

    def gsnr(self, which: Sequence[Sequence[int]]) -> list[Estimate]:
        """GSNR of some sets of parameters, each set taken together."""
        kept = {row: columns for group in self._groups for row, columns in group.kept()}
        sums = self.sums()
        asked = []
        for rows in which:
            spread = sum(sums[row][1] for row in rows)
            columns = torch.cat([kept[row] for row in rows], dim=1) if rows and self.count else torch.zeros(0, 0)
            told = _spread(columns) >= LEAST_SEEN * spread * max(0, len(columns) - 1) / max(1, self.count - 1)
            # Noise that the kept coordinates have missed may have any shape: without them the interval is the widest.
            coordinates = columns if told else columns[:0]
            asked.append(Sums(sum(sums[row][0] for row in rows), spread, self.count, coordinates))
        return gsnr_streamed(asked)

    def sums(self) -> list[tuple[float, float]]:
        """For each parameter, the squared norm of the mean and the sum of the squared distances from it."""
        if self._sums is None:
            self._sums = [(_sum_of_squares(mean), _sum(m2)) for mean, m2 in zip(self.mean, self.m2, strict=True)]
        return self._sums

    def norm_of_mean(self, rows: Sequence[int]) -> float:
        """Norm of the mean gradient of some parameters."""
        sums = self.sums()
        return math.sqrt(sum(sums[row][0] for row in rows))

    def noise(self, rows: Sequence[int]) -> float:
        """Trace of the covariance of one gradient; nan with fewer than two."""
        sums = self.sums()
        return sum(sums[row][1] for row in rows) / (self.count - 1) if self.count > 1 else math.nan

    def per_coordinate(self, row: int) -> PerCoordinate:
        """Summary of the GSNR of single coordinates, plug-in with an epsilon and debiased.

        With T gradients of mean m and unbiased variance s^2: ``m^2 / (s^2 + 1e-8)``, and
        ``(T - 3) / (T - 1) m^2 / s^2 - 1 / T``, which needs more than 3 of them.
        """
        count, step = self.count, odd_stride(self.mean[row].numel(), EXACT_MEDIAN)
        mean, m2 = self.mean[row].view(-1)[::step], self.m2[row].view(-1)[::step]
        if count < 2 or not len(mean):
            return PerCoordinate(*[math.nan] * 7)
        variance, square = m2 / (count - 1), mean.square()
        plug_in = square / (variance + PLUG_IN_EPSILON)
        zero_share = float(((mean == 0) & (m2 == 0)).double().mean())
        debiased = square.div_(variance).mul_((count - 3) / (count - 1)).sub_(1 / count)
        defined = debiased[~debiased.isnan()] if count > 3 else debiased[:0]
        finite = defined[defined.isfinite()]
        return PerCoordinate(
            plug_in_median=float(plug_in.median()),
            plug_in_mean=float(plug_in.mean()),
            plug_in_below_one=float((plug_in < 1).double().mean()),
            median=float(defined.median()) if len(defined) else math.nan,
            mean=float(finite.mean(dtype=torch.float64)) if len(finite) else math.nan,
            below_one=float((defined < 1).double().mean()) if len(defined) else math.nan,
            zero_share=zero_share,
        )


class _Group:
    """The accumulators of all parameters of one device and type, one after the other in two long vectors.

    Small parameters are joined, so that a piece is never much smaller than it could be.
    """

    def __init__(self, parameters: Sequence[Tensor], rows: Sequence[int], num_expected: int) -> None:
        self.rows, self.parameters = list(rows), list(parameters)
        sizes = [p.numel() for p in self.parameters]
        device, kind = self.parameters[0].device, accumulator(self.parameters[0].dtype)
        self._mean = torch.zeros(sum(sizes), dtype=kind, device=device)
        self._m2 = torch.zeros_like(self._mean)
        self._ends = [0]
        for size in sizes:
            self._ends.append(self._ends[-1] + size)
        self._strides = [_stride(size, num_expected) for size in sizes]
        self._kept: list[Tensor] = []
        threads = torch.get_num_threads() if device.type == "cpu" else 1
        self._piece = threads * PIECE.get(device.type, PIECE["cuda"])
        room = torch.empty(min(self._piece, sum(sizes)), dtype=kind, device=device)
        self._together = []
        """Which parameters are joined, and of each piece the mean, the squared distances and room for a difference."""
        for places in self._join(sizes):
            part = slice(self._ends[places[0]], self._ends[places[-1] + 1])
            pieces = zip(self._mean[part].split(self._piece), self._m2[part].split(self._piece), strict=True)
            self._together.append((places, [(mean, m2, room[: len(mean)]) for mean, m2 in pieces]))

    def _join(self, sizes: list[int]) -> list[list[int]]:
        """Neighbours that fit into one piece, and each large one by itself."""
        joined: list[list[int]] = []
        room = 0
        for place, size in enumerate(sizes):
            if size > room:
                joined.append([])
                room = self._piece
            joined[-1].append(place)
            room -= size
        return joined

    def views(self) -> list[tuple[int, Tensor, Tensor]]:
        """For each parameter its row, its mean and its squared distances, in its own shape."""
        return [
            (row, self._mean[start:stop].view(p.shape), self._m2[start:stop].view(p.shape))
            for row, p, (start, stop) in zip(self.rows, self.parameters, pairwise(self._ends), strict=True)
        ]

    def add(self, flats: Sequence[Tensor], n: int) -> None:
        if len(self._kept) < MOST_KEPT:
            kept = [flat[::stride] for flat, stride in zip(flats, self._strides, strict=True)]
            self._kept.append(torch.cat(kept).to(self._mean.dtype))
        for places, pieces in self._together:
            grad = flats[places[0]] if len(places) == 1 else torch.cat([flats[place] for place in places])
            for g, (mean, m2, room) in zip(grad.split(self._piece), pieces, strict=True):
                difference = torch.sub(g, mean, out=room)
                mean.add_(difference, alpha=1 / n)
                m2.addcmul_(difference, difference, value=(n - 1) / n)

    def kept(self) -> list[tuple[int, Tensor]]:
        """For each parameter its row, and some of its coordinates in some of the gradients.

        They are scaled so that a parameter has its own share in the inner products of the whole.
        """
        if not self._kept:
            return []
        table = torch.stack(self._kept).cpu()
        widths = [-(-p.numel() // stride) for p, stride in zip(self.parameters, self._strides, strict=True)]
        columns = table.double().split(widths, dim=1)
        return [
            (row, column * math.sqrt(p.numel() / max(1, column.shape[1])))
            for row, p, column in zip(self.rows, self.parameters, columns, strict=True)
        ]


def _stride(numel: int, num_expected: int) -> int:
    """Every how many-th coordinate is kept, so that all that is kept stays small beside the tensor."""
    gradients = max(1, min(num_expected, MOST_KEPT))
    most = max(1, min(MOST_COORDINATES, max(SMALL, numel // 2) // gradients))
    return odd_stride(numel, most)


def _norms(grads: Sequence[Tensor]) -> list[float]:
    """Norms of all; those of one device are brought to the host at once."""
    norms = [torch.linalg.vector_norm(grad, dtype=accumulator(grad.dtype)) for grad in grads]
    if len({(norm.device, norm.dtype) for norm in norms}) == 1:
        found: list[float] = torch.stack(norms).tolist()
        return found
    return [float(norm) for norm in norms]


def _spread(columns: Tensor) -> float:
    return float((columns - columns.mean(dim=0)).square().sum()) if len(columns) else 0.0


def _sum_of_squares(tensor: Tensor) -> float:
    return math.fsum(float(part.double().square().sum()) for part in tensor.view(-1).split(1 << 22))


def _sum(tensor: Tensor) -> float:
    return float(tensor.sum(dtype=torch.float64))
