"""Finds what a script trains: the optimizers that belong together, their model, and the samples per step."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves

from gradvitals.collect.wrapper import is_compiled
from gradvitals.distributed.shards import unwrapped
from gradvitals.integrations.backward import class_name


@dataclass(frozen=True)
class Found:
    """One model, and the optimizers that step it."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    name: str
    """The class of the model, or the classes of several models that are trained as one."""
    has_modules: bool
    """Whether a module owns the parameters; an image that is optimized has no owner."""

    @property
    def is_ambiguous(self) -> bool:
        """Whether only a step shows what is trained together.

        Two of the optimizers may share a parameter, or each may have a part of the model to itself.
        """
        stepped = [set(map(id, parameters_of(optimizer))) for optimizer in self.optimizers]
        if len(set().union(*stepped)) < sum(map(len, stepped)):
            return True
        parts = [set(map(id, part.parameters())) for part in self.model.modules()] if len(stepped) > 1 else []
        return bool(parts) and all(own in parts for own in stepped)

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> Found:
        """Returns what this optimizer steps now, without the others that share parameters with it or have no gradients.

        Layers that are trained one after the other have an optimizer each.
        """
        chosen, taken = [optimizer], set(map(id, parameters_of(optimizer)))
        for other in self.optimizers:
            own = {id(parameter): parameter for parameter in parameters_of(other)}
            if other is not optimizer and taken.isdisjoint(own) and any(p.grad is not None for p in own.values()):
                chosen.append(other)
                taken |= own.keys()
        found = replace(self, optimizers=chosen)
        return found if len(chosen) == len(self.optimizers) or not self.is_ambiguous else found.narrowed()

    def narrowed(self) -> Found:
        """Returns the smallest part of the model that has everything its optimizers step."""
        stepped = {id(parameter) for optimizer in self.optimizers for parameter in parameters_of(optimizer)}
        parts = [part for part in self.model.modules() if stepped <= set(map(id, part.parameters()))]
        if not self.has_modules or not parts:
            return self
        return replace(self, model=parts[-1], name=class_name(unwrapped(parts[-1])))


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yields every parameter that the optimizer steps."""
    for group in optimizer.param_groups:
        yield from group["params"]


def find(optimizers: Sequence[torch.optim.Optimizer]) -> list[Found]:
    """Returns the models that these optimizers step, in the order in which the optimizers were made.

    Optimizers that step parts of the same model belong together, and so do models that one optimizer steps.
    """
    family = _Family()
    clusters: list[tuple[list[torch.optim.Optimizer], dict[int, nn.Module]]] = []
    for optimizer in optimizers:
        together, roots = [optimizer], family.roots_of(parameters_of(optimizer))
        for cluster in [cluster for cluster in clusters if not roots.keys().isdisjoint(cluster[1])]:
            clusters.remove(cluster)
            together, roots = cluster[0] + together, cluster[1] | roots
        clusters.append((together, roots))
    return [_found(together, list(roots.values())) for together, roots in clusters]


class _Family:
    """All modules alive, and which one contains which."""

    def __init__(self) -> None:
        # issubclass(type(...)) because isinstance would trigger lazy proxies.
        modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
        self._parents: dict[int, list[nn.Module]] = {}
        self._owners: dict[int, list[nn.Module]] = {}
        for module in modules:
            children: Iterable[nn.Module | None] = module.__dict__.get("_modules", {}).values()
            owned: Iterable[Tensor | None] = module.__dict__.get("_parameters", {}).values()
            for child in children:
                if child is not None:
                    self._parents.setdefault(id(child), []).append(module)
            for parameter in owned:
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(module)

    def roots_of(self, parameters: Iterable[Tensor]) -> dict[int, nn.Module]:
        """Returns the outermost modules that own these parameters, one per parameter."""
        wanted = dict.fromkeys(id(parameter) for parameter in parameters)  # in order: all ranks must find the same
        outermost: dict[int, nn.Module] = {}
        owned: dict[int, set[int]] = {}
        for parameter in wanted:
            for root in self._outermost(self._owners.get(parameter, [])):
                outermost[id(root)] = root
                owned.setdefault(id(root), set()).add(parameter)
        chosen: dict[int, nn.Module] = {}
        left = set(wanted)
        while left and owned:
            best = max(owned, key=lambda root: (len(owned[root] & left), *_claim(outermost[root])))
            covered = owned.pop(best) & left
            if not covered:
                break
            chosen[best] = outermost[best]
            left -= covered
        return chosen

    def _outermost(self, modules: list[nn.Module]) -> Iterator[nn.Module]:
        seen: set[int] = set()
        waiting = list(modules)
        while waiting:
            module = waiting.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            parents = self._parents.get(id(module), [])
            waiting += parents
            if not parents:
                yield module


def _claim(module: nn.Module) -> tuple[bool, int]:
    """Ranks modules that hold the same parameters: training goes through a wrapper, or else the smallest of them."""
    wraps = isinstance(module, (DistributedDataParallel, DataParallel)) or hasattr(module, "_orig_mod")
    return wraps, -sum(1 for _ in module.modules())


def _found(optimizers: list[torch.optim.Optimizer], roots: list[nn.Module]) -> Found:
    if len(roots) == 1:
        root = roots[0].module if isinstance(roots[0], DataParallel) else roots[0]
        return Found(root, optimizers, class_name(unwrapped(root)), True)
    named: dict[str, nn.Module] = {}
    shown, variables = [], script_variables()
    for root in map(unwrapped, roots):
        variable = variable_of(root, variables) if is_from_torch(root) else None
        own = variable if variable is not None and not hasattr(nn.ModuleDict, variable) else class_name(root)
        name, number = own, 2
        while name in named:
            name, number = f"{own}{number}", number + 1
        named[name] = root
        shown.append(name if own == variable or not is_from_torch(root) else described(root))
    # A container that only gives them names; the modules stay as they are.
    return Found(nn.ModuleDict(named), optimizers, "+".join(shown) or type(optimizers[0]).__name__, bool(named))


def is_from_torch(module: nn.Module) -> bool:
    """Returns whether a module is of one of torch's own classes, whose name says little."""
    is_shard = class_name(module) != type(module).__name__  # `fully_shard` makes a class of its own
    return type(module).__module__.startswith("torch.") and not is_shard


def described(module: nn.Module) -> str:
    """Returns the class of a module, and the number of layers of a bare container: ``Sequential of 5 layers``."""
    if type(module) not in (nn.Sequential, nn.ModuleList, nn.ModuleDict):
        return class_name(module)
    count = len(list(module.children()))
    return f"{class_name(module)} of {count} layer{'' if count == 1 else 's'}"


def script_variables() -> dict[str, object]:
    """Returns the variables of the script by their names: its global ones, and those of its running functions."""
    found, frame = dict(vars(sys.modules["__main__"])), sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_globals.get("__name__") == "__main__":
            found = {**frame.f_locals, **found}
    return found


def variable_of(module: nn.Module, variables: Mapping[str, object]) -> str | None:
    """Returns the name of the variable that holds a module, if one does."""
    modules = ((name, value) for name, value in variables.items() if issubclass(type(value), nn.Module))
    return next((name for name, value in modules if unwrapped(value) is module), None)  # type: ignore[arg-type]


def distinct_name(found: Found, taken: Collection[str], variables: Mapping[str, object]) -> str:
    """Returns a name that distinguishes a model from the others of its script.

    It is the class, unless that is one of torch's own, such as Sequential, or taken: then the variable that holds the
    model, or else the class with the number of layers of a container, and with a number if that is taken.

    Args:
        found: The model.
        taken: Names of other models.
        variables: Variables of the script.
    """
    own = unwrapped(found.model)
    if found.name not in taken and not is_from_torch(own):
        return found.name
    variable = variable_of(own, {name: value for name, value in variables.items() if name not in taken})
    if variable is not None:
        return variable
    plain = described(own) if found.name == class_name(own) else found.name
    name, number = plain, 2
    while name in taken:
        name, number = f"{plain}-{number}", number + 1
    return name


COUNTED_STEPS = 3
"""Steps to look at. Hooks on every module cost too much to keep."""


class SampleCount:
    """Counts the samples of the first steps of a model, and reports those of a step if steps or passes are alike.

    The number of samples is the first dimension of the tensors that the model is called with, if they agree on it and
    each backward pass reaches one call of the model. Otherwise nothing is reported.

    Args:
        model: The model, or a module that contains it.
        report: Called once with the number of samples per step, and that per backward pass if it was always the same.
    """

    def __init__(self, model: nn.Module, report: Callable[[float, float | None], None]) -> None:
        self._parts = {id(part) for part in model.modules()}
        self._report = report
        self._depth = self._num_calls = 0
        self._reached: dict[int, int | None] = {}
        """The calls that the backward pass in progress has reached, with their samples."""
        self._samples: list[int | None] = []
        self._steps: list[int] = []
        self._passes: set[int] = set()
        self._started = False  # the model may have been called already in the current step
        self.in_backward = False
        """Whether a backward pass is running: activation checkpointing calls modules again in it."""
        self._handles: list[Any] = []
        if not is_compiled():  # torch would compile the model again, with our hook in it
            self._handles = [
                modules.register_module_forward_pre_hook(self._before),
                modules.register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]

    @property
    def is_counting(self) -> bool:
        """Whether the number may still be found."""
        return bool(self._handles)

    def after_backward(self, *, counts: bool) -> None:
        """A backward pass of the model is over; one that does not count had samples that were counted before."""
        if self._handles and counts:
            self._samples.append(next(iter(self._reached.values())) if len(self._reached) == 1 else None)
        self._reached = {}

    def forget(self) -> None:
        """The backward pass that has just run is the first of its step; ignore those before."""
        self._samples = []

    def after_step(self) -> None:
        """An optimizer of the model has stepped."""
        samples = [size for size in self._samples if size is not None]
        if not self._handles or not self._samples:
            return
        if self._started and len(samples) == len(self._samples):
            self._steps.append(sum(samples))
            self._passes.update(samples)
        elif self._started:
            self.stop()
        self._started, self._samples = True, []
        if len(self._steps) == COUNTED_STEPS:
            self.stop()
            per_pass = float(*self._passes) if len(self._passes) == 1 else None
            if per_pass is not None or len(set(self._steps)) == 1:
                self._report(float(max(self._steps)), per_pass)

    def stop(self) -> None:
        """Remove the hooks."""
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            modules._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch does not remove it from here

    def _before(self, module: nn.Module, args: Any) -> None:
        self._depth += id(module) in self._parts

    def _after(self, module: nn.Module, args: Any, *rest: Any) -> None:
        kwargs, output = rest if len(rest) == 2 else ({}, rest[0])  # torch leaves `kwargs` out if the call raised
        if id(module) not in self._parts:
            return
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            if torch.is_grad_enabled() and not self.in_backward:
                self._num_calls += 1
                inputs = [thing for thing in (*args, *kwargs.values()) if isinstance(thing, Tensor) and thing.dim() > 0]
                sizes = {thing.shape[0] for thing in inputs}
                self._follow(self._num_calls, int(sizes.pop()) if len(sizes) == 1 else None, output)

    def _follow(self, call: int, samples: int | None, output: Any) -> None:
        """Note when a backward pass reaches a call through its output: a loop may call a model to act, or to log."""

        def arrived(grad: Tensor) -> None:
            self._reached[call] = samples

        outputs = vars(output).values() if hasattr(output, "__dict__") else [output]
        for leaf in tree_leaves([*outputs, output]):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(arrived)
