"""What every example adds to the gradient of a norm layer's weight: one read of its input and its output's gradient.

Positions are cut into parts, so that few examples keep a device busy too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradvitals.kernels.sums import KINDS

POSITIONS = 16
COLUMNS = 128
NUM_WARPS = 4
ENOUGH_PROGRAMS = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _sum_positions(  # type: ignore[no-untyped-def]
    x, grad, mean, inverse, sums, num_positions, width, per_part,
    CENTRED: tl.constexpr, POSITIONS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    example, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = part * per_part
    last = tl.minimum(first + per_part, num_positions)
    total = tl.zeros((POSITIONS, COLUMNS), dtype=tl.float32)
    for at in range(first, last, POSITIONS):
        positions = at + tl.arange(0, POSITIONS)
        rows = example * num_positions + positions
        inside = (positions < last)[:, None] & (columns < width)[None, :]
        places = rows[:, None] * width + columns[None, :]
        value = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            value -= tl.load(mean + rows, mask=positions < last, other=0.0).to(tl.float32)[:, None]
        value *= tl.load(inverse + rows, mask=positions < last, other=0.0).to(tl.float32)[:, None]
        total += value * tl.load(grad + places, mask=inside, other=0.0).to(tl.float32)
    place = (example * tl.num_programs(2) + part) * width + columns
    tl.store(sums + place, tl.sum(total, axis=0), mask=columns < width)


def gradients(x: Tensor, grad_output: Tensor, mean: Tensor | None, inverse: Tensor) -> Tensor:
    """What each example adds to the gradient of the weight, `[B, P, n]` in float32: in P parts, to be added up.

    Args:
        x: The layer's input: examples first, what the weight is as wide as last, contiguous.
        grad_output: The gradient of its output, laid out alike.
        mean: Of the input over its last dimension; None where it is not taken off.
        inverse: What the input is multiplied by then, for every position, contiguous like the mean.
    """
    examples, width = x.shape[0], x.shape[-1]
    num_positions = x[0].numel() // width
    blocks = triton.cdiv(width, COLUMNS)
    parts = max(1, min(ENOUGH_PROGRAMS // (blocks * examples), num_positions // (4 * POSITIONS)))
    per_part = triton.cdiv(num_positions, parts * POSITIONS) * POSITIONS
    sums = torch.empty((examples, parts, width), dtype=torch.float32, device=x.device)
    with torch.cuda.device(x.device if x.device.type == "cuda" else -1):
        _sum_positions[(examples, blocks, parts)](
            x,
            grad_output,
            inverse if mean is None else mean,
            inverse,
            sums,
            num_positions,
            width,
            per_part,
            CENTRED=mean is not None,
            POSITIONS=POSITIONS,
            COLUMNS=COLUMNS,
            num_warps=NUM_WARPS,
        )
    return sums


def readable(*tensors: Tensor) -> bool:
    """Whether tensors are of types that the kernel reads, and contiguous."""
    return all(tensor.is_contiguous() and tensor.dtype in KINDS for tensor in tensors)
