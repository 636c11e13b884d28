"""OptimizerState: one optimizer of a run, what is read of it at a step, and how far that step is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import compress
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradvitals.collect import reductions
from gradvitals.collect.backward import BackwardCounter
from gradvitals.collect.microbatch import MicrobatchSums, add_heads
from gradvitals.collect.moments import FactorSums, MomentSums, VitalSums, unavailable_reason
from gradvitals.collect.observed import Observed
from gradvitals.collect.parameters import HeadView, ParameterTable
from gradvitals.collect.reductions import FUSED, REDUCTIONS, SAMPLE_ELEMENTS, FusedReducer
from gradvitals.collect.schedule import CostTimer, Due
from gradvitals.collect.transfer import EXACT, Known, ReadingBuffer
from gradvitals.collect.updates import Changes
from gradvitals.config import Config
from gradvitals.distributed.fsdp import parts_of
from gradvitals.distributed.shards import local
from gradvitals.errors import ClippedTwiceError, LoopError
from gradvitals.metrics import METRIC_OF, SUMS, sums_of
from gradvitals.worker.record import OptimizerStep, StepRecord


@dataclass(frozen=True)
class StepInputs:
    """The gradients that an optimizer is about to step with, still on the device, for a Guard."""

    norms: Sequence[tuple[Sequence[int], Sequence[Tensor] | Tensor]]
    """Norms of its gradients before clipping: rows, and a vector or a list of single numbers."""
    parameters: Sequence[nn.Parameter]
    """The parameter of every row."""
    scale: Tensor | None = None
    """The loss scale that the norms still carry; None for none."""
    losses: Sequence[Tensor | float] = ()
    """The losses observed in this step."""
    clipped: bool = False
    """Whether the loop has clipped the gradients since."""
    max_norm: float | None = None
    """The limit of the clip, if known."""
    by_hand: bool = False
    """Whether it clipped without torch's functions, so that the gradients are not known."""


class SafeCall:
    """Runs parts of the recording by name. An error ends that part and never reaches the training loop.

    Args:
        on_error: Called with the name of a part and its error; that part is not run again.
        on_gpu: Whether tensors may be on a GPU.
    """

    def __init__(self, on_error: Callable[[str, Exception], None], *, on_gpu: bool) -> None:
        self.timer = CostTimer()
        self._on_error = on_error
        self._on_gpu = on_gpu
        self._depth = 0
        self._broken: set[str] = set()
        self._reported: set[str] = set()
        self._ended = False

    def __call__(self, part: str, work: Callable[..., Any], *args: Any) -> Any:
        """Run one part unless it failed before. Returns its result, None after an error."""
        if self._ended or part in self._broken or (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            return None  # a CUDA graph must not capture anything of ours
        if self._depth:  # inside another part, which measures the time
            try:
                return work(*args)
            except Exception as error:
                self.fail(part, error)
                return None
        self._depth, started = 1, time.perf_counter()
        try:
            return work(*args)
        except Exception as error:
            self.fail(part, error)
            return None
        finally:
            self._depth = 0
            self.timer.seconds += time.perf_counter() - started

    def end(self) -> None:
        """Stop running any part."""
        self._ended = True

    def fail(self, part: str, error: Exception) -> None:
        """Report the error of a part and disable it. A `LoopError` concerns one call only and is reported once."""
        if not isinstance(error, LoopError):
            self._broken.add(part)
        elif str(error) in self._reported:
            return
        else:
            self._reported.add(str(error))
        self._on_error(part, error)


class KnownNorms:
    """Norms of gradients that the loop computed itself, each with the row of its parameter.

    Args:
        rows: The row of each norm, -1 for a gradient that is not watched.
        norms: One 0-d tensor per row.
        joined: The same in one tensor; kept if they are exact and all watched.
    """

    def __init__(
        self, rows: Sequence[int] = (), norms: Sequence[Tensor] | None = None, joined: Tensor | None = None
    ) -> None:
        self.rows, self._norms = rows, norms
        # Norms of a DTensor are of this rank's part.
        whole = type(joined) is Tensor and joined.dtype in EXACT and -1 not in rows
        self.joined = joined if whole else None

    @cached_property
    def by_row(self) -> dict[int, Tensor]:
        """The exact norms, by row."""
        if self._norms is None:
            return {}
        pairs = zip(self.rows, self._norms, strict=True)
        return {row: local(norm) for row, norm in pairs if row >= 0 and norm.dtype in EXACT}


NOTHING_KNOWN = KnownNorms()

SURELY_SINGLE = 4
"""After this many steps in a row with one backward pass, expect the next ones to have one too."""


@dataclass(slots=True)
class Draft:
    """The step in progress."""

    record: StepRecord
    due: Due
    buffer: ReadingBuffer = field(default_factory=ReadingBuffer)
    observed: Observed = field(default_factory=Observed)
    paid_norm: bool = False
    """Whether norms were read that the loop did not compute itself."""


class OptimizerState:
    """One optimizer: its rows, what is read of them, and its progress in the current step."""

    def __init__(
        self,
        index: int,
        optimizer: torch.optim.Optimizer,
        config: Config,
        table: ParameterTable,
        safe: SafeCall,
        *,
        reduced: bool,
    ) -> None:
        self.index = index
        self.optimizer = optimizer
        self.config = config
        self.table = table
        self.safe = safe
        self.backward = BackwardCounter(self._discarded)
        self.changes = Changes()
        """Changes of the weights, at the steps that read anything of them."""
        self.updates = Changes("update", SAMPLE_ELEMENTS)
        """The same with more coordinates, for the norms of single tensors in full readings."""
        self.wanted = sums_of(config.metrics)
        """The sums that the chosen metrics are made of."""
        self.fused = FusedReducer()
        self.moments: MomentSums | None = None
        if "gsnr" in config.metrics and "adam" in config.sources and unavailable_reason(optimizer) is None:
            self.moments = MomentSums(optimizer)
        # Without its moments, nothing about GSNR is read of an optimizer.
        available = [metric for metric in config.metrics if self.moments is not None or not metric.startswith("gsnr")]
        self.vitals = VitalSums(optimizer, sums_of(available))
        self.micro: MicrobatchSums | None = None
        self.factors: FactorSums | None = None
        self.on_discarded: Callable[[OptimizerState, int, bool], None] = lambda state, passes, surely: None
        self._reduced = reduced
        self.rows: list[int] = []
        self.parameters: list[nn.Parameter] = []
        self.row_set: set[int] = set()
        self.members: set[int] = set()
        """The ids of its parameters."""
        self.held: list[int] = []
        """Rows of which this rank holds something."""
        self._dense: list[nn.Parameter] | None = None
        """The parameters of the held rows if one multi-tensor call can read all of their gradients."""
        self._one_device = True
        self._members: list[int] = []
        self.betas: dict[int, tuple[float, float]] = {}
        self.fractions: dict[int, float] = {}
        self.scaler: torch.amp.GradScaler | None = None
        self.expects_clip = False
        self.clips_by_hand = False
        self.in_scaler_step = False
        self.reads_wide = False
        """Whether norms are summed in float64."""
        self.settled = False
        """Whether a complete step has shown which parameter backward reaches first."""
        self._reported_twice = False
        self.start_step()

    def start_step(self) -> OptimizerStep:
        """Start a new step."""
        self.step = OptimizerStep()
        self.reading: ReadingBuffer | None = None
        self.read_at = -1
        self.clipped = self.stepped = self.windowed = self.arrived = False
        self.loops_limit: float | None = None
        """The norm that the loop clipped these gradients to."""
        self.defers = False
        """Whether the optimizer reads the gradients in its step, so that this need not."""
        return self.step

    def assign(self, rows: list[int]) -> None:
        """Assign these rows to the optimizer."""
        table = self.table
        self._members = self._current_members()
        parameters = [table.parameters[row] for row in rows]
        if rows == self.rows and all(map(is_, parameters, self.parameters)):
            return
        self.rows, self.parameters = rows, parameters
        self.row_set, self.members = set(rows), set(map(id, parameters))
        self.held = [row for row in rows if local(table.parameters[row]).numel()]  # a shard may be empty
        held = [table.parameters[row] for row in self.held]
        kinds = {(type(local(p)), p.device, p.dtype) for p in held}
        self._one_device = len({p.device for p in parameters}) <= 1
        self._dense = held if len(kinds) == 1 and not table.is_spread and not table.has_sparse else None
        dense = [row for row in self.held if row not in table.looked_up]
        self.changes.follow(dense, [table.parameters[row] for row in dense], [table.weight(row) for row in dense])
        self.updates.follow(self.held, held)
        self._assign_microbatches()
        self.vitals.follow(self.held, held, table.heads)
        if self.factors is None and "vrgd/mean" in self.config.metrics:
            self.factors = FactorSums(self.optimizer, partial(self.safe.fail, "vrgd/mean"))
        self.follow_first()

    def _assign_microbatches(self) -> None:
        table = self.table
        if self.micro is not None:
            self.micro.disarm()
            self.micro = None
        source = "ranks" if self._reduced else "microbatch"
        if "gsnr" in self.config.metrics and source in self.config.sources:
            self.micro, _ = parts_of(
                table.model,
                table.parameters,
                table.heads,
                rows=self.rows,
                arrivals=table.arrivals,
                timer=self.safe.timer,
                on_error=partial(self.safe.fail, "microbatch"),
                reduced=self._reduced,
            )

    def follow_first(self) -> None:
        """Count backward passes at the parameter that backward most likely reaches first."""
        table = self.table
        reached = [table.parameters[row] for row in table.arrivals if row in self.row_set]
        trainable = [parameter for parameter in self.parameters if parameter.requires_grad]
        for parameter in (*reached[:1], *trainable[-1:]):
            self.backward.follow(parameter)
            return

    @property
    def has_single_passes(self) -> bool:
        """Whether the last steps had one backward pass each, so that there are no micro-batches to compare."""
        return self.backward.singles >= SURELY_SINGLE

    def _discarded(self, passes: int, surely: bool) -> None:
        if self.micro is not None and self.micro.armed:
            self.micro.restart()
        if surely:  # the clipped gradients are gone
            self.clipped = self.step.clipped = False
        self.on_discarded(self, passes, surely)

    def _current_members(self) -> list[int]:
        return [id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]]

    def has_changed(self) -> bool:
        """Returns whether the optimizer's parameters changed since its rows were assigned."""
        return self._current_members() != self._members

    @property
    def is_fresh(self) -> bool:
        """Whether it has gradients of the current step."""
        return not self.stepped and self.backward.backwards > 0

    def is_stale(self, observes: int) -> bool:
        """Returns whether to read gradients (again): not read yet, or another backward ran since."""
        if self.reading is None or self.defers:
            return True
        if self.clipped:
            return False
        if not self.settled:  # a backward may have missed the counter
            return not self.backward.altered()
        return self.read_at != self.backward.backwards or (self.backward.backwards == 0 and observes > 1)

    def note_scale(self, assumed: torch.amp.GradScaler | None) -> None:
        """Add the loss scale to the reading, and note whether gradients still carry it."""
        scaler = self.scaler or assumed
        if scaler is None or scaler._scale is None:
            self.step.stage = "clipped" if self.clipped or self.backward.altered() else "raw"
            return
        self.step.scaled = self.still_scaled(scaler)
        self.step.stage = "clipped" if self.clipped else "unscaled"
        assert self.reading is not None
        # The scaler changes its scale in place, maybe before the buffer is copied.
        self.reading.add(f"scale{self.index}", scaler._scale.detach().clone())

    def still_scaled(self, scaler: torch.amp.GradScaler) -> bool:
        """Returns whether the scaler has not unscaled this optimizer's gradients yet."""
        state = scaler._per_optimizer_states[id(self.optimizer)]
        return bool(state["stage"].name == "READY")

    def forget_reading(self, passes: int) -> Known:
        """Drop the reading of discarded gradients. Returns their norms if read after `passes` passes and not scaled."""
        reading, self.reading = self.reading or ReadingBuffer(), None
        whole = not self.defers and self.read_at == passes and not reading.named(f"scale{self.index}")
        return reading.named("norm") if whole else []

    def inputs(self, draft: Draft) -> StepInputs | None:
        """Returns what it is about to step with; None if its gradients were not read."""
        if self.reading is None:
            return None
        scales = self.reading.named(f"scale{self.index}") if self.step.scaled and not self.step.ignore_scale else []
        return StepInputs(
            norms=self.reading.named("norm"),
            parameters=self.table.parameters,
            scale=scales[0][1][0] if scales else None,
            losses=draft.observed.losses,
            clipped=self.clipped or self.clips_by_hand,
            by_hand=self.clips_by_hand,
            max_norm=draft.record.max_norm if self.clipped else None,
        )

    # -- gradients ----------------------------------------------------------------------------------------------

    def read_gradients(self, known: KnownNorms, due: Due, count_nonfinite: bool, *, may_defer: bool) -> bool:
        """Read the gradients as they are now.

        Args:
            known: Norms from clipping, which need not be computed again.
            due: What is due at this step.
            count_nonfinite: Whether to count NaN and infinite elements, which takes a pass of its own.
            may_defer: Whether an optimizer that reports its gradients may do so after the step.

        Returns:
            Whether norms were computed that the loop did not compute itself.
        """
        table = self.table
        self.reading, self.read_at = ReadingBuffer(), self.backward.backwards
        self.backward.note_read()
        buffer, plain = self.reading, not due.full and not count_nonfinite
        self.reads_wide = count_nonfinite and may_defer  # a Guard needs the same numbers when it replays a step
        if self.reads_wide:  # the loop's norms overflow from elements of 2e19 on
            known = NOTHING_KNOWN
        if known.joined is not None and len(known.rows) == len(self.held) and not table.aside:
            self.defers, reused = False, len(self.held)
            buffer.add("norm", known.joined, known.rows)
        else:
            norms = known.by_row
            self.defers = may_defer and not norms and not self.clips_by_hand and self.vitals.expected
            rows = [row for row in self.held if row in norms and row not in table.aside] if norms else []
            reused = len(rows)
            if self._one_device:
                buffer.add_each("norm", [norms[row] for row in rows], rows)
            else:
                for some, group in reductions.by_device_and_dtype(rows, [norms[row] for row in rows]):
                    buffer.add_each("norm", group, some)
        if plain:
            if reused == len(self.held) or not (due.norm or reused):
                return False
            if self._dense is not None and not reused and not self.defers and self._read_dense(buffer):
                return True
        rows = [row for row in self.held if row not in table.aside]
        if self.defers:
            stepped = set(self._members)
            is_reported = [id(table.parameters[row]) in stepped for row in rows]
            if names := self._asked(due, False, fused=False):
                self._reduce(names, table.gradients(compress(rows, is_reported)))
            rows = [row for row, reported in zip(rows, is_reported, strict=True) if not reported]
        self.read_rows(rows, known.by_row, due, count_nonfinite)
        return reused < len(self.held) and not self.defers

    @torch.no_grad()
    def _read_dense(self, buffer: ReadingBuffer) -> bool:
        """Read all norms in one multi-tensor call, if every parameter has a plain gradient."""
        assert self._dense is not None
        grads = [parameter.grad for parameter in self._dense]
        if any(grad is None for grad in grads):
            return False
        buffer.add_each("norm", reductions.norms(cast(list[Tensor], grads)), self.held)
        return True

    @torch.no_grad()
    def read_rows(self, wanted: Sequence[int], norms: Mapping[int, Tensor], due: Due, count_nonfinite: bool) -> None:
        """Read some rows of a reading that has begun."""
        buffer, table, safe = self.reading, self.table, self.safe
        found = table.gradients(wanted)
        if not found or buffer is None:
            return
        every = [row for row, _ in found]
        heads = table.heads if due.full and self.micro is not None and self.micro.armed else {}
        asked = self._asked(due, count_nonfinite)
        left = safe("kernels", self._read_fused, asked, found, norms, heads)
        left = found if left is None else left
        if due.detail and "weight_before" in self.wanted:
            safe("radial_gsnr", self.add_norms, buffer, "weight_before", every)
        own = [(row, grad) for row, grad in left if row not in norms]
        read = partial(reductions.norms, wide=self.reads_wide)
        safe("norm", reductions.add, buffer, "norm", read, *columns(own))
        if heads:
            safe("heads", add_heads, buffer, "heads", table.heads, *columns(left))
        self._reduce(asked, left)
        self._reduce(self._asked(due, False, fused=False), found)

    def _asked(self, due: Due, count_nonfinite: bool, *, fused: bool = True) -> list[str]:
        """Returns the sums of gradients due besides norms: those that kernels and optimizers report, or the others."""
        names = (name for name in REDUCTIONS if name in self.wanted and (name in FUSED) == fused)
        due_now = [name for name in names if SUMS[name].is_due(full=due.full, detail=due.detail)]
        return due_now if count_nonfinite else [name for name in due_now if name != "nonfinite"]

    def _reduce(self, names: Sequence[str], found: Sequence[tuple[int, Tensor]]) -> None:
        for name in names:
            self.safe(METRIC_OF[name], reductions.add, self.reading, name, REDUCTIONS[name], *columns(found))

    def _read_fused(
        self,
        asked: Sequence[str],
        found: list[tuple[int, Tensor]],
        norms: Mapping[int, Tensor],
        heads: Mapping[int, HeadView],
    ) -> list[tuple[int, Tensor]]:
        """Read everything at once by kernels, if there are any; returns what is left for torch."""
        buffer = self.reading
        assert buffer is not None
        left = []
        for known in (False, True):  # some norms may be known from clipping
            some = [(row, grad) for row, grad in found if (row in norms) == known]
            names = {name: name for name in (asked if known else {"norm", *asked})}
            if not names:
                some = [(row, grad) for row, grad in some if row in heads]
            rows, grads = [row for row, _ in some], [grad for _, grad in some]
            unread = self.fused.read(buffer, names, rows, grads, heads=heads, name_of_heads="heads")
            left += [some[p] for p in unread]
        return left

    def add_norms(self, buffer: ReadingBuffer, name: str, rows: Sequence[int]) -> None:
        """Add the norms of weights."""
        weights = self.table.tensors(rows)
        left = self.fused.read(buffer, {"norm": name}, rows, weights)
        reductions.add(buffer, name, reductions.norms, [rows[p] for p in left], [weights[p] for p in left])

    def push_windows(self, buffer: ReadingBuffer, assumed: torch.amp.GradScaler | None) -> dict[int, int | None]:
        """Add this step's gradients to the sliding windows.

        Returns:
            For each row that went into a window: the steps in a block if the window is complete, or None.
        """
        self.windowed = True
        scaler = self.scaler or assumed
        scale = scaler._scale if scaler is not None and self.still_scaled(scaler) else None
        pushed: dict[int, int | None] = {}
        for row, window in self.table.windows.items():
            grad = self.table.gradient(row) if row in self.row_set else None
            if grad is not None:
                pushed[row] = window.push(grad, scale, buffer)
        return pushed

    def spoil_windows(self) -> None:
        """The gradient that was added to the windows was not complete."""
        for row, window in self.table.windows.items():
            if row in self.row_set:
                window.spoil()

    # -- around the optimizer's step ----------------------------------------------------------------------------

    def reads_update(self, due: Due) -> bool:
        """Returns whether anything is read right before or after the optimizer's step."""
        return due.change or due.full or self.vitals.available or hasattr(self.optimizer, "found_inf")

    def before_update(self, draft: Draft) -> None:
        """Sample what the optimizer's step is about to change."""
        due = draft.due
        if due.full and self.factors is not None and self.factors.available:
            self.factors.listen(draft.buffer, self.rows, self.parameters)
        if self.vitals.available:
            self.vitals.begin()
            if self.vitals.max_norm is not None:  # the moments receive clipped gradients
                draft.record.max_norm, self.step.clipped = self._lower_limit(self.vitals.max_norm), True
        if due.change and "update" in self.wanted:
            self.changes.before_step()
            if due.full and not self.vitals.expected:
                self.updates.before_step()

    def _lower_limit(self, own: float) -> float:
        """Returns the lower limit of two clips: the loop may clip gradients before the optimizer does."""
        loops = self.loops_limit
        if loops is None or not 0 < loops < math.inf:
            return own
        if not self._reported_twice:
            self._reported_twice = True
            self.safe.fail("clip", ClippedTwiceError(loops, own))
        return min(loops, own)

    def after_update(self, draft: Draft) -> None:
        """Read moments, weights and updates right after the optimizer's step."""
        due, safe = draft.due, self.safe
        if self.factors is not None:
            safe("vrgd/mean", self.factors.stop)
        if "update" in self.wanted:
            if due.change:
                safe("changes", self.changes.add, draft.buffer)
            else:
                self.changes.forget()
        reported: set[int] = set()
        if self.vitals.available:
            reported = safe("vitals", self._take_vitals, draft) or set()
        if not due.full:
            return
        if self.moments is not None:
            safe("moments", self._read_moments, self.moments, draft, reported)
        safe("update", self._read_weights, draft, reported)

    def _take_vitals(self, draft: Draft) -> set[int]:
        gradients = self.reading if self.defers else None
        due = draft.due
        rows, betas = self.vitals.take(draft.buffer, gradients, due)
        if due.full and rows:
            # Keep the entries of rows without a gradient in this step: each change sends a new context.
            self.betas, self.fractions = self.betas | betas, self.fractions | dict.fromkeys(rows, 1.0)
        missing = [row for row in self.held if row not in rows] if self.defers and not rows else []
        found = self.table.gradients(missing)
        if found and self.reading is not None:  # unlike the last one, this step did not run by kernels
            reductions.add(self.reading, "norm", reductions.norms, *columns(found))
        return rows

    def _read_moments(self, moments: MomentSums, draft: Draft, reported: set[int]) -> None:
        due = draft.due
        wanted = {name for name in self.wanted if SUMS[name].is_due(full=due.full, detail=due.detail)}
        if reported:  # by the optimizer, but for the medians
            wanted &= {"median_sum"}
        chosen = reported or set(self.held)
        pairs = [(row, p) for row, p in zip(self.rows, self.parameters, strict=True) if row in chosen]
        betas = moments.add(draft.buffer, [row for row, _ in pairs], [p for _, p in pairs], wanted) if wanted else {}
        if not reported:
            self.betas = betas

    @torch.no_grad()
    def _read_weights(self, draft: Draft, reported: set[int]) -> None:
        rows = [row for row in self.held if row not in reported]
        if rows and "weight" in self.wanted:
            self.add_norms(draft.buffer, "weight", rows)
        if "update" in self.wanted and not reported:
            self.updates.add(draft.buffer)
            self.updates.forget()
            self.fractions = self.updates.shares

    def close(self) -> None:
        """Remove all hooks."""
        self.backward.unhook()
        self.vitals.stop()
        if self.micro is not None:
            self.micro.disarm()
        if self.factors is not None:
            self.factors.stop()


def columns(found: Sequence[tuple[int, Tensor]]) -> tuple[list[int], list[Tensor]]:
    """Returns the rows and the tensors as two lists."""
    return [row for row, _ in found], [tensor for _, tensor in found]
