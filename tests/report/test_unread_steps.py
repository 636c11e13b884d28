"""If not every step was read, steps count as steps; whether a check has seen enough goes by readings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from gradvitals.advise import advise
from gradvitals.report.report import Report
from gradvitals.report.verdict import Verdict, judge
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading


def write(path: Path, steps: Iterable[int], first: int = 0) -> None:
    """One process reads these steps of a run, and continues it if `first` is not 0."""
    with RunWriter(path, meta={"facts": {}}, resume=first > 0, first_step=first) as writer:
        for step in steps:
            writer.write(Reading(step=step, time=float(step), values={"grad/norm": 1.0, "loss": 1.0, "lr": 0.1}))


def counts(path: Path) -> tuple[int, int, int]:
    """Returns steps, those of them that were read, and the steps that the advice is based on."""
    with open_run(path) as run:
        verdict = run.verdict
        assert verdict.to_json()["steps"] == verdict.steps
        return verdict.steps, verdict.read, advise(run).steps


def test_steps_that_were_not_read_count(tmp_path: Path) -> None:
    write(tmp_path, [*range(500), *range(500, 3000, 5), 2999])
    assert counts(tmp_path) == (3000, 1001, 3000)
    with open_run(tmp_path) as run:
        assert run.verdict.headline.startswith("Healthy: 3,000 steps")


def test_a_process_that_was_redone_does_not_split_the_steps(tmp_path: Path) -> None:
    write(tmp_path, range(0, 100, 10))
    write(tmp_path, range(75, 105, 10), first=75)
    write(tmp_path, range(50, 200, 10), first=50)
    assert counts(tmp_path) == (41 + 141, 5 + 15, 41 + 141)


def test_few_readings_are_not_enough_however_far_apart_they_are(tmp_path: Path) -> None:
    write(tmp_path, range(0, 1000, 50))
    with open_run(tmp_path) as run:
        report = Report(run)
        assert report.verdict.headline.startswith(
            "Nothing wrong yet, but it is early: 951 steps (gradients read at 20)."
        )
        reasons = {rule: reason for reason, rules in report.checks.skipped.items() for rule in rules}
    assert reasons["loss_plateau"] == "too early: needs more than 100 steps"


@pytest.mark.parametrize(("last", "level"), [(2650, "healthy"), (2750, "attention")])
def test_a_critical_finding_has_to_stay_resolved_for_a_tenth_of_the_steps(last: int, level: str) -> None:
    spike = Finding(id="explosion", severity="critical", title="the norm jumped", first_step=last, last_step=last)
    verdict: Verdict = judge([spike], last_step=2999, steps=3000, read=1000)
    assert (verdict.level, verdict.steps, verdict.read) == (level, 3000, 1000)
