"""Multipliers come onto the weights of a model, and go off them again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, get_args

import torch
from torch import nn
from torch.nn.utils import parametrize

from gradvitals.errors import GradvitalsError, expect
from gradvitals.multipliers.checkpoints import fit_checkpoint
from gradvitals.multipliers.parametrization import Kind, Multiplier

Where = str | Iterable[str] | Callable[[str, nn.Parameter], bool]
Owners = list[tuple[nn.Module, str]]


def attach(model: nn.Module, where: Where | None = None, kind: Kind = "scalar") -> tuple[str, ...]:
    """Give weights of a model learnable multipliers, all 1 at first. Do it before the optimizer is made.

    The model computes what it did. Its parameters have other names from here on, as with every torch parametrization:
    ``fc.weight`` is ``fc.parametrizations.weight.original``, beside ``fc.parametrizations.weight.0.scale``. A
    checkpoint from before can still be loaded: what it has no multipliers for starts at 1. A weight that several
    modules share (tied weights) gets one multiplier in all of them and stays tied.

    Args:
        model: Is changed.
        where: A regular expression that is looked for in the names of weights of two or more dimensions; or names of
            parameters, also as `suggest` returns them; or a function of name and parameter. None takes what is called
            a weight (``weight``, ``in_proj_weight``), has two or more dimensions, is trained and has no parametrization
            yet, but not the weights of norms and of embeddings, and what is tied to them.
        kind: ``"scalar"``, ``"row"``, ``"column"`` or ``"both"``. Rows are the first dimension: of a linear layer the
            outputs. The paper advises against rows on the output head of a language model.

    Returns:
        The names, as they were, of the weights that have one now.

    Raises:
        GradvitalsError: when nothing is chosen, a name is not there, a chosen weight has a parametrization already, or
            has no rows and columns and the kind wants them.

    Example:
        >>> import gradvitals as gv
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> gv.multipliers.attach(model, where="^0", kind="both")
        ('0.weight',)
        >>> [name for name, _ in gv.multipliers.named_multipliers(model)]
        ['0.parametrizations.weight.0.row', '0.parametrizations.weight.0.column']
        >>> optimizer = torch.optim.AdamW(gv.multipliers.param_groups(model), lr=1e-3, weight_decay=0.1)
    """
    expect(kind in get_args(Kind), "kind", kind, f"one of {', '.join(get_args(Kind))}")
    places = _places(model)
    names = _chosen(places, where)
    for name in names:
        weight, owners, _ = places[name]
        if weight.dim() < 2 and kind != "scalar":
            raise GradvitalsError(
                f"{name} has shape {tuple(weight.shape)}, and kind is {kind!r}; expected two dimensions or more, or "
                "kind='scalar'"
            )
        taken = [owner for owner, attribute in owners if parametrize.is_parametrized(owner, attribute)]
        if taken:
            raise GradvitalsError(
                f"{name} has a parametrization already; expected a plain weight: merge(model) folds multipliers in, "
                "torch.nn.utils.parametrize.remove_parametrizations takes others off"
            )
    for name in names:
        weight, owners, _ = places[name]
        multiplier = Multiplier(weight, kind)
        for owner, attribute in owners:
            parametrize.register_parametrization(owner, attribute, multiplier)
            hook = owner.register_load_state_dict_pre_hook(partial(fit_checkpoint, attribute=attribute))
            multiplier.handles.append(hook)
    return tuple(names)


def merge(model: nn.Module) -> tuple[str, ...]:
    """Fold all multipliers into their weights and take them off: the plain model, with the same outputs.

    Weights are multiplied by the same operations as in the forward pass, so that outputs are the same to the bit where
    the model is not compiled. Parameters keep their identity; an optimizer still has the multipliers, which no longer
    do anything.

    Returns:
        The names of the weights that had one.
    """
    found = list(_attached(model))
    with torch.no_grad():
        merged: set[int] = set()
        for _, owner, attribute, _ in found:
            original = owner.parametrizations[attribute].original  # type: ignore[index,union-attr]
            if id(original) not in merged:  # what is tied is found more than once
                original.copy_(getattr(owner, attribute))
                merged.add(id(original))
    for _, owner, attribute, multiplier in found:
        _own_class(owner)
        parametrize.remove_parametrizations(owner, attribute, leave_parametrized=False)
        for handle in multiplier.handles:
            handle.remove()
    return tuple(name for name, *_ in found)


def named_multipliers(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All multipliers of a model with their names in it."""
    for module_name, module in model.named_modules():
        if isinstance(module, Multiplier):
            for name, parameter in module.named_parameters():
                yield f"{module_name}.{name}" if module_name else name, parameter


def without_multipliers(model: nn.Module) -> list[nn.Parameter]:
    """All parameters but the multipliers: what a norm to clip by is made of."""
    ours = {id(parameter) for _, parameter in named_multipliers(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in ours]


class _Place(NamedTuple):
    """One parameter, and all modules that use it: several where it is tied."""

    weight: nn.Parameter
    owners: Owners
    names: list[str]


def _places(model: nn.Module) -> dict[str, _Place]:
    """Every parameter once, by its first name as users know it."""
    found: dict[int, _Place] = {}
    for module_name, module in model.named_modules():
        if isinstance(module, (Multiplier, parametrize.ParametrizationList)):
            continue
        own = list(module.named_parameters(recurse=False))
        if parametrize.is_parametrized(module):
            lists = module.parametrizations.items()
            own += [(name, held.original) for name, held in lists if hasattr(held, "original")]
        for attribute, parameter in own:
            place = found.setdefault(id(parameter), _Place(parameter, [], []))
            place.owners.append((module, attribute))
            place.names.append(f"{module_name}.{attribute}" if module_name else attribute)
    return {place.names[0]: place for place in found.values()}


def _chosen(places: Mapping[str, _Place], where: Where | None) -> list[str]:
    """First names of the chosen parameters; a tied one is chosen by any of its names."""
    if where is None:
        large = [place for place in places.values() if place.weight.dim() > 1]
        if large and all(map(_is_taken, large)):
            raise GradvitalsError("every matrix has a parametrization already; merge(model) folds multipliers in")
        names = [name for name, place in places.items() if _is_usual(place)]
    elif isinstance(where, str):
        matrices = {name: place for name, place in places.items() if place.weight.dim() > 1}
        names = [name for name, place in matrices.items() if any(re.search(where, alias) for alias in place.names)]
    elif callable(where):
        names = [name for name, place in places.items() if any(where(alias, place.weight) for alias in place.names)]
    else:
        first = {alias: name for name, place in places.items() for alias in place.names}
        wanted = list(where)
        missing = [name for name in wanted if name not in first]
        if missing:
            raise GradvitalsError(f"where names {missing[0]!r}; expected names out of {_matrices(places)}")
        names = list(dict.fromkeys(first[name] for name in wanted))
    if not names:
        raise GradvitalsError(f"where is {where!r} and chooses no parameter; expected some out of {_matrices(places)}")
    return names


def _matrices(places: Mapping[str, _Place]) -> str:
    """The names to choose from, a few of them."""
    return ", ".join([name for name, place in places.items() if place.weight.dim() > 1][:20])


def _is_usual(place: _Place) -> bool:
    """Whether it gets a multiplier where nothing is said: a matrix that multiplies activations and is trained."""
    return (
        place.weight.dim() > 1
        and place.weight.requires_grad
        and not _is_taken(place)
        and all("weight" in attribute and not _embeds_or_norms(owner) for owner, attribute in place.owners)
    )


def _is_taken(place: _Place) -> bool:
    return any(parametrize.is_parametrized(owner, attribute) for owner, attribute in place.owners)


def _embeds_or_norms(owner: nn.Module) -> bool:
    return isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) or "norm" in type(owner).__name__.lower()


def _attached(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Multiplier]]:
    for module_name, module in list(model.named_modules()):
        if isinstance(module, parametrize.ParametrizationList) or not parametrize.is_parametrized(module):
            continue
        for attribute, held in module.parametrizations.items():
            if isinstance(held[0], Multiplier):
                yield f"{module_name}.{attribute}" if module_name else attribute, module, attribute, held[0]


def _own_class(module: nn.Module) -> None:
    """Make a parametrized module's class its own: copies share it, and taking one off would break the others."""
    shared = type(module)
    content = {key: value for key, value in vars(shared).items() if key not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, content)
