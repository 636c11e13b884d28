"""From sums to readings: all arithmetic of a live run, on the host, in float64, off the training thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals import functional
from gradvitals.config import Config
from gradvitals.measure.history import NormHistory, RatioHistory
from gradvitals.measure.rawstep import RawStep
from gradvitals.measure.window import NUM_BLOCKS
from gradvitals.types import Layout, Reading, Stage

Floats = NDArray[np.float64]

STAGES: tuple[Stage, ...] = ("raw", "unscaled", "clipped")

OUTLIER_RATIO = 5.0
"""A step whose norm is this far over its moving average would outweigh all others in a ratio of means: left out."""

ROUNDING = 2e-6
"""Noise below this share of the gradient's second moment is float32 rounding: the micro-batches are equal."""

STUDENT_T = 2.262
"""97.5 % point of Student's t with `NUM_BLOCKS` - 1 degrees of freedom, for the window's jackknife."""


class Interpreter:
    """Turns the `RawStep`s of a run, in order, into `Reading`s. Holds the moving averages between them."""

    def __init__(self, config: Config, on_error: Callable[[str, Exception], None]) -> None:
        self.config = config
        self.on_error = on_error
        self._broken: set[str] = set()
        self._table = _Table(Layout(), [])
        self._norms = NormHistory(config.norm_window)
        self._micro = RatioHistory(config.gsnr_window)
        self._radial = RatioHistory(config.gsnr_window)
        self._adam = RatioHistory(config.gsnr_window)
        self._window_norms: dict[str, list[float]] = {}

    def finish(self, raw: RawStep) -> list[Reading]:
        """The readings of one step: first what needs no samples, then one for each GSNR source.

        An error in one of them is told, and that one is silent from then on.
        """
        if raw.layout is not self._table.layout:
            self._table = _Table(raw.layout, raw.slots)
        step = _Step(raw, self._table)
        readings = []
        for part, applies, make in (
            ("general", True, self._general),
            ("microbatch", any(station.micro_batches >= 2 for station in raw.stations), self._microbatch),
            ("adam", step.has("exp_avg_norm"), self._from_moments),
            ("window", bool(raw.windows), self._window),
        ):
            if not applies or part in self._broken:
                continue
            try:
                # Zero over zero is an answer here: there is nothing to tell.
                with np.errstate(all="ignore"):
                    reading = make(step)
            except Exception as error:
                self._broken.add(part)
                self.on_error(part, error)
                continue
            if reading is not None:
                readings.append(reading)
        return readings

    # -- norms, loss, weights -----------------------------------------------------------------------------------

    def _general(self, step: _Step) -> Reading:
        norm = step.norm
        values = {name: value for name, value in (("loss", step.loss()), ("lr", step.lr())) if value is not None}
        tensors: dict[str, Floats] = {}
        if step.has("norm"):
            total = step.total(norm, "norm")
            ratio, variation = self._norms.push(step.table.with_whole, np.append(total, norm))
            step.outlier = bool(OUTLIER_RATIO <= ratio[0] < math.inf)
            nonfinite = step.nonfinite()
            values |= {"grad/norm": total, "grad/nonfinite": float(np.nansum(nonfinite))}
            values |= {"grad/spike_ratio": float(ratio[0]), "grad/norm_cv": float(variation[0])}
            tensors |= {"grad/norm": norm, "grad/nonfinite": nonfinite}
            tensors |= {"grad/spike_ratio": ratio[1:], "grad/norm_cv": variation[1:]}
        if step.has("max"):
            tensors["grad/max"] = step.rows("max") / step.grad_scale
            values["grad/max"] = float(np.max(tensors["grad/max"][step.present]))
        if step.has("nonzero"):
            sizes = step.table.sizes
            zeros = sizes - step.rows("nonzero")
            tensors["grad/zero_fraction"] = zeros / sizes
            values["grad/zero_fraction"] = float(np.nansum(zeros) / sizes[step.present].sum())
        if step.has("weight"):
            tensors["weight/norm"] = step.rows("weight")
            values["weight/norm"] = step.total(tensors["weight/norm"], "weight")
        if step.has("update_sq"):
            covered = np.array([step.raw.fractions.get(row, 1.0) for row in range(step.num_rows)])
            tensors["update/norm"] = np.sqrt(step.rows("update_sq") / covered)
            values["update/norm"] = step.total(tensors["update/norm"], "update_sq")
            tensors["update/ratio"] = tensors["update/norm"] / tensors["weight/norm"]
            if values["weight/norm"] > 0:
                values["update/ratio"] = values["update/norm"] / values["weight/norm"]
        if step.under_scaler:
            values["step/skipped"] = float(step.skipped())
        return step.reading(values=values, tensors=tensors)

    # -- the three sources of GSNR ------------------------------------------------------------------------------

    def _microbatch(self, step: _Step) -> Reading:
        layout = step.raw.layout
        count = max(station.micro_batches for station in step.raw.stations)
        sizes, known = step.micro_batch_sizes(count)
        # Optimizers that saw another number of micro-batches stand for another batch size: not mixed in.
        mine, reached = np.zeros((2, step.num_rows), dtype=bool)
        for station in step.raw.stations:
            mine[station.rows] = station.micro_batches == count
        for i in range(count):  # a row that no micro-batch was seen to reach came to life too late to be followed
            reached |= step.reached(f"micro{i}", step.num_rows)
            reached[step.table.slot_rows[step.reached(f"micro_heads{i}", len(step.table.slot_rows))]] = True
        read = mine & step.present & reached
        square = np.where(read, np.square(step.norm), np.nan)
        slot_parts = [np.square(step.parts(f"micro_heads{i}", len(step.table.slot_rows))) for i in range(count)]
        parts = np.stack([np.square(step.parts(f"micro{i}", step.num_rows)) for i in range(count)])
        for part, of_slots in zip(parts, slot_parts, strict=True):
            np.add.at(part, step.table.slot_rows, of_slots)
        parts /= step.loss_scale**2
        slot_scale = step.loss_scale[step.table.slot_rows]
        signal, noise = self._signal_and_noise(parts, square, sizes)
        names, all_signal, all_noise = _with_sums(layout, signal, noise, read)
        if layout.heads and step.has("heads"):
            heads = np.stack([step.by_head(of_slots / slot_scale**2) for of_slots in slot_parts])
            whole = step.parts("heads", len(step.table.slot_rows)) / step.grad_scale[step.table.slot_rows]
            head_square = step.by_head(whole**2)
            more_signal, more_noise = self._signal_and_noise(heads, head_square, sizes)
            names += [f"head:{name}" for name in layout.heads]
            all_signal, all_noise = np.append(all_signal, more_signal), np.append(all_noise, more_noise)
        if not step.outlier:
            self._micro.push(names, all_signal, all_noise, step.raw.step)
        per_sample = self._micro.estimate(np.isfinite(all_signal) & np.isfinite(all_noise), step.raw.step)
        mean_size = sizes.mean()
        values, tensors, layers, heads_out = _spread(layout, [mean_size * part for part in per_sample])
        if known:
            values |= _noise_scale(*(float(part[0]) for part in per_sample))
        if step.has("micro_radial0") and step.has("weight_before"):
            inner = np.stack([step.parts(f"micro_radial{i}", step.num_rows) / step.loss_scale for i in range(count)])
            along = np.where(read, inner / step.rows("weight_before"), np.nan)
            radial = self._signal_and_noise(along**2, np.square(along.sum(0)), sizes)
            if not step.outlier:
                self._radial.push(step.names, *radial, step.raw.step)
            tensors["radial_gsnr"] = mean_size * self._radial.estimate(np.isfinite(radial[0]), step.raw.step)[0]
        batch_size = float(mean_size) if known else None
        return step.reading(
            source="microbatch", batch_size=batch_size, values=values, tensors=tensors, layers=layers, heads=heads_out
        )

    def _signal_and_noise(self, parts: Floats, total: Floats, sizes: Floats) -> tuple[Floats, Floats]:
        count = len(sizes)
        weights = sizes / sizes.sum() if self.config.micro_batch_weights == "size" else np.full(count, 1 / count)
        signal, noise = functional.signal_and_noise(parts, total, sizes, weights)
        second_moment = ((sizes / weights**2)[:, None] * parts).sum(0) / count
        return np.asarray(signal), np.where(noise <= ROUNDING * second_moment, 0.0, noise)

    def _from_moments(self, step: _Step) -> Reading:
        raw, layout = step.raw, step.raw.layout
        rows = np.array(list(raw.betas), dtype=np.int64)
        beta1, beta2 = np.array(list(raw.betas.values())).T
        signal, noise = np.full((2, step.num_rows), np.nan)
        signal[rows], noise[rows] = functional.adam_signal_and_noise(
            np.square(step.rows("exp_avg_norm")[rows]),
            step.rows("exp_avg_sq_sum")[rows],
            beta1=beta1,
            beta2=beta2,
            step=step.rows("adam_step")[rows],
        )
        noise = np.where(np.abs(noise) <= ROUNDING * np.abs(signal), 0.0, noise)
        begun = step.rows("adam_step") >= 2  # one gradient has no spread
        names, all_signal, all_noise = _with_sums(layout, signal, noise, begun)
        # The first moment forgets at the rate beta1, so its square is still correlated from reading to reading.
        gap = raw.step - self._adam.last_step()
        correlation = 0.0 if math.isnan(gap) else beta1.max() ** (2 * gap)
        self._adam.push(names, all_signal, all_noise, raw.step)
        known = np.isfinite(all_signal) & np.isfinite(all_noise)
        values, tensors, layers, _ = _spread(layout, self._adam.estimate(known, raw.step, correlation))
        if step.has("below_one_count"):
            tensors["gsnr/below_one_fraction"] = step.rows("below_one_count") / step.rows("alive_count")
        stage = {"stage": "clipped"} if any(station.clipped for station in raw.stations) else {}
        return step.reading(
            source="adam", batch_size=raw.batch_size, values=values, tensors=tensors, layers=layers, **stage
        )

    def _window(self, step: _Step) -> Reading | None:
        for row in step.raw.windows:
            norms = self._window_norms.setdefault(step.names[row], [])
            sampled = step.arrived.get(f"window_sq{row}")
            norms.append(float(step.norm[row] ** 2 if sampled is None else sampled.values[0]))
            del norms[: -2 * self.config.window_steps]
        if not any(step.raw.windows.values()):
            return None
        value, low, high = np.full((3, step.num_rows), np.nan)
        for row, block_steps in step.raw.windows.items():
            length = (block_steps or 0) * NUM_BLOCKS
            squares = np.array(self._window_norms[step.names[row]][-length:])
            if not length or len(squares) < length:
                continue
            total, *without = step.arrived[f"window{row}"].values
            blocks = squares.reshape(NUM_BLOCKS, -1).sum(1)
            value[row] = _gsnr_of_sums(blocks.sum(), total, length)
            left = _gsnr_of_sums(blocks.sum() - blocks, np.array(without), length - length // NUM_BLOCKS)
            error = math.sqrt((NUM_BLOCKS - 1) / NUM_BLOCKS * np.square(left - left.mean()).sum())
            low[row], high[row] = value[row] - STUDENT_T * error, value[row] + STUDENT_T * error
        tensors = {"gsnr": value, "gsnr_low": low, "gsnr_high": high}
        return step.reading(source="window", batch_size=step.raw.batch_size, tensors=tensors)

    # -- resuming -----------------------------------------------------------------------------------------------

    def _histories(self) -> dict[str, NormHistory | RatioHistory]:
        return {"norms": self._norms, "micro": self._micro, "radial": self._radial, "adam": self._adam}

    def state_dict(self) -> dict[str, Any]:
        """All moving averages."""
        histories = {name: history.state_dict() for name, history in self._histories().items()}
        return {**histories, "window_norms": {name: list(norms) for name, norms in self._window_norms.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved moving averages."""
        for name, history in self._histories().items():
            history.load_state_dict(state[name])
        self._window_norms = {name: list(norms) for name, norms in state["window_norms"].items()}


class _Table:
    """What does not change from step to step."""

    def __init__(self, layout: Layout, slots: list[tuple[int, int]]) -> None:
        self.layout = layout
        self.names = tuple(info.name for info in layout.tensors)
        self.with_whole = ("", *self.names)
        self.sizes: Floats = np.array([float(info.numel) for info in layout.tensors])
        self.slot_rows, self.slot_heads = np.array(slots, dtype=np.int64).reshape(-1, 2).T


class _Step:
    """A RawStep that has arrived, with the questions an Interpreter asks of it."""

    def __init__(self, raw: RawStep, table: _Table) -> None:
        self.raw = raw
        self.table = table
        self.names = table.names
        self.num_rows = len(table.names)
        self.outlier = False
        self.arrived = arrived = raw.shipment.wait()
        self.loss_scale, self.grad_scale = np.ones((2, self.num_rows))
        self.under_scaler = False
        for index, station in enumerate(raw.stations):
            if f"scale{index}" in arrived and not station.ignore_scale:
                self.under_scaler = True
                self.loss_scale[station.rows] = arrived[f"scale{index}"].values[0]
                if station.scaled:
                    self.grad_scale[station.rows] = self.loss_scale[station.rows]
        self.present = arrived["norm"].present(self.num_rows) if "norm" in arrived else np.zeros(self.num_rows, bool)
        self.norm = self.rows("norm") / self.grad_scale if "norm" in arrived else np.full(self.num_rows, np.nan)

    def has(self, name: str) -> bool:
        return name in self.arrived

    def rows(self, name: str) -> Floats:
        """One number a tensor, nan where there is none."""
        return self.arrived[name].by_row(self.num_rows)

    def parts(self, name: str, num_rows: int) -> Floats:
        """One number a row, 0 where a micro-batch did not reach it: no gradient is a gradient of zero."""
        if name not in self.arrived:
            return np.zeros(num_rows)
        return np.where(self.arrived[name].present(num_rows), self.arrived[name].by_row(num_rows), 0.0)

    def reached(self, name: str, num_rows: int) -> NDArray[np.bool_]:
        """Which rows something came for under a name."""
        return self.arrived[name].present(num_rows) if name in self.arrived else np.zeros(num_rows, dtype=bool)

    def total(self, norms: Floats, name: str) -> float:
        """The norm of all tensors read under a name; nan where one of them is."""
        return math.sqrt(np.square(norms[self.arrived[name].present(self.num_rows)]).sum())

    def by_head(self, of_slots: Floats) -> Floats:
        """Sum the squares of a head's parts over the q, k and v weights it has."""
        sums: Floats = np.zeros(len(self.table.layout.heads))
        np.add.at(sums, self.table.slot_heads, of_slots)
        return sums

    def loss(self) -> float | None:
        if not self.raw.losses:
            return None
        losses = [
            loss if isinstance(loss, float) else float(self.arrived[f"loss{i}"].values[0])
            for i, loss in enumerate(self.raw.losses)
        ]
        sizes = self.raw.sizes
        if len(sizes) == len(losses) and all(size is not None for size in sizes):
            return float(np.average(losses, weights=np.array(sizes, dtype=np.float64)))
        return float(np.mean(losses))

    def lr(self) -> float | None:
        return float(self.arrived["lr"].values[0]) if "lr" in self.arrived else self.raw.lr

    def skipped(self) -> bool:
        return self.raw.skipped or ("found_inf" in self.arrived and bool(self.arrived["found_inf"].values.any()))

    def nonfinite(self) -> Floats:
        """Non-finite elements of each tensor; where they were not counted, 1 for "at least one"."""
        if "nonfinite" in self.arrived:
            return self.rows("nonfinite")
        return np.where(self.present, ~np.isfinite(self.norm), np.nan).astype(np.float64)

    def micro_batch_sizes(self, count: int) -> tuple[Floats, bool]:
        """Samples in each micro-batch, and whether the loop told; equal shares of one where it did not."""
        sizes = self.raw.sizes
        if len(sizes) == count and all(size is not None for size in sizes):
            return np.array(sizes, dtype=np.float64), True
        told_in_part = len(sizes) > 1 and any(size is not None for size in sizes)
        if self.raw.batch_size is not None and not told_in_part:
            return np.full(count, self.raw.batch_size / count), True
        return np.ones(count), False

    def reading(self, **fields: Any) -> Reading:
        fields.setdefault("batch_size", self.raw.batch_size)
        # Where optimizers were read at different stages, the furthest from raw says what to expect.
        fields.setdefault("stage", max((station.stage for station in self.raw.stations), key=STAGES.index))
        return Reading(step=self.raw.step, time=self.raw.time, **fields)


def _with_sums(
    layout: Layout, signal: Floats, noise: Floats, read: NDArray[np.bool_]
) -> tuple[list[str], Floats, Floats]:
    """Put the sums of the whole model before those of the tensors, and those of every layer after them.

    A sum over tensors of which one was read and is not finite is not known: nan.
    """
    names = ["", *(info.name for info in layout.tensors), *(f"layer:{name}" for name in layout.layers)]
    layer = np.array([info.depth for info in layout.tensors], dtype=np.int64)
    whole = []
    finite = np.isfinite(signal) & np.isfinite(noise)
    broken = np.bincount(layer, weights=read & ~finite, minlength=len(layout.layers)) > 0
    empty = np.bincount(layer, weights=finite, minlength=len(layout.layers)) == 0
    for sums in (signal, noise):
        known = np.where(finite, sums, 0.0)
        layers = np.bincount(layer, weights=known, minlength=len(layout.layers))
        total = math.nan if broken.any() or not finite.any() else known.sum()
        whole.append(np.concatenate([[total], sums, np.where(broken | empty, np.nan, layers)]))
    return names, whole[0], whole[1]


def _spread(
    layout: Layout, estimate: Any
) -> tuple[dict[str, float], dict[str, Floats], dict[str, Floats], dict[str, Floats]]:
    """Cut (value, low, high) arrays laid out by `_with_sums` into values, tensors, layers and heads."""
    ends = np.cumsum([1, len(layout.tensors), len(layout.layers)])
    ids = ("gsnr", "gsnr_low", "gsnr_high")
    cut = {name: np.split(part, ends) for name, part in zip(ids, estimate, strict=True)}
    values = {name: float(parts[0][0]) for name, parts in cut.items()}
    tensors, layers, heads = ({name: parts[kind] for name, parts in cut.items()} for kind in (1, 2, 3))
    return values, tensors, layers, heads if len(heads["gsnr"]) else {}


def _noise_scale(ratio: float, low: float, high: float) -> dict[str, float]:
    """B_simple = noise / signal per sample, from the ratio the other way up and its interval.

    Where the interval of the signal reaches zero the noise scale is not identifiable: nan, with a lower end only.
    """
    identifiable = low > 0
    return {
        "noise_scale": 1 / ratio if identifiable else math.nan,
        "noise_scale_low": 1 / high if high > 0 else math.nan,
        "noise_scale_high": 1 / low if identifiable else math.inf if high > 0 else math.nan,
    }


def _gsnr_of_sums(sum_of_squares: Any, square_of_sum: Any, count: Any) -> Any:
    return functional.gsnr_from_norms(sum_of_squares / count, square_of_sum / count**2, count)
