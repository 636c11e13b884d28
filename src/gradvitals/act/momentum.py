"""Forgetting momentum: an optimizer's state as it was before its first step."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from gradvitals.collect.moments import stepping
from gradvitals.distributed.shards import local


@torch.no_grad()
def reset_momentum(optimizer: torch.optim.Optimizer, parameters: Collection[nn.Parameter] | None = None) -> int:
    """Forget the moments and step counts of some parameters, or of all.

    State is dropped whole, so the optimizer makes it anew at its next step and corrects the bias of the new moments as
    it does at the start of a run. Optimizers whose steps may be part of a CUDA graph (``capturable=True``) keep their
    tensors, filled with zeros, as the graph knows them by address.

    Args:
        optimizer: Whose state to forget.
        parameters: Which parameters; None for all.

    Returns:
        How many parameters had state.
    """
    chosen = None if parameters is None else {id(parameter) for parameter in parameters}
    optimizer = stepping(optimizer)
    count = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state or (chosen is not None and id(parameter) not in chosen):
                continue
            count += 1
            if group.get("capturable"):
                for value in state.values():
                    if isinstance(value, Tensor):
                        local(value).zero_()
            else:
                del optimizer.state[parameter]
    return count
