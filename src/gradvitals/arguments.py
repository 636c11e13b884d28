"""What `watch` was given, checked before anything is touched."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gradvitals.config import Config


def check_arguments(model: Any, optimizer: Any, config: Any, batch_size: Any) -> list[torch.optim.Optimizer]:
    """The optimizers as a list; errors say what was given and what was expected."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"watch got a {type(model).__name__} as model; expected a torch.nn.Module")
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    # Accelerate's wrapper is an Optimizer in name only: the real one is inside.
    optimizers = [getattr(one, "optimizer", one) for one in optimizers]
    for one in optimizers:
        if not isinstance(one, torch.optim.Optimizer):
            raise TypeError(
                f"watch got a {type(one).__name__} as optimizer; expected a torch.optim.Optimizer or a list of them"
            )
    if not optimizers:
        raise ValueError("watch got an empty list of optimizers; pass the one that steps the model")
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"watch got a {type(config).__name__} as config; expected a gradvitals.Config")
    if batch_size is not None and not (isinstance(batch_size, (int, float)) and batch_size > 0):
        raise ValueError(f"batch_size is {batch_size!r}; expected the samples per optimizer step, a positive number")
    return optimizers
