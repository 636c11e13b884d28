"""The variance-reduced optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor

from gradvitals import kernels
from gradvitals.kernels.tables import ALIGNMENT, Addresses, upload
from gradvitals.optim.adamw import AdamW, Batch, OnePass, modules
from gradvitals.optim.layerwise import LAMB, LARS
from gradvitals.optim.vrgd import VarianceReduced, VROptions, room_for_factors, weights_of


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


Tell = Callable[[Sequence[Tensor], Sequence[Tensor], float], object]


@dataclass(frozen=True)
class Scaling:
    """What gradients are scaled by in one step."""

    noise_of: Callable[[Tensor], Tensor]
    """The summed squared deviations of a parameter's parts."""
    tell: Tell | None
    """Called with some parameters, their factors, and gamma, where somebody listens."""


class ScaledPass(OnePass):
    """Makes the steps of one VRAdamW, as far as kernels can."""

    needs = "vrgd"  # where it fails, AdamW may still do without

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.scaling: Scaling | None = None
        """Of the step in progress; None where it is AdamW's own."""

    def _kind(self, parameter: Tensor, grad: Tensor, state: Mapping[str, Any]) -> tuple[Any, ...] | None:
        if self.scaling is None:
            return ()
        noise, average = self.scaling.noise_of(parameter), state.get("factor_avg")
        if not kernels.usable(noise) or noise.stride() != grad.stride():
            return None
        if average is not None and not (
            kernels.usable(average) and average.stride() == grad.stride() and average.dtype == grad.dtype
        ):
            return None
        # What begins anywhere in memory must not keep the rest from wide loads.
        return noise.dtype, noise.data_ptr() % ALIGNMENT == 0

    def _holds(self, batch: Batch, grads: Sequence[Tensor]) -> bool:
        if not super()._holds(batch, grads) or (self.scaling is None) != ("noises" not in batch.extra):
            return False
        if self.scaling is None:
            return True
        noises, averages = batch.extra["noises"], batch.extra["averages"]
        if bool(averages) != bool(self.optimizer.param_groups[batch.group]["beta3"]):
            return False
        if not all([self.scaling.noise_of(p) is noise for p, noise in zip(batch.parameters, noises, strict=True)]):
            return False
        states = batch.states if averages else []
        return all([state.get("factor_avg") is mean for state, mean in zip(states, averages, strict=True)])

    def _complete(self, batch: Batch) -> None:
        if self.scaling is None:
            return
        batch.extra["noises"] = [self.scaling.noise_of(parameter) for parameter in batch.parameters]
        batch.extra["averages"] = []
        if self.optimizer.param_groups[batch.group]["beta3"]:
            for state in batch.states:
                if "factor_avg" not in state:  # the first factors become the average, with a weight of 1
                    state["factor_avg"] = torch.zeros_like(state["exp_avg"], dtype=batch.dtypes[1])
                state.setdefault("factor_step", 0)
            batch.extra["averages"] = [state["factor_avg"] for state in batch.states]
        batch.extra["weights"] = ([], None)
        batch.addresses |= {name: Addresses() for name in ("noises", "averages", "factors")}

    # -- the step -----------------------------------------------------------------------------------------------

    def _reduce(self, batch: Batch, grads: Sequence[Tensor], grads_at: Tensor) -> tuple[Any, Any, bool]:
        if self.scaling is None:
            return None, None, True
        adam, vrgd = modules("adam", "vrgd")
        group, extra, at = self.optimizer.param_groups[batch.group], batch.extra, batch.addresses
        factors = room_for_factors(grads) if self.scaling.tell is not None else []
        noises = at["noises"].table(extra["noises"])
        averages = at["averages"].table(extra["averages"]) if extra["averages"] else None
        room = at["factors"].table(factors) if factors else None
        noise_dtype = extra["noises"][0].dtype
        of_ratios = at["grads"].aligned and at["noises"].aligned
        sums = vrgd.sum_ratios(
            batch.cut, grads_at, noises, dtype=grads[0].dtype, noise_dtype=noise_dtype, aligned=of_ratios
        )
        extra["factors"] = factors
        reduction = adam.Reduction(noises, averages, room, noise_dtype, group["gamma"])
        aligned = of_ratios and at["averages"].aligned and at["factors"].aligned
        return adam.Ratios(sums, self._weights(batch, group["beta3"])), reduction, aligned

    @staticmethod
    def _weights(batch: Batch, beta3: float) -> Tensor:
        """Of the new factors in their averages; sent when they have changed, which ends after some hundred steps."""
        weights = weights_of(batch.states, beta3)
        known, sent = batch.extra["weights"]
        if sent is None or weights != known:
            sent = upload(torch.tensor(weights, dtype=torch.float32), batch.device)
            batch.extra["weights"] = (weights, sent)
        found: Tensor = sent
        return found

    def _after(self, batch: Batch) -> None:
        if self.scaling is None:
            return
        if batch.extra["averages"]:
            for state in batch.states:
                state["factor_step"] += 1
        factors = batch.extra.pop("factors")
        if self.scaling.tell is not None:
            self.scaling.tell(batch.parameters, factors, self.optimizer.param_groups[batch.group]["gamma"])


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
