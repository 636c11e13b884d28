"""Sums that tell signal from noise, row by row, in a form in which those of many ranks add up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass
class RowSums:
    """One number for each row, and which rows it was read of. What was read may be nan."""

    values: Floats
    present: Flags

    @property
    def known(self) -> Floats:
        """The numbers, nan where nothing was read."""
        return np.where(self.present, self.values, np.nan)


@dataclass
class PartSums:
    """The gradients a step's gradient is made of, as `functional.signal_and_noise_of_sums` wants them."""

    count: float
    """How many there were."""
    samples: float
    """Samples in all of them together; their number where the loop did not tell."""
    sizes_known: bool
    weight: float
    """Sum of their weights w in the step's gradient."""
    weight_per_sample: float
    """Sum of w / b, where b is how many samples a part has."""
    square_per_sample: float
    """Sum of w² / b."""
