"""A learning rate below what the schedule says, for a while: how low, and when it comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from gradvitals.act.lr_factor import lr_factors


@dataclass(frozen=True)
class Ease:
    """One reason for a lower rate: from `share` of it at step `begin`, held, and then back to all of it."""

    begin: int
    share: float
    hold: int
    rise: int
    shape: str
    """``linear`` or ``cosine``."""

    def factor(self, step: int) -> float:
        """What the rate is multiplied by at a step."""
        passed = step - self.begin - self.hold
        if passed < 0:
            return self.share
        if passed >= self.rise:
            return 1.0
        done = passed / self.rise
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * done)) / 2
        return self.share + (1 - self.share) * done


@dataclass
class Rates:
    """The reasons in force, and what follows from them."""

    eases: dict[str, Ease] = field(default_factory=dict)
    """By the kind of action that asked for it; the last one counts."""
    _told: dict[int, float] = field(default_factory=dict)
    _owner: object = field(default_factory=object)

    def add(self, kind: str, begin: int, *, share: float, hold: int, rise: int, shape: str) -> None:
        """Lower the rate from this step on."""
        self.eases[kind] = Ease(begin, share, hold, rise, shape)

    def factor(self, step: int) -> float:
        """What the rate is multiplied by at a step."""
        return math.prod(ease.factor(step) for ease in self.eases.values())

    def over(self, step: int) -> list[str]:
        """Reasons that have come to their end; they are forgotten."""
        ended = [kind for kind, ease in self.eases.items() if step >= ease.begin + ease.hold + ease.rise]
        for kind in ended:
            del self.eases[kind]
        return ended

    def lower(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Have the rates of the optimizer's next step multiplied; see `lr_factor`."""
        factor = self.factor(step) if self.eases else 1.0
        if factor != self._told.get(id(optimizer), 1.0):
            self._told[id(optimizer)] = factor
            lr_factors(optimizer).set(self._owner, factor)

    def release(self, optimizer: torch.optim.Optimizer) -> None:
        """Multiply no more."""
        if self._told.pop(id(optimizer), None) is not None:
            lr_factors(optimizer).drop(self._owner)

    def state_dict(self) -> dict[str, Any]:
        """The reasons in force."""
        return {kind: asdict(ease) for kind, ease in self.eases.items()}

    def load_state_dict(self, state: Mapping[str, Any], shift: int = 0) -> None:
        """Go on with saved reasons; `shift` is added to the steps at which they began."""
        self.eases = {kind: Ease(**{**values, "begin": values["begin"] + shift}) for kind, values in state.items()}
