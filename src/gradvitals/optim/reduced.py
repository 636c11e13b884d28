"""What all variance-reduced optimizers share: collect parts of a batch, scale the gradient, then the base's step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from gradvitals.optim.factors import (
    DEFAULT_GRANULARITY,
    Granularity,
    Rule,
    Share,
    averaged,
    check_rule,
    factors_of,
    factors_of_layers,
)
from gradvitals.optim.fused import can_be_fused, scale_fused
from gradvitals.optim.parts import Block, GradientParts, in_memory_order

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from gradvitals.optim.ranks import CommunicationHook, RankSums

MIN_PARTS = 2
ENOUGH_PARTS = 6
"""From here on r has a variance under pure noise; below 4 it has not even a mean."""

HOW_TO_GET_MORE = (
    "split the batch: call backward() on several micro-batches before each step(), 8 for example; or, under "
    "DistributedDataParallel, let every rank be a part with optimizer.use_ranks(model)"
)

GammaSchedule = Callable[[int], float]
OnFactors = Callable[[Sequence[Tensor], Sequence[Tensor], float], object]


class VROptions(TypedDict, total=False):
    """What every variance-reduced optimizer takes besides the arguments of its base; each may stand in a group."""

    gamma: float | GammaSchedule
    """Smallest factor, in [0, 1]; or a schedule, from the number of steps made to gamma. 1 is the base optimizer."""
    beta3: float
    """Decay of a moving average of the factors, in [0, 1); 0: none."""
    k: int | None
    """Gradients a step is made of; another number is an error. None: as many as came."""
    scale: str | Rule
    """"paper", "wiener", or a function of (mean, variance, k, gamma) for one tensor."""
    granularity: Granularity | None
    """Over what r is normalised, or signal and noise are estimated. None: "tensor", or "hierarchical" for wiener."""
    moments_dtype: torch.dtype | None
    """Of the variance accumulators. None: float32, or float64 where the parameter is."""


class VarianceReduced(torch.optim.Optimizer):
    """Scales every element of the gradient by how well the parts of the batch agree on it, before the base's step."""

    last_num_parts = 0
    """Gradients the last step was made of."""
    on_factors: OnFactors | None = None
    """Called within each step with parameters, the factors of their elements, and gamma, some at a time."""

    default_beta3 = 0.0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """No: a gradient scaler is to decide on the host whether to step, or skipped steps would be counted."""
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None:
        """A fused base says yes."""

    def _prepare(self, options: VROptions) -> None:
        """Take the options that are not the base's. Comes before the base's own __init__, which adds the groups."""
        known: VROptions = {
            "gamma": 0.1,
            "beta3": self.default_beta3,
            "k": None,
            "scale": "paper",
            "granularity": None,
            "moments_dtype": None,
        }
        unknown = set(options) - set(known)
        if unknown:
            names = ", ".join(sorted(unknown))
            raise TypeError(
                f"{type(self).__name__} got {names}, which it does not know; besides the arguments of its "
                f"base it takes {', '.join(known)}"
            )
        self._options: VROptions = known | options
        self._begin()

    def _begin(self) -> None:
        self._parts = GradientParts()
        self._ranks: RankSums | None = None
        self._alone = False
        # Functions stay out of the groups, which are saved.
        self._schedules: dict[int, GammaSchedule] = {}
        self._rules: dict[int, Rule] = {}
        self._warned = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with its own settings where it has them."""
        index = len(self.param_groups)
        self._settle(param_group, index)
        self._add_to_base(param_group)
        self._follow(index)

    def _settle(self, group: dict[str, Any], index: int) -> None:
        """Complete the settings of a group, and check them."""
        for name, value in self._options.items():
            group.setdefault(name, value)
        group.setdefault("vr_steps", 0)
        if callable(group["gamma"]):
            self._schedules[index] = group["gamma"]
            group["gamma"] = float(group["gamma"](0))
        check_rule(group["scale"], group["granularity"])
        if callable(group["scale"]):
            self._rules[index] = group["scale"]
            group["scale"] = "custom"
        _check(group, self.defaults)

    def _add_to_base(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)

    def _follow(self, index: int) -> None:
        group = self.param_groups[index]
        if group["granularity"] == "layer" and "param_names" not in group:
            raise ValueError('granularity is "layer", but parameters have no names: pass model.named_parameters()')
        self._parts.follow(group["params"], group=index, dtype=group["moments_dtype"])
        # The paper's rule does not change when gradients and deviations are multiplied together.
        self._parts.keeps_norms |= group["scale"] != "paper"

    def __getstate__(self) -> dict[str, Any]:
        """What a copy needs; hooks and sums are its own."""
        own = {"_options": self._options, "_schedules": self._schedules, "_rules": self._rules}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, or take over what was loaded."""
        if "_parts" not in self.__dict__:
            self._begin()
        super().__setstate__(state)
        plain = {name: value for name, value in self._options.items() if not callable(value)}
        for index, group in enumerate(self.param_groups):  # a state saved by the base has none of these
            for name, value in ({"gamma": 0.1, "scale": "custom", "vr_steps": 0} | plain).items():
                group.setdefault(name, value)
            if index in self._rules:
                group["scale"] = "custom"
            elif group["scale"] == "custom":
                raise ValueError(
                    "the state was saved by an optimizer whose scale is a function, which cannot be saved; expected "
                    "an optimizer built with that function as its scale to load it into"
                )
            self._follow(index)

    def captured(self) -> None:
        """Note that a CUDA graph was just captured of all backward passes of a step; see `replayed`."""
        self._parts.note_captured()

    def replayed(self) -> None:
        """Count the parts of a CUDA graph that was replayed: no hook is called then.

        Example:
            ::

                with torch.cuda.graph(graph):  # after a few ordinary steps, with gradients None
                    for inputs, targets in static_micro_batches:
                        loss_fn(model(inputs), targets).backward()
                optimizer.captured()
                ...
                graph.replay()  # computes the same gradients anew, into the same memory: no zero_grad
                optimizer.replayed()
                optimizer.step()
        """
        self._parts.replay()

    def use_ranks(
        self, model: DistributedDataParallel | None, hook: CommunicationHook | None = None, state: Any = None
    ) -> None:
        """Count the ranks of a DistributedDataParallel model as parts of the batch.

        Registers a communication hook that averages gradients and sums their squared deviations: twice the bytes.
        With accumulation under ``no_sync`` the parts are the micro-batches of all ranks.

        Args:
            model: The model as wrapped; or None to say that this process shares its gradients with no other.
            hook: Your own communication hook for the gradients, e.g. torch's ``bf16_compress_hook``.
            state: What that hook is to be called with as its state.

        Example:
            ``optimizer.use_ranks(model, hook=default_hooks.bf16_compress_hook)``
        """
        if model is None:
            self._alone = True
            return
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(f"use_ranks got a {type(model).__name__}; expected the DistributedDataParallel model")
        from gradvitals.optim.ranks import RankSums

        self._ranks = RankSums(model, self._parts, hook, state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; parts collected since the last step are given up with them."""
        super().zero_grad(set_to_none)
        self._forget()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forget(self) -> None:
        self._parts.forget()
        if self._ranks is not None:
            self._ranks.forget()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Scale the gradients in place, then make the base optimizer's step.

        Args:
            closure: Runs forward and backward, of all parts, and returns the loss.

        Raises:
            RuntimeError: when the gradients came in fewer than 2 parts, or not in `k` parts.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        shares = self._gather(torch.compiler.is_compiling())
        of_layers = factors_of_layers(shares)
        averages = [self._scale(share, of_layers.get(index)) for index, share in enumerate(shares)]
        self._base_step()
        self._remember(shares, averages)
        return loss

    def _base_step(self) -> None:
        step: Any = super().step
        function = step.__func__
        # torch wraps the steps of classes it has met, to call hooks; those are called around this step already.
        if getattr(function, "hooked", False):
            function = function.__wrapped__
        function(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather(self, compiling: bool) -> list[Share]:
        """Everything in a step that is not torch's arithmetic on gradients. Returns what is left to be scaled."""
        world_size = self._num_ranks()
        self._num_local = self._parts.num_parts
        self.last_num_parts = self._num_local * world_size
        self._check_num_parts(world_size)
        self._parts.flush()
        if self._ranks is not None:
            self._ranks.finish()
        else:
            self._parts.complete(self._num_local)
        for index, group in enumerate(self.param_groups):
            if index in self._schedules:
                group["gamma"] = float(self._schedules[index](group["vr_steps"]))
            _check(group, self.defaults)
            group["vr_steps"] += 1
        shares = [self._share(block, compiling) for block in self._parts.blocks]
        return [share for share in shares if share is not None and not self._scale_fused(share)]

    def _num_ranks(self) -> int:
        if self._ranks is not None:
            return self._ranks.world_size
        if not self._alone and (ranks := _world_size()) > 1:
            raise RuntimeError(
                f"torch.distributed has {ranks} ranks and the optimizer does not know how they share gradients: call "
                "optimizer.use_ranks(model) with the DistributedDataParallel model, or optimizer.use_ranks(None) if "
                "this process trains by itself"
            )
        return 1

    def _check_num_parts(self, world_size: int) -> None:
        found = self.last_num_parts
        where = f" ({self._num_local} on each of {world_size} ranks)" if world_size > 1 else ""
        if found < MIN_PARTS:
            raise RuntimeError(
                f"step() found {found} gradient{'' if found == 1 else 's'} since the last step{where}; signal and "
                f"noise are told apart by comparing at least {MIN_PARTS}, better {ENOUGH_PARTS} or more: "
                + HOW_TO_GET_MORE
            )
        for group in self.param_groups:
            if group["k"] not in (None, found):
                raise RuntimeError(
                    f"step() found {found} gradients since the last step{where}, but k = {group['k']} was announced; "
                    "make as many backward() calls, or leave k out where the number changes"
                )
        if found < ENOUGH_PARTS and not self._warned:
            self._warned = True
            warnings.warn(
                f"a step of {found} gradients: with fewer than {ENOUGH_PARTS} the ratio of signal to noise scatters "
                "so widely that a few elements decide for a whole tensor, and most end at gamma; " + HOW_TO_GET_MORE,
                stacklevel=6,
            )

    def _share(self, block: Block, compiling: bool) -> Share | None:
        parameters, noises = block.parameters, block.noises
        grads = [parameter.grad for parameter in parameters]
        whole = all(grad is not None for grad in grads)
        if not whole:
            present = [index for index, grad in enumerate(grads) if grad is not None]
            if not present:
                return None
            parameters, noises = [parameters[i] for i in present], [noises[i] for i in present]
        group = self.param_groups[block.kind.group]
        beta3 = group["beta3"]
        states = [self.state.get(parameter, {}) for parameter in parameters] if beta3 else []
        weights: list[Any] = [(1 - beta3) / (1 - beta3 ** (state.get("factor_step", 0) + 1)) for state in states]
        return Share(
            parameters=parameters,
            grads=[grad for grad in grads if grad is not None],
            noises=noises,
            flat_noise=block.flat if whole else torch.cat([in_memory_order(noise) for noise in noises]),
            num_added=self._num_local,
            num_parts=self.last_num_parts,
            gamma=group["gamma"],
            rule=self._rules.get(block.kind.group, group["scale"]),
            granularity=group["granularity"] or DEFAULT_GRANULARITY.get(group["scale"], ""),
            layers=_layers(group, parameters) if group["granularity"] == "layer" else [],
            averages=[state.get("factor_avg") for state in states],
            weights=weights,
            # A number that changes would have the step compiled anew, a tensor does not.
            compiled_weights=[torch.tensor(weight) for weight in weights] if compiling else [],
            at_once=group.get("foreach") is not False,
            block=block if whole else None,
        )

    def _scale_fused(self, share: Share) -> bool:
        """Do by kernels all that `_scale` and `_remember` do, where that is possible."""
        if not can_be_fused(share):
            return False
        factors = scale_fused(share, keep=self.on_factors is not None)
        if self.on_factors is not None:
            self.on_factors(share.parameters, factors, share.gamma)
        if share.weights:
            for parameter in share.parameters:
                self.state[parameter]["factor_step"] += 1
        return True

    def _scale(self, share: Share, factors: list[Tensor] | None) -> list[Tensor]:
        """Multiply gradients by their factors, in place. Returns the factors' averages, if there are any."""
        factors = factors_of(share) if factors is None else factors
        if self.on_factors is not None:
            self.on_factors(share.parameters, factors, share.gamma)
        factors = [factor.to(grad.dtype) for factor, grad in zip(factors, share.grads, strict=True)]
        if share.weights:
            factors = averaged(share, factors)
        torch._foreach_mul_(share.grads, factors)
        return factors if share.weights else []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _remember(self, shares: Sequence[Share], averages: Sequence[Sequence[Tensor]]) -> None:
        """Note the averages. Comes after the base's step: optimizers take a state that is not empty for their own."""
        for share, found in zip(shares, averages, strict=True):
            for parameter, average in zip(share.parameters, found, strict=True) if found else ():
                state = self.state[parameter]
                state["factor_avg"] = average
                state["factor_step"] = state.get("factor_step", 0) + 1
        self._parts.forget()


def _check(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse settings that cannot be meant."""
    if group.get("differentiable", defaults.get("differentiable")):
        raise ValueError("differentiable is True; expected False: a variance-reduced step cannot be differentiated")
    if not 0 <= group["gamma"] <= 1:
        raise ValueError(f"gamma is {group['gamma']!r}; expected a factor in [0, 1], e.g. 0.1")
    if not 0 <= group["beta3"] < 1:
        raise ValueError(f"beta3 is {group['beta3']!r}; expected a decay in [0, 1), e.g. 0.9")
    dtype = group["moments_dtype"]
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"moments_dtype is {dtype}; expected a floating-point dtype, e.g. torch.bfloat16, or None")
    if group["k"] is not None and group["k"] < MIN_PARTS:
        raise ValueError(f"k is {group['k']}; expected at least {MIN_PARTS} gradients a step: {HOW_TO_GET_MORE}")


def _layers(group: dict[str, Any], parameters: Sequence[Tensor]) -> list[str]:
    """The module each parameter belongs to."""
    names = {p: name.rpartition(".")[0] for p, name in zip(group["params"], group["param_names"], strict=True)}
    return [names[parameter] for parameter in parameters]


def _world_size() -> int:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()
