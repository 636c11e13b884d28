"""What is said of a run in whose Adam's averages one huge gradient still is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.diagnose.history import BETAS, HUGE, steps_kept
from gradvitals.show.text import number
from gradvitals.store.reader import Run
from gradvitals.types import FloatArray

WINDOW = 20
"""Readings in a GSNR, unless the run says otherwise."""


def doubt_of_adam(run: Run) -> str:
    """Why the GSNR from Adam's moments is not to be trusted at the end of a run; empty where it is."""
    if "adam" not in run.sources("gsnr", "values") or "grad/spike_ratio" not in run.metrics("values"):
        return ""
    readings = run.series("gsnr", source="adam")[0]
    steps, ratios = _taken_in(run)
    huge = (ratios >= HUGE) & (steps <= (readings[-1] if readings.size else -1))
    if not huge.any():
        return ""
    steps, ratios = steps[huge], ratios[huge]
    betas, window = _settings(run.meta)
    ends = steps + np.array([steps_kept(ratio, betas) for ratio in ratios.tolist()])
    at = int(np.argmax(ends))
    untouched = int(np.count_nonzero(readings > ends[at]))
    if untouched >= window:
        return ""
    every = float(np.median(np.diff(readings[-window:]))) if readings.size > 1 else 1.0
    until = math.ceil(max(ends[at], readings[-1]) + (window - untouched) * every)
    return (
        f"the gradient of step {int(steps[at]):,}, {number(float(ratios[at]))} times the usual, is still in Adam's "
        f"averages: the GSNR from them is false until about step {until:,}"
    )


def _taken_in(run: Run) -> tuple[NDArray[np.int64], FloatArray]:
    """How many times the usual norm each gradient had that Adam took in: clipped, and not left out."""
    steps, ratios = run.series("grad/spike_ratio")
    norms, limits = _at(run, "grad/norm", steps), _at(run, "clip/max_norm", steps)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.where(limits < norms, ratios * limits / norms, ratios)
    made = (_at(run, "step/skipped", steps) != 1) & (_at(run, "step/left_out", steps) != 1)
    known = made & np.isfinite(ratios)
    return steps[known], ratios[known]


def _at(run: Run, metric: str, steps: NDArray[np.int64]) -> FloatArray:
    """A metric at some steps; nan where it was not read."""
    found = np.full(len(steps), np.nan)
    if metric in run.metrics("values"):
        where, values = run.series(metric)
        _, here, there = np.intersect1d(steps, where, return_indices=True)
        found[here] = values[there]
    return found


def _settings(meta: Mapping[str, Any]) -> tuple[Sequence[float], int]:
    """The betas of the optimizer and the readings in a GSNR, as far as the record has them."""
    facts, config = meta.get("facts"), meta.get("config")
    betas = facts.get("betas") if isinstance(facts, Mapping) else None
    window = config.get("gsnr_window") if isinstance(config, Mapping) else None
    known = isinstance(betas, (list, tuple)) and len(betas) == 2 and all(_is_beta(beta) for beta in betas)
    return betas if known and betas else BETAS, window if isinstance(window, int) and window >= 2 else WINDOW


def _is_beta(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1
