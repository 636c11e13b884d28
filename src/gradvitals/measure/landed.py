"""A step whose sums have reached the host, and the questions an Interpreter asks of it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.measure.rawstep import RawStep
from gradvitals.types import Layout, Reading, Stage

Floats = NDArray[np.float64]

STAGES: tuple[Stage, ...] = ("raw", "unscaled", "clipped")


class Table:
    """What does not change from step to step."""

    def __init__(self, layout: Layout, slots: list[tuple[int, int]]) -> None:
        self.layout = layout
        self.names = tuple(info.name for info in layout.tensors)
        self.with_whole = ("", *self.names)
        self.sizes: Floats = np.array([float(info.numel) for info in layout.tensors])
        self.slot_rows, self.slot_heads = np.array(slots, dtype=np.int64).reshape(-1, 2).T


class LandedStep:
    """A RawStep that has arrived, with the questions an Interpreter asks of it."""

    def __init__(self, raw: RawStep, table: Table) -> None:
        self.raw = raw
        self.table = table
        self.names = table.names
        self.num_rows = len(table.names)
        self.outlier = False
        self.arrived = arrived = raw.shipment.wait()
        self.loss_scale, self.grad_scale = np.ones((2, self.num_rows))
        self.under_scaler = False
        for index, station in enumerate(raw.stations):
            if f"scale{index}" in arrived and not station.ignore_scale:
                self.under_scaler = True
                self.loss_scale[station.rows] = arrived[f"scale{index}"].values[0]
                if station.scaled:
                    self.grad_scale[station.rows] = self.loss_scale[station.rows]
        self.present = arrived["norm"].present(self.num_rows) if "norm" in arrived else np.zeros(self.num_rows, bool)
        self.norm = self.rows("norm") / self.grad_scale if "norm" in arrived else np.full(self.num_rows, np.nan)

    def has(self, name: str) -> bool:
        """Whether anything came under a name."""
        return name in self.arrived

    def rows(self, name: str) -> Floats:
        """One number a tensor, nan where there is none."""
        return self.arrived[name].by_row(self.num_rows)

    def parts(self, name: str, num_rows: int) -> Floats:
        """One number a row, 0 where a micro-batch did not reach it: no gradient is a gradient of zero."""
        if name not in self.arrived:
            return np.zeros(num_rows)
        return np.where(self.arrived[name].present(num_rows), self.arrived[name].by_row(num_rows), 0.0)

    def reached(self, name: str, num_rows: int) -> NDArray[np.bool_]:
        """Which rows something came for under a name."""
        return self.arrived[name].present(num_rows) if name in self.arrived else np.zeros(num_rows, dtype=bool)

    def total(self, norms: Floats, name: str) -> float:
        """The norm of all tensors read under a name; nan where one of them is."""
        return math.sqrt(np.square(norms[self.arrived[name].present(self.num_rows)]).sum())

    def by_head(self, of_slots: Floats) -> Floats:
        """Sum the squares of a head's parts over the q, k and v weights it has."""
        sums: Floats = np.zeros(len(self.table.layout.heads))
        np.add.at(sums, self.table.slot_heads, of_slots)
        return sums

    def loss(self) -> float | None:
        """The step's loss, averaged over its observations by their size; None where the loop told none."""
        if not self.raw.losses:
            return None
        losses = [
            loss if isinstance(loss, float) else float(self.arrived[f"loss{i}"].values[0])
            for i, loss in enumerate(self.raw.losses)
        ]
        sizes = self.raw.sizes
        if len(sizes) == len(losses) and all(size is not None for size in sizes):
            return float(np.average(losses, weights=np.array(sizes, dtype=np.float64)))
        return float(np.mean(losses))

    def lr(self) -> float | None:
        """The learning rate; None where the optimizer has none."""
        return float(self.arrived["lr"].values[0]) if "lr" in self.arrived else self.raw.lr

    def skipped(self) -> bool:
        """Whether a scaler skipped the step."""
        return self.raw.skipped or ("found_inf" in self.arrived and bool(self.arrived["found_inf"].values.any()))

    def nonfinite(self) -> Floats:
        """Non-finite elements of each tensor; where they were not counted, 1 for "at least one"."""
        if "nonfinite" in self.arrived:
            return self.rows("nonfinite")
        return np.where(self.present, ~np.isfinite(self.norm), np.nan).astype(np.float64)

    def micro_batch_sizes(self, count: int) -> tuple[Floats, bool]:
        """Samples in each micro-batch, and whether the loop told; equal shares of one where it did not."""
        sizes = self.raw.sizes
        if len(sizes) == count and all(size is not None for size in sizes):
            return np.array(sizes, dtype=np.float64), True
        told_in_part = len(sizes) > 1 and any(size is not None for size in sizes)
        if self.raw.batch_size is not None and not told_in_part:
            return np.full(count, self.raw.batch_size / count), True
        return np.ones(count), False

    def reading(self, **fields: Any) -> Reading:
        """A Reading of this step, with its batch size and stage where not given."""
        fields.setdefault("batch_size", self.raw.batch_size)
        # Where optimizers were read at different stages, the furthest from raw says what to expect.
        fields.setdefault("stage", max((station.stage for station in self.raw.stations), key=STAGES.index))
        return Reading(step=self.raw.step, time=self.raw.time, **fields)
