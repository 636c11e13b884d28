"""After damage that skipping batches does not cure, the run is that of the last healthy snapshot again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import NAN, Run, adamw, bits
from torch.optim import lr_scheduler

import gradvitals as gv

QUICK = gv.guard.Skip(first_steps=10)
BACK = gv.guard.RollBack(every=10, settle=5)
SLOW = gv.guard.RollBack(every=10, settle=15)
ACT = {"mode": "act", "skip": QUICK, "rollback": BACK}


def scheduled(optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    return [lr_scheduler.OneCycleLR(optimizers[0], 0.02, total_steps=200)]


def corrupt(run: Run, value: float) -> None:
    """One weight, as a bit flip in its exponent would have it."""
    with torch.no_grad():
        run.net.head.weight[0, 2] = value


def backs(run: Run, *, taken: bool = True) -> list[gv.Action]:
    return [action for action in run.guard.actions if action.kind == "roll_back" and action.taken == taken]


@pytest.mark.parametrize(("value", "decide"), [(1e30, "host"), (1e30, "device"), (NAN, "host"), (NAN, "device")])
def test_a_corrupted_weight_is_undone_and_later_batches_follow(value: float, decide: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=True)}
    run = Run(tmp_path / "run", {**ACT, "rollback": SLOW, "decide": decide}, **settings).train(range(38))
    corrupt(run, value)
    run.train(range(38, 70)).close()
    (back,) = backs(run)
    kept = back.after["step"]
    assert 20 <= kept <= 30
    later = 70 - (run.guard.step - kept)
    assert back.step < later <= back.step + 9  # what the device decides is known up to 8 steps later
    assert run.all_bits() == Run(**settings).train([*range(kept), *range(later, 70)]).all_bits()
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
    assert back.after["step"] <= 30


def test_on_the_device_a_step_that_was_skipped_before_the_snapshot_does_not_count(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"optimizers": lambda net: adamw(net, fused=True), "bad": {37: "nan"}}
    guard = {**ACT, "rollback": gv.guard.RollBack(every=20, settle=10), "decide": "device"}
    run = Run(tmp_path / "run", guard, **settings).train(range(63))
    corrupt(run, NAN)
    run.train(range(63, 80)).close()
    (back,) = backs(run)
    made = [index for index in range(40) if index != 37]  # up to the snapshot of step 40
    assert back.after["step"] == len(made)
    later = 80 - (run.guard.step - len(made))
    assert run.all_bits() == Run(**settings).train([*made, *range(later, 80)]).all_bits()
    assert run.kinds().count(("skip", 37)) == 1


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


def test_a_budget_is_not_exceeded(tmp_path: Path) -> None:
    back = gv.guard.RollBack(every=5, settle=5, budget=2)
    run = Run(tmp_path / "run", {**ACT, "rollback": back}).train(range(18))
    for round_ in range(4):
        corrupt(run, NAN)
        run.train(range(18 + 20 * round_, 38 + 20 * round_))
    run.close()
    assert len(backs(run)) == 2
    (refusal,) = backs(run, taken=False)
    assert refusal.reason == "its budget of 2 in 1,000 steps is spent"


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


@pytest.mark.parametrize("step", [0, 5, 30])
def test_weights_that_are_nan_early_go_back_to_a_snapshot_at_once(step: int, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"mode": "act"}).train(range(step))
    corrupt(run, NAN)
    run.train(range(step, 60)).close()
    (action,) = backs(run)
    assert action.step == step
    assert action.after["step"] >= min(step, 20) - step % 10
    kept = action.after["step"]
    assert run.parameters() == Run().train([*range(kept), *range(step + 1, 60)]).parameters()


def test_a_checkpoint_loaded_after_the_guard_was_built_is_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"mode": "act"})
    with torch.no_grad():
        run.net.head.weight.fill_(0.5)
    run.train(range(3))
    corrupt(run, NAN)
    run.train(range(3, 4)).close()
    assert len(backs(run)) == 1
    assert run.net.head.weight.tolist() == [[0.5] * 8]


@pytest.mark.parametrize("rollback", ["on", "off"])
def test_a_run_that_cannot_be_saved_is_not_skipped_forever(rollback: Any, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"mode": "act", "rollback": rollback}, bad=dict.fromkeys(range(10, 100), "nan"))
    run.train(range(100)).close()
    skipped = [step for kind, step in run.kinds(taken=True) if kind == "skip"]
    assert skipped == list(range(10, 10 + (40 if rollback == "on" else 20)))
    (finding,) = [one for one in run.monitor.findings if one.id == "guard_error"]
    assert finding.severity == "critical"
    assert "gave up" in finding.title
    assert run.guard.step == 100 - len(skipped) - (0 if rollback == "off" else sum(a.cost["steps"] for a in backs(run)))


# -- a model that has become worse, and data that has become harder -------------------------------------------------


class Task:
    """Regression with known noise: what the loss should be is known, and damage shows in it."""

    def __init__(self, where: Path, lr: Any = 0.01, **guard: Any) -> None:
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr) if callable(lr) else None
        config = gv.Config(quiet=True, diagnose=False)
        self.monitor = gv.watch(self.net, self.optimizer, run=where, config=config)
        self.guard = gv.Guard(self.monitor, mode="act", scheduler=self.scheduler, **guard)
        self.data = torch.Generator().manual_seed(1)
        self.noise, self.sign = 0.1, 1.0

    def loss(self, size: int = 32) -> torch.Tensor:
        inputs = torch.randn(size, 6, generator=self.data)
        targets = self.sign * inputs.sum(1, keepdim=True)
        return (self.net(inputs) - targets - self.noise * torch.randn(size, 1, generator=self.data)).square().mean()

    def judge(self) -> float:
        return self.loss(2000).item()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            self.monitor.observe(loss)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()

    def kinds(self) -> list[str]:
        return [action.kind for action in self.guard.actions if action.taken]


def test_harder_data_is_not_damage(tmp_path: Path) -> None:
    task = Task(tmp_path / "run")
    task.train(300)
    task.noise = 1.0
    task.train(200)
    task.monitor.close()
    assert task.guard.actions == []
    assert task.guard.step == 500


def test_damaged_weights_are_compared_with_the_snapshot_and_rolled_back(tmp_path: Path) -> None:
    task = Task(tmp_path / "run")
    task.train(400)
    healthy = task.judge()
    for state in task.optimizer.state.values():
        state["exp_avg"].mul_(1e4)
    task.train(60)
    (action,) = task.guard.actions
    assert (action.kind, action.taken, action.finding) == ("roll_back", True, "loss_rising")
    assert "with the snapshot's weights" in action.reason
    assert action.cost["steps"] == 460 - task.guard.step - (460 - 1 - action.step) + (
        task.guard.step - action.after["step"]
    )
    task.train(100)
    task.monitor.close()
    assert task.judge() < 2 * healthy


def test_a_learning_rate_that_did_damage_is_held_when_the_schedule_comes_to_it_again(tmp_path: Path) -> None:
    task = Task(tmp_path / "run", lr=lambda tick: 50.0 if 250 <= tick < 270 else 1.0)
    task.train(500)
    task.monitor.close()
    assert task.kinds() == ["roll_back", "hold_lr"]
    steps, rates = gv.open_run(task.monitor.run_path).series("lr")
    after = rates[steps > task.guard.actions[-1].step]
    assert max(rates) == pytest.approx(0.5)
    assert after.tolist() == pytest.approx([0.01] * len(after))
    assert task.judge() < 0.1


def test_a_trial_in_vain_gives_the_weights_back_and_says_so(tmp_path: Path) -> None:
    """The learning rate jumps just when the data becomes harder: the snapshot is no better."""
    task = Task(tmp_path / "run", lr=lambda tick: 4.0 if tick >= 300 else 1.0)
    task.train(300)
    task.noise = 2.0
    task.train(120)
    task.monitor.close()
    (action,) = task.guard.actions
    assert (action.kind, action.taken, action.cost["steps"]) == ("trial", True, 17)
    assert action.reason.endswith("not rolled back")
    assert task.guard.step == 420 - 17
    task.noise = 0.1
    assert task.judge() < 0.5


def test_training_that_ends_in_a_trial_ends_with_its_own_weights(tmp_path: Path) -> None:
    task = Task(tmp_path / "run", lr=lambda tick: 4.0 if tick >= 300 else 1.0)
    task.train(300)
    task.noise = 2.0
    for _ in range(40):
        made, before = task.guard.step, bits(task.net.state_dict())
        task.train(1)
        if task.guard.step == made:
            break  # a trial has begun, which takes turns between these weights and the snapshot's
    for _ in range(4):
        if bits(task.net.state_dict()) == before:
            task.train(1)
    assert bits(task.net.state_dict()) != before
    task.monitor.close()
    assert bits(task.net.state_dict()) == before


def test_a_stretch_of_wrong_labels_is_undone(tmp_path: Path) -> None:
    task = Task(tmp_path / "run")
    task.train(400)
    healthy = task.judge()
    task.sign = -1.0
    task.train(20)
    task.sign = 1.0
    task.train(60)
    task.monitor.close()
    assert "roll_back" in task.kinds()
    assert task.judge() < 2 * healthy
