"""When a share of gradients can go through the kernels for the paper's rule, and how."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from gradvitals.optim.factors import Share, highest_ratio

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
    if _kernels() is None or len(set(share.weights)) > 1:
        return False
    strides = share.block.cache.setdefault("strides", [noise.stride() for noise in share.noises])
    return all(map(partial(_lies_well, dtype=grad.dtype), share.grads, strides)) and all(
        average is not None and _lies_well(average, stride, dtype=grad.dtype)
        for average, stride in zip(share.averages, strides, strict=False)
    )


def _lies_well(tensor: Tensor, stride: tuple[int, ...], *, dtype: torch.dtype) -> bool:
    return tensor.stride() == stride and tensor.dtype == dtype and not tensor.data_ptr() % 16


def scale_fused(share: Share, *, keep: bool) -> list[Tensor]:
    """Multiply gradients by their factors in place and take those into the averages.

    Returns:
        The factors, where they are to be kept.
    """
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
        highest=highest_ratio(share),
        weight=share.weights[0] if share.weights else 0.0,
        keep=keep,
    )
    if factors is None:
        return []
    return [
        factors.as_strided(noise.shape, noise.stride(), piece.storage_offset())
        for piece, noise in zip(factors.split(sizes), share.noises, strict=True)
    ]
