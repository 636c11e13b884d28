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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.config import Config
from gradvitals.measure import interpose
from gradvitals.measure.clock import Clock, Lap
from gradvitals.measure.gather import Rows, Station
from gradvitals.measure.packet import Packet, Shipment
from gradvitals.types import Layout, Stage


@dataclass
class RawStep:
    """The sums of one step, on their way to the host, with what the host must know to read them."""

    step: int
    full: bool
    """Whether this step was due for a per-tensor reading."""
    detail: bool
    """Whether it was due for the costly metrics too."""
    packet: Packet = field(default_factory=Packet)
    time: float = 0.0
    stage: Stage = "raw"
    lr: float | None = None
    losses: list[float | None] = field(default_factory=list)
    """One entry for each observed loss; None where it travels in the packet as ``loss{i}``."""
    sizes: list[float | None] = field(default_factory=list)
    """Samples behind each observed loss, where told."""
    batch_size: float | None = None
    micro_batches: list[int] = field(default_factory=list)
    """Number of micro-batches of each optimizer; 0 where it was not counted."""
    stations: list[list[int]] = field(default_factory=list)
    """Rows of each optimizer."""
    betas: dict[int, tuple[float, float]] = field(default_factory=dict)
    fractions: dict[int, float] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    """Rows that went into a sliding window; where it is complete, the steps in one of its blocks."""
    scaled: bool = False
    """Whether gradients were read while still multiplied by a loss scale (``scale`` in the packet)."""
    skipped: bool = False
    every: int = 1
    layout: Layout = field(default_factory=Layout)
    slots: list[tuple[int, int]] = field(default_factory=list)
    """Row and head that each number of the head views belongs to."""
    shipment: Shipment = field(default_factory=Shipment)
    lap: Lap = field(default_factory=Lap)


class Tap:
    """Reads the gradients of a run at the right moment and delivers a `RawStep` for every step.

    Args:
        model: The model; used for names, layers and heads.
        optimizers: The optimizers that step it. A step is over when each has stepped, or one steps again.
        config: What to read and how often.
        deliver: Called once a step, on the training thread, with what was gathered.
        on_error: Called with the name of a part and its error; that part stops, training does not.
        batch_size: Samples per optimizer step, where it is the same at every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        config: Config,
        *,
        deliver: Callable[[RawStep], None],
        on_error: Callable[[str, Exception], None],
        batch_size: float | None = None,
    ) -> None:
        self.config = config
        self.deliver = deliver
        self.on_error = on_error
        self.batch_size = batch_size
        self.every = config.tensor_every
        self.step = 0
        self.count_nonfinite = False
        """Set once a norm has shown something not finite: how much of it is only worth a pass from then on."""
        self.rows = Rows(model, optimizers, config)
        on_gpu = any(parameter.is_cuda for parameter in self.rows.parameters)
        self._clock = Clock(use_events=on_gpu and config.overhead_budget is not None)
        self._broken: set[str] = set()
        self._order_known = False
        self._scaler: torch.amp.GradScaler | None = None
        self._scaler_settled = False
        self._expects_clip = False
        self._clipped = False
        self._observes = 0
        self._observes_expected = math.inf  # how often the loop observes in a step is known after the first
        self._stations = [Station(index, optimizer, config) for index, optimizer in enumerate(optimizers)]
        self._assign_rows()
        self._handles: list[Any] = []
        for station in self._stations:
            self._handles.append(station.optimizer.register_step_pre_hook(self._pre_hook(station)))
            self._handles.append(station.optimizer.register_step_post_hook(self._post_hook(station)))
        self._draft = self._begin()
        interpose.attach(self)

    def _assign_rows(self) -> None:
        unclaimed = {id(parameter): row for row, parameter in enumerate(self.rows.parameters)}
        claims = []
        for station in self._stations:
            members = [id(p) for group in station.optimizer.param_groups for p in group["params"]]
            claims.append([unclaimed.pop(member) for member in members if member in unclaimed])
        # Trainable parameters that no optimizer steps are still read, with the first optimizer.
        claims[0] += unclaimed.values()
        for station, claim in zip(self._stations, claims, strict=True):
            station.assign(sorted(claim), self.rows, self._clock, lambda error: self._fail("microbatch", error))

    # -- the step's state ---------------------------------------------------------------------------------------

    def _begin(self) -> RawStep:
        full, detail = self.is_due(self.every), self.is_due(self.every * self.config.detail_factor)
        radial = detail and "radial_gsnr" in self.config.metrics
        self._clipped, self._observes = False, 0
        for station in self._stations:
            station.reset()
            if full and station.micro is not None:
                self._attempt("microbatch", partial(station.micro.arm, radial=radial))
        return RawStep(step=self.step, full=full, detail=detail, micro_batches=[0] * len(self._stations))

    def is_due(self, every: int) -> bool:
        """Whether the step in progress is one of every n: and, while a run is young, every power of two."""
        young = self.step < every and self.step & (self.step - 1) == 0
        return self.step % every == 0 or young

    def _finish(self) -> None:
        """Send the step off and begin the next."""
        draft = self._draft
        for station in self._stations:
            if station.reading is not None:
                draft.packet.extend(station.reading)
        self._observes_expected = max(1, self._observes)
        self._expects_clip = self._clipped
        self._scaler_settled = True
        draft.time = time.time()
        draft.layout, draft.slots = self.rows.layout, self.rows.slots
        draft.every = self.every
        draft.stations = [station.rows for station in self._stations]
        if draft.batch_size is None:
            draft.batch_size = self.batch_size
        draft.shipment = draft.packet.ship()
        draft.lap = self._clock.lap()
        self.deliver(draft)
        self.step += 1
        self._draft = self._begin()

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, station: Station, norms: dict[int, Tensor] | None = None) -> None:
        first = station.reading is None
        scale = self._scale_in_force(station)
        self._draft.windows |= station.read(
            self.rows,
            full=self._draft.full,
            detail=self._draft.detail,
            norms=norms or {},
            scale=scale,
            scaled=self._draft.scaled,
            windows=self._draft.packet if first else None,
            count_nonfinite=self.count_nonfinite and "grad/nonfinite" in self.config.metrics,
        )

    def _scale_in_force(self, station: Station) -> Tensor | None:
        """The loss scale, if any; notes whether gradients still carry it and what was done to them."""
        scaler = self._scaler
        if scaler is None:
            self._draft.stage = "clipped" if self._clipped or station.changed_by_hand() else "raw"
            return None
        state = scaler._per_optimizer_states[id(station.optimizer)]
        self._draft.scaled = state["stage"].name == "READY"
        self._draft.stage = "clipped" if self._clipped else "unscaled"
        return scaler._scale

    def _is_stale(self, station: Station) -> bool:
        """Whether a reading must be taken (again): none yet, or another backward has run since."""
        if station.reading is None:
            return True
        uncounted = station.backwards == 0 and self._observes > 1
        return not self._clipped and (station.read_at != station.backwards or uncounted)

    # -- what the loop tells us ---------------------------------------------------------------------------------

    def observe(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        """Note a loss and, where no clipping is expected to come, read the gradients now."""
        self._attempt("observe", self._observe, loss, batch_size)

    def _observe(self, loss: Tensor | float | None, batch_size: float | None) -> None:
        draft = self._draft
        self._observes += 1
        if isinstance(loss, Tensor):
            loss = loss.detach()
            draft.packet.add(f"loss{len(draft.losses)}", loss if loss.dim() == 0 else loss.float().mean())
            draft.losses.append(None)
        elif loss is not None:
            draft.losses.append(float(loss))
        draft.sizes.append(batch_size)
        if batch_size is not None:
            draft.batch_size = (draft.batch_size or 0.0) + batch_size
        if self._expects_clip or self._observes < self._observes_expected:
            return
        for station in self._stations:
            if not station.stepped and station.backwards and self._is_stale(station):
                self._read(station)

    def on_total_norm(self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None) -> None:
        """The loop computed norms, most likely to clip: read now and reuse them."""
        self._attempt("clip", self._on_total_norm, grads, norms)

    def _on_total_norm(self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None) -> None:
        row_of = {id(parameter.grad): row for row, parameter in enumerate(self.rows.parameters)}
        theirs = {row_of[id(grad)] for grad in grads if id(grad) in row_of}
        known = {}
        # Norms of half-precision gradients come rounded to half precision: not good enough to keep.
        if norms is not None and norms and norms[0].dtype in (torch.float32, torch.float64):
            known = {row_of[id(grad)]: norm for grad, norm in zip(grads, norms, strict=True) if id(grad) in row_of}
        for station in self._stations:
            if not station.stepped and not theirs.isdisjoint(station.rows) and self._is_stale(station):
                self._read(station, known)

    def on_clip(self) -> None:
        """Gradients are about to be clipped: the last moment to read them whole."""
        self._attempt("clip", self._on_clip)

    def _on_clip(self) -> None:
        for station in self._stations:
            if not station.stepped and station.backwards and self._is_stale(station):
                self._read(station)
        self._clipped = True

    def on_loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A scaler is in use; until our first step shows who steps us, we take it that it scales our loss."""
        if not self._scaler_settled:
            self._scaler = scaler

    def before_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Read here at the latest: the scaler may skip the optimizer's step and its hooks."""
        for station in self._stations:
            if station.optimizer is optimizer:
                self._scaler = scaler
                self._attempt("read", self._arrive, station)
                station.in_scaler_step = True

    def after_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Where the optimizer's hooks did not run, the scaler skipped the step."""
        for station in self._stations:
            if station.optimizer is optimizer and station.in_scaler_step:
                station.in_scaler_step = False
                self._draft.skipped = True
                self._attempt("step", self._leave, station)

    # -- the optimizer's step -----------------------------------------------------------------------------------

    def _pre_hook(self, station: Station) -> Callable[..., Any]:
        def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if not station.in_scaler_step:
                self._scaler, self._scaler_settled = None, True  # stepped without a scaler
            if closure is None:
                if not station.in_scaler_step:
                    self._attempt("read", self._arrive, station)
                self._attempt("update", self._before_update, station)
                return None
            # Gradients are stale until the closure has run, so it is read from inside.
            self._attempt("update", self._before_update, station)
            wrapped = self._wrap_closure(station, closure)
            if "closure" in kwargs:
                return args, {**kwargs, "closure": wrapped}
            return (args[0], wrapped, *args[2:]), kwargs

        return before_step

    def _wrap_closure(self, station: Station, closure: Callable[[], Any]) -> Callable[[], Any]:
        evaluated = False

        def evaluate() -> Any:
            nonlocal evaluated
            loss = closure()
            if not evaluated:  # a line search evaluates again, at other weights
                evaluated = True
                self._attempt("read", self._after_closure, station, loss)
            return loss

        return evaluate

    def _after_closure(self, station: Station, loss: Any) -> None:
        if not self._draft.losses and isinstance(loss, (Tensor, float)):
            self._observe(loss, None)
        self._arrive(station)

    def _arrive(self, station: Station) -> None:
        """An optimizer is about to step: its gradients are complete."""
        if station.stepped:
            self._finish()
        if station.has_grown() and self.rows.refresh():
            self._assign_rows()
        if self._is_stale(station):
            self._read(station)
        if station.micro is not None and station.micro.armed:
            self._attempt("microbatch", self._take_micro_batches, station)

    def _take_micro_batches(self, station: Station) -> None:
        assert station.micro is not None
        count, packet = station.micro.finish()
        self._draft.micro_batches[station.index] = count
        if count >= 2:
            self._draft.packet.extend(packet)
        if station.micro.order and not self._order_known:
            station.follow(self.rows.parameters[station.micro.order[0]])
            if station is self._stations[0]:
                self._order_known = True
                self.rows.learn_order(station.micro.order)

    def _before_update(self, station: Station) -> None:
        found_inf = getattr(station.optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor):
            self._draft.packet.add("found_inf", found_inf)
        if self._draft.full and "update/norm" in self.config.metrics:
            station.updates.before(station.rows, station.parameters)

    def _post_hook(self, station: Station) -> Callable[..., None]:
        def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            station.in_scaler_step = False
            if self._draft.full:
                self._attempt("moments", self._read_moments, station)
                self._attempt("update", self._read_weights, station)
            self._attempt("step", self._leave, station)

        return after_step

    def _read_moments(self, station: Station) -> None:
        self._draft.betas |= station.read_moments(self._draft.packet, detail=self._draft.detail)

    def _read_weights(self, station: Station) -> None:
        self._draft.fractions |= station.read_weights(self._draft.packet)

    def _leave(self, station: Station) -> None:
        """An optimizer has stepped, or was skipped."""
        if station is self._stations[0]:
            lr = station.optimizer.param_groups[0].get("lr")
            if isinstance(lr, Tensor):
                self._draft.packet.add("lr", lr)
            elif lr is not None:
                self._draft.lr = float(lr)
        station.depart()
        if all(other.stepped for other in self._stations):
            if self._draft.full and self.rows.refresh():
                self._assign_rows()
            self._finish()

    # -- keeping out of the way ---------------------------------------------------------------------------------

    def _attempt(self, part: str, work: Callable[..., Any], *args: Any) -> None:
        """Do one part of the reading; an error ends that part for good and never reaches the loop."""
        if part in self._broken:
            return
        try:
            with self._clock:
                work(*args)
        except Exception as error:
            self._fail(part, error)

    def _fail(self, part: str, error: Exception) -> None:
        self._broken.add(part)
        self.on_error(part, error)

    def close(self) -> None:
        """Send off a step that some optimizer has made, and take every hook away."""
        if any(station.stepped for station in self._stations):
            self._attempt("step", self._finish)
        interpose.detach(self)
        for handle in self._handles:
            handle.remove()
        for station in self._stations:
            station.unhook()
            if station.micro is not None:
                station.micro.disarm()

    def state_dict(self) -> dict[str, Any]:
        """The step, the cadence and the sliding windows."""
        names = list(self.rows.named)
        windows = {names[row]: window.state_dict() for row, window in self.rows.windows.items()}
        return {"step": self.step, "every": self.every, "windows": windows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved step."""
        self.step, self.every = int(state["step"]), int(state["every"])
        names = list(self.rows.named)
        for row, window in self.rows.windows.items():
            if names[row] in state["windows"]:
                window.load_state_dict(state["windows"][names[row]])
        self._draft = self._begin()
