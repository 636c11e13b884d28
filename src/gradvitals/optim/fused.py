"""When a share of gradients can go through the kernels for the paper's rule, and how."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradvitals.optim.factors import Share

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _kernels() -> Any:
    """The kernels; None where there is no Triton to compile them."""
    try:
        from gradvitals.optim import kernels
    except ImportError:
        return None
    return kernels


def can_be_fused(share: Share) -> bool:
    """Whether the kernels know the share's rule, and all its tensors lie in memory as they need it."""
    grad = share.grads[0]
    if share.rule != "paper" or share.granularity != "tensor" or not share.at_once or share.block is None:
        return False
    if not grad.is_cuda or share.block.kind.odd or grad.dtype not in DTYPES or share.flat_noise.dtype not in DTYPES:
        return False
    if _broken or _kernels() is None or len(set(share.weights)) > 1:
        return False
    strides = share.block.cache.setdefault("strides", [noise.stride() for noise in share.noises])
    averages = [average for average in share.averages if average is not None]
    if len(averages) != len(share.averages):
        return False
    return all(_lie_well(tensors, strides, grad.dtype) for tensors in (share.grads, averages) if tensors)


def _lie_well(tensors: list[Tensor], strides: list[tuple[int, ...]], dtype: torch.dtype) -> bool:
    # In every step, for every tensor: as few calls as can be.
    return (
        [tensor.stride() for tensor in tensors] == strides
        and not any([tensor.data_ptr() % 16 for tensor in tensors])
        and all([tensor.dtype == dtype for tensor in tensors])
    )


_broken = False


def scale_fused(share: Share, *, keep: bool) -> list[Tensor] | None:
    """Multiply gradients by their factors in place and take those into the averages.

    Returns:
        The factors, where they are to be kept; None where the kernels cannot be compiled, and nothing was done.
    """
    global _broken
    try:
        return _scale_fused(share, keep)
    except Exception as error:  # no compiler, a device that is too old: whatever it is, torch can do without
        _broken = True
        warnings.warn(f"variance-reduced steps go on without kernels, which failed: {error}", stacklevel=2)
        return None


def _scale_fused(share: Share, keep: bool) -> list[Tensor]:
    kernels, block = _kernels(), share.block
    assert block is not None
    sizes = [grad.numel() for grad in share.grads]
    if "stretches" not in block.cache:
        block.cache |= {
            "stretches": kernels.Stretches.cut(sizes, share.grads[0].device),
            "addresses": kernels.Addresses(),
        }
    addresses = block.cache["addresses"]
    factors = kernels.scale_by_the_paper(
        addresses.table("grads", share.grads),
        addresses.table("averages", share.averages) if share.averages else None,
        block.flat,
        block.cache["stretches"],
        dtype=share.grads[0].dtype,
        gamma=share.gamma,
        weight=share.weights[0] if share.weights else 0.0,
        keep=keep,
    )
    if factors is None:
        return []
    return [
        factors.as_strided(noise.shape, noise.stride(), piece.storage_offset())
        for piece, noise in zip(factors.split(sizes), share.noises, strict=True)
    ]
