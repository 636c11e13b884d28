"""What checks and caveats claim holds: up to which step, for which loss, from which tensor on."""

from __future__ import annotations

from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from gradvitals.cli import main
from gradvitals.report.html import render_html
from gradvitals.report.report import Checks, Report
from gradvitals.report.summary import worst_lists
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


def test_no_check_passes_in_a_run_that_starts_with_nan(tmp_path: Path) -> None:
    assert "0 checks passed, " in printed("doctor", str(write(tmp_path / "run", nan_at(0))))


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
    assert "loss was" not in headline_of(write(tmp_path / "with", meta=meta))


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
