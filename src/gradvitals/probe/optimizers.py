"""Whether an optimizer is the one of the model, and its learning rate."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from gradvitals.errors import ConfigError

AT_REST = (
    "the optimizer's learning rate is 0 now, as at the start of a warm-up: no thresholds by the learning rate and no "
    "size of a step; give lr= the rate that is planned"
)


def learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """The largest of all groups; None where all are 0."""
    largest = max((float(group["lr"]) for group in optimizer.param_groups if "lr" in group), default=0.0)
    return largest if largest > 0 else None


def notes_on_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """A note on parameters that it leaves out.

    Raises:
        ConfigError: when it trains none of them.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if id(p) not in held]
    if len(missing) == len(parameters):
        raise ConfigError(
            f"optimizer is {type(optimizer).__name__} of {len(held)} tensors, none of them this model's; expected the "
            "one made with this model's parameters, after they were last replaced"
        )
    if not missing:
        return []
    more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
    return [f"the optimizer leaves out {', '.join(missing[:2])}{more}: nothing trains them"]
