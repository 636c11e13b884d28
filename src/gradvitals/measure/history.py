"""What the host remembers between readings: rings of recent numbers, one column a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals import functional

Floats = NDArray[np.float64]


class Ring:
    """The last `size` values of many named series. Values that are not finite are not kept."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.names: tuple[str, ...] = ()
        self.values = np.full((size, 0), np.nan)
        self._next = np.zeros(0, dtype=np.int64)

    def align(self, names: Sequence[str]) -> None:
        """Have exactly these columns, keeping what is known of each name."""
        if names is self.names or tuple(names) == self.names:
            return
        column = {name: index for index, name in enumerate(self.names)}
        values = np.full((self.size, len(names)), np.nan)
        position = np.zeros(len(names), dtype=np.int64)
        for index, name in enumerate(names):
            if name in column:
                values[:, index] = self.values[:, column[name]]
                position[index] = self._next[column[name]]
        self.names, self.values, self._next = tuple(names), values, position

    def push(self, columns: NDArray[np.intp], values: Floats | float) -> None:
        """Add one finite value to each of these series, over its oldest."""
        places = self._next[columns]
        self.values[places, columns] = values
        self._next[columns] = (places + 1) % self.size

    def state_dict(self) -> dict[str, Any]:
        """Names and values as plain lists."""
        return {"names": list(self.names), "values": self.values.tolist(), "next": self._next.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; one of another length is left aside."""
        values = np.array(state["values"], dtype=np.float64).reshape(len(state["values"]), len(state["names"]))
        if len(values) == self.size:
            self.names, self.values = tuple(state["names"]), values
            self._next = np.array(state["next"], dtype=np.int64)


class NormHistory:
    """Moving average and variation of norms, without the values that are judged by them.

    Running sums make a step cost the same however long the window is. Norms that are not finite are not in them.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        self.names: tuple[str, ...] = ()
        self._values = np.zeros((window, 0))
        self._counted = np.zeros((window, 0))
        self._position = 0
        self._recount()

    def push(self, names: Sequence[str], norms: Floats) -> tuple[Floats, Floats]:
        """Judge new norms by those before them, then remember them.

        Returns:
            The spike ratio, norm over its moving average, and the coefficient of variation of the window so far.
            Both are nan before there are two norms to compare with.
        """
        if names != self.names:
            self._align(names)
        count = np.where(self._count >= 2, self._count, np.nan)
        mean = self._sum / count
        variance = np.maximum(self._sum_sq - count * mean**2, 0) / (count - 1)
        self._remember(norms)
        return norms / mean, np.sqrt(variance) / mean

    def _remember(self, norms: Floats) -> None:
        finite = np.isfinite(norms)
        entering = norms if finite.all() else np.where(finite, norms, 0.0)
        values, counted = self._values[self._position], self._counted[self._position]
        spike_leaves = bool(np.any(values * self._count > 100 * self._sum))
        self._sum += entering - values
        self._sum_sq += entering**2 - values**2
        self._count += finite - counted
        values[:], counted[:] = entering, finite
        self._position = (self._position + 1) % self.window
        if self._position == 0 or spike_leaves:
            self._recount()  # running sums collect rounding, most of all when a spike leaves the window

    def _recount(self) -> None:
        self._sum, self._sum_sq = self._values.sum(0), (self._values**2).sum(0)
        self._count = self._counted.sum(0)

    def _align(self, names: Sequence[str]) -> None:
        """Have exactly these columns, keeping what is known of each name."""
        column = {name: index for index, name in enumerate(self.names)}
        kept = [(index, column[name]) for index, name in enumerate(names) if name in column]
        new, old = [index for index, _ in kept], [index for _, index in kept]
        values, counted = np.zeros((2, self.window, len(names)))
        values[:, new], counted[:, new] = self._values[:, old], self._counted[:, old]
        self.names, self._values, self._counted = tuple(names), values, counted
        self._recount()

    def state_dict(self) -> dict[str, Any]:
        """The window as plain lists, nan where there is nothing."""
        values = np.where(self._counted > 0, self._values, np.nan)
        return {"names": list(self.names), "values": values.tolist(), "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved window; one of another length is left aside."""
        values = np.array(state["values"], dtype=np.float64).reshape(len(state["values"]), len(state["names"]))
        if len(values) == self.window:
            self.names, self._position = tuple(state["names"]), int(state["position"])
            self._counted = np.isfinite(values).astype(np.float64)
            self._values = np.where(self._counted > 0, values, 0.0)
            self._recount()


class RatioHistory:
    """Signal over noise as a ratio of means over recent readings, with its interval from their spread.

    Recent is at most `window` readings, and none from before half the run: gradients shrink fast while a run is
    young, and in a ratio of means the first readings would outweigh all that follow.
    """

    def __init__(self, window: int) -> None:
        self._signal = Ring(window)
        self._noise = Ring(window)
        self._steps = Ring(window)

    def push(self, names: Sequence[str], signal: Floats, noise: Floats, step: int) -> None:
        """Remember one reading's signal and noise of every row."""
        columns = np.flatnonzero(np.isfinite(signal) & np.isfinite(noise))
        for ring in self._rings().values():
            ring.align(names)
        self._signal.push(columns, signal[columns])
        self._noise.push(columns, noise[columns])
        self._steps.push(columns, float(step))

    def estimate(
        self, known: NDArray[np.bool_], step: int, correlation: Floats | float = 0.0
    ) -> tuple[Floats, Floats, Floats]:
        """The ratio and its 95 % interval, row by row; inf where there is signal and no noise at all.

        Args:
            known: Rows that the latest reading has a number for. The others are silent: what was so before is no
                news of now.
            step: The step it is now.
            correlation: Correlation between one reading and the next, by which their number counts for less.
        """
        recent = self._steps.values >= step / 2
        x, y = np.where(recent, self._signal.values, 0.0), np.where(recent, self._noise.values, 0.0)
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
        """The step of the latest reading; nan before the first."""
        steps = self._steps.values
        return float(np.nanmax(steps)) if np.isfinite(steps).any() else np.nan

    def _rings(self) -> dict[str, Ring]:
        return {"signal": self._signal, "noise": self._noise, "steps": self._steps}

    def state_dict(self) -> dict[str, Any]:
        """All rings."""
        return {name: ring.state_dict() for name, ring in self._rings().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved rings."""
        for name, ring in self._rings().items():
            ring.load_state_dict(state[name])
