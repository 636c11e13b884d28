"""The sums of one step on the host: everything an Interpreter needs, whichever process it was read in.

What is kept of a row adds up over the parts of a tensor: squares rather than norms, counts rather than shares. So the
sums of many ranks are again such sums, and one process and a thousand of them are interpreted alike.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradvitals.config import Config
from gradvitals.measure.clock import Lap
from gradvitals.measure.observed import heard
from gradvitals.measure.packet import Arrived, Places
from gradvitals.measure.rawstep import RawStep
from gradvitals.measure.sums import Flags, Floats, PartSums, RowSums
from gradvitals.types import Layout, Reading, Stage

STAGES: tuple[Stage, ...] = ("raw", "unscaled", "clipped")

SQUARED = {"weight": "weight", "weight_before": "weight_before", "exp_avg_norm": "first_moment"}
"""Norms that are kept as squares, and what these are called."""

SUMMED = {
    "nonzero": "nonzero",
    "exp_avg_sq_sum": "second_moment",
    "adam_step": "adam_step",
    "alive_count": "alive",
    "below_one_count": "below_one",
    "median_sum": "median_sum",
    "median_size": "median_size",
    "factor_sum": "factor_sum",
    "factor_low": "factor_low",
    "factor_one": "factor_one",
}
"""Numbers that are kept as they came."""


PRINTS = tuple(f"{what}_{half}" for what in ("check", "state", "sample", "rng") for half in ("lo", "hi"))


class Table:
    """What does not change from step to step."""

    def __init__(self, layout: Layout, slots: list[tuple[int, int]]) -> None:
        self.layout = layout
        self.names = tuple(info.name for info in layout.tensors)
        self.with_whole = ("", *self.names)
        self.with_layers = (*self.with_whole, *(f"layer:{name}" for name in layout.layers))
        self.with_heads = (*self.with_layers, *(f"head:{name}" for name in layout.heads))
        self.sizes: Floats = np.array([float(info.numel) for info in layout.tensors])
        self.depths = np.array([info.depth for info in layout.tensors], dtype=np.int64)
        """The layer of each tensor."""
        self.slots = slots
        self.slot_rows, self.slot_heads = np.array(slots, dtype=np.int64).reshape(-1, 2).T
        self.places: dict[str, Places] = {}
        """Rows of the numbers that came last, by their name."""
        self._sampled: list[dict[int, tuple[int, int]]] = []
        self._expansion: Floats = np.zeros((2, 0))

    def expansion(self, sampled: list[dict[int, tuple[int, int]]]) -> Floats:
        """Coordinates of each row that its change was read of, and all there are; nan for a row without any."""
        if len(sampled) != len(self._sampled) or any(map(operator.is_not, sampled, self._sampled)):
            self._sampled, self._expansion = list(sampled), np.full((2, len(self.names)), np.nan)
            for lengths in sampled:
                for row, found in lengths.items():
                    self._expansion[:, row] = found
        return self._expansion


@dataclass
class WindowSums:
    """What a sliding window tells of one row at one step."""

    square: float
    """Squared norm of the coordinates it follows."""
    block_steps: int | None
    """Steps in a block, where the window is complete."""
    sums: Floats | None
    """Then the squared norm of its sum, and of what is left without each block."""


@dataclass
class StepSums:
    """One step, of one process or of all."""

    step: int
    time: float
    full: bool
    table: Table
    detail: bool = False
    audit: bool = False
    stage: Stage = "raw"
    moments_stage: Stage | None = None
    """What the optimizer's moments are of, where it differs: gradients that the loop clipped."""
    batch_size: float | None = None
    loss: float | None = None
    lr: float | None = None
    max_norm: float | None = None
    under_scaler: bool = False
    skipped: bool = False
    carried: bool = False
    in_turn: bool = False
    given_up: int = 0
    """Batches whose gradients the loop threw away before this step."""
    lost_loss: float | None = None
    """The loss of the last of them, where told."""
    lost_norm: float | None = None
    """The norm of its gradient, where read."""
    rows: dict[str, RowSums] = field(default_factory=dict)
    slots: dict[str, Floats] = field(default_factory=dict)
    """For each slice of an attention head."""
    changes: tuple[float, float | None] | None = None
    """Of the coordinates followed: the sum of squared changes, and their inner product with the last ones."""
    last_change: float | None = None
    """The sum of squared changes of the step before, where it is known without that step."""
    parts: PartSums | None = None
    num_sources: int = 1
    """Data workers that the parts come from."""
    windows: dict[int, WindowSums] = field(default_factory=dict)
    ranks: dict[str, Floats] = field(default_factory=dict)
    """One number a rank."""
    prints: dict[str, Floats] = field(default_factory=dict)
    """Fingerprints of an audit, as they came."""
    told: dict[str, float] = field(default_factory=dict)
    told_tensors: dict[str, Floats] = field(default_factory=dict)
    """Values that are complete already and go into the reading as they are."""
    lap: Lap = field(default_factory=Lap)
    counted: bool = False
    """Whether elements that are not finite were counted, rather than tensors that have any."""
    is_broken: bool = False
    """Whether the gradient of this process alone was seen to hold NaN or Inf."""
    single_part: bool = False
    """Whether micro-batches were counted and there was but one."""

    def __post_init__(self) -> None:
        self.num_rows = len(self.table.names)
        self.outlier = False

    def has(self, name: str) -> bool:
        """Whether anything was read under a name."""
        return name in self.rows

    def known(self, name: str) -> Floats:
        """One number a row, nan where there is none."""
        return self.rows[name].known

    def total(self, name: str) -> float:
        """The sum over all rows read."""
        sums = self.rows[name]
        return float(sums.values[sums.present].sum())

    def norm(self, name: str) -> Floats:
        """Norms, from what is kept as squares."""
        return np.sqrt(self.rows[name].known)

    def by_head(self, of_slots: Floats) -> Floats:
        """Sum the parts of a head over the q, k and v weights it has."""
        sums: Floats = np.zeros(len(self.table.layout.heads))
        np.add.at(sums, self.table.slot_heads, of_slots)
        return sums

    def reading(self, **fields: Any) -> Reading:
        """A Reading of this step, with its batch size and stage where not given."""
        return Reading(
            **{"step": self.step, "time": self.time, "batch_size": self.batch_size, "stage": self.stage, **fields}
        )


def land(raw: RawStep, table: Table, config: Config) -> StepSums:
    """Wait for a step's numbers, off the training thread, and put them together."""
    return _Landing(raw, table, config).sums()


class _Landing:
    """A step whose numbers have arrived."""

    def __init__(self, raw: RawStep, table: Table, config: Config) -> None:
        self.raw, self.table, self.config = raw, table, config
        self.num_rows = len(table.names)
        self.arrived: Mapping[str, Arrived] = raw.shipment.wait(table.places)
        self.loss_scale, self.grad_scale = np.ones((2, self.num_rows))
        self.part_scale = np.ones(self.num_rows)
        """What micro-batches are multiplied by, over their share of the gradient."""
        self.under_scaler = False
        self.heard = heard(raw.observed, self._number, is_clean=self._is_clean)
        self.batch_size = raw.batch_size
        if self.heard.skipped_size and raw.batch_size is not None:
            self.batch_size = raw.batch_size - self.heard.skipped_size
        for index, station in enumerate(raw.stations):
            if f"scale{index}" in self.arrived and not station.ignore_scale:
                self.under_scaler = True
                self.loss_scale[station.rows] = self.arrived[f"scale{index}"].values[0]
                if station.scaled:
                    self.grad_scale[station.rows] = self.loss_scale[station.rows]
            if self.under_scaler or station.divided != 1:
                self.part_scale[station.rows] = self.loss_scale[station.rows] * station.divided

    def sums(self) -> StepSums:
        raw = self.raw
        # Where optimizers were read at different stages, the furthest from raw says what to expect.
        stage = max((station.stage for station in raw.stations), key=STAGES.index)
        found_inf = self.arrived.get("found_inf")
        step = StepSums(
            step=raw.step,
            time=raw.time,
            full=raw.full,
            detail=raw.detail,
            audit=raw.audit,
            table=self.table,
            stage=stage,
            moments_stage="clipped" if any(station.clipped for station in raw.stations) else None,
            batch_size=self.batch_size,
            loss=self.heard.loss,
            given_up=self.heard.given_up,
            lost_loss=self.heard.lost_loss,
            lost_norm=self.heard.lost_norm,
            lr=float(self.arrived["lr"].values[0]) if "lr" in self.arrived else raw.lr,
            max_norm=raw.max_norm,
            under_scaler=self.under_scaler,
            skipped=raw.skipped or (found_inf is not None and bool(found_inf.values.any())),
            carried=raw.carried,
            in_turn=raw.in_turn,
            lap=raw.lap,
            single_part=any(station.micro_batches == 1 for station in raw.stations),
            is_broken=self._is_broken(),
        )
        self._take_gradients(step)
        for name, kept in SQUARED.items():
            if name in self.arrived:
                sums = self._rows(name)
                step.rows[kept] = RowSums(np.square(sums.values), sums.present)
        for name, kept in SUMMED.items():
            if name in self.arrived:
                step.rows[kept] = self._rows(name)
        if "update_sq" in self.arrived:
            covered = np.array([raw.fractions.get(row, 1.0) for row in range(self.num_rows)])
            sums = self._rows("update_sq")
            step.rows["update"] = RowSums(sums.values / covered, sums.present)
        if "change_sq" in self.arrived:
            self._take_changes(step)
        if raw.betas:
            rows, present, betas = list(raw.betas), np.zeros(self.num_rows, dtype=bool), np.zeros((2, self.num_rows))
            betas[:, rows], present[rows] = np.array(list(raw.betas.values())).T, True
            step.rows["beta1"], step.rows["beta2"] = RowSums(betas[0], present), RowSums(betas[1], present)
        count = max((station.micro_batches for station in raw.stations), default=0)
        if count and {"micro0", "micro_heads0"} & self.arrived.keys():
            self._take_parts(step, count)
        for name in PRINTS:
            if name in self.arrived:
                by_row = name.startswith(("check", "state"))
                step.prints[name] = self.arrived[name].by_row(self.num_rows) if by_row else self.arrived[name].values
        for row, block_steps in raw.windows.items():
            sampled = self.arrived.get(f"window_sq{row}")
            square = step.rows["norm"].values[row] if sampled is None else sampled.values[0]
            whole = self.arrived[f"window{row}"].values if block_steps else None
            step.windows[row] = WindowSums(float(square), block_steps, whole)
        return step

    def _is_broken(self) -> bool:
        """Whether NaN or Inf was in this process's own gradient, before any reduction, as far as it was looked at."""
        own = self.arrived.get("own_norm")
        return own is not None and not bool(np.isfinite(own.values).all())

    def _rows(self, name: str) -> RowSums:
        return RowSums(self.arrived[name].sums(self.num_rows), self.arrived[name].present(self.num_rows))

    def _parts(self, name: str, num_rows: int) -> tuple[Floats, Flags]:
        """One number a row, 0 where a micro-batch did not reach it: no gradient is a gradient of zero."""
        if name not in self.arrived:
            return np.zeros(num_rows), np.zeros(num_rows, dtype=bool)
        return self.arrived[name].sums(num_rows), self.arrived[name].present(num_rows)

    def _number(self, name: str) -> float:
        return float(self.arrived[name].values[0])

    def _is_clean(self) -> bool:
        """Whether the gradient is known to be finite, and this process's own."""
        alone = self.raw.weights is None
        return alone and "norm" in self.arrived and bool(np.isfinite(self.arrived["norm"].values).all())

    def _take_gradients(self, step: StepSums) -> None:
        if "norm" not in self.arrived:
            return
        norms = self._rows("norm")
        step.rows["norm"] = RowSums(np.square(norms.values / self.grad_scale), norms.present)
        if "nonfinite" in self.arrived:
            step.rows["nonfinite"], step.counted = self._rows("nonfinite"), True
        else:  # not counted: 1 for "at least one"
            broken = norms.present & ~np.isfinite(norms.values)
            step.rows["nonfinite"] = RowSums(broken.astype(np.float64), norms.present)
        if "max" in self.arrived:
            largest = self._rows("max")
            step.rows["max"] = RowSums(largest.values / self.grad_scale, largest.present)
        if "heads" in self.arrived:
            of_slots, _ = self._parts("heads", len(self.table.slot_rows))
            step.slots["heads"] = np.square(of_slots / self.grad_scale[self.table.slot_rows])

    def _take_changes(self, step: StepSums) -> None:
        """The squared change of each tensor as far as its coordinates tell, and of these coordinates alone."""
        counts, sizes = self.table.expansion(self.raw.sampled)
        sums = self._rows("change_sq")
        read = sums.present & np.isfinite(counts)
        step.rows["change"] = RowSums(np.where(read, sums.values / counts * sizes, 0.0), read)
        weights = self.table_weights()
        square = float((sums.values * weights)[read].sum())
        dot = self.arrived.get("change_dot")
        agreement = None if dot is None else float((dot.values * weights[dot.rows]).sum())
        step.changes = (square, agreement)
        if "last_change_sq" in self.arrived:
            step.last_change = float(self.arrived["last_change_sq"].values.sum())

    def table_weights(self) -> Floats:
        """What each row of this process counts, beside those of other ranks."""
        return np.asarray(self.raw.weights) if self.raw.weights is not None else np.ones(self.num_rows)

    # -- parts --------------------------------------------------------------------------------------------------

    def _take_parts(self, step: StepSums, count: int) -> None:
        sizes, sizes_known = self._part_sizes(count)
        by_size = self.config.micro_batch_weights == "size"
        weights = sizes / sizes.sum() if by_size else np.full(count, 1 / count)
        # Optimizers that saw another number of micro-batches stand for another batch size: not mixed in.
        mine, reached = np.zeros((2, self.num_rows), dtype=bool)
        for station in self.raw.stations:
            mine[station.rows] = station.micro_batches == count
        squares, inner_squares, inner = np.zeros((3, self.num_rows))
        of_heads = np.zeros(len(self.table.slot_rows))
        slot_scale = self.part_scale[self.table.slot_rows]
        has_inner = np.zeros(self.num_rows, dtype=bool)
        for i, weight in enumerate(weights):
            norms, hit = self._parts(f"micro{i}", self.num_rows)
            slot_norms, slot_hit = self._parts(f"micro_heads{i}", len(self.table.slot_rows))
            slot_squares = np.square(slot_norms / slot_scale)
            reached |= hit  # a row that no micro-batch was seen to reach came to life too late to be followed
            reached[self.table.slot_rows[slot_hit]] = True
            squares += np.square(norms / self.part_scale) / weight
            np.add.at(squares, self.table.slot_rows, slot_squares / weight)
            of_heads += slot_squares / weight
            along, along_hit = self._parts(f"micro_radial{i}", self.num_rows)
            inner += along / self.part_scale
            inner_squares += np.square(along / self.part_scale) / weight
            has_inner |= along_hit
        read = mine & reached
        step.rows["parts"] = RowSums(squares, read)
        if len(of_heads):
            step.slots["parts"] = of_heads
        if has_inner.any():
            step.rows["inner"] = RowSums(inner, has_inner & read)
            step.rows["inner_squares"] = RowSums(inner_squares, has_inner & read)
        step.parts = PartSums(
            count=count,
            samples=float(sizes.sum()),
            sizes_known=sizes_known,
            weight=float(weights.sum()),
            weight_per_sample=float((weights / sizes).sum()),
            square_per_sample=float((weights**2 / sizes).sum()),
        )

    def _part_sizes(self, count: int) -> tuple[Floats, bool]:
        """Samples in each micro-batch, and whether the loop told; equal shares of one where it did not."""
        sizes = self.heard.sizes
        if len(sizes) == count and all(size is not None for size in sizes):
            return np.array(sizes, dtype=np.float64), True
        told_in_part = len(sizes) > 1 and any(size is not None for size in sizes)
        if self.batch_size is not None and not told_in_part:
            return np.full(count, self.batch_size / count), True
        return np.ones(count), False


def is_estimable(step: StepSums) -> bool:
    """Whether a step has parts enough to tell signal from noise."""
    return step.parts is not None and step.parts.count > 1 + 1e-9 and not math.isnan(step.parts.weight)
