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
    def __init__(self, note: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        kind = KINDS.get(func) if callable(func) and isinstance(result, Tensor) else None
        if kind is not None:
            self.note(kind, result.detach())
        return result


class Activations:
    """Looks on while a model runs."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: dict[tuple[str, str], Activation] = {}
        self._inside: list[str] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look on inside; hooks are gone afterwards."""
        handles: list[RemovableHandle] = []
        try:
            for name, module in self.model.named_modules():
                handles.append(module.register_forward_pre_hook(self._entering(name)))
                handles.append(module.register_forward_hook(self._leaving, always_call=True))
            with _Seen(self._note):
                yield
        finally:
            self._inside.clear()
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        return lambda *_: self._inside.append(name)

    def _leaving(self, *_: object) -> None:
        if self._inside:
            self._inside.pop()

    def _note(self, kind: str, values: Tensor) -> None:
        if values.dim() == 0 or not values.numel():
            return
        # Units are channels in pictures, and the last dimension in everything else.
        unit = 1 if values.dim() >= 4 else values.dim() - 1
        others = [dim for dim in range(values.dim()) if dim != unit]
        positive = values > 0
        active = positive.any(dim=tuple(others)) if others else positive
        key = (self._inside[-1] if self._inside else "", kind)
        record = self.found.setdefault(key, Activation(kind, torch.zeros_like(active)))
        if record.active.shape != active.shape:
            return  # one module, several sizes: units cannot be told apart
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
                "module": module,
                "kind": kind,
                "units": found.active.numel(),
                "dead": (dead := found.active.numel() - int(found.active.sum()) if "relu" in kind else 0),
                "dead_share": dead / max(1, found.active.numel()),
                "zero_share": found.zeros / max(1, found.values),
                "saturated_share": found.saturated / max(1, found.values) if kind in RANGES else math.nan,
                "values": found.values,
            }
            for (module, kind), found in self.found.items()
        ]
