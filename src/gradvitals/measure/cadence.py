"""Which steps are read in full."""

from __future__ import annotations


def is_due(step: int, every: int) -> bool:
    """Whether a step is one of every n, or, while a run is young, a power of two.

    >>> [step for step in range(13) if is_due(step, 5)]
    [0, 1, 2, 4, 5, 10]
    """
    return step % every == 0 or (step < every and step & (step - 1) == 0)
