"""Turns the sums of steps into readings: all arithmetic of a live run, in float64, without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals import functional
from gradvitals.config import Config
from gradvitals.metrics import METRICS
from gradvitals.types import Layout, PlainReadings, Reading
from gradvitals.worker.averages import NoiseScaleHistory, NormHistory, RatioHistory
from gradvitals.worker.record import ALTERNATING, CARRIED, HAS_LOSS, HAS_NORMS, Flags, Floats, PlainSteps
from gradvitals.worker.sums import NUM_BLOCKS, PartSums, StepSums, Table, is_estimable

OUTLIER_RATIO = 5.0
"""A step whose norm exceeds its moving average by this factor is excluded: it would dominate a ratio of means."""


ROUNDING = 2e-6
"""Noise below this share of the gradient's second moment is float32 rounding of equal micro-batches."""


STUDENT_T = 2.262
"""97.5 % point of Student's t with `NUM_BLOCKS` - 1 degrees of freedom, for the window's jackknife."""


class Aggregator:
    """Turns the sums of a run's steps, in order, into readings. Holds the moving averages."""

    def __init__(self, config: Config, on_error: Callable[[str, Exception], None]) -> None:
        self.config = config
        self.on_error = on_error
        self._broken: set[str] = set()
        self._norms = NormHistory(config.norm_window)
        self._micro = RatioHistory(config.gsnr_window)
        self._radial = RatioHistory(config.gsnr_window)
        self._noise_scale = NoiseScaleHistory()
        self._adam = RatioHistory(config.gsnr_window)
        self._window_norms: dict[str, list[float]] = {}
        self._last_change = (-1, math.nan)

    @np.errstate(all="ignore")  # NaN means not known
    def finish(self, step: StepSums) -> list[Reading]:
        """Returns the readings of one step: first what needs no samples, then one for each GSNR source.

        An error in one of them is reported, and that one is skipped from then on.
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
            try:
                reading = make(step)
            except Exception as error:
                self._broken.add(part)
                self.on_error(part, error)
                continue
            if reading is not None:
                readings.append(reading)
        return readings

    @np.errstate(all="ignore")
    def plain(self, plain: PlainSteps, table: Table) -> PlainReadings:
        """Returns the readings of plain steps."""
        steps, flags = plain.steps, plain.steps["flags"]
        has_loss, has_norms = flags & HAS_LOSS > 0, flags & HAS_NORMS > 0
        values: dict[str, Floats] = {"loss": steps["loss"], "lr": steps["lr"]}
        present: dict[str, Flags] = {"loss": has_loss, "lr": ~np.isnan(steps["lr"])}
        tensors: dict[str, Floats] = {}
        for name, number in (("grad/carried", flags & CARRIED), ("step/in_turn", flags & ALTERNATING)):
            if number.any():
                values[name], present[name] = np.ones(len(steps)), number > 0
        limits = steps["max_norm"]
        if not np.isnan(limits).all():
            values["clip/max_norm"], present["clip/max_norm"] = limits, ~np.isnan(limits)
        if has_norms.any():
            norms = np.full((len(steps), 1 + len(table.names)), np.nan)
            norms[:, 1 + plain.places.rows] = plain.norms
            read = norms[has_norms]
            read[:, 0] = np.sqrt(np.square(read[:, 1 + plain.places.rows]).sum(1))
            norms[has_norms] = read
            ratios, variations = np.full((2, *norms.shape), np.nan)
            ratios[has_norms], variations[has_norms] = self._norms.push(table.with_whole, read)
            # Squares of finite elements can overflow to Inf, but not to NaN.
            surely = np.isnan(norms[:, 1 + plain.places.rows]).any(1) | (has_loss & ~np.isfinite(steps["loss"]))
            broken = np.where(surely, 1.0, np.nan)[:, None]
            nonfinite = np.full_like(norms, np.nan)
            known = norms[:, 1 + plain.places.rows]
            nonfinite[:, 1 + plain.places.rows] = np.where(np.isfinite(known), 0.0, broken)
            nonfinite[:, 0] = nonfinite[:, 1 + plain.places.rows].sum(1)
            for name, numbers in (
                ("grad/norm", norms),
                ("grad/nonfinite", nonfinite),
                ("grad/spike_ratio", ratios),
                ("grad/norm_cv", variations),
            ):
                values[name], tensors[name], present[name] = numbers[:, 0], numbers[:, 1:], has_norms
        return PlainReadings(
            steps=steps["step"],
            times=steps["time"],
            batch_sizes=steps["batch_size"],
            values=values,
            present=present,
            tensors=tensors,
        )

    # -- norms, loss, weights -----------------------------------------------------------------------------------

    def _general(self, step: StepSums) -> Reading:
        values = {name: value for name, value in (("loss", step.loss), ("lr", step.lr)) if value is not None}
        tensors: dict[str, Floats] = {}
        for name, metric in METRICS.items():
            if metric.finish is not None and all(map(step.has, metric.sums)):
                tensors[name] = metric.finish(*map(step.known, metric.sums), step.table.sizes)
                read = step.rows[metric.sums[0]].present
                whole = float(metric.finish(*map(step.total, metric.sums), step.table.sizes[read].sum()))
                if len(metric.sums) == 1 or not math.isnan(whole):
                    values[name] = whole
        if step.has("norm"):
            norms = np.concatenate(([values["grad/norm"]], tensors["grad/norm"]))
            ratio, variation = (numbers[0] for numbers in self._norms.push(step.table.with_whole, norms[None]))
            step.outlier = bool(OUTLIER_RATIO <= ratio[0] < math.inf)
            values |= {"grad/spike_ratio": float(ratio[0]), "grad/norm_cv": float(variation[0])}
            tensors |= {"grad/spike_ratio": ratio[1:], "grad/norm_cv": variation[1:]}
        if step.has("change"):
            values |= self._direction(step)
        if step.carried:
            values["grad/carried"] = 1.0
        if step.alternating:
            values["step/in_turn"] = 1.0
        if step.given_up:
            values["batches/given_up"] = float(step.given_up)
            lost = {"batches/given_up_loss": step.lost_loss, "batches/given_up_norm": step.lost_norm}
            values |= {name: value for name, value in lost.items() if value is not None}
        if step.max_norm is not None:
            values["clip/max_norm"] = step.max_norm
        if step.under_scaler:
            values["step/skipped"] = float(step.skipped)
        elif step.skipped:  # without a scaler, only a Guard skips steps
            values["step/left_out"] = 1.0
        return step.reading(values=values | step.values, tensors=tensors | step.tensors, ranks=step.ranks)

    def _direction(self, step: StepSums) -> dict[str, float]:
        """Returns the cosine between this step's change and the previous one, if both are known."""
        assert step.changes is not None
        square, agreement = step.changes
        (last_step, last_square), self._last_change = self._last_change, (step.step, square)
        if agreement is None or last_step != step.step - 1 or not last_square * square > 0:
            return {}
        return {"update/cosine": agreement / math.sqrt(last_square * square)}

    # -- the sources of GSNR ------------------------------------------------------------------------------

    def _from_parts(self, step: StepSums) -> Reading:
        """Returns the GSNR from the gradients that make up the step's gradient: micro-batches, ranks, or both."""
        layout, parts = step.table.layout, step.parts
        assert parts is not None
        read = step.rows["parts"].present & step.rows["norm"].present
        square = np.where(read, step.rows["norm"].values, np.nan)
        signal, noise = _signal_and_noise(step.rows["parts"].values, square, parts)
        names, all_signal, all_noise = _with_sums(step.table, signal, noise, read)
        # Parts are read as they enter the sum: about `count` times smaller than on their own.
        smallest = step.rows["parts"].values / (parts.weight * parts.count**2)
        all_signal = np.where(_underflows(step.table, smallest, square, read), np.nan, all_signal)
        if layout.heads and "heads" in step.slots and "parts" in step.slots:
            heads, whole = step.by_head(step.slots["parts"]), step.by_head(step.slots["heads"])
            more_signal, more_noise = _signal_and_noise(heads, whole, parts)
            least = step.table.least_squares[step.table.slot_rows].max()
            lost = (heads + whole > 0) & (heads / (parts.weight * parts.count**2) < least)
            more_signal = np.where(lost, np.nan, more_signal)
            names = step.table.with_heads
            all_signal, all_noise = np.append(all_signal, more_signal), np.append(all_noise, more_noise)
        if not step.outlier:
            self._micro.push(names, all_signal, all_noise, step.step)
            if parts.sizes_known:
                self._noise_scale.push(float(all_signal[0]), float(all_noise[0]), step.step)
        per_sample = self._micro.estimate(np.isfinite(all_signal) & np.isfinite(all_noise), step.step)
        mean_size = parts.samples / parts.count
        values, tensors, layers, heads_out = _spread(layout, [mean_size * part for part in per_sample])
        if parts.sizes_known:
            values |= self._noise_scale.estimate(step.step)
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
        first, second = step.rows["first_moment"].values, step.rows["second_moment"].values
        all_signal = np.where(_underflows(step.table, second, first, begun), np.nan, all_signal)
        # The first moment decays at the rate beta1, so its square is correlated from one reading to the next.
        gap = step.step - self._adam.last_step()
        correlation = 0.0 if math.isnan(gap) else beta1.max() ** (2 * gap)
        self._adam.push(names, all_signal, all_noise, step.step)
        known = np.isfinite(all_signal) & np.isfinite(all_noise)
        values, tensors, layers, _ = _spread(layout, self._adam.estimate(known, step.step, correlation))
        if values["gsnr_high"] < 0:  # gradients are correlated: the moments are not averages of independent samples
            values = dict.fromkeys(values, math.nan)
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
            if 0 < squares.mean() < step.table.least_squares[row]:
                continue
            total, *without = window.sums
            blocks = squares.reshape(NUM_BLOCKS, -1).sum(1)
            value[row] = _gsnr_of_sums(blocks.sum(), total, length)
            left = _gsnr_of_sums(blocks.sum() - blocks, np.array(without), length - length // NUM_BLOCKS)
            error = math.sqrt((NUM_BLOCKS - 1) / NUM_BLOCKS * np.square(left - left.mean()).sum())
            low[row], high[row] = value[row] - STUDENT_T * error, value[row] + STUDENT_T * error
        return step.reading(source="window", tensors={"gsnr": value, "gsnr_low": low, "gsnr_high": high})

    # -- resuming -----------------------------------------------------------------------------------------------

    def _histories(self) -> dict[str, NormHistory | RatioHistory | NoiseScaleHistory]:
        return {
            "norms": self._norms,
            "micro": self._micro,
            "radial": self._radial,
            "noise_scale": self._noise_scale,
            "adam": self._adam,
        }

    def state_dict(self) -> dict[str, Any]:
        """The moving averages, as plain values."""
        histories = {name: history.state_dict() for name, history in self._histories().items()}
        return {**histories, "window_norms": {name: list(norms) for name, norms in self._window_norms.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved moving averages."""
        for name, history in self._histories().items():
            if name in state:  # saved by an earlier version
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
    """Returns names, signal and noise of the whole model, then of every tensor, then of every layer.

    A sum is NaN if one of its tensors was read and is not finite.
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


def _underflows(table: Table, smallest: Floats, largest: Floats, read: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns whether squares are too small for float32: of the whole model, every tensor, every layer.

    Args:
        table: The tensors.
        smallest: The smallest sums of squares that were read of each tensor.
        largest: Other sums of squares: if these are zero too, the gradient is zero.
        read: Tensors that were read.
    """
    sums = [
        np.concatenate(
            [[some.sum()], some, np.bincount(table.depths, weights=some, minlength=len(table.layout.layers))]
        )
        for some in (np.where(read, numbers, 0.0) for numbers in (smallest, largest, table.least_squares))
    ]
    return np.asarray((sums[0] + sums[1] > 0) & (sums[0] < sums[2]))


def _spread(
    layout: Layout, estimate: Any
) -> tuple[dict[str, float], dict[str, Floats], dict[str, Floats], dict[str, Floats]]:
    """Split (value, low, high) arrays laid out by `_with_sums` into values, tensors, layers and heads."""
    of = dict(zip(("gsnr", "gsnr_low", "gsnr_high"), estimate, strict=True))
    last, end = 1 + len(layout.tensors), 1 + len(layout.tensors) + len(layout.layers)
    values = {name: float(part[0]) for name, part in of.items()}
    tensors = {name: part[1:last] for name, part in of.items()}
    layers, heads = ({name: part[cut] for name, part in of.items()} for cut in (slice(last, end), slice(end, None)))
    return values, tensors, layers, heads if len(heads["gsnr"]) else {}


def _gsnr_of_sums(sum_of_squares: Any, square_of_sum: Any, count: Any) -> Any:
    return functional.gsnr_from_norms(sum_of_squares / count, square_of_sum / count**2, count)
