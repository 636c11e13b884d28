"""A run that tells more than its readers take, or tells it twice, goes on, and can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradvitals as gv
from gradvitals.store import census
from gradvitals.store.writer import RunWriter
from gradvitals.types import Action, Finding


def action(step: int) -> Action:
    return Action(kind="clip", step=step, finding="explosion", taken=True, reason="the norm is too large")


def finding(step: int, title: str = "spike") -> Finding:
    return Finding(id="explosion", severity="warning", title=title, first_step=step)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(census.LIMITS, "actions", 50)
    monkeypatch.setitem(census.LIMITS, "finding_bytes", 20_000)


@pytest.mark.usefixtures("few")
def test_a_run_with_too_many_actions_can_be_read(tmp_path: Path) -> None:
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(100):
            writer.write(action(step))
        writer.commit()
    with gv.open_run(tmp_path) as run:
        assert [each.step for each in run.actions()] == list(range(45))
        assert run.meta["dropped"] == 55


@pytest.mark.usefixtures("few")
def test_what_is_there_counts_after_a_resume(tmp_path: Path) -> None:
    for first in (0, 40):
        with RunWriter(tmp_path, meta={}, resume=first > 0, first_step=first) as writer:
            for step in range(first, first + 40):
                writer.write(action(step))
            writer.commit()
    with gv.open_run(tmp_path) as run:
        assert len(run.actions()) == 45


@pytest.mark.usefixtures("few")
def test_findings_are_bounded_by_what_they_hold_and_old_ones_may_still_close(tmp_path: Path) -> None:
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(10):
            writer.write(finding(step, "x" * 3_000))
        writer.write(finding(0, "over"))
        writer.write(finding(11, "small"))  # there is room again
        writer.commit()
    with gv.open_run(tmp_path) as run:
        found = run.findings()
    assert [each.first_step for each in found] == [0, 1, 2, 3, 4, 11]
    assert found[0].title == "over"


def test_an_action_that_is_told_again_after_a_resume_is_there_once(tmp_path: Path) -> None:
    with RunWriter(tmp_path, meta={}) as writer:
        for step in (4, 24, 33):
            writer.write(action(step))
    with RunWriter(tmp_path, meta={}, resume=True, first_step=30) as writer:
        for step in (24, 33, 33):  # the first was known to the other process already, the others are done again
            writer.write(action(step))
    with gv.open_run(tmp_path) as run:
        assert [each.step for each in run.actions()] == [4, 24, 33, 33]
