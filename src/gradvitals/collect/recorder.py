"""StepRecorder: follows the training loop through a step and reads its gradients at the right moment.

Gradients are read once per step, at the first of these points at which they are complete: inside `clip_grad_norm_`
(which computes the norms anyway), at `Monitor.observe`, at `GradScaler.step`, or at the optimizer's step. Moments,
weights and updates are read in the optimizer's post-hook. Nothing here synchronizes with a device.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from gradvitals import notices
from gradvitals.collect import hooks, reductions
from gradvitals.collect.backward import AlternatingOptimizers, FirstLayerGradient
from gradvitals.collect.inspection import FIRST_STEPS, Inspection
from gradvitals.collect.moments import unavailable_reason
from gradvitals.collect.observed import Observed
from gradvitals.collect.optimizer_state import (
    NOTHING_KNOWN,
    Draft,
    KnownNorms,
    OptimizerState,
    SafeCall,
    StepInputs,
    columns,
)
from gradvitals.collect.parameters import ParameterTable
from gradvitals.collect.plain import PlainRecorder
from gradvitals.collect.queues import DeviceQueue, HostQueue, WritePlain
from gradvitals.collect.schedule import Due, ReadSchedule
from gradvitals.collect.transfer import ReadingBuffer, Transfer
from gradvitals.collect.validation import Validation
from gradvitals.config import Config
from gradvitals.distributed.audit import Audit
from gradvitals.distributed.fsdp import why_no_parts
from gradvitals.distributed.topology import Topology
from gradvitals.types import Finding
from gradvitals.worker.record import ALTERNATING, Context, Part, StepRecord

MAX_BROKEN = 20
"""Batches with a loss that is not finite that are inspected."""
MAX_METRICS, MAX_SCHEDULERS = 1000, 16
"""Calls of a scheduler, and schedulers, that are remembered."""
FEWEST_STEPS = 20
"""Steps after which the script is known to train, not only to be tried out."""
PLANNED_STEPS = 32
"""Steps that are planned together."""

PLAN_SECONDS = 1.0
"""Plain steps are planned for about this long at most."""


class StepRecorder:
    """Reads the gradients of a run at the right points and delivers a record of every step.

    Hooks call it: around the clip and GradScaler (`hooks`), before and after the optimizer's step, and in backward at
    one parameter, or at all of them for a full reading. Any thread may clip any model, but backward changes `.grad`
    without Python's lock, so only the thread that trains may read gradients.

    Args:
        table: The parameters to watch.
        optimizers: The optimizers that step them. A step ends when each has stepped, or one steps again.
        config: What to read and how often.
        deliver: Called on the training thread with the record of a step and its numbers, once they are on the host.
        prepare: Called with the number of the first of consecutive plain steps, before they are written.
        write_plain: Called with the bytes of plain steps, and their count.
        on_error: Called with the name of a part and its error; that part stops, training does not.
        batch_size: Samples per optimizer step, if it is the same at every step.
        topology: The ranks that train the model; None for a single process.
    """

    def __init__(
        self,
        table: ParameterTable,
        optimizers: Sequence[torch.optim.Optimizer],
        config: Config,
        *,
        deliver: Callable[[StepRecord, list[Part]], None],
        prepare: Callable[[int], None],
        write_plain: WritePlain,
        on_error: Callable[[str, Exception], None],
        batch_size: float | None = None,
        topology: Topology | None = None,
    ) -> None:
        self.config, self.on_error, self.batch_size = config, on_error, batch_size
        on_gpu = self._on_gpu = any(parameter.is_cuda for parameter in table.parameters)
        on_host = all(parameter.device.type == "cpu" for parameter in table.parameters)
        alone = topology is None and len(optimizers) == 1
        self.schedule = ReadSchedule(config, audits=topology is not None, adapts=alone)
        self.on_schedule_change: Callable[[], None] = lambda: None
        self.autocast: str | None = None
        """The dtype of autocast, if it was entered."""
        self.count_nonfinite = False
        """Whether to count non-finite elements, which takes a pass: after a non-finite norm."""
        self.guarded = False
        """Whether a Guard acts, so that gradients must be read right before the optimizer steps."""
        self.on_scaler_skip: Callable[[torch.optim.Optimizer], None] | None = None
        self.on_groups_end: Callable[[], None] | None = None
        self.table = table
        self.safe = SafeCall(self._failed, on_gpu=on_gpu)
        never: Callable[[], bool] = bool  # calls no Python code and returns False
        self._is_captured = torch.cuda.is_current_stream_capturing if on_gpu else never
        """Whether a CUDA graph is being captured, which must not capture anything of ours."""
        self._audit = Audit(table.model) if topology is not None and config.audit_every is not None else None
        self._order_known = False
        self.assumed_scaler: torch.amp.GradScaler | None = None
        self._observes = 0
        self.observes_expected = math.inf  # known after the first step
        self.muted = False
        self.thread: int | None = None
        """The thread that last observed, clipped or stepped. Until it is known, `on_total_norm` does nothing."""
        self._clip_order: list[int] = []
        self._first_gradient: FirstLayerGradient | None = None
        self._inspection: Inspection | None = None
        self._broken_losses = 0
        self._validation: Validation | None = None
        self._plateaus: list[tuple[weakref.ref[Any], list[tuple[str, float, float, float]]]] = []
        """Each ReduceLROnPlateau with its calls: mode, patience, metric, learning rate after it."""
        self._may_grow = topology is None  # ranks have agreed on their rows
        self._last_end = time.perf_counter()
        self._context = Context()
        self._due_from, self._dues = 0, list[Due]()
        self.context_changed = True
        self._deliver = deliver
        self.transfer = Transfer(self._hand_on if on_host else deliver, prepare, write_plain)
        self._plain: PlainRecorder | None = None
        """The step in progress, if it has been plain so far."""
        self._plain_steps: PlainRecorder | None = None
        """The recorder of all plain steps."""
        self._present: list[int] = []
        """The rows that had a gradient when a step could last have been plain."""
        self._losses_add_up = False
        self._alone = alone
        """Whether steps can be plain: one process, one optimizer."""
        self._on_host, self._prepare_journal, self._write_plain = on_host, prepare, write_plain
        self._walls: list[float] = []
        """The seconds of plain steps that the schedule does not know yet."""
        several = topology is not None and topology.num_sources > 1
        self.optimizers = [
            OptimizerState(index, one, config, table, self.safe, reduced=several)
            for index, one in enumerate(optimizers)
        ]
        self._assign_rows()
        self._handles: list[Any] = []
        for state in self.optimizers:
            state.on_discarded = self._on_discarded
            self._handles += self._hook_steps(state)
        self.start(0)
        if topology is not None:
            self._first_gradient = FirstLayerGradient(table, lambda: self.draft.buffer)
        self._alternating = AlternatingOptimizers(optimizers)
        own = weakref.ref(self)  # a wrapper in torch must not hold its watcher
        if topology is None:
            self._inspection = Inspection(
                table,
                lambda: cast(StepRecorder, own()).draft.buffer,
                lambda part, error: cast(StepRecorder, own()).safe.fail(part, error),
            )
        self._arm_inspection(0)
        self._validation = Validation(table.model, self.validate) if topology is None else None
        hooks.attach(self)

    def _assign_rows(self) -> None:
        self._plain_steps = None
        for state, rows in zip(self.optimizers, self.table.by_optimizer(), strict=True):
            state.assign(rows)

    # -- the step -----------------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Start with the step of this number."""
        self._plain = None
        self.step = self.first = step
        self._dues.clear()
        for state in self.optimizers:
            self._arm(state, self._due_at(step))
        self._arm_inspection(step)
        self.draft = self._new_draft()

    def _arm(self, state: OptimizerState, due: Due) -> None:
        """Collect the gradients of micro-batches if the coming step is due for a full reading."""
        if state.micro is not None:
            if due.full:
                self.safe("microbatch", self._arm_micro, state, due)
            else:
                self.safe("microbatch", state.micro.disarm)
        if due.audit and self._audit is not None and state is self.optimizers[0]:
            self.safe("audit", self._audit.arm)

    def _arm_inspection(self, step: int) -> None:
        """Inspect the next batch if it is one of the first, due for a detailed reading, or after a NaN."""
        inspection = self._inspection
        if inspection is None:
            return
        first = step < FIRST_STEPS
        if first or self._due_at(step).detail or self.count_nonfinite:
            inspection.arm(first=first)
        elif inspection.is_armed:
            inspection.disarm()

    def _due_at(self, step: int) -> Due:
        place = step - self._due_from
        if not 0 <= place < len(self._dues):  # plan several steps at once, which costs little more than one
            self._due_from, place = step, 0
            self._dues = self.schedule.plan(step, PLANNED_STEPS)
        return self._dues[place]

    def _replan(self) -> None:
        """Apply a changed schedule from the next step on."""
        if self._plain is not None:
            self._plain.left = min(self._plain.left, 1)
        self._due_from, self._dues[:] = self.step, [self._due_at(self.step)]
        self.on_schedule_change()

    def _arm_micro(self, state: OptimizerState, due: Due) -> None:
        assert state.micro is not None
        if state.has_single_passes and not state.micro.reduced:
            state.micro.disarm()
            return
        state.micro.arm(radial=due.detail and "radial_gsnr" in self.config.metrics)

    def _new_draft(self) -> Draft:
        self._observes = 0
        due = self._due_at(self.step)
        record = StepRecord(
            step=self.step,
            full=due.full,
            detail=due.detail,
            audit=due.audit,
            optimizers=[state.start_step() for state in self.optimizers],
        )
        return Draft(record, due, observed=Observed(adds_up=self._losses_add_up))

    def finish(self) -> None:
        """Deliver the step and start the next."""
        self._leave_plain()
        draft, record = self.draft, self.draft.record
        for state in self.optimizers:
            state.expects_clip, state.settled = state.clipped, True
            if state.reading is not None:
                draft.buffer.extend(state.reading)
        self.observes_expected = max(1, self.observes)
        if self.table.arrivals and not self._order_known:
            self._learn_order()
        record.time = time.time()
        record.batch_size = draft.observed.batch_size or self.batch_size
        record.alternating = self._alternating.is_game
        draft.observed.write(record, draft.buffer)
        now = time.perf_counter()
        record.wall_seconds, self._last_end = now - self._last_end, now
        if record.full or not self._context.optimizer_rows:
            self._note_context()
        self.step += 1
        self.draft = self._new_draft()
        self.transfer.add(record, draft.buffer)
        self._account(
            full=record.full,
            wall_seconds=record.wall_seconds,
            cost_seconds=self.safe.timer.take(),
            paid_norm=draft.paid_norm,
        )
        if self._alone and self._can_be_plain():
            self._begin_plain(record.wall_seconds)
            if self._plain is not None:
                self.optimizers[0].changes.forget()  # plain steps do not sample the weights

    @property
    def observes(self) -> int:
        """Number of losses that the loop has observed in this step."""
        return self._observes if self._plain is None else len(self._plain.losses)

    # -- plain steps --------------------------------------------------------------------------------------------

    def _can_be_plain(self) -> bool:
        """Whether the loop does nothing that a plain step cannot take, and has room for its numbers."""
        state = self.optimizers[0]
        inspection = self._inspection
        if (
            state._dense is None
            or len(state.held) != len(state.parameters)
            or state.scaler is not None
            or state.clips_by_hand
            or state.vitals.available
            or state.vitals.expected
            or self.assumed_scaler is not None
            or self.guarded
            or self.observes_expected == math.inf
            or (state.micro is not None and state.micro.armed)
            or (inspection is not None and inspection.is_armed)
            or hasattr(state.optimizer, "found_inf")
            or _plain_lr(state.optimizer.param_groups[0].get("lr")) is None
        ):
            return False
        parameters = self.table.parameters
        present = [row for row in state.held if parameters[row].grad is not None] or state.held
        if present != self._present:  # plain steps begin only once the same parameters have gradients again
            self._present, self._plain_steps = present, None
            return False
        rows = self._clip_order if state.expects_clip and self._clip_order else self._present
        if len(rows) != len(present) or set(rows) != set(present):
            return False
        if self._plain_steps is None or rows is not self._plain_steps.rows:
            own = [parameters[row] for row in rows]
            absent = [parameters[row] for row in sorted(state.row_set.difference(rows))]
            queue: HostQueue | DeviceQueue
            if self._on_host:
                queue = HostQueue(rows, self._write_plain)
            else:
                queue = DeviceQueue(rows, own[0].device)
                self.transfer.use(queue)
            self._plain_steps = PlainRecorder(queue, rows, own, absent, state.backward, adds_up=self._losses_add_up)
        return True

    def _begin_plain(self, seconds: float) -> None:
        """Start the coming steps as plain ones, up to the first at which anything else is due, or for about a second.

        Args:
            seconds: What the last step took. The worker's messages are looked for when these steps are over.
        """
        self._plain = None
        if self.count_nonfinite or self.guarded:
            return
        first = self._due_at(self.step)
        most = max(1, int(PLAN_SECONDS / seconds)) if seconds > 0 else PLANNED_STEPS
        ahead = [first, *self._dues[self.step - self._due_from + 1 :]][:most]
        has_windows = bool(self.table.windows)
        others = (due.full or due.audit or due.change or (due.window and has_windows) for due in ahead)
        count = next((place for place, other in enumerate(others) if other), len(ahead))
        if count:
            assert self._plain_steps is not None
            reads_after = math.inf if self.optimizers[0].expects_clip else self.observes_expected
            self._plain_steps.begin([due.norm for due in ahead[:count]], reads_after)
            self._plain = self._plain_steps
            if self._on_host:
                self._prepare_journal(self.step)

    def _leave_plain(self) -> None:
        """The step is no longer plain: go on with what was read of it so far."""
        plain, state = self._plain, self.optimizers[0]
        if plain is None:
            return
        self._plain = None
        self._account_plain()
        self.draft.record.step, self.draft.due = self.step, self._due_at(self.step)
        self._observes = len(plain.losses)
        self.draft.observed.calls += plain.observations()
        if plain.norms is not None:
            state.reading, state.read_at = ReadingBuffer(), plain.read_at
            state.reading.add("norm", plain.norms, plain.rows)
            self.draft.paid_norm = plain.norm_seconds > 0
        if plain.clipped:
            state.clipped = state.step.clipped = True
            self.draft.record.max_norm = state.loops_limit = plain.max_norm

    def _plainly(self, work: Callable[..., bool], *args: Any) -> bool:
        """Do a part of a plain step; returns whether that is all there is to do. Else the step is no longer plain."""
        try:
            if work(*args):
                return True
        except Exception as error:
            self._alone = False
            self.safe.fail("plain", error)
        self.safe("leave", self._leave_plain)
        return False

    def _end_plain(self, plain: PlainRecorder) -> bool:
        """The optimizer has stepped. Returns whether the step was a plain one to the end."""
        if self._is_captured():
            plain.forget_step()
            return True
        state = self.optimizers[0]
        lr = state.optimizer.param_groups[0].get("lr")
        if type(lr) is not float and (lr := _plain_lr(lr)) is None:
            return False
        now, wall = time.perf_counter(), time.time()
        seconds, self._last_end = now - self._last_end, now
        self.observes_expected, state.expects_clip = len(plain.losses) or 1, plain.clipped
        norm_seconds = plain.norm_seconds
        plain.end_step(self.step, wall, seconds, lr, self.batch_size, ALTERNATING * self._alternating.is_game)
        self.step += 1
        try:  # an error from here on must not end the step again
            if norm_seconds:
                self._account_plain()
                self._account(full=False, wall_seconds=seconds, cost_seconds=norm_seconds, paid_norm=True)
            else:
                self._walls.append(seconds)
            if not self._on_host:
                self.transfer.note_time(wall)
            if not plain.left:
                self._continue_plain(seconds)
        except Exception as error:
            self.safe.fail("step", error)
        return True

    def _continue_plain(self, seconds: float) -> None:
        """The steps that were planned as plain ones are over. The last one took this long."""
        self._account_plain()
        self._begin_plain(seconds)
        if self._plain is None:
            self._prepare(self.optimizers[0], self._due_at(self.step), self.step)
            self.draft = self._new_draft()

    def _account_plain(self) -> None:
        walls, self._walls = self._walls, []
        if self.schedule.account_plain(walls):
            self._replan()

    def _account(self, **costs: Any) -> None:
        if self.schedule.account(**costs):
            self._replan()

    def _hand_on(self, record: StepRecord, parts: list[Part]) -> None:
        """Deliver a step that was in host memory all along, while its gradients are still there."""
        for name, rows, norms in parts:
            if name == "norm" and np.max(norms, initial=0.0) == math.inf and record.step == self.step - 1:
                self.safe("grad/nonfinite", self._count_infinite, parts, rows)
        self._deliver(record, parts)

    @torch.no_grad()
    def _count_infinite(self, parts: list[Part], rows: Sequence[int]) -> None:
        """Count non-finite elements after an infinite norm, which may come from squares that overflow.

        The gradients may be clipped by now, which leaves finite elements finite unless there is a NaN. Then `np.max` is
        NaN and this is not called.
        """
        if any(name == "nonfinite" for name, _, _ in parts):
            return
        found = self.table.gradients(rows)
        if len(found) == len(rows):
            buffer = ReadingBuffer()
            reductions.add(buffer, "nonfinite", reductions.nonfinite, *columns(found))
            parts += buffer.host_parts()

    def _learn_order(self) -> None:
        self._order_known = True
        self.table.learn_order()
        if self._first_gradient is not None:
            self._first_gradient.follow(self.table)
        for state in self.optimizers:
            state.follow_first()

    def _note_context(self) -> None:
        """Update the context if it changed."""
        betas: dict[int, tuple[float, float]] = {}
        shares: dict[str, dict[int, float]] = {"update": {}, "change": {}}
        for state in self.optimizers:
            betas |= state.betas
            shares["update"] |= state.fractions
            shares["change"] |= state.changes.shares
        context = Context(
            layout=self.table.layout,
            slots=self.table.slots,
            optimizer_rows=[state.rows for state in self.optimizers],
            betas=betas,
            shares=shares,
            weights=self.table.change_weights,
            autocast=self.autocast,
        )
        if context != self._context:
            self._context, self.context_changed = context, True

    def take_context(self) -> Context | None:
        """Returns the context if it changed since the last call."""
        if not self.context_changed:
            return None
        self.context_changed = False
        return self._context

    def flush(self) -> None:
        """Start to copy all finished steps to the host."""
        self.safe("step", self.transfer.send)

    def poll(self) -> None:
        """Deliver the steps that have arrived on the host."""
        self.safe("step", self.transfer.poll)

    def read_every_step(self) -> None:
        """From now on, read every step and deliver it on its own, because a Guard acts on it."""
        self.safe("leave", self._leave_plain)
        self._dues.clear()
        self.schedule.every_step = self.transfer.each_step = True

    def _on_discarded(self, state: OptimizerState, passes: int, surely: bool) -> None:
        if not self.muted:  # inside the loop's backward: no error may escape
            self.safe("observe", self._forget, state, passes, surely)

    def _forget(self, state: OptimizerState, passes: int, surely: bool) -> None:
        self._leave_plain()
        alone = len(self.optimizers) == 1  # with several, each of them reports it
        norms = state.forget_reading(passes)
        if not any(one.stepped for one in self.optimizers):
            self._observes = self.draft.observed.give_up(passes if alone else math.inf, surely and alone)
            self.safe("norms given up", self.draft.observed.lose_norms, norms if surely and alone else [])

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, state: OptimizerState, known: KnownNorms = NOTHING_KNOWN) -> None:
        """Read an optimizer's gradients as they are now."""
        table, due = self.table, self.draft.due
        if due.full:
            if state.has_changed() and self._may_grow:
                table.refresh()
                self._assign_rows()
            table.note_frozen()
        if table.is_spread:
            table.lay_out(state.rows)
        if state.windowed:
            state.spoil_windows()
        if state.read_gradients(known, due, self.count_nonfinite, may_defer=not self.guarded):
            self.draft.paid_norm = True
        state.note_scale(self.assumed_scaler)

    def _push_windows(self, state: OptimizerState) -> None:
        """Add an optimizer's gradients to the sliding windows, once per step."""
        if self.table.windows and self.draft.due.window and not state.windowed:
            pushed = state.push_windows(self.draft.buffer, self.assumed_scaler)
            self.draft.record.windows |= pushed

    def observe(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        """Keep a loss and, unless a clip is expected later, read the gradients now."""
        self.thread = threading.get_ident()
        if self.muted:
            return
        plain = self._plain
        if plain is not None and batch_size is None and (self._is_captured() or self._plainly(plain.observe, loss)):
            return
        self.safe("observe", self._note, loss, batch_size)

    def add_up_losses(self) -> None:
        """From now on, what is observed are parts of a loss: that of a step is their sum instead of their mean.

        Gradients of several backward passes add up, so a step descends on the sum of what `backward` was called on. A
        loop that accumulates gradients has divided each loss by their number: the sum is the mean that it would plot.
        """
        self._losses_add_up = self.draft.observed.adds_up = True
        self._plain_steps = None

    def end_inspection(self) -> None:
        """Remove the wrappers of the inspection."""
        if self._inspection is not None:
            self._inspection.disarm()
            self._inspection = None

    def check_loss(self, loss: Any) -> None:
        """Inspect the batch of a loss that is not finite. Called before its backward pass; waits for no device."""
        if self._inspection is not None and not self.guarded and isinstance(loss, Tensor) and loss.is_cpu:
            self.safe("inspection of a broken batch", self._check_loss, self._inspection, loss)

    def _check_loss(self, inspection: Inspection, loss: Tensor) -> None:
        if inspection.is_armed or loss.numel() != 1 or not loss.is_floating_point() or math.isfinite(loss.item()):
            return
        if self._broken_losses < MAX_BROKEN:
            self._broken_losses += 1
            self._leave_plain()
            inspection.look_at_broken(loss)

    def correct_observed(self, factor: float, samples: float | None) -> None:
        """Multiply the loss that was observed last, and set its batch size."""
        if self._alone:
            self._leave_plain()
        for call in self.draft.observed.calls[-1:]:
            call.loss = None if call.loss is None else call.loss * factor
            call.size = samples

    def validate(self, loss: Tensor | float) -> None:
        """Keep a validation loss; several before a step are averaged."""
        self.safe("validation", self._note_validation, loss)

    def _note_validation(self, loss: Tensor | float) -> None:
        self._leave_plain()
        value = loss.detach().float().mean() if isinstance(loss, Tensor) else torch.tensor(float(loss))
        self.draft.buffer.add("val", value)

    def _note(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        self._leave_plain()
        states, passes = self.optimizers, 0
        fresh = again = False
        for state in states:
            if state.backward.backwards:
                passes = max(passes, state.backward.backwards)
                again, fresh = again or state.stepped, fresh or not state.stepped
        if again and not fresh:
            self.finish()  # an optimizer that stepped continues on its own
        self._observes += 1
        self.draft.observed.note(loss, batch_size, passes)
        for state in states:
            if state.expects_clip or not state.is_fresh or not state.is_stale(self.observes):
                continue
            certain = self.observes >= self.observes_expected and not self.guarded
            # If the loop alters gradients by hand after its last `observe`, read at every `observe`.
            if certain or state.clips_by_hand or self.observes_expected == math.inf:
                self._read(state)
            if certain and state.clips_by_hand:
                self.safe("window", self._push_windows, state)

    # -- what torch's own functions show: see `hooks.Listener` --------------------------------------------------

    def on_total_norm(self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None, joined: Tensor | None) -> None:
        """The loop computed norms, most likely to clip: read gradients now and reuse the norms."""
        if self.muted or threading.get_ident() != self.thread:
            return
        plain = self._plain
        if plain is not None and self._plainly(plain.take_norms, self._rows_of(grads), joined):
            return
        self.safe("clip", self._on_total_norm, grads, norms, joined)

    def _on_total_norm(self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None, joined: Tensor | None) -> None:
        self._leave_plain()
        rows = self._rows_of(grads)
        for state in self.optimizers:
            if not state.stepped and not state.row_set.isdisjoint(rows) and state.is_stale(self.observes):
                self._read(state, KnownNorms(rows, norms, joined))

    def _rows_of(self, grads: Sequence[Tensor]) -> list[int]:
        """Returns the row of each gradient, -1 for other models. Usually their order is the same each time."""
        parameters, order = self.table.parameters, self._clip_order
        if order and len(grads) == len(order):
            # With gradients for all parameters, three that fit show that the order is the same.
            if not self.draft.due.full and len(order) == len(parameters):
                middle = len(order) // 2
                first, last = parameters[order[0]].grad, parameters[order[-1]].grad
                if grads[0] is first and grads[-1] is last and grads[middle] is parameters[order[middle]].grad:
                    return order
            elif all(map(is_, grads, [parameters[row].grad for row in order])):
                return order
        row_of = {id(parameter.grad): row for row, parameter in enumerate(parameters)}
        rows = [row_of.get(id(grad), -1) for grad in grads]
        if -1 not in rows:
            self._clip_order = rows
        return rows

    def on_clip(self, parameters: Sequence[Tensor], max_norm: float | None = None) -> None:
        """These gradients are about to be clipped: read them now if not read yet."""
        if self.muted or not parameters:
            return
        plain = self._plain
        if plain is not None and self.thread == threading.get_ident():
            members = self.optimizers[0].members
            # The first ones may be frozen.
            is_own = id(parameters[0]) in members or any(id(parameter) in members for parameter in parameters)
            if is_own and self._plainly(plain.clip, max_norm):
                return
        ours = [one for one in self.optimizers if not one.members.isdisjoint(map(id, parameters))]
        if ours:
            self.thread = threading.get_ident()
            self.safe("clip", self._on_clip, ours, max_norm)

    def _on_clip(self, states: Sequence[OptimizerState], max_norm: float | None) -> None:
        self._leave_plain()
        for state in states:
            if state.stepped:
                continue
            if state.is_stale(self.observes):
                self._read(state)
            if self.table.windows:
                self.safe("window", self._push_windows, state)
            state.clipped = state.step.clipped = True
            self.draft.record.max_norm = state.loops_limit = max_norm

    def on_autocast(self, device: str, dtype: torch.dtype) -> None:
        """Autocast was entered; the dtype of the first step stands for the run."""
        if self.observes_expected == math.inf and any(p.device.type == device for p in self.table.parameters):
            self.autocast = str(dtype).removeprefix("torch.")

    def on_plateau(self, scheduler: torch.optim.lr_scheduler.ReduceLROnPlateau, metric: Any) -> None:
        """A scheduler that lowers the learning rate on a plateau has seen its metric."""
        self.safe("plateau", self._note_plateau, scheduler, metric)

    def _note_plateau(self, scheduler: torch.optim.lr_scheduler.ReduceLROnPlateau, metric: Any) -> None:
        rate = scheduler.optimizer.param_groups[0]["lr"]
        if isinstance(rate, Tensor) or all(state.optimizer is not scheduler.optimizer for state in self.optimizers):
            return
        calls = next((calls for one, calls in self._plateaus if one() is scheduler), None)
        if calls is None and len(self._plateaus) < MAX_SCHEDULERS:
            calls = []
            self._plateaus.append((weakref.ref(scheduler), calls))
        if calls is not None and len(calls) < MAX_METRICS:
            # The scheduler itself has waited for a metric on a device.
            value = float(metric.detach() if isinstance(metric, Tensor) else metric)
            calls.append((scheduler.mode, scheduler.patience, value, float(rate)))

    def usage_findings(self) -> list[Finding]:
        """Returns what is wrong with how the script evaluates the model and lowers its learning rate."""
        found = []
        validation = self._validation
        if validation is not None and not validation.has_evaluated and not self._alternating.is_game:
            times = validation.in_training_mode
            if times and self.step >= FEWEST_STEPS and times <= self.step / 4:  # a method does it at every step
                found.append(notices.evaluated_in_training_mode(times, self.step))
        for _, calls in self._plateaus:
            if (mode := hooks.wrong_mode(calls)) is not None:
                found.append(notices.plateau_mode(mode, calls[0][2], calls[-1][2], self.step))
                break
        return found

    def on_loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A scaler is in use. Until the first step shows whose, assume that it scales this model's loss."""
        if self.observes_expected == math.inf:
            self.assumed_scaler = scaler

    def before_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Read now at the latest: the scaler may skip the optimizer's step and its hooks."""
        self.safe("leave", self._leave_plain)
        for state in self.optimizers:
            if state.optimizer is optimizer:
                state.scaler = scaler
                self.safe("read", self._reach, state)
                state.in_scaler_step = True

    def after_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """If the optimizer's hooks did not run, the scaler skipped the step."""
        if any(state.optimizer is optimizer and state.in_scaler_step for state in self.optimizers):
            if self.on_scaler_skip is not None:
                self.on_scaler_skip(optimizer)
            self.skip_step(optimizer)

    def on_divided(self, parameters: Sequence[Tensor], factor: float) -> None:
        """A pipeline divided the gradients by the number of micro-batches: divide the micro-batches as well."""
        self.safe("leave", self._leave_plain)
        for state in self.optimizers:
            if not state.members.isdisjoint(map(id, parameters)):
                state.step.divided *= factor

    def before_groups_end(self) -> None:
        """Process groups are about to end: finish what is in progress."""
        self.safe("step", self.transfer.finish, 10.0)
        if self.on_groups_end is not None:
            self.safe("ranks", self.on_groups_end)

    # -- the optimizer's step -----------------------------------------------------------------------------------

    def _hook_steps(self, state: OptimizerState) -> list[Any]:
        """Register hooks before and after every step of an optimizer; returns their handles."""

        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            self.thread = threading.get_ident()
            closure = hooks.closure_of(args, kwargs) if kwargs or len(args) > 1 else None
            plain = self._plain
            if plain is not None:
                if closure is None and self._plainly(plain.reach):
                    return None
                self.safe("leave", self._leave_plain)
            if closure is None:
                if not state.in_scaler_step and (state.stepped or not state.arrived):
                    self.safe("read", self._reach_alone, state)
                if state.reads_update(self.draft.due):
                    self.safe("update", self._before_update, state)
                return None
            # The closure computes the gradients, so read them after its first call.
            if state.stepped:
                self.safe("step", self.finish)
            self.safe("update", self._before_update, state)
            first = partial(self.safe, "read", after_closure)
            wrapped = hooks.wrap_closure(closure, partial(setattr, self, "muted"), first)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": wrapped}
            return (args[0], wrapped, *args[2:]), kwargs

        def after_closure(loss: Any) -> None:
            if not self.draft.observed.losses and isinstance(loss, (Tensor, float)):
                self._note(loss, None)
            self._reach(state)

        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            state.in_scaler_step = False
            plain = self._plain
            if plain is not None and self._plainly(self._end_plain, plain):
                return
            if state.reads_update(self.draft.due):
                self.safe("after", state.after_update, self.draft)
            else:
                state.changes.forget()
            if self._audit is not None and self.draft.due.audit:
                self.safe("audit", self._take_audit, self._audit, state)
            self.safe("step", self._leave, state)

        of = state.optimizer
        return [of.register_step_pre_hook(before_step), of.register_step_post_hook(after_step)]

    def _reach_alone(self, state: OptimizerState) -> None:
        """An optimizer is about to step, not through a scaler."""
        self._reach(state)
        state.scaler = None
        if self.assumed_scaler is not None:
            state.step.ignore_scale = True
            if state.step.stage == "unscaled":
                state.step.stage = "raw"

    def _reach(self, state: OptimizerState) -> None:
        """An optimizer is about to step: its gradients are complete."""
        if state.stepped:
            self.finish()
        # Since the last backward, only the loop can have changed gradients, unless a scaler unscaled them.
        if not state.clipped and state.scaler is None and state.backward.altered():
            state.clips_by_hand = True
        if state.is_stale(self.observes):
            self._read(state)
        if self.table.aside:
            self.safe("partial", self._read_sums, state)
        if self.table.windows:
            self.safe("window", self._push_windows, state)
        if state.micro is not None and state.micro.armed:
            self.safe("microbatch", self._take_microbatches, state)
        elif self.draft.due.full and state.has_single_passes:
            state.step.micro_batches = min(state.backward.backwards, 1)

    def _take_microbatches(self, state: OptimizerState) -> None:
        assert state.micro is not None
        state.step.micro_batches, norms = state.micro.finish()
        if state.step.micro_batches >= 2 or state.micro.reduced:  # a single one is the gradient itself
            self.draft.buffer.extend(norms)

    @torch.no_grad()
    def _read_sums(self, state: OptimizerState) -> None:
        """Read gradients of which ranks hold partial sums, at a point that all ranks reach once per step."""
        rows = self.table.add_up()
        state.read_rows(rows, {}, self.draft.due, self.count_nonfinite)

    def _before_update(self, state: OptimizerState) -> None:
        """An optimizer is about to change its weights."""
        found_inf = getattr(state.optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor):
            self.draft.buffer.add("found_inf", found_inf.detach().clone())  # a loop may reuse the tensor
        state.before_update(self.draft)

    def _take_audit(self, audit: Audit, state: OptimizerState) -> None:
        """Take fingerprints of this optimizer's parameters and state, to compare them with other ranks."""
        audit.after_step(self.draft.buffer, state.rows, state.parameters, state.optimizer)
        if state is self.optimizers[0]:
            audit.fingerprints(self.draft.buffer)

    def _leave(self, state: OptimizerState) -> None:
        """An optimizer stepped, or was skipped."""
        record = self.draft.record
        if state is self.optimizers[0]:
            lr = state.optimizer.param_groups[0].get("lr")
            if isinstance(lr, Tensor):
                self.draft.buffer.add("lr", lr.detach().clone())
            elif lr is not None:
                record.lr = float(lr)
        state.stepped = True
        observed = self.draft.observed
        observed.passes = max(observed.passes, state.backward.backwards)
        record.carried = record.carried or state.backward.carried
        state.backward.reset()
        due = self._due_at(self.step + 1)
        self._prepare(state, due, self.step + 1)
        if len(self.optimizers) == 1 or all(other.stepped for other in self.optimizers):
            self.finish()

    def _prepare(self, state: OptimizerState, due: Due, step: int) -> None:
        """Install the hooks that the coming step needs, and remove those of this one."""
        if due.full or due.audit or self.draft.due.full:
            self._arm(state, due)
        inspection = self._inspection
        if inspection is not None and (step < FIRST_STEPS or due.detail or inspection.is_armed or self.count_nonfinite):
            self.safe("inspection", self._arm_inspection, step)

    # -- for a Guard --------------------------------------------------------------------------------------------

    def arrive(self, optimizer: torch.optim.Optimizer) -> StepInputs | None:
        """Read what this optimizer is about to step with; its own hook then does not read again."""
        self.safe("leave", self._leave_plain)
        state = self._state_of(optimizer)
        if not self.guarded:
            self.guarded = True
            self.read_every_step()
        if not state.in_scaler_step and (state.stepped or not state.arrived):
            self.safe("read", self._reach_alone, state)
        state.arrived = True
        return state.inputs(self.draft)

    def abandon(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer's step ended in an error."""
        self._state_of(optimizer).arrived = self._state_of(optimizer).in_scaler_step = False

    def skip_step(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer's step will not be made."""
        self.safe("leave", self._leave_plain)
        state = self._state_of(optimizer)
        state.in_scaler_step = False
        state.changes.forget()  # whoever skips a step may put other weights back
        self.draft.record.skipped = True
        self.safe("step", self._leave, state)

    def _state_of(self, optimizer: torch.optim.Optimizer) -> OptimizerState:
        return next(state for state in self.optimizers if state.optimizer is optimizer)

    # -- the end ------------------------------------------------------------------------------------------------

    def _failed(self, part: str, error: Exception) -> None:
        self.on_error(part, error)
        if part == "step":  # without this part, no step would ever end
            self.safe.end()
            self._unhook()

    def close(self) -> None:
        """Deliver a step in progress that some optimizer has made, and remove every hook."""
        self.safe("leave", self._leave_plain)
        if any(state.stepped for state in self.optimizers):
            self.safe("step", self.finish)
        self.safe("observe", self.draft.observed.check_end)
        self.safe("step", self.transfer.finish, 10.0)
        self._unhook()
        self._alternating.stop()
        for handle in self._handles:
            handle.remove()

    def _unhook(self) -> None:
        """Remove every hook but those of optimizers, which must not be removed while they run."""
        hooks.detach(self)
        for state in self.optimizers:
            state.close()
        if self._audit is not None:
            self._audit.disarm()
        if self._inspection is not None:
            self._inspection.disarm()
        if self._validation is not None:
            self._validation.stop()
        if self._first_gradient is not None:
            self._first_gradient.stop()

    def state_dict(self) -> dict[str, Any]:
        """The step, the schedule and the sliding windows."""
        schedule = self.schedule
        return {
            "step": self.step,
            "every": schedule.every,
            "norm_every": schedule.norm_every,
            "windows": self.table.windows_state(),
            "inspection": self._inspection.state_dict() if self._inspection and self.step < FIRST_STEPS else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved step."""
        self.schedule.every = int(state["every"])
        self.schedule.norm_every = int(state.get("norm_every", 1))
        self.table.load_windows_state(state["windows"])
        if self._inspection is not None and state.get("inspection"):
            self._inspection.load_state_dict(state["inspection"])
        self.start(int(state["step"]))


def _plain_lr(lr: Any) -> float | None:
    """Returns a learning rate as a plain step keeps it, NaN for none; None if it is in a tensor."""
    if lr is None:
        return math.nan
    if isinstance(lr, Tensor):
        return None
    return float(lr)


def missing_sources(
    config: Config, optimizers: Sequence[torch.optim.Optimizer], model: nn.Module
) -> Iterator[tuple[str, str]]:
    """Yields the chosen GSNR sources that are not available, each with the reason."""
    if "gsnr" not in config.metrics:
        return
    if "adam" in config.sources:
        for reason in dict.fromkeys(filter(None, map(unavailable_reason, optimizers))):
            yield "the optimizer's moments", reason
    hidden = why_no_parts(model)
    if {"microbatch", "ranks"} & set(config.sources) and hidden is not None:
        yield "micro-batches", hidden
