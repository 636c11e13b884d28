"""The verdict: what counts by the end of a run, in one line, and how its processes ended."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradvitals as gv
from gradvitals import notices
from gradvitals.cli import main
from gradvitals.errors import ObserveError
from gradvitals.report.state import restarts, state_of
from gradvitals.report.verdict import ABOUT_MONITORING, Verdict, judge, self_reports
from gradvitals.store import writer as store_writer
from gradvitals.store.opening import pid_space
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Reading, Severity


def found(
    severity: Severity = "warning", first: int = 100, last: int | None = None, name: str = "explosion"
) -> Finding:
    return Finding(id=name, severity=severity, title="the norm jumped", first_step=first, last_step=last)


def verdict(*findings: Finding, steps: int = 1000, live: bool = False) -> Verdict:
    return judge(findings, last_step=steps - 1, steps=steps, live=live)


def test_a_resolved_spike_reads_differently_from_an_open_one() -> None:
    recovered, broken = verdict(found("critical", 500, 500)), verdict(found("critical", 500))
    assert (recovered.level, broken.level) == ("healthy", "unhealthy")
    assert recovered.headline == (
        "Healthy: 1,000 steps, 1 resolved. Earlier: the norm jumped (step 500, resolved 499 steps ago)."
    )
    assert broken.headline == "Unhealthy: the norm jumped (since step 500)."
    assert broken.counts == "1,000 steps, 1 open finding"
    assert broken.ranked[0].when(live=False) == "since step 500, ongoing when the run ended"


def test_a_verdict_shows_its_headline_in_a_shell() -> None:
    assert repr(verdict(found("critical"))) == "<Verdict Unhealthy: the norm jumped (since step 100).>"


@pytest.mark.parametrize(
    ("first_step", "tail"),
    [(5, "at step 5."), (50, "at step 5 (since step 50).")],
)
def test_a_headline_names_the_first_step_once(first_step: int, tail: str) -> None:
    finding = replace(found("critical", first_step), title="The loss became NaN at step 5")
    assert verdict(finding).headline.endswith(tail)


@pytest.mark.parametrize(
    ("severity", "first", "last", "level"),
    [
        ("warning", 900, 900, "healthy"),  # one step, a hundred steps ago
        ("warning", 985, 985, "attention"),  # one step, but fourteen steps are few
        ("warning", 100, 940, "attention"),  # resolved for 59 steps after it had lasted 841
        ("warning", 100, 500, "healthy"),  # resolved for longer than it lasted
        ("critical", 950, 950, "attention"),  # a critical one has to stay resolved for a tenth of the run
        ("critical", 880, 890, "healthy"),
        ("critical", 100, 800, "attention"),
        ("info", 100, 998, "healthy"),
    ],
)
def test_a_resolved_finding_weighs_less_the_longer_it_is_resolved(
    severity: Severity, first: int, last: int, level: str
) -> None:
    assert verdict(found(severity, first, last)).level == level


def test_a_recurring_finding_counts_until_the_next_episode_is_overdue() -> None:
    episodes = [found("warning", step, step) for step in (200, 400, 600, 800)]
    assert verdict(*episodes).level == "attention"
    assert verdict(*episodes, steps=1100).level == "healthy"  # clear for longer than ever between two
    assert verdict(*episodes[2:]).level == "healthy"  # twice may be chance
    advice = [found("info", step, step) for step in (200, 400, 600, 800)]
    assert verdict(*advice).level == "healthy"


def test_findings_come_by_their_weight_then_severity_then_age() -> None:
    past = found("critical", 100, 100, "past")
    now, later = found("warning", 300, name="now"), found("warning", 400, name="later")
    note = found("info", 5, name="note")
    ordered = verdict(note, past, later, now).ranked
    assert [item.finding.id for item in ordered] == ["now", "later", "past", "note"]
    assert [item.weight for item in ordered] == ["warning", "warning", "info", "info"]
    assert [item.clear_steps for item in ordered] == [None, None, 899, None]


def test_nothing_found() -> None:
    assert verdict().headline == "Healthy: 1,000 steps, no findings."
    assert verdict().worst is None
    assert not verdict().reaches("info")
    assert verdict(steps=12).headline == "Nothing wrong yet, but it is early: 12 steps."
    assert verdict(live=True).headline == "Healthy: 1,000 steps so far, no findings."


@pytest.mark.parametrize(
    ("findings", "counts"),
    [
        ([found()], "1 open finding"),
        ([found(), found(name="other"), found(last=200)], "2 open findings, 1 resolved"),
        ([found("info"), found(last=200)], "1 note (gradient explosion), 1 resolved"),
        (
            [found("info"), found("critical"), found("info", last=300)],
            "1 open finding, 1 note (gradient explosion), 1 resolved (gradient explosion)",
        ),
        ([found(last=200), found(last=300)], "2 resolved"),
    ],
)
def test_open_and_resolved_findings_are_counted_after_what_is_wrong(findings: list[Finding], counts: str) -> None:
    judged = verdict(*findings)
    assert judged.counts == f"1,000 steps, {counts}"
    assert (judged.counts in judged.headline) == (judged.level == "healthy")
    assert str(judged).count(judged.counts) == 1


def test_reaches_compares_by_weight() -> None:
    recovered = verdict(found("critical", 100, 100))
    assert recovered.reaches("info")
    assert not recovered.reaches("warning")
    assert verdict(found("warning")).reaches("warning")
    assert not verdict(found("warning")).reaches("critical")


def test_self_reports_do_not_count() -> None:
    error = RuntimeError("full")
    own = [
        notices.source_unavailable("adam", "no averages", 0),
        notices.readings_thinned(5, spent=0.1, budget=0.01, every=100, norm_every=2),
        notices.monitor_error("stats", error, 7),
        notices.monitor_error("observe", ObserveError("observe got a str as loss"), 7),
        notices.store_error(OSError("full"), Path("run"), 8),
        notices.guard_error(error, 9),
        notices.snapshot_error("the disk is full", 10),
        notices.sink_error("TensorBoard", error, 11),
    ]
    assert {finding.id for finding in own} == set(ABOUT_MONITORING)
    judged = verdict(*own, found())
    assert [finding.id for finding in judged.findings] == ["explosion"]
    assert verdict(*own).level == "healthy"
    assert list(self_reports([found(), *own])) == own


def test_json_has_open_findings_and_weights() -> None:
    judged = verdict(found("critical", 100, 100), found("warning", 200, name="other"))
    assert judged.to_json() == {
        "level": "attention", "headline": judged.headline, "counts": judged.counts, "cause": None, "fix": None,
        "change": None, "snippet": None, "steps": 1000, "open": 1, "resolved": 1, "worst": "other", "live": False,
    }  # fmt: skip
    past = judged.ranked[1].to_json()
    assert (past["weight"], past["open"], past["clear_steps"], past["severity"]) == ("info", False, 899, "critical")


# -- how it ended ---------------------------------------------------------------------------------------------------


def test_a_crash_is_open() -> None:
    crash = notices.training_stopped(RuntimeError("CUDA error: device-side assert triggered"), 150)
    alone = verdict(crash, steps=150)
    assert (alone.level, alone.num_open) == ("unhealthy", 1)
    assert alone.headline == (
        "Unhealthy: stopped at step 150 by RuntimeError: CUDA error: device-side assert triggered."
    )
    assert alone.counts == "150 steps, no other findings"
    assert alone.ranked[0].when(live=False) == "at step 150, where the run ended"
    assert alone.cause
    assert "CUDA_LAUNCH_BLOCKING=1" in str(alone.fix)
    after = verdict(found("critical", 140), crash, steps=150)
    assert after.worst is not None
    assert after.worst.finding is crash
    assert after.headline.endswith(" triggered. Before that: the norm jumped (since step 140).")
    assert after.counts == "150 steps, 1 open finding before"


def test_a_stopped_run_is_not_live() -> None:
    crash = notices.training_stopped(ValueError("bad sample"), 101, rank=1)
    stopped = verdict(crash, steps=101, live=True)
    assert not stopped.live
    assert stopped.headline == "Unhealthy: stopped at step 101 on rank 1 by ValueError: bad sample."


def test_a_run_continued_after_a_crash_is_judged_by_what_came_then() -> None:
    crash = notices.training_stopped(RuntimeError("boom"), 150)
    assert verdict(crash, steps=160).level == "attention"
    assert verdict(crash, steps=400).level == "healthy"
    assert "step 150, resolved 9 steps ago" in verdict(crash, steps=160).headline


def test_a_run_stopped_by_hand_is_no_alarm() -> None:
    by_hand = notices.training_stopped(KeyboardInterrupt(), 150)
    assert verdict(by_hand, steps=150).headline == "Healthy: 150 steps, no findings. Stopped manually at step 150."
    early = verdict(notices.training_stopped(KeyboardInterrupt(), 30), steps=30)
    assert early.headline == "Nothing wrong yet, but it is early: 30 steps. Stopped manually at step 30."
    both = verdict(by_hand, found("warning", 140), steps=150)
    assert both.level == "attention"
    assert both.headline == "Needs attention: the norm jumped (since step 140). Stopped manually at step 150."


# -- in Python ------------------------------------------------------------------------------------------------------


def test_a_run_has_a_verdict_that_prints_and_displays_itself(tmp_path: Path) -> None:
    finding = Finding(
        id="explosion",
        severity="critical",
        title="the norm of <b> rose",
        first_step=40,
        causes=("a bad batch", "the rate"),
        fixes=("skip\x1b the batch", "lower the rate"),
    )
    with RunWriter(tmp_path / "run", meta={"facts": {}}) as writer:
        for step in range(60):
            writer.write(Reading(step=step, time=0.0, values={"loss": 2.0 - step / 60, "grad/norm": 1.0}))
        writer.write(finding)
    with gv.open_run(tmp_path / "run") as run:
        verdict = run.verdict
    assert isinstance(verdict, gv.Verdict)
    assert (verdict.level, verdict.cause, verdict.fix) == ("unhealthy", "a bad batch", "skip\x1b the batch")
    assert verdict.findings == (finding,)
    assert "loss_nonfinite" in verdict.checks_passed
    assert "loss_nonfinite" not in verdict.checks_skipped
    headline, cause, fix, checks = str(verdict).splitlines()
    assert headline == verdict.headline
    assert (cause, fix) == ("Likely cause: a bad batch", "Fix: skip\\x1b the batch")
    passed = f"{len(verdict.checks_passed)} checks passed, {len(verdict.checks_skipped)} skipped"
    assert checks == f"60 steps, 1 open finding; {passed}"
    shown = verdict._repr_html_()
    assert "&lt;b&gt;" in shown
    assert all(part in shown for part in ("Unhealthy: the norm", "a bad batch", checks))


def test_a_healthy_verdict_has_no_cause_and_no_fix() -> None:
    resolved = verdict(found("critical", 100, 100))
    assert (resolved.level, resolved.cause, resolved.fix) == ("healthy", None, None)
    assert str(resolved) == resolved.headline


def test_a_healthy_run_that_stopped_while_it_learned_says_so_and_what_to_do() -> None:
    note = replace(found("info", name="still_falling"), title="The loss was still falling", causes=("short",))
    early = verdict(replace(note, fixes=("Train longer",)))
    assert (early.level, early.cause, str(early.fix)) == ("healthy", "short", "Train longer")
    assert early.headline == "Healthy, but the loss was still falling."
    assert str(early).endswith("1,000 steps, 1 note (stopped while learning)")
    serious = verdict(replace(note, fixes=("Train longer",)), found())
    assert serious.headline == "Needs attention: the norm jumped (since step 100)."


def test_a_note_is_named() -> None:
    assert verdict(found("info", name="noisy_gradients")).headline == "Healthy: 1,000 steps, 1 note (noisy gradients)."
    names = ("noisy_gradients", "clip_idle", "estimator_unreliable", "batch_too_small", "my_own_rule")
    assert verdict(*(found("info", name=name) for name in names)).headline == (
        "Healthy: 1,000 steps, 5 notes (noisy gradients, clipping never triggers, GSNR uncertain, 2 more)."
    )
    assert verdict(found("info", name="my_own_rule")).headline == "Healthy: 1,000 steps, 1 note (my_own_rule)."
    assert verdict(found("info", last=300, name="clip_idle")).headline == (
        "Healthy: 1,000 steps, 1 resolved (clipping never triggers)."
    )


# -- how the processes of a run ended --------------------------------------------------------------------------------

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
    assert said.startswith("Needs attention: The run was cut off at step 99: it was not closed")
    assert "out of memory" in said
    assert "ongoing" not in doctor(tmp_path, "-v")
    assert "When          at step 99, where the run ended\n" in doctor(tmp_path, "-v")
    data = json.loads(doctor(tmp_path, "--json"))
    assert (data["state"], data["verdict"]["worst"], data["failed"]) == ("stopped", "run_cut_off", True)


def test_a_cut_off_run_says_when_its_process_was_last_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment(tmp_path, 0, 9, closed=False)
    with open_run(tmp_path) as run:
        monkeypatch.setattr("time.time", lambda at=run.meta["heartbeat"]: at + 90)
        silent = "The run was cut off at step 9: it was not closed, and its process was last seen 1 min 30 s ago"
        gone = "The run was cut off at step 9: it was not closed, and its process is gone, last seen 1 min 30 s ago"
        assert run.verdict.findings[0].title == silent  # this process wrote it, and is there
        monkeypatch.setattr("gradvitals.store.opening.is_alive", lambda pid: pid != os.getpid())
        assert run.verdict.findings[0].title == (gone if pid_space() is not None else silent)


def test_a_run_that_reported_why_it_stopped_is_not_cut_off(tmp_path: Path) -> None:
    segment(tmp_path, 0, 99, notices.training_stopped(ValueError("bad sample"), 100, rank=1), closed=False)
    time.sleep(0.05)
    said = doctor(tmp_path)
    assert said.startswith("Unhealthy: stopped at step 100 on rank 1 by ValueError: bad sample.\n")
    assert ": 100 steps, no other findings; " in said
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


def test_a_crash_at_the_step_of_the_restart_is_reported_too(tmp_path: Path) -> None:
    segment(tmp_path, 0, 80, notices.training_stopped(RuntimeError("boom"), 80))
    segment(tmp_path, 81, 120)
    assert "Restarted once, at step 81; before that: Training stopped with RuntimeError: boom (step 80)" in doctor(
        tmp_path
    )
