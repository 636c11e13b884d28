"""BatchSizeScheduler: known sequences of noise scales, any sequence, and a regression whose noise scale is known."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import gradvitals as gv
from gradvitals.diagnose.history import Average
from gradvitals.errors import ConfigError, RunError
from gradvitals.schedules import BatchSizeScheduler, Proposal

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_readings import SyntheticMonitor, average, readings


def noise(value: float, *, step: int = 100, size: float = 32.0, part: float = 0.1, **other: Any) -> Average:
    """An average whose noise scale is `value`: micro-batches of 8 have a GSNR of 8 / value, known to a part of it."""
    return average(step, 8 / value, part * 8 / value, step_size=size, **other)


def growth(**other: Any) -> BatchSizeScheduler:
    monitor: Any = SyntheticMonitor()
    return BatchSizeScheduler(monitor, **{"batch_size": 32, "accumulation_steps": 32, "apply": True, **other})


def take(schedule: BatchSizeScheduler, seen: Average) -> Proposal:
    schedule._consider(schedule._propose(seen))
    return schedule.proposal


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_the_batch_doubles_when_the_lower_end_was_over_twice_the_batch_three_times_in_a_row() -> None:
    rule = growth(apply=False)
    values = (80.0, 80.0, 60.0, 80.0, 80.0, 80.0)  # 80 / 1.1 = 72.7 is over 64, 60 is not
    assert [take(rule, noise(value)).batch_size for value in values] == [32, 32, 32, 32, 32, 64]
    proposal = take(rule, noise(80.0))
    assert (proposal.current, proposal.noise_scale) == (32, pytest.approx(80))
    assert (proposal.low, proposal.high) == (pytest.approx(80 / 1.1), pytest.approx(80 / 0.9))
    assert "over 2 × 32" in str(proposal)


def test_after_a_change_the_cooldown_runs_and_only_readings_of_the_new_batch_count() -> None:
    rule = growth(in_a_row=1, cooldown=10)
    take(rule, noise(1000.0))
    assert rule.batch_size == 64
    assert "this schedule is at 64" in take(rule, noise(1000.0)).reason
    rule._state.made = 9
    assert "less than 10 steps" in take(rule, noise(1000.0, size=64.0)).reason
    rule._state.made = 10
    assert take(rule, noise(1000.0, size=64.0)).batch_size == 128


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (noise(1e3, part=1.5), "not identifiable"),
        (noise(1e3, count=4), "only 4 readings"),
        (noise(1e3, size=math.nan), "number of samples is unknown"),
        (noise(1e3, size=64.0), "this schedule is at 32"),
    ],
)
def test_nothing_happens_if_the_noise_scale_is_not_known_and_it_says_why(seen: Average, why: str) -> None:
    rule = growth(in_a_row=1)
    proposal = take(rule, seen)
    assert (proposal.batch_size, math.isnan(proposal.noise_scale)) == (32, True)
    assert why in str(proposal)


def test_it_shrinks_only_when_asked_and_not_below_the_smallest() -> None:
    assert take(growth(in_a_row=1), noise(5.0)).batch_size == 32
    rule = growth(in_a_row=1, cooldown=0, shrink=True, min_batch_size=16)
    assert take(rule, noise(15.0)).batch_size == 32  # 15 / 0.9 = 16.7, over 32 / 2
    take(rule, noise(14.0))  # 15.6
    assert rule.batch_size == 16
    assert "at its limit" in take(rule, noise(1.0, size=16.0)).reason


# -- any sequence -----------------------------------------------------------------------------------------------------

VALUES = st.lists(st.tuples(st.floats(1, 1e5), st.sampled_from([0.05, 0.5, 1.5])), max_size=80)


@settings(max_examples=100, deadline=None)
@given(values=VALUES, shrink=st.booleans(), cooldown=st.integers(0, 20))
def test_the_batch_shrinks_only_if_asked_and_stays_in_its_limits(
    values: list[Any], shrink: bool, cooldown: int
) -> None:
    rule = growth(shrink=shrink, cooldown=cooldown, min_batch_size=16, in_a_row=2)
    last = None
    for value, part in values:
        rule._state.made += 1
        before = rule.batch_size
        proposal = take(rule, noise(value, part=part, size=float(before)))
        if proposal.batch_size != before:
            assert last is None or rule._state.made - last >= cooldown
            last = rule._state.made
        assert 16 <= rule.batch_size <= 256
        assert shrink or rule.batch_size >= before
        assert rule.batch_size in (before, 2 * before, before // 2)


@settings(max_examples=60, deadline=None)
@given(value=st.floats(1, 1e5), part=st.floats(0.01, 0.9))
def test_one_noise_scale_never_makes_it_go_up_and_down(value: float, part: float) -> None:
    rule = growth(shrink=True, cooldown=0, in_a_row=1, min_batch_size=1, max_batch_size=2**20)
    sizes = [32]
    for _ in range(30):
        take(rule, noise(value, part=part, size=float(rule.batch_size)))
        sizes.append(rule.batch_size)
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


def made_up_run(values: list[float], *, save_at: int | None = None, **options: Any) -> list[Any]:
    """Batch, micro-batches and factor at every step of a run whose readings have these noise scales."""
    monitor: Any = SyntheticMonitor(window=5)
    chosen = {"batch_size": 32, "accumulation_steps": 4, "look_every": 2, "lag": 1, "cooldown": 5, **options}
    schedule = BatchSizeScheduler(monitor, **chosen)
    seen: list[Any] = []
    for step, value in enumerate(values):
        gsnr, whole = 8 / value, float(schedule.batch_size)
        monitor.made(readings(step, gsnr, 0.1 * gsnr, whole=whole))
        schedule.step()
        if step == save_at:
            state = json.loads(json.dumps(schedule.state_dict()))
            monitor.readers.clear()
            schedule = BatchSizeScheduler(monitor, **chosen)
            schedule.load_state_dict(state)
        seen.append((schedule.batch_size, schedule.accumulation_steps, schedule.lr_multiplier, str(schedule.proposal)))
    assert monitor.recorded == schedule.actions
    return [*seen, [action.to_json() for action in schedule.actions]]


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.sampled_from([20.0, 100.0, 1e4]), min_size=60, max_size=60), save_at=st.integers(0, 59))
def test_a_state_saved_at_any_point_has_the_same_future(values: list[float], save_at: int) -> None:
    assert made_up_run(values, save_at=save_at, apply=True) == made_up_run(values, apply=True)


def test_a_schedule_that_applies_doubles_its_micro_batches_up_to_the_maximum() -> None:
    *seen, actions = made_up_run([1e4] * 120, apply=True, max_batch_size=128)
    assert sorted({(size, parts) for size, parts, _, _ in seen}) == [(32, 4), (64, 8), (128, 16)]
    assert [action["taken"] for action in actions] == [True, True]
    assert actions[0]["before"]["accumulation_steps"] == 4
    assert actions[0]["after"]["accumulation_steps"] == 8
    assert seen[-1][2] == pytest.approx(2.0)  # the root of 128 / 32


def test_a_schedule_that_proposes_changes_nothing_and_says_it_once() -> None:
    *seen, actions = made_up_run([1e4] * 120)
    assert {(size, parts, factor) for size, parts, factor, _ in seen} == {(32, 4, 1.0)}
    assert [(action["taken"], action["after"]["batch_size"]) for action in actions] == [(False, 64)]
    assert seen[-1][3].startswith("take a batch of 64")


# -- the learning rate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "rule", "factor"),
    [
        (torch.optim.SGD, None, 2.0),
        (torch.optim.AdamW, None, math.sqrt(2)),
        (torch.optim.SGD, "sqrt", math.sqrt(2)),
        (torch.optim.Adam, "linear", 2.0),
    ],
)
def test_the_rate_goes_with_the_batch_beside_another_schedule_when_asked(kind: Any, rule: Any, factor: float) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = kind([parameter], lr=0.5)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    used: list[float] = []
    for scale in (False, True):
        monitor: Any = SyntheticMonitor(window=5)
        schedule = BatchSizeScheduler(
            monitor,
            batch_size=32,
            accumulation_steps=4,
            max_batch_size=64,
            apply=True,
            optimizer=scheduler,
            scale_lr=scale,
            lr_rule=rule,
            look_every=1,
            lag=0,
        )
        for step in range(20):
            monitor.made(readings(step, 1e-3, 1e-4, whole=float(schedule.batch_size)))
            schedule.step()
        assert schedule.lr_multiplier == pytest.approx(factor)
        handle = optimizer.register_step_pre_hook(lambda o, *_: used.append(o.param_groups[0]["lr"]))
        parameter.grad = torch.ones(1)
        optimizer.step()
        handle.remove()
    assert used == pytest.approx([0.5, 0.5 * factor])
    assert optimizer.param_groups[0]["lr"] == 0.5


WRONG: dict[str, list[Any]] = {
    "batch_size": [0], "accumulation_steps": [3, 0], "max_batch_size": [16, 50], "min_batch_size": [64, 3],
    "factor": [1.0], "readings": [1], "cooldown": [-1], "lr_rule": ["cubic"], "scale_lr": [True], "lag": [-1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_setting_is_reported_when_it_is_given(name: str, value: Any) -> None:
    monitor: Any = SyntheticMonitor()
    with pytest.raises(ConfigError, match=name):
        BatchSizeScheduler(monitor, **{"batch_size": 32, "accumulation_steps": 4, name: value})
    assert not monitor.readers


def test_a_state_of_another_batch_is_refused() -> None:
    monitor: Any = SyntheticMonitor()
    state = BatchSizeScheduler(monitor, batch_size=32, accumulation_steps=4).state_dict()
    with pytest.raises(RunError, match="a batch of 32 in micro-batches of 8"):
        BatchSizeScheduler(monitor, batch_size=64, accumulation_steps=4).load_state_dict(state)


# -- a real run -------------------------------------------------------------------------------------------------------


def regression(tmp_path: Path, width: int, *, steps: int = 90) -> tuple[BatchSizeScheduler, gv.Run]:
    """Fit weights, all wrong by 1 and kept so by a rate near 0, to data without error: the noise scale is width + 1."""
    torch.manual_seed(0)
    model = nn.Linear(width, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    config = gv.Config(tensor_every=1, quiet=True)
    with gv.Monitor(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        schedule = BatchSizeScheduler(
            monitor, batch_size=64, accumulation_steps=4, max_batch_size=1024, apply=True, cooldown=10
        )
        for _ in range(steps):
            count = schedule.accumulation_steps
            for _ in range(count):
                loss = model(torch.randn(16, width)).square().mean() / 2
                (loss / count).backward()
                monitor.observe(loss, batch_size=16)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return schedule, gv.open_run(tmp_path / "run")


def test_a_real_noise_scale_under_the_batch_keeps_it(tmp_path: Path) -> None:
    schedule, run = regression(tmp_path, 10)
    assert schedule.batch_size == 64
    assert schedule.proposal.low < 11 < schedule.proposal.high
    assert run.actions == []


def test_a_real_noise_scale_over_twice_the_batch_doubles_it_until_it_is_not(tmp_path: Path) -> None:
    schedule, run = regression(tmp_path, 400)  # 401 is over 2 × 64 and 2 × 128, not over 2 × 256
    assert schedule.accumulation_steps == 16
    assert [action.after["batch_size"] for action in run.actions] == [128, 256]
    sizes = run.batch_sizes("loss")[1]
    assert (sizes[0], sizes[-1]) == (64, 256)  # the loop did as it was told
