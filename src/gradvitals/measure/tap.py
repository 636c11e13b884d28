"""When gradients are read: the one state machine that knows where in a training step the loop is.

A step's gradients are read once, at the first of these moments at which they are complete: inside
`clip_grad_norm_` (the norms are free there), at `Monitor.observe`, at `GradScaler.step`, or at the optimizer's
step. What needs the state after the step (moments, weights, updates) is read in the optimizer's post-hook.
Everything leaves as one `RawStep`; no number is looked at here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from gradvitals.config import Config
from gradvitals.measure import interpose
from gradvitals.measure.attempts import Attempts
from gradvitals.measure.budget import Cadence, budget_for
from gradvitals.measure.cadence import Calendar
from gradvitals.measure.clock import Clock
from gradvitals.measure.ear import Ear
from gradvitals.measure.outbox import Outbox
from gradvitals.measure.passing import Passing
from gradvitals.measure.ranks.audit import Audit
from gradvitals.measure.ranks.own_gradient import OwnGradient
from gradvitals.measure.ranks.roster import Roster
from gradvitals.measure.rawstep import Arrival, RawStep
from gradvitals.measure.rows import Rows
from gradvitals.measure.station import Station
from gradvitals.measure.step_hooks import hook_steps
from gradvitals.measure.turns import Turns

STEPS_TOGETHER = 8
"""Steps that several ranks add up at once, where none of them is due for more."""


class Tap:
    """Reads the gradients of a run at the right moment and delivers a `RawStep` for every step, several at a time.

    Args:
        rows: The parameters to watch.
        optimizers: The optimizers that step it. A step is over when each has stepped, or one steps again.
        config: What to read and how often.
        deliver: Called on the training thread with the steps that were sent to the host together.
        on_error: Called with the name of a part and its error; that part stops, training does not.
        batch_size: Samples per optimizer step, where it is the same at every step.
        ranks: Who else trains the model; None for a single process.
    """

    def __init__(
        self,
        rows: Rows,
        optimizers: Sequence[torch.optim.Optimizer],
        config: Config,
        *,
        deliver: Callable[[list[RawStep]], None],
        on_error: Callable[[str, Exception], None],
        batch_size: float | None = None,
        ranks: Roster | None = None,
    ) -> None:
        self.config, self.on_error, self.batch_size = config, on_error, batch_size
        self.calendar = Calendar(config, audits=ranks is not None)
        self.autocast: str | None = None  # the dtype it computes in, where it was seen to
        self.count_nonfinite = False
        """Set once a norm was not finite: how much of it is worth a pass only then."""
        self.guarded = False  # where a Guard decides, gradients are read as they are when the optimizer steps
        self.on_scaler_skip: Callable[[torch.optim.Optimizer], None] | None = None
        self.on_groups_end: Callable[[], None] | None = None
        self.rows = rows
        self._audit = Audit(rows.model) if ranks is not None and config.audit_every is not None else None
        on_gpu = any(parameter.is_cuda for parameter in self.rows.parameters)
        on_host = all(parameter.device.type == "cpu" for parameter in self.rows.parameters)
        self.budget = budget_for(config, alone=ranks is None and len(optimizers) == 1, on_host=on_host)
        self._clock = Clock(keeps=self.budget is not None, use_events=on_gpu)
        self.passing = Passing(self)
        self._wanted: Cadence | None = None
        self.attempt = Attempts(self._clock, self._failed, on_gpu=on_gpu)
        self._order_known = False
        self.assumed_scaler: torch.amp.GradScaler | None = None
        self.observes = 0
        self.observes_expected = math.inf  # how often the loop observes in a step is known after the first
        self.muted = False
        self._own_gradient: OwnGradient | None = None
        self._may_grow = ranks is None  # ranks have agreed on what they hold
        # Ranks add up the same steps, so these must not leave by the clock.
        self.outbox = Outbox(deliver, every=STEPS_TOGETHER if ranks is not None else None)
        several = ranks is not None and ranks.num_sources > 1
        self.stations = [Station(index, one, config, reduced=several) for index, one in enumerate(optimizers)]
        self._assign_rows()
        self._handles: list[Any] = []
        for station in self.stations:
            station.on_given_up = self._on_given_up
            self._handles += hook_steps(self, station)
        self.start(0)
        if ranks is not None:
            self._own_gradient = OwnGradient(rows, lambda: self.draft.packet)
        self._turns = Turns(optimizers)
        self.ear = Ear(self)
        interpose.attach(self.ear)

    def _assign_rows(self) -> None:
        for station, rows in zip(self.stations, self.rows.by_optimizer(), strict=True):
            station.assign(rows, self.rows, self._clock, self.attempt.fail)

    # -- the step's state ---------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Begin with the step of this number."""
        self.passing.forget()
        self._clock.lap()
        self.step = self.first = step
        for station in self.stations:
            self.arm(station, step)
        self.draft = self._begin()

    @property
    def cadence(self) -> Cadence:
        """How often what is read."""
        return self._wanted or Cadence(self.calendar.every, self.calendar.step_every)

    @cadence.setter
    def cadence(self, cadence: Cadence) -> None:
        self._wanted = cadence  # any thread may ask for it; it is the next step's

    def _take_cadence(self) -> None:
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self.calendar.every = wanted.every
            self.calendar.step_every = wanted.step_every if self.passing.allowed else 1

    def arm(self, station: Station, step: int) -> None:
        """Collect what comes with backward from here on if the step to come is due."""
        due = self.calendar.due(step)
        for name, prepare in station.collectors.prepare(full=due.full, detail=due.detail):
            self.attempt(name, prepare)
        if self._audit is not None and due.audit and station is self.stations[0]:
            self.attempt("audit", self._audit.arm)

    def _begin(self) -> RawStep:
        self.observes = 0
        due = self.calendar.due(self.step)
        return RawStep(
            step=self.step,
            full=due.full,
            detail=due.detail,
            audit=due.audit,
            stations=[station.begin(station.rows) for station in self.stations],
            weights=self.rows.change_weights,
        )

    def finish(self) -> None:
        """Send the step off and begin the next."""
        draft = self.draft
        for station in self.stations:
            station.expects_clip, station.settled = station.clipped, True
            if station.reading is not None:
                draft.packet.extend(station.reading)
        self.observes_expected = max(1, self.observes)
        if self.rows.arrivals and not self._order_known:
            self._order_known = True
            self.rows.learn_order()
            if self._own_gradient is not None:
                self._own_gradient.follow(self.rows)
            for station in self.stations:
                station.follow_first(self.rows.arrivals, self.rows)
        draft.time, draft.layout, draft.slots = time.time(), self.rows.layout, self.rows.slots
        draft.batch_size = draft.observed.batch_size or self.batch_size
        draft.in_turn = self._turns.is_game
        draft.observed.pack(draft.packet)
        draft.lap = self._clock.lap()
        self.step += 1
        self.draft = self._begin()
        self.passing.fall_asleep()
        self.outbox.add(draft)

    def go_past(self, first: int) -> None:
        """From this step on all were passed over: go on with the one in progress."""
        self._clock.pass_over(self.step - first)
        self.draft = self._begin()

    def flush(self) -> None:
        """Send all finished steps; with several ranks they leave at steps of their own."""
        self.attempt("step", self.outbox.hurry)

    def send_each_step(self) -> None:
        """From now on read every step, and have it sent by itself: somebody acts on what is read."""
        self.passing.read_all()
        if self.outbox.every is not None:
            self.outbox.every = 1

    def send_rest(self) -> None:
        """Send what is left: no step will follow, on any rank."""
        self.attempt("step", self.outbox.send)

    def _on_given_up(self, station: Station, passes: int, surely: bool) -> None:
        if not self.muted:  # no error may leave: this is in the loop's backward
            self.attempt("observe", self._forget, station, passes, surely)

    def _forget(self, station: Station, passes: int, surely: bool) -> None:
        alone = len(self.stations) == 1  # else each of them tells
        norms = station.forget_reading(passes)
        if not any(station.stepped for station in self.stations):
            self.observes = self.draft.observed.give_up(passes if alone else math.inf, surely and alone)
            self.attempt("norms given up", self.draft.observed.lose_norms, norms if surely and alone else [])

    # -- reading ------------------------------------------------------------------------------------------------

    def read(self, station: Station, norms: dict[int, Tensor] | None = None, joined: Tensor | None = None) -> None:
        """Read a station's gradients as they are now, with norms that are known already by their row, or all in one."""
        if self.draft.full and station.has_changed() and self._may_grow:
            self.rows.refresh()
            self._assign_rows()
        self.rows.note_frozen()
        self.rows.lay_out(station.rows)
        if station.windowed:
            station.spoil_windows(self.rows)
        instruments = station.instruments(self.rows, norms or {}, joined, **self._due(), may_leave=not self.guarded)
        with torch.no_grad():
            for name, take in instruments:
                self.attempt(name, take)
            station.note_scale(self.assumed_scaler)

    def _due(self) -> dict[str, bool]:
        return {"full": self.draft.full, "detail": self.draft.detail, "count_nonfinite": self.count_nonfinite}

    def push_windows(self, station: Station) -> None:
        """Add a station's gradients to the sliding windows, once a step."""
        if self.rows.windows and not station.windowed:
            pushed = station.push_windows(self.rows, self.draft.packet, self.assumed_scaler)
            self.draft.windows |= pushed

    # -- what the loop tells us ---------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        """Note a loss and, where no clipping is expected to come, read the gradients now."""
        self.ear.thread = get_ident()
        if self.passing.asleep:
            self.attempt("observe", self._hear, loss, batch_size)
        if not self.muted and not self.passing.asleep:
            self.attempt("observe", self.note, loss, batch_size)

    def _hear(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        try:
            self.passing.hear(loss, batch_size)
        except Exception:  # that it is no number is said where it is noted
            self.passing.wake()

    def note(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        """The same, where an error may leave."""
        again = any(station.stepped and station.sentinel.backwards for station in self.stations)
        if again and not any(station.is_fresh() for station in self.stations):
            self.finish()  # an optimizer that has stepped goes on alone
        self.observes += 1
        self.draft.observed.note(loss, batch_size, max(one.sentinel.backwards for one in self.stations))
        for station in self.stations:
            if station.expects_clip or not station.is_fresh() or not station.is_stale(self.observes):
                continue
            certain = self.observes >= self.observes_expected and not self.guarded
            # A loop that alters gradients by hand after its last observe can only be read at every one.
            if certain or station.clips_by_hand or self.observes_expected == math.inf:
                self.read(station)
            if certain and station.clips_by_hand:
                self.attempt("window", self.push_windows, station)

    # -- the optimizer's step -----------------------------------------------------------------------------------

    def arrive(self, optimizer: torch.optim.Optimizer) -> Arrival | None:
        """Read what this optimizer is about to step with, for a Guard; its own hook then reads nothing again."""
        station = self._station(optimizer)
        if not self.guarded:
            self.guarded = True
            self.send_each_step()
        if not station.in_scaler_step and station.is_due():
            self.attempt("read", self.arrive_alone, station)
        station.arrived = True
        return station.arrival(self.draft, self.rows)

    def abandon(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer's step ended in an error."""
        self._station(optimizer).arrived = self._station(optimizer).in_scaler_step = False

    def _station(self, optimizer: torch.optim.Optimizer) -> Station:
        return next(station for station in self.stations if station.optimizer is optimizer)

    def leave_out(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer's step will not be made."""
        station = self._station(optimizer)
        station.in_scaler_step = False
        self.draft.skipped = True
        self.attempt("step", self.leave, station)

    def arrive_alone(self, station: Station) -> None:
        """An optimizer is about to step, and no scaler steps it."""
        self.reach(station)
        station.scaler = None
        if self.assumed_scaler is not None:
            station.step.ignore_scale = True
            if station.step.stage == "unscaled":
                station.step.stage = "raw"

    def reach(self, station: Station) -> None:
        """An optimizer is about to step: its gradients are complete."""
        if station.stepped:
            self.finish()
        # Between the last backward and here only the loop can have changed gradients, unless a scaler divided them.
        by_hand = station.sentinel.altered() and not station.clipped and station.scaler is None
        station.clips_by_hand |= by_hand
        if station.is_stale(self.observes):
            self.read(station)
        if self.rows.aside:
            self.attempt("partial", self._read_sums, station)
        self.attempt("window", self.push_windows, station)
        for name, take in station.collectors.take(station.step, self.draft.packet):
            self.attempt(name, take)

    @torch.no_grad()
    def _read_sums(self, station: Station) -> None:
        """Read what ranks hold summands of: here, where all of them come once a step."""
        for name, take in station.instruments_of_sums(self.rows.add_up(), self.rows, **self._due()):
            self.attempt(name, take)

    def before_update(self, station: Station) -> None:
        """An optimizer is about to change its weights."""
        found_inf = getattr(station.optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor):
            self.draft.packet.add("found_inf", found_inf.detach().clone())  # a loop may use one tensor for all
        station.before_update(self.draft, self.rows)

    def audit(self, station: Station) -> None:
        """An optimizer has stepped: compare ranks, if that is due."""
        if self._audit is not None and self.draft.audit:
            self.attempt("audit", self._compare, self._audit, station)

    def _compare(self, audit: Audit, station: Station) -> None:
        """Take fingerprints of what this optimizer has made, to be compared with those of other ranks."""
        audit.after_step(self.draft.packet, station.rows, station.parameters, station.optimizer)
        if station is self.stations[0]:
            audit.fingerprints(self.draft.packet)

    def leave(self, station: Station) -> None:
        """An optimizer has stepped, or was skipped."""
        if station is self.stations[0]:
            lr = station.optimizer.param_groups[0].get("lr")
            if isinstance(lr, Tensor):
                self.draft.packet.add("lr", lr.detach().clone())
            elif lr is not None:
                self.draft.lr = float(lr)
        station.stepped = True
        self.draft.observed.passes = max(self.draft.observed.passes, station.sentinel.backwards)
        self.draft.carried = self.draft.carried or station.sentinel.carried
        station.sentinel.reset()
        self._take_cadence()
        self.arm(station, self.step + 1)
        if all(other.stepped for other in self.stations):
            self.finish()

    # -- keeping out of the way ---------------------------------------------------------------------------------

    def _failed(self, part: str, error: Exception) -> None:
        self.on_error(part, error)
        if part == "step":  # without it no step would ever end
            self.attempt.end()
            self._let_go()

    def close(self) -> None:
        """Send off a step that some optimizer has made, and take every hook away."""
        if any(station.stepped for station in self.stations):
            self.attempt("step", self.finish)
        self.attempt("observe", self.draft.observed.check_end)
        self.send_rest()
        self._let_go()
        self._turns.stop()
        for handle in self._handles:
            handle.remove()

    def _let_go(self) -> None:
        """Take away every hook but those of optimizers, which may not go while they are being called."""
        interpose.detach(self.ear)
        for station in self.stations:
            station.close()
        if self._audit is not None:
            self._audit.disarm()
        if self._own_gradient is not None:
            self._own_gradient.stop()

    def state_dict(self) -> dict[str, Any]:
        """The step, the cadence and the sliding windows."""
        return {"step": self.step, **self.cadence._asdict(), "windows": self.rows.windows_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved step."""
        step_every = int(state.get("step_every", 1)) if self.passing.allowed else 1
        self.calendar.every, self.calendar.step_every = int(state["every"]), step_every
        self.rows.load_windows_state(state["windows"])
        self.start(int(state["step"]))
