"""How long one huge gradient makes the GSNR of Adam's moments false: as long as it is in either average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

HUGE = 5.0
"""Times its moving average from which the norm of a step is no ordinary one."""
FIRST_SHARE = 0.1
"""Size that what is left of it has in the first average, in ordinary gradients, when it no longer counts."""
SECOND_SHARE = 0.5
"""The same for its square in the second average, in ordinary squares."""
BETAS = (0.9, 0.999)
"""Of an optimizer that did not tell them."""


def steps_kept(ratio: float, betas: Sequence[float]) -> float:
    """Steps after which a gradient of so many times the usual norm no longer counts in either average.

    The first holds (1 - b1) b1^t of it, the second (1 - b2) b2^t of its square.

    >>> round(steps_kept(100.0, (0.9, 0.999))), round(steps_kept(1.0, (0.9, 0.999)))
    (2994, 0)
    """
    first = math.log((1 - betas[0]) * ratio / FIRST_SHARE) / -math.log(betas[0])
    second = math.log((1 - betas[1]) * ratio**2 / SECOND_SHARE) / -math.log(betas[1])
    return max(0.0, first, second)


def forgotten_at(step: int, values: Mapping[str, float], betas: Sequence[float] | None) -> int:
    """The first step at which the gradient of this one no longer counts; 0 where it is ordinary or was left out.

    >>> forgotten_at(6000, {"grad/spike_ratio": 100.0}, (0.9, 0.999))
    8995
    """
    ratio, norm, limit = (values.get(name, math.nan) for name in ("grad/spike_ratio", "grad/norm", "clip/max_norm"))
    if limit < norm:
        ratio *= limit / norm
    left_out = values.get("step/skipped") == 1 or values.get("step/left_out") == 1
    known = betas if betas is not None and all(0 < beta < 1 for beta in betas) else BETAS
    return step + math.floor(steps_kept(ratio, known)) + 1 if HUGE <= ratio < math.inf and not left_out else 0
