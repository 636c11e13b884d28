"""How far one optimizer step moved the weights, for any optimizer, without a copy of the model.

Up to `stats.SAMPLE_ELEMENTS` evenly spread coordinates of each tensor are read before and after the step. The
change of smaller tensors is exact; that of larger ones is an estimate with a standard error near 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvitals.measure import stats
from gradvitals.measure.packet import Packet


class UpdateNorms:
    """Samples one optimizer's parameters before its step and measures their change after it."""

    def __init__(self) -> None:
        self._samplers: tuple[tuple[int, ...], list[tuple[stats.Sampler, list[int]]]] | None = None
        self._before: list[Tensor] = []

    @torch.no_grad()
    def before(self, rows: Sequence[int], parameters: Sequence[Tensor]) -> None:
        """Remember a sample of the weights."""
        if self._samplers is None or self._samplers[0] != tuple(rows):
            self._samplers = (tuple(rows), stats.samplers(rows, parameters))
        self._before = [sampler.gather([parameters[p] for p in chosen]) for sampler, chosen in self._samplers[1]]

    @torch.no_grad()
    def after(self, packet: Packet, parameters: Sequence[Tensor]) -> dict[int, float]:
        """Put sums of squared changes into the packet; return the share of each tensor they cover."""
        fractions: dict[int, float] = {}
        if self._samplers is None:
            return fractions
        for (sampler, chosen), before in zip(self._samplers[1], self._before, strict=True):
            change = sampler.gather([parameters[p] for p in chosen]) - before
            packet.add("update_sq", sampler.sums(change.square()), sampler.rows)
            fractions.update(zip(sampler.rows, sampler.fractions, strict=True))
        self._before = []
        return fractions
