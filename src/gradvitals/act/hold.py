"""A step that was left out did not happen: schedules that count steps do not count it, nor does a GradScaler."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Saved = tuple[dict[str, Any], list[dict[str, Any]]]
"""A scheduler's state, and the settings of the groups it sets."""


@dataclass
class _Held:
    """One scheduler, and what is known of it."""

    scheduler: Any
    count: int
    """Its ticks when its optimizer's last step began, or was left out."""
    each_step: bool = True
    """Whether it ticked after the last step that was made; at first nobody knows."""
    begun: bool = False
    saved: Saved | None = None

    def belongs_to(self, optimizer: torch.optim.Optimizer | None) -> bool:
        """Whether it sets the rates of this optimizer; of any for None."""
        return optimizer is None or getattr(self.scheduler, "optimizer", optimizer) is optimizer


class Hold:
    """Takes the tick back that a loop gives its schedulers after a step that was left out.

    A scheduler is left alone while the loop runs, and put right before its optimizer's next step. One that does not
    tick at every step, but once an epoch, is never held.
    """

    def __init__(self, schedulers: Sequence[Any], scaler: torch.amp.GradScaler | None) -> None:
        self._held = [_Held(scheduler, _count(scheduler)) for scheduler in schedulers]
        self._scaler = scaler

    def left_out(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """A step is left out: of one optimizer, or of all. The tick that comes next is taken back."""
        for held in self._held:
            if held.belongs_to(optimizer):
                groups = [_settings(group) for group in held.scheduler.optimizer.param_groups]
                held.saved = copy.deepcopy(held.scheduler.state_dict()), groups
                held.count = _count(held.scheduler)

    def begin(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """The next step of an optimizer begins: take back what was counted for one that was left out."""
        for held in self._held:
            if not held.belongs_to(optimizer):
                continue
            ticked = _count(held.scheduler) != held.count
            if held.saved is None:
                held.each_step = ticked if held.begun else held.each_step
            elif ticked and held.each_step:
                state, groups = held.saved
                held.scheduler.load_state_dict(state)
                for group, saved in zip(held.scheduler.optimizer.param_groups, groups, strict=True):
                    _put_back(group, saved)
            held.saved, held.begun, held.count = None, True, _count(held.scheduler)

    def uncount(self, left_out: Tensor | None = None) -> None:
        """Have the scaler not count this step among those that went well. Once a step.

        Args:
            left_out: 1 on the device where the step is left out; None where it is known to be.
        """
        tracker = self._scaler._growth_tracker if self._scaler is not None else None
        if tracker is not None:  # `update` adds the 1 that is taken away here
            tracker.sub_(1 if left_out is None else left_out.to(tracker))

    def state_dict(self) -> dict[str, Any]:
        """What it has seen of the schedulers."""
        return {"each_step": [held.each_step for held in self._held], "begun": [held.begun for held in self._held]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, after the schedulers have."""
        for held, each_step, begun in zip(self._held, state["each_step"], state["begun"], strict=True):
            held.each_step, held.begun, held.saved = bool(each_step), bool(begun), None
            held.count = _count(held.scheduler) - held.each_step


def _count(scheduler: Any) -> int:
    inner = getattr(scheduler, "_schedulers", None)  # a ChainedScheduler keeps no count of its own
    if not hasattr(scheduler, "last_epoch") and inner:
        return _count(inner[0])
    return int(getattr(scheduler, "last_epoch", 0))


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in group.items() if name != "params"}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in chosen.items()}


def _put_back(group: dict[str, Any], saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
            group[name].copy_(value)
        else:
            group[name] = value
