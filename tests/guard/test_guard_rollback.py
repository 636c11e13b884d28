"""After damage that leaving batches out does not cure, the run is that of the last healthy snapshot again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

sys.path.insert(0, str(Path(__file__).parent))
from guarded_runs import NAN, Run, adamw, bits

import gradvitals as gv
from gradvitals.types import Finding

QUICK = gv.guard.Skip(first_steps=10)
BACK = gv.guard.RollBack(every=10, settle=5, cooldown=0)
SLOW = gv.guard.RollBack(every=10, settle=15, cooldown=0)
ACT = {"mode": "act", "skip": QUICK, "rollback": BACK}


def scheduled(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [lr_scheduler.OneCycleLR(optimizers[0], 0.02, total_steps=200)]


def corrupt(run: Run, value: float) -> None:
    """One weight, as a bit flip in its exponent would have it."""
    with torch.no_grad():
        run.net.head.weight[0, 2] = value


def backs(run: Run, *, taken: bool = True) -> list[gv.Action]:
    return [action for action in run.guard.actions if action.kind == "roll_back" and action.taken == taken]


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("value", [1e30, NAN, float("inf")])
def test_a_corrupted_weight_is_undone_and_training_continues_with_later_batches(
    value: float, decide: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=True)}
    run = Run(tmp_path / "run", {**ACT, "rollback": SLOW, "decide": decide}, **settings).train(range(38))
    corrupt(run, value)
    run.train(range(38, 70)).close()
    (back,) = backs(run)
    kept = back.after["step"]
    assert 20 <= kept <= 30
    later = back.step + 1 + (8 if decide == "device" else 0)  # the device tells that many steps later
    assert run.all_bits() == Run(**settings).train([*range(kept), *range(later, 70)]).all_bits()
    assert run.guard.step == kept + 70 - later
    assert back.finding == "nonfinite"
    assert back.cost["steps"] == back.before["step"] - kept
    assert back.cost["seconds"] > 0


@pytest.mark.parametrize("decide", ["host", "device"])
def test_the_schedule_and_the_scaler_go_back_too(decide: str, tmp_path: Path) -> None:
    def settings() -> dict[str, Any]:
        return {
            "optimizers": lambda net: adamw(net, fused=True),
            "schedulers": scheduled,
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7),
        }

    run = Run(tmp_path / "run", {**ACT, "rollback": SLOW, "decide": decide}, **settings()).train(range(38))
    with torch.no_grad():
        run.net.head.weight.mul_(1e6)  # finite, so it is no affair of the scaler's
    run.train(range(38, 90)).close()
    (back,) = backs(run)
    kept = back.after["step"]
    assert kept <= 30
    later = 90 - (run.guard.step - kept)
    assert run.all_bits() == Run(**settings()).train([*range(kept), *range(later, 90)]).all_bits()


def test_on_the_device_a_snapshot_settles_no_sooner_than_trouble_is_known(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=True)}
    run = Run(tmp_path / "run", {**ACT, "decide": "device"}, **settings).train(range(38))
    corrupt(run, NAN)  # in the snapshot of step 40, which the next 5 steps do not show to be bad
    run.train(range(38, 70)).close()
    (back,) = backs(run)
    assert back.after["step"] == 30


def test_on_the_device_a_step_that_was_skipped_before_the_snapshot_does_not_count(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=True), "bad": {37: "nan"}}
    guard = {**ACT, "rollback": gv.guard.RollBack(every=20, settle=10), "decide": "device"}
    run = Run(tmp_path / "run", guard, **settings).train(range(50))
    corrupt(run, NAN)
    run.train(range(50, 80)).close()
    (back,) = backs(run)
    made = [index for index in range(40) if index != 37]  # up to the snapshot of step 40
    assert run.all_bits() == Run(**settings).train([*made, *range(back.step + 9, 80)]).all_bits()
    assert run.guard.step == len(made) + 80 - back.step - 9
    assert run.kinds().count(("skip", 37)) == 1


def test_the_device_never_decides_the_first_step_after_a_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    had_state = []
    decide = gv.guard.actions.DeviceCheck.skips

    def spied(self: Any, *args: Any) -> Any:
        had_state.append(bool(run.optimizers[0].state))
        return decide(self, *args)

    monkeypatch.setattr(gv.guard.actions.DeviceCheck, "skips", spied)
    run = Run(
        tmp_path / "run",
        {**ACT, "rollback": "off", "lr": "off", "decide": "device"},
        optimizers=lambda net: [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)],
        bad={index: "huge" for index in range(38, 42)} | {49: "nan"},
    )
    run.train(range(55)).close()
    assert ("reset_momentum", 41) in run.kinds(taken=True)
    assert all(had_state)


def test_moments_of_one_poisoned_batch_go_with_it(tmp_path: Path) -> None:
    """Skipping is off, so the batch gets into the moments; the user asked to roll back at fifty times the norm."""
    back = gv.guard.RollBack(every=10, settle=5, ratio=50.0)
    guard = {"mode": "act", "skip": "off", "clip": "off", "reset": "off", "lr": "off", "rollback": back}
    run = Run(tmp_path / "run", guard, bad={37: "huge"}, schedulers=scheduled).train(range(60)).close()
    (action,) = backs(run)
    assert (action.step, action.finding, action.after["step"], action.before["step"]) == (37, "explosion", 30, 37)
    assert run.all_bits() == Run(schedulers=scheduled).train([*range(30), *range(38, 60)]).all_bits()
    assert run.guard.step == 52


def test_a_snapshot_that_did_not_settle_is_not_used(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(42))  # the snapshot of step 40 is pending
    corrupt(run, NAN)
    run.train(range(42, 50)).close()
    assert [action.after["step"] for action in backs(run)] == [30]


def test_a_snapshot_of_a_corrupted_run_is_not_used(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(38))
    with torch.no_grad():
        run.net.body[0].weight[0, 0] += 0.5  # goes unnoticed, and into the snapshot of step 40
    run.train(range(38, 43))
    corrupt(run, NAN)
    run.train(range(43, 60)).close()
    (action,) = backs(run)
    assert action.after["step"] == 30
    assert run.all_bits() == Run().train([*range(30), *range(action.step + 1, 60)]).all_bits()


def test_there_is_something_to_go_back_to_from_the_first_step_on(tmp_path: Path) -> None:
    back = gv.guard.RollBack(every=100, settle=5)
    run = Run(tmp_path / "run", {**ACT, "rollback": back}).train(range(8))
    corrupt(run, NAN)
    run.train(range(8, 30)).close()
    (action,) = backs(run)
    assert action.after["step"] == 0
    assert run.parameters() == Run().train(range(action.step + 1, 30)).parameters()


def test_without_a_healthy_snapshot_the_refusal_is_reported_once(tmp_path: Path) -> None:
    back = gv.guard.RollBack(every=10, settle=500)
    run = Run(tmp_path / "run", {**ACT, "rollback": back}).train(range(38))
    corrupt(run, NAN)
    run.train(range(38, 60)).close()
    assert backs(run) == []
    (refusal,) = backs(run, taken=False)
    assert (refusal.step, refusal.reason) == (41, "there is no healthy snapshot yet")
    assert refusal.cost == {}


def test_a_budget_is_not_exceeded(tmp_path: Path) -> None:
    back = gv.guard.RollBack(every=5, settle=5, cooldown=0, budget=2)
    run = Run(tmp_path / "run", {**ACT, "rollback": back}).train(range(18))
    for round_ in range(4):
        corrupt(run, NAN)
        run.train(range(18 + 20 * round_, 38 + 20 * round_))
    run.close()
    assert len(backs(run)) == 2
    (refusal,) = backs(run, taken=False)
    assert refusal.reason == "its budget of 2 in 1,000 steps is spent"


def test_damage_within_the_cooldown_is_undone_when_it_is_over(tmp_path: Path) -> None:
    back = gv.guard.RollBack(every=5, settle=5, cooldown=20)
    run = Run(tmp_path / "run", {**ACT, "rollback": back}).train(range(30))
    corrupt(run, NAN)
    run.train(range(30, 40))
    corrupt(run, NAN)
    run.train(range(40, 100)).close()
    assert len(backs(run)) == 2
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.net.parameters())


def test_random_numbers_and_the_data_are_not_rewound(tmp_path: Path) -> None:
    position = {"index": 0}
    data = (lambda: position["index"], lambda value: position.update(index=value))
    run = Run(tmp_path / "run", {**ACT, "data": data}).train(range(38))
    corrupt(run, NAN)
    position["index"] = 77
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    run.train(range(38, 50)).close()
    assert len(backs(run)) == 1
    assert position["index"] == 77
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_finding_of_the_users_choice_rolls_back(tmp_path: Path) -> None:
    back = gv.guard.RollBack(every=10, settle=5, on=("explosion",))
    run = Run(tmp_path / "run", {**ACT, "rollback": back}, config=gv.Config(quiet=True)).train(range(34))
    found = Finding(id=back.on[0], severity="critical", title="made up", first_step=33)
    run.monitor._opened.append((33, found))
    run.train(range(34, 60)).close()
    (action,) = backs(run)
    assert (action.step, action.finding, action.reason) == (50, back.on[0], "made up")
    assert action.after["step"] == 30  # the one before it was seen, not that of step 40
    assert run.all_bits() == Run().train([*range(30), *range(51, 60)]).all_bits()


def test_a_snapshot_during_whose_settling_something_was_found_is_not_healthy(tmp_path: Path) -> None:
    back = gv.guard.RollBack(every=10, settle=15, on=())
    reset = gv.guard.ResetMomentum(on=("loss_rising",), warmup=0)
    guard = {**ACT, "rollback": back, "reset": reset}
    run = Run(tmp_path / "run", guard, config=gv.Config(quiet=True)).train(range(34))
    run.monitor._opened.append((34, Finding(id="loss_rising", severity="critical", title="made up", first_step=34)))
    run.train(range(34, 52))  # told at step 50, when the snapshot of step 40 was pending
    assert ("reset_momentum", 50) in run.kinds(taken=True)
    run.train(range(52, 57))
    corrupt(run, NAN)
    run.train(range(57, 70)).close()
    (action,) = backs(run)
    assert action.after["step"] <= 30


def test_what_is_learned_and_lowered_goes_back_and_what_is_spent_does_not(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT).train(range(38))
    assert run.guard.state_dict()["policy"]["spent"]["roll_back"] == []
    corrupt(run, NAN)
    run.train(range(38, 42))
    state = run.guard.state_dict()
    assert state["policy"]["spent"]["roll_back"] == [41]
    assert state["wrappers"][0]["baseline"]["norm"]["count"] == 30
    run.close()


def test_a_roll_back_in_the_last_moments_leaves_the_run_as_the_loop_left_it(tmp_path: Path) -> None:
    """Numbers that land after the last step are judged for the record; the model is the user's by then."""
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=True)}
    run = Run(tmp_path / "run", {**ACT, "decide": "device"}, **settings).train(range(38))
    corrupt(run, NAN)
    run.train(range(38, 44))
    before = bits(run.net.state_dict())
    run.close()
    assert bits(run.net.state_dict()) == before


def test_the_diagnosis_starts_over_after_a_rollback(tmp_path: Path) -> None:
    """What was baseline before, and how far the weights have jumped back, are no findings."""
    run = Run(tmp_path / "run", {**ACT, "rollback": SLOW}, config=gv.Config(quiet=True)).train(range(60))
    corrupt(run, NAN)
    run.train(range(60, 130)).close()
    (back,) = backs(run)
    late = [finding.id for finding in run.monitor.findings if finding.first_step > back.step]
    assert not {"update_spike", "loss_rising", "loss_nonfinite", "nonfinite", "explosion", "vanishing"} & set(late)
    assert all(finding.last_step is not None for finding in run.monitor.findings if finding.id == "nonfinite")
