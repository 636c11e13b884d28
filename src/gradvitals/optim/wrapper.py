"""A wrapper that makes a variance-reduced optimizer of any other."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from gradvitals.optim.options import VROptions
from gradvitals.optim.reduced import VarianceReduced


class VRGD(VarianceReduced):
    """Scales gradients by their signal-to-noise ratio, then lets another optimizer make its step.

    Parameter groups and state are those of the wrapped optimizer, so that schedulers and checkpoints work on either.

    Args:
        base: any optimizer that takes its gradients from ``.grad`` in one step.
        vr: `gamma`, `beta3`, `k`, `scale`, `granularity`, `moments_dtype`, see `VROptions`.

    Example:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = VRGD(torch.optim.RMSprop([weight], lr=1e-3), gamma=0.2)
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["gamma"]
        (0.001, 0.2)
    """

    def __init__(self, base: torch.optim.Optimizer, **vr: Unpack[VROptions]) -> None:
        if not isinstance(base, torch.optim.Optimizer):
            raise TypeError(f"VRGD got a {type(base).__name__}; expected a torch.optim.Optimizer to wrap")
        if isinstance(base, VarianceReduced):
            raise TypeError(f"VRGD got a {type(base).__name__}, which is variance-reduced already")
        if isinstance(base, torch.optim.LBFGS):
            raise TypeError("VRGD got an LBFGS, which evaluates several gradients in one step; expected another")
        self.base = base
        self._prepare(vr)
        # Optimizer.__init__ would make groups and state of its own.
        torch.optim.Optimizer.__setstate__(self, {"defaults": base.defaults})
        for index, group in enumerate(base.param_groups):
            self._settle(group, index)
            self._follow(index)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    def _add_to_base(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)

    def _base_step(self) -> None:
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's, with the settings and averages of this one in it."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a saved state, of a wrapper or of the optimizer alone."""
        self.base.load_state_dict(state_dict)
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs."""
        kept = ("base", "defaults", "_options", "_schedules", "_rules")
        return {name: self.__dict__[name] for name in kept}
