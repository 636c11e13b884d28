"""Loops that do not go straight: optimizers of several rhythms, errors caught by the loop, scalers that give up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import NAN, Run, adamw, batch, train_step
from torch import nn

import gradvitals as gv
from gradvitals.schedules import lr_factors

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
