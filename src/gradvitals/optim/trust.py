"""What LAMB and LARS share: the round of a step, and checks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Layerwise(torch.optim.Optimizer):
    """An optimizer that works on lists of dense gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: Runs forward and backward and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters, grads in dense_grads(self, group):
                self._update(group, parameters, grads)
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> None:
        """Change parameters of one device and dtype."""


def check_settings(**settings: float | Tensor) -> None:
    """Refuse settings that cannot be meant."""
    for name, value in settings.items():
        if value < 0:
            raise ValueError(f"{name} is {value!r}; expected a number that is not negative")
        if name.startswith("beta") and value >= 1:
            raise ValueError(f"{name} is {value!r}; expected a decay in [0, 1), e.g. 0.9")


def dense_grads(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The parameters of a group that have gradients, with these, uphill ones turned around.

    All of one device and dtype together, or one by one where the group has foreach=False.
    """
    found = [(p, p.grad.detach()) for p in group["params"] if p.grad is not None]
    for parameter, grad in found:
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"{type(optimizer).__name__} needs dense gradients, and one of shape {tuple(parameter.shape)} is "
                f"{grad.layout}: build the embedding with sparse=False"
            )
    alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
    for index, (parameter, grad) in enumerate(found):
        kind = index if group["foreach"] is False else (parameter.device, parameter.dtype)
        alike.setdefault(kind, []).append((parameter, -grad if group["maximize"] else grad))
    for pairs in alike.values():
        yield [parameter for parameter, _ in pairs], [grad for _, grad in pairs]
