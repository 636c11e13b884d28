"""LARS: momentum, with a step for each tensor in proportion to its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradvitals.optim.trust import Layerwise, check_settings


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
