"""The parametrization: a weight as it is stored becomes the weight as the model uses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

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
