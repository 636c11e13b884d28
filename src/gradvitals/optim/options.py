"""What every variance-reduced optimizer can be told, and what it refuses."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from gradvitals.optim.factors import Granularity, Rule, check_rule

MIN_PARTS = 2
ENOUGH_PARTS = 6
"""From here on r has a variance under pure noise; below 4 it has not even a mean."""

HOW_TO_GET_MORE = (
    "split the batch: call backward() on several micro-batches before each step(), 8 for example; or, under "
    "DistributedDataParallel, let every rank be a part with optimizer.use_ranks(model)"
)

GammaSchedule = Callable[[int], float]
FactorsHook = Callable[[Sequence[Tensor], Sequence[Tensor], float], object]
"""Called with some parameters, the factors of their elements by the rule, and gamma."""


class VROptions(TypedDict, total=False):
    """What every variance-reduced optimizer takes besides the arguments of its base; each may stand in a group."""

    gamma: float | GammaSchedule
    """Smallest factor, in [0, 1]; or a schedule, from the number of steps made to gamma. 1 is the base optimizer."""
    beta3: float
    """Decay of a moving average of the factors, in [0, 1); 0: none."""
    k: int | None
    """Gradients a step is made of; another number is an error. None: as many as came."""
    scale: str | Rule
    """"paper", "wiener", or a function of (mean, variance, k, gamma) for one tensor."""
    granularity: Granularity | None
    """Over what r is normalised, or signal and noise are estimated. None: "tensor", or "hierarchical" for wiener."""
    moments_dtype: torch.dtype | None
    """Of the variance accumulators. None: float32, or float64 where the parameter is."""


def check_group(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse settings that cannot be meant."""
    if group.get("differentiable", defaults.get("differentiable")):
        raise ValueError("differentiable is True; expected False: a variance-reduced step cannot be differentiated")
    if group["scale"] != "custom":
        check_rule(group["scale"], group["granularity"])
    gamma = group["gamma"]
    if not isinstance(gamma, (int, float)) or not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma!r}; expected a factor in [0, 1], e.g. 0.1")
    group["gamma"] = float(gamma)
    if not 0 <= group["beta3"] < 1:
        raise ValueError(f"beta3 is {group['beta3']!r}; expected a decay in [0, 1), e.g. 0.9")
    dtype = group["moments_dtype"]
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16):  # squares are too small for float16
        raise ValueError(f"moments_dtype is {dtype!r}; expected torch.bfloat16, float32, float64, or None")
    if group["k"] is not None and group["k"] < MIN_PARTS:
        raise ValueError(f"k is {group['k']}; expected at least {MIN_PARTS} gradients a step: {HOW_TO_GET_MORE}")


def check_announced(found: int, where: str, groups: Sequence[dict[str, Any]]) -> None:
    """Refuse a number of gradients that is not the announced one."""
    for group in groups:
        if group["k"] not in (None, found):
            raise RuntimeError(
                f"step() found {found} gradients since the last step{where}, but k = {group['k']} was announced; "
                "make as many backward() calls, or leave k out where the number changes"
            )


def too_few_parts(found: int, where: str) -> str:
    """What to say to a loop that does not divide its batches."""
    return (
        f"step() found {found} gradient{'' if found == 1 else 's'} since the last step{where}; signal and noise "
        f"are told apart by comparing at least {MIN_PARTS}, better {ENOUGH_PARTS} or more: {HOW_TO_GET_MORE}"
    )


def warn_of_few_parts(found: int, where: str) -> None:
    """Say what is wrong with a step of few gradients, to whoever called it."""
    rest = "If it is the rest of an epoch, drop_last=True of the loader avoids it"
    if found < MIN_PARTS:
        text = f"a step of {found} gradient, which is not scaled{where}: there is nothing to compare it with. {rest}"
    else:
        text = (
            f"a step of {found} gradients{where}: with fewer than {ENOUGH_PARTS} the ratio of signal to noise scatters "
            f"so widely that a few elements decide for a whole tensor. {rest}; else {HOW_TO_GET_MORE}"
        )
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "gradvitals.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def world_size() -> int:
    """Processes that train together, whether or not they share gradients."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()
