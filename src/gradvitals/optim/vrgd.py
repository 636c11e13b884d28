"""The mechanism that all variance-reduced optimizers share.

`GradientParts` collects the parts of a step's gradient, a rule turns their mean and variance into a factor for every
element, `VarianceReduced.step` multiplies ``.grad`` by the factors, and the base optimizer makes its step.
"""

from __future__ import annotations

import inspect
import sys
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradvitals import kernels
from gradvitals.functional import vrgd_scale_from_variance, wiener_scale
from gradvitals.kernels.tables import Addresses, Chunks
from gradvitals.optim.adamw import FactorsHook, empty_factors, new_factor_weights
from gradvitals.optim.parts import Block, GradientParts

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from gradvitals.optim.ranks import CommunicationHook, RankSums

# -- options --------------------------------------------------------------------------------------------------------

MIN_PARTS = 2
ENOUGH_PARTS = 6  # with fewer parts, r has no finite variance under pure noise; below 4 it has no finite mean either

HOW_TO_GET_MORE = (
    "split the batch: call backward() on several micro-batches before each step(), 8 for example; or, under "
    "DistributedDataParallel, make every rank a part with optimizer.use_ranks(model)"
)

Rule = Callable[[Tensor, Tensor, int, float], Tensor]
"""Returns a factor for every element of a tensor, from the mean and biased variance of its parts, k, and gamma."""

GammaSchedule = Callable[[int], float]
PaperGranularity = Literal["tensor", "layer", "row"]
WienerGranularity = Literal["element", "row", "tensor", "hierarchical"]
Granularity = PaperGranularity | WienerGranularity
GRANULARITIES: dict[str, tuple[str, ...]] = {"paper": get_args(PaperGranularity), "wiener": get_args(WienerGranularity)}
DEFAULT_GRANULARITY = {"paper": "tensor", "wiener": "hierarchical"}


class VROptions(TypedDict, total=False):
    """Options of every variance-reduced optimizer, besides its base's arguments. A group may set each of them."""

    gamma: float | GammaSchedule
    """Smallest factor, in [0, 1], or a schedule from the number of past steps to gamma. 1 is the base optimizer."""
    beta3: float
    """Decay of a moving average of the factors, in [0, 1); 0 keeps no average."""
    k: int | None
    """Number of gradients per step; any other number is an error. None accepts any number."""
    scale: str | Rule
    """"paper", "wiener", or a function of (mean, variance, k, gamma) for one tensor."""
    granularity: Granularity | None
    """What r is normalized over, or signal and noise are estimated over. None: "tensor"; for wiener "hierarchical"."""
    moments_dtype: torch.dtype | None
    """Dtype of the variance accumulators. None: float32, or float64 for float64 parameters."""


def check_rule(scale: str | Rule, granularity: str | None) -> None:
    """Raise if a rule or a granularity does not exist."""
    if callable(scale):
        if granularity is not None:
            raise ValueError(f"granularity is {granularity!r}, but scale is a function, which decides that itself")
        return
    if scale not in GRANULARITIES:
        raise ValueError(f"scale is {scale!r}; expected 'paper', 'wiener' or a function of (mean, variance, k, gamma)")
    if granularity is not None and granularity not in GRANULARITIES[scale]:
        choices = ", ".join(map(repr, GRANULARITIES[scale]))
        raise ValueError(f"granularity is {granularity!r}; expected one of {choices} for scale={scale!r}")


def check_group(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Raise if a setting of a parameter group makes no sense."""
    if group.get("differentiable", defaults.get("differentiable")):
        raise ValueError("differentiable is True; expected False: a variance-reduced step cannot be differentiated")
    if group["scale"] != "custom":
        check_rule(group["scale"], group["granularity"])
    gamma = group["gamma"]
    if not isinstance(gamma, (int, float)) or not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma!r}; expected a factor in [0, 1], e.g. 0.1")
    group["gamma"] = float(gamma)
    if not 0 <= group["beta3"] < 1:
        raise ValueError(f"beta3 is {group['beta3']!r}; expected a decay in [0, 1), e.g. 0.9")
    dtype = group["moments_dtype"]
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16):  # float16 underflows on squares
        raise ValueError(f"moments_dtype is {dtype!r}; expected torch.bfloat16, float32, float64, or None")
    if group["k"] is not None and group["k"] < MIN_PARTS:
        raise ValueError(f"k is {group['k']}; expected at least {MIN_PARTS} gradients per step: {HOW_TO_GET_MORE}")


# -- factors --------------------------------------------------------------------------------------------------------


@dataclass
class GradientBlock:
    """The gradients of one block of parameters, and what is needed to scale them."""

    parameters: list[Tensor]
    grads: list[Tensor]  # sums of `num_added` parts. They are scaled in place.
    noises: list[Tensor]  # summed squared deviations of `num_parts` parts; a value that is not positive means no noise
    num_added: int
    num_parts: int  # more than `num_added` if gradients are averages over ranks
    gamma: float
    rule: str | Rule
    granularity: str
    layers: list[str]
    averages: list[Tensor | None]
    """Moving averages of the factors, None before the first. Empty if the group keeps none."""
    weights: Sequence[float | Tensor]  # weights of the new factors in the averages
    foreach: bool
    block: Block | None  # the block, if all of its parameters have gradients


def _moments(block: GradientBlock, position: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of one tensor's parts."""
    noise = block.noises[position]
    wide = torch.promote_types(noise.dtype, torch.float32)
    return block.grads[position].to(wide) / block.num_added, noise.to(wide).clamp(min=0) / block.num_parts


def _factor(block: GradientBlock, mean: Tensor, variance: Tensor) -> Tensor:
    if callable(block.rule):
        factor: Any = block.rule(mean, variance, block.num_parts, block.gamma)
        if not isinstance(factor, Tensor) or factor.shape != mean.shape:
            given = f"shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else f"a {type(factor).__name__}"
            raise ValueError(f"scale returned {given}; expected a factor for every element, shape {tuple(mean.shape)}")
        # A user's rule need not handle zero variance: the factor is 1 there, as for the built-in rules.
        return torch.where(variance > 0, factor, 1.0).nan_to_num(nan=1.0)
    if block.rule == "wiener":
        level: Any = block.granularity
        return wiener_scale(mean, variance, block.num_parts, level=level, gamma=block.gamma)
    return vrgd_scale_from_variance(mean, variance, block.gamma, by_row=block.granularity == "row")


def factors_by_layer(blocks: Sequence[GradientBlock]) -> dict[int, list[Tensor]]:
    """Return the paper's factors with r divided by its mean over all tensors of a layer, across groups.

    Returns:
        The factors of each block with granularity "layer", by its index.
    """
    factors = {index: list(block.grads) for index, block in enumerate(blocks) if block.layers}
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for index in factors:
        for position, (layer, grad) in enumerate(zip(blocks[index].layers, blocks[index].grads, strict=True)):
            members.setdefault((layer, grad.device, grad.dtype), []).append((index, position))
    for places in members.values():
        moments = [_moments(blocks[index], position) for index, position in places]
        mean, variance = (torch.cat([tensor.flatten() for tensor in column]) for column in zip(*moments, strict=True))
        pieces = vrgd_scale_from_variance(mean, variance, 0.0).split([part.numel() for part, _ in moments])
        for (index, position), (part, _), piece in zip(places, moments, pieces, strict=True):
            factors[index][position] = piece.view(part.shape).clamp(min=blocks[index].gamma)
    return factors


def averaged(block: GradientBlock, factors: list[Tensor]) -> list[Tensor]:
    """Update the moving averages with this step's factors, in place, and return them.

    Factors become the average if there is none yet.
    """
    # A new average gets its own memory, laid out like the gradient.
    used = [
        torch.empty_like(grad).copy_(factor) if average is None else average.to(grad.dtype)
        for average, factor, grad in zip(block.averages, factors, block.grads, strict=True)
    ]
    for average, factor, weight in zip(used, factors, block.weights, strict=True):
        average.add_((factor - average) * weight)
    return used


# -- factors by kernels ---------------------------------------------------------------------------------------------


def scale_by_kernels(block: GradientBlock, *, keep: bool) -> list[Tensor] | None:
    """Multiply gradients by the paper's factors in place and update the averages; `keep` returns them for hooks.

    Returns:
        The factors, or an empty list; None if kernels cannot do it, and nothing was changed.
    """
    vrgd: Any = kernels.ready("vrgd")
    if vrgd is None or not _kernels_can_scale(block) or block.block is None:
        return None
    cache, device, factors = block.block.cache, block.grads[0].device, list[Tensor]()
    weight: Any = block.weights[0] if block.weights else 0.0
    try:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            if "chunks" not in cache:
                cache["chunks"] = Chunks([grad.numel() for grad in block.grads], device, vrgd.SPAN)
                cache |= {name: Addresses() for name in ("grads", "noises", "averages", "factors")}
            factors = empty_factors(block.grads) if keep else []
            lists: dict[str, Sequence[Any]] = {"grads": block.grads, "noises": block.noises}
            lists |= {"averages": block.averages, "factors": factors}
            vrgd.scale(
                cache["chunks"],
                **{name: cache[name].table(tensors) if tensors else None for name, tensors in lists.items()},
                dtype=block.grads[0].dtype,
                noise_dtype=block.noises[0].dtype,
                gamma=block.gamma,
                weight=weight,
                aligned=all(cache[name].aligned for name in lists),
            )
    except Exception as error:  # no compiler, an old device: whatever it is, torch can do the work
        kernels.give_up("vrgd", error, "variance-reduced steps continue")
        return None
    return factors


def _kernels_can_scale(block: GradientBlock) -> bool:
    if block.rule != "paper" or block.granularity != "tensor" or not block.foreach or block.block is None:
        return False
    grad, noise = block.grads[0], block.noises[0]
    if not kernels.on_device(grad) or not {grad.dtype, noise.dtype} <= set(kernels.DTYPES):
        return False
    averages = [average for average in block.averages if average is not None]
    if len(averages) != len(block.averages) or len(set(block.weights)) > 1:
        return False
    strides = block.block.cache.setdefault("strides", [noise.stride() for noise in block.noises])
    # This runs for every tensor in every step, so it makes few calls.
    return all(
        [tensor.stride() for tensor in tensors] == strides and all([tensor.dtype == grad.dtype for tensor in tensors])
        for tensors in (block.grads, averages)
        if tensors
    )


# -- the step -------------------------------------------------------------------------------------------------------


class VarianceReduced(torch.optim.Optimizer):
    """A mixin that scales every element of the gradient by how well the step's parts agree on it.

    A subclass names it first and the base optimizer second, and takes the arguments of both.
    """

    last_num_parts = 0
    """Number of gradients that the last step combined."""
    default_beta3 = 0.0

    def __init_subclass__(cls) -> None:
        """Show the arguments of the base and the options in the signature, for `help()` and completion."""
        if "__init__" not in vars(cls) and VarianceReduced in cls.__bases__[:-1]:
            base = inspect.signature(cls.__bases__[-1])
            kind = inspect.Parameter.KEYWORD_ONLY
            own = [inspect.Parameter(name, kind, default=value) for name, value in cls._default_options().items()]
            signature = base.replace(parameters=[*base.parameters.values(), *own])
            setattr(cls, "__signature__", signature)  # noqa: B010 - mypy knows no such attribute

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        options = self._set_options(options, inspect.signature(super().__init__).parameters)
        super().__init__(params, *args, **options)

    @classmethod
    def _default_options(cls) -> dict[str, Any]:
        own = {"gamma": 0.1, "beta3": cls.default_beta3, "k": None, "scale": "paper"}
        return own | {"granularity": None, "moments_dtype": None}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False: a GradScaler must decide on the host whether to step, or skipped steps would be counted."""
        return False

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, _: bool) -> None: ...

    def _set_options(self, options: dict[str, Any], base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Take the options of `VROptions` and return the rest. Must run before groups are added."""
        known = self._default_options()
        rest = {name: value for name, value in options.items() if name not in known}
        unknown = sorted(rest.keys() - (base or {}).keys())
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got unknown options: {', '.join(unknown)}; besides the arguments of its "
                f"base it takes {', '.join(known)}"
            )
        self._options = known | {name: value for name, value in options.items() if name in known}
        self._start()
        return rest

    def _start(self) -> None:
        self._parts = GradientParts()
        needs_norms = weakref.WeakMethod(self._needs_norms)
        self._parts.keeps_norms = lambda: (ask := needs_norms()) is not None and ask()
        self._ranks: RankSums | None = None
        self._trains_alone = False
        # Functions stay out of the groups, because groups are saved.
        self._schedules: dict[int, GammaSchedule] = {}
        self._rules: dict[int, Rule] = {}
        self._factors_hooks: OrderedDict[int, FactorsHook] = OrderedDict()
        self._without_average: list[Tensor] = []  # a step without gradients creates their averages
        self._warned: set[int] = set()
        self._has_scaled = False

    def register_factors_hook(self, hook: FactorsHook) -> RemovableHandle:
        """Call a function in each step with the rule's factors, before they enter a moving average.

        It is called several times per step, with some parameters at a time: ``hook(parameters, factors, gamma)``.
        """
        handle = RemovableHandle(self._factors_hooks)
        self._factors_hooks[handle.id] = hook
        return handle

    def _report_factors(self, parameters: Sequence[Tensor], factors: Sequence[Tensor], gamma: float) -> None:
        for hook in self._factors_hooks.values():
            hook(parameters, factors, gamma)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have its own settings."""
        index = len(self.param_groups)
        self._complete_group(param_group, index)
        self._add_to_base(param_group)
        self._follow(index)

    def _complete_group(self, group: dict[str, Any], index: int) -> None:
        """Fill in the settings that a group does not have, and check all of them."""
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
        """Raise if settings make no sense; the user may have changed them since the last step."""
        check_group(group, self.defaults)
        if group["granularity"] == "layer" and "param_names" not in group:
            raise ValueError('granularity is "layer", but parameters have no names: pass model.named_parameters()')

    def _needs_norms(self) -> bool:
        # The paper's rule does not change if gradients and deviations are multiplied together.
        return any(group["scale"] != "paper" for group in self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; it gets its own hooks and sums."""
        own = {"_options": self._options, "_schedules": self._schedules, "_rules": self._rules}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, or take over a loaded state."""
        if "_parts" not in self.__dict__:
            self._start()
        super().__setstate__(state)
        plain = {name: value for name, value in self._options.items() if not callable(value)}
        for index, group in enumerate(self.param_groups):  # a state that the base saved has none of these
            for name, value in ({"gamma": 0.1, "scale": "custom", "vr_steps": 0} | plain).items():
                group.setdefault(name, value)
            if index in self._rules:
                group["scale"] = "custom"
            elif group["scale"] == "custom":
                raise ValueError(
                    "the state was saved by an optimizer whose scale is a function, which cannot be saved; load it "
                    "into an optimizer that was built with that function as its scale"
                )
            self._follow(index)

    def graph_captured(self) -> None:
        """Note that a CUDA graph of all backward passes of a step was just captured; see `graph_replayed`."""
        self._parts.note_captured()

    def graph_replayed(self) -> None:
        """Count the parts of a replayed CUDA graph, which calls no hooks.

        Example:
            ::

                with torch.cuda.graph(graph):  # after a few ordinary steps, with gradients None
                    for inputs, targets in static_micro_batches:
                        loss_fn(model(inputs), targets).backward()
                optimizer.graph_captured()
                ...
                graph.replay()  # computes new gradients into the same memory: no zero_grad
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
            model: The wrapped model; or None if this process shares its gradients with no other.
            hook: Your own communication hook for the gradients, e.g. torch's ``bf16_compress_hook``.
            state: The state to call that hook with.

        Example:
            ``optimizer.use_ranks(model, hook=default_hooks.bf16_compress_hook)``
        """
        if model is None:
            self._trains_alone = True
            return
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            raise TypeError(f"use_ranks got a {type(model).__name__}; expected the DistributedDataParallel model")
        from gradvitals.optim.ranks import RankSums

        self._ranks = RankSums(model, self._parts, hook, state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients and discard the parts collected since the last step."""
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
            closure: Runs forward and backward for all parts, and returns the loss.

        Raises:
            RuntimeError: if there are fewer than 2 gradients, or not `k`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        blocks = self._gather(torch.compiler.is_compiling())
        if blocks is None:
            return loss
        by_layer = factors_by_layer(blocks)
        averages = [self._scale(block, by_layer.get(index)) for index, block in enumerate(blocks)]
        self._base_step()
        self._save_averages(blocks, averages)
        return loss

    def _base_step(self) -> None:
        step: Any = super().step
        function = step.__func__
        # torch wraps `step` of every class it has seen, to call hooks. They already run around this step.
        if getattr(function, "hooked", False):
            function = function.__wrapped__
        function(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather(self, compiling: bool) -> list[GradientBlock] | None:
        """Do the part of a step that `torch.compile` cannot. Return the gradients that remain to be scaled.

        None means that the whole step is done.
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
        if self._scale_and_step():
            self._save_averages([], [])
            return None
        found = [self._gradient_block(block) for block in self._parts.blocks]
        blocks = [block for block in found if block is not None and not self._scaled_by_kernels(block)]
        for block in blocks if compiling else ():  # a number that changes would recompile the step; a tensor does not
            block.weights = [torch.tensor(weight) for weight in block.weights]
        return blocks

    def _scale_and_step(self) -> bool:
        """Scale gradients and make the base's step in one, if possible. Otherwise do nothing and return False."""
        return False

    def _num_ranks(self) -> int:
        if self._ranks is not None:
            return self._ranks.world_size
        dist = torch.distributed
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if not self._trains_alone and ranks > 1:
            raise RuntimeError(
                f"torch.distributed has {ranks} ranks and the optimizer does not know how they share gradients: call "
                "optimizer.use_ranks(model) with the DistributedDataParallel model, or optimizer.use_ranks(None) if "
                "this process trains alone"
            )
        return 1

    def _has_enough_parts(self, num_ranks: int) -> bool:
        """Return whether gradients can be scaled. If not, the step is the base's; it raises if none was ever scaled."""
        found, groups = self.last_num_parts, self.param_groups
        where = f" ({self._num_local} on each of {num_ranks} ranks)" if num_ranks > 1 else ""
        for group in groups:
            if group["k"] not in (None, found):
                raise RuntimeError(
                    f"step() found {found} gradient{'' if found == 1 else 's'} since the last step{where}, but "
                    f"k = {group['k']}; call backward() that often, or remove k if the number changes"
                )
        if found >= ENOUGH_PARTS:
            return True
        if all(group["gamma"] == 1 for group in groups):
            return found >= MIN_PARTS
        if found < MIN_PARTS and not self._has_scaled:
            raise RuntimeError(
                f"step() found {found} gradient{'' if found == 1 else 's'} since the last step{where}; separating "
                f"signal from noise takes at least {MIN_PARTS}, better {ENOUGH_PARTS} or more: {HOW_TO_GET_MORE}"
            )
        if found not in self._warned:
            self._warned.add(found)
            _warn_of_few_parts(found, where)
        return found >= MIN_PARTS

    def _only_zeros(self) -> bool:
        """Return whether there are no gradients, or all are zero.

        torch.distributed.checkpoint makes such a step to create the state that it then loads into.
        """
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if any(bool(grad.any()) for grad in grads):
            return False
        parameters = [p for group in self.param_groups if group["beta3"] for p in group["params"]]
        self._without_average = [
            p for p in parameters if p.grad is not None and "factor_avg" not in self.state.get(p, {})
        ]
        return True

    def _gradient_block(self, block: Block) -> GradientBlock | None:
        pairs = zip(block.parameters, block.noises, strict=True)
        present = [(p, p.grad, noise) for p, noise in pairs if p.grad is not None]
        if not present:
            return None
        parameters = [p for p, _, _ in present]
        group, layers = self.param_groups[block.kind.group], list[str]()
        states = [self.state.get(parameter, {}) for parameter in parameters] if group["beta3"] else []
        if group["granularity"] == "layer":
            names = {p: name.rpartition(".")[0] for p, name in zip(group["params"], group["param_names"], strict=True)}
            layers = [names[parameter] for parameter in parameters]
        return GradientBlock(
            parameters=parameters,
            grads=[grad for _, grad, _ in present],
            noises=[noise for _, _, noise in present],
            num_added=self._num_local,
            num_parts=self.last_num_parts,
            gamma=group["gamma"],
            rule=self._rules[block.kind.group] if group["scale"] == "custom" else group["scale"],
            granularity=group["granularity"] or DEFAULT_GRANULARITY.get(group["scale"], ""),
            layers=layers,
            averages=[state.get("factor_avg") for state in states],
            weights=new_factor_weights(states, group["beta3"]),
            foreach=group.get("foreach") is not False,
            block=block if len(present) == len(block.parameters) else None,
        )

    def _scaled_by_kernels(self, block: GradientBlock) -> bool:
        """Do all that `_scale` and `_save_averages` do, if kernels can."""
        factors = scale_by_kernels(block, keep=bool(self._factors_hooks))
        if factors is None:
            return False
        self._report_factors(block.parameters, factors, block.gamma)
        if block.weights:
            for parameter in block.parameters:
                self.state[parameter]["factor_step"] += 1
        return True

    def _scale(self, block: GradientBlock, factors: list[Tensor] | None) -> list[Tensor]:
        """Multiply gradients by their factors, in place. Return the averages of the factors, if the group has any."""
        if factors is None:
            factors = [_factor(block, *_moments(block, position)) for position in range(len(block.grads))]
        self._report_factors(block.parameters, factors, block.gamma)
        factors = [factor.to(grad.dtype) for factor, grad in zip(factors, block.grads, strict=True)]
        if block.weights:
            factors = averaged(block, factors)
        torch._foreach_mul_(block.grads, factors)
        return factors if block.weights else []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _save_averages(self, blocks: Sequence[GradientBlock], averages: Sequence[Sequence[Tensor]]) -> None:
        """Put the averages into the state. Runs after the base's step, which initializes only an empty state."""
        for block, found in zip(blocks, averages, strict=True):
            for parameter, average in zip(block.parameters, found, strict=True) if found else ():
                state = self.state[parameter]
                state["factor_avg"] = average
                state["factor_step"] = state.get("factor_step", 0) + 1
        for parameter in self._without_average:
            self.state[parameter] |= {"factor_avg": torch.zeros_like(parameter), "factor_step": 0}
        self._without_average = []
        self._forget()


def _warn_of_few_parts(found: int, where: str) -> None:
    """Warn about a step of few gradients, at the line of the user's code that called it."""
    hint = "If it is the last one of an epoch, drop_last=True in the loader avoids it"
    if found < MIN_PARTS:
        text = f"a step of {found} gradient, which is not scaled{where}: there is nothing to compare it with. {hint}"
    else:
        text = (
            f"a step of {found} gradients{where}: with fewer than {ENOUGH_PARTS}, the signal-to-noise ratio varies so "
            f"widely that a few elements determine the factors of a whole tensor. {hint}; otherwise {HOW_TO_GET_MORE}"
        )
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "gradvitals.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
