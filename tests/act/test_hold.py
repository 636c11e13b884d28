"""Schedulers and the scaler do not count a step that was left out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))
from guarded import bits, without_wrapping

from gradvitals.act.hold import Hold

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


def loop(make: Make, left_out: list[bool], rate: Any = 0.1) -> tuple[Any, Any]:
    """A loop that steps an optimizer, unless it is left out, and then ticks its scheduler."""
    one = optimizer(rate)
    scheduler = make(one)
    hold = Hold([scheduler], None)
    for out in left_out:
        hold.begin()
        one._opt_called = True  # type: ignore[attr-defined]
        if out:
            hold.left_out()
        scheduler.step()
    hold.begin()
    groups = [{name: value for name, value in group.items() if name != "params"} for group in one.param_groups]
    return bits(without_wrapping(scheduler.state_dict())), bits(groups)


@pytest.mark.parametrize(
    "name",
    SCHEDULERS,
)
@given(left_out=st.lists(st.booleans(), max_size=40))
@settings(max_examples=25, deadline=None)
def test_it_has_counted_the_steps_that_were_made(name: str, left_out: list[bool]) -> None:
    assert loop(SCHEDULERS[name], left_out) == loop(SCHEDULERS[name], [False] * left_out.count(False))


def test_a_rate_that_is_a_tensor_is_put_back_in_place() -> None:
    rate = torch.tensor(0.1)
    got = loop(SCHEDULERS["one_cycle"], [False, True, False, True], rate)
    assert got == loop(SCHEDULERS["one_cycle"], [False, False], torch.tensor(0.1))


@pytest.mark.parametrize("bad", [0, 1, 3, 9])
def test_a_scheduler_that_ticks_once_an_epoch_is_not_held(bad: int) -> None:
    one = optimizer()
    scheduler = lr_scheduler.StepLR(one, 1, 0.5)
    hold = Hold([scheduler], None)
    for count in range(12):
        hold.begin()
        one._opt_called = True  # type: ignore[attr-defined]
        if count == bad:
            hold.left_out()
        if count % 4 == 3:
            scheduler.step()
    hold.begin()
    assert scheduler.last_epoch == 3


def test_each_scheduler_is_held_on_its_own() -> None:
    one, two = optimizer(), optimizer()
    often, seldom = lr_scheduler.ExponentialLR(one, 0.9), lr_scheduler.StepLR(two, 1, 0.5)
    hold = Hold([often, seldom], None)
    for count in range(12):
        hold.begin()
        one._opt_called = two._opt_called = True  # type: ignore[attr-defined]
        if count == 7:
            hold.left_out()
        often.step()
        if count % 4 == 3:
            seldom.step()
    hold.begin()
    assert often.last_epoch == 11
    assert seldom.last_epoch == 3


def test_what_the_user_sets_is_not_put_back_where_the_scheduler_did_not_tick() -> None:
    one = optimizer()
    hold = Hold([lr_scheduler.ExponentialLR(one, 0.9)], None)
    hold.begin()
    hold.left_out()
    one.param_groups[0]["lr"] = 0.7
    hold.begin()
    assert one.param_groups[0]["lr"] == 0.7


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)


@given(left_out=st.lists(st.booleans(), max_size=30), on_device=st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_scaler_has_counted_the_steps_that_were_made(left_out: list[bool], on_device: bool) -> None:
    def loop(steps: list[bool]) -> dict[str, Any]:
        scale, net = scaler(), nn.Linear(2, 1)
        one = torch.optim.SGD(net.parameters(), lr=0.0)
        hold = Hold([], scale)
        for out in steps:
            hold.begin()
            scale.scale(net(torch.ones(1, 2)).sum()).backward()
            scale.unscale_(one)
            scale.step(one)
            if on_device:
                hold.uncount(torch.tensor(float(out)))
            elif out:
                hold.uncount()
            scale.update()
            one.zero_grad()
        state: dict[str, Any] = scale.state_dict()
        return state

    expected = loop([False] * left_out.count(False))
    if not any(not out for out in left_out):
        return  # a scaler that was never used tells no state worth comparing
    assert loop(left_out) == expected


def test_a_scaler_that_has_scaled_nothing_yet_is_left_alone() -> None:
    Hold([], scaler()).uncount()
    Hold([], None).uncount()
