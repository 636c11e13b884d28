"""VRGD."""

from __future__ import annotations

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
from gradvitals.kernels.tables import ALIGNMENT, Addresses, Cut
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
FactorsHook = Callable[[Sequence[Tensor], Sequence[Tensor], float], object]
"""Called with some parameters, the factors of their elements by the rule, and gamma."""


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


def check_group(group: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuse settings that cannot be meant."""
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
    if dtype not in (None, torch.float32, torch.float64, torch.bfloat16):  # squares are too small for float16
        raise ValueError(f"moments_dtype is {dtype!r}; expected torch.bfloat16, float32, float64, or None")
    if group["k"] is not None and group["k"] < MIN_PARTS:
        raise ValueError(f"k is {group['k']}; expected at least {MIN_PARTS} gradients a step: {HOW_TO_GET_MORE}")


def check_announced(found: int, where: str, groups: Sequence[dict[str, Any]]) -> None:
    """Refuse a number of gradients that is not the announced one."""
    for group in groups:
        if group["k"] not in (None, found):
            raise RuntimeError(
                f"step() found {found} gradients since the last step{where}, but k = {group['k']} was announced; "
                "make as many backward() calls, or leave k out where the number changes"
            )


def too_few_parts(found: int, where: str) -> str:
    """What to say to a loop that does not divide its batches."""
    return (
        f"step() found {found} gradient{'' if found == 1 else 's'} since the last step{where}; signal and noise "
        f"are told apart by comparing at least {MIN_PARTS}, better {ENOUGH_PARTS} or more: {HOW_TO_GET_MORE}"
    )


def warn_of_few_parts(found: int, where: str) -> None:
    """Say what is wrong with a step of few gradients, to whoever called it."""
    rest = "If it is the rest of an epoch, drop_last=True of the loader avoids it"
    if found < MIN_PARTS:
        text = f"a step of {found} gradient, which is not scaled{where}: there is nothing to compare it with. {rest}"
    else:
        text = (
            f"a step of {found} gradients{where}: with fewer than {ENOUGH_PARTS} the ratio of signal to noise scatters "
            f"so widely that a few elements decide for a whole tensor. {rest}; else {HOW_TO_GET_MORE}"
        )
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "gradvitals.")):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)


def world_size() -> int:
    """Processes that train together, whether or not they share gradients."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


Rule = Callable[[Tensor, Tensor, int, float], Tensor]
"""A factor for every element of a tensor, from the mean and biased variance of its parts, their number, and gamma."""

PaperGranularity = Literal["tensor", "layer", "row"]
WienerGranularity = Literal["element", "row", "tensor", "hierarchical"]
Granularity = PaperGranularity | WienerGranularity

GRANULARITIES: dict[str, tuple[str, ...]] = {"paper": get_args(PaperGranularity), "wiener": get_args(WienerGranularity)}
DEFAULT_GRANULARITY = {"paper": "tensor", "wiener": "hierarchical"}


def check_rule(scale: str | Rule, granularity: str | None) -> None:
    """Refuse a rule or a granularity that there is not, with the names of those there are."""
    if callable(scale):
        if granularity is not None:
            raise ValueError(f"granularity is {granularity!r}, but scale is a function, which decides that itself")
        return
    if scale not in GRANULARITIES:
        raise ValueError(f"scale is {scale!r}; expected 'paper', 'wiener' or a function of (mean, variance, k, gamma)")
    if granularity is not None and granularity not in GRANULARITIES[scale]:
        choices = ", ".join(map(repr, GRANULARITIES[scale]))
        raise ValueError(f"granularity is {granularity!r}; expected one of {choices} for scale={scale!r}")


@dataclass
class Share:
    """Some gradients of one group, and what is needed to scale them."""

    parameters: list[Tensor]
    grads: list[Tensor]
    """Sums of `num_added` parts, which are scaled in place."""
    noises: list[Tensor]
    """Summed squared deviations of `num_parts` parts; none where not positive."""
    flat_noise: Tensor
    """The same one after the other."""
    num_added: int
    num_parts: int
    """More than `num_added` where gradients are averages over ranks."""
    gamma: float
    rule: str | Rule
    granularity: str
    layers: list[str]
    averages: list[Tensor | None]
    """Moving averages of the factors, None where there is none yet. Empty where none are kept."""
    weights: list[float]
    """Of the new factors in the averages."""
    compiled_weights: list[Tensor]
    """The same, where the step is compiled."""
    at_once: bool
    block: Block | None
    """Whose parameters these are, where none is missing."""


def factors_of(share: Share) -> list[Tensor]:
    """The factor of every element, by the share's rule."""
    if share.rule == "paper" and share.granularity == "tensor" and share.at_once and not torch.compiler.is_compiling():
        return paper_factors_at_once(share)
    return [_factor(share, *_moments(share, position)) for position in range(len(share.grads))]


def _moments(share: Share, position: int) -> tuple[Tensor, Tensor]:
    """The mean and the biased variance of a tensor's parts."""
    noise = share.noises[position]
    wide = torch.promote_types(noise.dtype, torch.float32)
    return share.grads[position].to(wide) / share.num_added, noise.to(wide).clamp(min=0) / share.num_parts


def _factor(share: Share, mean: Tensor, variance: Tensor) -> Tensor:
    if callable(share.rule):
        factor: Any = share.rule(mean, variance, share.num_parts, share.gamma)
        if not isinstance(factor, Tensor) or factor.shape != mean.shape:
            given = f"shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else f"a {type(factor).__name__}"
            raise ValueError(f"scale returned {given}; expected a factor for every element, shape {tuple(mean.shape)}")
        # What holds for every rule need not be in each: without variance there is nothing to divide by.
        return torch.where(variance > 0, factor, 1.0).nan_to_num(nan=1.0)
    if share.rule == "wiener":
        level: Any = share.granularity
        return wiener_scale(mean, variance, share.num_parts, level=level, gamma=share.gamma)
    return vrgd_scale_from_variance(mean, variance, share.gamma, by_row=share.granularity == "row")


def averaged(share: Share, factors: list[Tensor]) -> list[Tensor]:
    """Take the factors into their moving averages, in place, and return those.

    The averages are kept bias-corrected: with weights (1 - beta) / (1 - beta^t) they are what a moving average that
    began at zero is after division by 1 - beta^t.

    Args:
        share: has the averages.
        factors: of this step; they become the average where there is none.
    """
    # A first average is laid out like the gradient and by itself: factors are pieces of one large tensor.
    used = [
        torch.empty_like(grad).copy_(factor) if average is None else average.to(grad.dtype)
        for average, factor, grad in zip(share.averages, factors, share.grads, strict=True)
    ]
    if share.compiled_weights:
        for average, factor, part in zip(used, factors, share.compiled_weights, strict=True):
            average.add_((factor - average) * part)
        return used
    for weight in set(share.weights):  # one, unless parameters were added or had no gradient at times
        alike = [i for i, other in enumerate(share.weights) if other == weight]
        torch._foreach_lerp_([used[i] for i in alike], [factors[i] for i in alike], weight)
    return used


def weights_of(states: Sequence[Mapping[str, Any]], beta3: float) -> list[float]:
    """Of the new factors in each parameter's moving average."""
    steps = [state.get("factor_step", 0) + 1 for state in states]
    by_step = {step: (1 - beta3) / (1 - beta3**step) for step in set(steps)}
    return [by_step[step] for step in steps]


def layers_of(group: dict[str, Any], parameters: Sequence[Tensor]) -> list[str]:
    """The module each parameter belongs to."""
    names = {p: name.rpartition(".")[0] for p, name in zip(group["params"], group["param_names"], strict=True)}
    return [names[parameter] for parameter in parameters]


def factors_of_layers(shares: Sequence[Share]) -> dict[int, list[Tensor]]:
    """The paper's factors where r is divided by its mean over all tensors of a layer, whatever group they are in.

    Returns:
        For the index of each share that is to be treated so, its factors.
    """
    factors = {index: list(share.grads) for index, share in enumerate(shares) if share.layers}
    members: dict[Hashable, list[tuple[int, int]]] = {}
    for index in factors:
        for position, (layer, grad) in enumerate(zip(shares[index].layers, shares[index].grads, strict=True)):
            members.setdefault((layer, grad.device, grad.dtype), []).append((index, position))
    for places in members.values():
        moments = [_moments(shares[index], position) for index, position in places]
        mean, variance = (torch.cat([tensor.flatten() for tensor in column]) for column in zip(*moments, strict=True))
        pieces = vrgd_scale_from_variance(mean, variance, 0.0).split([part.numel() for part, _ in moments])
        for (index, position), (part, _), piece in zip(places, moments, pieces, strict=True):
            factors[index][position] = piece.view(part.shape).clamp(min=shares[index].gamma)
    return factors


def paper_factors_at_once(share: Share) -> list[Tensor]:
    """The paper's factors of all tensors, the same as `vrgd_scale_from_variance` of each, in few operations."""
    sizes = [grad.numel() for grad in share.grads]
    noise = share.flat_noise
    flats = [_flat(grad, like) for grad, like in zip(share.grads, share.noises, strict=True)]
    wide = torch.promote_types(noise.dtype, torch.float32)
    ratio = (flats[0] if len(flats) == 1 else torch.cat(flats)).to(wide).square().div_(noise)
    counted = (noise > 0) & torch.isfinite(ratio)
    inverses = _sums(counted.to(wide).split(sizes)) / _sums(torch.where(counted, ratio, 0.0).split(sizes))
    pieces = ratio.split(sizes)
    torch._foreach_mul_(pieces, inverses.unbind())
    ratio.clamp_(share.gamma, 1.0).masked_fill_(~counted, 1.0).nan_to_num_(nan=1.0)
    return [
        ratio.as_strided(like.shape, like.stride(), piece.storage_offset())
        for piece, like in zip(pieces, share.noises, strict=True)
    ]


def _flat(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient's elements in the order in which another tensor has them in memory."""
    if grad.stride() != like.stride():
        grad = torch.empty_like(like, dtype=grad.dtype).copy_(grad)
    return in_memory_order(grad)


def _sums(tensors: Sequence[Tensor]) -> Tensor:
    """Sums of tensors that have no negative elements: their 1-norms, which foreach has on a GPU."""
    if tensors[0].is_cuda:
        return torch.stack(torch._foreach_norm(list(tensors), 1))
    return torch.stack([tensor.sum() for tensor in tensors])


def can_be_fused(share: Share) -> bool:
    """Whether the kernels know the share's rule, and all its tensors lie in memory as they need it."""
    if share.rule != "paper" or share.granularity != "tensor" or not share.at_once or share.block is None:
        return False
    grad, noise, cache = share.grads[0], share.noises[0], share.block.cache
    if not kernels.on_device(grad) or not {grad.dtype, noise.dtype} <= set(kernels.DTYPES):
        return False
    if kernels.ready("vrgd") is None or len(set(share.weights)) > 1:
        return False
    averages = [average for average in share.averages if average is not None]
    if len(averages) != len(share.averages):
        return False
    strides = cache.setdefault("strides", [noise.stride() for noise in share.noises])
    return all(_lie_well(tensors, strides, grad.dtype) for tensors in (share.grads, averages) if tensors)


def _lie_well(tensors: list[Tensor], strides: list[tuple[int, ...]], dtype: torch.dtype) -> bool:
    # In every step, for every tensor: as few calls as can be.
    return [tensor.stride() for tensor in tensors] == strides and all([tensor.dtype == dtype for tensor in tensors])


def scale_fused(share: Share, *, keep: bool) -> list[Tensor] | None:
    """Multiply gradients by their factors in place and take those into the averages.

    Returns:
        The factors, where they are to be kept; None where the kernels cannot be compiled, and nothing was done.
    """
    try:
        return _scale_fused(share, keep)
    except Exception as error:  # no compiler, a device that is too old: whatever it is, torch can do without
        kernels.give_up("vrgd", error, "variance-reduced steps go on")
        return None


def _scale_fused(share: Share, keep: bool) -> list[Tensor]:
    vrgd: Any = kernels.ready("vrgd")
    assert share.block is not None
    cache, device = share.block.cache, share.grads[0].device
    with torch.cuda.device(device if device.type == "cuda" else -1):
        if "cut" not in cache:
            cache["cut"] = Cut([grad.numel() for grad in share.grads], device, vrgd.SPAN)
            cache |= {name: Addresses() for name in ("grads", "noises", "averages", "factors")}
        factors = room_for_factors(share.grads) if keep else []
        lists: dict[str, Sequence[Any]] = {"grads": share.grads, "noises": share.noises}
        lists |= {"averages": share.averages, "factors": factors}
        tables = {name: cache[name].table(tensors) if tensors else None for name, tensors in lists.items()}
        vrgd.scale(
            cache["cut"],
            **tables,
            dtype=share.grads[0].dtype,
            noise_dtype=share.noises[0].dtype,
            gamma=share.gamma,
            weight=share.weights[0] if share.weights else 0.0,
            aligned=all(cache[name].aligned for name in lists),
        )
    return factors


def room_for_factors(grads: Sequence[Tensor]) -> list[Tensor]:
    """A tensor in float32 for each gradient, laid out like it where that has no gaps, in one piece of memory."""
    starts, first = [], 0
    for grad in grads:
        starts.append(first)
        first += -(-grad.numel() // ALIGNMENT) * ALIGNMENT
    flat = torch.empty(first, dtype=torch.float32, device=grads[0].device)
    return [flat.as_strided(grad.shape, grad.stride(), start) for grad, start in zip(grads, starts, strict=True)]


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
