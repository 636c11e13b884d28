"""How multipliers are trained: with a weight decay of their own, and outside the norm that gradients are clipped to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.errors import ConfigError
from gradvitals.multipliers.attaching import named_multipliers, without_multipliers

WEIGHT_DECAY = 2e-3
"""What the paper gives multipliers: enough to stop a drift along directions in which only their product matters."""


def param_groups(
    model: nn.Module, groups: Iterable[Any] | None = None, *, weight_decay: float = WEIGHT_DECAY
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: yours, and the multipliers in one of their own.

    Args:
        model: With or without multipliers.
        groups: Groups of your own, or parameters as an optimizer takes them, also with names. Multipliers that are in
            them are taken out. None: one group of all parameters.
        weight_decay: For the multipliers.

    Returns:
        Groups to give to an optimizer; the options that they do not name are the optimizer's.

    Example:
        >>> import gradvitals as gv
        >>> model = nn.Linear(3, 4)
        >>> gv.multipliers.attach(model)
        ('weight',)
        >>> [(len(group["params"]), group.get("weight_decay")) for group in gv.multipliers.param_groups(model)]
        [(2, None), (1, 0.002)]
    """
    ours = dict(named_multipliers(model))
    held = {id(parameter) for parameter in ours.values()}
    given = list(model.parameters() if groups is None else groups)
    if not all(isinstance(group, Mapping) for group in given):
        if any(isinstance(group, Mapping) for group in given):
            raise ConfigError("groups holds groups and parameters beside each other; expected one or the other")
        given = [{"params": given}]
    found, named = [], False
    for group in map(dict, given):
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        # torch wants all groups to have names, or none.
        named = named or any(isinstance(member, tuple) for member in members)
        group["params"] = [item for item in members if id(item[1] if isinstance(item, tuple) else item) not in held]
        found.append(group)
    own = {"params": list(ours.items()) if named else list(ours.values()), "weight_decay": weight_decay}
    return [*found, *([own] if ours else [])]


def clip_grad_norm_(model: nn.Module, max_norm: float, **options: Any) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of everything but the multipliers, whose gradients stay as they are.

    Args:
        model: With or without multipliers.
        max_norm: As in torch.
        options: As in torch: `norm_type`, `error_if_nonfinite`, `foreach`.

    Returns:
        The norm without the multipliers, before clipping.
    """
    return torch.nn.utils.clip_grad_norm_(without_multipliers(model), max_norm, **options)
