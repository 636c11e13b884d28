"""From sums to readings: all arithmetic of a live run, on the host, in float64, off the training thread."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals import functional
from gradvitals.config import Config
from gradvitals.measure.history import NormHistory, RatioHistory
from gradvitals.measure.landed import LandedStep, Table
from gradvitals.measure.rawstep import RawStep
from gradvitals.measure.window import NUM_BLOCKS
from gradvitals.types import Layout, Reading

Floats = NDArray[np.float64]

OUTLIER_RATIO = 5.0
"""A step whose norm is this far over its moving average would outweigh all others in a ratio of means: left out."""

ROUNDING = 2e-6
"""Noise below this share of the gradient's second moment is float32 rounding: the micro-batches are equal."""

BREATH_SECONDS = 5e-5
"""Pause between pieces of work. Python gives the interpreter lock away only every 5 ms by itself, and the training
thread would wait for it; a thread that sleeps for a moment hands it over."""

STUDENT_T = 2.262
"""97.5 % point of Student's t with `NUM_BLOCKS` - 1 degrees of freedom, for the window's jackknife."""


class Interpreter:
    """Turns the `RawStep`s of a run, in order, into `Reading`s. Holds the moving averages between them."""

    def __init__(self, config: Config, on_error: Callable[[str, Exception], None]) -> None:
        self.config = config
        self.on_error = on_error
        self._broken: set[str] = set()
        self._table = Table(Layout(), [])
        self._norms = NormHistory(config.norm_window)
        self._micro = RatioHistory(config.gsnr_window)
        self._radial = RatioHistory(config.gsnr_window)
        self._adam = RatioHistory(config.gsnr_window)
        self._window_norms: dict[str, list[float]] = {}
        self._last_change = (-1, math.nan)

    def finish(self, raw: RawStep) -> list[Reading]:
        """The readings of one step: first what needs no samples, then one for each GSNR source.

        An error in one of them is told, and that one is silent from then on.
        """
        if raw.layout is not self._table.layout:
            self._table = Table(raw.layout, raw.slots)
        step = LandedStep(raw, self._table)
        readings = []
        for part, applies, make in (
            ("general", True, self._general),
            ("microbatch", any(station.micro_batches >= 2 for station in raw.stations), self._microbatch),
            ("adam", step.has("exp_avg_norm"), self._from_moments),
            ("window", bool(raw.windows), self._window),
        ):
            if not applies or part in self._broken:
                continue
            time.sleep(BREATH_SECONDS)
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

    def _general(self, step: LandedStep) -> Reading:
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
        for name, metric in (("sum", "mean"), ("low", "at_gamma"), ("one", "at_one")):
            if step.has(f"factor_{name}"):
                sums, sizes = step.rows(f"factor_{name}"), step.table.sizes
                tensors[f"vrgd/{metric}"] = sums / sizes
                values[f"vrgd/{metric}"] = float(np.nansum(sums) / sizes[np.isfinite(sums)].sum())
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
        if step.has("change_sq"):
            values |= self._changes(step, tensors)
        if step.raw.carried:
            values["grad/carried"] = 1.0
        if step.raw.max_norm is not None:
            values["clip/max_norm"] = step.raw.max_norm
        if step.under_scaler:
            values["step/skipped"] = float(step.skipped())
        elif step.skipped():  # nobody but a Guard leaves steps out without a scaler
            values["step/left_out"] = 1.0
        return step.reading(values=values, tensors=tensors)

    def _changes(self, step: LandedStep, tensors: dict[str, Floats]) -> dict[str, float]:
        """The root mean square change of every tensor and of all, and whether it goes on in the same direction."""
        counts = np.full(step.num_rows, np.nan)
        for lengths in step.raw.sampled:
            counts[list(lengths)] = list(lengths.values())
        squares = step.rows("change_sq")
        tensors["update/rms"] = np.sqrt(squares / counts)
        read = np.isfinite(counts) & step.arrived["change_sq"].present(step.num_rows)
        sizes = step.table.sizes[read]
        values = {"update/rms": math.sqrt(np.average(squares[read] / counts[read], weights=sizes))}
        last_step, last_square = self._last_change
        square = float(squares[read].sum())
        if step.has("change_dot") and last_step == step.raw.step - 1 and last_square * square > 0:
            values["update/cosine"] = float(step.arrived["change_dot"].values.sum() / math.sqrt(last_square * square))
        self._last_change = (step.raw.step, square)
        return values

    # -- the three sources of GSNR ------------------------------------------------------------------------------

    def _microbatch(self, step: LandedStep) -> Reading:
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

    def _from_moments(self, step: LandedStep) -> Reading:
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

    def _window(self, step: LandedStep) -> Reading | None:
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
