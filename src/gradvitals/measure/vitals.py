"""What an optimizer saw in passing: gradients, weights and moments that need not be read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradvitals.measure.packet import Packet
from gradvitals.measure.rawstep import RawStep
from gradvitals.measure.views import HeadView

OF_GRADIENTS = {"square": "norm", "nonfinite": "nonfinite"}
AFTER_STEP = {"weight": "weight", "update": "update_sq"}
OF_MOMENTS = {"first": "exp_avg_norm", "second": "exp_avg_sq_sum", "step": "adam_step"}
IN_DETAIL = {"largest": "max", "nonzero": "nonzero", "weight_before": "weight_before"}
OF_MOMENTS_IN_DETAIL = {"alive": "alive_count", "below_one": "below_one_count"}
"""Under which name each number of a `Vitals` goes into a packet."""

METRIC_OF = {"max": "grad/max", "nonzero": "grad/zero_fraction", "weight_before": "radial_gsnr"}
METRIC_OF |= {"nonfinite": "grad/nonfinite", "update_sq": "update/norm", "below_one_count": "gsnr/below_one_fraction"}


class VitalSums:
    """Listens to one optimizer, if it tells what it sees."""

    def __init__(self, optimizer: torch.optim.Optimizer, metrics: Sequence[str]) -> None:
        self.optimizer: Any = optimizer
        # What a variance-reduced optimizer sees are gradients that it has scaled.
        self.available = hasattr(optimizer, "register_vitals_hook") and not hasattr(optimizer, "register_factors_hook")
        self.metrics = set(metrics)
        self._handle: Any = None
        self._rows: dict[int, int] = {}
        self._heads: Mapping[int, HeadView] = {}
        self._told: list[Any] = []

    @property
    def expected(self) -> bool:
        """Whether the coming step will most likely tell."""
        return self.available and self._handle is not None and bool(self.optimizer.tells_vitals)

    @property
    def max_norm(self) -> float | None:
        """What the optimizer clips gradients to by itself."""
        limit: float | None = getattr(self.optimizer, "max_norm", None)
        return limit

    def follow(self, rows: Sequence[int], parameters: Sequence[nn.Parameter], heads: Mapping[int, HeadView]) -> None:
        """Listen from now on, for these rows; their heads are told too where they lie one after the other."""
        if not self.available:
            return
        self.stop()
        self._rows = {id(parameter): row for row, parameter in zip(rows, parameters, strict=True)}
        self._heads = heads
        views = {p: heads[row] for row, p in zip(rows, parameters, strict=True) if row in heads}
        slices = {p: len(view.heads) for p, view in views.items() if view.lie_apart(p)}
        self._handle = self.optimizer.register_vitals_hook(self._told.append, slices)

    def stop(self) -> None:
        """Listen no more."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def begin(self) -> None:
        """A step is about to be made."""
        self._told.clear()

    def take(self, draft: RawStep, reading: Packet | None, *, moments: bool) -> set[int]:
        """Put what was told of the step into packets; returns the rows it was told of.

        Args:
            draft: The step.
            reading: Takes what is told of gradients; None where these have been read before the step.
            moments: Whether the moments are wanted.
        """
        rows: set[int] = set()
        for vitals in self._told:
            places = [i for i, p in enumerate(vitals.parameters) if id(p) in self._rows]
            mine = [self._rows[id(vitals.parameters[i])] for i in places]
            whole = len(places) == len(vitals.parameters)
            rows.update(mine)
            for into, names in self._wanted(draft, reading, moments):
                for told, name in names.items():
                    if name not in METRIC_OF or METRIC_OF[name] in self.metrics:
                        values = vitals.numbers[told]
                        into.add(name, values if whole else values[places], mine)
            if reading is not None and draft.full:
                for parameter, norms in vitals.slices.items():
                    row = self._rows.get(id(parameter))
                    if row is not None:
                        reading.add("heads", norms, self._heads[row].slots)
            if draft.full and moments:
                draft.betas |= dict.fromkeys(mine, vitals.betas)
        self._told.clear()
        return rows

    @staticmethod
    def _wanted(draft: RawStep, reading: Packet | None, moments: bool) -> list[tuple[Packet, dict[str, str]]]:
        wanted = []
        if reading is not None:
            wanted.append((reading, OF_GRADIENTS | (IN_DETAIL if draft.detail else {})))
        if draft.full:
            wanted.append((draft.packet, AFTER_STEP | (OF_MOMENTS if moments else {})))
        if draft.detail and moments:
            wanted.append((draft.packet, OF_MOMENTS_IN_DETAIL))
        return wanted
