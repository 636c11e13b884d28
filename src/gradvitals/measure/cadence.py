"""Which steps are read in full."""

from __future__ import annotations

YOUNG_STEPS = 500
"""While a run is this young it is read more often: most of what goes wrong is there from the start."""

YOUNG_EVERY = 10


def is_due(step: int, every: int, factor: int = 1, young_every: int = YOUNG_EVERY) -> bool:
    """Whether a step is one of every n; while a run is young, also one of every ten, and at first a power of two.

    Args:
        step: The step.
        every: Steps from one reading to the next.
        factor: For what is read only with every so many of these readings.
        young_every: Steps from one reading to the next at most, while the run is young.

    >>> [step for step in range(45) if is_due(step, 50)]
    [0, 1, 2, 4, 8, 10, 20, 30, 40]
    >>> [step for step in range(480, 700) if is_due(step, 50)]
    [480, 490, 500, 550, 600, 650]
    """
    young = min(every, young_every) if step < YOUNG_STEPS else every
    return step % (young * factor) == 0 or (step < young * factor and step & (step - 1) == 0)
