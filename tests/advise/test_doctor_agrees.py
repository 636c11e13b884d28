"""What the doctor calls fine, the advice on the same run does not ask to change."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_to_advise import write_run

from gradvitals.advise import Advised, advise
from gradvitals.report.report import Checks, Report
from gradvitals.store.reader import open_run
from gradvitals.types import Finding

BATCH_RULES = {"batch_too_small", "batch_too_large"}


def both(path: Path, *, gsnr: float, error: float, steps: int = 600, **more: object) -> tuple[Checks, Advised]:
    """Of a run with 64 samples a step in 4 micro-batches, whose GSNR of one micro-batch is known this well."""
    written = write_run(path, steps=steps, gsnr=lambda step: gsnr, gsnr_error=error, **more)  # type: ignore[arg-type]
    with open_run(written) as run:
        return Report(run).checks, advise(run)


def passed(checks: Checks) -> set[str]:
    return set(checks.passed)


def why_skipped(checks: Checks, rule: str) -> str:
    return next((reason for reason, rules in checks.skipped.items() if rule in rules), "")


@pytest.mark.parametrize("steps", [70, 150, 400])
@pytest.mark.parametrize("error", [0.001, 0.02, 0.3, 3.0])
@pytest.mark.parametrize("gsnr", [-0.01, 0.004, 0.03, 0.1, 0.25, 0.8, 4.0])
def test_they_never_contradict_each_other(tmp_path: Path, gsnr: float, error: float, steps: int) -> None:
    checks, advised = both(tmp_path / "run", gsnr=gsnr, error=error, steps=steps)
    told = passed(checks) & BATCH_RULES
    proposed = advised.batch_size.values["proposed"]
    if not advised.batch_size.can_tell:
        assert told == set()
    if proposed is not None:
        assert ("batch_too_small" if proposed > 64 else "batch_too_large") not in told


def test_a_batch_is_fine_where_the_noise_scale_is_known_to_be_near_it(tmp_path: Path) -> None:
    checks, advised = both(tmp_path / "run", gsnr=0.25, error=0.05)  # B_simple = 16 / 0.25 = 64
    assert passed(checks) >= BATCH_RULES | {"estimator_unreliable"}
    assert advised.batch_size.answer.startswith("Keep the batch of 64")


def test_what_is_not_known_yet_is_too_early_and_not_fine(tmp_path: Path) -> None:
    checks, advised = both(tmp_path / "run", gsnr=0.03, error=0.035, steps=300)  # 246 samples or more, or any number
    assert advised.batch_size.answer.startswith("Use a larger batch")
    assert why_skipped(checks, "batch_too_small").startswith("too early: the noise scale is still too uncertain")
    assert why_skipped(checks, "estimator_unreliable").startswith(
        "too early: the GSNR is not yet known within a factor of ten"
    )
    assert "batch_too_large" in passed(checks)


def test_what_the_advice_would_change_is_left_to_it(tmp_path: Path) -> None:
    checks, advised = both(tmp_path / "run", gsnr=0.08, error=0.01)  # 200 samples, 178 to 229
    assert advised.batch_size.values["proposed"] == 128
    assert why_skipped(checks, "batch_too_small").endswith("`gradvitals advise` finds that a larger batch pays off")


def test_the_advice_knows_what_the_doctor_found(tmp_path: Path) -> None:
    found = Finding(
        id="batch_too_small", severity="warning", title="a batch of 64 is small: the loss swings", first_step=9
    )
    _, advised = both(tmp_path / "known", gsnr=0.25, error=0.05, findings=[found])
    assert advised.batch_size.answer == (
        "The noise scale alone (about 64 samples) supports the batch of 64, "
        "but a batch of 64 is small: the loss swings."
    )
    _, advised = both(tmp_path / "unknown", gsnr=0.0, error=3.0, findings=[found])
    assert advised.batch_size.answer.endswith("includes zero. By other signs, a batch of 64 is small: the loss swings.")
