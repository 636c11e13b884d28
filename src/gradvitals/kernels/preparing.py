"""What AdamW's update takes, worked out on the device: steps counted, the norm to clip to, the loss scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_COEFFICIENTS = 8
"""Numbers of each tensor: decay, size, root and limit of its update, its step, and what its ratios take."""


@dataclass(frozen=True)
class Rule:
    """What a parameter group says."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool


@triton.jit  # type: ignore[untyped-decorator]
def _prepare(  # type: ignore[no-untyped-def]
    steps, squares, num_squares, lr_at, scale_at, found_at, coefficients, common, told, norm_at,
    ratios, num_ratios, weights, lr, log_beta1, log_beta2, spread, weight_decay, max_norm,
    CLIP: tl.constexpr, SCALED: tl.constexpr, FOUND: tl.constexpr, LR_ON_DEVICE: tl.constexpr, REDUCED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tensor = tl.program_id(0)
    factor = 1.0
    scale = 1.0
    if SCALED:
        scale = tl.load(scale_at).to(tl.float32)
        factor = 1.0 / scale
    skip = 0.0
    if FOUND:
        skip = tl.load(found_at).to(tl.float32)
    if tensor == 0:
        if CLIP:
            total = tl.zeros((BLOCK,), dtype=tl.float64)
            for at in range(0, num_squares, BLOCK):
                offsets = at + tl.arange(0, BLOCK)
                total += tl.load(squares + offsets, mask=offsets < num_squares, other=0.0)
            norm = (tl.sqrt(tl.sum(total, axis=0)) / scale).to(tl.float32)
            share = max_norm / (norm + 1e-6)
            factor *= tl.where(share >= 1.0, 1.0, share)  # nan stays
            tl.store(norm_at, norm)
        tl.store(common, factor)
        tl.store(common + 1, skip)
    step_at = tl.load(steps + tensor).to(tl.pointer_type(tl.float32))
    step = tl.load(step_at) + tl.where(skip != 0.0, 0.0, 1.0)
    tl.store(step_at, step)
    tl.store(told + tensor, step.to(tl.float64))
    if LR_ON_DEVICE:
        lr = tl.load(lr_at).to(tl.float32)
    many = step.to(tl.float64)
    power1 = tl.exp2(many * log_beta1)
    power2 = tl.exp2(many * log_beta2)
    debias1 = 1.0 - power1
    debias2 = 1.0 - power2
    limit = (1.0 + spread * (1.0 + power1) / debias1) / 2.0 * debias1 * debias1 / debias2
    mine = coefficients + tensor * 8
    tl.store(mine, 1.0 - lr * weight_decay)
    tl.store(mine + 1, (lr / debias1).to(tl.float32))
    tl.store(mine + 2, (1.0 / tl.sqrt(debias2)).to(tl.float32))
    tl.store(mine + 3, limit.to(tl.float32))
    tl.store(mine + 4, step)
    if REDUCED:
        total, number = tl.load(ratios + tensor), tl.load(ratios + num_ratios + tensor)
        tl.store(mine + 5, (number / total).to(tl.float32))
        tl.store(mine + 6, tl.load(weights + tensor))


@dataclass(frozen=True)
class Ratios:
    """What a variance-reduced step divides by and averages with, on the device, for every tensor."""

    sums: Tensor
    """Of the ratios of signal to noise, and their number; see `paper.sum_ratios`."""
    weights: Tensor
    """Of this step's factors in their moving averages."""


@dataclass(frozen=True)
class Prepared:
    """What `update` needs of `prepare`, on the device."""

    coefficients: Tensor
    common: Tensor
    steps: Tensor
    """Steps made so far, of each tensor."""
    norm: Tensor
    """Of all gradients together, without the loss scale; meaningless where nothing is clipped."""


def prepare(
    steps: Tensor,
    number: int,
    rule: Rule,
    *,
    squares: Tensor | None,
    max_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    ratios: Ratios | None = None,
) -> Prepared:
    """Count a step of each tensor, and work out what its update takes.

    Args:
        steps: Addresses of the counts.
        number: Of tensors.
        rule: Of their group.
        squares: Squared norms of all gradients that are clipped together.
        max_norm: What to clip their norm to.
        grad_scale: What gradients are still multiplied by.
        found_inf: Other than 0 where the step is to be left out.
        ratios: Where gradients are to be scaled by their factors in the update.
    """
    device = steps.device
    numbers = torch.empty(number * NUM_COEFFICIENTS + 4, dtype=torch.float32, device=device)
    coefficients, common, norm = numbers[:-4], numbers[-4:-2], numbers[-2:-1]
    told = torch.empty(number, dtype=torch.float64, device=device)
    clip = squares is not None and max_norm is not None
    _prepare[(number,)](
        steps,
        squares if clip else told,
        squares.numel() if squares is not None and clip else 0,
        rule.lr if isinstance(rule.lr, Tensor) else numbers,
        numbers if grad_scale is None else grad_scale,
        numbers if found_inf is None else found_inf,
        coefficients,
        common,
        told,
        norm,
        told if ratios is None else ratios.sums,
        0 if ratios is None else ratios.sums.shape[1],
        numbers if ratios is None else ratios.weights,
        0.0 if isinstance(rule.lr, Tensor) else float(rule.lr),
        _log2(rule.beta1),
        _log2(rule.beta2),
        (1 - rule.beta1) / (1 + rule.beta1),
        float(rule.weight_decay),
        float(max_norm or 0.0),
        CLIP=clip,
        SCALED=grad_scale is not None,
        FOUND=found_inf is not None,
        LR_ON_DEVICE=isinstance(rule.lr, Tensor),
        REDUCED=ratios is not None,
        BLOCK=1024,
    )
    return Prepared(coefficients, common, told, norm)


def _log2(beta: float) -> float:
    return math.log2(beta) if beta > 0 else -1e30
