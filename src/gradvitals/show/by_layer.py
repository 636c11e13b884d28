"""From numbers of single tensors to numbers of their layers, for pictures and tables alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from gradvitals.show.scan import windows
from gradvitals.store.frames import Kind
from gradvitals.store.reader import Run

Floats = NDArray[np.float64]
Steps = NDArray[np.int64]
Number = TypeVar("Number", np.float64, np.bool_)


class ByLayer:
    """Takes an array whose last axis is the run's tensors, and gives one whose last axis is `layers`."""

    def __init__(self, run: Run) -> None:
        names = run.names("layers")
        place = {name: at for at, name in enumerate(names)}
        member = np.array([place.get(info.layer, -1) for info in run.tensors], dtype=np.int64)
        self._num_layers = len(names)
        self._order = np.argsort(member, kind="stable")[int((member < 0).sum()) :]
        self.layers, self._starts = np.unique(member[self._order], return_index=True)
        """The layers that have tensors, as rows of ``run.names("layers")``."""

    def reduced(self, values: Floats, how: np.ufunc) -> Floats:
        """Each layer's tensors made one number; what is NaN counts only where nothing else is there.

        Args:
            values: ``[..., tensors]``
            how: ``np.fmax`` or ``np.fmin``, which pass over NaN.
        """
        return self._cut(values.take(self._order, axis=-1), how)

    def norms(self, values: Floats) -> Floats:
        """The norm of each layer from those of its tensors: the root of the sum of squares, of those that are known.

        A run keeps float32, of which float64 holds every square.
        """
        ordered = values.take(self._order, axis=-1)
        missing = np.isnan(ordered)
        total = self._cut(np.square(np.where(missing, 0.0, ordered)), np.add)
        return np.where(self._cut(missing, np.logical_and), np.nan, np.sqrt(total))

    def whole(self, values: Floats) -> Floats:
        """The same with a number for every layer of the run, NaN for those without tensors."""
        out = np.full((*values.shape[:-1], self._num_layers), np.nan)
        out[..., self.layers] = values
        return out

    def _cut(self, ordered: NDArray[Number], how: np.ufunc) -> NDArray[Number]:
        return how.reduceat(ordered, self._starts, axis=-1) if self._order.size else ordered


@dataclass(frozen=True)
class Table:
    """What to read for a picture of rows by steps, and how to make its rows of that."""

    metrics: tuple[str, ...]
    kind: Kind
    combine: Callable[..., Floats]
    """From ``[steps, rows of the kind]`` of each metric to ``[steps, rows]``."""
    rows: Steps
    """The rows of the picture that these are; the others have no numbers."""

    def steps(self, run: Run, source: str | None = None) -> Steps:
        """All steps at which there are numbers."""
        return run.times(self.metrics[0], kind=self.kind, source=source)[0]

    def read(
        self, run: Run, steps: Steps, source: str | None = None, *, at_a_time: int | None = None
    ) -> Iterator[tuple[Steps, Floats]]:
        """Steps and ``[steps, rows]``, a stretch of the steps at a time."""
        for window in windows(steps, len(run.names(self.kind)) * len(self.metrics), at_a_time):
            since, until = int(window[0]) - 1, int(window[-1])
            parts = [run.matrix(name, self.kind, source=source, since=since, until=until) for name in self.metrics]
            own = parts[0][0]
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                yield own, self.combine(*(_at_steps(own, *part) for part in parts))


def table_of(run: Run, metric: str, kind: Kind) -> Table | None:
    """How to make the picture of a metric; None where the run lacks what it needs.

    Norms are infinite where a gradient held NaN or Inf. What the run has only of tensors becomes that of layers: norms
    and updates by their sum of squares, GSNR as the lowest of the layer's tensors.
    """
    tensors = run.metrics("tensors")
    every = np.arange(len(run.names(kind)))
    if metric == "grad/norm" and metric in tensors and kind in ("tensors", "layers"):
        metrics = (metric, "grad/nonfinite") if "grad/nonfinite" in tensors else (metric,)
        if kind == "tensors":
            return Table(metrics, "tensors", _marked, every)
        by = ByLayer(run)
        return Table(metrics, "tensors", lambda *values: by.norms(_marked(*values)), by.layers)
    if metric in run.metrics(kind):
        return Table((metric,), kind, lambda values: values, every)
    if kind != "layers":
        return None
    by = ByLayer(run)
    if metric == "update/ratio" and {"update/norm", "weight/norm"} <= set(tensors):
        return Table(("update/norm", "weight/norm"), "tensors", lambda *both: _ratio(by, *both), by.layers)
    worst = {"gsnr": np.fmin, "update/ratio": np.fmax}.get(metric)
    if worst is None or metric not in tensors:
        return None
    return Table((metric,), "tensors", lambda values: by.reduced(values, worst), by.layers)


def _ratio(by: ByLayer, updates: Floats, weights: Floats) -> Floats:
    ratio: Floats = by.norms(updates) / by.norms(weights)
    return ratio


def _marked(norms: Floats, nonfinite: Floats | None = None) -> Floats:
    """Norms, infinite where the gradient held NaN or Inf: a norm that is NaN may also just not have been read."""
    return norms if nonfinite is None else np.where(nonfinite > 0, np.inf, norms)


def _at_steps(wanted: Steps, steps: Steps, rows: Floats) -> Floats:
    """The rows at the steps wanted, nan where there are none."""
    if np.array_equal(steps, wanted):
        return rows
    out = np.full((wanted.size, rows.shape[1]), np.nan)
    _, at, of = np.intersect1d(wanted, steps, assume_unique=True, return_indices=True)
    out[at] = rows[of]
    return out
