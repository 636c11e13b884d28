"""GSNR from the optimizer's own moments: no memory, no hooks, two multi-tensor norms.

Adam keeps m, an average of gradients, and v, an average of their squares. The sums of m² and of v over a
tensor are all that `functional.adam_gsnr_from_sums` needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradvitals.measure import stats
from gradvitals.measure.packet import Packet

SHARE_ELEMENTS = 2**10
"""Coordinates of each tensor that its share below 1 is counted in: a standard error under 2 %."""

SUPPORTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def unavailable_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why this optimizer's moments give no GSNR, or None where they do."""
    if isinstance(optimizer, SUPPORTED):
        return None
    known = ", ".join(kind.__name__ for kind in SUPPORTED)
    return f"{type(optimizer).__name__} does not keep averages of the gradient and of its square; {known} do"


class MomentSums:
    """Reads the moments of one optimizer's parameters after its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._samplers: tuple[tuple[int, ...], list[tuple[stats.Sampler, list[int]]]] | None = None

    @torch.no_grad()
    def add(
        self, packet: Packet, rows: Sequence[int], parameters: Sequence[nn.Parameter], *, below_one: bool
    ) -> dict[int, tuple[float, float]]:
        """Put sums, step counts and sampled shares into the packet; return the betas of every row read."""
        betas_of = {id(p): group["betas"] for group in self.optimizer.param_groups for p in group["params"]}
        betas: dict[int, tuple[float, float]] = {}
        first: list[Tensor] = []
        second: list[Tensor] = []
        steps: list[Tensor] = []
        for row, parameter in zip(rows, parameters, strict=True):
            state = self.optimizer.state.get(parameter, {})
            beta1, beta2 = betas_of.get(id(parameter), (None, None))
            if "exp_avg" not in state or not isinstance(beta1, float) or not isinstance(beta2, float):
                continue
            betas[row] = (beta1, beta2)
            first.append(state["exp_avg"])
            second.append(state["exp_avg_sq"])
            steps.append(torch.as_tensor(state["step"]))
        if not betas:
            return {}
        read = list(betas)
        stats.add_norms(packet, "exp_avg_norm", read, first)
        stats.add_sums_of_positive(packet, "exp_avg_sq_sum", read, second)
        for step_rows, group in stats.by_device_and_dtype(read, steps):
            packet.add_each("adam_step", group, step_rows)
        if below_one:
            self._add_below_one(packet, betas, first, second, steps)
        return betas

    def _add_below_one(
        self,
        packet: Packet,
        betas: dict[int, tuple[float, float]],
        first: Sequence[Tensor],
        second: Sequence[Tensor],
        steps: Sequence[Tensor],
    ) -> None:
        """Count, in a sample of coordinates, those alive and those whose GSNR is below 1.

        With bias-corrected m and v, r < 1 where 2 m² < (1 + c1) v; c1 and both corrections depend on the step
        count, which may live on the device, so the comparison is made there.
        """
        rows = tuple(betas)
        if self._samplers is None or self._samplers[0] != rows:
            self._samplers = (rows, stats.samplers(rows, first, SHARE_ELEMENTS))
        for sampler, positions in self._samplers[1]:
            device = first[positions[0]].device
            mean = sampler.gather([first[p] for p in positions])
            square = sampler.gather([second[p] for p in positions])
            step = torch.stack([steps[p].to(device, non_blocking=True) for p in positions]).to(mean.dtype)
            b1 = torch.tensor([betas[r][0] for r in sampler.rows], dtype=mean.dtype).to(device, non_blocking=True)
            b2 = torch.tensor([betas[r][1] for r in sampler.rows], dtype=mean.dtype).to(device, non_blocking=True)
            debias1, debias2 = 1 - b1**step, 1 - b2**step
            variance_of_mean = (1 - b1) / (1 + b1) * (1 + b1**step) / debias1
            threshold = (1 + variance_of_mean) / 2 * debias1**2 / debias2
            limit = torch.repeat_interleave(threshold, sampler.lengths, output_size=mean.numel())
            below = (mean.square() < limit * square) & (square > 0)
            packet.add("alive_count", sampler.sums((square > 0).to(mean.dtype)), sampler.rows)
            packet.add("below_one_count", sampler.sums(below.to(mean.dtype)), sampler.rows)
