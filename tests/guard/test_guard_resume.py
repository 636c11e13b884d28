"""A run that was killed and resumed is the run that was not killed, bit for bit, and took the same actions."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_process import run
from guarded_runs import NAN, Run
from warm_process import WarmProcess

import gradvitals as gv
from gradvitals.errors import GradvitalsError

SAME = ("step", "monitor", "digest", "rate", "ticks", "learned", "spikes")
SCRIPT = Path(__file__).parent / "guarded_process.py"


def in_a_process(folder: Path, steps: int, decide: str, kill_after: int | None = None) -> dict[str, Any] | None:
    arguments = [folder, steps, decide, *([kill_after] if kill_after is not None else [])]
    done = WarmProcess(SCRIPT, *arguments, log=folder.with_suffix(f".{kill_after}.log"))
    status = done.wait(100)
    if kill_after is not None:
        assert status == -9, done.output
        return None
    assert status == 0, done.output
    told: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return told


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What a run comes to that was never killed: made once for each way to decide."""
    return cache(lambda decide: run(tmp_path_factory.mktemp("whole"), 60, decide))


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert {name: one[name] for name in SAME} == {name: other[name] for name in SAME}


def test_saving_snapshots_changes_nothing(tmp_path: Path) -> None:
    same(run(tmp_path / "with", 40, "host"), run(tmp_path / "without", 40, "host", snapshots=False))


@pytest.mark.slow
@pytest.mark.parametrize(("decide", "kill_after"), [("host", 3), ("host", 38), ("device", 38)])
def test_a_killed_run_continues_as_if_it_had_not_been(
    decide: str, kill_after: int, tmp_path: Path, whole: Callable[[str], dict[str, Any]]
) -> None:
    """Steps are skipped before and after the kill; at 38 two of them are among those just before it."""
    uncut = whole(decide)
    assert [action[1] for action in uncut["actions"] if action[0] == "skip"] == [4, 24, 33, 34, 52]
    in_a_process(tmp_path / "killed", 60, decide, kill_after)
    resumed = in_a_process(tmp_path / "killed", 60, decide)
    assert resumed is not None
    assert resumed["began"] <= kill_after
    assert (resumed["began"] > 0) == (kill_after > 5)
    same(resumed, uncut)
    assert resumed["kept"] == [list(action) for action in uncut["kept"]], "every action is in the record once"


@pytest.mark.parametrize("decide", ["host", "device"])
def test_in_the_same_process(decide: str, tmp_path: Path, whole: Callable[[str], dict[str, Any]]) -> None:
    run(tmp_path / "cut", 26, decide)
    resumed = run(tmp_path / "cut", 60, decide)
    assert resumed["began"] > 0
    same(resumed, whole(decide))


def test_without_a_snapshot_there_is_nothing_to_resume(tmp_path: Path) -> None:
    started = Run(tmp_path / "run", {"mode": "act", "folder": tmp_path / "snapshots"})
    assert started.guard.resume() == 0
    started.close()


def test_without_a_folder_there_is_nowhere_to_resume_from(tmp_path: Path) -> None:
    started = Run(tmp_path / "run", {"mode": "act"})
    with pytest.raises(GradvitalsError, match="there is no folder to resume from; give the Guard one"):
        started.guard.resume()
    started.close()


def test_a_guard_without_a_run_says_so() -> None:
    for call in (gv.Guard().resume, gv.Guard().state_dict):
        with pytest.raises(GradvitalsError, match="this Guard has no run yet"):
            call()


def test_a_snapshot_of_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    guard = {"mode": "act", "folder": tmp_path / "snapshots", "rollback": gv.guard.RollBack(every=5, settle=2)}
    Run(tmp_path / "run", guard).train(range(12)).close()
    other = Run(tmp_path / "other", guard, net=torch.nn.Linear(6, 1))
    before = other.all_bits()
    with pytest.raises(GradvitalsError):
        other.guard.resume()
    assert other.all_bits() == before
    other.close()


def test_a_resumed_run_can_roll_back_to_what_an_earlier_process_left(tmp_path: Path) -> None:
    guard = {
        "mode": "act",
        "folder": tmp_path / "snapshots",
        "skip": gv.guard.Skip(first_steps=10),
        "rollback": gv.guard.RollBack(every=10, settle=5),
    }
    Run(tmp_path / "run", guard).train(range(37)).close()
    resumed = Run(tmp_path / "again", guard)
    assert resumed.guard.resume() == 30
    with torch.no_grad():
        resumed.net.head.weight[0, 0] = NAN
    resumed.train(range(30, 50)).close()
    (back,) = [action for action in resumed.guard.actions if action.kind == "roll_back"]
    assert (back.taken, back.after["step"]) == (True, 30)
    assert resumed.all_bits() == Run().train([*range(30), *range(back.step + 1, 50)]).all_bits()


def test_the_state_is_reported_apart_from_that_of_other_versions(tmp_path: Path) -> None:
    started = Run(tmp_path / "run", {"mode": "act"}).train(range(3))
    state = started.guard.state_dict()
    with pytest.raises(GradvitalsError, match="the state has version 99; this Guard reads 3"):
        started.guard.load_state_dict({**state, "version": 99})
    started.close()


@pytest.mark.parametrize("decide", ["host", "device"])
def test_a_state_kept_by_the_user_has_the_same_future(decide: str, tmp_path: Path) -> None:
    """With a checkpoint of one's own: model, optimizer, Monitor and Guard."""

    def build(name: str) -> Run:
        guard = {"mode": "act", "skip": gv.guard.Skip(first_steps=10), "rollback": "off", "decide": decide}
        return Run(
            tmp_path / name,
            guard,
            optimizers=lambda net: [torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)],
            bad={26: "huge", 33: "nan", 40: "huge", 41: "huge"},
        )

    whole = build("whole").train(range(50))
    first = build("first").train(range(35))
    states = [each.state_dict() for each in (first.net, first.optimizers[0], first.monitor, first.guard)]
    second = build("second")
    for each, state in zip((second.net, second.optimizers[0], second.monitor, second.guard), states, strict=True):
        each.load_state_dict(state)
    second.train(range(35, 50))
    for each in (whole, first, second):
        each.close()
    assert second.guard.step == whole.guard.step == 46
    assert second.all_bits() == whole.all_bits()
