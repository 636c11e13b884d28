"""What may have pushed the weights to where the loss is higher: a long update, one large gradient, a rate that rose."""

from __future__ import annotations

import math

import numpy as np

from gradvitals.diagnose.step import Step


def pushed_by(step: Step, back: int = 20) -> tuple[float, int]:
    """The largest update of the last steps over the usual one of those before, and the step it was at."""
    updates = step.history["update/rms"]
    moves = updates.last(back + 50)
    if len(moves) <= back or not np.median(moves[:-back]) > 0:
        return math.nan, step.number
    recent = moves[-back:] / np.median(moves[:-back])
    return float(recent.max()), int(updates.steps[-back:][recent.argmax()])


def single_spike(step: Step, before: int, back: int = 40) -> tuple[float, int]:
    """The one gradient before a step that was far larger than the others, over the usual norm, and its step.

    0 where there is none that can have moved the weights: it was clipped, or its step was not made.
    """
    steps, norms = step.history["grad/norm"].since(before - back - 50)
    steps, norms = steps[steps < before], norms[steps < before]
    if len(norms) <= back or not np.median(norms[:-back]) > 0:
        return 0.0, 0
    recent = norms[-back:] / np.median(norms[:-back])
    at, number = int(recent.argmax()), int(steps[-back:][recent.argmax()])
    left_out = [step.history[name].at(number) == 1 for name in ("step/skipped", "step/left_out")]
    held = step.history["clip/max_norm"].at(number) < norms[-back:][at]
    alone = np.delete(recent, at).max() < recent[at] / 3
    return (float(recent[at]), number) if alone and not held and not any(left_out) else (0.0, 0)


def rate_rose(step: Step, back: int = 20) -> float:
    """The learning rate over what it was before the last steps; nan where that is not known."""
    rates = step.history["lr"].last(back + 50)[:-back]
    return step.value("lr") / float(np.median(rates)) if len(rates) and np.median(rates) > 0 else math.nan
