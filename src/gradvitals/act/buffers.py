"""Buffers that a forward pass changes, such as the running statistics of batch norm.

A batch that is left out has gone through the model all the same. With NaN in it, batch norm would never recover: so
what it did to the buffers is undone, too.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

Pairs = list[tuple[Tensor, Tensor]]


class Buffers:
    """Remembers the buffers that steps change, and puts them back."""

    def __init__(self, model: nn.Module) -> None:
        self._all = list(model.buffers())
        # Batch norm writes its statistics where autograd does not count it; all others show by their version.
        norms = (module for module in model.modules() if isinstance(module, _NormBase))
        self._always = {id(buffer) for module in norms for buffer in module.buffers(recurse=False)}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {id(live): (live, live.clone()) for live in self._all}
        """Buffers, and what they were after the last step that was made."""
        self._ever: set[int] = set()
        """Those that have been seen to change."""
        self._versions = [live._version for live in self._all]
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self._group()

    def _group(self) -> None:
        groups: dict[tuple[torch.device, torch.dtype], Pairs] = defaultdict(list)
        for live, kept in self._kept.values():
            groups[live.device, live.dtype].append((live, kept))
        self._groups = [([live for live, _ in pairs], [kept for _, kept in pairs]) for pairs in groups.values()]

    @torch.no_grad()
    def remember(self) -> None:
        """A step was made: what the buffers hold now is right."""
        changed = {
            id(live): live
            for live, then in zip(self._all, self._versions, strict=True)
            if live._version != then or id(live) in self._always or id(live) in self._ever
        }
        if changed.keys() != self._kept.keys():  # most models have buffers that never change, and need no copy
            self._ever |= changed.keys()
            self._kept = {key: (live, self._kept.get(key, (live, live.clone()))[1]) for key, live in changed.items()}
            self._group()
        for live, kept in self._groups:
            torch._foreach_copy_(kept, live)
        self._versions = [live._version for live in self._all]

    @torch.no_grad()
    def put_back(self, where: Tensor | None = None) -> None:
        """A step was left out: what its forward pass did to the buffers is undone.

        Args:
            where: A number on the device that is not 0 where it was left out; None where that is known.
        """
        for live, kept in self._groups:
            if where is None:
                torch._foreach_copy_(live, kept)
            else:
                left_out = where.to(live[0].device) != 0
                right = [torch.where(left_out, old, new) for old, new in zip(kept, live, strict=True)]
                torch._foreach_copy_(live, right)
