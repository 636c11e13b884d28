"""How a run ended: cut off, stopped by an error, continued."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from gradvitals import notices
from gradvitals.cli import main
from gradvitals.report.verdict import restarts, state_of
from gradvitals.store import writer as store_writer
from gradvitals.store.process import pid_space
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading

META = {"facts": {}}


@pytest.fixture(autouse=True)
def soon_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run counts as live for five seconds; here it is over at once."""
    monkeypatch.setattr("gradvitals.store.reader.LIVE_SECONDS", 0.0)
    monkeypatch.setattr(store_writer, "LIVE_SECONDS", 0.0)


def segment(path: Path, first: int, last: int, *findings: Finding, closed: bool = True) -> None:
    writer = RunWriter(path, meta=META, resume=first > 0, first_step=first)
    for step in range(first, last + 1):
        writer.write(Reading(step=step, time=float(step), values={"grad/norm": 1.0, "loss": 1.0}))
    for finding in findings:
        writer.write(finding)
    writer.commit()
    writer.close() if closed else writer.discard()


def doctor(path: Path, *options: str) -> str:
    return CliRunner(env={"COLUMNS": "300"}).invoke(main, ["doctor", str(path), *options]).output


def test_a_killed_run_is_not_called_healthy(tmp_path: Path) -> None:
    segment(tmp_path, 0, 99, closed=False)
    time.sleep(0.05)
    with open_run(tmp_path) as run:
        assert state_of(run) == "stopped"
        assert run.verdict.level == "attention"
    said = doctor(tmp_path)
    assert said.startswith(
        "Needs attention: 100 steps, 1 open finding. Worst: The run was cut off at step 99: it was not closed"
    )
    assert "out of memory" in said
    data = json.loads(doctor(tmp_path, "--json"))
    assert (data["state"], data["verdict"]["worst"], data["failed"]) == ("stopped", "run_cut_off", True)


def test_a_cut_off_run_says_when_its_process_was_last_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment(tmp_path, 0, 9, closed=False)
    with open_run(tmp_path) as run:
        monkeypatch.setattr("time.time", lambda at=run.meta["heartbeat"]: at + 90)
        silent = "The run was cut off at step 9: it was not closed, and its process was last seen 1 min 30 s ago"
        gone = "The run was cut off at step 9: it was not closed, and its process is gone, last seen 1 min 30 s ago"
        assert run.verdict.findings[0].title == silent  # this process wrote it, and is there
        monkeypatch.setattr("gradvitals.store.process.is_alive", lambda pid: pid != os.getpid())
        assert run.verdict.findings[0].title == (gone if pid_space() is not None else silent)


def test_a_run_that_reported_why_it_stopped_is_not_cut_off(tmp_path: Path) -> None:
    segment(tmp_path, 0, 99, notices.training_stopped(ValueError("bad sample"), 100, rank=1), closed=False)
    time.sleep(0.05)
    said = doctor(tmp_path)
    assert said.startswith("Unhealthy: stopped at step 100 on rank 1 by ValueError: bad sample. 100 steps, no other")
    assert "run_cut_off" not in said


def test_a_crash_before_a_restart_is_reported_though_its_steps_were_redone(tmp_path: Path) -> None:
    crash = notices.training_stopped(RuntimeError("CUDA error: out of memory"), 80)
    segment(tmp_path, 0, 80, crash)
    segment(tmp_path, 50, 120)
    with open_run(tmp_path) as run:
        assert "training_stopped" not in [finding.id for finding in run.findings]
        [again] = restarts(run)
    assert (again.step, again.crashed) == (50, True)
    line = "Restarted once, at step 50; before that: Training stopped with RuntimeError: CUDA error: out of memory"
    assert line in doctor(tmp_path)


def test_each_restart_is_listed_with_its_reason(tmp_path: Path) -> None:
    segment(tmp_path, 0, 60, closed=False)
    segment(tmp_path, 40, 90, notices.ranks_lost(TimeoutError(), [3], 90))
    segment(tmp_path, 80, 130)
    segment(tmp_path, 131, 200)
    said = doctor(tmp_path, "-v")
    assert "Restarted 3 times (2 after a crash), last at step 131; before that: the run was closed" in said
    listed = said.split("Restarts\n")[1].splitlines()[:3]
    assert [line.strip("- ").split(";")[0] for line in listed] == ["at step 40", "at step 80", "at step 131"]
    assert "the process was cut off" in listed[0]
    assert "Rank 3 no longer answers" in listed[1]
    reasons = [restart["crashed"] for restart in json.loads(doctor(tmp_path, "--json"))["restarts"]]
    assert reasons == [True, True, False]


def test_a_report_names_the_number_of_ranks(tmp_path: Path) -> None:
    with RunWriter(tmp_path, meta={**META, "ranks": 8}) as writer:
        writer.write(Reading(step=0, time=0.0, values={"grad/norm": 1.0}))
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["report", str(tmp_path)])
    assert ", 8 ranks, " in result.output
    assert json.loads(CliRunner().invoke(main, ["report", str(tmp_path), "--json"]).output)["num_ranks"] == 8


def test_several_ranks_that_could_not_be_compared_are_not_called_one_process(tmp_path: Path) -> None:
    with RunWriter(tmp_path, meta={**META, "ranks": 2}) as writer:
        for step in range(60):
            values = {"grad/norm": 1.0, "ranks/norm_dispersion": 0.1}
            writer.write(Reading(step=step, time=0.0, values=values))
    said = doctor(tmp_path, "--all")
    assert "each shard of the weights is on one rank only (Replicas differ)" in said
    assert "it needs several processes" not in said


def test_a_closed_run_is_not_cut_off(tmp_path: Path) -> None:
    segment(tmp_path, 0, 99)
    assert doctor(tmp_path).startswith("Healthy: 100 steps, no findings.\n")


def test_a_crash_at_the_step_of_the_restart_is_reported_too(tmp_path: Path) -> None:
    segment(tmp_path, 0, 80, notices.training_stopped(RuntimeError("boom"), 80))
    segment(tmp_path, 81, 120)
    assert "Restarted once, at step 81; before that: Training stopped with RuntimeError: boom (step 80)" in doctor(
        tmp_path
    )
