"""What torch's own functions tell of the loop: it clips, it scales the loss, it computes in lower precision."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gradvitals.measure.ranks.shards import local

if TYPE_CHECKING:
    from gradvitals.measure.station import Station
    from gradvitals.measure.tap import Tap


class Ear:
    """Listens to `interpose` and has the Tap read where the moment has come.

    Any thread may clip, of any model. Backward changes `.grad` without Python's lock, so that to look at it from
    another thread than the one that trains is a race that ends in a crash: only that one's norms are listened to.
    """

    def __init__(self, tap: Tap) -> None:
        self._tap = tap
        self.thread: int | None = None
        """The one that has last observed, clipped or stepped: until it is known, norms are left to `on_clip`."""
        self._order: list[int] = []
        """The rows of the gradients that came last."""

    @property
    def asleep(self) -> bool:
        """Whether the step is passed over."""
        return self._tap.passing.asleep

    def on_norm(self, grads: Sequence[Tensor], total: Tensor) -> None:
        """The loop clips a step that is passed over; one whose norm stands out is read."""
        if threading.get_ident() == self.thread:
            self._tap.attempt("clip", self._on_norm, grads, total)

    def _on_norm(self, grads: Sequence[Tensor], total: Tensor) -> None:
        tap = self._tap
        if not len(grads) == len(self._order) > 0 or grads[0] is not tap.rows.parameters[self._order[0]].grad:
            return  # of another model, as far as one can see
        if tap.passing.look(tap.passing.norm, total.item()):
            self._on_total_norm(grads, None, None)

    def on_total_norm(
        self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None, joined: Tensor | None = None
    ) -> None:
        """The loop computed norms, most likely to clip: read now and reuse them."""
        if not self._tap.muted and not self.asleep and threading.get_ident() == self.thread:
            self._tap.attempt("clip", self._on_total_norm, grads, norms, joined)

    def _on_total_norm(self, grads: Sequence[Tensor], norms: Sequence[Tensor] | None, joined: Tensor | None) -> None:
        rows = self._rows_of(grads)
        # Norms of half-precision gradients come rounded to half precision: not good enough to keep.
        exact = (torch.float32, torch.float64)
        known: dict[int, Tensor] = {}
        # Those of a sharded model are summands: each rank has its own part to tell.
        if norms is not None and type(joined) is Tensor and joined.dtype in exact and -1 not in rows:
            known = dict(zip(rows, norms, strict=True))
        elif norms is not None:
            joined = None
            pairs = zip(rows, norms, strict=True)
            known = {row: local(norm) for row, norm in pairs if row >= 0 and norm.dtype in exact}
        theirs = set(rows)
        for station in self._tap.stations:
            if not station.stepped and not theirs.isdisjoint(station.rows) and station.is_stale(self._tap.observes):
                self._tap.read(station, known, joined)

    def _rows_of(self, grads: Sequence[Tensor]) -> list[int]:
        """The row of each gradient, -1 for one of another model. As a rule they come in the same order each time."""
        parameters = self._tap.rows.parameters
        if len(grads) == len(self._order) and all(map(is_, grads, [parameters[row].grad for row in self._order])):
            return self._order
        row_of = {id(parameter.grad): row for row, parameter in enumerate(parameters)}
        rows = [row_of.get(id(grad), -1) for grad in grads]
        if -1 not in rows:
            self._order = rows
        return rows

    def on_clip(self, parameters: Sequence[Tensor], max_norm: float | None = None) -> None:
        """These gradients are about to be clipped: the last moment to read them whole."""
        if self._tap.muted or self.asleep:
            return
        clipped = {id(parameter) for parameter in parameters}
        ours = [one for one in self._tap.stations if not clipped.isdisjoint(map(id, one.parameters))]
        if ours:
            self.thread = threading.get_ident()
            self._tap.attempt("clip", self._on_clip, ours, max_norm)

    def _on_clip(self, stations: Sequence[Station], max_norm: float | None) -> None:
        for station in stations:
            if station.stepped:
                continue
            if station.is_stale(self._tap.observes):
                self._tap.read(station)
            self._tap.attempt("window", self._tap.push_windows, station)
            station.clipped = station.step.clipped = True
            self._tap.draft.max_norm = station.loops_limit = max_norm

    def on_autocast(self, device: str, dtype: torch.dtype) -> None:
        """Lower precision is in use; that of the first step is taken for that of training."""
        if self._tap.observes_expected == math.inf and any(p.device.type == device for p in self._tap.rows.parameters):
            self._tap.autocast = str(dtype).removeprefix("torch.")

    def on_loss_scaled(self, scaler: torch.amp.GradScaler) -> None:
        """A scaler is in use; until the first step shows who steps us, we take it that it scales our loss."""
        if self._tap.observes_expected == math.inf:
            self._tap.assumed_scaler = scaler

    def before_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Read here at the latest: the scaler may skip the optimizer's step and its hooks."""
        for station in self._tap.stations:
            if station.optimizer is optimizer:
                self._tap.attempt("read", self._tap.passing.wake)
                station.scaler = scaler
                self._tap.attempt("read", self._tap.reach, station)
                station.in_scaler_step = True

    def after_scaler_step(self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """Where the optimizer's hooks did not run, the scaler skipped the step."""
        if any(station.optimizer is optimizer and station.in_scaler_step for station in self._tap.stations):
            if self._tap.on_scaler_skip is not None:
                self._tap.on_scaler_skip(optimizer)
            self._tap.leave_out(optimizer)

    def on_divided(self, parameters: Sequence[Tensor], factor: float) -> None:
        """A pipeline has made means of sums: what its micro-batches brought is to be divided alike."""
        divided = {id(parameter) for parameter in parameters}
        for station in self._tap.stations:
            if not divided.isdisjoint(map(id, station.parameters)):
                station.step.divided *= factor

    def before_groups_end(self) -> None:
        """Ranks can be compared no more: what they have read so far is all there is."""
        self._tap.attempt("step", self._tap.send_rest)
        if self._tap.on_groups_end is not None:
            self._tap.attempt("ranks", self._tap.on_groups_end)
