from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import gradvitals as gv
from gradvitals import notices
from gradvitals.errors import ObserveError
from gradvitals.report.verdict import ABOUT_MONITORING, Verdict, judge, self_reports
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
        "Healthy: 1,000 steps, 1 resolved. Worst: the norm jumped (step 500, resolved 499 steps ago)."
    )
    assert broken.headline == (
        "Unhealthy: 1,000 steps, 1 open finding. Worst: the norm jumped (since step 500, ongoing when the run ended)."
    )


@pytest.mark.parametrize(
    ("first_step", "tail"),
    [(5, "at step 5 (ongoing when the run ended)."), (50, "at step 5 (since step 50, ongoing when the run ended).")],
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
        ([found()], "1 open finding."),
        ([found(), found(name="other"), found(last=200)], "2 open findings, 1 resolved."),
        ([found("info"), found(last=200)], "1 note (gradient explosion), 1 resolved."),
        (
            [found("info"), found("critical"), found("info", last=300)],
            "1 open finding, 1 note (gradient explosion), 1 resolved (gradient explosion).",
        ),
        ([found(last=200), found(last=300)], "2 resolved."),
    ],
)
def test_the_headline_counts_open_and_resolved_findings(findings: list[Finding], counts: str) -> None:
    assert f"1,000 steps, {counts}" in verdict(*findings).headline


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
        "level": "attention", "headline": judged.headline, "cause": None, "fix": None, "change": None, "snippet": None,
        "steps": 1000, "open": 1, "resolved": 1, "worst": "other", "live": False,
    }  # fmt: skip
    past = judged.ranked[1].to_json()
    assert (past["weight"], past["open"], past["clear_steps"], past["severity"]) == ("info", False, 899, "critical")


# -- how it ended ---------------------------------------------------------------------------------------------------


def test_a_crash_is_open() -> None:
    crash = notices.training_stopped(RuntimeError("CUDA error: device-side assert triggered"), 150)
    alone = verdict(crash, steps=150)
    assert (alone.level, alone.num_open) == ("unhealthy", 1)
    assert alone.headline == (
        "Unhealthy: stopped at step 150 by RuntimeError: CUDA error: device-side assert triggered. "
        "150 steps, no other findings."
    )
    assert alone.ranked[0].when(live=False) == "at step 150, where the run ended"
    assert alone.cause
    assert "CUDA_LAUNCH_BLOCKING=1" in str(alone.fix)
    after = verdict(found("critical", 140), crash, steps=150)
    assert after.worst is not None
    assert after.worst.finding is crash
    assert after.headline.endswith(
        "150 steps, 1 open finding before. Worst: the norm jumped (since step 140, ongoing when the run ended)."
    )


def test_a_stopped_run_is_not_live() -> None:
    crash = notices.training_stopped(ValueError("bad sample"), 101, rank=1)
    stopped = verdict(crash, steps=101, live=True)
    assert not stopped.live
    assert stopped.headline.startswith("Unhealthy: stopped at step 101 on rank 1 by ValueError: bad sample. 101 steps,")


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
    assert both.headline.startswith("Needs attention: 150 steps, 1 open finding. Worst: the norm jumped (")
    assert both.headline.endswith("Stopped manually at step 150.")


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
    assert checks == f"{len(verdict.checks_passed)} checks passed, {len(verdict.checks_skipped)} skipped"
    shown = verdict._repr_html_()
    assert "&lt;b&gt;" in shown
    assert all(part in shown for part in ("Unhealthy: 60 steps", "a bad batch", checks))


def test_a_healthy_verdict_has_no_cause_and_no_fix() -> None:
    resolved = verdict(found("critical", 100, 100))
    assert (resolved.level, resolved.cause, resolved.fix) == ("healthy", None, None)
    assert str(resolved) == resolved.headline


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
