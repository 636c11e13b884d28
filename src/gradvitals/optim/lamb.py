"""LAMB: Adam's direction, with a step for each tensor in proportion to its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradvitals.optim.trust import Layerwise, check_settings


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
