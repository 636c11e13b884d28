"""Learnable multipliers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from gradvitals.diagnose import RunInfo
from gradvitals.diagnose.rules.scale import TrappedScale, beta1_of, decay_of, is_plain_matrix
from gradvitals.errors import ConfigError, GradvitalsError, expect
from gradvitals.store.reader import Run, open_run

Kind = Literal["scalar", "row", "column", "both"]
"""One for the whole tensor; one for each row (output); one for each column (input); rows and columns."""

PARTS: dict[Kind, tuple[str, ...]] = {
    "scalar": ("scale",),
    "row": ("row",),
    "column": ("column",),
    "both": ("row", "column"),
}


class Multiplier(nn.Module):
    """The parametrization: gets the weight as it is stored and returns the weight as the model uses it.

    Args:
        weight: What it is for. Multipliers begin at 1, so that nothing changes when they are attached.
        kind: Which multipliers.
    """

    def __init__(self, weight: Tensor, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.handles: list[Any] = []
        # In half precision a number near 1 could not make a step of less than 0.4 %.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        for name in PARTS[kind]:
            ones = torch.ones(_part_shape(name, weight.shape), dtype=dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(ones))

    def forward(self, weight: Tensor) -> Tensor:
        """Multiply."""
        return multiplied(weight, {name: getattr(self, name) for name in PARTS[self.kind]})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Multiplier:
        """What `model.bfloat16()` and the like do: multipliers go to the device and stay in float32 or above."""

        def at_least_single(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            narrow = changed.is_floating_point() and changed.dtype.itemsize < 4
            return tensor.to(changed.device) if narrow else changed

        super()._apply(at_least_single, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"kind={self.kind!r}"


def multiplied(weight: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """A weight times its multipliers, in the weight's own precision; the order is the same everywhere."""
    product = weight
    for name in ("scale", "row", "column"):
        if name in parts:
            product = product * parts[name]
    return product.to(weight.dtype)


def _part_shape(name: str, shape: torch.Size) -> tuple[int, ...]:
    if name == "scale":
        return ()
    return tuple(size if axis == (0 if name == "row" else 1) else 1 for axis, size in enumerate(shape))


def plain_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of the merged model from one with multipliers, for a model that has none.

    Args:
        state: From ``model.state_dict()``; one without multipliers is returned as it is.

    Example:
        >>> import gradvitals as gv
        >>> model = nn.Linear(3, 4)
        >>> gv.multipliers.attach(model, kind="row")
        ('weight',)
        >>> sorted(gv.multipliers.plain_state_dict(model.state_dict()))
        ['bias', 'weight']
    """
    plain = dict(state)
    for key in state:
        found = re.fullmatch(r"((?:.*\.)?)parametrizations\.(\w+)\.original", key)
        if found:
            _fold(plain, found[1], found[2])
    return plain


def fit_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, attribute: str, **__: Any) -> None:
    """Before a module loads: a weight saved plain, or with other multipliers, becomes one with these, at 1."""
    multiplier: nn.Module = module.parametrizations[attribute][0]  # type: ignore[assignment,index]
    held = f"{prefix}parametrizations.{attribute}."
    mine = {f"{held}0.{name}" for name, _ in multiplier.named_parameters()}
    if {key for key in state if key.startswith(f"{held}0.")} == mine:
        return
    if f"{held}original" in state:
        _fold(state, prefix, attribute)
    if f"{prefix}{attribute}" in state:
        state[f"{held}original"] = state.pop(f"{prefix}{attribute}")
        for name, parameter in multiplier.named_parameters():
            state[f"{held}0.{name}"] = torch.ones_like(parameter)


def _fold(state: dict[str, Any], prefix: str, attribute: str) -> None:
    """Replace a weight and its multipliers by their product, in a state dict."""
    held = f"{prefix}parametrizations.{attribute}."
    parts = {name: state[f"{held}0.{name}"] for name in ("scale", "row", "column") if f"{held}0.{name}" in state}
    if not parts:
        return  # a parametrization of someone else's
    for name in parts:
        del state[f"{held}0.{name}"]
    state[f"{prefix}{attribute}"] = multiplied(state.pop(f"{held}original"), parts)


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


WEIGHT_DECAY = 2e-3
"""What the paper gives multipliers: enough to stop a drift along directions in which only their product matters."""


def param_groups(
    model: nn.Module, groups: Iterable[Any] | None = None, *, weight_decay: float = WEIGHT_DECAY
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: yours, and the multipliers in one of their own.

    Args:
        model: With or without multipliers.
        groups: Groups of your own, or parameters as an optimizer takes them, also with names. Multipliers that are in
            them are taken out. None: one group of all parameters.
        weight_decay: For the multipliers.

    Returns:
        Groups to give to an optimizer; the options that they do not name are the optimizer's.

    Example:
        >>> import gradvitals as gv
        >>> model = nn.Linear(3, 4)
        >>> gv.multipliers.attach(model)
        ('weight',)
        >>> [(len(group["params"]), group.get("weight_decay")) for group in gv.multipliers.param_groups(model)]
        [(2, None), (1, 0.002)]
    """
    ours = dict(named_multipliers(model))
    held = {id(parameter) for parameter in ours.values()}
    given = list(model.parameters() if groups is None else groups)
    if not all(isinstance(group, Mapping) for group in given):
        if any(isinstance(group, Mapping) for group in given):
            raise ConfigError("groups holds groups and parameters beside each other; expected one or the other")
        given = [{"params": given}]
    found, named = [], False
    for group in map(dict, given):
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        # torch wants all groups to have names, or none.
        named = named or any(isinstance(member, tuple) for member in members)
        group["params"] = [item for item in members if id(item[1] if isinstance(item, tuple) else item) not in held]
        found.append(group)
    own = {"params": list(ours.items()) if named else list(ours.values()), "weight_decay": weight_decay}
    return [*found, *([own] if ours else [])]


def clip_grad_norm_(model: nn.Module, max_norm: float, **options: Any) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` of everything but the multipliers, whose gradients stay as they are.

    Args:
        model: With or without multipliers.
        max_norm: As in torch.
        options: As in torch: `norm_type`, `error_if_nonfinite`, `foreach`.

    Returns:
        The norm without the multipliers, before clipping.
    """
    return torch.nn.utils.clip_grad_norm_(without_multipliers(model), max_norm, **options)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Tensors that ask for a multiplier. It can be gone through like the tuple of their names."""

    names: tuple[str, ...] = ()
    reason: str = ""
    """What it rests on, or why nothing can be said."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """Of every matrix that could be judged: its norm over the one that noise alone would have made."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return f"{self.reason}: {', '.join(self.names)}" if self.names else self.reason


def suggest(run: Run | str | os.PathLike[str]) -> Suggestion:
    """Which tensors have the norm that noise and weight decay would give them, from a run's record.

    The norm that the noise of AdamW's updates alone would have by now follows from the learning rates, the weight decay
    and the norm at the start; `gradvitals.diagnose.rules.scale` has the formula. A tensor is named where its norm has
    been that one over the last readings, and where the run is long enough to have forgotten the norm it began with.

    Args:
        run: A run, or where it is.

    Returns:
        The names, to be given to `attach` as `where`, and in words what they rest on.
    """
    if isinstance(run, Run):
        return _suggestion(run)
    with open_run(run) as opened:
        return _suggestion(opened)


def _suggestion(run: Run) -> Suggestion:
    facts = RunInfo.from_json(run.meta.get("facts") or {})
    decay = decay_of(facts)
    if math.isnan(decay):
        given = f"{facts.optimizer or 'not known'}, its weight decay {facts.weight_decay}"
        return Suggestion(reason=f"cannot tell: the optimizer is {given}; expected AdamW with a weight decay")
    if "lr" not in run.metrics("values") or "weight/norm" not in run.metrics("tensors"):
        return Suggestion(reason="cannot tell: the run has no learning rate or no norms of weights")
    sizes = np.array([float(info.numel) for info in run.tensors])
    matrix = np.array([is_plain_matrix(info) for info in run.tensors])
    rates, readings = zip(*run.series("lr"), strict=True), dict(zip(*run.matrix("weight/norm"), strict=True))
    rule, last, held = TrappedScale(), np.zeros(0), np.zeros(len(sizes), dtype=bool)
    for step, lr in rates:
        if step in readings:
            last = np.square(readings[step]) / sizes
            held = rule.weigh(int(step), last, matrix)
        rule.walk.advance(int(step), float(lr), decay, beta1_of(facts))
    judged = np.flatnonzero(matrix & rule.judged) if len(last) else np.zeros(0, dtype=int)
    ratio = rule.ratio(last) if len(last) else last
    ratios = {run.tensors[i].name: float(ratio[i]) for i in judged.tolist()}
    if not ratios:
        left = 100 * rule.walk.kept
        return Suggestion(
            reason=f"cannot tell yet: {left:.0f} % of the weights' mean square at the start would still be there; it "
            f"takes about {1 / decay:.3g} / learning rate steps until a norm says what holds it"
        )
    names = tuple(run.tensors[i].name for i in np.flatnonzero(held).tolist())
    reason = f"{len(names)} of {len(ratios)} matrices have the norm that noise and weight decay make"
    return Suggestion(names=names, reason=reason, ratios=ratios)


__all__ = [
    "WEIGHT_DECAY",
    "Kind",
    "Multiplier",
    "Suggestion",
    "attach",
    "clip_grad_norm_",
    "merge",
    "named_multipliers",
    "param_groups",
    "plain_state_dict",
    "suggest",
    "without_multipliers",
]
