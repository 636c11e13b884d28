"""How a finding is shown: its numbers, and in one line if it is routine; and a loss that was never recorded."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.diagnose import RULES, Observation
from gradvitals.diagnose.message import explain
from gradvitals.errors import ObserveError
from gradvitals.notices import observe_ignored
from gradvitals.report.describe import evidence
from gradvitals.report.html import render_html
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading, Severity


def test_only_numbers_with_a_meaning_are_shown() -> None:
    unknown = {"loss": math.nan, "ratio": 0.742, "lr": math.nan}
    assert list(evidence({"seen": unknown, "expected": {"loss": "a finite number"}})) == [
        "loss NaN (healthy: a finite number)"
    ]
    seen = {"ratio": 0.3, "lr": "nan"}
    told = {"seen": seen, "expected": {"ratio": "under 0.1"}, "latest": {"step": 9, "ratio": 0.4, "lr": "nan"}}
    assert list(evidence(told)) == ["ratio 0.3 (healthy: under 0.1)", "at step 9: ratio 0.4"]
    assert list(evidence({"seen": {"share": 0.00103}, "expected": {"share": 0.0}})) == [
        "0.103% of their numbers, normally none"
    ]
    assert list(evidence({"seen": {"share": 1e-8}, "expected": {"share": "over 1e-06"}})) == [
        "share 1.00e-08 (healthy: over 1e-06)"
    ]


def test_a_swing_says_what_it_is_of() -> None:
    tiny = {"seen": {"swing": 0.0502}, "expected": {"swing": 0.05}}
    assert list(evidence(tiny)) == ["spread of recorded losses over their mean 0.0502, normally 0.05"]
    assert "the recorded loss; if the loop smooths it" in RULES["batch_too_small"].message.causes["tiny"]
    both = {"swing": 0.171, "loss_swing": 0.156}
    assert list(evidence({"seen": both, "expected": {"swing": "under 0.8", "loss_swing": "under 0.12"}})) == [
        "spread of the norm's logarithm 0.171 (healthy: under 0.8)",
        "spread of recorded losses over their mean 0.156 (healthy: under 0.12)",
    ]


@pytest.mark.parametrize("observed", [False, True])
def test_a_missing_loss_is_in_the_headline(tmp_path: Path, observed: bool) -> None:
    unobserved = observe_ignored(ObserveError("observe got a str as loss; expected a tensor or a number"), 0)
    with RunWriter(tmp_path / "run", meta={"facts": {}}) as writer:
        for step in range(60):
            values = {"grad/norm": 1.0} | ({"loss": 1.0} if observed else {})
            writer.write(Reading(step=step, time=step, values=values))
        writer.write(unobserved)
        writer.commit()
    with open_run(tmp_path / "run") as run:
        first = run.verdict.headline
    said = " No loss was recorded: observe got a str as loss; expected a tensor or a number."
    assert first.endswith(said) == (not observed)


def noisy(path: Path, severity: Severity = "info") -> Path:
    seen = {"median": 0.0321, "batch_size": 16_384.0, "share": "93 % of coordinates"}
    told = explain(RULES["noisy_gradients"].message, Observation(severity=severity, seen=seen), 100)
    found = Finding(
        id="noisy_gradients", severity=severity, first_step=50, evidence={"seen": seen}, **dataclasses.asdict(told)
    )
    with RunWriter(path, meta={"facts": {}}) as writer:
        for step in range(60):
            writer.write(Reading(step=step, time=step, values={"grad/norm": 1.0, "loss": 1.0}))
        writer.write(found)
    return path


def lines(*args: str) -> list[str]:
    return CliRunner(env={"COLUMNS": "80"}).invoke(main, args).stdout.splitlines()


def test_a_routine_note_takes_one_line(tmp_path: Path) -> None:
    run = str(noisy(tmp_path / "run"))
    line = "info: noisy gradients, as in nearly every healthy run [noisy_gradients]"
    doctor, report = lines("doctor", "-v", run), lines("report", run)
    assert doctor[doctor.index(line) - 1 : doctor.index(line) + 2] == ["", line, ""]
    assert report[report.index(line) + 1].startswith("`gradvitals doctor -v` has")
    whole = lines("doctor", run, "--all")
    assert line not in whole
    title = RULES["noisy_gradients"].message.title.split(":")[0]
    assert any(line.startswith(f"info: {title}") for line in whole)
    assert any(line.startswith("  Fix           No action needed while the loss falls") for line in whole)
    with open_run(run) as opened:
        assert '<details open="open"><summary><span class="flag"' not in render_html(opened)


def test_a_number_that_was_not_read_later_is_no_news() -> None:
    content = {"seen": {"norm": 28.5}, "expected": {}, "latest": {"step": 321, "norm": "nan", "steps": 300}}
    assert list(evidence(content, "stale_gradients")) == ["gradient norm 28.5"]
    assert list(evidence(content, "nonfinite")) == ["gradient norm 28.5", "at step 321: gradient norm NaN"]


def test_a_ratio_is_called_by_what_it_is_of() -> None:
    content = {"seen": {"ratio": 0.3}, "expected": {"ratio": "under 0.1"}, "latest": {"step": 9, "ratio": 0.4}}
    assert list(evidence(content, "update_ratio")) == [
        "update over weight norm 0.3 (healthy: under 0.1)",
        "at step 9: update over weight norm 0.4",
    ]
