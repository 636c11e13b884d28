"""Gradients of batches, their running moments, and the question "signal"."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals.collect.parameters import layer_of
from gradvitals.collect.reductions import accumulator, odd_stride
from gradvitals.errors import GradvitalsError
from gradvitals.functional.intervals import Estimate
from gradvitals.functional.norms import squared_norm
from gradvitals.functional.spikes import coefficient_of_variation
from gradvitals.functional.streamed import Sums, gsnr_streamed
from gradvitals.functional.thresholds import is_exploding, is_vanishing


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters that require gradients; a tied parameter appears once.

    Raises:
        GradvitalsError: when there are none, or one cannot have a real gradient.
    """
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise GradvitalsError(
            f"{type(model).__name__} has no parameter with requires_grad; expected at least one: "
            "call model.requires_grad_(True)"
        )
    for name, p in found.items():
        if p.is_complex():
            raise GradvitalsError(f"{name} is complex; expected real parameters: store its parts as torch.view_as_real")
        if not nn.parameter.is_lazy(p) and p.is_inference():
            raise GradvitalsError(
                f"{name} was made in inference mode and cannot have a gradient; expected a model made outside of "
                "torch.inference_mode()"
            )
    return found


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the dense gradient of each parameter without changing `.grad`; zeros for unused parameters.

    Raises:
        GradvitalsError: when the loss depends on no parameter at all.
    """
    if not loss.requires_grad:
        raise GradvitalsError(
            "the loss does not depend on any parameter that has requires_grad; expected one that is made from the "
            "model's output, outside of torch.no_grad() and without .detach() or .item()"
        )
    if not _needs_backward(loss):
        return dense_gradients(torch.autograd.grad(loss, parameters, allow_unused=True), parameters)
    kept = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        loss.backward()
        return dense_gradients([p.grad for p in parameters], parameters)
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


def dense_gradients(grads: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the gradients as dense tensors; zeros where a parameter has none."""
    return [
        torch.zeros_like(p) if grad is None else (grad.to_dense() if grad.is_sparse else grad).detach()
        for grad, p in zip(grads, parameters, strict=True)
    ]


def _needs_backward(loss: Tensor) -> bool:
    """Whether the graph holds a reentrant checkpoint, whose parameters only `backward()` reaches."""
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


MAX_KEPT = 64
"""The most gradients whose coordinates are kept for the interval."""

MAX_COORDINATES = 1024
MIN_COORDINATES = 4096
"""Coordinates kept of one tensor over all gradients, if half of its size is less."""

MIN_NOISE_SHOWN = 0.5
"""The share of a tensor's noise that the kept coordinates must show to stand for all of them."""

EXACT_MEDIAN = 1 << 22
"""Medians and shares use every coordinate up to this many; beyond, every s-th."""

PLUG_IN_EPSILON = 1e-8


class Stream:
    """Running mean and squared deviations over gradients of the same parameters.

    A gradient with a NaN or an infinity is left out as a whole, and counted for the parameters that have one.

    Args:
        parameters: Those the gradients belong to.
        num_expected: How many gradients will come; limits how many coordinates are kept.
    """

    def __init__(self, parameters: Sequence[Tensor], num_expected: int) -> None:
        self.parameters = list(parameters)
        self.count = 0
        self.nonfinite = [0] * len(self.parameters)
        self.norms: list[list[float]] = []
        """One list per gradient, with one norm per parameter."""
        self.mean = [torch.zeros(p.shape, dtype=accumulator(p.dtype), device=p.device) for p in self.parameters]
        self.m2 = [torch.zeros_like(mean) for mean in self.mean]
        kept = max(1, min(num_expected, MAX_KEPT))
        # So that the kept coordinates stay small beside the tensor.
        most = [min(MAX_COORDINATES, max(MIN_COORDINATES, p.numel() // 2) // kept) for p in self.parameters]
        self._strides = [odd_stride(p.numel(), max(1, count)) for p, count in zip(self.parameters, most, strict=True)]
        # Made at once: small tensors between large temporary ones would keep memory from being freed.
        self._kept = [
            torch.empty((kept, -(-mean.numel() // stride)), dtype=mean.dtype, device=mean.device)
            for mean, stride in zip(self.mean, self._strides, strict=True)
        ]
        self._totals: list[tuple[float, float]] | None = None

    def add(self, grads: Sequence[Tensor]) -> None:
        """Add one gradient."""
        self.extend([grad[None] for grad in grads])

    @torch.no_grad()
    def extend(self, grads: Sequence[Tensor]) -> None:
        """Add several gradients, stacked along the first dimension of each tensor."""
        norms = _row_norms(grads)
        self.norms += norms.tolist()
        finite = norms.isfinite()
        self.nonfinite = [n + int(bad) for n, bad in zip(self.nonfinite, (~finite).sum(dim=0), strict=True)]
        usable = finite.all(dim=1)
        before, new = self.count, int(usable.sum())
        if not new:
            return
        self._totals = None
        self.count = total = before + new
        for row, grad in enumerate(grads):
            mean, m2 = self.mean[row], self.m2[row]
            rows = (grad if new == len(usable) else grad[usable.to(grad.device)]).to(mean.dtype)
            kept = self._kept[row][before:total]
            if len(kept):
                kept.copy_(rows[: len(kept)].reshape(len(kept), -1)[:, :: self._strides[row]])
            difference = rows.mean(dim=0).sub_(mean)
            mean.add_(difference, alpha=new / total)
            m2.addcmul_(difference, difference, value=before * new / total)
            if new > 1:
                m2.add_(rows.var(dim=0, correction=0), alpha=new)

    def gsnr(self, groups: Sequence[Sequence[int]]) -> list[Estimate]:
        """Returns the GSNR of each group of parameters, taken together."""
        sums, kept = self._sums(), [self._coordinates(row) for row in range(len(self.parameters))]
        streams = []
        for rows in groups:
            square, spread = sum(sums[row][0] for row in rows), sum(sums[row][1] for row in rows)
            columns = torch.cat([kept[row] for row in rows], dim=1)
            shown = float((columns - columns.mean(dim=0)).square().sum()) if len(columns) else 0.0
            # Noise that the kept coordinates miss may have any shape; without them the interval is the widest.
            if shown < MIN_NOISE_SHOWN * spread * max(0, len(columns) - 1) / max(1, self.count - 1):
                columns = columns[:0]
            streams.append(Sums(square, spread, self.count, columns))
        return gsnr_streamed(streams)

    def norm_of_mean(self, rows: Sequence[int]) -> float:
        """Returns the norm of the mean gradient of some parameters."""
        return math.sqrt(sum(self._sums()[row][0] for row in rows))

    def noise(self, rows: Sequence[int]) -> float:
        """Returns the trace of the covariance of one gradient; nan with fewer than two."""
        return sum(self._sums()[row][1] for row in rows) / (self.count - 1) if self.count > 1 else math.nan

    def per_coordinate(self, row: int) -> dict[str, float]:
        """Returns a summary of the GSNR of single coordinates, plug-in with an epsilon and debiased.

        With T gradients of mean m and unbiased variance s^2: ``m^2 / (s^2 + 1e-8)``, and
        ``(T - 3) / (T - 1) m^2 / s^2 - 1 / T``, which needs more than 3 of them.
        """
        names = ("plug_in_median", "plug_in_mean", "plug_in_below_one", "median", "mean", "below_one", "zero_share")
        count, step = self.count, odd_stride(self.mean[row].numel(), EXACT_MEDIAN)
        mean, m2 = self.mean[row].view(-1)[::step], self.m2[row].view(-1)[::step]
        if count < 2 or not len(mean):
            return dict.fromkeys(names, math.nan)
        variance, square = m2 / (count - 1), mean.square()
        plug_in = square / (variance + PLUG_IN_EPSILON)
        debiased = square / variance * ((count - 3) / (count - 1)) - 1 / count
        defined = debiased[~debiased.isnan()] if count > 3 else debiased[:0]
        finite = defined[defined.isfinite()]
        values = (
            plug_in.median(),
            plug_in.mean(),
            (plug_in < 1).double().mean(),
            defined.median() if len(defined) else math.nan,
            finite.mean(dtype=torch.float64) if len(finite) else math.nan,
            (defined < 1).double().mean() if len(defined) else math.nan,
            ((mean == 0) & (m2 == 0)).double().mean(),
        )
        return {name: float(value) for name, value in zip(names, values, strict=True)}

    def _sums(self) -> list[tuple[float, float]]:
        """Returns for each parameter the squared norm of the mean and the sum of squared deviations."""
        if self._totals is None:
            self._totals = [
                (squared_norm(mean), float(m2.sum(dtype=torch.float64)))
                for mean, m2 in zip(self.mean, self.m2, strict=True)
            ]
        return self._totals

    def _coordinates(self, row: int) -> Tensor:
        """Returns the kept coordinates, scaled so that the parameter has its own share in inner products."""
        kept = self._kept[row][: self.count].cpu().double()
        return kept * math.sqrt(self.parameters[row].numel() / max(1, kept.shape[1]))


def _row_norms(grads: Sequence[Tensor]) -> Tensor:
    """Returns the norm of each row of each tensor, `[rows, tensors]`, on the host."""
    columns = [
        torch.linalg.vector_norm(grad.reshape(len(grad), -1), dim=1, dtype=accumulator(grad.dtype)) for grad in grads
    ]
    if len({column.device for column in columns}) > 1:
        columns = [column.cpu() for column in columns]
    return torch.stack(columns, dim=1).cpu()


VANISHING = 1e-10
EXPLODING = 1.0
"""As in the post "Probing gradients": a norm below 1e-10 / lr vanishes, one above 1 / lr explodes."""

RELATIVE_LOW = 1e-4
RELATIVE_HIGH = 1e4
"""Root mean square of a gradient over that of the median tensor; independent of the learning rate and the loss."""


def signal_record(names: Sequence[str], stream: Stream, batch_size: int, lr: float | None) -> dict[str, Any]:
    """Returns the answer as a plain record, from gradients of several batches."""
    everything = list(range(len(names)))
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(layer_of(name), []).append(i)
    total, *gsnr = stream.gsnr([everything, *([i] for i in everything), *groups.values()])
    rms = [_rms(stream, i) for i in everything]
    median = statistics.median([value for value in rms if value > 0] or [math.nan])
    tensors = []
    for i, name in enumerate(names):
        norms = [row[i] for row in stream.norms]
        finite = [norm for norm in norms if math.isfinite(norm)]
        relative = rms[i] / median
        row = {
            "name": name,
            "layer": layer_of(name),
            "shape": list(stream.parameters[i].shape),
            "numel": stream.parameters[i].numel(),
            "norms": norms,
            **_summary(stream, [i], norms, gsnr[i]),
            **stream.per_coordinate(i),
            "vanishing": None if lr is None or not finite else is_vanishing(min(finite), lr, VANISHING),
            "exploding": None if lr is None else any(is_exploding(norm, lr, EXPLODING) for norm in norms),
            "relative": relative,
            "vanishing_relative": relative < RELATIVE_LOW,
            "exploding_relative": relative > RELATIVE_HIGH,
            "nonfinite": stream.nonfinite[i],
        }
        row["verdict"], row["words"] = judge(row, batch_size)
        tensors.append(row)
    layers = []
    for (layer, rows), found in zip(groups.items(), gsnr[len(names) :], strict=True):
        own = [tensors[i] for i in rows]
        # A layer vanishes if all of its tensors do, and explodes or is broken if one is.
        row = {
            "layer": layer,
            "tensors": len(rows),
            "numel": sum(one["numel"] for one in own),
            **_summary(stream, rows, [math.hypot(*(batch[i] for i in rows)) for batch in stream.norms], found),
            "relative": float(np.nanmax([one["relative"] for one in own] + [0.0])),
            "nonfinite": max(one["nonfinite"] for one in own),
            "vanishing": all(one["verdict"] in ("vanishing", "none") for one in own),
            "exploding": any(one["verdict"] == "exploding" for one in own),
        }
        row["verdict"], row["words"] = judge(row, batch_size)
        layers.append(row)
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
        "layers": layers,
        "thresholds": {
            "vanishing": VANISHING / lr if lr else None,
            "exploding": EXPLODING / lr if lr else None,
            "relative_low": RELATIVE_LOW,
            "relative_high": RELATIVE_HIGH,
            **{
                f"{key}_names": [row["name"] for row in tensors if row[key]]
                for key in ("vanishing", "exploding", "vanishing_relative", "exploding_relative")
            },
        },
    }


def noise_scale_of(gsnr: Estimate, batch_size: int) -> dict[str, float]:
    """Returns the noise scale in examples: batch size over GSNR; nan if the signal may be 0."""
    known = gsnr.low > 0
    return {
        "noise_scale": batch_size / gsnr.value if known else math.nan,
        "noise_scale_low": batch_size / gsnr.high if gsnr.high > 0 else math.nan,
        "noise_scale_high": batch_size / gsnr.low if known else math.inf if gsnr.high > 0 else math.nan,
    }


def _rms(stream: Stream, i: int) -> float:
    """Returns the root mean square of one coordinate of a batch gradient."""
    squares = [row[i] ** 2 for row in stream.norms if math.isfinite(row[i])]
    return math.sqrt(statistics.fmean(squares) / max(1, stream.parameters[i].numel())) if squares else math.nan


def _summary(stream: Stream, rows: Sequence[int], norms: Sequence[float], gsnr: Estimate) -> dict[str, Any]:
    finite = [norm for norm in norms if math.isfinite(norm)]
    return {
        "norm": stream.norm_of_mean(rows),
        "norm_mean": statistics.fmean(finite) if finite else math.nan,
        "cv": float(coefficient_of_variation(norms)),
        "gsnr": gsnr.value,
        "gsnr_low": gsnr.low,
        "gsnr_high": gsnr.high,
    }


def judge(row: dict[str, Any], batch_size: int) -> tuple[str, str]:
    """Returns the verdict on one tensor or layer, and its reason as a sentence."""
    if row["nonfinite"]:
        return "nonfinite", f"NaN or infinite in {row['nonfinite']} of the batches, which were left out"
    if row["norm_mean"] == 0:
        return "none", "no gradient in any batch: nothing here learns"
    for kind in ("exploding", "vanishing"):
        if row[kind] or row.get(f"{kind}_relative"):
            return kind, f"gradient norm {row['norm_mean']:.3g}, {row['relative']:.3g} times that of the median tensor"
    value, low, high = row["gsnr"], row["gsnr_low"], row["gsnr_high"]
    if math.isinf(value):
        return "signal", "every batch has the same gradient"
    if math.isnan(value) or math.isnan(low):
        return "unclear", "too few batches to tell signal from noise"
    if low >= 1:
        return "signal", f"the signal is {value:.3g} times the noise of a batch of {batch_size}"
    if low <= 0:
        return "noise", "these batches show no signal above their noise"
    if high < 1:
        return "weak", f"the noise of a batch of {batch_size} is {1 / value:.3g} times as strong as the signal"
    return "unclear", f"signal and noise of a batch of {batch_size} are about equal"
