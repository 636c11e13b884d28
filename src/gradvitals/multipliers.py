r"""Learnable multipliers: one number, or one per row and column, that lets a weight matrix choose its scale.

Under weight decay, the norm of a matrix whose gradients are mostly noise settles where the noise of its updates and the
decay balance, :math:`\mathrm{RMS}(W) = \sqrt{\eta / 2\lambda}` for AdamW, whatever norm the loss prefers. A multiplier
sees the sum of many gradient elements, in which noise averages out, so it is free to move:

.. math:: W = s \tilde W, \qquad W_{ij} = r_i \tilde W_{ij} c_j, \qquad
          \frac{\partial L}{\partial s} = \sum_{ij} \tilde W_{ij} G_{ij}

`attach` adds them before training, `param_groups` gives them their own weight decay, `clip_grad_norm_` excludes them
from the clip norm, `merge` folds them into the weights after training, and `suggest` finds the tensors of a recorded
run that would benefit from one.

References:
    Velikanov et al., "Learnable multipliers: freeing the scale of language model matrix layers", arXiv 2601.04890.
"""

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

Kind = Literal["scalar", "row", "column", "both"]
"""One for the whole tensor; one per row (output); one per column (input); rows and columns."""

PARTS: dict[Kind, tuple[str, ...]] = {
    "scalar": ("scale",),
    "row": ("row",),
    "column": ("column",),
    "both": ("row", "column"),
}


class Multiplier(nn.Module):
    """The parametrization: turns the stored weight into the weight that the model uses.

    Args:
        weight: The stored weight. Multipliers start at 1, so attaching them changes nothing.
        kind: Which multipliers to create.
    """

    def __init__(self, weight: Tensor, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.handles: list[Any] = []
        # In half precision, a number near 1 cannot change by less than 0.4%.
        dtype = torch.promote_types(weight.dtype, torch.float32)
        for name in PARTS[kind]:
            own = {"row": 0, "column": 1}.get(name)
            shape = [size if axis == own else 1 for axis, size in enumerate(weight.shape)] if name != "scale" else []
            ones = torch.ones(shape, dtype=dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(ones))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight times its multipliers."""
        return _multiplied(weight, {name: getattr(self, name) for name in PARTS[self.kind]})

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Multiplier:
        """Move multipliers to the device but keep them in float32 or wider, e.g. in `model.bfloat16()`."""

        def at_least_single(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            narrow = changed.is_floating_point() and changed.dtype.itemsize < 4
            return tensor.to(changed.device) if narrow else changed

        super()._apply(at_least_single, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Return what print(model) shows."""
        return f"kind={self.kind!r}"


def _multiplied(weight: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """Return a weight times its multipliers in the weight's dtype, always in the same order."""
    product = weight
    for name in ("scale", "row", "column"):
        if name in parts:
            product = product * parts[name]
    return product.to(weight.dtype)


def plain_state_dict(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict of the merged model, which a model without multipliers can load.

    Args:
        state: From ``model.state_dict()``. One without multipliers is returned unchanged.

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


def _fit_checkpoint(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any, attribute: str, **__: Any) -> None:
    """Convert a weight that was saved plain, or with other multipliers, to one with these, at 1, before a load."""
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
    """Replace a weight and its multipliers in a state dict by their product."""
    held = f"{prefix}parametrizations.{attribute}."
    parts = {name: state[f"{held}0.{name}"] for name in ("scale", "row", "column") if f"{held}0.{name}" in state}
    if not parts:
        return  # not our parametrization
    for name in parts:
        del state[f"{held}0.{name}"]
    state[f"{prefix}{attribute}"] = _multiplied(state.pop(f"{held}original"), parts)


Where = str | Iterable[str] | Callable[[str, nn.Parameter], bool]


def attach(model: nn.Module, where: Where | None = None, kind: Kind = "scalar") -> tuple[str, ...]:
    """Give weights of a model learnable multipliers, which start at 1. Call it before you create the optimizer.

    The model's output does not change. Its parameters get new names, as with every torch parametrization: ``fc.weight``
    becomes ``fc.parametrizations.weight.original``, next to ``fc.parametrizations.weight.0.scale``. The model still
    loads older checkpoints: multipliers that a checkpoint lacks start at 1. A weight that several modules share (tied
    weights) gets one multiplier and stays tied.

    Args:
        model: Modified in place.
        where: A regular expression to search in the names of weights of two or more dimensions; or names of parameters,
            also a result of `suggest`; or a function of name and parameter. None chooses trained parameters of two or
            more dimensions that are called a weight (``weight``, ``in_proj_weight``) and have no parametrization yet,
            except those of norms and embeddings, and weights tied to them.
        kind: ``"scalar"``, ``"row"``, ``"column"`` or ``"both"``. Rows are the first dimension: the outputs of a linear
            layer. The paper advises against rows on the output head of a language model.

    Returns:
        The original names of the weights that have multipliers now.

    Raises:
        GradvitalsError: if nothing is chosen, a name does not exist, a chosen weight already has a parametrization, or
            the kind needs rows or columns that it does not have.

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
        weight = places[name].weight
        if weight.dim() < 2 and kind != "scalar":
            raise GradvitalsError(
                f"{name} has shape {tuple(weight.shape)}, and kind is {kind!r}; expected two dimensions or more, or "
                "kind='scalar'"
            )
        if _is_parametrized(places[name]):
            raise GradvitalsError(
                f"{name} has a parametrization already; expected a plain weight: merge(model) folds multipliers in, "
                "torch.nn.utils.parametrize.remove_parametrizations takes others off"
            )
    for name in names:
        weight, owners, _ = places[name]
        multiplier = Multiplier(weight, kind)
        for owner, attribute in owners:
            parametrize.register_parametrization(owner, attribute, multiplier)
            hook = owner.register_load_state_dict_pre_hook(partial(_fit_checkpoint, attribute=attribute))
            multiplier.handles.append(hook)
    return tuple(names)


def merge(model: nn.Module) -> tuple[str, ...]:
    """Fold all multipliers into their weights and remove them: the plain model, with the same outputs.

    The operations are those of the forward pass, so outputs are equal bit for bit unless the model is compiled.
    Parameters keep their identity. An optimizer still holds the multipliers, which no longer have an effect.

    Returns:
        The names of the weights that had multipliers.
    """
    found = list(_attached(model))
    with torch.no_grad():
        merged: set[int] = set()
        for _, owner, attribute, _ in found:
            original = owner.parametrizations[attribute].original  # type: ignore[index,union-attr]
            if id(original) not in merged:  # tied weights come up more than once
                original.copy_(getattr(owner, attribute))
                merged.add(id(original))
    for _, owner, attribute, multiplier in found:
        _own_class(owner)
        parametrize.remove_parametrizations(owner, attribute, leave_parametrized=False)
        for handle in multiplier.handles:
            handle.remove()
    return tuple(name for name, *_ in found)


def named_multipliers(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all multipliers of a model with their names."""
    for module_name, module in model.named_modules():
        if isinstance(module, Multiplier):
            for name, parameter in module.named_parameters():
                yield f"{module_name}.{name}" if module_name else name, parameter


def without_multipliers(model: nn.Module) -> list[nn.Parameter]:
    """Return all parameters except the multipliers: those that count for the clip norm."""
    ours = {id(parameter) for _, parameter in named_multipliers(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in ours]


class _Place(NamedTuple):
    """One parameter, and all modules that use it; several if it is tied."""

    weight: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    names: list[str]


def _places(model: nn.Module) -> dict[str, _Place]:
    """Return every parameter once, by its first name without parametrizations."""
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
    """Return the first names of the chosen parameters. Any name of a tied one chooses it."""
    matrices = {name: place for name, place in places.items() if place.weight.dim() > 1}
    some = f"out of {', '.join(list(matrices)[:20])}"
    if where is None:
        if matrices and all(map(_is_parametrized, matrices.values())):
            raise GradvitalsError("every matrix has a parametrization already; merge(model) folds multipliers in")
        names = [name for name, place in places.items() if _is_default(place)]
    elif isinstance(where, str):
        names = [name for name, place in matrices.items() if any(re.search(where, alias) for alias in place.names)]
    elif callable(where):
        names = [name for name, place in places.items() if any(where(alias, place.weight) for alias in place.names)]
    else:
        first = {alias: name for name, place in places.items() for alias in place.names}
        wanted = list(where)
        missing = [name for name in wanted if name not in first]
        if missing:
            raise GradvitalsError(f"where names {missing[0]!r}; expected names {some}")
        names = list(dict.fromkeys(first[name] for name in wanted))
    if not names:
        raise GradvitalsError(f"where is {where!r} and chooses no parameter; expected some {some}")
    return names


def _is_default(place: _Place) -> bool:
    """Return whether it gets a multiplier by default: a trained matrix that multiplies activations."""
    return (
        place.weight.dim() > 1
        and place.weight.requires_grad
        and not _is_parametrized(place)
        and all(
            "weight" in attribute
            and not isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
            and "norm" not in type(owner).__name__.lower()
            for owner, attribute in place.owners
        )
    )


def _is_parametrized(place: _Place) -> bool:
    return any(parametrize.is_parametrized(owner, attribute) for owner, attribute in place.owners)


def _attached(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Multiplier]]:
    for module_name, module in list(model.named_modules()):
        if isinstance(module, parametrize.ParametrizationList) or not parametrize.is_parametrized(module):
            continue
        for attribute, held in module.parametrizations.items():
            if isinstance(held[0], Multiplier):
                yield f"{module_name}.{attribute}" if module_name else attribute, module, attribute, held[0]


def _own_class(module: nn.Module) -> None:
    """Give a parametrized module its own class: copies share it, so removing from one would break the others."""
    shared = type(module)
    content = {key: value for key, value in vars(shared).items() if key not in ("__dict__", "__weakref__")}
    module.__class__ = type(shared.__name__, shared.__bases__, content)


WEIGHT_DECAY = 2e-3
"""The paper's value: enough to stop drift along directions in which only the product matters."""


def param_groups(
    model: nn.Module, groups: Iterable[Any] | None = None, *, weight_decay: float = WEIGHT_DECAY
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: yours, and a separate one for the multipliers.

    Args:
        model: With or without multipliers.
        groups: Your groups, or parameters as an optimizer takes them, with or without names. Multipliers are removed
            from them. None: one group of all parameters.
        weight_decay: For the multipliers.

    Returns:
        Groups for an optimizer, whose defaults apply to options that a group does not set.

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
            raise ConfigError("groups mixes groups and parameters; expected one or the other")
        given = [{"params": given}]
    found, named = [], False
    for group in map(dict, given):
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        # torch requires names in all groups or in none.
        named = named or any(isinstance(member, tuple) for member in members)
        group["params"] = [item for item in members if id(item[1] if isinstance(item, tuple) else item) not in held]
        found.append(group)
    own = {"params": list(ours.items()) if named else list(ours.values()), "weight_decay": weight_decay}
    return [*found, *([own] if ours else [])]


def clip_grad_norm_(model: nn.Module, max_norm: float, **options: Any) -> Tensor:
    """Clip like `torch.nn.utils.clip_grad_norm_`, except the multipliers, whose gradients stay unchanged.

    Args:
        model: With or without multipliers.
        max_norm: As in torch.
        options: As in torch: `norm_type`, `error_if_nonfinite`, `foreach`.

    Returns:
        The norm before clipping, without the multipliers.
    """
    return torch.nn.utils.clip_grad_norm_(without_multipliers(model), max_norm, **options)


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Tensors that would benefit from a multiplier. Iterates over their names."""

    names: tuple[str, ...] = ()
    reason: str = ""
    """The evidence, or why there is no suggestion."""
    ratios: Mapping[str, float] = field(default_factory=dict)
    """For every matrix that could be judged: its norm over the norm that noise alone would give it."""

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        return f"{self.reason}: {', '.join(self.names)}" if self.names else self.reason


def suggest(run: Run | str | os.PathLike[str]) -> Suggestion:
    """Find the tensors of a run whose norm is the one that noise and weight decay alone would give them.

    That norm follows from the learning rates, the weight decay and the initial norm; `gradvitals.diagnose.rules.scale`
    has the formula. A tensor is suggested if its norm matched over the last readings, in a run long enough for its
    initial norm to have decayed.

    Args:
        run: A run, or its path.

    Returns:
        The names, which `attach` takes as `where`, and the evidence.
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
