"""What a variance-reduced optimizer multiplies gradients by: each tensor's mean factor, and how many are clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.measure.packet import Packet

AS_GOOD_AS_ONE = 1 - 1e-6
"""A ratio of two equal numbers may be rounded to just below 1."""


class FactorSums:
    """Listens to one optimizer during a measured step, if it tells its factors."""

    def __init__(self, optimizer: torch.optim.Optimizer, on_error: Callable[[Exception], None]) -> None:
        self.optimizer: Any = optimizer
        self.on_error = on_error
        self.available = hasattr(optimizer, "register_factors_hook")
        self._handle: Any = None
        self._rows: dict[int, int] = {}
        self._packet = Packet()

    def listen(self, packet: Packet, rows: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        """Put what the coming step multiplies gradients by into a packet."""
        self._packet, self._rows = packet, {id(p): row for p, row in zip(parameters, rows, strict=True)}
        self.stop()
        self._handle = self.optimizer.register_factors_hook(self._hear)

    def stop(self) -> None:
        """The step is over."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _hear(self, parameters: Sequence[Tensor], factors: Sequence[Tensor], gamma: float) -> None:
        try:
            mine = [(self._rows[id(p)], f) for p, f in zip(parameters, factors, strict=True) if id(p) in self._rows]
            if mine:
                self._add([row for row, _ in mine], [factor.detach() for _, factor in mine], gamma)
        except Exception as error:
            self.stop()
            self.on_error(error)

    def _add(self, rows: Sequence[int], factors: Sequence[Tensor], gamma: float) -> None:
        packet = self._packet
        packet.add_each("factor_sum", torch._foreach_norm(list(factors), 1.0), rows)  # none is negative
        packet.add_each("factor_low", [torch.count_nonzero(factor <= gamma) for factor in factors], rows)
        packet.add_each("factor_one", [torch.count_nonzero(factor >= AS_GOOD_AS_ONE) for factor in factors], rows)
