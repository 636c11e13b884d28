"""How much of a gradient is left, by the run's own past: one factor for all tensors, or one for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradvitals.act.gate import Seen
from gradvitals.act.limits import LARGEST_NORM, Usual
from gradvitals.act.rungs import Clip
from gradvitals.functional.clipping import adagc_factors, clip_factor, zclip_norm
from gradvitals.distributed.shards import local
from gradvitals.collect.recorder import StepInputs

BETA = 0.98
"""Of the moving average of each tensor's norm, as AdaGC has it."""


class Clipper:
    """Works out the factors of one optimizer's gradients, and applies them."""

    def __init__(self, clip: Clip) -> None:
        self.clip = clip
        self._averages: list[Tensor] = []
        """Of each tensor's norm, where each is clipped by its own past."""
        self._seen = 0

    @property
    def each(self) -> bool:
        """Whether it needs the norms of single tensors."""
        return self.clip.method == "tensor" and self.clip.mode != "off"

    @torch.no_grad()
    def factors(self, seen: Seen, arrival: StepInputs, usual: Usual) -> list[Tensor] | None:
        """What gradients are multiplied by: one number, or one for each tensor of each part of `seen.tensor_norms`.

        None where there is nothing to clip by, yet or at all.
        """
        clip = self.clip
        if arrival.clipped and (arrival.max_norm is None or self.each):
            return None  # the loop has clipped them, and to what is not known
        if self.each:
            return self._each(seen)
        if usual.norm.count < clip.first_steps:
            return None
        norm = seen.norm if arrival.max_norm is None else seen.norm.clamp(max=arrival.max_norm)
        if clip.method == "zscore":
            mean, std = usual.moments()
            return [clip_factor(norm, zclip_norm(norm, mean, max(std, 1e-6 * mean), clip.z_threshold))]
        if clip.method == "quantile":
            return [clip_factor(norm, usual.quantile(clip.quantile))]
        limit = usual.norm_limit(clip.ratio, clip.z, clip.first_steps)
        return [clip_factor(norm, limit)] if limit < math.inf else None

    def _each(self, seen: Seen) -> list[Tensor] | None:
        norms = [values for _, values in seen.tensor_norms]
        self._seen += 1
        same = [tuple(values.shape) for values in self._averages] == [tuple(values.shape) for values in norms]
        if not same:
            self._averages, self._seen = [values.clone() for values in norms], 1
        self._averages = [kept.to(now) for kept, now in zip(self._averages, norms, strict=True)]
        if self._seen <= self.clip.first_steps:
            self._averages = [_lower(kept, now) for kept, now in zip(self._averages, norms, strict=True)]
            return None
        # A norm of 0 is that of a tensor without a gradient, in this step or on any rank: there is nothing to clip.
        factors = [
            torch.where(now == 0, 1.0, adagc_factors(now, kept, self.clip.tensor_ratio).where(kept != 0, 1.0))
            for now, kept in zip(norms, self._averages, strict=True)
        ]
        self._averages = [
            torch.where((now <= LARGEST_NORM) & (now > 0), BETA * kept + (1 - BETA) * factor * now, kept).where(
                kept != 0, now.where(now <= LARGEST_NORM, 0.0)
            )
            for now, kept, factor in zip(norms, self._averages, factors, strict=True)
        ]
        return factors

    @torch.no_grad()
    def apply(self, factors: list[Tensor], seen: Seen, arrival: StepInputs, optimizer: torch.optim.Optimizer) -> None:
        """Multiply the gradients in place: of what is spread over ranks, each its own part by the same factor."""
        if not self.each:
            by_device: dict[torch.device, list[Tensor]] = {}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        by_device.setdefault(parameter.grad.device, []).append(local(parameter.grad))
            for device, grads in by_device.items():
                torch._foreach_mul_(grads, factors[0].to(device))
            return
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for (rows, _), several in zip(seen.tensor_norms, factors, strict=True):
            for row, factor in zip(rows, several.unbind(), strict=True):
                parameter = arrival.parameters[row] if row >= 0 else None
                if parameter is not None and parameter.grad is not None and id(parameter) in mine:
                    local(parameter.grad).mul_(factor.to(parameter.grad.device, parameter.grad.dtype))

    def state_dict(self) -> dict[str, Any]:
        """The moving averages, by a function that waits for the device."""
        averages = [values.clone() for values in self._averages]
        return {"averages": lambda: [values.tolist() for values in averages], "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with saved averages."""
        self._averages = [torch.tensor(values) for values in state["averages"]]
        self._seen = int(state["seen"])


def smallest(factors: list[Tensor]) -> Tensor:
    """The smallest of all factors."""
    if len(factors) == 1:
        return factors[0].min() if factors[0].dim() else factors[0]
    return torch.stack([several.min().to(factors[0].device) for several in factors]).min()


def clip_words(clip: Clip, norm: float, factor: float, *, taken: bool, refusal: str) -> str:
    """What was done to a gradient, would have been, or may not be."""
    if taken:
        return f"the gradient norm is {norm:.3g}; it was clipped to {norm * factor:.3g} ({clip.method})"
    if refusal and clip.mode == "on":
        return refusal
    return f"dry run; the gradient norm is {norm:.3g}; {norm * factor:.3g} would be left of it"


def _lower(kept: Tensor, now: Tensor) -> Tensor:
    known = (kept <= LARGEST_NORM) & (kept > 0)
    return torch.where((now < kept) & (now > 0), now, kept.where(known, now))
