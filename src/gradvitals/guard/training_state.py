"""Everything that a run needs to continue bit for bit: how it is read, and how it is put back in place.

`torch.distributed.checkpoint.state_dict` does not do for a rollback: setting optimizer state makes a trial step, casts
moments to the dtype of their parameter and replaces tensors that a CUDA graph may know by address; and it omits
buffers that are not persistent. So state is read by name and copied back in place here, while
`torch.distributed.checkpoint` writes, reads and re-shards the files (`snapshot`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gradvitals.collect.moments import stepping
from gradvitals.distributed.shards import local, placements, unwrapped
from gradvitals.errors import GradvitalsError
from gradvitals.format import listed
from gradvitals.guard.actions import copy_all

NO_PARAMETER = "(no parameter)"  # stands in for the parameter's name in optimizer state that belongs to none

DATA_FORMS = (
    "an object with state_dict and load_state_dict (a StatefulDataLoader, a sampler with state), or a pair of "
    "functions (get, set)"
)


class SnapshotError(GradvitalsError):
    """A snapshot cannot be written, read, or restored."""


# -- nested state as a structure and its tensors -----------------------------------------------------------------


@dataclass(frozen=True)
class TensorRef:
    """Stands in for a tensor in a saved structure."""

    name: str
    device: str
    sharded: bool  # whether it is a DTensor


def split(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A copy of `tree` with a `TensorRef` for each tensor; adds the tensors to `tensors`, named by their path."""

    def saved(path: tuple[Any, ...], leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return deepcopy(leaf)
        ref = TensorRef("/".join([name, *map(_key, path)]), leaf.device.type, bool(placements(leaf)))
        tensors[ref.name] = leaf
        return ref

    return pytree.tree_map_with_path(saved, tree)


def join(shape: Any, live: Any, renew: Callable[[TensorRef, Any], Any]) -> Any:
    """The inverse of `split`: calls `renew` with each `TensorRef` and what is in its place in `live` now."""
    there = dict(pytree.tree_leaves_with_path(live))
    return pytree.tree_map_with_path(
        lambda path, leaf: renew(leaf, there.get(path)) if isinstance(leaf, TensorRef) else deepcopy(leaf), shape
    )


def refs(shape: Any) -> list[TensorRef]:
    """All `TensorRef` in a structure."""
    return [leaf for leaf in pytree.tree_leaves(shape) if isinstance(leaf, TensorRef)]


def _key(entry: Any) -> str:
    """A key or an index on the path to a leaf."""
    return str(getattr(entry, "key", getattr(entry, "idx", getattr(entry, "name", entry))))


def dense(tensor: Tensor) -> Tensor:
    """The memory behind a tensor on this rank: its own shard, each element once."""
    part = local(tensor).detach()
    for dim, (size, stride) in enumerate(zip(part.shape, part.stride(), strict=True)):
        if stride == 0 and size > 1:  # expanded: one element seen many times, which cannot be written to
            part = part.narrow(dim, 0, 1)
    return part


def sizes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shapes and dtypes by name, of whole tensors if they are sharded."""
    return {
        name: ((tensor if placements(tensor) else dense(tensor)).shape, tensor.dtype)
        for name, tensor in tensors.items()
    }


# -- what a run consists of --------------------------------------------------------------------------------------


class TrainingState:
    """Everything that a run needs to continue bit for bit; see `Guard` for the arguments."""

    def __init__(
        self, model: nn.Module, optimizers: Any, *, schedulers: Any = (), scaler: Any = None, data: Any = None
    ) -> None:
        self.model = unwrapped(model)
        self.optimizers, self.schedulers, self.scaler = _as_list(optimizers), _as_list(schedulers), scaler
        for one in self.schedulers:
            _expect_state(one, "scheduler", "a learning-rate scheduler with state_dict and load_state_dict")
        if scaler is not None:
            _expect_state(scaler, "scaler", "a torch.amp.GradScaler")
        self._get_position: Callable[[], Any] | None = None
        self._set_position: Callable[[Any], object] | None = None
        if isinstance(data, (tuple, list)) and len(data) == 2 and all(callable(one) for one in data):
            self._get_position, self._set_position = data
        elif data is not None:
            _expect_state(data, "data", DATA_FORMS)
            self._get_position, self._set_position = data.state_dict, data.load_state_dict
        self.cannot_restore = list(self._missing())  # what will be missing after a resume, one phrase each
        for name, tensor in self.parameters().items():
            if tensor.is_meta:
                raise ValueError(f"parameter {name} is on the meta device; build the Guard after it has values")
            if tensor.layout != torch.strided:
                raise ValueError(f"parameter {name} is {tensor.layout}; snapshots need ordinary (strided) tensors")

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter by name: the model's, then those that only an optimizer knows."""
        named: dict[str, Tensor] = {_clean(name): parameter for name, parameter in self.model.named_parameters()}
        known: set[Tensor] = set(named.values())
        for index, optimizer in enumerate(self.optimizers):
            for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if parameter not in known:
                    known.add(parameter)
                    named[f"(of optimizer {index}) {number}"] = parameter
        return named

    def tensors(self) -> dict[str, Tensor]:
        """Parameters, and all buffers of the model, by the names that they have in a snapshot."""
        named = {f"parameter/{name}": parameter for name, parameter in self.parameters().items()}
        return named | {f"buffer/{_clean(name)}": buffer for name, buffer in self.model.named_buffers()}

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All but the settings: plain values, and the run's own tensors by name, which change as it continues."""
        names = {parameter: name for name, parameter in self.parameters().items()}
        tensors = self.tensors()
        own = [name for name, tensor in tensors.items() if name.startswith("buffer/") and not placements(tensor)]
        states: list[dict[str, Any]] = []
        for index, optimizer in enumerate(self.optimizers):
            state: dict[str, Any] = {}
            live: Mapping[Any, Any] = stepping(optimizer).state
            for key, value in live.items():
                if not isinstance(key, Tensor):
                    part = split(value, f"state/{index}/{NO_PARAMETER}/{key}", tensors)
                    state.setdefault(NO_PARAMETER, {})[key] = part
                    own += [ref.name for ref in refs(part) if not ref.sharded]
                elif key in names:
                    part = state[names[key]] = split(value, f"state/{index}/{names[key]}", tensors)
                    if placements(key):  # a plain tensor of a sharded parameter: each rank may have its own
                        own += [ref.name for ref in refs(part) if not ref.sharded and tensors[ref.name].dim()]
            states.append(state)
        plain = {
            "state": states,
            "own": own,
            "modules": {name: deepcopy(module.get_extra_state()) for name, module in self._with_extra_state()},
            "random": random_state({tensor.device for tensor in tensors.values()}),
            "position": deepcopy(self._get_position()) if self._get_position is not None else None,
            "parts": self.parts(),
        }
        return plain, tensors

    def read_settings(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Values that schedulers and scalers change after the optimizer's step: hyperparameters and their own state."""
        tensors: dict[str, Tensor] = {}
        groups = [
            [
                split({key: v for key, v in group.items() if key != "params"}, f"group/{index}/{number}", tensors)
                for number, group in enumerate(optimizer.param_groups)
            ]
            for index, optimizer in enumerate(self.optimizers)
        ]
        schedulers = [deepcopy(scheduler.state_dict()) for scheduler in self.schedulers]
        scaler = split(_scaler_state(self.scaler), "scaler", tensors)
        return {"groups": groups, "schedulers": schedulers, "scaler": scaler}, tensors

    def parts(self) -> dict[str, Any]:
        """The parts of the run, by class and name; a snapshot fits only the same parts."""
        names = {parameter: name for name, parameter in self.parameters().items()}
        sharding = [one for one in self.optimizers if stepping(one) is not one]
        return {
            "optimizers": [type(one).__name__ for one in self.optimizers],
            "parameter groups": [
                sorted(names[p] for p in group["params"]) for one in self.optimizers for group in one.param_groups
            ],
            "parameters whose state is on this rank": [
                sorted(names[p] for p in group["params"]) for one in sharding for group in stepping(one).param_groups
            ],
            "schedulers": [type(one).__name__ for one in self.schedulers],
            "scaler": [] if self.scaler is None else [type(self.scaler).__name__],
            "data": ["a position"] if self._get_position is not None else [],
        }

    def check_fit(self, plain: Mapping[str, Any], where: str) -> None:
        """Raise a `SnapshotError` that names the differences if a snapshot does not fit."""
        problems = [
            f"{part}: the snapshot has {_shown(plain['parts'][part])}, this run has {_shown(live)}"
            for part, live in self.parts().items()
            if plain["parts"][part] != live
        ]
        here = sizes_of(self.tensors())
        there = {name: size for name, size in plain["sizes"].items() if name.startswith(("parameter/", "buffer/"))}
        if missing := [name for name in here if name not in there]:
            problems.append(f"not in the snapshot: {_shown(missing)}")
        if unknown := [name for name in there if name not in here]:
            problems.append(f"in the snapshot but not in this run: {_shown(unknown)}")
        for name in [name for name in here if name in there and tuple(here[name]) != tuple(there[name])][:5]:
            saved, live = (f"{tuple(size)} {str(dtype)[6:]}" for size, dtype in (there[name], here[name]))
            problems.append(f"{name}: {saved} in the snapshot, {live} in this run")
        if problems:
            raise SnapshotError(
                f"{where} does not fit this run:\n  " + "\n  ".join(problems) + "\nNothing was changed. Build model, "
                "optimizers, schedulers, scaler and data as they were when it was taken, or use another folder."
            )

    def sharded_like(self, plain: Mapping[str, Any]) -> dict[str, Tensor]:
        """For each tensor of a snapshot that is sharded here, a live tensor that is sharded in the same way."""
        parameters = self.parameters()
        found = {name: tensor for name, tensor in self.tensors().items() if placements(tensor)}
        for state in plain["state"]:
            for name, shape in state.items():
                owner = parameters.get(name)
                if owner is not None and placements(owner):  # moments are sharded as their parameter is
                    for ref in refs(shape):
                        if plain["sizes"][ref.name][0] == owner.shape and (ref.sharded or owner.dim()):
                            found[ref.name] = owner
        return found

    def restore(self, plain: Mapping[str, Any], copies: Mapping[str, Tensor], *, position: bool) -> None:
        """Copy everything back, into the tensors that are there. The snapshot must fit.

        `plain` and `copies` are from `read` and `read_settings`; `position` restores random generators and the data
        position too.
        """
        parameters = self.parameters()
        pairs = [(dense(tensor), copies[name]) for name, tensor in self.tensors().items()]
        device = next((tensor.device for tensor in parameters.values()), torch.device("cpu"))

        def renew(ref: TensorRef, live: Any, owner: Tensor | None = None) -> Tensor:
            target: Tensor = live
            copied = copies[ref.name]
            fits = isinstance(live, Tensor) and (dense(live).shape, live.dtype) == (copied.shape, copied.dtype)
            if not fits or live.device.type != ref.device:
                on_host = ref.device == "cpu"
                like_owner = owner is not None and dense(owner).shape == copied.shape and (copied.dim() or ref.sharded)
                if owner is not None and like_owner and (placements(owner) or not on_host):
                    target = torch.empty_like(owner, dtype=copied.dtype, requires_grad=False)
                else:
                    where = torch.device("cpu") if on_host else owner.device if owner is not None else device
                    target = torch.empty_like(copied, device=where, pin_memory=False)
            pairs.append((dense(target), copied))
            return target

        for scheduler, state in zip(self.schedulers, plain["schedulers"], strict=True):
            scheduler.load_state_dict(deepcopy(state))  # first: some write into the optimizers' groups as they load
        for optimizer, saved, groups in zip(self.optimizers, plain["state"], plain["groups"], strict=True):
            live_state = stepping(optimizer).state
            loose = saved.get(NO_PARAMETER, {})
            wanted = {**loose, **{parameters[name]: shape for name, shape in saved.items() if name in parameters}}
            for key in [key for key in live_state if key not in wanted]:
                del live_state[key]
            for key, shape in wanted.items():
                owner = key if isinstance(key, Tensor) else None
                live = live_state.get(key)
                value = join(shape, live, partial(renew, owner=owner))
                if isinstance(live, dict) and isinstance(value, dict):
                    _replace(live, value)
                else:
                    live_state[key] = value
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                _replace(group, {"params": group["params"], **join(settings, group, renew)})
        copy_all(pairs)
        if plain["scaler"]:
            self.scaler.load_state_dict(join(plain["scaler"], None, lambda ref, _: copies[ref.name].item()))
        for name, module in self._with_extra_state():
            if name in plain["modules"]:
                module.set_extra_state(deepcopy(plain["modules"][name]))
        if position:
            if self._set_position is not None:
                self._set_position(deepcopy(plain["position"]))
            set_random_state(plain["random"])

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                yield _clean(name), module

    def _missing(self) -> Iterator[str]:
        if self._get_position is None:
            yield f"the data position: pass data=, {DATA_FORMS}"
        for optimizer in self.optimizers:
            if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
                with suppress(Exception):  # some work on certain ranks only
                    own = sorted(set(optimizer.state_dict()) - {"state", "param_groups"})
                    if own:
                        yield f"what {type(optimizer).__name__} keeps outside its state and groups: {', '.join(own)}"


def random_state(devices: Collection[torch.device]) -> dict[str, Any]:
    """The state of Python's, numpy's and torch's random generators; waits for no device."""
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": {index: torch.cuda.get_rng_state(index) for index in cuda},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set every generator as `random_state` found it, except those of devices that are not here."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for index, value in state["cuda"].items():
        if torch.cuda.is_available() and index < torch.cuda.device_count():
            torch.cuda.set_rng_state(value, index)


def _scaler_state(scaler: Any) -> Any:
    """A GradScaler's `state_dict`, with tensors in place of the numbers that would block the host."""
    if scaler is None:
        return None
    scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    if not isinstance(scale, Tensor) or not isinstance(tracker, Tensor) or not scaler.is_enabled():
        return scaler.state_dict()
    factors = {name: getattr(scaler, f"get_{name}")() for name in ("growth_factor", "backoff_factor")}
    interval = {"growth_interval": scaler.get_growth_interval()}
    return {"scale": scale, **factors, **interval, "_growth_tracker": tracker}


def _replace(target: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    for key in set(target) - set(items):
        del target[key]
    target.update(items)


def _expect_state(thing: Any, name: str, expected: str) -> None:
    if not (callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))):
        raise TypeError(f"{name} is a {type(thing).__name__}, whose state cannot be kept; expected {expected}")


def _as_list(things: Any) -> list[Any]:
    things = list(things) if isinstance(things, (list, tuple)) else [] if things is None else [things]
    # Accelerate's wrapper is an Optimizer in name only: the real one is inside.
    return [getattr(one, "optimizer", one) if type(one).__name__ == "AcceleratedOptimizer" else one for one in things]


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "")  # torch.compile of a part of the model


def _shown(names: Sequence[Any]) -> str:
    texts = [str(name) if isinstance(name, str) else f"({_shown(name)})" for name in names]
    return listed(texts, 5) or "none"
