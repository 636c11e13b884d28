"""The Guard, which keeps a run alive, and the settings of what it may do."""

from __future__ import annotations

from gradvitals.guard.guard import Guard
from gradvitals.guard.policy import Clip, RollBack, Skip

__all__ = ["Clip", "Guard", "RollBack", "Skip"]
