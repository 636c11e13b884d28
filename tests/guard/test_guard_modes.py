"""A Guard that only looks changes nothing; one that acts leaves healthy runs alone, and is never in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import NAN, Run, adamw, batch, train_step, without
from torch import nn
from torch.optim import lr_scheduler

import gradvitals as gv
from gradvitals.schedules import lr_factors

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


QUIET = gv.Config(quiet=True, diagnose=False)
ACT: dict[str, Any] = {"mode": "act", "rollback": gv.guard.RollBack(every=10, settle=5)}


def finite(model: nn.Module) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


@pytest.mark.parametrize("decide", ["host", "device"])
def test_a_critic_that_steps_five_times_is_guarded_each_time(decide: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    nets = nn.ModuleDict({"critic": nn.Linear(6, 1), "other": nn.Linear(6, 1)})
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01, fused=True) for net in nets.values()]
    monitor = gv.watch(nets, optimizers, run=tmp_path / "run", config=QUIET)
    guard = gv.Guard(monitor, mode="act", decide=decide)
    made = 0
    for round_ in range(10):
        for number, (name, optimizer) in enumerate([*[("critic", optimizers[0])] * 5, ("other", optimizers[1])]):
            inputs, targets = batch(made, "nan" if (round_, number) == (4, 2) else "")
            train_step(monitor, optimizer, (nets[name](inputs) - targets).square().mean())
            made += 1
    assert monitor.step == 50  # a step is over when each has stepped, or one steps again
    monitor.close()
    assert finite(nets)
    assert [action.kind for action in guard.actions] == ["skip"]
    assert guard.step == 49


@pytest.mark.parametrize("decide", ["host", "device"])
def test_an_interrupted_step_leaves_nothing_behind_nor_blinds_the_guard(decide: str, tmp_path: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=True), "bad": {6: "nan"}}
    run = Run(tmp_path / "run", {**ACT, "decide": decide}, **settings).train(range(5))
    (optimizer,) = run.optimizers
    lr_factors(optimizer).set("somebody", 0.5)
    hook = optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.step(5)
    hook.remove()
    assert not hasattr(optimizer, "found_inf")
    assert optimizer.param_groups[0]["lr"] == 0.01
    run.train(range(6, 12)).close()
    assert finite(run.net)
    assert [(action.kind, action.finding) for action in run.guard.actions] == [("skip", "nonfinite")]


@pytest.mark.parametrize(("fused", "decide"), [(False, "host"), (True, "device")], ids=["host", "device"])
def test_nan_weights_are_rolled_back_though_a_scaler_skips_every_step(fused: bool, decide: str, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=fused), "scaler": scaler}
    run = Run(tmp_path / "run", {**ACT, "decide": decide}, **settings).train(range(38))
    with torch.no_grad():
        run.net.head.weight[0, 0] = NAN
    run.train(range(38, 90)).close()
    assert [action.kind for action in run.guard.actions if action.taken] == ["roll_back"]
    assert finite(run.net)
    assert run.guard.step > 40
    assert float(scaler.get_scale()) > 1  # as it was when all was well


@pytest.mark.parametrize(("fused", "decide"), [(False, "host"), (True, "device")], ids=["host", "device"])
def test_what_a_scaler_skips_does_not_reach_batch_norm(fused: bool, decide: str, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=fused), "scaler": scaler}
    run = Run(tmp_path / "run", {**ACT, "decide": decide}, bad={7: "nan"}, **settings).train(range(20)).close()
    assert finite(run.net)
    assert run.guard.actions == []
    assert run.guard.step == 19


def test_what_is_done_to_gradients_after_observe_is_seen(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    guard = gv.Guard(run.monitor, mode="act")
    (optimizer,) = run.optimizers
    for index in range(20):
        inputs, targets = batch(index)
        loss = (run.net(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        run.monitor.observe(loss)
        for number, parameter in enumerate(run.net.parameters()):
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
            if number == 1 and index in (8, 15):
                parameter.grad[0] = NAN
        optimizer.step()
    run.close()
    assert finite(run.net)
    assert [(action.kind, action.step) for action in guard.actions] == [("skip", 8), ("skip", 15)]


def test_an_error_while_closing_keeps_neither_the_monitor_open_nor_the_users_error_hidden(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    run = Run(tmp_path / "run", ACT).train(range(3))
    run.monitor.at_close(broken)
    with pytest.raises(ValueError, match="theirs"), run.monitor:
        raise ValueError("theirs")
    assert {"training_stopped", "monitor_error"} <= {finding.id for finding in run.monitor.findings}
    assert "step" not in vars(run.optimizers[0])


def test_a_guards_state_continues_under_a_monitor_that_counts_from_zero(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mode": "act", "skip": gv.guard.Skip(first_steps=10, max_recent=2), "rollback": "off"}
    first = Run(tmp_path / "first", settings, bad={30: "huge", 34: "huge"}).train(range(38))
    assert first.kinds(taken=True) == [("skip", 30), ("skip", 34)]
    second = Run(tmp_path / "second", settings, bad={5: "huge", 180: "huge"})
    second.net.load_state_dict(first.net.state_dict())
    second.guard.load_state_dict(first.guard.state_dict())
    second.train([5])
    assert second.kinds(taken=True) == []  # a third spike within 200 steps is normal
    first.close()
    second.close()


def test_parameters_that_were_added_since_make_a_snapshot_useless_and_no_harm(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(30))
    extra = nn.Parameter(torch.zeros(2))
    run.optimizers[0].add_param_group({"params": [extra]})
    with torch.no_grad():
        run.net.head.weight[0, 0] = NAN
    run.train(range(30, 40)).close()
    refused = next(action for action in run.guard.actions if action.kind == "roll_back")
    assert (refused.taken, refused.reason) == (False, "no snapshot fits the model as it is now")
    assert not [finding for finding in run.monitor.findings if finding.id == "guard_error"]


def test_what_a_schedule_does_is_not_the_guards(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(3))
    run.monitor.record(gv.Action(kind="decay", step=2, finding="decay_due", taken=True))
    assert run.guard.actions == []
    run.close()
