"""From sums to readings: all arithmetic of a live run, on the host, in float64, off the training thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals import functional
from gradvitals.breath import Breath
from gradvitals.config import Config
from gradvitals.measure.history import NormHistory, RatioHistory
from gradvitals.measure.landed import StepSums, Table, is_estimable
from gradvitals.measure.sums import PartSums
from gradvitals.measure.window import NUM_BLOCKS
from gradvitals.types import Layout, Reading

Floats = NDArray[np.float64]

OUTLIER_RATIO = 5.0
"""A step whose norm is this far over its moving average would outweigh all others in a ratio of means: left out."""

ROUNDING = 2e-6
"""Noise below this share of the gradient's second moment is float32 rounding: the micro-batches are equal."""

STUDENT_T = 2.262
"""97.5 % point of Student's t with `NUM_BLOCKS` - 1 degrees of freedom, for the window's jackknife."""


class Interpreter:
    """Turns the sums of a run's steps, in order, into `Reading`s. Holds the moving averages between them."""

    def __init__(self, config: Config, on_error: Callable[[str, Exception], None], breath: Breath) -> None:
        self.config = config
        self.on_error = on_error
        self._breath = breath
        self._broken: set[str] = set()
        self._norms = NormHistory(config.norm_window)
        self._micro = RatioHistory(config.gsnr_window)
        self._radial = RatioHistory(config.gsnr_window)
        self._adam = RatioHistory(config.gsnr_window)
        self._window_norms: dict[str, list[float]] = {}
        self._last_change = (-1, math.nan)

    def finish(self, step: StepSums) -> list[Reading]:
        """The readings of one step: first what needs no samples, then one for each GSNR source.

        An error in one of them is told, and that one is silent from then on.
        """
        readings: list[Reading] = []
        for part, applies, make in (
            ("general", True, self._general),
            ("microbatch", is_estimable(step), self._from_parts),
            ("adam", step.has("first_moment"), self._from_moments),
            ("window", bool(step.windows), self._window),
        ):
            if not applies or part in self._broken:
                continue
            self._breath()
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

    def _general(self, step: StepSums) -> Reading:
        values = {name: value for name, value in (("loss", step.loss), ("lr", step.lr)) if value is not None}
        tensors: dict[str, Floats] = {}
        sizes = step.table.sizes
        if step.has("norm"):
            norm, total = step.norm("norm"), math.sqrt(step.total("norm"))
            ratio, variation = self._norms.push(step.table.with_whole, np.concatenate(([total], norm)))
            step.outlier = bool(OUTLIER_RATIO <= ratio[0] < math.inf)
            values |= {"grad/norm": total, "grad/nonfinite": step.total("nonfinite")}
            values |= {"grad/spike_ratio": float(ratio[0]), "grad/norm_cv": float(variation[0])}
            tensors |= {"grad/norm": norm, "grad/nonfinite": step.known("nonfinite")}
            tensors |= {"grad/spike_ratio": ratio[1:], "grad/norm_cv": variation[1:]}
        if step.has("max"):
            tensors["grad/max"] = step.known("max")
            values["grad/max"] = float(np.max(step.rows["max"].values[step.rows["max"].present]))
        if step.has("nonzero"):
            zeros = sizes - step.known("nonzero")
            tensors["grad/zero_fraction"] = zeros / sizes
            values["grad/zero_fraction"] = float(np.nansum(zeros) / sizes[step.rows["nonzero"].present].sum())
        for name, metric in (("sum", "mean"), ("low", "at_gamma"), ("one", "at_one")):
            if step.has(f"factor_{name}"):
                sums = step.known(f"factor_{name}")
                tensors[f"vrgd/{metric}"] = sums / sizes
                values[f"vrgd/{metric}"] = float(np.nansum(sums) / sizes[np.isfinite(sums)].sum())
        if step.has("weight"):
            tensors["weight/norm"] = step.norm("weight")
            values["weight/norm"] = math.sqrt(step.total("weight"))
        if step.has("update"):
            tensors["update/norm"] = step.norm("update")
            values["update/norm"] = math.sqrt(step.total("update"))
            tensors["update/ratio"] = tensors["update/norm"] / tensors["weight/norm"]
            if values["weight/norm"] > 0:
                values["update/ratio"] = values["update/norm"] / values["weight/norm"]
        if step.has("change"):
            values |= self._changes(step, tensors)
        if step.carried:
            values["grad/carried"] = 1.0
        if step.in_turn:
            values["step/in_turn"] = 1.0
        if step.given_up:
            values["batches/given_up"] = float(step.given_up)
            lost = {"batches/given_up_loss": step.lost_loss, "batches/given_up_norm": step.lost_norm}
            values |= {name: value for name, value in lost.items() if value is not None}
        if step.max_norm is not None:
            values["clip/max_norm"] = step.max_norm
        if step.under_scaler:
            values["step/skipped"] = float(step.skipped)
        elif step.skipped:  # nobody but a Guard leaves steps out without a scaler
            values["step/left_out"] = 1.0
        for name, numbers in step.told_tensors.items():
            tensors[name] = numbers
        return step.reading(values=values | step.told, tensors=tensors, ranks=step.ranks)

    def _changes(self, step: StepSums, tensors: dict[str, Floats]) -> dict[str, float]:
        """The root mean square change of every tensor and of all, and whether it goes on in the same direction."""
        sizes = step.table.sizes
        tensors["update/rms"] = np.sqrt(step.known("change") / sizes)
        values = {"update/rms": math.sqrt(step.total("change") / sizes[step.rows["change"].present].sum())}
        assert step.changes is not None
        square, agreement = step.changes
        last_step, last_square = self._last_change
        if step.last_change is not None and last_step != step.step - 1:  # that one was passed over
            last_step, last_square = step.step - 1, step.last_change
        if agreement is not None and last_step == step.step - 1 and last_square * square > 0:
            values["update/cosine"] = agreement / math.sqrt(last_square * square)
        self._last_change = (step.step, square)
        return values

    # -- the sources of GSNR ------------------------------------------------------------------------------

    def _from_parts(self, step: StepSums) -> Reading:
        """From the gradients that a step's gradient is made of: micro-batches, ranks, or both at once."""
        layout, parts = step.table.layout, step.parts
        assert parts is not None
        read = step.rows["parts"].present & step.rows["norm"].present
        square = np.where(read, step.rows["norm"].values, np.nan)
        signal, noise = _signal_and_noise(step.rows["parts"].values, square, parts)
        names, all_signal, all_noise = _with_sums(step.table, signal, noise, read)
        if layout.heads and "heads" in step.slots and "parts" in step.slots:
            heads, whole = step.by_head(step.slots["parts"]), step.by_head(step.slots["heads"])
            more_signal, more_noise = _signal_and_noise(heads, whole, parts)
            names = step.table.with_heads
            all_signal, all_noise = np.append(all_signal, more_signal), np.append(all_noise, more_noise)
        if not step.outlier:
            self._micro.push(names, all_signal, all_noise, step.step)
        per_sample = self._micro.estimate(np.isfinite(all_signal) & np.isfinite(all_noise), step.step)
        mean_size = parts.samples / parts.count
        values, tensors, layers, heads_out = _spread(layout, [mean_size * part for part in per_sample])
        if parts.sizes_known:
            values |= _noise_scale(*(float(part[0]) for part in per_sample))
        if step.has("inner_squares") and step.has("weight_before"):
            along = read & step.rows["inner_squares"].present
            weight = step.known("weight_before")
            total = np.where(along, np.square(step.rows["inner"].values) / weight, np.nan)
            radial = _signal_and_noise(step.rows["inner_squares"].values / weight, total, parts)
            if not step.outlier:
                self._radial.push(step.table.names, *radial, step.step)
            tensors["radial_gsnr"] = mean_size * self._radial.estimate(np.isfinite(radial[0]), step.step)[0]
        return step.reading(
            source="ranks" if step.num_sources > 1 else "microbatch",
            batch_size=float(mean_size) if parts.sizes_known else None,
            values=values,
            tensors=tensors,
            layers=layers,
            heads=heads_out,
        )

    def _from_moments(self, step: StepSums) -> Reading:
        layout = step.table.layout
        rows = np.flatnonzero(step.rows["beta1"].present)
        beta1, beta2 = step.known("beta1")[rows], step.known("beta2")[rows]
        signal, noise = np.full((2, step.num_rows), np.nan)
        signal[rows], noise[rows] = functional.adam_signal_and_noise(
            step.known("first_moment")[rows],
            step.known("second_moment")[rows],
            beta1=beta1,
            beta2=beta2,
            step=step.known("adam_step")[rows],
        )
        noise = np.where(np.abs(noise) <= ROUNDING * np.abs(signal), 0.0, noise)
        begun = step.known("adam_step") >= 2  # one gradient has no spread
        names, all_signal, all_noise = _with_sums(step.table, signal, noise, begun)
        # The first moment forgets at the rate beta1, so its square is still correlated from reading to reading.
        gap = step.step - self._adam.last_step()
        correlation = 0.0 if math.isnan(gap) else beta1.max() ** (2 * gap)
        self._adam.push(names, all_signal, all_noise, step.step)
        known = np.isfinite(all_signal) & np.isfinite(all_noise)
        values, tensors, layers, _ = _spread(layout, self._adam.estimate(known, step.step, correlation))
        if step.has("below_one"):
            tensors["gsnr/below_one_fraction"] = np.where(begun, step.known("below_one") / step.known("alive"), np.nan)
        if step.has("median_sum"):
            tensors["gsnr/median"] = np.full(step.num_rows, np.nan)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = step.known("median_sum")[rows] / step.known("median_size")[rows]
            tensors["gsnr/median"][rows] = functional.adam_gsnr_from_sums(
                ratio, 1.0, beta1=beta1, beta2=beta2, step=step.known("adam_step")[rows]
            )
        stage = step.moments_stage or step.stage
        return step.reading(source="adam", values=values, tensors=tensors, layers=layers, stage=stage)

    def _window(self, step: StepSums) -> Reading | None:
        names = step.table.names
        for row, window in step.windows.items():
            norms = self._window_norms.setdefault(names[row], [])
            norms.append(window.square)
            del norms[: -2 * self.config.window_steps]
        if not any(window.block_steps for window in step.windows.values()):
            return None
        value, low, high = np.full((3, step.num_rows), np.nan)
        for row, window in step.windows.items():
            length = (window.block_steps or 0) * NUM_BLOCKS
            squares = np.array(self._window_norms[names[row]][-length:])
            if not length or len(squares) < length or window.sums is None:
                continue
            total, *without = window.sums
            blocks = squares.reshape(NUM_BLOCKS, -1).sum(1)
            value[row] = _gsnr_of_sums(blocks.sum(), total, length)
            left = _gsnr_of_sums(blocks.sum() - blocks, np.array(without), length - length // NUM_BLOCKS)
            error = math.sqrt((NUM_BLOCKS - 1) / NUM_BLOCKS * np.square(left - left.mean()).sum())
            low[row], high[row] = value[row] - STUDENT_T * error, value[row] + STUDENT_T * error
        return step.reading(source="window", tensors={"gsnr": value, "gsnr_low": low, "gsnr_high": high})

    # -- resuming -----------------------------------------------------------------------------------------------

    def _histories(self) -> dict[str, NormHistory | RatioHistory]:
        return {
            "norms": self._norms,
            "micro": self._micro,
            "radial": self._radial,
            "adam": self._adam,
        }

    def state_dict(self) -> dict[str, Any]:
        """All moving averages."""
        histories = {name: history.state_dict() for name, history in self._histories().items()}
        return {**histories, "window_norms": {name: list(norms) for name, norms in self._window_norms.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved moving averages."""
        for name, history in self._histories().items():
            if name in state:  # one saved before there was this source has none of it
                history.load_state_dict(state[name])
        self._window_norms = {name: list(norms) for name, norms in state["window_norms"].items()}


def _signal_and_noise(squares: Floats, total: Floats, parts: PartSums) -> tuple[Floats, Floats]:
    signal, noise = functional.signal_and_noise_of_sums(
        squares, total, parts.weight, parts.weight_per_sample, parts.square_per_sample
    )
    second_moment = squares / parts.weight_per_sample
    return np.asarray(signal), np.where(noise <= ROUNDING * second_moment, 0.0, noise)


def _with_sums(
    table: Table, signal: Floats, noise: Floats, read: NDArray[np.bool_]
) -> tuple[tuple[str, ...], Floats, Floats]:
    """Put the sums of the whole model before those of the tensors, and those of every layer after them.

    A sum over tensors of which one was read and is not finite is not known: nan.
    """
    layer, num_layers, whole = table.depths, len(table.layout.layers), []
    finite = np.isfinite(signal) & np.isfinite(noise)
    broken = np.bincount(layer, weights=read & ~finite, minlength=num_layers) > 0
    empty = np.bincount(layer, weights=finite, minlength=num_layers) == 0
    for sums in (signal, noise):
        known = np.where(finite, sums, 0.0)
        layers = np.bincount(layer, weights=known, minlength=num_layers)
        total = math.nan if broken.any() or not finite.any() else known.sum()
        whole.append(np.concatenate([[total], sums, np.where(broken | empty, np.nan, layers)]))
    return table.with_layers, whole[0], whole[1]


def _spread(
    layout: Layout, estimate: Any
) -> tuple[dict[str, float], dict[str, Floats], dict[str, Floats], dict[str, Floats]]:
    """Cut (value, low, high) arrays laid out by `_with_sums` into values, tensors, layers and heads."""
    of = dict(zip(("gsnr", "gsnr_low", "gsnr_high"), estimate, strict=True))
    last, end = 1 + len(layout.tensors), 1 + len(layout.tensors) + len(layout.layers)
    values = {name: float(part[0]) for name, part in of.items()}
    tensors = {name: part[1:last] for name, part in of.items()}
    layers, heads = ({name: part[cut] for name, part in of.items()} for cut in (slice(last, end), slice(end, None)))
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
