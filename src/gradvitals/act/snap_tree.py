"""Nested state, taken apart into its shape and its tensors, and put together again in the tensors that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from gradvitals.distributed.shards import local as part_of

TENSOR = "gradvitals.tensor"
"""The key of a mark: where a tensor stood, the shape of the state holds ``{TENSOR: name, "device": ...}``."""

Mark = dict[str, Any]
Renew = Callable[[Mark, Any], Any]


def split(tree: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The shape of `tree`, with marks where tensors are; the tensors are added to `tensors`, named after their place.

    Example:
        >>> found = {}
        >>> split({"step": 3, "moments": [torch.ones(2)]}, "state", found)
        {'step': 3, 'moments': [{'gradvitals.tensor': 'state/moments/0', 'device': 'cpu'}]}
        >>> list(found)
        ['state/moments/0']
    """
    if isinstance(tree, Tensor):
        tensors[name] = tree
        mark: Mark = {TENSOR: name, "device": tree.device.type}
        return mark | {"sharded": True} if is_sharded(tree) else mark
    if isinstance(tree, dict):
        return {key: split(value, f"{name}/{key}", tensors) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return _like(tree, [split(value, f"{name}/{index}", tensors) for index, value in enumerate(tree)])
    return deepcopy(tree)


def join(shape: Any, live: Any, renew: Renew) -> Any:
    """Put a state together again.

    Args:
        shape: What `split` returned.
        live: The state that is there now; what of it stands in the same place is shown to `renew`.
        renew: Called with each mark and what stands in its place now; returns what to put there.
    """
    if is_mark(shape):
        return renew(shape, live)
    if isinstance(shape, dict):
        there = live if isinstance(live, dict) else {}
        return {key: join(value, there.get(key), renew) for key, value in shape.items()}
    if isinstance(shape, (list, tuple)):
        same = isinstance(live, (list, tuple)) and len(live) == len(shape)
        items = zip(shape, live if same else [None] * len(shape), strict=True)
        return _like(shape, [join(value, now, renew) for value, now in items])
    return deepcopy(shape)


def is_mark(value: Any) -> bool:
    """Whether a tensor stood here."""
    return isinstance(value, dict) and TENSOR in value


def marks(shape: Any) -> list[Mark]:
    """All marks in a shape."""
    if is_mark(shape):
        return [shape]
    if isinstance(shape, (dict, list, tuple)):
        return [mark for value in (shape.values() if isinstance(shape, dict) else shape) for mark in marks(value)]
    return []


def _like(model: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple of the kind of `model`."""
    if isinstance(model, tuple):
        return type(model)(*items) if hasattr(model, "_fields") else tuple(items)
    return items


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor: seen whole, while each process holds its part."""
    return hasattr(tensor, "to_local")


def dense(tensor: Tensor) -> Tensor:
    """The memory behind a tensor that this process holds: without autograd, its own shard, each element once."""
    local = part_of(tensor).detach()
    if 0 in local.stride():  # an expanded dimension is one element seen many times; it could not be written to
        for dim, (size, stride) in enumerate(zip(local.shape, local.stride(), strict=True)):
            if stride == 0 and size > 1:
                local = local.narrow(dim, 0, 1)
    return local


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into its first, verbatim, without waiting for a device."""
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        targets, sources = by_device.setdefault(target.device, ([], []))
        targets.append(target)
        sources.append(source)
    with torch.no_grad():
        for targets, sources in by_device.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)
