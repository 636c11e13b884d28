"""Reads the gradients of single ranks under `fully_shard`, before they are reduced."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.collect.microbatch import MicrobatchSums
from gradvitals.collect.parameters import HeadView
from gradvitals.collect.schedule import CostTimer
from gradvitals.distributed.shards import local, rows_held


@dataclass(frozen=True)
class Place:
    """The module and name of a parameter."""

    row: int
    module: nn.Module
    name: str

    def current(self) -> Tensor | None:
        """Returns what the model computes with now: the whole parameter, or this rank's shard of it."""
        return self.module._parameters.get(self.name)


def parts_of(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    heads: dict[int, HeadView],
    *,
    rows: Sequence[int],
    arrivals: list[int],
    timer: CostTimer,
    on_error: Callable[[Exception], None],
    reduced: bool,
) -> tuple[MicrobatchSums | None, str | None]:
    """Returns what measures the gradients of single micro-batches and ranks of this model.

    Args:
        model: The watched model, with its wrappers.
        parameters: All watched parameters, by row.
        heads: Attention heads of weights, by row.
        rows: The rows that the optimizer steps.
        arrivals: Rows in the order in which backward reaches them; extended in place.
        timer: Measures the cost.
        on_error: Called with an internal error, which ends the collection.
        reduced: Whether gradients are reduced over ranks, during backward or after it.

    Returns:
        The collector, or None and the reason why there is none.
    """
    reason = why_no_parts(model)
    if reason is not None:
        return None, reason
    units = sharded_units(model, parameters, rows)
    options: dict[str, Any] = {"rows": rows, "arrivals": arrivals, "timer": timer, "on_error": on_error}
    if not units:
        return MicrobatchSums(parameters, heads, reduced=reduced, **options), None
    return ShardedParts(units, parameters, heads, **options), None


def why_no_parts(model: nn.Module) -> str | None:
    """Returns why the gradients of single ranks and micro-batches of this model cannot be read; None if they can."""
    flat = _fsdp_class("FullyShardedDataParallel")
    if flat is not None and any(isinstance(module, flat) for module in model.modules()):
        return (
            "FullyShardedDataParallel joins parameters and reduces their gradients before anybody can see them;"
            " fully_shard, which replaces it in torch, does not"
        )
    sharded = _fsdp_class("FSDPModule")
    units = [module for module in model.modules() if sharded is not None and isinstance(module, sharded)]
    if units and not any(map(groups_of, units)):
        return f"how torch {torch.__version__} lays out the parameters of fully_shard is not known"
    return None


class ShardedParts(MicrobatchSums):
    """Norms of the gradient of every micro-batch, for models with parameters under `fully_shard`.

    A rank reads the whole gradient of its own samples, not the shard that it keeps.
    """

    def __init__(
        self,
        units: dict[nn.Module, list[Place]],
        parameters: Sequence[nn.Parameter],
        heads: dict[int, HeadView],
        **options: Any,
    ) -> None:
        self._units = units
        self._sharded = {place.row for places in units.values() for place in places}
        self._leaves: dict[int, Tensor] = {}
        self._forward_handles: list[torch.utils.hooks.RemovableHandle] = []
        self._divided: dict[int, float] = {}
        super().__init__(parameters, dict(heads), reduced=True, **options)

    def arm(self, *, radial: bool) -> None:
        """Collect from the next backward on."""
        super().arm(radial=radial)
        self._divided = {}
        for module, places in self._units.items():
            groups = groups_of(module)
            for place in places:
                group: Any = groups.get(id(self.parameters[place.row]))
                divisor = getattr(group, "gradient_divide_factor", None)
                # What makes the reduced gradient the mean over ranks, if the loop set another divisor.
                self._divided[place.row] = 1.0 if divisor is None else float(group.mesh_info.mesh.size() / divisor)
        if not self._forward_handles:
            for module in self._units:
                self._forward_handles.append(module.register_forward_pre_hook(self._before_forward(module)))

    def disarm(self) -> None:
        """Remove the hooks."""
        super().disarm()
        for handle in self._forward_handles:
            handle.remove()
        self._forward_handles = []

    def _before_forward(self, module: nn.Module) -> Callable[..., None]:
        reference, watched = weakref.ref(self), weakref.ref(module)

        def before_forward(*_: Any) -> None:
            parts, unit = reference(), watched()
            if parts is not None and unit is not None and parts.armed:
                try:
                    parts._find_leaves(unit)
                except Exception as error:
                    parts._fail(error)

        return torch.compiler.disable(before_forward)  # type: ignore[no-any-return]

    def _find_leaves(self, module: nn.Module) -> None:
        """Hook the parameters of a module, which have been gathered and are about to be used."""
        for place in self._units[module]:
            leaf = place.current()
            if leaf is None or (leaf is self._leaves.get(place.row) and place.row in self._handles):
                continue
            if place.row in self._handles:
                self._handles.pop(place.row).remove()
            self._leaves[place.row] = leaf
            self._follow(place.row)
            if place.row in self.heads:
                view = self.heads[place.row]
                self.heads[place.row] = replace(view, held=rows_held(leaf, view.dim))

    def _leaf(self, row: int) -> Tensor:
        return self._leaves.get(row, self.parameters[row])

    def _follow(self, row: int) -> None:
        if row in self._leaves or row not in self._sharded:  # else once its leaf is known
            super()._follow(row)

    def _is_fleeting(self, row: int) -> bool:
        return self._leaf(row) is not self.parameters[row]

    def _weight(self, row: int) -> Tensor | None:
        leaf = self._leaf(row)
        there = not self._is_fleeting(row) or local(leaf).untyped_storage().size()
        return local(leaf).detach() if there else None

    def _factor(self, row: int) -> float:
        return self._divided.get(row, 1.0)


# -- what torch keeps about fully_shard -------------------------------------------------------------------------------


def sharded_units(
    model: nn.Module, parameters: Sequence[nn.Parameter], rows: Sequence[int]
) -> dict[nn.Module, list[Place]]:
    """Returns the modules that `fully_shard` was called with, and the place of each parameter."""
    row_of = {id(parameters[row]): row for row in rows}
    units: dict[nn.Module, list[Place]] = {}
    for unit, module in _owners(model, None):
        for name, parameter in module._parameters.items():
            if unit is not None and parameter is not None and id(parameter) in row_of:
                units.setdefault(unit, []).append(Place(row_of.pop(id(parameter)), module, name))
    return units


def _owners(module: nn.Module, unit: nn.Module | None) -> Iterator[tuple[nn.Module | None, nn.Module]]:
    """Yields every module with the innermost `fully_shard` module around it, which may be itself."""
    sharded = _fsdp_class("FSDPModule")
    if sharded is not None and isinstance(module, sharded):
        unit = module
    yield unit, module
    for child in module.children():
        yield from _owners(child, unit)


def _fsdp_class(name: str) -> Any:
    """Returns a class of torch.distributed.fsdp, if it was imported."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), name, None)


def groups_of(module: nn.Module) -> dict[int, Any]:
    """Returns, by parameter id, the FSDP parameter group of each parameter of a unit.

    Torch versions keep them in different places; empty if they are not found.
    """
    try:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)
        groups = [state._fsdp_param_group] if groups is None else groups
        return {
            id(member.sharded_param): group
            for group in groups
            if group is not None and group.mesh_info.mesh is not None
            for member in group.fsdp_params
        }
    except (AttributeError, TypeError):
        return {}
