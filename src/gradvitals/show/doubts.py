"""Where the silence of a rule is no proof: what a run does not tell well enough to call it fine."""

from __future__ import annotations

import numpy as np

from gradvitals.advise import Advice
from gradvitals.advise.batch import advise_batch
from gradvitals.advise.record import Record
from gradvitals.diagnose import RULES
from gradvitals.diagnose.rules.batch import BatchTooLarge, BatchTooSmall, EstimatorUnreliable
from gradvitals.show.adam_memory import doubt_of_adam
from gradvitals.store.reader import Run

TOO_EARLY = "too early"
"""How a reason begins where a longer run is all it takes."""
SCALE_UNKNOWN = f"{TOO_EARLY}: the noise scale is not known well enough yet to judge the batch"
GSNR_UNKNOWN = f"{TOO_EARLY}: the GSNR is not known within a factor of ten yet"
ADAM_UNKNOWN = "the GSNR from Adam's averages is not known within a factor of ten as last read"
ADAM_ZERO = "the GSNR from Adam's averages cannot be told from 0 as last read"
ADAM_FALSE = "the GSNR from Adam's averages is false for now, because of one huge gradient"

LATEST = 100
"""Readings at the end of a run among which the last one with numbers is looked for."""

JUDGED_BY_GSNR = tuple(name for name, rule in RULES.items() if rule.needs_known == "gsnr")
JUDGED_BY_NOISE = tuple(name for name, rule in RULES.items() if rule.needs_known)
"""Rules that are silent both where all is well and where the noise is not known."""


def doubts_of(run: Run) -> dict[str, str]:
    """By the id of a rule that was silent: why that does not make it fine. `gradvitals advise` never says otherwise."""
    record = Record(run)
    by_adam = record.gsnr_source == "adam" and doubt_of_adam(run) != ""
    about_gsnr = dict.fromkeys(JUDGED_BY_GSNR, ADAM_FALSE) if by_adam else _about_gsnr(record)
    return {**_about_batch(advise_batch(record)), **about_gsnr}


def _about_batch(advice: Advice) -> dict[str, str]:
    if not advice.can_tell:
        return dict.fromkeys(("batch_too_small", "batch_too_large"), SCALE_UNKNOWN)
    size, low, high, proposed = (advice.values[name] for name in ("batch_size", "low", "high", "proposed"))
    found: dict[str, str] = {}
    if not high < BatchTooSmall.factor * size:
        found["batch_too_small"] = SCALE_UNKNOWN
    if not size < BatchTooLarge.far * low:
        found["batch_too_large"] = SCALE_UNKNOWN
    if proposed is not None and proposed > size:
        found.setdefault(
            "batch_too_small", "not far too small, but `gradvitals advise` finds that a larger batch pays off"
        )
    if proposed is not None and proposed < size:
        found.setdefault(
            "batch_too_large", "not far too large, but `gradvitals advise` finds that a smaller batch would do"
        )
    return found


def layers_untold(run: Run) -> str:
    """How many layers have a GSNR that cannot be told from 0, to go behind what is said of the model; else nothing."""
    source = next((source for source in run.sources("gsnr", "values") if source != "examples"), None)
    if source is None or source not in run.sources("gsnr_low", "layers"):
        return ""
    steps, _ = run.times("gsnr_low", kind="layers", source=source)
    if not steps.size:
        return ""
    _, rows = run.matrix("gsnr_low", "layers", source=source, since=int(steps[-LATEST:][0]) - 1)
    known = rows[np.isfinite(rows).any(axis=1)]
    if not len(known):
        return ""
    lows = known[-1][np.isfinite(known[-1])]
    untold = int((lows <= 0).sum())
    return f"; of {untold:,} of {len(lows):,} layers it cannot be told from 0" if untold else ""


def _about_gsnr(record: Record) -> dict[str, str]:
    if record.gsnr_source == "adam":
        return _about_adam(record)
    if not record.averages:
        return {}
    last = record.averages[-1]
    known = last.count >= EstimatorUnreliable.READINGS and last.low > 0
    return (
        {} if known and last.high <= EstimatorUnreliable.DECADE * last.low else {"estimator_unreliable": GSNR_UNKNOWN}
    )


def _about_adam(record: Record) -> dict[str, str]:
    """The same by the last interval of Adam's: more steps need not make it narrower."""
    lows, highs = record.series("gsnr_low", "adam"), record.series("gsnr_high", "adam")
    if not len(lows) or not len(highs):
        return {}
    low, high = float(lows.values[-1]), float(highs.values[-1])
    if low <= 0:
        return {"estimator_unreliable": ADAM_ZERO}
    return {} if high <= EstimatorUnreliable.DECADE * low else {"estimator_unreliable": ADAM_UNKNOWN}
