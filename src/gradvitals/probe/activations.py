"""What activation functions let through: units that are always off, values that are at the end of their range.

Calls are seen wherever they are made, in a module or as a function: `nn.ReLU`, `F.relu`, `x.relu()`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

KINDS: dict[Any, str] = {
    **dict.fromkeys((F.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu_), "relu"),
    F.relu6: "relu6",
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, Tensor.sigmoid_, torch.sigmoid_, F.sigmoid), "sigmoid"),
    **dict.fromkeys((torch.tanh, Tensor.tanh, Tensor.tanh_, torch.tanh_, F.tanh), "tanh"),
}
RANGES = {"sigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}
NEAR = 0.01
"""Of the width of its range from an end, a value counts as saturated; its slope is then below 4 % of the largest."""


SMOOTH = ("gelu", "silu", "swish", "mish")
"""In the name of a class: activations that are made from a sigmoid or a tanh, and do not saturate."""

CHANNELS_FIRST = (_ConvNd, _NormBase, nn.GroupNorm)

Key = tuple[str, str, int]
"""Module, kind, and the how many-th of this kind in it in one forward pass."""


@dataclass
class Activation:
    """Sums over everything that one activation of one module has let through."""

    kind: str
    active: Tensor
    """For each unit, whether it ever was above zero."""
    zeros: int = 0
    saturated: int = 0
    values: int = 0


class _Seen(TorchFunctionMode):
    def __init__(self, activations: Activations) -> None:
        super().__init__()
        self.activations = activations

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = KINDS.get(func) if callable(func) and isinstance(result, Tensor) else None
        if kind is not None:
            self.activations.note(kind, result)
        elif getattr(func, "__name__", "") in ("add", "__add__", "__radd__", "add_") and 1 in map(_plain, args):
            self.activations.is_inner(args)
        return result


def _plain(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else None


class Activations:
    """Looks on while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: dict[Key, Activation] = {}
        self.notes: dict[str, None] = {}
        """What could not be looked at, once each."""
        self._left_out: set[Key] = set()
        self._inside: list[tuple[str, nn.Module]] = []
        self._calls: dict[tuple[str, str], int] = {}
        self._last: tuple[Key, Tensor] | None = None
        self._channels_first: bool | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look on inside; hooks are gone afterwards."""
        handles: list[RemovableHandle] = []
        try:
            for name, module in self.model.named_modules():
                handles.append(module.register_forward_pre_hook(self._entering(name)))
                handles.append(module.register_forward_hook(self._leaving, always_call=True))
            with _Seen(self):
                yield
        finally:
            self._inside.clear()
            self._last = None
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, *_: object) -> None:
            if module is self.model:
                self._calls.clear()
                self._channels_first = None
            self._inside.append((name, module))

        return enter

    def _leaving(self, module: nn.Module, _: object, output: Any) -> None:
        if self._inside:
            self._inside.pop()
        if isinstance(module, CHANNELS_FIRST):
            self._channels_first = True
        elif next(module.parameters(recurse=False), None) is not None:
            self._channels_first = False
        # What the model ends with is meant to come to the ends of its range.
        if module is self.model and self._last is not None and output is self._last[1] and self._last[0][1] in RANGES:
            self._left_out.add(self._last[0])

    def is_inner(self, args: tuple[Any, ...]) -> None:
        """1 + tanh(...) is a part of GELU, written out, and saturates no more than that does."""
        if self._last is not None and self._last[0][1] == "tanh" and any(arg is self._last[1] for arg in args):
            self._left_out.add(self._last[0])

    def note(self, kind: str, result: Tensor) -> None:
        """Take in what one call gave."""
        values = result.detach()
        name, module = self._inside[-1] if self._inside else ("", self.model)
        if values.dim() == 0 or not values.numel() or any(part in type(module).__name__.lower() for part in SMOOTH):
            return
        number = self._calls[name, kind] = self._calls.get((name, kind), 0) + 1
        key = (name, kind, number)
        self._last = (key, result)
        # Units are channels behind a convolution, and the last dimension in everything else.
        first = self._channels_first if self._channels_first is not None else values.dim() >= 4
        unit = 1 if first and values.dim() >= 3 else values.dim() - 1
        others = [dim for dim in range(values.dim()) if dim != unit]
        positive = values > 0
        active = positive.any(dim=tuple(others)) if others else positive
        record = self.found.setdefault(key, Activation(kind, torch.zeros_like(active)))
        if record.active.shape != active.shape:
            place = name or "the model"
            words = f"layers: {kind} in {place} has another number of units in some batches, which were left out"
            self.notes[words] = None
            return
        record.active |= active
        record.values += values.numel()
        record.zeros += int((values == 0).sum())
        if kind in RANGES:
            low, high = RANGES[kind]
            margin = NEAR * (high - low)
            record.saturated += int(((values < low + margin) | (values > high - margin)).sum())

    def records(self) -> list[dict[str, Any]]:
        """One plain record for each activation that was seen."""
        return [
            {
                "module": module if number == 1 else f"{module or 'forward'}, {kind} {number}",
                "kind": kind,
                "units": found.active.numel(),
                "dead": (dead := found.active.numel() - int(found.active.sum()) if "relu" in kind else 0),
                "dead_share": dead / max(1, found.active.numel()),
                "zero_share": found.zeros / max(1, found.values),
                "saturated_share": found.saturated / max(1, found.values) if kind in RANGES else math.nan,
                "values": found.values,
            }
            for (module, kind, number), found in self.found.items()
            if (module, kind, number) not in self._left_out
        ]
