"""The Guard, which keeps a run alive, and the settings of its responses."""

from __future__ import annotations

from gradvitals.guard.guard import Guard
from gradvitals.guard.policy import Clip, CutLR, ResetMomentum, RollBack, Skip

__all__ = ["Clip", "CutLR", "Guard", "ResetMomentum", "RollBack", "Skip"]
