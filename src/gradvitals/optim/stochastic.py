"""AdamW on bfloat16 weights in float32, rounded stochastically at the end: in plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw


def step_in_float32(optimizer: Any, clip_factor: Tensor | None) -> None:
    """One AdamW step of all groups, in float32 where parameters are bfloat16.

    Args:
        optimizer: An AdamW, which makes the state.
        clip_factor: What its `_init_group` has multiplied gradients by, in their own precision; None for nothing.
    """
    for group in optimizer.param_groups:
        optimizer._clip_factor = None  # below in float32 instead
        params, *lists = optimizer._lists_of(group)
        optimizer._clip_factor = clip_factor
        wide = [[_wide(tensor) for tensor in column] for column in (params, *lists[:4])]
        if clip_factor is not None:
            wide[1] = [grad * clip_factor.to(grad.device, grad.dtype) for grad in wide[1]]
        adamw(
            wide[0],
            wide[1],
            wide[2],
            wide[3],
            wide[4],
            lists[4],
            foreach=group["foreach"],
            capturable=group["capturable"],
            amsgrad=group["amsgrad"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for parameter, new in zip(params, wide[0], strict=True):
            if new is not parameter:
                parameter.copy_(rounded(new))
        for column, results in zip(lists[1:4], wide[2:], strict=True):
            for state, new in zip(column, results, strict=True):
                if new is not state:
                    state.copy_(new)


def rounded(values: Tensor) -> Tensor:
    """To bfloat16, up or down with the chances that make the mean exact."""
    bits = values.view(torch.int32)
    noise = torch.randint_like(bits, 1 << 16)
    kept = torch.where(values.isfinite(), bits + noise, bits) & -(1 << 16)
    return kept.view(torch.float32).to(torch.bfloat16)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor
