"""Optimizers that leave the work to another one inside them."""

from __future__ import annotations

from typing import Any

import torch


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the moments: ZeroRedundancyOptimizer has one inside, for this rank's share of them."""
    inner: Any = getattr(optimizer, "optim", None) if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else None
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer
