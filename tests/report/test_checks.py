"""What checks and caveats claim holds, up to which step, and why others were skipped."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import gradvitals as gv
from gradvitals.advise import advise
from gradvitals.cli import main
from gradvitals.diagnose.history import steps_kept
from gradvitals.report.caveats import GSNR_RULES, adam_memory
from gradvitals.report.html import render_html
from gradvitals.report.live import look, plain_line
from gradvitals.report.report import Checks, Report
from gradvitals.report.summary import worst_lists
from gradvitals.report.verdict import Verdict, judge
from gradvitals.store.reader import open_run
from gradvitals.store.writer import RunWriter
from gradvitals.types import Finding, Layout, Reading, Source, TensorInfo

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


def checks_of(path: Path) -> Checks:
    with open_run(path) as run:
        return Report(run).checks


def headline_of(path: Path) -> str:
    with open_run(path) as run:
        return run.verdict.headline


def printed(*args: str) -> str:
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, args).stdout


def nan_at(step: int, last: int | None = None) -> Finding:
    return Finding(id="nonfinite", severity="critical", title="NaN", first_step=step, last_step=last)


def test_no_check_passes_after_nan(tmp_path: Path) -> None:
    path = write(tmp_path / "run", nan_at(251))
    assert checks_of(path).until == 250
    assert " checks passed up to step 250, " in printed("doctor", str(path))
    assert "\nChecks passed up to step 250, before NaN or Inf (" in printed("doctor", str(path), "--all")
    with open_run(path) as run:
        assert "Checks passed up to step 250, before NaN or Inf (" in render_html(run)


def test_steps_that_were_not_read_before_nan_do_not_count_as_passed(tmp_path: Path) -> None:
    unread = Finding(id="nonfinite", severity="critical", title="NaN", first_step=251, evidence={"unread": 49})
    assert checks_of(write(tmp_path / "run", unread)).until == 201


def test_a_resolved_nan_does_not_limit_the_checks(tmp_path: Path) -> None:
    path = write(tmp_path / "run", nan_at(251, 251))
    assert checks_of(path).until is None
    assert "up to step" not in printed("doctor", str(path))


def test_a_check_that_needs_more_finite_steps_is_skipped(tmp_path: Path) -> None:
    late, early = (checks_of(write(tmp_path / str(step), nan_at(step))) for step in (251, 60))
    assert "loss_plateau" in late.passed
    reasons = {name: reason for reason, names in early.skipped.items() for name in names}
    assert reasons["loss_plateau"] == "too early: needs more than 100 steps before NaN or Inf"
    none = checks_of(write(tmp_path / "none", nan_at(0)))
    assert none.passed == {}
    assert "stale_gradients" in none.skipped["no step was finite"]


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({}, "No loss was recorded, so loss checks were skipped: call monitor.observe(loss) after backward"),
        ({"imported": {}}, "No loss was imported, so loss checks were skipped: name its column with --map COLUMN=loss"),
    ],
)
def test_the_headline_reports_a_missing_loss(tmp_path: Path, meta: dict[str, Any], said: str) -> None:
    assert said in headline_of(write(tmp_path / "without", loss=False, meta=meta))
    assert "No loss was" not in headline_of(write(tmp_path / "with", meta=meta))


def test_nonfinite_tensors_are_listed_in_the_order_of_backward(tmp_path: Path) -> None:
    path = write(tmp_path / "run", broken=lambda step: np.where((step >= 20) & (np.arange(8) != 7), 1.0, 0.0))
    with open_run(path) as run:
        worst = next(found for found in worst_lists(run, None) if found.metric == "grad/nonfinite").rows
    assert [(item.name, item.step) for item in worst] == [
        ("3.weight", 20),
        ("2.bias", 20),
        ("2.weight", 20),
        ("1.bias", 20),
        ("1.weight", 20),
    ]


def write_gsnr(
    path: Path, *findings: Finding, source: Source = "adam", gsnr: tuple[float, float, float], layers: list[float]
) -> Path:
    """A run whose GSNR and its interval are these, as are the lower ends of its layers'."""
    names = ("gsnr", "gsnr_low", "gsnr_high")
    lows = np.array(layers)
    with RunWriter(path, meta={"facts": {}}) as writer:
        writer.write(layout())
        for step in range(400):
            writer.write(Reading(step=step, time=float(step), batch_size=8.0, values={"loss": 1.0, "grad/norm": 1.0}))
            if step % 10 == 0:
                writer.write(
                    Reading(
                        step=step,
                        time=float(step),
                        source=source,
                        batch_size=8.0,
                        values=dict(zip(names, gsnr, strict=True)),
                        layers={"gsnr": lows + 0.1, "gsnr_low": lows, "gsnr_high": lows + 0.2},
                    )
                )
        for finding in findings:
            writer.write(finding)
    return path


def gsnr_check(path: Path) -> str:
    """Returns the passed check of how well the GSNR is known, or why it was skipped."""
    checks = checks_of(path)
    reasons = [reason for reason, names in checks.skipped.items() if "estimator_unreliable" in names]
    return checks.passed.get("estimator_unreliable", " ".join(reasons))


@pytest.mark.parametrize(
    ("gsnr", "layers", "told"),
    [
        ((0.2, 0.1, 0.3), [0.1, 0.1, 0.1, 0.1], "the GSNR of the model is known within a factor of ten"),
        (
            (0.2, 0.1, 0.3),
            [0.1, -0.1, 0.0, np.nan],
            "the GSNR of the model is known within a factor of ten; "
            "for 2 of 3 layers it cannot be distinguished from 0",
        ),
        ((-0.2, -0.3, -0.1), [0.1] * 4, "the latest GSNR from Adam's moments cannot be distinguished from 0"),
        ((0.2, 0.0, 0.4), [0.1] * 4, "the latest GSNR from Adam's moments cannot be distinguished from 0"),
        ((0.2, 0.01, 0.4), [0.1] * 4, "the latest GSNR from Adam's moments is not known within a factor of ten"),
    ],
)
def test_how_well_a_gsnr_is_known(
    tmp_path: Path, gsnr: tuple[float, float, float], layers: list[float], told: str
) -> None:
    assert gsnr_check(write_gsnr(tmp_path / "run", gsnr=gsnr, layers=layers)) == told


@pytest.mark.parametrize(
    ("source", "gsnr", "layers", "said"),
    [
        ("adam", 0.2, [0.1, 0.1, 0.1, 0.1], ""),
        ("adam", 0.2, [0.1, 0.1, 0.1, -0.4], "if gradients have shrunk, or if they cancel from step to step"),
        ("adam", -0.2, [0.1, 0.1, 0.1, 0.1], "if gradients have shrunk, or if they cancel from step to step"),
        (
            "microbatch",
            0.2,
            [0.1, 0.1, 0.1, -0.4],
            "if the backward passes of a step sample different distributions",
        ),
    ],
)
def test_a_negative_gsnr_comes_with_its_meaning(
    tmp_path: Path, source: Source, gsnr: float, layers: list[float], said: str
) -> None:
    path = write_gsnr(tmp_path / "run", source=source, gsnr=(gsnr, gsnr - 0.1, gsnr + 0.1), layers=layers)
    with open_run(path) as run:
        page = render_html(run)
    for text in (printed("report", str(path)), unescape(page)):
        assert ("a true GSNR is never below 0: read a negative estimate as 0" in text) == bool(said)
        assert said in " ".join(text.split())


def test_the_doctor_explains_a_negative_gsnr_in_a_finding(tmp_path: Path) -> None:
    for name, gsnr, said in (
        ("estimator_unreliable", 0.1, False),
        ("estimator_unreliable", -0.1, True),
        ("noisy_gradients", -0.1, False),  # shown without its numbers
    ):
        seen = {"gsnr": gsnr, "source": "adam"}
        found = Finding(id=name, severity="info", title="not well known", first_step=9, evidence={"seen": seen})
        path = write_gsnr(tmp_path / f"{name} {gsnr}", found, gsnr=(0.2, 0.1, 0.3), layers=[0.1] * 4)
        assert ("Note: a true GSNR is never below 0" in printed("doctor", "-v", str(path))) == said
        assert "Note:" not in printed("doctor", str(path))  # a note is not what the verdict rests on


# -- one huge gradient stays in Adam's moments -----------------------------------------------------------------------


def run_with_a_spike(
    path: Path,
    *,
    steps: int = 300,
    ratio: float = 100.0,
    betas: tuple[float, float] = (0.9, 0.99),
    source: Source = "adam",
    more: dict[str, float] | None = None,
) -> Path:
    """Norms of 1 but for step 100, a GSNR every ten steps, a noise scale from micro-batches."""
    with RunWriter(path, meta={"facts": {"betas": list(betas)}}) as writer:
        for step in range(steps):
            own = ratio if step == 100 else 1.0
            values = {"loss": 1.0, "grad/norm": own, "grad/spike_ratio": own} | (more or {})
            writer.write(Reading(step=step, time=float(step), values=values))
            if step % 10 == 0:
                writer.write(Reading(step=step, time=float(step), source=source, values={"gsnr": 0.5}))
                scale = {"noise_scale": 40.0, "noise_scale_low": 30.0, "noise_scale_high": 60.0}
                writer.write(Reading(step=step, time=float(step), source="microbatch", values=scale))
        writer.commit()
    return path


def caveat(path: Path) -> str:
    with gv.open_run(path) as run:
        return adam_memory(run)


def test_how_long_it_is_kept() -> None:
    """By hand: (1 - b2) R² b2^t is down to half an ordinary square when t = ln(0.01 × 10⁴ / 0.5) / -ln 0.99 = 527."""
    assert steps_kept(100.0, (0.9, 0.99)) == pytest.approx(527.17, abs=0.01)
    assert steps_kept(5.0, (0.9, 0.999)) == pytest.approx(15.28, abs=0.01)  # then the first average holds it longer
    assert steps_kept(0.5, (0.9, 0.999)) == 0


def test_the_caveat_ends_when_the_moments_forget(tmp_path: Path) -> None:
    assert caveat(run_with_a_spike(tmp_path / "during")) == (
        "the gradient of step 100 was 100 times the usual norm and is still in Adam's moments, so the GSNR from them "
        "is wrong until about step 828"  # 100 + 527, and 20 readings until none of before is averaged in
    )
    assert caveat(run_with_a_spike(tmp_path / "before", steps=95)) == ""
    assert caveat(run_with_a_spike(tmp_path / "after", steps=850)) == ""


@pytest.mark.parametrize("more", [{"clip/max_norm": 1.5}, {"step/skipped": 1.0}, {"step/left_out": 1.0}])
def test_a_gradient_adam_never_saw_is_not_in_its_moments(tmp_path: Path, more: dict[str, float]) -> None:
    assert caveat(run_with_a_spike(tmp_path, more=more)) == ""


def test_checks_that_depend_on_it_do_not_pass(tmp_path: Path) -> None:
    for steps, says in ((300, True), (850, False)):
        run_with_a_spike(tmp_path / str(steps), steps=steps)
        told = json.loads(CliRunner().invoke(main, ["doctor", str(tmp_path / str(steps)), "--json"]).stdout)
        unsure = {name for item in told["skipped"] if "huge gradient" in item["reason"] for name in item["ids"]}
        fine = {item["id"] for item in told["passed"]}
        assert ("sudden_gsnr_drop" in unsure, "sudden_gsnr_drop" in fine) == (says, not says)
        assert unsure == ({*GSNR_RULES} & (unsure | fine) if says else set())
        assert {"estimator_unreliable", "high_effort_low_progress"} <= unsure | fine


def test_other_sources_forget(tmp_path: Path) -> None:
    assert caveat(run_with_a_spike(tmp_path, source="microbatch")) == ""


def test_report_and_doctor_print_it_and_the_source_of_each_number(tmp_path: Path) -> None:
    run = str(run_with_a_spike(tmp_path))
    report, doctor = (
        CliRunner(env={"COLUMNS": "200"}).invoke(main, args).output for args in (["report", run], ["doctor", "-v", run])
    )
    assert "GSNR (adam) " in report
    assert "noise scale (microbatch) " in report
    for said in (report, doctor):
        assert "Note: the gradient of step 100 was 100 times the usual norm and is still in Adam's moments" in said
    short = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["doctor", run]).output
    assert "Note:" not in short  # no finding rests on it
    for name in ("report", "doctor"):
        assert (
            "until about step 828" in json.loads(CliRunner().invoke(main, [name, run, "--json"]).output)["gsnr_caveat"]
        )


# -- what was not measured -------------------------------------------------------------------------------------------


def write_unmeasured(path: Path, *, batch_size: float | None = None, heads: tuple[str, ...] = ()) -> Path:
    tensor = TensorInfo(index=0, name="att.in_proj_weight", shape=(6, 2), dtype="float32", layer="att", depth=0)
    with RunWriter(path, meta={"facts": {}}) as writer:
        writer.write(Layout(tensors=(tensor,), layers=("att",), heads=heads))
        for step in range(60):
            values = {"loss": 1.0, "grad/norm": 1.0}
            writer.write(Reading(step=step, time=step, batch_size=batch_size, values=values))
    return path


def reason(path: Path, rule: str) -> str:
    with open_run(path) as run:
        [missing] = [reason for reason, names in Report(run).checks.skipped.items() if rule in names]
    return missing


@pytest.mark.parametrize("told", [None, 16.0])
def test_a_known_batch_size_is_not_asked_for(tmp_path: Path, told: float | None) -> None:
    run = write_unmeasured(tmp_path / "run", batch_size=told)
    report = CliRunner().invoke(main, ["report", str(run)]).stdout
    assert "needs two or more backward passes per step" in report
    for text in (reason(run, "batch_too_small"), report):
        assert ("watch(..., batch_size=...)" in text) == (told is None), text


def test_heads_that_were_found_but_not_read_are_not_called_missing(tmp_path: Path) -> None:
    found = write_unmeasured(tmp_path / "found", heads=("att/head0", "att/head1"))
    assert reason(found, "sparse_feature_noise").startswith("no GSNR of attention heads, which needs two or more")
    assert (
        reason(write_unmeasured(tmp_path / "none"), "sparse_feature_noise")
        == "no attention heads found; set them with Config.heads"
    )


def test_a_noise_scale_that_is_not_measured_is_not_promised(tmp_path: Path) -> None:
    ended = look(write_unmeasured(tmp_path / "run"))
    assert "noise scale" not in plain_line(replace(ended, ended=False))
    scale = replace(ended.summary.noise_scale, measured=True)
    unclear = replace(ended, summary=replace(ended.summary, noise_scale=scale))
    assert plain_line(replace(unclear, ended=False)).endswith("noise scale not identifiable yet")
    assert "noise scale" not in plain_line(unclear)


def test_a_run_with_the_retired_source_examples_opens_and_no_rule_judges_by_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    tensor = TensorInfo(index=0, name="norm.weight", shape=(6,), dtype="float32", layer="norm", depth=0)
    with RunWriter(run, meta={"facts": {}, "config": {"example_dim": None}}) as writer:
        writer.write(Layout(tensors=(tensor,), layers=("norm",)))
        for step in range(600):
            writer.write(Reading(step=step, time=step, batch_size=16.0, values={"loss": 1.0, "grad/norm": 1.0}))
            scale = {"gsnr": 0.5, "noise_scale": 20.0, "noise_scale_low": 15.0, "noise_scale_high": 30.0}
            source: Any = "examples"
            writer.write(Reading(step=step, time=step, source=source, batch_size=16.0, values=scale))
    assert reason(run, "batch_too_small").startswith("no noise scale, which needs two or more backward passes per step")
    for command in (["doctor", str(run)], ["report", str(run)], ["advise", str(run)]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 0, result.output
    with open_run(run) as opened:
        assert opened.series("noise_scale", source="examples")[1][-1] == 20.0


# -- steps that were not read ----------------------------------------------------------------------------------------


def write_steps(path: Path, steps: Iterable[int], first: int = 0) -> None:
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
    write_steps(tmp_path, [*range(500), *range(500, 3000, 5), 2999])
    assert counts(tmp_path) == (3000, 1001, 3000)
    with open_run(tmp_path) as run:
        assert run.verdict.headline.startswith("Healthy: 3,000 steps")


def test_a_process_that_was_redone_does_not_split_the_steps(tmp_path: Path) -> None:
    write_steps(tmp_path, range(0, 100, 10))
    write_steps(tmp_path, range(75, 105, 10), first=75)
    write_steps(tmp_path, range(50, 200, 10), first=50)
    assert counts(tmp_path) == (41 + 141, 5 + 15, 41 + 141)


def test_few_readings_are_not_enough_however_far_apart_they_are(tmp_path: Path) -> None:
    write_steps(tmp_path, range(0, 1000, 50))
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
