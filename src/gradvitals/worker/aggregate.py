"""Turns the record of a step into readings: all arithmetic of a live run, in float64, without torch.

The sums of a tensor add up over its parts: squares rather than norms, counts rather than shares. Adding up the sums of
all ranks gives sums of the same kind, so one process and a thousand are aggregated the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals import functional
from gradvitals.config import Config
from gradvitals.metrics import INSPECTED, METRICS, SUMS
from gradvitals.types import Layout, PlainReadings, Reading, Stage
from gradvitals.worker.record import (
    ALTERNATING,
    CARRIED,
    FACTS,
    HAS_LOSS,
    HAS_NORMS,
    STAGES,
    Context,
    Flags,
    Floats,
    PlainSteps,
    StepFacts,
    StepRecord,
    pack,
    unpack,
)

NUM_BLOCKS = 10
"""Blocks of steps in a sliding window."""


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


class NormHistory:
    """Moving average and variation of norms. A norm is compared with those before it; NaN and Inf do not enter."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.names: tuple[str, ...] = ()
        self._values: Floats = np.full((window, 0), np.nan)
        """The last norms of each name, the oldest first; NaN where there is none."""

    def push(self, names: tuple[str, ...], norms: Floats) -> tuple[Floats, Floats]:
        """Compare the norms of some steps in a row with those before each, then remember them.

        Args:
            names: What the columns belong to.
            norms: One row per step.

        Returns:
            The spike ratio, norm over its moving average, and the coefficient of variation of the window so far.
            Both are NaN before there are two norms to compare with.
        """
        self._values, self.names = _aligned(self._values, self.names, names), names
        values = np.concatenate((self._values, np.where(np.isfinite(norms), norms, np.nan)))
        known = np.isfinite(values)
        finite = np.where(known, values, 0.0)
        count, total, squares = (_sums_before(some, self.window, len(norms)) for some in (known, finite, finite**2))
        count = np.where(count >= 2, count, np.nan)
        mean = total / count
        variance = np.maximum(squares - count * mean**2, 0) / (count - 1)
        self._values = values[-self.window :]
        return norms / mean, np.sqrt(variance) / mean

    def state_dict(self) -> dict[str, Any]:
        """The window as plain lists."""
        return {"names": list(self.names), "values": self._values.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved window; ignore one of another length."""
        values = np.array(state["values"], dtype=np.float64).reshape(len(state["values"]), len(state["names"]))
        if len(values) == self.window:
            self.names, self._values = tuple(state["names"]), values


def _aligned(values: Floats, names: Sequence[str], wanted: Sequence[str]) -> Floats:
    """Returns the columns of these names, along the last axis; those of a new name are NaN."""
    if names is wanted or names == wanted:
        return values
    column = {name: index for index, name in enumerate(names)}
    found = [column.get(name, -1) for name in wanted]
    return np.concatenate((values, np.full((*values.shape[:-1], 1), np.nan)), axis=-1)[..., found]


def _sums_before(numbers: NDArray[Any], window: int, steps: int) -> Floats:
    """For each of the last rows, the sum of the `window` rows before it."""
    if steps == 1:
        return np.asarray(numbers[:window].sum(0, dtype=np.float64)[None])
    view = np.lib.stride_tricks.sliding_window_view(numbers, window, axis=0)
    return np.asarray(view[:steps].sum(-1, dtype=np.float64))


class RatioHistory:
    """Signal over noise as a ratio of means over recent readings, with its interval from their spread.

    Recent is at most `window` readings, and none from before half the run: gradients shrink fast while a run is
    young, and in a ratio of means the first readings would outweigh all that follow.
    """

    def __init__(self, window: int) -> None:
        self.names: tuple[str, ...] = ()
        self._values: Floats = np.full((3, window, 0), np.nan)
        """Signal, noise and step of the last readings of each name, the newest first; NaN where there are fewer."""

    def push(self, names: tuple[str, ...], signal: Floats, noise: Floats, step: int) -> None:
        """Remember the signal and noise of one reading; a row without both keeps what it has."""
        self._values, self.names = _aligned(self._values, self.names, names), names
        known = np.isfinite(signal) & np.isfinite(noise)
        older = self._values[:, :-1, known]
        self._values[:, 1:, known] = older
        self._values[:, 0, known] = signal[known], noise[known], np.full(known.sum(), float(step))

    def estimate(self, known: Flags, step: int, correlation: Floats | float = 0.0) -> tuple[Floats, Floats, Floats]:
        """Returns the ratio and its 95 % interval, row by row; Inf where there is signal and no noise at all.

        Args:
            known: Rows that the latest reading has a number for. The others are NaN: earlier readings say nothing
                about now.
            step: The current step.
            correlation: Correlation between one reading and the next, by which their number counts for less.
        """
        signal, noise, steps = self._values
        recent = steps >= step / 2
        x, y = np.where(recent, signal, 0.0), np.where(recent, noise, 0.0)
        count = recent.sum(0).astype(np.float64)
        mean_x, mean_y = x.sum(0) / count, y.sum(0) / count
        dx, dy = np.where(recent, x - mean_x, 0.0), np.where(recent, y - mean_y, 0.0)
        dof = np.where(count > 1, count - 1, np.nan)
        var_x, var_y, cov = (dx * dx).sum(0) / dof, (dy * dy).sum(0) / dof, (dx * dy).sum(0) / dof
        effective = count * (1 - correlation) / (1 + correlation)
        value, low, high = functional.ratio_of_means(mean_x, mean_y, var_x, var_y, cov, effective)
        value = np.where((mean_y == 0) & (mean_x > 0), np.inf, value)
        return np.where(known, value, np.nan), np.where(known, low, np.nan), np.where(known, high, np.nan)

    def last_step(self) -> float:
        """Returns the step of the latest reading; NaN before the first."""
        steps = self._values[2]
        return float(np.nanmax(steps)) if np.isfinite(steps).any() else np.nan

    def state_dict(self) -> dict[str, Any]:
        """Names and values as plain lists."""
        return {"names": list(self.names), "values": self._values.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; ignore one of another length, or of an earlier version."""
        values = np.array(state.get("values", ()), dtype=np.float64).reshape(3, -1, len(state.get("names", ())) or 1)
        if values.shape[1] == self._values.shape[1]:
            self.names, self._values = tuple(state["names"]), values


class NoiseScaleHistory:
    """The noise scale of the whole model, over the latter half of the run.

    Showing a value as soon as its interval is bounded would select signals that look large by chance: the median of
    such values was 150 where the truth was 421. So the readings that detect a signal are not the ones that estimate
    it. Once their interval excludes zero, this collects as many new readings and estimates from these and later ones,
    whatever they are. Until then it gives a lower end only.
    """

    MOST = 1024
    """Entries kept; with more, neighbors are averaged."""

    def __init__(self) -> None:
        self._entries: list[list[float]] = []  # step, signal, noise
        self._open: list[list[float]] = []
        self._readings = 1  # per entry
        self._since = math.inf  # readings from this step on count for the value
        self._needed = 0  # entries needed before a value is shown

    def push(self, signal: float, noise: float, step: int) -> None:
        """Remember one reading."""
        if not math.isfinite(signal + noise):
            return
        self._open.append([float(step), signal, noise])
        if len(self._open) == self._readings:
            self._entries.append(_average(self._open))
            self._open = []
        if len(self._entries) > self.MOST:
            pairs = zip(self._entries[0::2], self._entries[1::2], strict=False)
            self._entries = [_average(list(pair)) for pair in pairs]
            self._readings, self._needed = 2 * self._readings, (self._needed + 1) // 2

    def estimate(self, step: int) -> dict[str, float]:
        """Returns B_simple = noise / signal per sample with its interval: the inverse of that of signal over noise."""
        self._entries = [entry for entry in self._entries if entry[0] >= step / 2]
        fresh = [entry for entry in self._entries if entry[0] >= self._since]
        is_shown = self._needed > 0 and len(fresh) >= self._needed
        entries = np.array(fresh if is_shown else self._entries).reshape(-1, 3)[:, 1:]
        value = low = high = math.nan
        if len(entries) > 1:
            (mean_x, mean_y), spread = entries.mean(0), np.cov(entries.T)
            ratio = functional.ratio_of_means(mean_x, mean_y, spread[0, 0], spread[1, 1], spread[0, 1], len(entries))
            value, low, high = (float(part) for part in ratio)
        if low > 0 and not self._needed:
            self._since, self._needed = step + 1.0, len(entries)
        return {
            "noise_scale": 1 / value if is_shown and value > 0 and high > 0 else math.nan,
            "noise_scale_low": 1 / high if high > 0 else math.nan,
            "noise_scale_high": 1 / low if is_shown and low > 0 else math.inf if high > 0 else math.nan,
        }

    def state_dict(self) -> dict[str, Any]:
        """The state as plain lists and numbers."""
        entries, waiting = ([list(entry) for entry in some] for some in (self._entries, self._open))
        numbers = {"readings": self._readings, "since": self._since, "needed": self._needed}
        return {"entries": entries, "open": waiting, **numbers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._entries, self._open = [list(entry) for entry in state["entries"]], [list(one) for one in state["open"]]
        self._readings, self._needed = int(state["readings"]), int(state["needed"])
        self._since = float(state["since"])


def _average(entries: list[list[float]]) -> list[float]:
    """The mean signal and noise of some readings, at the step of the first."""
    return [entries[0][0], *(sum(entry[place] for entry in entries) / len(entries) for place in (1, 2))]


LEAST_SQUARE = 1e-34
"""Mean squares below this are unknown: squares of such small elements leave the range of float32."""

INSPECTED_IDS = tuple(INSPECTED)

PRINTS = tuple(f"{what}_{half}" for what in ("check", "state", "sample", "rng") for half in ("lo", "hi"))


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
    """What a sliding window holds of one row at one step."""

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


SAME_SIZE = 0.05
"""Sizes that vary by less than this share of their mean count as equal: the weights hardly matter."""

PRIOR_SPREAD, PRIOR_READINGS = 0.5, 2.0
"""The prior spread of log ‖h‖², and how many micro-batches it counts for."""


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


def is_estimable(step: StepSums) -> bool:
    """Returns whether a step has enough parts to tell signal from noise."""
    return step.parts is not None and step.parts.count > 1 + 1e-9 and not math.isnan(step.parts.weight)


OUTLIER_RATIO = 5.0
"""A step whose norm exceeds its moving average by this factor is excluded: it would dominate a ratio of means."""

ROUNDING = 2e-6
"""Noise below this share of the gradient's second moment is float32 rounding of equal micro-batches."""

STUDENT_T = 2.262
"""97.5 % point of Student's t with `NUM_BLOCKS` - 1 degrees of freedom, for the window's jackknife."""


class Aggregator:
    """Turns the sums of a run's steps, in order, into readings. Holds the moving averages."""

    def __init__(self, config: Config, on_error: Callable[[str, Exception], None]) -> None:
        self.config = config
        self.on_error = on_error
        self._broken: set[str] = set()
        self._norms = NormHistory(config.norm_window)
        self._micro = RatioHistory(config.gsnr_window)
        self._radial = RatioHistory(config.gsnr_window)
        self._noise_scale = NoiseScaleHistory()
        self._adam = RatioHistory(config.gsnr_window)
        self._window_norms: dict[str, list[float]] = {}
        self._last_change = (-1, math.nan)

    @np.errstate(all="ignore")  # NaN means not known
    def finish(self, step: StepSums) -> list[Reading]:
        """Returns the readings of one step: first what needs no samples, then one for each GSNR source.

        An error in one of them is reported, and that one is skipped from then on.
        """
        readings: list[Reading] = []
        for part, applies, make in (
            ("general", True, self._general),
            ("microbatch", is_estimable(step), self._from_parts),
            ("adam", step.has("first_moment"), self._from_moments),
            ("window", bool(step.windows), self._window),
        ):
            if not applies or part in self._broken:
                continue
            try:
                reading = make(step)
            except Exception as error:
                self._broken.add(part)
                self.on_error(part, error)
                continue
            if reading is not None:
                readings.append(reading)
        return readings

    @np.errstate(all="ignore")
    def plain(self, plain: PlainSteps, table: Table) -> PlainReadings:
        """Returns the readings of plain steps."""
        steps, flags = plain.steps, plain.steps["flags"]
        has_loss, has_norms = flags & HAS_LOSS > 0, flags & HAS_NORMS > 0
        values: dict[str, Floats] = {"loss": steps["loss"], "lr": steps["lr"]}
        present: dict[str, Flags] = {"loss": has_loss, "lr": np.ones(len(steps), dtype=bool)}
        tensors: dict[str, Floats] = {}
        for name, number in (("grad/carried", flags & CARRIED), ("step/in_turn", flags & ALTERNATING)):
            if number.any():
                values[name], present[name] = np.ones(len(steps)), number > 0
        limits = steps["max_norm"]
        if not np.isnan(limits).all():
            values["clip/max_norm"], present["clip/max_norm"] = limits, ~np.isnan(limits)
        if has_norms.any():
            norms = np.full((len(steps), 1 + len(table.names)), np.nan)
            norms[:, 1 + plain.places.rows] = plain.norms
            read = norms[has_norms]
            read[:, 0] = np.sqrt(np.square(read[:, 1 + plain.places.rows]).sum(1))
            norms[has_norms] = read
            ratios, variations = np.full((2, *norms.shape), np.nan)
            ratios[has_norms], variations[has_norms] = self._norms.push(table.with_whole, read)
            # Squares of finite elements can overflow to Inf, but not to NaN.
            surely = np.isnan(norms[:, 1 + plain.places.rows]).any(1) | (has_loss & ~np.isfinite(steps["loss"]))
            broken = np.where(surely, 1.0, np.nan)[:, None]
            nonfinite = np.full_like(norms, np.nan)
            known = norms[:, 1 + plain.places.rows]
            nonfinite[:, 1 + plain.places.rows] = np.where(np.isfinite(known), 0.0, broken)
            nonfinite[:, 0] = nonfinite[:, 1 + plain.places.rows].sum(1)
            for name, numbers in (
                ("grad/norm", norms),
                ("grad/nonfinite", nonfinite),
                ("grad/spike_ratio", ratios),
                ("grad/norm_cv", variations),
            ):
                values[name], tensors[name], present[name] = numbers[:, 0], numbers[:, 1:], has_norms
        return PlainReadings(
            steps=steps["step"],
            times=steps["time"],
            batch_sizes=steps["batch_size"],
            values=values,
            present=present,
            tensors=tensors,
        )

    # -- norms, loss, weights -----------------------------------------------------------------------------------

    def _general(self, step: StepSums) -> Reading:
        values = {name: value for name, value in (("loss", step.loss), ("lr", step.lr)) if value is not None}
        tensors: dict[str, Floats] = {}
        for name, metric in METRICS.items():
            if metric.finish is not None and all(map(step.has, metric.sums)):
                tensors[name] = metric.finish(*map(step.known, metric.sums), step.table.sizes)
                read = step.rows[metric.sums[0]].present
                whole = float(metric.finish(*map(step.total, metric.sums), step.table.sizes[read].sum()))
                if len(metric.sums) == 1 or not math.isnan(whole):
                    values[name] = whole
        if step.has("norm"):
            norms = np.concatenate(([values["grad/norm"]], tensors["grad/norm"]))
            ratio, variation = (numbers[0] for numbers in self._norms.push(step.table.with_whole, norms[None]))
            step.outlier = bool(OUTLIER_RATIO <= ratio[0] < math.inf)
            values |= {"grad/spike_ratio": float(ratio[0]), "grad/norm_cv": float(variation[0])}
            tensors |= {"grad/spike_ratio": ratio[1:], "grad/norm_cv": variation[1:]}
        if step.has("change"):
            values |= self._direction(step)
        if step.carried:
            values["grad/carried"] = 1.0
        if step.alternating:
            values["step/in_turn"] = 1.0
        if step.given_up:
            values["batches/given_up"] = float(step.given_up)
            lost = {"batches/given_up_loss": step.lost_loss, "batches/given_up_norm": step.lost_norm}
            values |= {name: value for name, value in lost.items() if value is not None}
        if step.max_norm is not None:
            values["clip/max_norm"] = step.max_norm
        if step.under_scaler:
            values["step/skipped"] = float(step.skipped)
        elif step.skipped:  # without a scaler, only a Guard skips steps
            values["step/left_out"] = 1.0
        return step.reading(values=values | step.values, tensors=tensors | step.tensors, ranks=step.ranks)

    def _direction(self, step: StepSums) -> dict[str, float]:
        """Returns the cosine between this step's change and the previous one, if both are known."""
        assert step.changes is not None
        square, agreement = step.changes
        (last_step, last_square), self._last_change = self._last_change, (step.step, square)
        if agreement is None or last_step != step.step - 1 or not last_square * square > 0:
            return {}
        return {"update/cosine": agreement / math.sqrt(last_square * square)}

    # -- the sources of GSNR ------------------------------------------------------------------------------

    def _from_parts(self, step: StepSums) -> Reading:
        """Returns the GSNR from the gradients that make up the step's gradient: micro-batches, ranks, or both."""
        layout, parts = step.table.layout, step.parts
        assert parts is not None
        read = step.rows["parts"].present & step.rows["norm"].present
        square = np.where(read, step.rows["norm"].values, np.nan)
        signal, noise = _signal_and_noise(step.rows["parts"].values, square, parts)
        names, all_signal, all_noise = _with_sums(step.table, signal, noise, read)
        # Parts are read as they enter the sum: about `count` times smaller than on their own.
        smallest = step.rows["parts"].values / (parts.weight * parts.count**2)
        all_signal = np.where(_underflows(step.table, smallest, square, read), np.nan, all_signal)
        if layout.heads and "heads" in step.slots and "parts" in step.slots:
            heads, whole = step.by_head(step.slots["parts"]), step.by_head(step.slots["heads"])
            more_signal, more_noise = _signal_and_noise(heads, whole, parts)
            least = step.table.least_squares[step.table.slot_rows].max()
            lost = (heads + whole > 0) & (heads / (parts.weight * parts.count**2) < least)
            more_signal = np.where(lost, np.nan, more_signal)
            names = step.table.with_heads
            all_signal, all_noise = np.append(all_signal, more_signal), np.append(all_noise, more_noise)
        if not step.outlier:
            self._micro.push(names, all_signal, all_noise, step.step)
            if parts.sizes_known:
                self._noise_scale.push(float(all_signal[0]), float(all_noise[0]), step.step)
        per_sample = self._micro.estimate(np.isfinite(all_signal) & np.isfinite(all_noise), step.step)
        mean_size = parts.samples / parts.count
        values, tensors, layers, heads_out = _spread(layout, [mean_size * part for part in per_sample])
        if parts.sizes_known:
            values |= self._noise_scale.estimate(step.step)
        if step.has("inner_squares") and step.has("weight_before"):
            along = read & step.rows["inner_squares"].present
            weight = step.known("weight_before")
            total = np.where(along, np.square(step.rows["inner"].values) / weight, np.nan)
            radial = _signal_and_noise(step.rows["inner_squares"].values / weight, total, parts)
            if not step.outlier:
                self._radial.push(step.table.names, *radial, step.step)
            tensors["radial_gsnr"] = mean_size * self._radial.estimate(np.isfinite(radial[0]), step.step)[0]
        return step.reading(
            source="ranks" if step.num_sources > 1 else "microbatch",
            batch_size=float(mean_size) if parts.sizes_known else None,
            values=values,
            tensors=tensors,
            layers=layers,
            heads=heads_out,
        )

    def _from_moments(self, step: StepSums) -> Reading:
        layout = step.table.layout
        rows = np.flatnonzero(step.rows["beta1"].present)
        beta1, beta2 = step.known("beta1")[rows], step.known("beta2")[rows]
        signal, noise = np.full((2, step.num_rows), np.nan)
        signal[rows], noise[rows] = functional.adam_signal_and_noise(
            step.known("first_moment")[rows],
            step.known("second_moment")[rows],
            beta1=beta1,
            beta2=beta2,
            step=step.known("adam_step")[rows],
        )
        noise = np.where(np.abs(noise) <= ROUNDING * np.abs(signal), 0.0, noise)
        begun = step.known("adam_step") >= 2  # one gradient has no spread
        names, all_signal, all_noise = _with_sums(step.table, signal, noise, begun)
        first, second = step.rows["first_moment"].values, step.rows["second_moment"].values
        all_signal = np.where(_underflows(step.table, second, first, begun), np.nan, all_signal)
        # The first moment decays at the rate beta1, so its square is correlated from one reading to the next.
        gap = step.step - self._adam.last_step()
        correlation = 0.0 if math.isnan(gap) else beta1.max() ** (2 * gap)
        self._adam.push(names, all_signal, all_noise, step.step)
        known = np.isfinite(all_signal) & np.isfinite(all_noise)
        values, tensors, layers, _ = _spread(layout, self._adam.estimate(known, step.step, correlation))
        if values["gsnr_high"] < 0:  # gradients are correlated: the moments are not averages of independent samples
            values = dict.fromkeys(values, math.nan)
        if step.has("below_one"):
            tensors["gsnr/below_one_fraction"] = np.where(begun, step.known("below_one") / step.known("alive"), np.nan)
        if step.has("median_sum"):
            tensors["gsnr/median"] = np.full(step.num_rows, np.nan)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = step.known("median_sum")[rows] / step.known("median_size")[rows]
            tensors["gsnr/median"][rows] = functional.adam_gsnr_from_sums(
                ratio, 1.0, beta1=beta1, beta2=beta2, step=step.known("adam_step")[rows]
            )
        stage = step.moments_stage or step.stage
        return step.reading(source="adam", values=values, tensors=tensors, layers=layers, stage=stage)

    def _window(self, step: StepSums) -> Reading | None:
        names = step.table.names
        for row, window in step.windows.items():
            norms = self._window_norms.setdefault(names[row], [])
            norms.append(window.square)
            del norms[: -2 * self.config.window_steps]
        if not any(window.block_steps for window in step.windows.values()):
            return None
        value, low, high = np.full((3, step.num_rows), np.nan)
        for row, window in step.windows.items():
            length = (window.block_steps or 0) * NUM_BLOCKS
            squares = np.array(self._window_norms[names[row]][-length:])
            if not length or len(squares) < length or window.sums is None:
                continue
            if 0 < squares.mean() < step.table.least_squares[row]:
                continue
            total, *without = window.sums
            blocks = squares.reshape(NUM_BLOCKS, -1).sum(1)
            value[row] = _gsnr_of_sums(blocks.sum(), total, length)
            left = _gsnr_of_sums(blocks.sum() - blocks, np.array(without), length - length // NUM_BLOCKS)
            error = math.sqrt((NUM_BLOCKS - 1) / NUM_BLOCKS * np.square(left - left.mean()).sum())
            low[row], high[row] = value[row] - STUDENT_T * error, value[row] + STUDENT_T * error
        return step.reading(source="window", tensors={"gsnr": value, "gsnr_low": low, "gsnr_high": high})

    # -- resuming -----------------------------------------------------------------------------------------------

    def _histories(self) -> dict[str, NormHistory | RatioHistory | NoiseScaleHistory]:
        return {
            "norms": self._norms,
            "micro": self._micro,
            "radial": self._radial,
            "noise_scale": self._noise_scale,
            "adam": self._adam,
        }

    def state_dict(self) -> dict[str, Any]:
        """The moving averages, as plain values."""
        histories = {name: history.state_dict() for name, history in self._histories().items()}
        return {**histories, "window_norms": {name: list(norms) for name, norms in self._window_norms.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved moving averages."""
        for name, history in self._histories().items():
            if name in state:  # saved by an earlier version
                history.load_state_dict(state[name])
        self._window_norms = {name: list(norms) for name, norms in state["window_norms"].items()}


def _signal_and_noise(squares: Floats, total: Floats, parts: PartSums) -> tuple[Floats, Floats]:
    signal, noise = functional.signal_and_noise_of_sums(
        squares, total, parts.weight, parts.weight_per_sample, parts.square_per_sample
    )
    second_moment = squares / parts.weight_per_sample
    return np.asarray(signal), np.where(noise <= ROUNDING * second_moment, 0.0, noise)


def _with_sums(
    table: Table, signal: Floats, noise: Floats, read: NDArray[np.bool_]
) -> tuple[tuple[str, ...], Floats, Floats]:
    """Returns names, signal and noise of the whole model, then of every tensor, then of every layer.

    A sum is NaN if one of its tensors was read and is not finite.
    """
    layer, num_layers, whole = table.depths, len(table.layout.layers), []
    finite = np.isfinite(signal) & np.isfinite(noise)
    broken = np.bincount(layer, weights=read & ~finite, minlength=num_layers) > 0
    empty = np.bincount(layer, weights=finite, minlength=num_layers) == 0
    for sums in (signal, noise):
        known = np.where(finite, sums, 0.0)
        layers = np.bincount(layer, weights=known, minlength=num_layers)
        total = math.nan if broken.any() or not finite.any() else known.sum()
        whole.append(np.concatenate([[total], sums, np.where(broken | empty, np.nan, layers)]))
    return table.with_layers, whole[0], whole[1]


def _underflows(table: Table, smallest: Floats, largest: Floats, read: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns whether squares are too small for float32: of the whole model, every tensor, every layer.

    Args:
        table: The tensors.
        smallest: The smallest sums of squares that were read of each tensor.
        largest: Other sums of squares: if these are zero too, the gradient is zero.
        read: Tensors that were read.
    """
    sums = [
        np.concatenate(
            [[some.sum()], some, np.bincount(table.depths, weights=some, minlength=len(table.layout.layers))]
        )
        for some in (np.where(read, numbers, 0.0) for numbers in (smallest, largest, table.least_squares))
    ]
    return np.asarray((sums[0] + sums[1] > 0) & (sums[0] < sums[2]))


def _spread(
    layout: Layout, estimate: Any
) -> tuple[dict[str, float], dict[str, Floats], dict[str, Floats], dict[str, Floats]]:
    """Split (value, low, high) arrays laid out by `_with_sums` into values, tensors, layers and heads."""
    of = dict(zip(("gsnr", "gsnr_low", "gsnr_high"), estimate, strict=True))
    last, end = 1 + len(layout.tensors), 1 + len(layout.tensors) + len(layout.layers)
    values = {name: float(part[0]) for name, part in of.items()}
    tensors = {name: part[1:last] for name, part in of.items()}
    layers, heads = ({name: part[cut] for name, part in of.items()} for cut in (slice(last, end), slice(end, None)))
    return values, tensors, layers, heads if len(heads["gsnr"]) else {}


def _gsnr_of_sums(sum_of_squares: Any, square_of_sum: Any, count: Any) -> Any:
    return functional.gsnr_from_norms(sum_of_squares / count, square_of_sum / count**2, count)


# -- the sums of several ranks, on their way to the worker --------------------------------------------------------

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
