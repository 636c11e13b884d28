"""How the numbers of a probe are said, in the terminal and on the page alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradvitals.show.text import interval, number
from gradvitals.show.values import as_float

LISTS = {
    "suspects": ("Suspects", "The highest losses for their class: wrong labels come first here."),
    "largest": ("Largest gradients", "They decide most of a step."),
    "contrary": (
        "Most contrary",
        "They point away from the mean direction of the others; labels may be wrong here.",
    ),
}
"""The lists of single examples, in the order they are shown."""


def gsnr_words(value: float, low: float, high: float) -> str:
    """A GSNR with its interval; where the estimate is not above zero, only what it is below.

    >>> gsnr_words(0.5, 0.1, 0.9), gsnr_words(-0.06, -0.06, 0.14)
    ('0.5 (0.1 to 0.9)', 'below 0.14')
    """
    return f"below {number(high)}" if value <= 0 < high else interval(value, low, high)


def example_name(row: Mapping[str, Any]) -> str:
    """An example by its place in the data set, or else in the batches that were read."""
    if row.get("dataset_index") is not None:
        return str(row["dataset_index"])
    return f"batch {row.get('batch', '?')}, place {row.get('position', '?')}"


def label_of(row: Mapping[str, Any]) -> str:
    """The class of an example, by its name where it has one; a dash where there is none."""
    found = row.get("label") if row.get("label") is not None else row.get("target")
    return "-" if found is None else str(found)


def examined(samples: Mapping[str, Any]) -> str:
    """How many examples were looked at, of how many."""
    count, there_are = samples.get("examples", "?"), as_float(samples.get("train_size"))
    return f"{count} of {int(there_are):,}" if there_are > as_float(count) else f"{count}"
