"""GSNR from the optimizer's own moments: no memory, no hooks, two multi-tensor norms.

Adam keeps m, an average of gradients, and v, an average of their squares. The sums of m² and of v over a
tensor are all that `functional.adam_signal_and_noise` needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gradvitals.measure import stats
from gradvitals.measure.packet import Packet
from gradvitals.measure.ranks.shards import local

SHARE_ELEMENTS = 2**10
"""Coordinates of each tensor that its share below 1 is counted in: a standard error under 2 %."""

SUPPORTED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that keeps the moments: inside ZeroRedundancyOptimizer, one for this rank's share of them."""
    inner = getattr(optimizer, "optim", None) if type(optimizer).__name__ == "ZeroRedundancyOptimizer" else None
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def unavailable_reason(optimizer: torch.optim.Optimizer) -> str | None:
    """Why this optimizer's moments give no GSNR, or None where they do."""
    if hasattr(optimizer, "register_factors_hook"):
        return f"{type(optimizer).__name__} averages gradients that it has scaled, element by element"
    if isinstance(stepping(optimizer), SUPPORTED):
        return None
    known = ", ".join(kind.__name__ for kind in SUPPORTED)
    return f"{type(optimizer).__name__} does not keep averages of the gradient and of its square; {known} do"


class _State(NamedTuple):
    """An optimizer's moments, tensor by tensor."""

    rows: list[int]
    first: list[Tensor]
    second: list[Tensor]
    steps: list[Tensor]
    betas: dict[int, tuple[float, float]]
    kept: list[tuple[nn.Parameter, dict[str, Any], Tensor, Any]]
    """Where each was found, to see whether it is still there."""
    groups: list[Any]
    """The betas of every group."""


class MomentSums:
    """Reads the moments of one optimizer's parameters after its step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = stepping(optimizer)
        self._samplers: tuple[list[int], list[tuple[stats.Sampler, list[int]]]] | None = None
        self._state = _State([], [], [], [], {}, [], [])

    @torch.no_grad()
    def add(
        self, packet: Packet, rows: Sequence[int], parameters: Sequence[nn.Parameter], *, below_one: bool
    ) -> dict[int, tuple[float, float]]:
        """Put sums, step counts and sampled shares into the packet; return the betas of every row read."""
        if not self._holds(parameters):
            self._state = self._look_up(rows, parameters)
        state = self._state
        if not state.rows:
            return {}
        stats.add_norms(packet, "exp_avg_norm", state.rows, state.first)
        stats.add_sums_of_positive(packet, "exp_avg_sq_sum", state.rows, state.second)
        for step_rows, steps in stats.by_device_and_dtype(state.rows, state.steps):
            packet.add_each("adam_step", steps, step_rows)
        if below_one:
            self._add_below_one(packet, state)
        return state.betas

    def _holds(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether the moments are still the tensors they were: a loaded checkpoint or a reset brings others."""
        kept, state = self._state.kept, self.optimizer.state
        return (
            len(kept) == len(parameters) == len(state)
            and self._state.groups == [group["betas"] for group in self.optimizer.param_groups]
            and all(
                state[parameter] is entry and entry["exp_avg"] is first and entry["step"] is step
                for parameter, entry, first, step in kept
            )
        )

    def _look_up(self, rows: Sequence[int], parameters: Sequence[nn.Parameter]) -> _State:
        groups = self.optimizer.param_groups
        betas_of = {id(p): group["betas"] for group in groups for p in group["params"]}
        state = _State([], [], [], [], {}, [], [group["betas"] for group in groups])
        for row, parameter in zip(rows, parameters, strict=True):
            kept = self.optimizer.state.get(parameter)
            beta1, beta2 = betas_of.get(id(parameter), (None, None))
            # Betas may be tensors on the device: not worth a wait.
            if kept and "exp_avg" in kept and isinstance(beta1, float) and isinstance(beta2, float):
                state.betas[row] = (beta1, beta2)
                state.rows.append(row)
                state.first.append(local(kept["exp_avg"]))
                state.second.append(local(kept["exp_avg_sq"]))
                state.steps.append(local(torch.as_tensor(kept["step"])))  # a number, in states of old
                state.kept.append((parameter, kept, kept["exp_avg"], kept["step"]))
        return state

    def _add_below_one(self, packet: Packet, state: _State) -> None:
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
            step = torch.stack([state.steps[positions[p]] for p in sampler.order]).to(device, kind, non_blocking=True)
            betas = [state.betas[row] for row in sampler.rows]
            b1, b2 = (
                torch.tensor([pair[which] for pair in betas], dtype=kind).to(device, non_blocking=True)
                for which in (0, 1)
            )
            debias1, debias2 = 1 - b1**step, 1 - b2**step
            variance_of_mean = (1 - b1) / (1 + b1) * (1 + b1**step) / debias1
            threshold = (1 + variance_of_mean) / 2 * debias1**2 / debias2
            limit = torch.repeat_interleave(threshold, sampler.lengths, output_size=mean.numel())
            below = (mean.square() < limit * square) & (square > 0)
            packet.add("alive_count", sampler.sums((square > 0).to(kind)), sampler.rows)
            packet.add("below_one_count", sampler.sums(below.to(kind)), sampler.rows)
