"""One huge gradient stays in Adam's moments: report and doctor say how long their GSNR is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import gradvitals as gv
from gradvitals.cli import main
from gradvitals.diagnose.history import steps_kept
from gradvitals.report.caveats import GSNR_RULES, adam_memory
from gradvitals.store.writer import RunWriter
from gradvitals.types import Reading, Source


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
