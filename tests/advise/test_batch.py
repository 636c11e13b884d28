from __future__ import annotations

from pathlib import Path

import pytest
from runs_to_advise import advised

from gradvitals.advise import Advice


def batch(path: Path, **made: object) -> Advice:
    return advised(path, **made).batch_size


def test_the_noise_scale_is_the_batch_over_its_gsnr(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.2, gsnr_error=0.05)  # of 16 samples each
    assert advice.values["noise_scale"] == pytest.approx(16 / 0.2)
    assert advice.values["low"] == pytest.approx(16 / 0.25)
    assert advice.values["high"] == pytest.approx(16 / 0.15)
    assert advice.values["batch_size"] == 64
    assert advice.values["steps_factor"] == pytest.approx(1 + 80 / 64)
    assert advice.values["samples_factor"] == pytest.approx(1 + 64 / 80)
    assert advice.values["proposed"] is None
    assert advice.answer == "Keep the batch of 64: the noise scale is about 80 samples."
    assert "proxy" in advice.notes[0]
    assert advice.confidence == "fair"


def test_a_batch_far_below_the_noise_scale_may_grow(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.02, gsnr_error=0.005)  # 800 samples, 640 to 1067
    assert advice.values["proposed"] == 256
    assert advice.answer.startswith("Use a larger batch: 256 instead of 64")
    fewer = 1 - (1 + 800 / 256) / (1 + 800 / 64)
    assert f"{100 * fewer:.0f} % fewer steps" in advice.answer
    assert "Multiply the learning rate by 2 " in advice.notes[1]
    assert "Adam" in advice.notes[1]


def test_sgd_takes_the_learning_rate_with_the_batch(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.02, gsnr_error=0.005, facts={"optimizer": "SGD"})
    assert "Multiply the learning rate by 4 " in advice.notes[1]


def test_a_batch_far_above_the_noise_scale_may_shrink(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 2.0, gsnr_error=0.1)  # 8 samples
    assert advice.values["proposed"] == 16
    assert "A smaller batch is enough: 16 instead of 64" in advice.answer


def test_an_interval_that_holds_zero_says_cannot_tell(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.1, gsnr_error=0.5)
    assert not advice.can_tell
    assert "not identifiable" in advice.answer
    assert advice.values["noise_scale"] is None


def test_a_lower_end_far_over_the_batch_is_enough_for_a_larger_one(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.01, gsnr_error=0.02)  # over 16 / 0.03 = 533 samples
    assert advice.values["low"] == pytest.approx(16 / 0.03)
    assert advice.values["proposed"] == 256
    assert advice.confidence == "low"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({}, "this run has no GSNR"),
        ({"gsnr": lambda step: 0.2, "source": "adam"}, "Adam's moments"),
        ({"gsnr": lambda step: 0.2, "batch_size": lambda step: None}, "the batch size is unknown"),
        ({"gsnr": lambda step: 0.2, "steps": 10}, "readings"),
    ],
)
def test_what_is_lacking_is_said(tmp_path: Path, made: dict[str, object], words: str) -> None:
    advice = batch(tmp_path, **made)
    assert not advice.can_tell
    assert words in advice.answer


def test_without_a_batch_size_the_noise_scale_is_told_in_micro_batches(tmp_path: Path) -> None:
    advice = batch(tmp_path, gsnr=lambda step: 0.2, batch_size=lambda step: None)
    assert advice.figures[0].values["micro_batches"] == pytest.approx(5)


def test_readings_at_another_batch_size_are_not_mixed_in(tmp_path: Path) -> None:
    def size(step: int) -> float:
        return 64.0 if step < 400 else 256.0

    def gsnr(step: int) -> float:  # one noise scale of 80 samples at first, another one later
        return 16 / 80 if step < 400 else 64 / 320

    advice = batch(tmp_path, steps=1000, gsnr=gsnr, gsnr_error=0.01, batch_size=size)
    assert advice.values["noise_scale"] == pytest.approx(320)
    assert advice.values["batch_size"] == 256
    assert all((figure.first_step or 400) >= 400 for figure in advice.figures)


def test_averages_that_share_no_reading_are_joined(tmp_path: Path) -> None:
    advice = batch(tmp_path, steps=2000, gsnr=lambda step: 0.2, gsnr_error=0.05)
    joined = advice.figures[0].values
    assert joined["readings"] > 80
    assert joined["low"] > 0.16  # narrower than each
