"""What a script trains: which optimizers belong together, the model they step, and how many samples a step has."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules
from torch.nn.parallel import DataParallel, DistributedDataParallel

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
        """Whether two of the optimizers share a parameter: only a step shows which one is used."""
        stepped = [parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)]
        return len(set(map(id, stepped))) < len(stepped)

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> Found:
        """Returns the same model with this optimizer, without those that share parameters with it."""
        chosen, taken = [optimizer], set(map(id, parameters_of(optimizer)))
        for other in self.optimizers:
            own = set(map(id, parameters_of(other)))
            if other is not optimizer and taken.isdisjoint(own):
                chosen.append(other)
                taken |= own
        return Found(self.model, chosen, self.name, self.has_modules)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
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
            owned: Iterable[torch.Tensor | None] = module.__dict__.get("_parameters", {}).values()
            for child in children:
                if child is not None:
                    self._parents.setdefault(id(child), []).append(module)
            for parameter in owned:
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(module)

    def roots_of(self, parameters: Iterable[torch.Tensor]) -> dict[int, nn.Module]:
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
        return Found(root, optimizers, class_name(bare(root)), True)
    named: dict[str, nn.Module] = {}
    for root in map(bare, roots):
        name, number = class_name(root), 2
        while name in named:
            name, number = f"{class_name(root)}{number}", number + 1
        named[name] = root
    # A container that only gives them names; the modules stay as they are.
    return Found(nn.ModuleDict(named), optimizers, "+".join(named) or type(optimizers[0]).__name__, bool(named))


def distinct_name(found: Found, taken: Collection[str], variables: Mapping[str, object]) -> str:
    """Returns a name that distinguishes a model from the others of its script.

    It is the class, unless that is one of torch's own, such as Sequential, or taken: then the variable that holds the
    model, or else the class with a number.

    Args:
        found: The model.
        taken: Names of other models.
        variables: Global variables of the script. A model made inside a function is in none of them.
    """
    own = bare(found.model)
    if found.name not in taken and not type(own).__module__.startswith("torch."):
        return found.name
    for variable, value in variables.items():
        if variable not in taken and issubclass(type(value), nn.Module) and bare(value) is own:  # type: ignore[arg-type]
            return variable
    name, number = found.name, 2
    while name in taken:
        name, number = f"{found.name}-{number}", number + 1
    return name


def bare(module: nn.Module) -> nn.Module:
    """Returns the model inside DDP and torch.compile wrappers."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, (DistributedDataParallel, DataParallel)):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner


COUNTED_STEPS = 3
"""Steps to look at. Hooks on every module cost too much to keep."""


class SampleCount:
    """Counts the samples of the first steps of a model, and reports the number if it is the same in each.

    The number of samples is the first dimension of the tensors that the model is called with, if they agree on it and
    the model is called once per backward pass. Otherwise nothing is reported.

    Args:
        model: The model, or a module that contains it.
        report: Called once with the number of samples per step.
    """

    def __init__(self, model: nn.Module, report: Callable[[float], None]) -> None:
        self._parts = {id(part) for part in model.modules()}
        self._report = report
        self._depth = 0
        self._calls: list[int | None] = []
        self._samples: list[int | None] = []
        self._steps: list[int] = []
        self._started = False  # the model may have been called already in the current step
        self.in_backward = False
        """Whether a backward pass is running: activation checkpointing calls modules again in it."""
        self._handles: list[Any] = []
        if not _is_compiled():  # torch would compile the model again, with our hook in it
            self._handles = [
                modules.register_module_forward_pre_hook(self._before),
                modules.register_module_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]

    @property
    def is_counting(self) -> bool:
        """Whether the number may still be found."""
        return bool(self._handles)

    def after_backward(self) -> None:
        """A backward pass of the model is over."""
        if self._handles:
            self._samples.append(self._calls[0] if len(self._calls) == 1 else None)
            self._calls = []

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
        elif self._started:
            self.stop()
        self._started, self._samples = True, []
        if len(self._steps) == COUNTED_STEPS:
            self.stop()
            if len(set(self._steps)) == 1:
                self._report(float(self._steps[0]))

    def stop(self) -> None:
        """Remove the hooks."""
        while self._handles:
            handle = self._handles.pop()
            handle.remove()
            modules._global_forward_hooks_with_kwargs.pop(handle.id, None)  # torch does not remove it from here

    def _before(self, module: nn.Module, args: Any) -> None:
        self._depth += id(module) in self._parts

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if id(module) not in self._parts:
            return
        self._depth -= 1
        if self._depth <= 0:
            self._depth = 0
            if module.training and torch.is_grad_enabled() and not self.in_backward:
                self._calls.append(_first_dimension([*args, *kwargs.values()]))


def _first_dimension(inputs: list[Any]) -> int | None:
    sizes = {thing.shape[0] for thing in inputs if isinstance(thing, Tensor) and thing.dim() > 0}
    return int(sizes.pop()) if len(sizes) == 1 else None


def _is_compiled() -> bool:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters.get("frames"))
