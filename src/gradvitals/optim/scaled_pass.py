"""VRAdamW's step by kernels: gradients scaled by the paper's factors on their way into AdamW's update.

Two passes are the fewest: the mean ratio of a tensor must be known before any of its elements is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradvitals import kernels
from gradvitals.kernels.cut import ALIGNMENT, Addresses, upload
from gradvitals.optim.factors import weights_of
from gradvitals.optim.fused import room_for_factors
from gradvitals.optim.one_pass import Batch, OnePass, modules

Tell = Callable[[Sequence[Tensor], Sequence[Tensor], float], object]


@dataclass(frozen=True)
class Scaling:
    """What gradients are scaled by in one step."""

    noise_of: Callable[[Tensor], Tensor]
    """The summed squared deviations of a parameter's parts."""
    tell: Tell | None
    """Called with some parameters, their factors, and gamma, where somebody listens."""


class ScaledPass(OnePass):
    """Makes the steps of one VRAdamW, as far as kernels can."""

    needs = "paper"  # where it fails, AdamW may still do without

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.scaling: Scaling | None = None
        """Of the step in progress; None where it is AdamW's own."""

    def _kind(self, parameter: Tensor, grad: Tensor, state: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if self.scaling is None:
            return ()
        noise, average = self.scaling.noise_of(parameter), state.get("factor_avg")
        if not kernels.usable(noise) or noise.stride() != grad.stride():
            return None
        if average is not None and not (
            kernels.usable(average) and average.stride() == grad.stride() and average.dtype == grad.dtype
        ):
            return None
        # What begins anywhere in memory must not keep the rest from wide loads.
        return noise.dtype, noise.data_ptr() % ALIGNMENT == 0

    def _holds(self, batch: Batch, grads: Sequence[Tensor]) -> bool:
        if not super()._holds(batch, grads) or (self.scaling is None) != ("noises" not in batch.extra):
            return False
        if self.scaling is None:
            return True
        noises, averages = batch.extra["noises"], batch.extra["averages"]
        if bool(averages) != bool(self.optimizer.param_groups[batch.group]["beta3"]):
            return False
        if not all([self.scaling.noise_of(p) is noise for p, noise in zip(batch.parameters, noises, strict=True)]):
            return False
        states = batch.states if averages else []
        return all([state.get("factor_avg") is mean for state, mean in zip(states, averages, strict=True)])

    def _complete(self, batch: Batch) -> None:
        if self.scaling is None:
            return
        batch.extra["noises"] = [self.scaling.noise_of(parameter) for parameter in batch.parameters]
        batch.extra["averages"] = []
        if self.optimizer.param_groups[batch.group]["beta3"]:
            for state in batch.states:
                if "factor_avg" not in state:  # the first factors become the average, with a weight of 1
                    state["factor_avg"] = torch.zeros_like(state["exp_avg"], dtype=batch.dtypes[1])
                state.setdefault("factor_step", 0)
            batch.extra["averages"] = [state["factor_avg"] for state in batch.states]
        batch.extra["weights"] = ([], None)
        batch.addresses |= {name: Addresses() for name in ("noises", "averages", "factors")}

    # -- the step -----------------------------------------------------------------------------------------------

    def _reduce(self, batch: Batch, grads: Sequence[Tensor], grads_at: Tensor) -> tuple[Any, Any, bool]:
        if self.scaling is None:
            return None, None, True
        adam, paper = modules("adam", "paper")
        group, extra, at = self.optimizer.param_groups[batch.group], batch.extra, batch.addresses
        factors = room_for_factors(grads) if self.scaling.tell is not None else []
        noises = at["noises"].table(extra["noises"])
        averages = at["averages"].table(extra["averages"]) if extra["averages"] else None
        room = at["factors"].table(factors) if factors else None
        noise_dtype = extra["noises"][0].dtype
        of_ratios = at["grads"].aligned and at["noises"].aligned
        sums = paper.sum_ratios(
            batch.cut, grads_at, noises, dtype=grads[0].dtype, noise_dtype=noise_dtype, aligned=of_ratios
        )
        extra["factors"] = factors
        reduction = adam.Reduction(noises, averages, room, noise_dtype, group["gamma"])
        aligned = of_ratios and at["averages"].aligned and at["factors"].aligned
        return adam.Ratios(sums, self._weights(batch, group["beta3"])), reduction, aligned

    @staticmethod
    def _weights(batch: Batch, beta3: float) -> Tensor:
        """Of the new factors in their averages; sent when they have changed, which ends after some hundred steps."""
        weights = weights_of(batch.states, beta3)
        known, sent = batch.extra["weights"]
        if sent is None or weights != known:
            sent = upload(torch.tensor(weights, dtype=torch.float32), batch.device)
            batch.extra["weights"] = (weights, sent)
        found: Tensor = sent
        return found

    def _after(self, batch: Batch) -> None:
        if self.scaling is None:
            return
        if batch.extra["averages"]:
            for state in batch.states:
                state["factor_step"] += 1
        factors = batch.extra.pop("factors")
        if self.scaling.tell is not None:
            self.scaling.tell(batch.parameters, factors, self.optimizer.param_groups[batch.group]["gamma"])
