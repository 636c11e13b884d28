"""The advice followed by program: what counts as a change, how gaps are scored, and the command's quick path."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from experiments import grid
from experiments.advice import __main__ as command
from experiments.advice.arms import change_of, suggested_lr, untried
from experiments.advice.faults import FAULTS, bad_start
from experiments.advice.score import format_summary, summarize
from experiments.advice.tasks import TASKS, Job, Settings, train
from gradvitals.types import Fix

OWN = Settings(lr=0.1, batch_size=32)


def ranked(weight: str, *fixes: Fix, id: str = "some") -> Any:
    return SimpleNamespace(weight=weight, finding=SimpleNamespace(id=id, fixes=fixes))


def test_the_first_change_that_a_program_can_make_is_taken() -> None:
    verdict = SimpleNamespace(
        ranked=[
            ranked("warning", Fix("by hand"), Fix("longer", {"steps": 900}), id="a"),
            ranked("warning", Fix("as it is", {"lr": 0.1}), Fix("lower", {"lr": 0.01}), id="b"),
        ]
    )
    assert change_of(verdict, OWN) == ("b", {"lr": 0.01})  # type: ignore[arg-type]
    note = SimpleNamespace(ranked=[ranked("info", Fix("lower", {"lr": 0.01}))])
    assert change_of(note, OWN) == ("", {})  # type: ignore[arg-type]


def test_gaps_are_scored_by_the_reference_of_the_same_seed() -> None:
    whose = {"kind": "course", "task": "mlp", "place": 0, "fault": "x", "seed": 100}
    applied = [{"by": "a", "change": {"lr": 1.0}, "before": {"lr": 2.0}}] * 3
    lines = [
        {"kind": "reference", "task": "mlp", "seed": 100, "loss": 1.0, "settings": vars(OWN)},
        {**whose, "arm": "advice", "losses": [3.0, 2.0, 2.5, 1.0], "applied": applied},
        {**whose, "arm": "random", "losses": [4.0, 2.5, 2.6], "applied": []},
    ]
    found = summarize(lines)
    assert found["arms"]["advice"]["median"] == [0.5, 0.25, 1.0]
    assert found["arms"]["advice, best so far"]["median"] == [0.5, 0.5, 1.0]
    assert found["arms"]["random"]["median"] == [0.0, 0.25, 0.25]
    assert (found["rounds"], found["worse"], found["harm"][0]["ratio"]) == (3, 1, 1.25)
    assert "| a " in format_summary(found)


def test_the_finder_takes_the_steepest_fall() -> None:
    lrs = [10.0 ** (step / 10) for step in range(100)]
    losses = [2.0] * 50 + [1.0] * 20 + [50.0] * 30
    found = suggested_lr(lrs, losses)
    assert found is not None
    assert lrs[48] <= found <= lrs[70]
    assert suggested_lr(lrs[:5], losses[:5]) is None


def test_a_sweep_goes_on_until_the_best_lies_inside() -> None:
    tried: list[tuple[Settings, float]] = []
    while some := untried("mlp", tried):
        tried += [(one, abs(math.log(one.lr / 1.3)) + abs(math.log(one.batch_size / 16))) for one in some]
    best = min(tried, key=lambda item: item[1])[0]
    assert best.batch_size == 16
    assert 0.7 < best.lr < 2.4
    assert len(tried) < 45


def test_the_grid_ends_around_the_best() -> None:
    tried: dict[grid.Point, float] = {}
    while points := grid.untried(tried, 2):
        tried |= {point: (point[0] - 3) ** 2 + (point[1] + 2) ** 2 for point in points}
    assert grid.best_point(tried) == (3, -2)


def test_every_task_has_every_start() -> None:
    for name, task in TASKS.items():
        starts = [bad_start(name, place, task.start)[1] for place in range(len(FAULTS))]
        assert len(starts) == 20
        assert all(start != task.start for start in starts)
        assert starts == [bad_start(name, place, task.start)[1] for place in range(len(FAULTS))]


@pytest.mark.parametrize("task", ["mlp", "lstm", "gpt", "regression"])
def test_a_task_learns(task: str) -> None:
    torch.set_num_threads(1)
    loss, losses = train(Job(task=task, settings=TASKS[task].start, seed=0, scale=0.05))
    assert losses[-1] < 0.95 * losses[0]
    assert loss <= TASKS[task].chance


def test_quick_path_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TASKS", {"regression": TASKS["regression"]})
    monkeypatch.setattr(command, "QUICK_STARTS", 1)
    monkeypatch.setattr(command, "QUICK_SCALE", 0.02)
    done = CliRunner().invoke(command.main, ["--quick", "--workers", "1", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["starts"] == 1
    file = tmp_path / "kept.jsonl"
    file.write_text("")
    assert CliRunner().invoke(command.main, ["--report", str(file)]).exit_code == 0
