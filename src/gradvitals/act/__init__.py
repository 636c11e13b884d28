"""Acting on what is seen: a Guard that keeps a run alive, and schedules driven by GSNR."""

from __future__ import annotations

from gradvitals.act.batch_size import BatchSizeScheduler
from gradvitals.act.decoupled import decoupled_momentum, split_by_layer
from gradvitals.act.guard import Guard
from gradvitals.act.rungs import Clip, CutLR, ResetMomentum, RollBack, Skip
from gradvitals.act.schedules import GSNRScheduler

__all__ = [
    "BatchSizeScheduler",
    "Clip",
    "CutLR",
    "GSNRScheduler",
    "Guard",
    "ResetMomentum",
    "RollBack",
    "Skip",
    "decoupled_momentum",
    "split_by_layer",
]
