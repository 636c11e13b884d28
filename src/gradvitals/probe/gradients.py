"""Gradients of batches, their running moments, and what they say about the signal in each tensor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals.collect.parameters import layer_of
from gradvitals.collect.reductions import accumulator, odd_stride
from gradvitals.errors import GradvitalsError
from gradvitals.functional.intervals import Estimate
from gradvitals.functional.spikes import coefficient_of_variation
from gradvitals.functional.streamed import Sums, gsnr_streamed
from gradvitals.functional.thresholds import is_exploding, is_vanishing


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require gradients, tied ones once.

    Raises:
        GradvitalsError: when there are none.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise GradvitalsError(
            f"{type(model).__name__} has no parameter with requires_grad; expected at least one: "
            "call model.requires_grad_(True)"
        )
    odd = [name for name, p in found.items() if p.is_complex()]
    if odd:
        raise GradvitalsError(f"{odd[0]} is complex; expected real parameters: give its parts as torch.view_as_real")
    made_without = [name for name, p in model.named_parameters() if not nn.parameter.is_lazy(p) and p.is_inference()]
    if made_without:
        raise GradvitalsError(
            f"{made_without[0]} was made in inference mode and can have no gradient; expected a model made outside of "
            "torch.inference_mode()"
        )
    return found


class Gradients:
    """Computes gradients of losses without changing `.grad`.

    Args:
        parameters: Those to differentiate for.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self._only_backward: bool | None = None

    def __call__(self, loss: Tensor) -> list[Tensor | None]:
        """Returns the gradient of each parameter; None for those the loss does not depend on.

        Raises:
            GradvitalsError: when the loss depends on no parameter at all.
        """
        if not loss.requires_grad:
            raise GradvitalsError(
                "the loss does not depend on any parameter that has requires_grad; expected one that is made from the "
                "model's output, outside of torch.no_grad() and without .detach() or .item()"
            )
        if self._only_backward is None:
            self._only_backward = _is_checkpointed(loss)
        if not self._only_backward:
            return list(torch.autograd.grad(loss, self.parameters, allow_unused=True))
        kept = [p.grad for p in self.parameters]
        try:
            for p in self.parameters:
                p.grad = None
            loss.backward()
            return [p.grad for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, kept, strict=True):
                p.grad = grad


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradients of one loss; see `Gradients`."""
    return Gradients(parameters)(loss)


def _is_checkpointed(loss: Tensor) -> bool:
    """Whether `checkpoint(..., use_reentrant=True)` was used: only `backward()` sees the parameters inside."""
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


PIECE = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements per piece: small enough for a CPU's cache; on a GPU it bounds the extra memory."""

MOST_KEPT = 64
"""The most gradients to keep some coordinates of, for the interval."""

MOST_COORDINATES = 1024
SMALL = 4096
"""Coordinates to keep of one tensor over all gradients, if half of its size is less."""

LEAST_SEEN = 0.5
"""Fraction of a tensor's noise that the kept coordinates must show to represent all of them."""

EXACT_MEDIAN = 1 << 22
"""Up to this many coordinates, medians and fractions use all of them; beyond, every s-th."""

PLUG_IN_EPSILON = 1e-8


@dataclass(frozen=True)
class PerCoordinate:
    """The GSNR of single coordinates, summarized over one tensor."""

    plug_in_median: float
    """Plug-in with 1e-8 added to the variance."""
    plug_in_mean: float
    plug_in_below_one: float
    median: float
    """Debiased, without an epsilon."""
    mean: float
    below_one: float
    zero_share: float
    """Fraction of the coordinates that were zero in every gradient."""


class Stream:
    """Running moments over gradients of the same parameters.

    A gradient that is NaN or infinite anywhere is left out as a whole, and counted for the parameters where it is.
    """

    def __init__(self, parameters: Sequence[Tensor], num_expected: int) -> None:
        self.parameters = list(parameters)
        self.count = 0
        """Number of gradients added, T."""
        self.nonfinite = [0] * len(self.parameters)
        self.norms: list[list[float]] = []
        """One list per gradient, with one norm per parameter."""
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
        """Add one gradient; None, for a parameter that was not used, counts as zero."""
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
        """Returns the GSNR of each set of parameters, taken together."""
        kept = {row: columns for group in self._groups for row, columns in group.kept()}
        sums = self.sums()
        asked = []
        for rows in which:
            spread = sum(sums[row][1] for row in rows)
            columns = torch.cat([kept[row] for row in rows], dim=1) if rows and self.count else torch.zeros(0, 0)
            told = _spread(columns) >= LEAST_SEEN * spread * max(0, len(columns) - 1) / max(1, self.count - 1)
            # Noise that the kept coordinates miss may have any shape; without them the interval is the widest.
            coordinates = columns if told else columns[:0]
            asked.append(Sums(sum(sums[row][0] for row in rows), spread, self.count, coordinates))
        return gsnr_streamed(asked)

    def sums(self) -> list[tuple[float, float]]:
        """Returns for each parameter the squared norm of the mean and the sum of squared distances from it."""
        if self._sums is None:
            self._sums = [(_sum_of_squares(mean), _sum(m2)) for mean, m2 in zip(self.mean, self.m2, strict=True)]
        return self._sums

    def norm_of_mean(self, rows: Sequence[int]) -> float:
        """Returns the norm of the mean gradient of some parameters."""
        sums = self.sums()
        return math.sqrt(sum(sums[row][0] for row in rows))

    def noise(self, rows: Sequence[int]) -> float:
        """Returns the trace of the covariance of one gradient; nan with fewer than two."""
        sums = self.sums()
        return sum(sums[row][1] for row in rows) / (self.count - 1) if self.count > 1 else math.nan

    def per_coordinate(self, row: int) -> PerCoordinate:
        """Returns a summary of the GSNR of single coordinates, plug-in with an epsilon and debiased.

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
        """Groups neighbors that fit into one piece; a large one is a group by itself."""
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
        """Yields for each parameter its row, mean and squared distances, in its own shape."""
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
        """Yields for each parameter its row, and some of its coordinates in some of the gradients.

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
    """Returns the stride between kept coordinates, so that they stay small beside the tensor."""
    gradients = max(1, min(num_expected, MOST_KEPT))
    most = max(1, min(MOST_COORDINATES, max(SMALL, numel // 2) // gradients))
    return odd_stride(numel, most)


def _norms(grads: Sequence[Tensor]) -> list[float]:
    """Returns all norms, with one copy to the host per device."""
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


VANISHING = 1e-10
EXPLODING = 1.0
"""As in the post "Probing gradients": a norm below 1e-10 / lr vanishes, one above 1 / lr explodes."""

RELATIVE_LOW = 1e-4
RELATIVE_HIGH = 1e4
"""Root mean square of a gradient over that of the median tensor, whatever the learning rate and the loss's scale."""


def signal_record(names: Sequence[str], stream: Stream, batch_size: int, lr: float | None) -> dict[str, Any]:
    """Returns the answer as a plain record, from gradients of several batches."""
    rms = [_rms(stream, i) for i in range(len(names))]
    usual = statistics.median([value for value in rms if value > 0] or [math.nan])
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(layer_of(name), []).append(i)
    everything = list(range(len(names)))
    total, *gsnr = stream.gsnr([everything, *([i] for i in everything), *groups.values()])
    tensors = [_tensor(name, i, stream, lr, rms[i] / usual, gsnr[i], batch_size) for i, name in enumerate(names)]
    layers = zip(groups.items(), gsnr[len(names) :], strict=True)
    return {
        "batch_size": batch_size,
        "total": {
            "gsnr": total.value,
            "low": total.low,
            "high": total.high,
            "norm": stream.norm_of_mean(everything),
            "noise": stream.noise(everything),
            **noise_scale_of(total, batch_size),
        },
        "tensors": tensors,
        "layers": [_layer(layer, rows, tensors, stream, found, batch_size) for (layer, rows), found in layers],
        "thresholds": _thresholds(tensors, lr),
    }


def noise_scale_of(gsnr: Estimate, batch_size: int) -> dict[str, float]:
    """Returns the noise scale in examples: batch size over GSNR; nan if the signal is not distinguishable from 0."""
    told = gsnr.low > 0
    return {
        "noise_scale": batch_size / gsnr.value if told else math.nan,
        "noise_scale_low": batch_size / gsnr.high if gsnr.high > 0 else math.nan,
        "noise_scale_high": batch_size / gsnr.low if told else math.inf if gsnr.high > 0 else math.nan,
    }


def _rms(stream: Stream, i: int) -> float:
    """Returns the root mean square of one coordinate of a batch gradient."""
    norms = [row[i] for row in stream.norms if math.isfinite(row[i])]
    size = max(1, stream.parameters[i].numel())
    return math.sqrt(statistics.fmean(norm**2 for norm in norms) / size) if norms else math.nan


def _tensor(
    name: str, i: int, stream: Stream, lr: float | None, relative: float, gsnr: Estimate, batch_size: int
) -> dict[str, Any]:
    norms = [row[i] for row in stream.norms]
    finite = [norm for norm in norms if math.isfinite(norm)]
    row = {
        "name": name,
        "layer": layer_of(name),
        "shape": list(stream.parameters[i].shape),
        "numel": stream.parameters[i].numel(),
        "norms": norms,
        "norm": stream.norm_of_mean([i]),
        "norm_mean": statistics.fmean(finite) if finite else math.nan,
        "cv": float(coefficient_of_variation(norms)),
        "gsnr": gsnr.value,
        "gsnr_low": gsnr.low,
        "gsnr_high": gsnr.high,
        **asdict(stream.per_coordinate(i)),
        "vanishing": None if lr is None or not finite else is_vanishing(min(finite), lr, VANISHING),
        "exploding": None if lr is None else any(is_exploding(norm, lr, EXPLODING) for norm in norms),
        "relative": relative,
        "vanishing_relative": relative < RELATIVE_LOW,
        "exploding_relative": relative > RELATIVE_HIGH,
        "nonfinite": stream.nonfinite[i],
    }
    row["verdict"], row["words"] = judge(row, batch_size)
    return row


def judge(row: dict[str, Any], batch_size: int) -> tuple[str, str]:
    """Returns the verdict on one tensor or layer, and the reason as a sentence."""
    if row.get("nonfinite"):
        return "nonfinite", f"NaN or infinite in {row['nonfinite']} of the batches, which were left out"
    if row["norm_mean"] == 0:
        return "none", "no gradient in any batch: nothing here learns"
    if row.get("exploding") or row.get("exploding_relative"):
        return "exploding", f"gradient norm of {row['norm_mean']:.3g}, {row['relative']:.3g} times the usual tensor"
    if row.get("vanishing") or row.get("vanishing_relative"):
        return "vanishing", f"gradient norm of {row['norm_mean']:.3g}, {row['relative']:.3g} times the usual tensor"
    value, low, high = row["gsnr"], row["gsnr_low"], row["gsnr_high"]
    if math.isinf(value):
        return "signal", "every batch has the same gradient"
    if math.isnan(value) or math.isnan(low):
        return "unclear", "too few batches to tell signal from noise"
    if low >= 1:
        return "signal", f"the signal is {value:.3g} times the noise of a batch of {batch_size}"
    if low <= 0:
        return "noise", "no signal could be told from the noise of these batches"
    if high < 1:
        return (
            "weak",
            f"there is a signal, but the noise of a batch of {batch_size} is {1 / value:.3g} times as strong",
        )
    return "unclear", f"signal and noise of a batch of {batch_size} are of one size, as far as these batches tell"


def _layer(
    layer: str, rows: list[int], tensors: list[dict[str, Any]], stream: Stream, gsnr: Estimate, batch_size: int
) -> dict[str, Any]:
    norms = [math.sqrt(sum(batch[i] ** 2 for i in rows)) for batch in stream.norms]
    finite = [norm for norm in norms if math.isfinite(norm)]
    # A layer vanishes or explodes if all of its tensors do, and is broken if one is.
    relative = float(np.nanmax([tensors[i]["relative"] for i in rows] + [0.0]))
    found = {
        "layer": layer,
        "tensors": len(rows),
        "numel": sum(tensors[i]["numel"] for i in rows),
        "norm": stream.norm_of_mean(rows),
        "norm_mean": statistics.fmean(finite) if finite else math.nan,
        "cv": float(coefficient_of_variation(norms)),
        "gsnr": gsnr.value,
        "gsnr_low": gsnr.low,
        "gsnr_high": gsnr.high,
        "relative": relative,
        "nonfinite": max(tensors[i]["nonfinite"] for i in rows),
        "vanishing": all(tensors[i]["verdict"] in ("vanishing", "none") for i in rows),
        "exploding": any(tensors[i]["verdict"] == "exploding" for i in rows),
    }
    found["verdict"], found["words"] = judge(found, batch_size)
    return found


def _thresholds(tensors: list[dict[str, Any]], lr: float | None) -> dict[str, Any]:
    def named(key: str) -> list[str]:
        return [row["name"] for row in tensors if row[key]]

    return {
        "vanishing": VANISHING / lr if lr else None,
        "exploding": EXPLODING / lr if lr else None,
        "relative_low": RELATIVE_LOW,
        "relative_high": RELATIVE_HIGH,
        "vanishing_names": named("vanishing"),
        "exploding_names": named("exploding"),
        "vanishing_relative_names": named("vanishing_relative"),
        "exploding_relative_names": named("exploding_relative"),
    }
