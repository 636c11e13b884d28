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
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.config import Config
from gradvitals.measure import interpose
from gradvitals.measure.cadence import YOUNG_EVERY, is_due
from gradvitals.measure.clock import Clock
from gradvitals.measure.closure import closure_of, heard
from gradvitals.measure.outbox import Outbox
from gradvitals.measure.rawstep import Arrival, RawStep
from gradvitals.measure.rows import Rows
from gradvitals.measure.station import Station


class Tap:
    """Reads the gradients of a run at the right moment and delivers a `RawStep` for every step, several at a time.

    Args:
        model: The model; used for names, layers and heads.
        optimizers: The optimizers that step it. A step is over when each has stepped, or one steps again.
        config: What to read and how often.
        deliver: Called on the training thread with the steps that were sent to the host together.
        on_error: Called with the name of a part and its error; that part stops, training does not.
        batch_size: Samples per optimizer step, where it is the same at every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        config: Config,
        *,
        deliver: Callable[[list[RawStep]], None],
        on_error: Callable[[str, Exception], None],
        batch_size: float | None = None,
    ) -> None:
        self.config = config
        self.on_error = on_error
        self.batch_size = batch_size
        self.every = config.tensor_every
        self.autocast: str | None = None  # the dtype it computes in, where it was seen to
        self.count_nonfinite = False
        """Set once a norm was not finite: how much of it is worth a pass only then."""
        self.guarded = False  # where a Guard decides, gradients are read as they are when the optimizer steps
        self.on_scaler_skip: Callable[[torch.optim.Optimizer], None] | None = None
        self.rows = Rows(model, optimizers, config)
        self._on_gpu = any(parameter.is_cuda for parameter in self.rows.parameters)
        self._clock = Clock(use_events=self._on_gpu and config.overhead_budget is not None)
        self._broken: set[str] = set()
        self._order_known = False
        self._assumed_scaler: torch.amp.GradScaler | None = None
        self._observes = 0
        self._observes_expected = math.inf  # how often the loop observes in a step is known after the first
        self._muted = False
        self._outbox = Outbox(deliver)
        self._stations = [Station(index, optimizer, config) for index, optimizer in enumerate(optimizers)]
        self._assign_rows()
        self._handles: list[Any] = []
        for station in self._stations:
            station.on_given_up = self._on_given_up
            self._handles.append(station.optimizer.register_step_pre_hook(self._pre_hook(station)))
            self._handles.append(station.optimizer.register_step_post_hook(self._post_hook(station)))
        self.start(0)
        interpose.attach(self)

    def _assign_rows(self) -> None:
        for station, rows in zip(self._stations, self.rows.by_optimizer(), strict=True):
            station.assign(rows, self.rows, self._clock, self._fail)

    # -- the step's state ---------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Begin with the step of this number."""
        self.step = self.first = step
        for station in self._stations:
            self._arm(station, step)
        self._draft = self._begin()

    def _arm(self, station: Station, step: int) -> None:
        """Collect micro-batches from here on if the step to come is due."""
        if station.micro is None:
            return
        if self._is_due(step):
            radial = self._is_due(step, self.config.detail_factor) and "radial_gsnr" in self.config.metrics
            self._attempt("microbatch", partial(station.micro.arm, radial=radial))
        else:
            station.micro.disarm()

    def _is_due(self, step: int, factor: int = 1) -> bool:
        thinned = max(1, self.every // self.config.tensor_every)  # by the budget: a young run has to obey it too
        return is_due(step, self.every, factor, young_every=YOUNG_EVERY * thinned)

    def _begin(self) -> RawStep:
        self._observes = 0
        full = self._is_due(self.step)
        return RawStep(
            step=self.step,
            full=full,
            detail=full and self._is_due(self.step, self.config.detail_factor),
            stations=[station.begin(station.rows) for station in self._stations],
        )

    def _finish(self) -> None:
        """Send the step off and begin the next."""
        draft = self._draft
        for station in self._stations:
            station.expects_clip, station.settled = station.clipped, True
            if station.reading is not None:
                draft.packet.extend(station.reading)
        self._observes_expected = max(1, self._observes)
        if self.rows.arrivals and not self._order_known:
            self._order_known = True
            self.rows.learn_order()
            for station in self._stations:
                station.follow_first(self.rows.arrivals, self.rows)
        draft.time = time.time()
        draft.layout, draft.slots = self.rows.layout, self.rows.slots
        draft.batch_size = self.batch_size if draft.batch_size is None else draft.batch_size
        draft.pack_losses()
        draft.lap = self._clock.lap()
        self.step += 1
        self._draft = self._begin()
        self._outbox.add(draft)

    def flush(self) -> None:
        """Send all finished steps."""
        self._attempt("step", self._outbox.send)

    def _on_given_up(self, station: Station) -> None:
        if self._muted:
            return
        station.reading = None
        if not any(station.stepped for station in self._stations):
            self._draft.forget_observations()
            self._observes = 0

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, station: Station, norms: dict[int, Tensor] | None = None) -> None:
        if self._draft.full and station.has_changed():
            self.rows.refresh()
            self._assign_rows()
        self.rows.note_frozen()
        if station.windowed:
            station.spoil_windows(self.rows)
        instruments = station.instruments(
            self.rows,
            norms or {},
            full=self._draft.full,
            detail=self._draft.detail,
            count_nonfinite=self.count_nonfinite,
        )
        with torch.no_grad():
            for name, take in instruments:
                self._attempt(name, take)
            station.note_scale(self._assumed_scaler)

    def _push_windows(self, station: Station) -> None:
        if self.rows.windows and not station.windowed:
            pushed = station.push_windows(self.rows, self._draft.packet, self._assumed_scaler)
            self._draft.windows |= pushed

    # -- what the loop tells us ---------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        """Note a loss and, where no clipping is expected to come, read the gradients now."""
        if not self._muted:
            self._attempt("observe", self._observe, loss, batch_size)

    def _observe(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        again = any(station.stepped and station.sentinel.backwards for station in self._stations)
        if again and not any(station.is_fresh() for station in self._stations):
            self._finish()  # an optimizer that has stepped goes on alone
        self._observes += 1
        self._draft.note(loss, batch_size)
        for station in self._stations:
            if station.expects_clip or not station.is_fresh() or not station.is_stale(self._observes):
                continue
            certain = self._observes >= self._observes_expected and not self.guarded
            # A loop that alters gradients by hand after its last observe can only be read at every one.
            if certain or station.clips_by_hand or self._observes_expected == math.inf:
                self._read(station)
            if certain and station.clips_by_hand:
                self._attempt("window", self._push_windows, station)

    def on_total_norm(self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None) -> None:
        """The loop computed norms, most likely to clip: read now and reuse them."""
        if not self._muted:
            self._attempt("clip", self._on_total_norm, grads, norms)

    def _on_total_norm(self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None) -> None:
        row_of = {id(parameter.grad): row for row, parameter in enumerate(self.rows.parameters)}
        theirs = {row_of[id(grad)] for grad in grads if id(grad) in row_of}
        # Norms of half-precision gradients come rounded to half precision: not good enough to keep.
        pairs = zip(grads, norms, strict=True) if norms is not None else ()
        exact = (torch.float32, torch.float64)
        known = {row_of[id(grad)]: norm for grad, norm in pairs if id(grad) in row_of and norm.dtype in exact}
        for station in self._stations:
            if not station.stepped and not theirs.isdisjoint(station.rows) and station.is_stale(self._observes):
                self._read(station, known)

    def on_clip(self, parameters: Sequence[Tensor], max_norm: float | None = None) -> None:
        """These gradients are about to be clipped: the last moment to read them whole."""
        if not self._muted:
            self._attempt("clip", self._on_clip, parameters, max_norm)

    def _on_clip(self, parameters: Sequence[Tensor], max_norm: float | None) -> None:
        clipped = {id(parameter) for parameter in parameters}
        for station in self._stations:
            if station.stepped or clipped.isdisjoint(map(id, station.parameters)):
                continue
            if station.is_stale(self._observes):
                self._read(station)
            self._attempt("window", self._push_windows, station)
            station.clipped = station.step.clipped = True
            self._draft.max_norm = max_norm

    def on_autocast(self, device: str, dtype: torch.dtype) -> None:
        """Lower precision is in use; that of the first step is taken for that of training."""
        if self._observes_expected == math.inf and any(p.device.type == device for p in self.rows.parameters):
            self.autocast = str(dtype).removeprefix("torch.")

    def on_loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A scaler is in use; until the first step shows who steps us, we take it that it scales our loss."""
        if self._observes_expected == math.inf:
            self._assumed_scaler = scaler

    def before_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Read here at the latest: the scaler may skip the optimizer's step and its hooks."""
        for station in self._stations:
            if station.optimizer is optimizer:
                station.scaler = scaler
                self._attempt("read", self._arrive, station)
                station.in_scaler_step = True

    def after_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Where the optimizer's hooks did not run, the scaler skipped the step."""
        if any(station.optimizer is optimizer and station.in_scaler_step for station in self._stations):
            if self.on_scaler_skip is not None:
                self.on_scaler_skip(optimizer)
            self.leave_out(optimizer)

    # -- the optimizer's step -----------------------------------------------------------------------------------

    def arrive(self, optimizer: torch.optim.Optimizer) -> Arrival | None:
        """Read what this optimizer is about to step with, for a Guard; its own hook then reads nothing again."""
        station = self._station(optimizer)
        if not station.in_scaler_step and station.is_due():
            self._attempt("read", self._arrive_alone, station)
        station.arrived = self.guarded = True
        return station.arrival(self._draft, self.rows)

    def abandon(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer's step ended in an error."""
        self._station(optimizer).arrived = self._station(optimizer).in_scaler_step = False

    def _station(self, optimizer: torch.optim.Optimizer) -> Station:
        return next(station for station in self._stations if station.optimizer is optimizer)

    def leave_out(self, optimizer: torch.optim.Optimizer) -> None:
        """This optimizer's step will not be made."""
        station = self._station(optimizer)
        station.in_scaler_step = False
        self._draft.skipped = True
        self._attempt("step", self._leave, station)

    def _pre_hook(self, station: Station) -> Callable[..., Any]:
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            closure = closure_of(args, kwargs)
            if closure is None:
                if not station.in_scaler_step and station.is_due():
                    self._attempt("read", self._arrive_alone, station)
                self._attempt("update", self._before_update, station)
                return None
            # Gradients are stale until the closure has run, so they are read from inside it.
            if station.stepped:
                self._attempt("step", self._finish)
            self._attempt("update", self._before_update, station)
            first = partial(self._attempt, "read", self._after_closure, station)
            wrapped = heard(closure, partial(setattr, self, "_muted"), first)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": wrapped}
            return (args[0], wrapped, *args[2:]), kwargs

        return before_step

    def _after_closure(self, station: Station, loss: Any) -> None:
        if not self._draft.losses and isinstance(loss, (Tensor, float)):
            self._observe(loss, None)
        self._arrive(station)

    def _arrive_alone(self, station: Station) -> None:
        """An optimizer is about to step, and no scaler steps it."""
        self._arrive(station)
        station.scaler = None
        if self._assumed_scaler is not None:
            station.step.ignore_scale = True
            if station.step.stage == "unscaled":
                station.step.stage = "raw"

    def _arrive(self, station: Station) -> None:
        """An optimizer is about to step: its gradients are complete."""
        if station.stepped:
            self._finish()
        # Between the last backward and here only the loop can have changed gradients, unless a scaler divided them.
        by_hand = station.sentinel.altered() and not station.clipped and station.scaler is None
        station.clips_by_hand |= by_hand
        if station.is_stale(self._observes):
            self._read(station)
        self._attempt("window", self._push_windows, station)
        if station.micro is not None and station.micro.armed:
            self._attempt("microbatch", station.take_micro_batches, self._draft.packet)

    def _before_update(self, station: Station) -> None:
        found_inf = getattr(station.optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor):
            self._draft.packet.add("found_inf", found_inf)
        station.before_update(self._draft)

    def _post_hook(self, station: Station) -> Callable[..., None]:
        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            station.in_scaler_step = False
            for name, take in station.instruments_after(self._draft):
                self._attempt(name, take)
            self._attempt("step", self._leave, station)

        return after_step

    def _leave(self, station: Station) -> None:
        """An optimizer has stepped, or was skipped."""
        if station is self._stations[0]:
            lr = station.optimizer.param_groups[0].get("lr")
            if isinstance(lr, Tensor):
                self._draft.packet.add("lr", lr.detach().clone())
            elif lr is not None:
                self._draft.lr = float(lr)
        station.stepped = True
        self._draft.carried = self._draft.carried or station.sentinel.carried
        station.sentinel.reset()
        self._arm(station, self.step + 1)
        if all(other.stepped for other in self._stations):
            self._finish()

    # -- keeping out of the way ---------------------------------------------------------------------------------

    def _attempt(self, part: str, work: Callable[..., Any], *args: Any) -> None:
        """Do one part of the reading; an error ends that part for good and never reaches the loop."""
        if part in self._broken or (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            return  # what a CUDA graph captures is not ours to add to
        try:
            with self._clock:
                work(*args)
        except Exception as error:
            self._fail(part, error)

    def _fail(self, part: str, error: Exception) -> None:
        self._broken.add(part)
        self.on_error(part, error)
        if part == "step":  # without it no step would ever end
            self._detach()

    def close(self) -> None:
        """Send off a step that some optimizer has made, and take every hook away."""
        if any(station.stepped for station in self._stations):
            self._attempt("step", self._finish)
        self.flush()
        self._detach()

    def _detach(self) -> None:
        interpose.detach(self)
        for handle in self._handles:
            handle.remove()
        for station in self._stations:
            station.close()

    def state_dict(self) -> dict[str, Any]:
        """The step, the cadence and the sliding windows."""
        return {"step": self.step, "every": self.every, "windows": self.rows.windows_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved step."""
        self.every = int(state["every"])
        self.rows.load_windows_state(state["windows"])
        self.start(int(state["step"]))
