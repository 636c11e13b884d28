"""A Guard that only looks changes nothing; one that acts leaves healthy runs alone, and is never in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import Run, adamw, batch, train_step, without
from torch import nn
from torch.optim import lr_scheduler

import gradvitals as gv

QUICK = gv.guard.Skip(mode="on", first_steps=10)
BAD = {3: "nan", 25: "huge", 26: "huge", 30: "nan"}
ALL_BAD = {index: "huge" for index in range(25, 60)}


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=6)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scheduler": {"schedulers": lambda optimizers: [lr_scheduler.OneCycleLR(optimizers[0], 0.02, total_steps=80)]},
    "scaler": {"scaler": True, "optimizers": lambda net: [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)]},
    "clipped": {"clip": 1.0, "parts": 2},
    "fused": {"optimizers": lambda net: adamw(net, fused=True), "decide": "device"},
}


def prepared(name: str) -> dict[str, Any]:
    variant = {key: value for key, value in VARIANTS[name].items() if key != "decide"}
    return variant | ({"scaler": scaler()} if variant.get("scaler") else {})


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("bad", [BAD, ALL_BAD], ids=["bad", "all_bad"])
def test_a_dry_run_is_the_run_without_a_guard_bit_for_bit(name: str, bad: dict[int, str], tmp_path: Path) -> None:
    guard = {"skip": gv.guard.Skip(mode="dry_run", first_steps=10), "decide": VARIANTS[name].get("decide", "auto")}
    dry = Run(tmp_path / "run", guard, bad=bad, **prepared(name)).train(range(40)).close()
    alone = Run(bad=bad, **prepared(name)).train(range(40))
    assert dry.all_bits() == alone.all_bits()
    assert not any(action.taken for action in dry.guard.actions)
    assert dry.guard.actions or name in ("scaler", "clipped")  # which skip and clip by themselves


def test_the_default_observes_and_says_what_it_would_have_done(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {}, bad={3: "nan"}).train(range(6)).close()
    action = run.guard.actions[0]
    assert (action.kind, action.step, action.finding, action.taken) == ("skip", 3, "nonfinite", False)
    assert action.reason == "dry run; the gradient norm is nan"
    assert [response.mode for response in run.guard.responses.values()] == ["off", "dry_run", "dry_run"]
    assert run.guard.step == 6


def test_a_dry_run_says_that_it_would_have_rolled_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"skip": gv.guard.Skip(mode="dry_run", first_steps=10)})
    run.train(range(80))
    with torch.no_grad():
        run.net.head.weight[0, 0] = float("nan")
    run.train(range(80, 90)).close()
    (action,) = [action for action in run.guard.actions if action.kind == "roll_back"]
    assert action.reason.startswith("dry run; ")


def test_single_responses_can_be_named(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"skip": QUICK}, bad=BAD).train(range(34)).close()
    assert {action.kind for action in run.guard.actions if action.taken} == {"skip"}
    assert run.all_bits() == Run().train(without(range(34), BAD)).all_bits()


@pytest.mark.parametrize("decide", ["host", "device"])
def test_a_clean_run_has_no_action_and_is_left_as_it_is(decide: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=True)}
    run = Run(tmp_path / "run", {"mode": "act", "decide": decide}, **settings).train(range(250)).close()
    assert run.guard.actions == []
    assert run.guard.step == 250
    assert run.all_bits() == Run(**settings).train(range(250)).all_bits()
    assert run.guard.summary() == "the Guard did nothing"


# -- a run that changes for good ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("decide", "rollback"), [("host", "on"), ("device", "on"), ("device", "off")])
def test_a_gradient_a_hundred_times_larger_for_good_is_accepted(decide: str, rollback: str, tmp_path: Path) -> None:
    """A legitimate change, such as another loss weight: it must cost a few steps, and not the run."""
    net = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    monitor = gv.watch(net, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True, diagnose=False))
    rolling: Any = "off" if rollback == "off" else gv.guard.RollBack(every=20, settle=10)
    guard = gv.Guard(monitor, mode="act", clip="off", rollback=rolling, decide=decide)  # type: ignore[arg-type]
    counted = []
    for index in range(400):
        inputs, targets = batch(index)
        train_step(monitor, optimizer, (net(inputs) - targets).square().mean() * (100.0 if index >= 100 else 1.0))
        counted.append(guard.step)
    monitor.close()
    assert guard.step - counted[299] == 100, "the last hundred steps are all made"
    skipped = [action.step for action in guard.actions if action.kind == "skip" and action.taken]
    back = [action for action in guard.actions if action.kind == "roll_back" and action.taken]
    assert len(skipped) <= 3 * (1 + len(back)) + (8 if decide == "device" else 0)
    assert len(back) <= 3
    lost = len(skipped) + sum(action.cost["steps"] for action in back)
    assert lost <= (12 if rollback == "off" else 160)


# -- errors of our own ------------------------------------------------------------------------------------------


def test_an_error_of_the_guard_ends_guarding_not_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = gv.guard.guard.step_numbers

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise ValueError("made up")
        return real(*args, **kwargs)

    monkeypatch.setattr(gv.guard.guard, "step_numbers", broken)
    schedule: dict[str, Any] = {"schedulers": lambda optimizers: [lr_scheduler.CosineAnnealingLR(optimizers[0], 40)]}
    run = Run(tmp_path / "run", {"mode": "act"}, bad={3: "nan"}, **schedule).train(range(20)).close()
    assert len(calls) == 8
    assert run.parameters() == Run(**schedule).train(without(range(20), [3])).parameters()
    (finding,) = [finding for finding in run.monitor.findings if finding.id == "guard_error"]
    assert "made up" in finding.title
    assert finding.first_step == 7
    assert "ValueError: made up" in finding.evidence["traceback"]
    assert [kept.id for kept in gv.open_run(run.monitor.run_path).findings].count("guard_error") == 1


def test_a_loss_that_the_loop_never_tells_is_no_trouble(tmp_path: Path) -> None:
    net = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    monitor = gv.watch(net, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True, diagnose=False))
    guard = gv.Guard(monitor, mode="act")
    for _ in range(60):
        optimizer.zero_grad()
        net(torch.ones(4, 6)).sum().backward()
        optimizer.step()
    monitor.close()
    assert guard.step == 60
    assert guard.actions == []
