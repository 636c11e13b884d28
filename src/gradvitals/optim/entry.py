"""What is known of one parameter whose gradients are collected."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


class Entry:
    """What is known of one parameter. Its hooks have it at hand: tensors are slow to look up by."""

    __slots__ = (
        "after", "arriving", "before", "count", "dirty", "dtype", "empty", "group", "handles", "noise", "noise_dtype",
        "norm", "pending", "readable", "taken", "touched", "weak",
    )  # fmt: skip

    def __init__(self, parameter: Tensor) -> None:
        self.weak = weakref.ref(parameter)
        self.handles: tuple[RemovableHandle, ...] = ()
        self.before: Mapping[int, Any] = {}
        """All hooks that see a gradient before it is added, ours and others'."""
        self.after: Mapping[int, Any] = {}
        """All that are called afterwards."""
        self.group = 0
        self.noise_dtype: torch.dtype | None = None
        self.count = 0
        """Gradients received since the last step."""
        self.noise: Tensor | None = None
        """Where squared deviations are summed, whatever is there now."""
        self.dtype = parameter.dtype
        """The parameter's own, when that was laid out."""
        self.readable = False
        """Whether kernels can read it."""
        self.touched = False
        """Whether there are deviations of parts since the last step."""
        self.dirty = False
        """Whether what is there is of no use, where nothing has been touched."""
        self.arriving: Tensor | None = None
        """A part that autograd is about to add to ``.grad``."""
        self.empty = False
        """Whether a function gave None for a gradient: autograd adds nothing, but calls hooks."""
        self.taken: Tensor | None = None
        """``.grad``, of which autograd is to know nothing for a moment."""
        self.pending = False
        """Whether a part is held."""
        self.norm: Tensor | None = None
        """Of ``.grad`` when backward ended."""

    def forget(self) -> None:
        """Begin anew."""
        self.dirty, self.touched = self.dirty or self.touched, False
        self.count, self.pending = 0, False
        self.arriving = self.taken = self.norm = None
