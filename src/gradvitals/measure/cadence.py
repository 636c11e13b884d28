"""Which steps are read, and which in full."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from gradvitals.config import Config

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


AUDIT_YOUNG_EVERY = 50


@dataclass(frozen=True)
class Due:
    """What is due at a step."""

    full: bool
    """A per-tensor reading."""
    detail: bool
    """The costly metrics with it."""
    audit: bool
    """A comparison of ranks."""
    read: bool = True
    """Anything at all."""


AWAKE_STEPS = 50
"""Steps that are all read after one that stood out."""


class Calendar:
    """Tells what is due at a step. Ranks that are asked about the same step say the same."""

    def __init__(self, config: Config, *, audits: bool) -> None:
        self.every = config.tensor_every
        """Steps from one per-tensor reading to the next."""
        self.step_every = 1
        """Steps from one that is read to the next; those between are passed over."""
        self._awake_until = -1
        self._least_every = config.tensor_every
        self._factor = config.detail_factor
        self._audit_every = config.audit_every if audits else None

    def due(self, step: int) -> Due:
        """What is due at this step."""
        thinned = max(1, self.every // self._least_every)  # by the budget: a young run has to obey it too
        young = YOUNG_EVERY * thinned
        audit = self._audit_every is not None and is_due(step, self._audit_every, young_every=AUDIT_YOUNG_EVERY)
        full = is_due(step, self.every, young_every=young)
        read = full or audit or step % self.step_every == 0 or step <= self._awake_until
        return Due(full or audit, full and is_due(step, self.every, self._factor, young_every=young), audit, read)

    def next_read(self, step: int) -> int:
        """The first step from this one on that is read."""
        return next(later for later in count(step) if self.due(later).read)

    def wake(self, step: int) -> None:
        """A step stands out: those that follow are read too."""
        self._awake_until = step + AWAKE_STEPS
