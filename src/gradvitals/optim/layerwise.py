"""LAMB and LARS."""

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


class LAMB(Layerwise):
    r"""Layer-wise adaptive moments (You et al., "Large batch optimization for deep learning", 2020, algorithm 2).

    .. math:: u = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w, \qquad w \leftarrow w - \eta \frac{|w|}{|u|} u

    Every parameter is a layer. Where :math:`|w|` or :math:`|u|` is 0 the ratio is 1.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: decays of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: :math:`\lambda`, part of the update that is measured.
        maximize: go up.
        foreach: work on all tensors at once, which is the default; False: one by one.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        check_settings(lr=lr, eps=eps, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": False,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            state = self.state[parameter]
            if "exp_avg" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
        states = [self.state[parameter] for parameter in parameters]
        firsts, seconds = [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        steps = [_number(state["step"]) for state in states]

        torch._foreach_lerp_(firsts, grads, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)

        divisors = torch._foreach_sqrt(seconds)
        torch._foreach_div_(divisors, [(1 - beta2**step) ** 0.5 for step in steps])
        torch._foreach_add_(divisors, group["eps"])
        torch._foreach_mul_(divisors, [1 - beta1**step for step in steps])
        updates = torch._foreach_div(firsts, divisors)
        if group["weight_decay"]:
            torch._foreach_add_(updates, parameters, alpha=group["weight_decay"])

        weights, lengths = torch.stack(torch._foreach_norm(parameters)), torch.stack(torch._foreach_norm(updates))
        ratios = torch.where((weights == 0) | (lengths == 0), 1.0, weights / lengths) * -group["lr"]
        torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_add_(parameters, updates)


def _number(step: Tensor) -> Any:
    """A step's count as a number; a tensor stays one where it is compiled, or a new count would compile it anew."""
    return step if torch.compiler.is_compiling() else step.item()


class LARS(Layerwise):
    r"""Layer-wise adaptive rate scaling (You et al., "Large batch training of convolutional networks", 2017).

    .. math:: \lambda = \eta \frac{|w|}{|g| + \beta |w|}, \qquad
              v \leftarrow m v + \mathrm{lr}\, \lambda\, (g + \beta w), \qquad w \leftarrow w - v

    Every parameter is a layer. Where the ratio is undefined, because weights or gradients are 0, it is 1.

    Args:
        params: parameters, or groups of them.
        lr: global learning rate.
        momentum: m.
        weight_decay: :math:`\beta`.
        trust_coefficient: :math:`\eta`.
        eps: added to the denominator.
        nesterov: look ahead.
        maximize: go up.
        foreach: work on all tensors at once, which is the default; False: one by one.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        *,
        eps: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        check_settings(
            lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum, trust_coefficient=trust_coefficient
        )
        if nesterov and not momentum:
            raise ValueError("nesterov is True and momentum 0; expected a momentum to look ahead with, e.g. 0.9")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "maximize": maximize,
            "foreach": foreach,
            "differentiable": False,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        weights, lengths = torch.stack(torch._foreach_norm(parameters)), torch.stack(torch._foreach_norm(grads))
        local = group["trust_coefficient"] * weights / (lengths + decay * weights + group["eps"])
        ratios = torch.where((weights == 0) | (lengths == 0), 1.0, local) * group["lr"]
        updates = torch._foreach_add(grads, parameters, alpha=decay)
        torch._foreach_mul_(updates, ratios.unbind())
        if momentum:
            for parameter in parameters:
                self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
            buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
            torch._foreach_mul_(buffers, momentum)
            torch._foreach_add_(buffers, updates)
            if group["nesterov"]:
                torch._foreach_add_(updates, buffers, alpha=momentum)
            else:
                updates = tuple(buffers)
        torch._foreach_sub_(parameters, updates)
