"""GSNR from the optimizer's own moments: no memory, no hooks, two multi-tensor norms.

Adam keeps m, an average of gradients, and v, an average of their squares. The sums of m² and of v over a
tensor are all that `functional.adam_gsnr_from_sums` needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _State:
    """Where an optimizer keeps its moments: looking it up for every parameter at every step is not free."""

    key: tuple[int, ...]
    parameters: list[nn.Parameter]
    rows: list[int]
    groups: list[int]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]


class MomentSums:
    """Reads the moments of one optimizer's parameters after its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._state: _State | None = None
        self._samplers: tuple[list[int], list[tuple[stats.Sampler, list[int]]]] | None = None

    @torch.no_grad()
    def add(
        self, packet: Packet, rows: Sequence[int], parameters: Sequence[nn.Parameter], *, below_one: bool
    ) -> dict[int, tuple[float, float]]:
        """Put sums, step counts and sampled shares into the packet; return the betas of every row read."""
        state = self._find(rows, parameters)
        group_betas = [tuple(group["betas"]) for group in self.optimizer.param_groups]
        if not state.rows or not all(isinstance(beta, float) for betas in group_betas for beta in betas):
            return {}  # betas as tensors may be on the device: not worth a wait
        stats.add_norms(packet, "exp_avg_norm", state.rows, state.first)
        stats.add_sums_of_positive(packet, "exp_avg_sq_sum", state.rows, state.second)
        for step_rows, steps in stats.by_device_and_dtype(state.rows, state.steps):
            packet.add_each("adam_step", steps, step_rows)
        betas = {row: group_betas[group] for row, group in zip(state.rows, state.groups, strict=True)}
        if below_one:
            self._add_below_one(packet, betas, state)
        return betas

    def _find(self, rows: Sequence[int], parameters: Sequence[nn.Parameter]) -> _State:
        known, states = self._state, self.optimizer.state
        key = (len(states), len(self.optimizer.param_groups), *rows)
        if known is not None and known.key == key and known.rows:
            # A state dict that was loaded replaces all moments, the first ones too.
            first = states[known.parameters[0]].get("exp_avg")
            if first is known.first[0]:
                return known
        group_of = {
            id(parameter): index
            for index, group in enumerate(self.optimizer.param_groups)
            for parameter in group["params"]
        }
        entries = [
            (parameter, row, group_of[id(parameter)], states[parameter])
            for row, parameter in zip(rows, parameters, strict=True)
            if id(parameter) in group_of and "exp_avg" in states.get(parameter, ())
        ]
        self._state = _State(
            key=key,
            parameters=[parameter for parameter, _, _, _ in entries],
            rows=[row for _, row, _, _ in entries],
            groups=[group for _, _, group, _ in entries],
            first=[state["exp_avg"] for _, _, _, state in entries],
            second=[state["exp_avg_sq"] for _, _, _, state in entries],
            steps=[torch.as_tensor(state["step"]) for _, _, _, state in entries],
        )
        return self._state

    def _add_below_one(self, packet: Packet, betas: dict[int, tuple[float, float]], state: _State) -> None:
        """Count, in a sample of coordinates, those alive and those whose GSNR is below 1.

        With bias-corrected m and v, r < 1 where 2 m² < (1 + c1) v; c1 and both corrections depend on the step
        count, which may live on the device, so the comparison is made there.
        """
        if self._samplers is None or self._samplers[0] != state.rows:
            self._samplers = (state.rows, stats.samplers(state.rows, state.first, SHARE_ELEMENTS))
        for sampler, positions in self._samplers[1]:
            mean = sampler.gather([state.first[p] for p in positions])
            square = sampler.gather([state.second[p] for p in positions])
            kind, device = mean.dtype, mean.device
            steps = [state.steps[positions[p]].to(device, non_blocking=True) for p in sampler.order]
            step = torch.stack(steps).to(kind)
            b1, b2 = (
                torch.tensor([betas[row][which] for row in sampler.rows], dtype=kind).to(device, non_blocking=True)
                for which in (0, 1)
            )
            debias1, debias2 = 1 - b1**step, 1 - b2**step
            variance_of_mean = (1 - b1) / (1 + b1) * (1 + b1**step) / debias1
            threshold = (1 + variance_of_mean) / 2 * debias1**2 / debias2
            limit = torch.repeat_interleave(threshold, sampler.lengths, output_size=mean.numel())
            below = (mean.square() < limit * square) & (square > 0)
            packet.add("alive_count", sampler.sums((square > 0).to(kind)), sampler.rows)
            packet.add("below_one_count", sampler.sums(below.to(kind)), sampler.rows)
