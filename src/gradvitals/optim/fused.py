"""When a share of gradients can go through the kernels for the paper's rule, and how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradvitals import kernels
from gradvitals.kernels.cut import ALIGNMENT, Addresses, Cut
from gradvitals.optim.factors import Share


def can_be_fused(share: Share) -> bool:
    """Whether the kernels know the share's rule, and all its tensors lie in memory as they need it."""
    if share.rule != "paper" or share.granularity != "tensor" or not share.at_once or share.block is None:
        return False
    grad, noise, cache = share.grads[0], share.noises[0], share.block.cache
    if not kernels.on_device(grad) or not {grad.dtype, noise.dtype} <= set(kernels.DTYPES):
        return False
    if kernels.ready("paper") is None or len(set(share.weights)) > 1:
        return False
    averages = [average for average in share.averages if average is not None]
    if len(averages) != len(share.averages):
        return False
    strides = cache.setdefault("strides", [noise.stride() for noise in share.noises])
    return all(_lie_well(tensors, strides, grad.dtype) for tensors in (share.grads, averages) if tensors)


def _lie_well(tensors: list[Tensor], strides: list[tuple[int, ...]], dtype: torch.dtype) -> bool:
    # In every step, for every tensor: as few calls as can be.
    return [tensor.stride() for tensor in tensors] == strides and all([tensor.dtype == dtype for tensor in tensors])


def scale_fused(share: Share, *, keep: bool) -> list[Tensor] | None:
    """Multiply gradients by their factors in place and take those into the averages.

    Returns:
        The factors, where they are to be kept; None where the kernels cannot be compiled, and nothing was done.
    """
    try:
        return _scale_fused(share, keep)
    except Exception as error:  # no compiler, a device that is too old: whatever it is, torch can do without
        kernels.give_up("paper", error, "variance-reduced steps go on")
        return None


def _scale_fused(share: Share, keep: bool) -> list[Tensor]:
    paper: Any = kernels.ready("paper")
    assert share.block is not None
    cache, device = share.block.cache, share.grads[0].device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        if "cut" not in cache:
            cache["cut"] = Cut([grad.numel() for grad in share.grads], device, paper.SPAN)
            cache |= {name: Addresses() for name in ("grads", "noises", "averages", "factors")}
        factors = room_for_factors(share.grads) if keep else []
        lists: dict[str, Sequence[Any]] = {"grads": share.grads, "noises": share.noises}
        lists |= {"averages": share.averages, "factors": factors}
        tables = {name: cache[name].table(tensors) if tensors else None for name, tensors in lists.items()}
        paper.scale(
            cache["cut"],
            **tables,
            dtype=share.grads[0].dtype,
            noise_dtype=share.noises[0].dtype,
            gamma=share.gamma,
            weight=share.weights[0] if share.weights else 0.0,
            aligned=all(cache[name].aligned for name in lists),
        )
    return factors


def room_for_factors(grads: Sequence[Tensor]) -> list[Tensor]:
    """A tensor in float32 for each gradient, laid out like it where that has no gaps, in one piece of memory."""
    starts, first = [], 0
    for grad in grads:
        starts.append(first)
        first += -(-grad.numel() // ALIGNMENT) * ALIGNMENT
    flat = torch.empty(first, dtype=torch.float32, device=grads[0].device)
    return [flat.as_strided(grad.shape, grad.stride(), start) for grad, start in zip(grads, starts, strict=True)]
