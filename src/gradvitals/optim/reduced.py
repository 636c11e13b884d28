"""What all variance-reduced optimizers share: collect parts of a batch, scale the gradient, then the base's step."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradvitals.optim.blocks import Block, in_memory_order
from gradvitals.optim.factors import (
    DEFAULT_GRANULARITY,
    Rule,
    Share,
    averaged,
    check_rule,
    factors_of,
    factors_of_layers,
    layers_of,
    weights_of,
)
from gradvitals.optim.fused import can_be_fused, scale_fused
from gradvitals.optim.options import (
    ENOUGH_PARTS,
    MIN_PARTS,
    FactorsHook,
    GammaSchedule,
    VROptions,
    check_announced,
    check_group,
    too_few_parts,
    warn_of_few_parts,
    world_size,
)
from gradvitals.optim.parts import GradientParts

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from gradvitals.optim.ranks import CommunicationHook, RankSums


class VarianceReduced(torch.optim.Optimizer):
    """Scales every element of the gradient by how well the parts of the batch agree on it, before the base's step."""

    last_num_parts = 0
    """Gradients the last step was made of."""
    default_beta3 = 0.0

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """No: a gradient scaler is to decide on the host whether to step, or skipped steps would be counted."""
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None: ...

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
        needs_norms = weakref.WeakMethod(self._needs_norms)
        self._parts.keeps_norms = lambda: (ask := needs_norms()) is not None and ask()
        self._ranks: RankSums | None = None
        self._alone = False
        # Functions stay out of the groups, which are saved.
        self._schedules: dict[int, GammaSchedule] = {}
        self._rules: dict[int, Rule] = {}
        self._factors_hooks: OrderedDict[int, FactorsHook] = OrderedDict()
        self._unmade: list[Tensor] = []  # averages that a step without gradients is to begin
        self._warned: set[int] = set()
        self._has_scaled = False

    def register_factors_hook(self, hook: FactorsHook) -> RemovableHandle:
        """Have a function called in each step with the rule's factors, before any moving average of them.

        It is called several times a step, with some parameters at a time: ``hook(parameters, factors, gamma)``.
        """
        handle = RemovableHandle(self._factors_hooks)
        self._factors_hooks[handle.id] = hook
        return handle

    def _tell_factors(self, parameters: Sequence[Tensor], factors: Sequence[Tensor], gamma: float) -> None:
        for hook in self._factors_hooks.values():
            hook(parameters, factors, gamma)

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
            group["gamma"] = group["gamma"](0)
        if callable(group["scale"]):
            check_rule(group["scale"], group["granularity"])
            self._rules[index] = group["scale"]
            group["scale"] = "custom"
        check_group(group, self.defaults)

    def _add_to_base(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)

    def _follow(self, index: int) -> None:
        group = self.param_groups[index]
        self._parts.follow(group["params"], group=index, dtype=group["moments_dtype"])
        self._check(group)

    def _check(self, group: dict[str, Any]) -> None:
        """Refuse settings that cannot be meant; they may have been changed by hand."""
        check_group(group, self.defaults)
        if group["granularity"] == "layer" and "param_names" not in group:
            raise ValueError('granularity is "layer", but parameters have no names: pass model.named_parameters()')

    def _needs_norms(self) -> bool:
        # The paper's rule does not change when gradients and deviations are multiplied together.
        return any(group["scale"] != "paper" for group in self.param_groups)

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

    def graph_captured(self) -> None:
        """Note that a CUDA graph was just captured of all backward passes of a step; see `graph_replayed`."""
        self._parts.note_captured()

    def graph_replayed(self) -> None:
        """Count the parts of a CUDA graph that was replayed: no hook is called then.

        Example:
            ::

                with torch.cuda.graph(graph):  # after a few ordinary steps, with gradients None
                    for inputs, targets in static_micro_batches:
                        loss_fn(model(inputs), targets).backward()
                optimizer.graph_captured()
                ...
                graph.replay()  # computes the same gradients anew, into the same memory: no zero_grad
                optimizer.graph_replayed()
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
        if shares is None:
            return loss
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
    def _gather(self, compiling: bool) -> list[Share] | None:
        """Everything in a step that is not torch's arithmetic on gradients. Returns what is left to be scaled, if any.

        None says that the whole step has been made.
        """
        self._parts.settle()
        for index, group in enumerate(self.param_groups):
            if index in self._schedules:
                group["gamma"] = float(self._schedules[index](group["vr_steps"]))
            self._check(group)
        num_ranks = self._num_ranks()
        self._num_local = self._parts.num_parts
        self.last_num_parts = self._num_local * num_ranks
        if self.last_num_parts == 0 and self._only_zeros():
            return []
        enough = self._has_enough_parts(num_ranks)
        for group in self.param_groups:
            group["vr_steps"] += 1
        if not enough:
            return []
        self._has_scaled = True
        if self._ranks is not None:
            self._ranks.finish()
        else:
            self._parts.complete(self._num_local)
        if self._step_at_once():
            self._remember([], [])
            return None
        shares = [self._share(block, compiling) for block in self._parts.blocks]
        return [share for share in shares if share is not None and not self._scale_fused(share)]

    def _step_at_once(self) -> bool:
        """Scale gradients and make the base's step in one, where that can be done; else do nothing."""
        return False

    def _num_ranks(self) -> int:
        if self._ranks is not None:
            return self._ranks.world_size
        if not self._alone and (ranks := world_size()) > 1:
            raise RuntimeError(
                f"torch.distributed has {ranks} ranks and the optimizer does not know how they share gradients: call "
                "optimizer.use_ranks(model) with the DistributedDataParallel model, or optimizer.use_ranks(None) if "
                "this process trains by itself"
            )
        return 1

    def _has_enough_parts(self, num_ranks: int) -> bool:
        """Whether gradients can be scaled. If not, this step is the base's; or an error, if none ever could be."""
        found, groups = self.last_num_parts, self.param_groups
        where = f" ({self._num_local} on each of {num_ranks} ranks)" if num_ranks > 1 else ""
        check_announced(found, where, groups)
        if found >= ENOUGH_PARTS:
            return True
        if all(group["gamma"] == 1 for group in groups):
            return found >= MIN_PARTS
        if found < MIN_PARTS and not self._has_scaled:
            raise RuntimeError(too_few_parts(found, where))
        if found not in self._warned:
            self._warned.add(found)
            warn_of_few_parts(found, where)
        return found >= MIN_PARTS

    def _only_zeros(self) -> bool:
        """Whether there are no gradients, or all are zero.

        Checkpoints are prepared so: by a step without effect that makes the state to be loaded into.
        """
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(bool(grad.any()) for grad in grads):
            return False
        parameters = [p for group in self.param_groups if group["beta3"] for p in group["params"]]
        self._unmade = [p for p in parameters if p.grad is not None and "factor_avg" not in self.state.get(p, {})]
        return True

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
        weights = weights_of(states, beta3)
        return Share(
            parameters=parameters,
            grads=[grad for grad in grads if grad is not None],
            noises=noises,
            flat_noise=block.flat if whole else torch.cat([in_memory_order(noise) for noise in noises]),
            num_added=self._num_local,
            num_parts=self.last_num_parts,
            gamma=group["gamma"],
            rule=self._rules[block.kind.group] if group["scale"] == "custom" else group["scale"],
            granularity=group["granularity"] or DEFAULT_GRANULARITY.get(group["scale"], ""),
            layers=layers_of(group, parameters) if group["granularity"] == "layer" else [],
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
        factors = scale_fused(share, keep=bool(self._factors_hooks))
        if factors is None:
            return False
        self._tell_factors(share.parameters, factors, share.gamma)
        if share.weights:
            for parameter in share.parameters:
                self.state[parameter]["factor_step"] += 1
        return True

    def _scale(self, share: Share, factors: list[Tensor] | None) -> list[Tensor]:
        """Multiply gradients by their factors, in place. Returns the factors' averages, if there are any."""
        factors = factors_of(share) if factors is None else factors
        self._tell_factors(share.parameters, factors, share.gamma)
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
        for parameter in self._unmade:
            self.state[parameter] |= {"factor_avg": torch.zeros_like(parameter), "factor_step": 0}
        self._unmade = []
        self._forget()
