"""Schedulers and the scaler do not count a step that was skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))
from guarded_runs import bits, without_wrapping

from gradvitals.guard.actions import SkippedTicks

Make = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, Make] = {
    "one_cycle": lambda one: lr_scheduler.OneCycleLR(one, 0.2, total_steps=80),
    "cosine": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 7),
    "multiplicative": lambda one: lr_scheduler.MultiplicativeLR(one, lambda count: 0.9),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.1, step_size_up=5, cycle_momentum=False),
    "chained": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(one, 0.5, 4), lr_scheduler.ExponentialLR(one, 0.9)]
    ),
}


def optimizer(rate: Any = 0.1) -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.Linear(3, 2).parameters(), lr=rate)


def loop(make: Make, skipped: list[bool], rate: Any = 0.1) -> tuple[Any, Any]:
    """A loop that steps an optimizer, unless it is skipped, and then ticks its scheduler."""
    one = optimizer(rate)
    scheduler = make(one)
    hold = SkippedTicks([scheduler], None)
    for out in skipped:
        hold.step_starts()
        one._opt_called = True  # type: ignore[attr-defined]
        if out:
            hold.step_skipped()
        scheduler.step()
    hold.step_starts()
    groups = [{name: value for name, value in group.items() if name != "params"} for group in one.param_groups]
    return bits(without_wrapping(scheduler.state_dict())), bits(groups)


def test_a_rate_that_is_a_tensor_is_put_back_in_place() -> None:
    rate = torch.tensor(0.1)
    got = loop(SCHEDULERS["one_cycle"], [False, True, False, True], rate)
    assert got == loop(SCHEDULERS["one_cycle"], [False, False], torch.tensor(0.1))


def test_each_scheduler_is_held_on_its_own() -> None:
    one, two = optimizer(), optimizer()
    often, seldom = lr_scheduler.ExponentialLR(one, 0.9), lr_scheduler.StepLR(two, 1, 0.5)
    hold = SkippedTicks([often, seldom], None)
    for count in range(12):
        hold.step_starts()
        one._opt_called = two._opt_called = True  # type: ignore[attr-defined]
        if count == 7:
            hold.step_skipped()
        often.step()
        if count % 4 == 3:
            seldom.step()
    hold.step_starts()
    assert often.last_epoch == 11
    assert seldom.last_epoch == 3


def test_what_the_user_sets_is_not_put_back_if_the_scheduler_did_not_tick() -> None:
    one = optimizer()
    hold = SkippedTicks([lr_scheduler.ExponentialLR(one, 0.9)], None)
    hold.step_starts()
    hold.step_skipped()
    one.param_groups[0]["lr"] = 0.7
    hold.step_starts()
    assert one.param_groups[0]["lr"] == 0.7


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)


def test_a_scaler_that_has_scaled_nothing_yet_is_left_alone() -> None:
    SkippedTicks([], scaler()).discount_scaler()
    SkippedTicks([], None).discount_scaler()
