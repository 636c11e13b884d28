"""Buffers that a forward pass changes, such as the running statistics of batch norm.

A batch that is left out has gone through the model all the same. With NaN in it, batch norm would never recover: so
what it did to the buffers is undone, too.
"""

from __future__ import annotations

import weakref
from collections import defaultdict

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gradvitals.distributed.shards import local


class Buffers:
    """Keeps a copy of every buffer as it was after the last step that was made, and puts it back."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: list[tuple[nn.Module, str, bool]] = []
        """Module, name, and whether to copy the buffer at every step."""
        self._kept: dict[int, tuple[Tensor, Tensor, int]] = {}
        """By place: the buffer, its copy, and its version when it was copied."""
        self.remember()
        # A checkpoint that is loaded later is not to be undone.
        reference = weakref.WeakMethod(self.remember)
        self._hook = model.register_load_state_dict_post_hook(lambda *_: (reference() or int)())

    def close(self) -> None:
        """Hear of the model no more."""
        self._hook.remove()

    def _find(self) -> None:
        modules = list(self._model.modules())
        # Batch norm writes its statistics where autograd does not count it; all others show by their version.
        self._places = [(one, name, isinstance(one, _NormBase)) for one in modules for name in one._buffers]
        self._kept.clear()

    @torch.no_grad()
    def remember(self) -> None:
        """A step was made: what the buffers hold now is right."""
        if any(name not in one._buffers for one, name, _ in self._places) or not self._places:
            self._find()
        changed: list[tuple[Tensor, Tensor]] = []
        for place, (module, name, always) in enumerate(self._places):
            live = module._buffers[name]
            if live is None:
                continue
            kept = self._kept.get(place)
            if kept is None or kept[0] is not live:
                self._kept[place] = (live, local(live).clone(), _version(live))
            elif always or kept[2] != _version(live):
                changed.append((kept[1], local(live)))
                self._kept[place] = (live, kept[1], _version(live))
        _copy_all(changed)

    @torch.no_grad()
    def put_back(self, where: Tensor | None = None) -> None:
        """A step was left out: what its forward pass did to the buffers is undone.

        Args:
            where: A number on the device that is not 0 where it was left out; None where that is known.
        """
        pairs: list[tuple[Tensor, Tensor]] = []
        for place, (live, kept, version) in self._kept.items():
            module, name, always = self._places[place]
            now = module._buffers.get(name)
            if now is not live and where is None:
                module._buffers[name] = now = live  # a forward pass may also put a new tensor there
            if now is not None and (always or now is not live or _version(live) != version):
                here = local(now)
                old = kept if where is None else torch.where(where.to(here.device) != 0, kept, here)
                pairs.append((here, old))
        _copy_all(pairs)


def _version(buffer: Tensor) -> int:
    """Moves with every change, of the whole or of this rank's part of it."""
    part = local(buffer)
    return buffer._version + (0 if part is buffer else part._version)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for to, source in pairs:
        groups[to.device, to.dtype].append((to, source))
    for group in groups.values():
        torch._foreach_copy_([to for to, _ in group], [source for _, source in group])
