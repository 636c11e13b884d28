"""The sums of a step: of one process, as its record has them, or of all ranks.

The sums of a tensor add up over its parts: squares rather than norms, counts rather than shares. Adding up the sums of
all ranks gives sums of the same kind, so one process and a thousand are handled the same way.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.metrics import INSPECTED, SUMS
from gradvitals.types import Reading, Stage
from gradvitals.worker.record import FACTS, STAGES, Context, Flags, Floats, StepFacts, StepRecord, pack, unpack

NUM_BLOCKS = 10
"""Blocks of steps in a sliding window."""

LEAST_SQUARE = 1e-34
"""Mean squares below this are unknown: squares of such small elements leave the range of float32."""

INSPECTED_IDS = tuple(INSPECTED)

PRINTS = tuple(f"{what}_{half}" for what in ("check", "state", "sample", "rng") for half in ("lo", "hi"))

SAME_SIZE = 0.05
"""Sizes that vary by less than this share of their mean count as equal: the weights hardly matter."""

PRIOR_SPREAD, PRIOR_READINGS = 0.5, 2.0
"""The prior spread of log ‖h‖², and how many micro-batches it counts for."""


@dataclass
class RowSums:
    """One number per row, and which rows were read. A number that was read may be NaN."""

    values: Floats
    present: Flags

    @property
    def known(self) -> Floats:
        """The numbers, NaN if nothing was read."""
        return self.values if self.present.all() else np.where(self.present, self.values, np.nan)


@dataclass
class PartSums:
    """Sums over the gradients that make up a step's gradient, as `functional.signal_and_noise_of_sums` takes them."""

    count: float
    """Number of gradients."""
    samples: float
    """Samples in all of them; the number of gradients if the loop did not report batch sizes."""
    sizes_known: bool
    weight: float
    """Sum of their weights w in the step's gradient."""
    weight_per_sample: float
    """Sum of w / b, where b is how many samples a part has."""
    square_per_sample: float
    """Sum of w² / b."""


class Table:
    """A `Context` as arrays: what does not change from step to step."""

    def __init__(self, context: Context) -> None:
        layout, slots = context.layout, context.slots
        self.context = context
        self.layout = layout
        self.names = tuple(info.name for info in layout.tensors)
        self.with_whole = ("", *self.names)
        self.with_layers = (*self.with_whole, *(f"layer:{name}" for name in layout.layers))
        self.with_heads = (*self.with_layers, *(f"head:{name}" for name in layout.heads))
        self.sizes: Floats = np.array([float(info.numel) for info in layout.tensors])
        narrow = [info.dtype != "float64" for info in layout.tensors]
        self.least_squares: Floats = LEAST_SQUARE * self.sizes * narrow
        """For each tensor, the smallest sum of squares that can be trusted."""
        self.depths = np.array([info.depth for info in layout.tensors], dtype=np.int64)
        """The layer of each tensor."""
        self.slots = slots
        self.slot_rows, self.slot_heads = np.array(slots, dtype=np.int64).reshape(-1, 2).T
        num_rows = len(self.names)
        self.shares: dict[str, Floats] = {}
        """For sums that are read from a sample: the share of each row that it covers, NaN for none."""
        for name, of_rows in context.shares.items():
            self.shares[name] = np.full(num_rows, np.nan)
            self.shares[name][list(of_rows)] = list(of_rows.values())
        self.has_betas: Flags = np.zeros(num_rows, dtype=bool)
        self.betas: Floats = np.zeros((2, num_rows))
        for row, betas in context.betas.items():
            self.betas[:, row], self.has_betas[row] = betas, True
        self.ones: Floats = np.ones(num_rows)
        self.weights: Floats = self.ones if context.weights is None else np.array(context.weights)


@dataclass
class WindowSums:
    """The sums of a sliding window for one row at one step."""

    square: float
    """Squared norm of the coordinates it follows."""
    block_steps: int | None
    """Steps in a block; None until the window is complete."""
    sums: Floats | None
    """For a complete window: the squared norm of its sum, and of the sum without each block."""


@dataclass
class StepSums(StepFacts):
    """The sums of one step, of one process or of all."""

    table: Table = field(kw_only=True)
    stage: Stage = "raw"
    moments_stage: Stage | None = None
    """The stage of the gradients that the optimizer's moments received, if it differs."""
    loss: float | None = None
    under_scaler: bool = False
    lost_loss: float | None = None
    """The loss of the last discarded batch, if reported."""
    lost_norm: float | None = None
    """The norm of its gradient, if it was read."""
    rows: dict[str, RowSums] = field(default_factory=dict)
    slots: dict[str, Floats] = field(default_factory=dict)
    """For each slice of an attention head."""
    changes: tuple[float, float | None] | None = None
    """Of the sampled coordinates: the sum of squared changes, and their inner product with the previous changes."""
    parts: PartSums | None = None
    num_sources: int = 1
    """Data-parallel ranks that the parts come from."""
    windows: dict[int, WindowSums] = field(default_factory=dict)
    ranks: dict[str, Floats] = field(default_factory=dict)
    """One number per rank."""
    prints: dict[str, Floats] = field(default_factory=dict)
    """Fingerprints of an audit, unchanged."""
    values: dict[str, float] = field(default_factory=dict)
    tensors: dict[str, Floats] = field(default_factory=dict)
    """Metrics that need no arithmetic."""
    counted: bool = False
    """Whether non-finite elements were counted, rather than tensors that have any."""
    is_broken: bool = False
    """Whether this process's own gradient is known to hold NaN or Inf."""
    single_part: bool = False
    """Whether the step had exactly one micro-batch."""
    weights_unknown: bool = False
    """Whether micro-batches differ in size and how the loop weighs them is not known yet."""

    def __post_init__(self) -> None:
        self.num_rows = len(self.table.names)
        self.outlier = False

    def has(self, name: str) -> bool:
        """Returns whether a sum was read."""
        return name in self.rows

    def known(self, name: str) -> Floats:
        """Returns one number per row, NaN where there is none."""
        return self.rows[name].known

    def total(self, name: str) -> float:
        """Returns the sum over all rows read, or the largest."""
        sums = self.rows[name]
        read = sums.values[sums.present]
        return float(read.max(initial=0.0) if SUMS[name].combine == "max" else read.sum())

    def by_head(self, of_slots: Floats) -> Floats:
        """Returns the sum over the slices of each head: its q, k and v weights."""
        sums: Floats = np.zeros(len(self.table.layout.heads))
        np.add.at(sums, self.table.slot_heads, of_slots)
        return sums

    def reading(self, **fields: Any) -> Reading:
        """Returns a Reading of this step, with its batch size and stage unless given."""
        return Reading(
            **{"step": self.step, "time": self.time, "batch_size": self.batch_size, "stage": self.stage, **fields}
        )


def is_estimable(step: StepSums) -> bool:
    """Returns whether a step has enough parts to tell signal from noise."""
    return step.parts is not None and step.parts.count > 1 + 1e-9 and not math.isnan(step.parts.weight)


def aggregate(record: StepRecord, table: Table, weighting: PartWeights) -> StepSums:
    """Returns the sums of one recorded step."""
    return _Aggregation(record, table, weighting).sums()


@dataclass(frozen=True)
class Losses:
    """The losses of a step, once all numbers are known."""

    loss: float | None = None
    """Averaged over the observations by their size; None if the loop reported none."""
    sizes: tuple[float | None, ...] = ()
    """Samples behind each observation, if reported."""
    skipped_size: float = 0.0
    """Samples of batches that are not in the step."""
    given_up: int = 0
    lost_loss: float | None = None
    """The loss of the last discarded batch, if reported."""
    lost_norm: float | None = None
    """The norm of its gradient, if read."""


def losses_of(record: StepRecord, *, is_clean: bool) -> Losses:
    """Returns the losses that the loop observed.

    Args:
        record: The step.
        is_clean: Whether the step's gradient is known to be finite.
    """
    sections = record.sections
    losses = []
    for index, (loss, _) in enumerate(record.losses):
        if loss is None and (section := sections.get(f"loss{index}")) is not None:
            loss = float(section.values[0])
        if loss is not None:
            losses.append(loss)
    lost = float(sections["lost"].values[0]) if "lost" in sections else record.lost
    lost_norm = float(sections["lost_norm"].values[0]) if "lost_norm" in sections else record.lost_norm
    sizes = [size for _, size in record.losses]
    given_up, skipped_size = record.given_up, 0.0
    broken = [not math.isfinite(loss) for loss in losses]
    # Fewer backward passes than losses, and a finite gradient: the loop skipped the batches with a non-finite loss.
    if any(broken) and 0 < record.passes <= len(losses) - sum(broken) and is_clean:
        given_up += sum(broken)
        lost = next(loss for loss in reversed(losses) if not math.isfinite(loss))
        if len(sizes) == len(losses):
            skipped_size = sum(size or 0.0 for size, bad in zip(sizes, broken, strict=True) if bad)
            sizes = [size for size, bad in zip(sizes, broken, strict=True) if not bad]
        losses = [loss for loss in losses if math.isfinite(loss)]
    return Losses(_mean(losses, sizes), tuple(sizes), skipped_size, given_up, lost, lost_norm)


def _mean(losses: list[float], sizes: list[float | None]) -> float | None:
    if not losses:
        return None
    if len(losses) == 1:
        return losses[0]
    weights = [size for size in sizes if size is not None]
    if len(weights) == len(sizes) == len(losses):
        return float(np.average(losses, weights=weights))
    return float(np.mean(losses))


class PartWeights:
    """Finds out how a loop weighs micro-batches of unequal size.

    The gradient of a micro-batch of b samples enters the sum as h = w g, and E‖g‖² = ‖μ‖² + tr Σ / b. If the loop
    weighs by size, ‖h‖² grows like a power of b between 1 and 2. If it divides each loss by the number of
    micro-batches, the power is between -1 and 0. So the slope of log ‖h‖² over log b, within steps, decides.

    Args:
        setting: "size" or "equal" if the user set it; None to find out.
    """

    def __init__(self, setting: str | None) -> None:
        self.found = setting
        self._is_set = setting is not None
        self._xx = self._xy = self._yy = 0.0
        self._free = PRIOR_READINGS

    def weights(self, sizes: Floats, squares: Floats) -> Floats | None:
        """Returns the weight of each micro-batch in the step's gradient; None if it is not known.

        Args:
            sizes: Samples in each.
            squares: Squared norm of what each added to the gradient.
        """
        equal = np.full(len(sizes), 1 / len(sizes))
        if not self._is_set and sizes.std() <= SAME_SIZE * sizes.mean():
            return equal
        if not self._is_set:
            self._learn(sizes, squares)
        by_size: Floats = sizes / sizes.sum()
        return None if self.found is None else by_size if self.found == "size" else equal

    def _learn(self, sizes: Floats, squares: Floats) -> None:
        if not np.all((squares > 0) & np.isfinite(squares)):
            return
        x, y = np.log(sizes), np.log(squares)
        x, y = x - x.mean(), y - y.mean()
        self._xx, self._xy, self._yy = self._xx + x @ x, self._xy + x @ y, self._yy + y @ y
        self._free += len(sizes) - 1
        slope = self._xy / self._xx
        spread = self._yy - slope * self._xy + PRIOR_READINGS * PRIOR_SPREAD**2
        error = math.sqrt(spread / self._free / self._xx)
        if abs(slope - 0.5) > 3 * error:
            self.found = "size" if slope > 0.5 else "equal"


class _Aggregation:
    """Computes the sums of one step."""

    def __init__(self, record: StepRecord, table: Table, weighting: PartWeights) -> None:
        self.record, self.table, self.weighting = record, table, weighting
        self.num_rows = len(table.names)
        self.sections = record.sections
        self.grad_scale: Floats = table.ones
        """The loss scale that gradients carried when they were read."""
        self.part_scale: Floats = table.ones
        """The loss scale that micro-batches carried, and what a pipeline divided them by."""
        self.under_scaler = False
        self.clipped_scale = 1.0
        """The loss scale that gradients carried when the loop clipped them."""
        self.losses = losses_of(record, is_clean=self._is_clean())
        self.batch_size = record.batch_size
        if self.losses.skipped_size and record.batch_size is not None:
            self.batch_size = record.batch_size - self.losses.skipped_size
        for index, (one, rows) in enumerate(zip(record.optimizers, table.context.optimizer_rows, strict=True)):
            scale = self.sections.get(f"scale{index}")
            if scale is None and one.divided == 1:
                continue
            if self.part_scale is table.ones:
                self.part_scale, self.grad_scale = np.ones((2, self.num_rows))
            self.part_scale[rows] = one.divided
            if scale is not None and not one.ignore_scale:
                self.under_scaler = True
                self.part_scale[rows] *= scale.values[0]
                if one.scaled:
                    self.grad_scale[rows] = scale.values[0]
                    self.clipped_scale = float(scale.values[0]) if one.clipped else self.clipped_scale

    def sums(self) -> StepSums:
        """Returns the sums of the step."""
        record, table = self.record, self.table
        # If optimizers were read at different stages, the one furthest from raw stands for all.
        stage = max((one.stage for one in record.optimizers), key=STAGES.index)
        found_inf = self.sections.get("found_inf")
        lr = self.sections.get("lr")
        step = StepSums(
            **{name: getattr(record, name) for name in FACTS},
            table=table,
            stage=stage,
            moments_stage="clipped" if any(one.clipped for one in record.optimizers) else None,
            loss=self.losses.loss,
            lost_loss=self.losses.lost_loss,
            lost_norm=self.losses.lost_norm,
            under_scaler=self.under_scaler,
            single_part=any(one.micro_batches == 1 for one in record.optimizers),
        )
        step.batch_size, step.given_up = self.batch_size, self.losses.given_up
        step.lr = record.lr if lr is None else float(lr.values[0])
        step.skipped = record.skipped or (found_inf is not None and bool(found_inf.values.any()))
        self._take_sums(step)
        step.is_broken = self._is_broken(step)
        for name, section in self.sections.items():
            if name.startswith("activation/"):  # complete as it is
                step.tensors[name] = section.by_row(self.num_rows)
            elif name in PRINTS:
                by_row = name.startswith(("check", "state"))
                step.prints[name] = section.by_row(self.num_rows) if by_row else section.values
        if "change" in step.rows:
            self._take_changes(step)
        if "first_moment" in step.rows and table.has_betas.any():
            known = table.has_betas & step.rows["first_moment"].present
            step.rows["beta1"], step.rows["beta2"] = (RowSums(betas, known) for betas in table.betas)
        count = max((one.micro_batches for one in record.optimizers), default=0)
        if count and ("micro0" in self.sections or "micro_heads0" in self.sections):
            self._take_parts(step, count)
        if self.clipped_scale > 1:
            step.values["clip/scale"] = self.clipped_scale
        if (val := self.sections.get("val")) is not None:
            step.values["val/loss"] = float(val.values.mean())
        if (look := self.sections.get("look")) is not None:
            numbers = zip(look.rows, look.values, strict=True)
            step.values |= {INSPECTED_IDS[place]: float(value) for place, value in numbers}
        for row, block_steps in record.windows.items():
            square = self.sections[f"window_sq{row}"].values[0]
            whole = self.sections[f"window{row}"].values if block_steps else None
            step.windows[row] = WindowSums(float(square), block_steps, whole)
        return step

    def _is_broken(self, step: StepSums) -> bool:
        """Returns whether this process's own gradient, before any reduction, is known to hold NaN or Inf."""
        own = self.sections.get("own_norm")
        if own is None or bool(np.isfinite(own.values).all()):
            return False
        return bool(np.isnan(own.values).any()) or not step.has("nonfinite") or step.total("nonfinite") > 0

    def _rows(self, name: str) -> RowSums:
        return RowSums(self.sections[name].sums(self.num_rows), self.sections[name].present(self.num_rows))

    def _parts(self, name: str, num_rows: int) -> tuple[Floats, Flags]:
        """Returns one number per row, 0 where a micro-batch did not reach it: no gradient is a gradient of zero."""
        if name not in self.sections:
            return np.zeros(num_rows), np.zeros(num_rows, dtype=bool)
        return self.sections[name].sums(num_rows), self.sections[name].present(num_rows)

    def _is_clean(self) -> bool:
        """Returns whether the gradient is this process's own and known to be finite."""
        alone = self.table.context.weights is None
        return alone and "norm" in self.sections and bool(np.isfinite(self.sections["norm"].values).all())

    def _take_sums(self, step: StepSums) -> None:
        for name, kind in SUMS.items():
            if name not in self.sections:
                continue
            sums = self._rows(name)
            values, read = sums.values, sums.present
            if kind.is_scaled:
                values = values / self.grad_scale
            if kind.is_norm:
                values = np.square(values)
            if (shares := self.table.shares.get(name)) is not None:
                values, read = values / shares, read & np.isfinite(shares)
            step.rows[name] = RowSums(np.where(read, values, 0.0), read)
        step.counted = "nonfinite" in step.rows
        if "norm" in step.rows and not step.counted:  # 1 for "at least one"
            norms = step.rows["norm"]
            broken = norms.present & ~np.isfinite(norms.values)
            some = 1.0 if self._is_surely_broken(step, norms) else math.nan
            step.rows["nonfinite"] = RowSums(np.where(broken, some, 0.0), norms.present)
        if "heads" in self.sections:
            of_slots, _ = self._parts("heads", len(self.table.slot_rows))
            step.slots["heads"] = np.square(of_slots / self.grad_scale[self.table.slot_rows])

    def _is_surely_broken(self, step: StepSums, norms: RowSums) -> bool:
        """Returns whether a non-finite norm means NaN or Inf elements: squares of finite ones can overflow too."""
        lost = step.loss is not None and not math.isfinite(step.loss)
        found_inf = "found_inf" in self.sections and bool(self.sections["found_inf"].values.any())
        return lost or found_inf or bool(np.isnan(norms.values[norms.present]).any())

    def _take_changes(self, step: StepSums) -> None:
        """Add the squared change of the sampled coordinates, and its inner product with the previous change."""
        weights, read = self.table.weights, step.rows["change"].present
        square = float((self._rows("change").values * weights)[read].sum())
        dot = self.sections.get("change_dot")
        agreement = None if dot is None else float((dot.values * weights[dot.rows]).sum())
        step.changes = (square, agreement)

    # -- parts --------------------------------------------------------------------------------------------------

    def _take_parts(self, step: StepSums, count: int) -> None:
        sizes, sizes_known = self._part_sizes(count)
        parts = [self._parts(f"micro{i}", self.num_rows) for i in range(count)]
        slots = [self._parts(f"micro_heads{i}", len(self.table.slot_rows)) for i in range(count)]
        slot_scale = self.part_scale[self.table.slot_rows]
        totals = [
            np.square(norms / self.part_scale).sum() + np.square(of_slots / slot_scale).sum()
            for (norms, _), (of_slots, _) in zip(parts, slots, strict=True)
        ]
        weights = self.weighting.weights(sizes, np.array(totals))
        if weights is None:
            step.weights_unknown = True
            return
        # An optimizer that saw another number of micro-batches has another batch size: leave it out.
        mine, reached = np.zeros((2, self.num_rows), dtype=bool)
        for one, rows in zip(self.record.optimizers, self.table.context.optimizer_rows, strict=True):
            mine[rows] = one.micro_batches == count
        squares, inner_squares, inner = np.zeros((3, self.num_rows))
        of_heads = np.zeros(len(self.table.slot_rows))
        has_inner = np.zeros(self.num_rows, dtype=bool)
        for i, weight in enumerate(weights):
            (norms, hit), (slot_norms, slot_hit) = parts[i], slots[i]
            slot_squares = np.square(slot_norms / slot_scale)
            reached |= hit  # a row that no micro-batch reached was added too late to be followed
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
        """Returns the samples in each micro-batch, and whether they are known; if not, 1 for each."""
        sizes = self.losses.sizes
        if len(sizes) == count and all(size is not None for size in sizes):
            return np.array(sizes, dtype=np.float64), True
        told_in_part = len(sizes) > 1 and any(size is not None for size in sizes)
        if self.batch_size is not None and not told_in_part:
            return np.full(count, self.batch_size / count), True
        return np.ones(count), False


# -- as bytes, for the journal: the sums of several ranks ------------------------------------------------------------

_ARRAYS = ("slots", "ranks", "tensors")
_SCALARS = tuple(
    each.name for each in fields(StepSums) if each.name not in (*_ARRAYS, "table", "rows", "windows", "parts", "prints")
)


def sums_to_bytes(step: StepSums) -> bytes:
    """Returns the bytes of a step that was added up over ranks, for the journal."""
    arrays: dict[str, NDArray[Any]] = {}
    for name, sums in step.rows.items():
        arrays[f"rows/{name}"], arrays[f"present/{name}"] = sums.values, sums.present.astype(np.float64)
    for kind in _ARRAYS:
        arrays |= {f"{kind}/{name}": numbers for name, numbers in getattr(step, kind).items()}
    for row, window in step.windows.items():
        if window.sums is not None:
            arrays[f"window/{row}"] = window.sums
    meta: dict[str, Any] = {name: getattr(step, name) for name in _SCALARS}
    meta["parts"] = None if step.parts is None else asdict(step.parts)
    meta["windows"] = [(row, window.square, window.block_steps) for row, window in step.windows.items()]
    return pack(meta, arrays)


def sums_from_bytes(data: bytes, table: Table) -> StepSums:
    """The inverse of `sums_to_bytes`."""
    meta, arrays = unpack(data)
    parts, windows = meta.pop("parts"), meta.pop("windows")
    meta["changes"] = None if meta["changes"] is None else tuple(meta["changes"])
    step = StepSums(table=table, **meta)
    step.parts = None if parts is None else PartSums(**parts)
    for name, numbers in arrays.items():
        kind, _, rest = name.partition("/")
        if kind == "rows":
            step.rows[rest] = RowSums(numbers, arrays[f"present/{rest}"] > 0)
        elif kind in _ARRAYS:
            getattr(step, kind)[rest] = numbers
    for row, square, block_steps in windows:
        step.windows[row] = WindowSums(square, block_steps, arrays.get(f"window/{row}"))
    return step
