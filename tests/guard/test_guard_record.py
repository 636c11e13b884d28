"""Every decision is in the run's record, and the Monitor's readings stay what they are under a Guard."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded_runs import Run, adamw

import gradvitals as gv
from gradvitals.report.format import summarize_actions
from gradvitals.types import Action

ACT = {"mode": "act", "skip": gv.guard.Skip(first_steps=10), "rollback": gv.guard.RollBack(every=10, settle=5)}
BAD = {0: "nan", 3: "nan", 25: "huge", 30: "nan"}


def fused(net: torch.nn.Module) -> list[torch.optim.Optimizer]:
    return adamw(net, fused=True)


@pytest.mark.parametrize("decide", ["host", "device"])
def test_the_record_holds_what_the_guard_tells(decide: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**ACT, "decide": decide}, optimizers=fused, bad=BAD).train(range(40)).close()
    kept = gv.open_run(run.monitor.run_path).actions
    assert kept == run.guard.actions == run.monitor.actions
    assert [(action.kind, action.step) for action in kept] == [("skip", step) for step in BAD]


def test_actions_that_were_taken_before_the_file_was_opened_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT)
    early = Action(kind="clip", step=0, finding="explosion", taken=False, reason="made up")
    run.monitor.record(early)
    assert not (tmp_path / "run").exists()
    run.train(range(3)).close()
    assert gv.open_run(run.monitor.run_path).actions == [early]


def test_an_action_goes_through_json_and_back(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", ACT, bad={3: "nan"}).train(range(5)).close()
    (action,) = run.guard.actions
    assert Action.from_json(json.loads(json.dumps(action.to_json()))) == action
    assert action.finding == "nonfinite"
    assert action.reason == "the gradient norm is nan"
    assert action.before == {"step": 3}
    assert action.after == {"step": 3}
    assert action.cost["steps"] == 1


@pytest.mark.parametrize("decide", ["host", "device"])
def test_readings_are_right_and_without_gaps_under_a_guard(decide: str, tmp_path: Path) -> None:
    guard = {**ACT, "decide": decide}
    run = Run(tmp_path / "run", guard, optimizers=fused, bad=BAD).train(range(40)).close()
    kept = gv.open_run(run.monitor.run_path)
    for metric in ("grad/norm", "lr", "loss"):
        steps, _ = kept.series(metric)
        assert steps.tolist() == list(range(40)), metric
    _, norms = kept.series("grad/norm")
    assert np.flatnonzero(~np.isfinite(norms)).tolist() == [0, 3, 30]
    assert norms[25] > 1e4
    _, losses = kept.series("loss")
    np.testing.assert_allclose(losses, run.losses, rtol=1e-6)
    steps, left_out = kept.series("step/left_out")
    assert steps[left_out > 0].tolist() == list(BAD)


def test_norms_are_those_before_the_guard_clips(tmp_path: Path) -> None:
    guard = {"clip": gv.guard.Clip(mode="on", quantile=0.99), "skip": "off", "rollback": "off"}
    run = Run(tmp_path / "run", guard, bad={35: "huge"}).train(range(40)).close()
    _, norms = gv.open_run(run.monitor.run_path).series("grad/norm")
    (action,) = [action for action in run.guard.actions if action.step == 35]
    assert action.kind == "clip"
    assert norms[35] == pytest.approx(action.before["norm"], rel=1e-5)
    assert norms[35] > 50 * action.after["norm"]


def test_a_guard_that_finds_nothing_leaves_the_readings_as_they_are(tmp_path: Path) -> None:
    config = gv.Config(quiet=True, diagnose=False, overhead_budget=None, tensor_every=1)
    plain = Run(tmp_path / "plain", config=config).train(range(30)).close()
    guarded = Run(tmp_path / "guarded", ACT, config=config).train(range(30)).close()
    first, second = gv.open_run(plain.monitor.run_path), gv.open_run(guarded.monitor.run_path)
    for metric in ("grad/norm", "lr", "loss", "weight/norm", "update/norm", "update/rms"):
        np.testing.assert_array_equal(first.series(metric), second.series(metric), metric)


def test_what_is_printed_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "run", ACT, bad={3: "nan", 5: "nan"}, config=gv.Config(diagnose=False)).train(range(8))
    capsys.readouterr()
    run.close()
    said = capsys.readouterr().err
    assert "the Guard skipped 2 steps" in said
    assert "cost: 2 steps of training" in said


def test_a_dry_run_says_what_it_would_do_once_in_a_while(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(
        tmp_path / "run", {**ACT, "mode": "observe"}, bad={3: "nan", 5: "nan"}, config=gv.Config(diagnose=False)
    ).train(range(8))
    said = [line for line in capsys.readouterr().err.splitlines() if "Guard, step" in line]
    assert [line.split(": ", 2)[1] for line in said if "skip" in line] == ["Guard, step 3"]
    assert all("dry run" in line for line in said)
    run.close()


def test_nothing_is_printed_if_nothing_was_done_or_quiet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(tmp_path / "calm", ACT, config=gv.Config(diagnose=False)).train(range(3)).close()
    Run(tmp_path / "quiet", ACT, bad={1: "nan"}).train(range(3)).close()
    assert "the Guard" not in capsys.readouterr().err


def action(kind: str, **settings: Any) -> Action:
    return Action(**{"kind": kind, "step": 0, "finding": "explosion", "taken": True, **settings})


def test_a_summary_of_everything() -> None:
    done = [
        action("skip", cost={"steps": 1, "seconds": 0.5}),
        action("skip", cost={"steps": 1, "seconds": 0.25}),
        action("clip"),
        action("trial"),
        action("hold_lr"),
        action("roll_back", cost={"steps": 40, "seconds": 0.25}),
        action("roll_back", taken=False, reason="its budget of 3 in 1,000 steps is spent"),
        action("skip", taken=False, reason="dry run; the gradient norm is nan"),
    ]
    assert summarize_actions(done).splitlines() == [
        "the Guard clipped 1 gradient, skipped 2 steps, compared with a snapshot 1 time, in vain, rolled back 1 time, "
        "held the learning rate 1 time",
        "  dry run, it would have skipped step 0",
        "  it did not roll back: its budget of 3 in 1,000 steps is spent",
        "  cost: 42 steps of training and 1 s",
    ]


def test_a_dry_run_is_summed_up_by_what_it_would_have_done_first() -> None:
    def dry(kind: str, *steps: int) -> list[Action]:
        return [action(kind, step=step, taken=False, reason="dry run; the loss rose") for step in steps]

    def summary(*actions: Action) -> str:
        return summarize_actions(actions).splitlines()[1].strip()

    assert summary(*dry("roll_back", 180, 230, 280, 1330)) == (
        "dry run, it would have rolled back at step 180; 3 later alarms may follow from the same cause"
    )
    assert summary(*dry("roll_back", 1180), *dry("skip", 3, 1500)) == (
        "dry run, it would have skipped step 3, then rolled back at step 1,180; 1 later alarm may follow from the same "
        "cause"
    )
    assert summary(*dry("roll_back", 80), *dry("skip", 80, 130)) == (
        "dry run, it would have rolled back at step 80; 1 later alarm may follow from the same cause"
    )
    assert summary(*dry("clip", 1, 2)) == "dry run, it would have clipped 2 gradients"
    assert summary(*dry("clip", 1, 2, 90), *dry("skip", 80)) == (
        "dry run, it would have clipped 2 gradients, then skipped step 80; 1 later alarm may follow from the same cause"
    )


def test_a_run_that_never_recovers_is_one_rollback_of_a_dry_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {}).train(range(80))
    with torch.no_grad():
        run.net.head.weight[0, 0] = float("nan")
    run.train(range(80, 240)).close()
    later = len(run.guard.actions) - 2  # the rollback, and the skip of the same step
    assert later > 2
    assert f"would have rolled back at step 80; {later} later alarms may follow" in run.guard.summary()


def test_the_state_can_be_saved_in_a_checkpoint(tmp_path: Path) -> None:
    guard = {**ACT, "decide": "device", "clip": gv.guard.Clip(method="tensor")}
    run = Run(tmp_path / "run", guard, optimizers=fused).train(range(12))
    state = run.guard.state_dict()
    torch.save(state, tmp_path / "checkpoint.pt")
    assert pickle.loads(pickle.dumps(state)).keys() == state.keys()
    run.guard.load_state_dict(torch.load(tmp_path / "checkpoint.pt"))
    run.close()
