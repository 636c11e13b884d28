"""The hooks on one optimizer's step: what the Tap does before it, within its closure, and after it."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gradvitals.measure.closure import closure_of, heard
from gradvitals.measure.station import Station

if TYPE_CHECKING:
    from gradvitals.measure.tap import Tap


def hook_steps(tap: Tap, station: Station) -> list[Any]:
    """Have the Tap read a station's part of every step its optimizer makes; returns the handles of both hooks."""
    passing = tap.passing

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        tap.ear.thread = get_ident()
        if passing.asleep:
            return None
        closure = closure_of(args, kwargs)
        if closure is None:
            if not station.in_scaler_step and station.is_due():
                tap.attempt("read", tap.arrive_alone, station)
            tap.attempt("update", tap.before_update, station)
            return None
        tap.attempt("step", passing.read_all)  # what a closure returns is heard only by who is awake
        # Gradients are stale until the closure has run, so they are read from inside it.
        if station.stepped:
            tap.attempt("step", tap.finish)
        tap.attempt("update", tap.before_update, station)
        first = partial(tap.attempt, "read", after_closure)
        wrapped = heard(closure, partial(setattr, tap, "muted"), first)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": wrapped}
        return (args[0], wrapped, *args[2:]), kwargs

    def after_closure(loss: Any) -> None:
        if not tap.draft.observed.losses and isinstance(loss, (Tensor, float)):
            tap.note(loss, None)
        tap.reach(station)

    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if passing.asleep:
            if passing.count_step(station):
                tap.attempt("step", passing.go_on, station)
            return
        station.in_scaler_step = False
        for name, take in station.instruments_after(tap.draft, tap.rows):
            tap.attempt(name, take)
        tap.audit(station)
        tap.attempt("step", tap.leave, station)

    of = station.optimizer
    return [of.register_step_pre_hook(before_step), of.register_step_post_hook(after_step)]
