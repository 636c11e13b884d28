"""Averages over the readings of a run: of norms, of signal and noise, and of the noise scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals import functional
from gradvitals.worker.record import Flags, Floats


class NormHistory:
    """Moving average and variation of norms. A norm is compared with those before it; NaN and Inf do not enter."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.names: tuple[str, ...] = ()
        self._values: Floats = np.full((window, 0), np.nan)
        """The last norms of each name, the oldest first; NaN where there is none."""

    def push(self, names: tuple[str, ...], norms: Floats) -> tuple[Floats, Floats]:
        """Compare the norms of some steps in a row with those before each, then remember them.

        Args:
            names: What the columns belong to.
            norms: One row per step.

        Returns:
            The spike ratio, norm over its moving average, and the coefficient of variation of the window so far.
            Both are NaN before there are two norms to compare with.
        """
        self._values, self.names = _aligned(self._values, self.names, names), names
        values = np.concatenate((self._values, np.where(np.isfinite(norms), norms, np.nan)))
        known = np.isfinite(values)
        finite = np.where(known, values, 0.0)
        count, total, squares = (_sums_before(some, self.window, len(norms)) for some in (known, finite, finite**2))
        count = np.where(count >= 2, count, np.nan)
        mean = total / count
        variance = np.maximum(squares - count * mean**2, 0) / (count - 1)
        self._values = values[-self.window :]
        return norms / mean, np.sqrt(variance) / mean

    def state_dict(self) -> dict[str, Any]:
        """The window as plain lists."""
        return {"names": list(self.names), "values": self._values.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved window; ignore one of another length."""
        values = np.array(state["values"], dtype=np.float64).reshape(len(state["values"]), len(state["names"]))
        if len(values) == self.window:
            self.names, self._values = tuple(state["names"]), values


def _aligned(values: Floats, names: Sequence[str], wanted: Sequence[str]) -> Floats:
    """Returns the columns of these names, along the last axis; those of a new name are NaN."""
    if names is wanted or names == wanted:
        return values
    column = {name: index for index, name in enumerate(names)}
    found = [column.get(name, -1) for name in wanted]
    return np.concatenate((values, np.full((*values.shape[:-1], 1), np.nan)), axis=-1)[..., found]


def _sums_before(numbers: NDArray[Any], window: int, steps: int) -> Floats:
    """For each of the last rows, the sum of the `window` rows before it."""
    if steps == 1:
        return np.asarray(numbers[:window].sum(0, dtype=np.float64)[None])
    view = np.lib.stride_tricks.sliding_window_view(numbers, window, axis=0)
    return np.asarray(view[:steps].sum(-1, dtype=np.float64))


class RatioHistory:
    """Signal over noise as a ratio of means over recent readings, with its interval from their spread.

    Recent is at most `window` readings, and none from before half the run: gradients shrink fast while a run is
    young, and in a ratio of means the first readings would outweigh all that follow.
    """

    def __init__(self, window: int) -> None:
        self.names: tuple[str, ...] = ()
        self._values: Floats = np.full((3, window, 0), np.nan)
        """Signal, noise and step of the last readings of each name, the newest first; NaN where there are fewer."""

    def push(self, names: tuple[str, ...], signal: Floats, noise: Floats, step: int) -> None:
        """Remember the signal and noise of one reading; a row without both keeps what it has."""
        self._values, self.names = _aligned(self._values, self.names, names), names
        known = np.isfinite(signal) & np.isfinite(noise)
        older = self._values[:, :-1, known]
        self._values[:, 1:, known] = older
        self._values[:, 0, known] = signal[known], noise[known], np.full(known.sum(), float(step))

    def estimate(self, known: Flags, step: int, correlation: Floats | float = 0.0) -> tuple[Floats, Floats, Floats]:
        """Returns the ratio and its 95 % interval, row by row; Inf where there is signal and no noise at all.

        Args:
            known: Rows that the latest reading has a number for. The others are NaN: earlier readings say nothing
                about now.
            step: The current step.
            correlation: Correlation between one reading and the next, by which their number counts for less.
        """
        signal, noise, steps = self._values
        recent = steps >= step / 2
        x, y = np.where(recent, signal, 0.0), np.where(recent, noise, 0.0)
        count = recent.sum(0).astype(np.float64)
        mean_x, mean_y = x.sum(0) / count, y.sum(0) / count
        dx, dy = np.where(recent, x - mean_x, 0.0), np.where(recent, y - mean_y, 0.0)
        dof = np.where(count > 1, count - 1, np.nan)
        var_x, var_y, cov = (dx * dx).sum(0) / dof, (dy * dy).sum(0) / dof, (dx * dy).sum(0) / dof
        effective = count * (1 - correlation) / (1 + correlation)
        value, low, high = functional.ratio_of_means(mean_x, mean_y, var_x, var_y, cov, effective)
        value = np.where((mean_y == 0) & (mean_x > 0), np.inf, value)
        return np.where(known, value, np.nan), np.where(known, low, np.nan), np.where(known, high, np.nan)

    def last_step(self) -> float:
        """Returns the step of the latest reading; NaN before the first."""
        steps = self._values[2]
        return float(np.nanmax(steps)) if np.isfinite(steps).any() else np.nan

    def state_dict(self) -> dict[str, Any]:
        """Names and values as plain lists."""
        return {"names": list(self.names), "values": self._values.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; ignore one of another length, or of an earlier version."""
        values = np.array(state.get("values", ()), dtype=np.float64).reshape(3, -1, len(state.get("names", ())) or 1)
        if values.shape[1] == self._values.shape[1]:
            self.names, self._values = tuple(state["names"]), values


class NoiseScaleHistory:
    """The noise scale of the whole model, over the latter half of the run.

    Showing a value as soon as its interval is bounded would select signals that look large by chance: the median of
    such values was 150 where the truth was 421. So the readings that detect a signal are not the ones that estimate
    it. Once their interval excludes zero, this collects as many new readings and estimates from these and later ones,
    whatever they are. Until then it gives a lower end only.
    """

    MOST = 1024
    """Entries kept; with more, neighbors are averaged."""

    def __init__(self) -> None:
        self._entries: list[list[float]] = []  # step, signal, noise
        self._open: list[list[float]] = []
        self._readings = 1  # per entry
        self._since = math.inf  # readings from this step on count for the value
        self._needed = 0  # entries needed before a value is shown

    def push(self, signal: float, noise: float, step: int) -> None:
        """Remember one reading."""
        if not math.isfinite(signal + noise):
            return
        self._open.append([float(step), signal, noise])
        if len(self._open) == self._readings:
            self._entries.append(_average(self._open))
            self._open = []
        if len(self._entries) > self.MOST:
            pairs = zip(self._entries[0::2], self._entries[1::2], strict=False)
            self._entries = [_average(list(pair)) for pair in pairs]
            self._readings, self._needed = 2 * self._readings, (self._needed + 1) // 2

    def estimate(self, step: int) -> dict[str, float]:
        """Returns B_simple = noise / signal per sample with its interval: the inverse of that of signal over noise."""
        self._entries = [entry for entry in self._entries if entry[0] >= step / 2]
        fresh = [entry for entry in self._entries if entry[0] >= self._since]
        is_shown = self._needed > 0 and len(fresh) >= self._needed
        entries = np.array(fresh if is_shown else self._entries).reshape(-1, 3)[:, 1:]
        value = low = high = math.nan
        if len(entries) > 1:
            (mean_x, mean_y), spread = entries.mean(0), np.cov(entries.T)
            ratio = functional.ratio_of_means(mean_x, mean_y, spread[0, 0], spread[1, 1], spread[0, 1], len(entries))
            value, low, high = (float(part) for part in ratio)
        if low > 0 and not self._needed:
            self._since, self._needed = step + 1.0, len(entries)
        return {
            "noise_scale": 1 / value if is_shown and value > 0 and high > 0 else math.nan,
            "noise_scale_low": 1 / high if high > 0 else math.nan,
            "noise_scale_high": 1 / low if is_shown and low > 0 else math.inf if high > 0 else math.nan,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as plain lists and numbers."""
        entries, waiting = ([list(entry) for entry in some] for some in (self._entries, self._open))
        numbers = {"readings": self._readings, "since": self._since, "needed": self._needed}
        return {"entries": entries, "open": waiting, **numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._entries, self._open = [list(entry) for entry in state["entries"]], [list(one) for one in state["open"]]
        self._readings, self._needed = int(state["readings"]), int(state["needed"])
        self._since = float(state["since"])


def _average(entries: list[list[float]]) -> list[float]:
    """The mean signal and noise of some readings, at the step of the first."""
    return [entries[0][0], *(sum(entry[place] for entry in entries) / len(entries) for place in (1, 2))]
