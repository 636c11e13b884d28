"""Where the silence of a rule is no proof: what a run does not tell well enough to call it fine."""

from __future__ import annotations

from gradvitals.advise import Advice
from gradvitals.advise.batch import advise_batch
from gradvitals.advise.record import Record
from gradvitals.diagnose.batch import BatchTooLarge, BatchTooSmall, EstimatorUnreliable
from gradvitals.store.reader import Run

TOO_EARLY = "too early"
"""How a reason begins where a longer run is all it takes."""
SCALE_UNKNOWN = f"{TOO_EARLY}: the noise scale is not known well enough yet to judge the batch"
GSNR_UNKNOWN = f"{TOO_EARLY}: the GSNR is not known within a factor of ten yet"

JUDGED_BY_NOISE = ("batch_too_small", "batch_too_large", "estimator_unreliable")
"""Rules that are silent both where all is well and where the noise is not known."""


def doubts_of(run: Run) -> dict[str, str]:
    """By the id of a rule that was silent: why that does not make it fine. `gradvitals advise` never says otherwise."""
    record = Record(run)
    return {**_about_batch(advise_batch(record)), **_about_gsnr(record)}


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


def _about_gsnr(record: Record) -> dict[str, str]:
    if not record.averages:  # of Adam's moments, whose interval is another matter
        return {}
    last = record.averages[-1]
    known = last.count >= EstimatorUnreliable.readings and last.low > 0
    return (
        {} if known and last.high <= EstimatorUnreliable.decade * last.low else {"estimator_unreliable": GSNR_UNKNOWN}
    )
