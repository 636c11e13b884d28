"""Whether a rank's own gradient is finite, at every step, before the reduction hides whose it was."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.measure.packet import Packet
from gradvitals.measure.ranks.fsdp import Place, sharded_units
from gradvitals.measure.ranks.shards import local
from gradvitals.measure.rows import Rows


class OwnGradient:
    """Takes the norm of one small gradient as it arrives: backward reaches it last, so NaN from anywhere is in it.

    Args:
        rows: The watched parameters.
        packet: Called for where to put it: the packet of the step in progress.
    """

    def __init__(self, rows: Rows, packet: Callable[[], Packet]) -> None:
        self._packet = packet
        self._row = -1
        self._leaf: Tensor | None = None
        self._handle: Any = None
        self._forward_handle: Any = None
        self.follow(rows)

    def follow(self, rows: Rows) -> None:
        """Listen to the smallest parameter of the layer nearest the input."""
        trainable = [row for row in rows.order if rows.parameters[row].requires_grad]
        if not trainable:
            return
        layers = [rows.layout.tensors[row].layer for row in trainable]
        first = [row for row, layer in zip(trainable, layers, strict=True) if layer == layers[0]]
        chosen = min(first, key=lambda row: rows.parameters[row].numel())
        if chosen == self._row:
            return
        self.stop()
        self._row = chosen
        for unit, (place,) in sharded_units(rows.model, rows.parameters, [chosen]).items():
            self._follow_whole(unit, place)
            return
        self._listen(rows.parameters[chosen])

    def _follow_whole(self, unit: nn.Module, place: Place) -> None:
        """Listen to what `fully_shard` puts in the place of a parameter, which is there when its unit runs."""
        reference = weakref.ref(self)

        def before_forward(*_: Any) -> None:
            own = reference()
            if own is not None:
                with contextlib.suppress(Exception):  # in the midst of forward: it must go on
                    own._listen(place.current())

        self._forward_handle = unit.register_forward_pre_hook(torch.compiler.disable(before_forward))

    def _listen(self, leaf: Tensor | None) -> None:
        if leaf is None or leaf is self._leaf:
            return
        reference = weakref.WeakMethod(self._hear)  # a parameter must not hold its watcher, see Sentinel

        def incoming(grad: Tensor) -> None:
            hear = reference()
            if hear is not None:
                hear(grad)

        if self._handle is not None:
            self._handle.remove()
        self._leaf, self._handle = leaf, leaf.register_hook(incoming)

    @torch.no_grad()
    def _hear(self, grad: Tensor) -> None:
        with contextlib.suppress(Exception):  # in the midst of backward: it must go on
            self._add(grad)

    def _add(self, grad: Tensor) -> None:
        if not grad.is_sparse and not (grad.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._packet().add("own_norm", torch.linalg.vector_norm(local(grad), dtype=torch.float32))

    def stop(self) -> None:
        """Stop listening."""
        for handle in (self._handle, self._forward_handle):
            if handle is not None:
                handle.remove()
        self._leaf = self._handle = self._forward_handle = None
