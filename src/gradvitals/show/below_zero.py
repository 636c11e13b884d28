"""What a GSNR below 0 means, where one is shown: there is no such thing, and no signal to be told."""

from __future__ import annotations

from collections.abc import Iterable

from gradvitals.show.standouts import LayerRow, Worst
from gradvitals.show.verdict import Weighed, is_ordinary

CANNOT_BE = "a GSNR cannot be below 0: read one that is as 0, no signal to be told"
# Adam's second average reaches back further than the first, and both take gradients of steps for independent.
OF_ADAM = (
    f"{CANNOT_BE}. Adam's gets there, interval and all, where gradients have shrunk or undo each other from step to "
    "step, of which the interval knows nothing"
)
OF_SAMPLES = f"{CANNOT_BE}. An interval gets there by chance, or where a step's passes are not samples of one thing"
TOLD = ("gsnr", "high")
"""Numbers of a finding that are a GSNR, or the upper end of its interval."""


def about_below_zero(values: Iterable[float], source: str | None) -> str:
    """What to say beside values of GSNR; nothing where none is below 0.

    >>> about_below_zero([0.1, float("nan")], "adam")
    ''
    """
    if not any(value < 0 for value in values):
        return ""
    return OF_ADAM if source == "adam" else OF_SAMPLES


def of_tables(layers: Iterable[LayerRow], tensors: Iterable[Worst]) -> list[float]:
    """The values of GSNR in the tables of a report."""
    return [*(row.gsnr for row in layers), *(worst.value for worst in tensors)]


def about_findings(findings: Iterable[Weighed]) -> str:
    """What to say beside findings that name a GSNR below 0; nothing where none does, but in a line."""
    for item in findings:
        if is_ordinary(item.finding):
            continue
        seen = item.finding.evidence.get("seen")
        told = seen if isinstance(seen, dict) and "source" in seen else {}
        values = [told[name] for name in TOLD if isinstance(told.get(name), (int, float))]
        if said := about_below_zero(values, str(told.get("source"))):
            return said
    return ""
