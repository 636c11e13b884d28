"""Question "signal": which gradients are signal, which are noise, which vanish or explode, which are steady."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from gradvitals.collect.parameters import layer_of
from gradvitals.functional.intervals import Estimate
from gradvitals.functional.spikes import coefficient_of_variation
from gradvitals.functional.thresholds import is_exploding, is_vanishing
from gradvitals.probe.streaming import Stream

VANISHING = 1e-10
EXPLODING = 1.0
"""As in the post "Probing gradients": a norm below 1e-10 / lr vanishes, one above 1 / lr explodes."""

RELATIVE_LOW = 1e-4
RELATIVE_HIGH = 1e4
"""Root mean square of a gradient over that of the median tensor, whatever the learning rate and the loss's scale."""


def signal_record(names: Sequence[str], stream: Stream, batch_size: int, lr: float | None) -> dict[str, Any]:
    """The answer as a plain record, from gradients of several batches."""
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
    """The noise scale in examples: the batch over its GSNR, nan where the signal cannot be told from none."""
    told = gsnr.low > 0
    return {
        "noise_scale": batch_size / gsnr.value if told else math.nan,
        "noise_scale_low": batch_size / gsnr.high if gsnr.high > 0 else math.nan,
        "noise_scale_high": batch_size / gsnr.low if told else math.inf if gsnr.high > 0 else math.nan,
    }


def _rms(stream: Stream, i: int) -> float:
    """Root mean square of one coordinate of a batch gradient."""
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
    """A verdict on one tensor or layer, and a sentence that says why."""
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
    # A layer vanishes or explodes where all of its tensors do, and is broken where one is.
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
