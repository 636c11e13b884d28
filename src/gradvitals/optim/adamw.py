"""AdamW in one pass over everything it touches, clipping included, with the vitals of that step for free."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradvitals import kernels
from gradvitals.optim.one_pass import OnePass, Vitals
from gradvitals.optim.stochastic import step_in_float32

VitalsHook = Callable[[Vitals], object]

ASKS_FOR_AMSGRAD = "amsgrad" in inspect.signature(torch.optim.AdamW._init_group).parameters
"""Until torch 2.6."""


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW`, in one pass on NVIDIA GPUs with Triton, and as it is everywhere else.

    Arguments, state and state dicts are those of `torch.optim.AdamW`, and results are equal to rounding. With `foreach`
    given, with `amsgrad` or with `differentiable` the step is torch's own. `torch.compile` leaves it as it is.

    Under `gv.watch` the step hands over norms, extremes and counts of gradients, weights, moments and updates, which
    then need not be read again.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Decays of the averages of the gradient and of its square.
        eps: Added to the denominator.
        weight_decay: Shrinks the weights directly.
        amsgrad: As in `torch.optim.AdamW`, like all that follow.
        maximize: Go up.
        foreach: True or False leave the step to torch.
        capturable: The step may be captured in a CUDA graph; this one may be in any case.
        differentiable: Leaves the step to torch.
        fused: Torch's fused step where this one cannot be used.
        max_norm: Clip the norm of all gradients to this, inside the step. ``.grad`` stays as it is. It is what
            `torch.nn.utils.clip_grad_norm_` before the step would do, and `total_norm` is what that would return.
        stochastic_rounding: Round bfloat16 weights up or down at random, so that small updates are not lost.

    Example:
        >>> weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = AdamW([weight], lr=0.5, weight_decay=0.0, max_norm=1.0)
        >>> weight.square().sum().backward()
        >>> optimizer.step()
        >>> weight.data, round(float(optimizer.total_norm), 4)
        (tensor([2.5000, 3.5000]), 10.0)
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        if max_norm is not None and not (isinstance(max_norm, (int, float)) and max_norm > 0):
            raise ValueError(f"max_norm is {max_norm!r}; expected a norm above 0, e.g. 1.0, or None")
        self._begin_passes(max_norm, stochastic_rounding)
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

    def _begin_passes(self, max_norm: float | None, stochastic_rounding: bool) -> None:
        self.max_norm = max_norm
        """What the norm of all gradients is clipped to; may be changed at any time."""
        self.stochastic_rounding = stochastic_rounding
        self.total_norm: Tensor | None = None
        """Of all gradients in the last step, before clipping, on their device; None without `max_norm`."""
        self.tells_vitals = False
        """Whether the last step went through kernels, so that the next will call the hooks most likely."""
        self._pass = self._new_pass()
        self._vitals_hooks: OrderedDict[int, VitalsHook] = OrderedDict()
        self._slices: dict[int, Mapping[Tensor, int]] = {}
        self._clip_factor: Tensor | None = None

    def _new_pass(self) -> OnePass:
        return OnePass(self)

    def register_vitals_hook(self, hook: VitalsHook, slices: Mapping[Tensor, int] | None = None) -> RemovableHandle:
        """Have a function called after each step that goes through kernels, with what it saw in passing.

        Args:
            hook: Called with `Vitals` for each type and group of parameters.
            slices: Parameters that are to be summed in so many equal parts too, e.g. attention heads.
        """
        handle = RemovableHandle(self._vitals_hooks)
        self._vitals_hooks[handle.id] = hook
        self._slices[handle.id] = dict(slices or {})
        return handle

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler is to leave dividing and skipping to the step."""
        return all(group["fused"] for group in self.param_groups) or self._pass.is_possible()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        """Torch says so itself where `fused` is given."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step.

        Args:
            closure: Runs forward and backward, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._make_step()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _make_step(self) -> None:
        self.tells_vitals = self._step_by_kernels()
        if not self.tells_vitals:
            self._step_by_torch()

    # -- one pass -----------------------------------------------------------------------------------------------

    def _step_by_kernels(self) -> bool:
        try:
            live = {key: slices for key, slices in self._slices.items() if key in self._vitals_hooks}
            wanted = {parameter: number for slices in live.values() for parameter, number in slices.items()}
            if not self._pass.is_possible() or not self._pass.look(wanted):
                return False
            told = self._pass.step(vitals=bool(self._vitals_hooks))
        except Exception as error:
            if self._pass.has_begun:  # what is half made cannot be made otherwise
                raise
            kernels.give_up(self._pass.needs, error, f"{type(self).__name__} goes on with torch's step")
            return False
        self.total_norm = self._pass.total_norm
        for vitals in told:
            for hook in list(self._vitals_hooks.values()):
                hook(vitals)
        return True

    # -- as torch does it ---------------------------------------------------------------------------------------

    def _step_by_torch(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not grads or self._left_out(grads):
            return
        self.total_norm = self._clip_factor = None
        if self.max_norm is not None:
            self.total_norm = _total_norm(grads)
            self._clip_factor = (self.max_norm / (self.total_norm + 1e-6)).clamp(max=1.0)
        if self.stochastic_rounding and any(grad.dtype == torch.bfloat16 for grad in grads):
            step_in_float32(self, self._clip_factor)
            return
        step: Any = torch.optim.AdamW.step
        if getattr(step, "hooked", False):  # torch wraps the steps of classes it has met; ours is wrapped already
            step = step.__wrapped__
        step(self)

    def _left_out(self, grads: Sequence[Tensor]) -> bool:
        """Do a GradScaler's part where it counts on the step and the step is not one that does it."""
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found is None or all(group["fused"] for group in self.param_groups):
            return False
        self.found_inf = self.grad_scale = None  # torch's other steps refuse these
        if bool(found):
            return True
        if scale is not None:
            for grad in grads:
                grad.div_(scale.to(grad.device))
        return False

    def _init_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *states: Any) -> Any:
        has_complex = super()._init_group(group, params, grads, *states)  # type: ignore[no-untyped-call]
        if self._clip_factor is not None:
            grads[:] = [grad * self._clip_factor.to(grad.device, grad.dtype) for grad in grads]
        return has_complex

    def _lists_of(self, group: dict[str, Any]) -> list[list[Tensor]]:
        """Parameters that have gradients, these, both moments, largest second ones, and steps; made where missing."""
        lists: list[list[Tensor]] = [[] for _ in range(6)]
        more = (group["amsgrad"],) if ASKS_FOR_AMSGRAD else ()
        self._init_group(group, *lists[:2], *more, *lists[2:])
        return lists

    def __repr__(self) -> str:
        """What torch shows of an optimizer, with what is set for all groups."""
        text = super().__repr__()
        own = {"max_norm": self.max_norm, "stochastic_rounding": self.stochastic_rounding or None}
        lines = "".join(f"{name}: {value}\n" for name, value in own.items() if value is not None)
        return f"{text.removesuffix(')')}{lines})"

    # -- copies and state ---------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs; hooks and tables are its own."""
        return super().__getstate__() | {"max_norm": self.max_norm, "stochastic_rounding": self.stochastic_rounding}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, or take over what was loaded."""
        if "_pass" not in self.__dict__:
            self._begin_passes(state.get("max_norm"), state.get("stochastic_rounding", False))
        super().__setstate__(state)  # type: ignore[no-untyped-call]


def _total_norm(grads: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients together, as `torch.nn.utils.get_total_norm` has it, which a Monitor would hear."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        alike.setdefault((grad.device, grad.dtype), []).append(grad)
    norms = [norm.to(grads[0].device) for some in alike.values() for norm in torch._foreach_norm(some)]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
