"""How the sums of one step are laid out in a vector that all ranks add up.

The layout follows from the roster, the settings and the kind of step alone, never from what a rank happened to read:
a tensor without a gradient on one rank, or an instrument that broke there, leaves zeros where its numbers would be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradvitals.measure.landed import STAGES, StepSums, Table, WindowSums
from gradvitals.measure.ranks.roster import Roster
from gradvitals.measure.sums import Floats, PartSums, RowSums
from gradvitals.measure.window import NUM_BLOCKS

EVERY_STEP = ("norm", "nonfinite", "change")
FULL_STEP = (
    "weight",
    "update",
    "first_moment",
    "second_moment",
    "adam_step",
    "beta1",
    "beta2",
    "factor_sum",
    "factor_low",
    "factor_one",
    "parts",
)
DETAIL_STEP = ("nonzero", "alive", "below_one", "weight_before", "inner", "inner_squares")

OF_PARTS = frozenset({"parts", "inner", "inner_squares"})
"""Gradients before they are reduced: every data worker has others."""

OF_WEIGHTS = frozenset({"weight", "update", "change"})

AVERAGED = frozenset({"adam_step", "beta1", "beta2"})
"""Rows that are the same on all who hold a shard, so that they are averaged rather than added up."""

LARGEST = ("max",)
"""Rows of which the largest is wanted: in a second vector, of detail steps only."""

SLOTS = ("heads", "parts")

SCALARS = (
    "loss",
    "loss_weight",
    "batch_size",
    "batch_told",
    "lr",
    "lr_told",
    "max_norm",
    "max_norm_told",
    "under_scaler",
    "skipped",
    "carried",
    "in_turn",
    "uncounted",
    "unscaled",
    "clipped",
    "moments_clipped",
    "change_square",
    "change_dot",
    "change_dot_told",
    "parts_count",
    "parts_samples",
    "parts_known",
    "parts_told",
    "parts_weight",
    "parts_weight_per_sample",
    "parts_square_per_sample",
)

RANK_NUMBERS = ("ranks/step_seconds", "ranks/errors")
"""One number of every rank, at full steps."""

RANK_FLAGS = ("ranks/nonfinite",)
"""One number of every rank, at every step; kept where one of them is not 0."""

WINDOW_NUMBERS = 3 + NUM_BLOCKS + 1


@dataclass(frozen=True)
class Kind:
    """What sort of step it is; the same on all ranks."""

    full: bool
    detail: bool


class Wire:
    """Packs the steps of this rank, and unpacks what all ranks together have sent."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.num_rows = len(roster.layout.tensors)
        self.num_slots = len(roster.slots)
        self._local_of = {int(row): index for index, row in enumerate(roster.rows)}

    # -- the layout ---------------------------------------------------------------------------------------------

    def names(self, kind: Kind) -> tuple[str, ...]:
        """The row sums that such a step may have."""
        return _names(kind)

    def length(self, kind: Kind) -> int:
        """Numbers in the vector of such a step."""
        rows = 2 * self.num_rows * len(self.names(kind))
        slots = self.num_slots * len(SLOTS) if kind.full else 0
        ranks = self.roster.world * (len(RANK_FLAGS) + (len(RANK_NUMBERS) if kind.full else 0))
        return len(SCALARS) + rows + slots + ranks + WINDOW_NUMBERS * len(self.roster.windows)

    # -- packing ------------------------------------------------------------------------------------------------

    def pack(self, step: StepSums, kind: Kind) -> Floats:
        """This rank's share of a step."""
        vector = np.zeros(self.length(kind))
        cursor = _Cursor(vector)
        cursor.put([self._scalars(step)[name] for name in SCALARS])
        roster = self.roster
        for name in self.names(kind):
            values, present = cursor.take(self.num_rows), cursor.take(self.num_rows)
            sums = step.rows.get(name)
            if sums is not None:
                weights = roster.part_weights / roster.num_sources if name in OF_PARTS else roster.weights
                # Inner products would have to be summed over the shards before they are squared.
                read = sums.present & roster.is_whole if name in ("inner", "inner_squares") else sums.present
                # Who does not step a tensor that another rank steps has yet to be sent its new values.
                read = read & roster.is_current if name in OF_WEIGHTS else read
                values[roster.rows] = np.where(read, sums.values * weights, 0.0)
                present[roster.rows] = np.where(read, weights, 0.0)
        for name in SLOTS if kind.full else ():
            values = cursor.take(self.num_slots)
            of_slots = step.slots.get(name)
            if of_slots is not None:
                weights = roster.part_weights / roster.num_sources if name in OF_PARTS else roster.weights
                values[roster.slot_numbers] = of_slots * weights[step.table.slot_rows]
        for name in (*RANK_FLAGS, *(RANK_NUMBERS if kind.full else ())):
            cursor.take(roster.world)[roster.rank] = step.ranks[name][0] if name in step.ranks else 0.0
        for row in roster.windows:
            self._put_window(cursor.take(WINDOW_NUMBERS), step, row)
        return vector

    def _scalars(self, step: StepSums) -> dict[str, float]:
        roster = self.roster
        once = roster.share  # a data worker counts once, however many ranks it has
        size = step.batch_size
        loss_weight = once * (size if size is not None else 1.0) if step.loss is not None else 0.0
        square, dot = step.changes if step.changes is not None else (0.0, None)
        parts, shares = step.parts, roster.num_sources
        numbers = {
            "loss": step.loss * loss_weight if step.loss is not None else 0.0,
            "loss_weight": loss_weight,
            "batch_size": once * size if size is not None else 0.0,
            "batch_told": float(size is not None),
            "lr": step.lr if step.lr is not None else 0.0,
            "lr_told": float(step.lr is not None),
            "max_norm": step.max_norm if step.max_norm is not None else 0.0,
            "max_norm_told": float(step.max_norm is not None),
            "under_scaler": float(step.under_scaler),
            "skipped": float(step.skipped),
            "carried": float(step.carried),
            "in_turn": float(step.in_turn),
            "uncounted": float("nonfinite" in step.rows and not step.counted),
            "unscaled": float(step.stage == "unscaled"),
            "clipped": float(step.stage == "clipped"),
            "moments_clipped": float(step.moments_stage == "clipped"),
            "change_square": square,
            "change_dot": dot if dot is not None else 0.0,
            "change_dot_told": float(dot is not None),
        }
        if parts is None:
            return numbers | dict.fromkeys((name for name in SCALARS if name.startswith("parts")), 0.0)
        return numbers | {
            "parts_count": once * parts.count,
            "parts_samples": once * parts.samples,
            "parts_known": float(parts.sizes_known),
            "parts_told": 1.0,
            "parts_weight": once * parts.weight / shares,
            "parts_weight_per_sample": once * parts.weight_per_sample / shares,
            "parts_square_per_sample": once * parts.square_per_sample / shares**2,
        }

    def _put_window(self, numbers: Floats, step: StepSums, row: int) -> None:
        here = self._local_of.get(row)
        window = step.windows.get(here) if here is not None else None
        if here is None or window is None:
            return
        weight = self.roster.weights[here]
        numbers[0], numbers[1] = weight, weight * window.square
        if window.block_steps is not None and window.sums is not None:
            numbers[2] = weight * window.block_steps
            numbers[3:] = weight * window.sums

    def pack_largest(self, step: StepSums) -> Floats:
        """This rank's share of what is not added up: the largest is taken, nan counting as infinite."""
        vector = np.full(self.num_rows * len(LARGEST), -math.inf)
        for place, name in enumerate(LARGEST):
            sums = step.rows.get(name)
            if sums is not None:
                values = np.where(np.isnan(sums.values), math.inf, sums.values)
                vector[place * self.num_rows + self.roster.rows] = np.where(sums.present, values, -math.inf)
        return vector

    # -- unpacking ----------------------------------------------------------------------------------------------

    def unpack(self, vector: Floats, kind: Kind, own: StepSums, table: Table) -> StepSums:
        """The step of all ranks, from the sum of their vectors.

        Args:
            vector: The sum.
            kind: What sort of step it is.
            own: The step as this rank packed it, for what is the same everywhere.
            table: The rows of all ranks.

        """
        roster, cursor = self.roster, _Cursor(vector)
        told = dict(zip(SCALARS, cursor.take(len(SCALARS)).tolist(), strict=True))
        world = roster.world
        step = StepSums(step=own.step, time=own.time, full=own.full, table=table, lap=own.lap)
        step.stage = STAGES[2 if told["clipped"] else 1 if told["unscaled"] else 0]
        step.moments_stage = "clipped" if told["moments_clipped"] else None
        step.batch_size = told["batch_size"] if told["batch_told"] == world else None
        step.loss = told["loss"] / told["loss_weight"] if told["loss_weight"] else None
        step.lr = told["lr"] / told["lr_told"] if told["lr_told"] else None
        step.max_norm = told["max_norm"] / told["max_norm_told"] if told["max_norm_told"] else None
        step.under_scaler, step.skipped = told["under_scaler"] > 0, told["skipped"] > 0
        step.carried, step.in_turn = told["carried"] > 0, told["in_turn"] > 0
        step.single_part, step.num_sources = own.single_part, roster.num_sources
        for name in self.names(kind):
            values, present = cursor.take(self.num_rows), cursor.take(self.num_rows)
            read = present > 0
            if read.any():
                step.rows[name] = RowSums(self._whole(name, values, present, read), read)
        # Ranks begin to count elements when they have seen that there are any, some a step later than others. Until
        # all do, a tensor counts once, however many say so.
        if "nonfinite" in step.rows and told["uncounted"]:
            step.rows["nonfinite"].values = (step.rows["nonfinite"].values > 0).astype(np.float64)
        for name in SLOTS if kind.full else ():
            step.slots[name] = cursor.take(self.num_slots).copy()
        for name in (*RANK_FLAGS, *(RANK_NUMBERS if kind.full else ())):
            numbers = cursor.take(world)
            if name in RANK_NUMBERS or numbers.any():
                step.ranks[name] = numbers.copy()
        if "change" in step.rows:
            step.changes = (told["change_square"], told["change_dot"] if told["change_dot_told"] else None)
        if told["parts_told"] == world and "parts" in step.rows:
            step.parts = PartSums(
                count=told["parts_count"],
                samples=told["parts_samples"],
                sizes_known=told["parts_known"] == told["parts_told"],
                weight=told["parts_weight"],
                weight_per_sample=told["parts_weight_per_sample"],
                square_per_sample=told["parts_square_per_sample"],
            )
        for row in roster.windows:
            self._get_window(cursor.take(WINDOW_NUMBERS), step, row)
        return step

    def _whole(self, name: str, values: Floats, present: Floats, read: NDArray[np.bool_]) -> Floats:
        """A number of the whole tensor, where some of those who hold the same may not have read it."""
        if name in OF_PARTS:
            return values
        with np.errstate(invalid="ignore", divide="ignore"):
            shares = 1.0 if name in AVERAGED else self.roster.expected
            return np.where(read, values * (shares / present), 0.0)

    def _get_window(self, numbers: Floats, step: StepSums, row: int) -> None:
        weight, square, block_steps = numbers[:3]
        if weight > 0:
            whole = self.roster.expected[row] / weight
            steps = round(block_steps / weight) if block_steps > 0 else None
            step.windows[row] = WindowSums(square * whole, steps, numbers[3:] * whole if steps else None)

    def unpack_largest(self, vector: Floats, step: StepSums) -> None:
        """Put the largest of all ranks into a step."""
        for place, name in enumerate(LARGEST):
            values = vector[place * self.num_rows : (place + 1) * self.num_rows]
            if (values > -math.inf).any():
                step.rows[name] = RowSums(values.copy(), values > -math.inf)


class OutOfStepError(RuntimeError):
    """Ranks have met at different steps."""


class _Cursor:
    """Goes through a vector from front to back."""

    def __init__(self, vector: Floats) -> None:
        self._vector, self._at = vector, 0

    def take(self, count: int) -> Floats:
        part = self._vector[self._at : self._at + count]
        self._at += count
        return part

    def put(self, numbers: Sequence[float]) -> None:
        self.take(len(numbers))[:] = numbers


@lru_cache
def _names(kind: Kind) -> tuple[str, ...]:
    return tuple(_all_names(kind))


def _all_names(kind: Kind) -> Iterator[str]:
    yield from EVERY_STEP
    if kind.full:
        yield from FULL_STEP
    if kind.detail:
        yield from DETAIL_STEP
