from __future__ import annotations

from pathlib import Path

import pytest

from gradvitals import notices
from gradvitals.errors import ObserveError
from gradvitals.notices import ABOUT_MONITORING
from gradvitals.show.verdict import Verdict, about_itself, judge, when
from gradvitals.types import Finding, Severity


def found(
    severity: Severity = "warning", first: int = 100, last: int | None = None, name: str = "explosion"
) -> Finding:
    return Finding(id=name, severity=severity, title="the norm jumped", first_step=first, last_step=last)


def verdict(*findings: Finding, steps: int = 1000, live: bool = False) -> Verdict:
    return judge(findings, last_step=steps - 1, steps=steps, live=live)


@pytest.mark.parametrize(("severity", "level"), [("info", "healthy"), ("warning", "watch"), ("critical", "unhealthy")])
def test_what_goes_on_weighs_as_much_as_its_severity(severity: Severity, level: str) -> None:
    assert verdict(found(severity)).level == level


def test_one_spike_that_recovered_reads_differently_from_what_is_broken_now() -> None:
    recovered, broken = verdict(found("critical", 500, 500)), verdict(found("critical", 500))
    assert (recovered.level, broken.level) == ("healthy", "unhealthy")
    assert recovered.line == (
        "Healthy: 1,000 steps, 1 finding, now over. Worst (critical): the norm jumped; "
        "step 500 only, over for 499 steps."
    )
    assert broken.line == (
        "Unhealthy: 1,000 steps, 1 finding open. Worst (critical): the norm jumped; "
        "since step 500, still open at the end."
    )


@pytest.mark.parametrize(
    ("severity", "first", "last", "level"),
    [
        ("warning", 900, 900, "healthy"),  # one step, a hundred steps ago
        ("warning", 985, 985, "watch"),  # one step, but fourteen steps tell little
        ("warning", 100, 940, "watch"),  # over for 59 steps after it had lasted 841
        ("warning", 100, 500, "healthy"),  # over for longer than it lasted
        ("critical", 950, 950, "watch"),  # what was critical has to stay away for a tenth of the run
        ("critical", 880, 890, "healthy"),
        ("critical", 100, 800, "watch"),
        ("info", 100, 998, "healthy"),
    ],
)
def test_what_is_over_weighs_less_the_longer_it_is_over(severity: Severity, first: int, last: int, level: str) -> None:
    assert verdict(found(severity, first, last)).level == level


def test_how_long_ago_is_measured_by_the_length_of_the_run() -> None:
    spike = found("critical", 500, 500)
    assert verdict(spike, steps=540).level == "watch"
    assert verdict(spike, steps=600).level == "healthy"
    assert judge([spike], last_step=600, steps=100_000).level == "watch"


def test_what_comes_again_and_again_is_not_over_because_the_next_time_is_not_due() -> None:
    episodes = [found("warning", step, step) for step in (200, 400, 600, 800)]
    assert verdict(*episodes).level == "watch"
    assert verdict(*episodes, steps=1100).level == "healthy"  # clear for longer than ever between two
    assert verdict(*episodes[2:]).level == "healthy"  # twice may be chance
    advice = [found("info", step, step) for step in (200, 400, 600, 800)]
    assert verdict(*advice).level == "healthy"


def test_findings_come_by_their_weight_then_severity_then_age() -> None:
    past = found("critical", 100, 100, "past")
    now, later = found("warning", 300, name="now"), found("warning", 400, name="later")
    note = found("info", 5, name="note")
    ordered = verdict(note, past, later, now).findings
    assert [item.finding.id for item in ordered] == ["now", "later", "past", "note"]
    assert [item.weight for item in ordered] == ["warning", "warning", "info", "info"]
    assert [item.clear for item in ordered] == [None, None, 899, None]


def test_nothing_found() -> None:
    assert verdict().line == "Healthy: 1,000 steps, nothing found."
    assert verdict().worst is None
    assert not verdict().reaches("info")
    assert verdict(steps=12).line == "Nothing wrong yet, but it is early: 12 steps."
    assert verdict(live=True).line == "Healthy: 1,000 steps so far, nothing found."


@pytest.mark.parametrize(
    ("findings", "counts"),
    [
        ([found()], "1 finding open."),
        ([found(), found(name="other"), found(last=200)], "2 findings open, 1 over."),
        ([found("info"), found(last=200)], "1 note (gradient explosion), 1 finding over."),
        (
            [found("info"), found("critical"), found("info", last=300)],
            "1 finding open, 1 note (gradient explosion), 1 over (gradient explosion).",
        ),
        ([found(last=200), found(last=300)], "2 findings, all over."),
    ],
)
def test_the_line_counts_what_is_open_and_what_is_over(findings: list[Finding], counts: str) -> None:
    assert f"1,000 steps, {counts}" in verdict(*findings).line


def test_a_note_is_named() -> None:
    assert verdict(found("info", name="noisy_gradients")).line == "Healthy: 1,000 steps, 1 note (noisy gradients)."
    names = ("noisy_gradients", "clip_idle", "estimator_unreliable", "batch_too_small", "my_own_rule")
    assert verdict(*(found("info", name=name) for name in names)).line == (
        "Healthy: 1,000 steps, 5 notes (noisy gradients, clipping never triggers, GSNR not well known, 2 more)."
    )
    assert verdict(found("info", name="my_own_rule")).line == "Healthy: 1,000 steps, 1 note (my_own_rule)."
    assert verdict(found("info", last=300, name="clip_idle")).line == (
        "Healthy: 1,000 steps, 1 finding, now over (clipping never triggers)."
    )


def test_reaches_compares_by_weight() -> None:
    recovered = verdict(found("critical", 100, 100))
    assert recovered.reaches("info")
    assert not recovered.reaches("warning")
    assert verdict(found("warning")).reaches("warning")
    assert not verdict(found("warning")).reaches("critical")


def test_a_finding_later_than_the_last_reading_is_not_over_for_less_than_nothing() -> None:
    item = judge([found(first=90, last=120)], last_step=100, steps=101).findings[0]
    assert item.clear == 0


def test_what_gradvitals_says_about_itself_is_not_about_the_training() -> None:
    error = RuntimeError("full")
    own = [
        notices.source_unavailable("adam", "no averages", 0),
        notices.readings_thinned(5, spent=0.1, fixed=0.0, budget=0.01, before=(1, 1), after=(2, 1)),
        notices.monitor_error("stats", error, 7),
        notices.monitor_error("observe", ObserveError("observe got a str as loss"), 7),
        notices.store_error(OSError("full"), Path("run"), 8),
        notices.guard_error(error, 9),
        notices.snapshot_error("the disk is full", 10),
        notices.sink_error("TensorBoard", error, 11),
    ]
    assert {finding.id for finding in own} == set(ABOUT_MONITORING)
    judged = verdict(*own, found())
    assert [item.finding.id for item in judged.findings] == ["explosion"]
    assert verdict(*own).level == "healthy"
    assert list(about_itself([found(), *own])) == own


def test_json_says_what_is_open_and_what_it_weighs() -> None:
    judged = verdict(found("critical", 100, 100), found("warning", 200, name="other"))
    assert judged.to_json() == {
        "level": "watch", "line": judged.line, "steps": 1000, "open": 1, "over": 1, "worst": "other", "live": False,
    }  # fmt: skip
    past = judged.findings[1].to_json()
    assert (past["weight"], past["open"], past["clear_steps"], past["severity"]) == ("info", False, 899, "critical")


# -- how it ended ---------------------------------------------------------------------------------------------------


def test_a_run_that_died_is_not_over_for_0_steps() -> None:
    crash = notices.training_stopped(RuntimeError("CUDA error: device-side assert triggered"), 150)
    alone = verdict(crash, steps=150)
    assert (alone.level, alone.num_open) == ("unhealthy", 1)
    assert alone.line == (
        "Unhealthy: stopped at step 150 by RuntimeError: CUDA error: device-side assert triggered. "
        "150 steps, nothing else found."
    )
    assert when(alone.findings[0], live=False) == "at step 150, where the run ended"
    assert alone.findings[0].finding.causes
    assert "CUDA_LAUNCH_BLOCKING=1" in alone.findings[0].finding.fixes[0]
    after = verdict(found("critical", 140), crash, steps=150)
    assert after.worst is not None
    assert after.worst.finding is crash
    assert after.line.endswith(
        "150 steps, 1 finding open before. Worst (critical): the norm jumped; since step 140, still open at the end."
    )


def test_a_run_that_stopped_is_not_live_though_it_was_just_heard_of() -> None:
    crash = notices.training_stopped(ValueError("bad sample"), 101, rank=1)
    stopped = verdict(crash, steps=101, live=True)
    assert not stopped.live
    assert stopped.line.startswith("Unhealthy: stopped at step 101 on rank 1 by ValueError: bad sample. 101 steps,")


def test_a_run_that_went_on_after_a_crash_is_judged_by_what_came_then() -> None:
    crash = notices.training_stopped(RuntimeError("boom"), 150)
    assert verdict(crash, steps=160).level == "watch"
    assert verdict(crash, steps=400).level == "healthy"
    assert "step 150 only, over for 9 steps" in verdict(crash, steps=160).line


def test_a_run_that_was_stopped_by_hand_says_so_and_is_no_alarm() -> None:
    by_hand = notices.training_stopped(KeyboardInterrupt(), 150)
    assert verdict(by_hand, steps=150).line == "Healthy: 150 steps, nothing found. It was stopped by hand at step 150."
    early = verdict(notices.training_stopped(KeyboardInterrupt(), 30), steps=30)
    assert early.line == "Nothing wrong yet, but it is early: 30 steps. It was stopped by hand at step 30."
    both = verdict(by_hand, found("warning", 140), steps=150)
    assert both.level == "watch"
    assert both.line.startswith("Watch it: 150 steps, 1 finding open. Worst (warning): the norm jumped;")
    assert both.line.endswith("It was stopped by hand at step 150.")
