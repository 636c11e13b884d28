"""The variance-reduced twins of torch's optimizers and of LAMB and LARS."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import Tensor

from gradvitals.optim.lamb import LAMB
from gradvitals.optim.lars import LARS
from gradvitals.optim.options import VROptions
from gradvitals.optim.reduced import VarianceReduced


class VRSGD(VarianceReduced, torch.optim.SGD):
    """SGD on gradients scaled by their signal-to-noise ratio; with `momentum` it is VR-Momentum.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: as in `torch.optim.SGD`, like all that follow.
        dampening: of the momentum.
        weight_decay: added to the scaled gradient.
        nesterov: look ahead.
        maximize: go up.
        foreach: work on all tensors at once, which is the default; False: one by one.
        fused: one kernel for the base's part of the step.
        vr: `gamma`, `beta3`, `k`, `scale`, `granularity`, `moments_dtype`, see `VROptions`.

    Example:
        The loop is the ordinary one that accumulates gradients over micro-batches.

        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = VRSGD([weight], lr=1.0)
        >>> noise = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
        >>> for part in torch.stack([2 + noise, 1 + noise], dim=1):
        ...     ((weight * part).sum() / 6).backward()
        >>> optimizer.step()  # means 2 and 1 with variance 1: r is 4 and 1, the factors 1 and 0.4
        >>> weight.data
        tensor([-2.0000, -0.4000])

    References:
        Jiang et al., "Accelerating large batch training via gradient signal to noise ratio (GSNR)", 2023.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **vr: Unpack[VROptions],
    ) -> None:
        self._prepare(vr)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )


class VRAdam(VarianceReduced, torch.optim.Adam):
    """Adam on gradients scaled by a moving average of their signal-to-noise factors, of decay `beta3` (0.9).

    A factor that stays the same over time changes nothing, because Adam divides by the gradient's size. What has an
    effect is how the factor changes over Adam's memory. `weight_decay` is added to the scaled gradient.

    Arguments are those of `torch.optim.Adam`, then those of `VROptions`.

    References:
        Jiang et al., "Accelerating large batch training via gradient signal to noise ratio (GSNR)", 2023.
    """

    default_beta3 = 0.9

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **vr: Unpack[VROptions],
    ) -> None:
        self._prepare(vr)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )


class VRLAMB(VarianceReduced, LAMB):
    """LAMB on gradients scaled by a moving average of their signal-to-noise factors, of decay `beta3` (0.9).

    Arguments are those of `LAMB`, then those of `VROptions`.
    """

    default_beta3 = 0.9

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
        **vr: Unpack[VROptions],
    ) -> None:
        self._prepare(vr)
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize, foreach=foreach)


class VRLARS(VarianceReduced, LARS):
    """LARS on gradients scaled by their signal-to-noise ratio.

    Arguments are those of `LARS`, then those of `VROptions`.
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
        **vr: Unpack[VROptions],
    ) -> None:
        self._prepare(vr)
        super().__init__(
            params,
            lr,
            momentum,
            weight_decay,
            trust_coefficient,
            eps=eps,
            nesterov=nesterov,
            maximize=maximize,
            foreach=foreach,
        )
