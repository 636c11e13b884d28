"""LAMB and LARS: every tensor's step is in proportion to the norm of its weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Layerwise(torch.optim.Optimizer):
    """An optimizer that updates lists of parameters from their dense gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameters, grads in self._dense_grads(group):
                self._update(group, parameters, grads)
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> None:
        """Update parameters of one device and dtype."""

    def _dense_grads(self, group: dict[str, Any]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Yield the parameters that have gradients, with the gradients (negated to maximize).

        Those of one device and dtype come together, or one by one if the group has foreach=False.
        """
        alike: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for index, parameter in enumerate(group["params"]):
            if parameter.grad is None:
                continue
            grad = parameter.grad.detach()
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} needs dense gradients, but one of shape {tuple(parameter.shape)} is "
                    f"{grad.layout}: build the embedding with sparse=False"
                )
            kind = index if group["foreach"] is False else (parameter.device, parameter.dtype)
            alike.setdefault(kind, []).append((parameter, -grad if group["maximize"] else grad))
        for pairs in alike.values():
            yield [parameter for parameter, _ in pairs], [grad for _, grad in pairs]


def _check_settings(**settings: float | Tensor) -> None:
    """Raise if a setting is out of range."""
    for name, value in settings.items():
        if value < 0:
            raise ValueError(f"{name} is {value!r}; expected a number that is not negative")
        if name.startswith("beta") and value >= 1:
            raise ValueError(f"{name} is {value!r}; expected a decay in [0, 1), e.g. 0.9")


def _trust_ratio(weights: Tensor, lengths: Tensor, ratio: Tensor) -> Tensor:
    """Return the ratio, or 1 if the weights or what they are compared with are 0."""
    return torch.where((weights == 0) | (lengths == 0), 1.0, ratio)


class LAMB(Layerwise):
    r"""Layer-wise adaptive moments (You et al., "Large batch optimization for deep learning", 2020, algorithm 2).

    .. math:: u = \frac{\hat m}{\sqrt{\hat v} + \epsilon} + \lambda w, \qquad w \leftarrow w - \eta \frac{|w|}{|u|} u

    Every parameter is a layer. If :math:`|w|` or :math:`|u|` is 0, the ratio is 1.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decays of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: :math:`\lambda`; part of the update :math:`u`.
        maximize: Maximize the objective.
        foreach: Update all tensors at once, which is the default; False updates them one by one.
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
        _check_settings(lr=lr, eps=eps, weight_decay=weight_decay, beta1=betas[0], beta2=betas[1])
        defaults = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, maximize=maximize, foreach=foreach)
        super().__init__(params, {**defaults, "differentiable": False})

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
        ratios = _trust_ratio(weights, lengths, weights / lengths) * -group["lr"]
        torch._foreach_mul_(updates, ratios.unbind())
        torch._foreach_add_(parameters, updates)


def _number(step: Tensor) -> Any:
    """Return a step count as a number; a tensor if compiled, or every new count would recompile."""
    return step if torch.compiler.is_compiling() else step.item()


class LARS(Layerwise):
    r"""Layer-wise adaptive rate scaling (You et al., "Large batch training of convolutional networks", 2017).

    .. math:: \lambda = \eta \frac{|w|}{|g| + \beta |w|}, \qquad
              v \leftarrow m v + \mathrm{lr}\, \lambda\, (g + \beta w), \qquad w \leftarrow w - v

    Every parameter is a layer. If weights or gradients are 0, the ratio is 1.

    Args:
        params: Parameters, or groups of them.
        lr: Global learning rate.
        momentum: :math:`m`.
        weight_decay: :math:`\beta`.
        trust_coefficient: :math:`\eta`.
        eps: Added to the denominator.
        nesterov: Use Nesterov momentum.
        maximize: Maximize the objective.
        foreach: Update all tensors at once, which is the default; False updates them one by one.
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
        numbers = dict(lr=lr, eps=eps, weight_decay=weight_decay, momentum=momentum)
        numbers["trust_coefficient"] = trust_coefficient
        _check_settings(**numbers)
        if nesterov and not momentum:
            raise ValueError("nesterov is True and momentum 0; expected a momentum, e.g. 0.9")
        defaults = dict(nesterov=nesterov, maximize=maximize, foreach=foreach, differentiable=False)
        super().__init__(params, {**numbers, **defaults})

    def _update(self, group: dict[str, Any], parameters: list[Tensor], grads: list[Tensor]) -> None:
        decay, momentum = group["weight_decay"], group["momentum"]
        weights, lengths = torch.stack(torch._foreach_norm(parameters)), torch.stack(torch._foreach_norm(grads))
        local = group["trust_coefficient"] * weights / (lengths + decay * weights + group["eps"])
        ratios = _trust_ratio(weights, lengths, local) * group["lr"]
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
