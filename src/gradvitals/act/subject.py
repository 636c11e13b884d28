"""Subject: everything a run needs to go on bit for bit, how it is read, and how it is put back in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.act.snap_random import random_state, set_random_state
from gradvitals.act.snap_tree import TENSOR, Mark, copy_all, dense, is_sharded, join, marks, split
from gradvitals.collect.moments import stepping

SHARED = "shared by all"
"""Stands in for the name of a parameter where an optimizer keeps something that belongs to none of them."""

DATA_FORMS = (
    "an object with state_dict and load_state_dict (a StatefulDataLoader, a sampler with state), or a pair of "
    "functions (get, set)"
)


@dataclass
class Part:
    """What was read of a run at one moment.

    Attributes:
        plain: Everything but tensors, with marks where tensors are. Nothing in it is shared with the run.
        tensors: The run's own tensors by name: they change as it goes on.
        fragile: Names of those that may change before the parameters do.
    """

    plain: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fragile: frozenset[str] = frozenset()


class Subject:
    """What a snapshot is of.

    Args:
        model: The model; parameters and all buffers are kept.
        optimizers: All that step it.
        schedulers: Anything with `state_dict` and `load_state_dict` that follows the optimizer's steps.
        scaler: A `torch.amp.GradScaler`, or something like it.
        data: Where in the data the run is: an object with `state_dict` and `load_state_dict`, or a pair of functions
            that get and set the position.

    Attributes:
        cannot_restore: Sentences that say what will be missing after a resume.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        schedulers: Any = (),
        scaler: Any = None,
        data: Any = None,
    ) -> None:
        self.model = _unwrapped(model)
        self.optimizers = _as_list(optimizers)
        self.schedulers = _as_list(schedulers)
        self.scaler = scaler
        for one in self.optimizers:
            if not isinstance(one, torch.optim.Optimizer):
                raise TypeError(f"an optimizer is a {type(one).__name__}; expected a torch.optim.Optimizer")
        for one in self.schedulers:
            _expect_state(one, "scheduler", "a learning-rate scheduler with state_dict and load_state_dict")
        if scaler is not None:
            _expect_state(scaler, "scaler", "a torch.amp.GradScaler")
        self.get_position, self.set_position = _position(data)
        self.cannot_restore = list(self._missing())
        for name, tensor in self.parameters().items():
            if tensor.is_meta:
                raise ValueError(f"parameter {name} is on the meta device; build the Guard after it has values")
            if tensor.layout != torch.strided:
                raise ValueError(f"parameter {name} is {tensor.layout}; snapshots need ordinary (strided) tensors")

    # -- reading ------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by name: the model's, then those that only an optimizer knows."""
        named: dict[str, Tensor] = {_clean(name): parameter for name, parameter in self.model.named_parameters()}
        known: set[Tensor] = set(named.values())
        for index, optimizer in enumerate(self.optimizers):
            for number, parameter in enumerate(_members(optimizer)):
                if parameter not in known:
                    known.add(parameter)
                    named[f"(of optimizer {index}) {number}"] = parameter
        return named

    def buffers(self) -> dict[str, Tensor]:
        """Every buffer of the model by name, also those that its own state_dict leaves out."""
        return {_clean(name): buffer for name, buffer in self.model.named_buffers()}

    def read_tensors(self) -> Part:
        """Parameters, buffers and the optimizers' state, as they are now."""
        parameters, buffers = self.parameters(), self.buffers()
        tensors = {f"parameter/{name}": parameter for name, parameter in parameters.items()}
        fragile = {f"buffer/{name}": buffer for name, buffer in buffers.items()}
        tensors |= fragile
        state = [
            _read_state(index, stepping(one).state, parameters, tensors) for index, one in enumerate(self.optimizers)
        ]
        own = [name for name, buffer in fragile.items() if not is_sharded(buffer)]
        own += _own_state(state, parameters, tensors)
        return Part({"state": state, "own": own}, tensors, frozenset(fragile))

    def read(self) -> Part:
        """All but the settings: tensors, random generators and data position, as they are now."""
        part = self.read_tensors()
        part.plain |= {
            "modules": {name: deepcopy(module.get_extra_state()) for name, module in self._with_extra_state()},
            "random": random_state({tensor.device for tensor in part.tensors.values()}),
            "position": deepcopy(self.get_position()) if self.get_position is not None else None,
            "kinds": self.kinds(),
        }
        return part

    def read_settings(self) -> Part:
        """What schedulers and scalers change after the optimizer's step: hyper-parameters, and their own state.

        It is read later than the rest, right before the next update: by then they have had their turn.
        """
        tensors: dict[str, Tensor] = {}
        groups = [
            [
                split(
                    {key: value for key, value in group.items() if key != "params"}, f"group/{index}/{number}", tensors
                )
                for number, group in enumerate(optimizer.param_groups)
            ]
            for index, optimizer in enumerate(self.optimizers)
        ]
        schedulers = [deepcopy(scheduler.state_dict()) for scheduler in self.schedulers]
        scaler = split(_scaler_state(self.scaler), "scaler", tensors)
        return Part({"groups": groups, "schedulers": schedulers, "scaler": scaler}, tensors)

    def kinds(self) -> dict[str, Any]:
        """What there is, by its classes; a snapshot fits only the same."""
        names = {parameter: name for name, parameter in self.parameters().items()}
        return {
            "parameters": list(names.values()),
            "optimizers": [type(one).__name__ for one in self.optimizers],
            "members": [[[names[p] for p in group["params"]] for group in one.param_groups] for one in self.optimizers],
            "schedulers": [type(one).__name__ for one in self.schedulers],
            "scaler": None if self.scaler is None else type(self.scaler).__name__,
            "position": self.get_position is not None,
        }

    # -- putting back -------------------------------------------------------------------------------------------

    def put_back(self, plain: Mapping[str, Any], copies: Mapping[str, Tensor], *, position: bool) -> None:
        """Bring everything back, in the tensors that are there. It must fit (`snap_fit`), and be complete.

        Args:
            plain: The plain values of `read` and `read_settings`, in one.
            copies: The tensors of both, as `dense` showed them.
            position: Also random generators and the data position.
        """
        parameters = self.parameters()
        pairs = [(dense(parameter), copies[f"parameter/{name}"]) for name, parameter in parameters.items()
                 if f"parameter/{name}" in copies]  # fmt: skip
        pairs += [(dense(buffer), copies[f"buffer/{name}"]) for name, buffer in self.buffers().items()
                  if f"buffer/{name}" in copies]  # fmt: skip
        renew = _Renewal(copies, parameters, pairs)
        # Schedulers first: some write into the optimizers' groups as they load.
        for scheduler, state in zip(self.schedulers, plain["schedulers"], strict=True):
            scheduler.load_state_dict(deepcopy(state))
        for optimizer, state, groups in zip(self.optimizers, plain["state"], plain["groups"], strict=True):
            _put_back_state(optimizer, state, parameters, renew)
            for group, saved in zip(optimizer.param_groups, groups, strict=False):
                _replace_items(group, join(saved, group, renew), keep=("params",))
        copy_all(pairs)
        if plain["scaler"]:
            self.scaler.load_state_dict(join(plain["scaler"], None, lambda mark, _: copies[mark[TENSOR]].item()))
        for name, module in self._with_extra_state():
            if name in plain["modules"]:
                module.set_extra_state(deepcopy(plain["modules"][name]))
        if position:
            if self.set_position is not None and plain["kinds"]["position"] and "position" in plain:
                self.set_position(deepcopy(plain["position"]))
            if "random" in plain:
                set_random_state(plain["random"])

    def held(self, states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Of the optimizers' state in a snapshot what is kept by this process: of its parameters, or its share."""
        parameters = self.parameters()
        found = []
        for optimizer, state in zip(self.optimizers, states, strict=False):
            members = set(_members(stepping(optimizer)))
            mine = {name for name, one in parameters.items() if stepping(optimizer) is optimizer or one in members}
            found.append({name: shape for name, shape in state.items() if name in mine or name == SHARED})
        return found

    def sharding(self, plain: Mapping[str, Any], sizes: Mapping[str, tuple[torch.Size, Any]]) -> dict[str, Tensor]:
        """For each tensor of a snapshot that is spread over processes, one that is spread in the same way.

        Args:
            plain: The snapshot's plain values.
            sizes: Shapes and dtypes of its tensors, whole.
        """
        parameters = self.parameters()
        live = {f"parameter/{name}": tensor for name, tensor in parameters.items()}
        live |= {f"buffer/{name}": tensor for name, tensor in self.buffers().items()}
        found = {name: tensor for name, tensor in live.items() if is_sharded(tensor)}
        for state in plain["state"]:
            for name, shape in state.items():
                owner = parameters.get(name)
                if owner is not None and is_sharded(owner):
                    # A snapshot of one process does not say so, but moments are spread as their parameter is.
                    found |= {
                        mark[TENSOR]: owner
                        for mark in marks(shape)
                        if sizes[mark[TENSOR]][0] == owner.shape and (mark.get("sharded") or owner.dim())
                    }
        return found

    # -- details ------------------------------------------------------------------------------------------------

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield _clean(name), module

    def _missing(self) -> Iterator[str]:
        if self.get_position is None:
            yield f"the data position: pass data=, {DATA_FORMS}"
        for optimizer in self.optimizers:
            if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
                with suppress(Exception):  # some can only be asked on certain ranks
                    own = sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
                    if own:
                        yield f"what {type(optimizer).__name__} keeps outside its state and groups: {', '.join(own)}"


class _Renewal:
    """Finds the tensor to put a copy into: the one that is there if it fits, else a new one."""

    def __init__(
        self, copies: Mapping[str, Tensor], parameters: Mapping[str, Tensor], pairs: list[tuple[Tensor, Tensor]]
    ) -> None:
        self._copies, self._parameters, self._pairs = copies, parameters, pairs
        self._device = next((p.device for p in parameters.values()), torch.device("cpu"))
        self.owner: str | None = None  # the parameter whose state is being put back

    def __call__(self, mark: Mark, live: Any) -> Tensor:
        copy = self._copies[mark[TENSOR]]
        fits = isinstance(live, Tensor) and _fits(dense(live), copy) and live.device.type == mark["device"]
        target: Tensor = live if fits else self._new(copy, mark)
        self._pairs.append((dense(target), copy))
        return target

    def _new(self, copy: Tensor, mark: Mark) -> Tensor:
        owner = self._parameters.get(self.owner or "")
        on_host = mark["device"] == "cpu"
        like_owner = owner is not None and dense(owner).shape == copy.shape and (is_sharded(owner) or not on_host)
        if owner is not None and like_owner and (copy.dim() or mark.get("sharded")):
            return torch.empty_like(owner, dtype=copy.dtype, requires_grad=False)
        device = torch.device("cpu") if on_host else owner.device if owner is not None else self._device
        return torch.empty_like(copy, device=device, pin_memory=False)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _read_state(
    index: int, state: Mapping[Any, Any], parameters: Mapping[str, Tensor], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    names = {parameter: name for name, parameter in parameters.items()}
    found: dict[str, Any] = {}
    for key, value in state.items():
        if not isinstance(key, Tensor):
            found.setdefault(SHARED, {})[key] = split(value, f"state/{index}/{SHARED}/{key}", tensors)
        elif key in names:
            found[names[key]] = split(value, f"state/{index}/{names[key]}", tensors)
    return found


def _own_state(
    states: Sequence[Mapping[str, Any]], parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> list[str]:
    """Names of state that every process may have its own of: plain tensors of a parameter that is spread over them."""
    found = []
    for state in states:
        for name, shape in state.items():
            if name == SHARED or is_sharded(parameters[name]):
                found += [mark[TENSOR] for mark in marks(shape)
                          if not mark.get("sharded") and (name == SHARED or tensors[mark[TENSOR]].dim())]  # fmt: skip
    return found


def _put_back_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], parameters: Mapping[str, Tensor], renew: _Renewal
) -> None:
    """Bring an optimizer's state back; what it has made since then goes."""
    optimizer = stepping(optimizer)
    shared = saved.get(SHARED, {})
    kept = {parameters[name] for name in saved if name in parameters}
    for key in list(optimizer.state):
        if key not in kept if isinstance(key, Tensor) else key not in shared:
            del optimizer.state[key]
    for name, shape in saved.items():
        if name in parameters:
            renew.owner = name
            _put_back_item(optimizer.state, parameters[name], shape, renew)
    renew.owner = None
    for key, shape in shared.items():
        _put_back_item(optimizer.state, key, shape, renew)


def _put_back_item(state: Any, key: Any, shape: Any, renew: _Renewal) -> None:
    there = state.get(key)
    value = join(shape, there, renew)
    if isinstance(there, dict) and isinstance(value, dict):
        _replace_items(there, value)
    else:
        state[key] = value


def _replace_items(target: dict[Any, Any], items: Mapping[Any, Any], keep: Sequence[Any] = ()) -> None:
    for key in set(target) - set(items) - set(keep):
        del target[key]
    target.update(items)


def _fits(live: Tensor, copy: Tensor) -> bool:
    return live.shape == copy.shape and live.dtype == copy.dtype


def _scaler_state(scaler: Any) -> Any:
    """A GradScaler's `state_dict`, with tensors in place of the numbers that it would have to wait for."""
    if scaler is None:
        return None
    scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    if not isinstance(scale, Tensor) or not isinstance(tracker, Tensor) or not scaler.is_enabled():
        return scaler.state_dict()
    return {
        "scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": tracker,
    }


def _position(data: Any) -> tuple[Callable[[], Any] | None, Callable[[Any], object] | None]:
    if data is None:
        return None, None
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(callable(one) for one in data):
        return data[0], data[1]
    _expect_state(data, "data", DATA_FORMS)
    return data.state_dict, data.load_state_dict


def _expect_state(thing: Any, name: str, expected: str) -> None:
    if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
        raise TypeError(f"{name} is a {type(thing).__name__}, whose state cannot be kept; expected {expected}")


def _as_list(things: Any) -> list[Any]:
    things = list(things) if isinstance(things, (list, tuple)) else [] if things is None else [things]
    # Accelerate's wrapper is an Optimizer in name only: the real one is inside.
    return [getattr(one, "optimizer", one) if type(one).__name__ == "AcceleratedOptimizer" else one for one in things]


def _members(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _unwrapped(model: nn.Module) -> nn.Module:
    """The module inside wrappers that only add a prefix to its names."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; expected a torch.nn.Module")
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile of a part of the model
