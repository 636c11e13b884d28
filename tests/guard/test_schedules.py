"""GSNRScheduler: what it decides from known sequences, and that it leaves every other schedule alone."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import gradvitals as gv
from gradvitals.diagnose.history import Average
from gradvitals.errors import ConfigError, RunError
from gradvitals.schedules import GSNRScheduler, lr_factors
from gradvitals.types import Action

sys.path.insert(0, str(Path(__file__).parent))
from synthetic_readings import SyntheticMonitor, average, readings

# -- warmup, by hand --------------------------------------------------------------------------------------------------


def pacing(**settings: Any) -> GSNRScheduler:
    """A scheduler of a Monitor without readings, to give averages to."""
    monitor: Any = SyntheticMonitor()
    return GSNRScheduler(monitor, tiny()[1], **settings)


def ticks(pace: GSNRScheduler, count: int) -> list[float]:
    """The factors of the next steps."""
    found = []
    for _ in range(count):
        found.append(pace.factor)
        tick(pace)
    return found


def tick(pace: GSNRScheduler) -> list[Action]:
    pace.monitor.step += 1
    return new_actions(pace, pace._advance)


def take(pace: GSNRScheduler, seen: Average, source: str = "microbatch") -> list[Action]:
    return new_actions(pace, lambda: pace._consider(seen, source))


def new_actions(pace: GSNRScheduler, call: Callable[[], None]) -> list[Action]:
    known = len(pace.actions)
    call()
    return pace.actions[known:]


def test_a_warmup_is_held_while_the_interval_includes_0_and_continues_from_there() -> None:
    pace = pacing(warmup_steps=4, warmup_start=0.2)
    assert ticks(pace, 2) == pytest.approx([0.2, 0.4])
    (extended,) = take(pace, average(2, 0.01, 0.02))
    assert extended.kind == "warmup_extended"
    assert extended.after["warmup_steps"] == 4 + 16  # at most
    assert extended.after["gsnr_low"] == pytest.approx(-0.01)
    assert take(pace, average(3, 0.01, 0.02)) == []  # no news
    assert ticks(pace, 3) == pytest.approx([0.6, 0.6, 0.6])
    (resumed,) = take(pace, average(5, 0.3, 0.2))
    assert (resumed.kind, resumed.after["held"], resumed.after["warmup_steps"]) == ("warmup_resumed", 3, 7)
    assert ticks(pace, 4) == pytest.approx([0.6, 0.8, 1.0, 1.0])


def test_a_warmup_is_held_up_to_a_limit_and_not_again() -> None:
    pace = pacing(warmup_steps=2, warmup_start=0.5, max_extension=3)
    assert len(take(pace, average(0, 0.0, 0.1))) == 1
    decisions = [decision for _ in range(3) for decision in tick(pace)]
    assert [decision.kind for decision in decisions] == ["warmup_resumed"]
    assert "the limit" in decisions[0].reason
    assert take(pace, average(4, 0.0, 0.1)) == []
    assert ticks(pace, 3) == pytest.approx([0.5, 0.75, 1.0])


def test_no_extension_if_none_is_allowed_or_the_readings_are_few_or_the_warmup_is_over() -> None:
    assert take(pacing(warmup_steps=9, max_extension=0), average(0, 0.0, 0.1)) == []
    assert take(pacing(warmup_steps=9, readings=5), average(0, 0.0, 0.1, count=4)) == []
    assert take(pacing(), average(0, 0.0, 0.1)) == []


def test_a_wide_interval_holds_it_unless_it_has_to_be_near_zero_too() -> None:
    wide, narrow = average(0, 0.1, 0.2), average(0, 0.01, 0.02)  # per step of 4 of them up to 1.2 and 0.12
    for near, held in ((None, (True, True)), (0.5, (False, True)), (0.1, (False, False))):
        extended = [take(pacing(warmup_steps=9, near_zero=near), seen) for seen in (wide, narrow)]
        assert tuple(map(bool, extended)) == held


def test_a_warmup_of_the_schedule_is_stretched() -> None:
    """A schedule of start + (1 - start) t / W times the factor is the same line with a flat part in it."""
    pace = pacing(warmup_steps=4, warmup_start=0.2, warmup_in_schedule=True)
    schedule = [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 1.0]
    seen = []
    for step, rate in enumerate(schedule):
        seen.append(rate * pace.factor)
        tick(pace)
        if step == 1:
            take(pace, average(step, 0.0, 0.1))
        if step == 3:
            take(pace, average(step, 2.0, 1.0))
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.6, 0.6, 0.8, 1.0, 1.0])


# -- decay, by hand ---------------------------------------------------------------------------------------------------

LEVEL = [1.0 + 0.1 * (-1) ** step for step in range(2000)]
FALLING = [2.0 - step / 1000 for step in range(2000)]


def play(
    pace: GSNRScheduler, values: dict[int, float], losses: list[float], *, until: int, half: float = 0.1, **other: Any
) -> list[tuple[int, Action]]:
    """Make steps; from each step in `values` on, an average over the last 20 steps every ten has that value."""
    found, value = [], values[0]
    for step in range(until):
        tick(pace)
        value = values.get(step, value)
        pace._state.losses.push(step, losses[step])
        if step % 10 == 0 and step >= 20:
            new = average(step, value, half * abs(value), begins=step - 20, **other)
            found += [(step, decision) for decision in take(pace, new)]
    return found


DROP = {0: 4.0, 300: 0.5}
DECLINE = {step: 4e4 / (step + 20) ** 2 for step in range(0, 2000, 10)}
FADED, SUDDEN = [(320, "decay_due")], [(320, "sudden_gsnr_drop")]
DECAYS: dict[str, tuple[dict[str, Any], dict[int, float], list[float], float, list[tuple[int, str]]]] = {
    # The best, with its lower end at 3.6, is of step 20, the first of equals; the drop shows at 300, 310 and 320.
    "a drop with a level loss": ({"sudden_drop": 100.0}, DROP, LEVEL, 0.1, FADED),
    # 3.6 / 4 is 0.9: an average of 0.85 reaches up to 0.935.
    "a smaller drop": ({"sudden_drop": 100.0}, {0: 4.0, 300: 0.85}, LEVEL, 0.1, []),
    "a drop with a loss that falls": ({"sudden_drop": 100.0}, DROP, FALLING, 0.1, []),
    # Now over 280..300, before over 250..270: baseline = (260 / 290)² = 0.80, 3 × 0.55 = 1.65 < 3.6 × 0.80 = 2.9.
    "a sudden drop with a loss that falls": ({"drop": 1e6}, DROP, FALLING, 0.1, SUDDEN),
    "a decline with the length of the run": ({"drop": 1e6}, DECLINE, FALLING, 0.1, []),
    "a drop in the warmup": ({"warmup_steps": 250, "plateau": False}, {0: 4.0, 200: 0.5}, LEVEL, 0.1, []),
    "a drop from a doubtful signal": ({"plateau": False}, DROP, LEVEL, 0.6, []),
}


@pytest.mark.parametrize(("settings", "values", "losses", "half", "expected"), DECAYS.values(), ids=DECAYS)
def test_it_decays_after(settings: Any, values: Any, losses: list[float], half: float, expected: Any) -> None:
    pace = pacing(**settings)
    found = play(pace, values, losses, until=600 if values is not DECLINE else 2000, half=half)
    assert [(step, action.finding) for step, action in found] == expected
    assert pace.factor == pytest.approx(1 / 3 if expected else 1.0)
    if expected == FADED:
        assert found[0][1].before == pytest.approx({"factor": 1.0, "gsnr": 4.0, "gsnr_low": 3.6, "at": 20})
        assert found[0][1].after["factor"] == pytest.approx(1 / 3)
        assert found[0][1].after["gsnr_high"] == pytest.approx(0.55)


def test_decays_keep_the_cooldown_and_end_at_the_smallest_factor() -> None:
    values = {0: 400.0} | {300 * n: 400.0 / 20**n for n in range(1, 6)}
    pace = pacing(decay=0.1, min_factor=0.05, cooldown=400, plateau=False)
    found = play(pace, values, LEVEL, until=1800)
    assert [d.after["factor"] for _, d in found] == pytest.approx([0.1, 0.05])
    assert found[1][0] - found[0][0] >= 400
    assert pace.factor == pytest.approx(0.05)


def test_after_a_decay_only_what_was_read_after_it_counts() -> None:
    pace = pacing(cooldown=0, sudden_drop=100.0)
    found = play(pace, {0: 4.0, 300: 0.5}, LEVEL, until=1500)
    assert len(found) == 1  # it stays at 0.5, which is no drop any more
    assert pace._state.best["step"] > 320


@pytest.mark.parametrize(("source", "size"), [("microbatch", 2.0), ("adam", 8.0)])
def test_values_of_another_batch_size_or_source_are_never_compared(source: str, size: float) -> None:
    pace = pacing(plateau=False)
    play(pace, {0: 4.0}, LEVEL, until=300)
    for step in range(330, 400, 10):
        assert take(pace, average(step, 0.5, 0.05, begins=step - 20, batch_size=size), source) == []


WRONG: dict[str, list[Any]] = {
    "warmup_steps": [-1], "warmup_start": [0.0], "max_extension": [-1], "near_zero": [0.0], "decay": [0.0, 1.5],
    "drop": [1.0], "sudden_drop": [0.5], "readings": [1], "in_a_row": [0], "cooldown": [-1], "min_factor": [0.0],
    "source": ["window"], "look_every": [0], "lag": [-1],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_setting_is_reported_when_it_is_given(name: str, value: Any) -> None:
    monitor: Any = SyntheticMonitor()
    with pytest.raises(ConfigError, match=name):
        GSNRScheduler(monitor, tiny()[1], **{name: value})
    assert not monitor.readers  # and nothing was touched


# -- any sequence -----------------------------------------------------------------------------------------------------

EVENTS = st.lists(
    st.one_of(
        st.just(("tick",)),
        st.tuples(st.just("loss"), st.floats(0, 10)),
        st.tuples(st.just("average"), st.floats(-1, 100), st.floats(0, 5), st.sampled_from([8.0, 16.0])),
    ),
    max_size=150,
)
SETTINGS = st.fixed_dictionaries(
    {
        "warmup_steps": st.integers(0, 10),
        "warmup_in_schedule": st.booleans(),
        "max_extension": st.none() | st.integers(0, 10),
        "plateau": st.booleans(),
        "in_a_row": st.integers(1, 2),
        "cooldown": st.integers(0, 20),
        "decay": st.sampled_from([0.1, 0.5, 1.0]),
    }
)


@settings(max_examples=200, deadline=None)
@given(chosen=SETTINGS, events=EVENTS)
def test_the_factor_stays_within_its_bounds_and_decays_keep_apart(chosen: dict[str, Any], events: list[Any]) -> None:
    pace = pacing(**chosen)
    state, last = pace._state, None
    for step, (kind, *numbers) in enumerate(events):
        if kind == "tick":
            tick(pace)
        elif kind == "loss":
            state.losses.push(step, numbers[0])
        else:
            value, half, size = numbers
            for action in take(pace, average(step, value, half, begins=step - 2, batch_size=size), "adam"):
                if action.kind == "decay":
                    assert last is None or state.made - last >= pace.cooldown
                    last = state.made
        assert pace.min_factor * pace.warmup_start <= pace.factor <= 1
        assert state.held <= (4 * pace.warmup_steps if pace.max_extension is None else pace.max_extension)
        assert state.ramp + state.held <= state.made


# -- which readings count, and when -----------------------------------------------------------------------------------


def test_micro_batches_count_adam_and_the_window_do_not() -> None:
    pace = pacing()
    assert pace._average(readings(1, 1.0, 0.1, source="adam")) is None
    assert pace._average(readings(2, 1.0, 0.1, source="window")) is None
    assert 'source="adam"' in pace._missing()
    assert pace._average(readings(3, 1.0, 0.1)) is not None
    assert pacing(source="adam")._average(readings(3, 1.0, 0.1)) is None


def test_an_interval_below_zero_is_nothing_to_act_on() -> None:
    assert pacing(source="adam")._average(readings(3, -1.0, 0.1, source="adam")) is None
    assert pacing(source="adam")._average(readings(3, -1.0, 1.1, source="adam")) is not None


def tiny(lr: Any = 1.0, groups: int = 1) -> tuple[nn.ParameterList, torch.optim.SGD]:
    model = nn.ParameterList(nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(groups))
    return model, torch.optim.SGD([{"params": [parameter]} for parameter in model], lr=lr)


def made_up_run(delays: list[bool], *, save_at: int | None = None) -> tuple[list[float], list[Any]]:
    """A run whose readings arrive at once or later, and the factors and actions that came of it."""
    monitor: Any = SyntheticMonitor(window=5)
    _, optimizer = tiny()
    chosen: dict[str, Any] = {"warmup_steps": 20, "look_every": 3, "lag": 2, "plateau": False, "cooldown": 10}
    pace = GSNRScheduler(monitor, optimizer, **chosen)
    factors = []
    for step, arrives in enumerate(delays):
        factors.append(pace.factor)
        value = 0.0 if 12 <= step < 20 else 5.0 if step < 60 else 0.1
        monitor.made(readings(step, value, 0.1 if value == 0 else 0.1 * value), arrives=arrives)
        pace.step()
        if step == save_at:
            state = json.loads(json.dumps(pace.state_dict()))
            pace.detach()
            monitor.readers.clear()
            pace = GSNRScheduler(monitor, optimizer, **chosen)
            pace.load_state_dict(state)
    assert [action.to_json() for action in monitor.recorded] == [action.to_json() for action in pace.actions]
    return factors, [action.to_json() for action in pace.actions]


AT_ONCE = made_up_run([True] * 120)


def test_the_synthetic_run_extends_resumes_and_decays() -> None:
    assert [action["kind"] for action in AT_ONCE[1]] == ["warmup_extended", "warmup_resumed", "decay"]


@settings(max_examples=25, deadline=None)
@given(delays=st.lists(st.booleans(), min_size=120, max_size=120), save_at=st.none() | st.integers(0, 119))
def test_decisions_depend_neither_on_when_readings_arrive_nor_on_a_save(
    delays: list[bool], save_at: int | None
) -> None:
    assert made_up_run(delays, save_at=save_at) == AT_ONCE


def test_the_users_own_callback_continues_and_its_error_does_not_end_ours(tmp_path: Path) -> None:
    heard: list[int] = []

    def theirs(reading: gv.Reading) -> None:
        heard.append(reading.step)
        raise ValueError("theirs")

    model, optimizer = tiny()
    config = gv.Config(tensor_every=1, quiet=True)
    with gv.Monitor(model, optimizer, run=tmp_path / "run", config=config, on_reading=theirs) as monitor:
        pace = GSNRScheduler(monitor, optimizer, look_every=1, lag=0)
        noise_loop(model, optimizer, pace, steps=5, signal=1.0)
        assert heard == [0]
        assert any("theirs" in str(finding.evidence) or "theirs" in finding.title for finding in monitor.findings)
    assert pace._averages.source == "microbatch"


# -- beside torch's schedulers ----------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.95),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=30),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=31, cycle_momentum=False),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[5]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
}


def drive(scheduler: Any, step: int) -> None:
    scheduler.step(*([float(step // 4)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def moves(model: nn.ParameterList, optimizer: torch.optim.Optimizer) -> list[float]:
    """Make a step with a gradient of -1 and tell how far each parameter went: the rate that was used."""
    before = [parameter.item() for parameter in model]
    for parameter in model:
        parameter.grad = -torch.ones_like(parameter)
    optimizer.step()
    return [parameter.item() - was for parameter, was in zip(model, before, strict=True)]


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_is_multiplied_and_never_notices(name: str, kind: str) -> None:
    def rate() -> Any:
        return torch.tensor(0.5, dtype=torch.float64) if kind == "tensor" else 0.5

    (_, alone), (model, optimizer) = tiny(rate(), groups=2), tiny(rate(), groups=2)
    reference, scheduler = SCHEDULERS[name](alone), SCHEDULERS[name](optimizer)
    monitor: Any = SyntheticMonitor()
    pace = GSNRScheduler(monitor, scheduler, warmup_steps=10, warmup_start=0.1)
    for step in range(30):
        scheduled = [float(group["lr"]) for group in alone.param_groups]
        assert [float(group["lr"]) for group in optimizer.param_groups] == scheduled
        factor = min(1.0, 0.1 + 0.9 * step / 10)
        assert pace.get_last_lr() == pytest.approx([lr * factor for lr in scheduled])
        assert moves(model, optimizer) == pytest.approx([lr * factor for lr in scheduled])
        alone.step()
        drive(reference, step)
        drive(scheduler, step)
        pace.step()
    plain = json.loads(json.dumps(reference.state_dict(), default=float))
    assert json.loads(json.dumps(scheduler.state_dict(), default=float)) == plain


def test_rates_set_by_hand_are_multiplied_too() -> None:
    model, optimizer = tiny()
    monitor: Any = SyntheticMonitor()
    pace = GSNRScheduler(monitor, optimizer, warmup_steps=2, warmup_start=0.5)
    seen = []
    for lr in (4.0, 2.0, 1.0):
        for group in optimizer.param_groups:
            group["lr"] = lr
        seen += moves(model, optimizer)
        pace.step()
    assert seen == pytest.approx([2.0, 1.5, 1.0])


def test_factors_of_several_multiply_and_one_that_is_detached_does_not_count() -> None:
    model, optimizer = tiny()
    monitor: Any = SyntheticMonitor()
    first = GSNRScheduler(monitor, optimizer, warmup_steps=4, warmup_start=0.5)
    second = GSNRScheduler(monitor, optimizer, warmup_steps=4, warmup_start=0.25)
    assert moves(model, optimizer) == pytest.approx([0.125])
    first.detach()
    assert moves(model, optimizer) == pytest.approx([0.25])
    second.detach()
    assert moves(model, optimizer) == [1.0]
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_a_step_that_ends_in_an_error_leaves_no_multiplied_rate_for_the_next() -> None:
    model, optimizer = tiny()
    lr_factors(optimizer).set("test", 0.5)

    def fail() -> float:
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        optimizer.step(fail)
    assert moves(model, optimizer) == pytest.approx([0.5])
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_something_else_than_an_optimizer_is_refused() -> None:
    monitor: Any = SyntheticMonitor()
    with pytest.raises(TypeError, match="GSNRScheduler got a str"):
        GSNRScheduler(monitor, "adam")  # type: ignore[arg-type]


# -- real runs --------------------------------------------------------------------------------------------------------


def noise_loop(
    model: nn.ParameterList, optimizer: torch.optim.Optimizer, pace: GSNRScheduler, *, steps: int, signal: float
) -> None:
    """Gradients with a mean of `signal` and a standard deviation of 1, from four micro-batches a step."""
    for _ in range(steps):
        for _ in range(4):
            (sum((p * (signal + torch.randn_like(p))).sum() for p in model) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
        pace.step()


def noise_model() -> tuple[nn.ParameterList, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.zeros(50))])
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


CONFIG = gv.Config(tensor_every=1, quiet=True, sources=("microbatch",))


@pytest.mark.parametrize(("signal", "kinds"), [(0.0, ["warmup_extended", "warmup_resumed"]), (2.0, [])])
def test_a_real_warmup_waits_for_a_signal_and_the_run_tells_so(tmp_path: Path, signal: float, kinds: list[str]) -> None:
    model, optimizer = noise_model()
    with gv.Monitor(model, optimizer, run=tmp_path / "run", config=CONFIG) as monitor:
        pace = GSNRScheduler(monitor, optimizer, warmup_steps=40, max_extension=20, look_every=5, lag=5)
        noise_loop(model, optimizer, pace, steps=80, signal=signal)
    assert [action.kind for action in pace.actions][:2] == kinds
    run = gv.open_run(tmp_path / "run")
    assert [action.kind for action in run.actions] == [action.kind for action in pace.actions]
    rates = run.series("lr")[1]  # what the run tells is the rate that was used
    assert rates[0] == pytest.approx(1e-4)
    assert rates[-1] == pytest.approx(0.01)
    full = 60 if kinds else 40
    assert np.flatnonzero(rates > 0.00999)[0] == full


def test_a_real_signal_that_is_lost_lowers_the_rate_once(tmp_path: Path) -> None:
    model, optimizer = noise_model()
    with gv.Monitor(model, optimizer, run=tmp_path / "run", config=CONFIG) as monitor:
        pace = GSNRScheduler(monitor, optimizer, look_every=5, lag=5)
        noise_loop(model, optimizer, pace, steps=60, signal=2.0)
        assert pace.actions == []
        noise_loop(model, optimizer, pace, steps=60, signal=0.0)
    (action,) = pace.actions
    assert (action.kind, action.finding) == ("decay", "sudden_gsnr_drop")
    assert action.before["gsnr"] == pytest.approx(4.0, rel=0.1)  # mean² over variance
    assert action.after["factor"] == pytest.approx(1 / 3)
    rates = gv.open_run(tmp_path / "run").series("lr")[1]
    assert rates[action.step - 1 : action.step + 1] == pytest.approx([0.01, 0.01 / 3])
    pace.step()  # after the Monitor was closed nothing is read any more, and nothing fails
    assert pace.factor == pytest.approx(1 / 3)


def test_without_micro_batches_the_rate_stays_and_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = tiny()
    config = gv.Config(tensor_every=1, diagnose=False)
    with gv.Monitor(model, optimizer, run=tmp_path / "run", config=config) as monitor:
        pace = GSNRScheduler(monitor, optimizer)
        for _ in range(150):
            assert moves(model, optimizer) == pytest.approx([1.0])
            pace.step()
    assert capsys.readouterr().err.count("no GSNR from microbatch or ranks to act on") == 1
    assert "no GSNR" in pace.status
    assert pace.actions == []


def saved_and_loaded(tmp_path: Path, *, stop: int | None) -> tuple[torch.Tensor, list[Any]]:
    """A run of 90 steps that is cut at one of them, saved, and continued by new objects."""
    model, optimizer = noise_model()
    scheduler = lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.99)
    chosen: dict[str, Any] = {"warmup_steps": 30, "max_extension": 20, "look_every": 7, "lag": 3}
    monitor = gv.Monitor(model, optimizer, run=tmp_path / f"run{stop}", config=CONFIG)
    pace = GSNRScheduler(monitor, scheduler, **chosen)
    for step in range(90):
        if step == stop:
            state = [one.state_dict() for one in (model, optimizer, scheduler, monitor, pace)]
            random = torch.get_rng_state()
            monitor.close()
            model, optimizer = noise_model()
            scheduler = lr_scheduler.MultiplicativeLR(optimizer, lambda step: 0.99)
            monitor = gv.Monitor(model, optimizer, run=tmp_path / "other", config=CONFIG)
            pace = GSNRScheduler(monitor, scheduler, **chosen)
            loaders: tuple[Any, ...] = (model, optimizer, scheduler, monitor, pace)
            for one, saved in zip(loaders, state, strict=True):
                one.load_state_dict(saved)
            torch.set_rng_state(random)
        noise_loop(model, optimizer, pace, steps=1, signal=0.0)
        scheduler.step()
    monitor.close()
    return model[0].detach(), [action.to_json() for action in pace.actions]


def test_a_run_that_is_resumed_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    whole, actions = saved_and_loaded(tmp_path, stop=None)
    resumed, same_actions = saved_and_loaded(tmp_path, stop=26)
    assert torch.equal(whole, resumed)
    assert same_actions == actions
    assert actions


def test_a_factor_of_1_changes_nothing_at_all(tmp_path: Path) -> None:
    ends = []
    for paced in (True, False):
        model, optimizer = noise_model()
        with gv.Monitor(model, optimizer, run=tmp_path / f"run{paced}", config=CONFIG) as monitor:
            pace = GSNRScheduler(monitor, optimizer)
            if not paced:
                pace.detach()
            noise_loop(model, optimizer, pace, steps=10, signal=1.0)
        ends.append(model[0].detach())
    assert torch.equal(*ends)


def test_a_state_of_another_version_is_refused() -> None:
    monitor: Any = SyntheticMonitor()
    with pytest.raises(RunError, match="version 0"):
        GSNRScheduler(monitor, tiny()[1]).load_state_dict({"version": 0})


# -- the docs ---------------------------------------------------------------------------------------------------------

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "schedules.md").read_text("utf-8"), re.DOTALL
)


@pytest.mark.parametrize("block", BLOCKS, ids=["learning rate", "batch size", "momentum"])
def test_the_loops_in_the_docs_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs = iter(lambda: torch.randn(8, 4), None)
    batches = ((x, x.sum(1, keepdim=True) + torch.randn(8, 1)) for x in inputs)
    given = {"model": model, "optimizer": optimizer, "batches": batches, "loss_fn": nn.functional.mse_loss, "steps": 60}
    exec(compile(block, "docs/schedules.md", "exec"), given)
