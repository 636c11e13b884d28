"""The variance-reduced optimizers: each scales its gradients as `VarianceReduced` does, then makes its base's step."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from gradvitals.optim.adamw import AdamW, Scaling
from gradvitals.optim.layerwise import LAMB, LARS
from gradvitals.optim.vrgd import VarianceReduced, VROptions


class VRSGD(VarianceReduced, torch.optim.SGD):
    r"""SGD on gradients scaled by their signal-to-noise ratio; with `momentum` it is VR-Momentum.

    .. math:: w \leftarrow w - \eta \left(\mathrm{clip}\left(\frac{r}{\bar r}, \gamma, 1\right) \odot g\right),
              \qquad r = \frac{g^2}{\sigma^2}

    with the mean :math:`g` and the variance :math:`\sigma^2` of the step's micro-batch gradients, element by element,
    and the mean :math:`\bar r` of r over the tensor.

    Args:
        params: Parameters, or groups of them.
        options: Arguments of `torch.optim.SGD`, and `gamma`, `beta3`, `k`, `scale`, `granularity`, `moments_dtype`
            of `VROptions`. `weight_decay` is added to the scaled gradient.

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


class VRAdam(VarianceReduced, torch.optim.Adam):
    r"""Adam on gradients scaled by a moving average of their signal-to-noise factors, with decay `beta3` (0.9).

    .. math:: p_t = \beta_3 \, p_{t-1} + (1 - \beta_3) \, \mathrm{clip}\left(\frac{r}{\bar r}, \gamma, 1\right),
              \qquad g \leftarrow \frac{p_t}{1 - \beta_3^t} \odot g

    with r as in `VRSGD`, before Adam computes its moments. A factor that stays constant over time changes nothing,
    because Adam divides by the gradient's size: only changes of the factor within Adam's memory have an effect.
    `weight_decay` is added to the scaled gradient.

    The arguments are those of `torch.optim.Adam` and of `VROptions`.

    References:
        Jiang et al., "Accelerating large batch training via gradient signal to noise ratio (GSNR)", 2023.
    """

    default_beta3 = 0.9


class VRLAMB(VarianceReduced, LAMB):
    """LAMB on gradients scaled by a moving average of their signal-to-noise factors, as in `VRAdam`.

    The arguments are those of `LAMB` and of `VROptions`.
    """

    default_beta3 = 0.9


class VRLARS(VarianceReduced, LARS):
    """LARS on gradients scaled by their signal-to-noise ratio, as in `VRSGD`.

    The arguments are those of `LARS` and of `VROptions`.
    """


class VRAdamW(VarianceReduced, AdamW):
    """AdamW on gradients scaled by a moving average of their signal-to-noise factors; see `VRAdam`.

    `weight_decay` shrinks the weights directly. The arguments are those of `AdamW` and of `VROptions`.

    On NVIDIA GPUs with Triton, the paper's rule is applied while `AdamW`'s kernel reads the gradient, and ``.grad``
    stays unchanged. On other devices, with another rule, or with `max_norm`, ``.grad`` is scaled in place first.
    """

    default_beta3 = 0.9
    _kernels = "vrgd"  # AdamW's own may still work if these fail

    def _scale_and_step(self) -> bool:
        # Clipping would need the norm of the scaled gradient before the pass that scales it.
        by_paper = (g["scale"] == "paper" and g["granularity"] in (None, "tensor") for g in self.param_groups)
        if self.max_norm is not None or not all(by_paper):
            return False
        self._fused.scaling = Scaling(self._parts.noise_of, self._report_factors if self._factors_hooks else None)
        try:
            self.reports_vitals = self._step_by_kernels()
        finally:
            self._fused.scaling = None
        return self.reports_vitals


class VRGD(VarianceReduced):
    """Scales gradients by their signal-to-noise ratio, then runs the step of the optimizer it wraps.

    It shares parameter groups and state with the wrapped optimizer, so schedulers and checkpoints work on either.

    Args:
        base: Any optimizer that takes its gradients from ``.grad`` in one step.
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
            raise TypeError(f"VRGD got a {type(base).__name__}, which is already variance-reduced")
        if isinstance(base, torch.optim.LBFGS):
            raise TypeError("VRGD got an LBFGS, which evaluates several gradients per step; expected another optimizer")
        self.base = base
        self._set_options(dict(vr))
        # Optimizer.__init__ would create its own groups and state.
        torch.optim.Optimizer.__setstate__(self, {"defaults": base.defaults})
        for index, group in enumerate(base.param_groups):
            self._complete_group(group, index)
            self._follow(index)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.base.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.base.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self.base.state

    @state.setter
    def state(self, state: Any) -> None:
        self.base.state = state

    def _add_to_base(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)

    def _base_step(self) -> None:
        self.base.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state dict, which includes the settings and averages of this one."""
        return self.base.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a wrapper or of the wrapped optimizer alone."""
        self.base.load_state_dict(state_dict)
        self.__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs."""
        kept = ("base", "defaults", "_options", "_schedules", "_rules")
        return {name: self.__dict__[name] for name in kept}
