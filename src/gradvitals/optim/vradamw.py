"""AdamW on gradients scaled by their signal-to-noise ratio, in two passes over everything it touches."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from gradvitals.optim.adamw import AdamW
from gradvitals.optim.options import VROptions
from gradvitals.optim.reduced import VarianceReduced
from gradvitals.optim.scaled_pass import ScaledPass, Scaling


class VRAdamW(VarianceReduced, AdamW):
    """AdamW on gradients scaled by a moving average of their signal-to-noise factors; see `VRAdam`.

    `weight_decay` shrinks the weights directly. Arguments are those of `torch.optim.AdamW`, then those of `VROptions`.

    On NVIDIA GPUs with Triton the paper's rule is applied on the gradient's way into `AdamW`'s one pass, and ``.grad``
    stays as it is. Everywhere else, with another rule, and with `max_norm`, it is scaled in place first.
    """

    default_beta3 = 0.9

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
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

    def _new_pass(self) -> ScaledPass:
        return ScaledPass(self)

    def _step_at_once(self) -> bool:
        scaled_pass: Any = self._pass
        # To clip, the norm of what has been scaled would have to be known before.
        if self.max_norm is not None or not all(map(_is_papers, self.param_groups)):
            return False
        scaled_pass.scaling = Scaling(self._parts.noise_of, self._tell_factors if self._factors_hooks else None)
        try:
            self.tells_vitals = self._step_by_kernels()
        finally:
            scaled_pass.scaling = None
        return self.tells_vitals


def _is_papers(group: dict[str, Any]) -> bool:
    return group["scale"] == "paper" and group["granularity"] in (None, "tensor")
