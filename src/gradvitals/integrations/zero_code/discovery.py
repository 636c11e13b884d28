"""What a script trains: which optimizers belong together, and the model that owns their parameters."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from gradvitals.integrations.sharded import class_name


@dataclass(frozen=True)
class Found:
    """One model, and the optimizers that step it."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    name: str
    """The class of the model, or of several models that are trained as one."""
    has_modules: bool
    """Whether any module owns what is trained; an image that is optimized has no owner."""

    @property
    def is_ambiguous(self) -> bool:
        """Whether two of the optimizers have a parameter in common: only a step tells which one is used."""
        stepped = [parameter for optimizer in self.optimizers for parameter in parameters_of(optimizer)]
        return len(set(map(id, stepped))) < len(stepped)

    def stepped_by(self, optimizer: torch.optim.Optimizer) -> Found:
        """The same with this optimizer, and without those that it excludes."""
        chosen, taken = [optimizer], set(map(id, parameters_of(optimizer)))
        for other in self.optimizers:
            own = set(map(id, parameters_of(other)))
            if other is not optimizer and taken.isdisjoint(own):
                chosen.append(other)
                taken |= own
        return Found(self.model, chosen, self.name, self.has_modules)


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All it steps."""
    for group in optimizer.param_groups:
        yield from group["params"]


def find(optimizers: Sequence[torch.optim.Optimizer]) -> list[Found]:
    """The models that these optimizers step, in the order in which the optimizers were made.

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
        # By the type alone: asking the object itself could wake one that only pretends to be something.
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
        """The outermost modules that own these parameters, one for each parameter."""
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
    """Which of several modules that hold the same model training goes through: a wrapper, or the smallest of them."""
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
    # A module that only names them; they do not know of it.
    return Found(nn.ModuleDict(named), optimizers, "+".join(named) or type(optimizers[0]).__name__, bool(named))


def distinct_name(found: Found, taken: Collection[str], variables: Mapping[str, object]) -> str:
    """A name that tells a model from the others of its script.

    Its class, unless that is one of torch's own, such as Sequential, or another model has it: then the variable that
    holds it, or else the class with a number.

    Args:
        found: The model.
        taken: Names that other models have.
        variables: Those of the script, by name. A model made inside a function is in none of them.
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
    """A model without what is around it: DDP, torch.compile."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, (DistributedDataParallel, DataParallel)):
            inner = module.module
        if not isinstance(inner, nn.Module):
            return module
        module = inner
