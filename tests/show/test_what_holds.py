"""What is said of a run holds for what it speaks of: up to which step, of which loss, from which tensor on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.show.checkup import Checkup, examine
from gradvitals.show.run_page import run_page
from gradvitals.show.standouts import first_nonzero
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, TensorInfo

LAYERS = ("0", "1", "2", "3")


def layout() -> Layout:
    tensors = tuple(
        TensorInfo(index=2 * depth + i, name=f"{name}.{kind}", shape=(2,), dtype="float32", layer=name, depth=depth)
        for depth, name in enumerate(LAYERS)
        for i, kind in enumerate(("weight", "bias"))
    )
    return Layout(tensors=tensors, layers=LAYERS)


def write(
    path: Path,
    *findings: Finding,
    steps: int = 400,
    loss: bool = True,
    broken: Callable[[int], Any] = lambda step: np.zeros(8),
    meta: dict[str, Any] | None = None,
) -> Path:
    with RunWriter(path, meta={"facts": {}, **(meta or {})}) as writer:
        writer.write(layout())
        for step in range(steps):
            values = {"grad/norm": 1.0, "lr": 0.1, "grad/nonfinite": float(broken(step).sum())}
            values |= {"loss": 2.0 - 0.001 * step} if loss else {}
            tensors = {"grad/norm": np.ones(8), "grad/nonfinite": broken(step)}
            writer.write(Reading(step=step, time=float(step), values=values, tensors=tensors))
        for finding in findings:
            writer.write(finding)
    return path


def checkup(path: Path) -> Checkup:
    with open_run(path) as run:
        return examine(run)


def printed(*args: str) -> str:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, args).stdout


def nan_at(step: int, last: int | None = None) -> Finding:
    return Finding(id="nonfinite", severity="critical", title="NaN", first_step=step, last_step=last)


def test_after_nan_nothing_is_fine_any_more(tmp_path: Path) -> None:
    path = write(tmp_path / "run", nan_at(251))
    judged = checkup(path)
    assert judged.fine_until == judged.to_json()["fine_until"] == 250
    assert "\nFine up to step 250: " in printed("doctor", str(path))
    assert "\nWhat is fine up to step 250, before NaN or Inf\n" in printed("doctor", str(path), "--all")
    with open_run(path) as run:
        assert "What is fine up to step 250, before NaN or Inf (" in run_page(run)


def test_a_nan_that_is_over_takes_nothing_from_what_is_fine(tmp_path: Path) -> None:
    path = write(tmp_path / "run", nan_at(251, 251))
    assert checkup(path).fine_until is None
    assert "up to step" not in printed("doctor", str(path))


def test_what_takes_more_steps_than_were_finite_was_not_judged(tmp_path: Path) -> None:
    late, early = checkup(write(tmp_path / "late", nan_at(251))), checkup(write(tmp_path / "early", nan_at(60)))
    assert "loss_plateau" in {item.id for item in late.fine}
    reasons = {name: item.reason for item in early.not_judged for name in item.ids}
    assert reasons["loss_plateau"] == "too early: it needs more than 100 steps before NaN or Inf"
    none = checkup(write(tmp_path / "none", nan_at(0)))
    assert none.fine == ()
    assert "stale_gradients" in next(item.ids for item in none.not_judged if item.reason == "no step was finite")


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({}, "No loss was observed, so nothing about it was judged: call observe(loss), after backward, on what"),
        ({"imported": {}}, "No loss was imported, so nothing about it was judged: --map COLUMN=loss says which"),
    ],
)
def test_the_verdict_says_that_no_loss_was_observed(tmp_path: Path, meta: dict[str, Any], said: str) -> None:
    assert said in checkup(write(tmp_path / "without", loss=False, meta=meta)).verdict.line
    assert "loss was" not in checkup(write(tmp_path / "with", meta=meta)).verdict.line


def test_the_tensors_that_broke_first_are_listed_as_backward_comes_to_them(tmp_path: Path) -> None:
    path = write(tmp_path / "run", broken=lambda step: np.where((step >= 20) & (np.arange(8) != 7), 1.0, 0.0))
    with open_run(path) as run:
        worst = first_nonzero(run, "grad/nonfinite")
    assert [(item.name, item.step) for item in worst] == [
        ("3.weight", 20),
        ("2.bias", 20),
        ("2.weight", 20),
        ("1.bias", 20),
        ("1.weight", 20),
    ]
