from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs_to_advise import advised, lognormal

from gradvitals.advise.decay import loss_course
from gradvitals.advise.record import Series
from gradvitals.advise.warmup import settled_after
from gradvitals.types import Finding

NOISE = lognormal(1.0, 0.02)


def ramp(steps: int, peak: float = 1e-3):  # type: ignore[no-untyped-def]
    return lambda step: peak * min(1.0, (step + 1) / steps)


def stands_until(end: int):  # type: ignore[no-untyped-def]
    """A loss that begins to fall at a step."""
    return lambda step: 4.0 - 0.002 * max(0, step - end) + 0.01 * math.sin(17.0 * step)


def test_what_never_changed_had_settled_at_once() -> None:
    assert settled_after(np.ones(200)) == 0


def test_what_falls_steadily_never_settles() -> None:
    assert settled_after(np.exp(-np.arange(400) / 20)) is None


def test_a_step_settles_where_the_windows_leave_it_behind() -> None:
    values = np.where(np.arange(1000) < 100, 10.0, 1.0)
    settled = settled_after(values)
    assert settled is not None
    assert 75 <= settled <= 100  # the median of the window turns a little earlier


def test_a_warmup_longer_than_it_took_to_settle_is_kept(tmp_path: Path) -> None:
    advice = advised(tmp_path, lr=ramp(50), norm=NOISE).warmup
    assert advice.values["used"] == advice.values["steps"] == 50
    assert advice.values["norms_settled"] == 0
    assert advice.answer.startswith("Keep the warmup of 50 steps")


def test_norms_that_settle_long_after_the_warmup_ask_for_a_longer_one(tmp_path: Path) -> None:
    made = {"steps": 1200, "lr": ramp(10), "norm": lambda step: NOISE(step) * (9 if step < 150 else 1)}
    advice = advised(tmp_path / "level", **made, loss=stands_until(150)).warmup
    assert advice.values["used"] == 10
    assert 110 <= advice.values["steps"] <= 150
    assert advice.confidence == "low"
    assert "while the loss did not fall" in advice.answer
    falling = advised(tmp_path / "falling", **made).warmup  # which nothing went wrong with
    assert falling.values["steps"] == 10
    assert "but the loss fell in the meantime" in falling.answer


def test_updates_are_judged_over_the_learning_rate(tmp_path: Path) -> None:
    lr = ramp(100)
    advice = advised(tmp_path, steps=800, lr=lr, norm=NOISE, update=lambda step: 0.3 * lr(step)).warmup
    assert advice.values["updates_settled"] == 0


def test_what_did_not_settle_is_not_called_settled(tmp_path: Path) -> None:
    advice = advised(tmp_path, lr=ramp(20), norm=NOISE, update=lambda step: math.exp(-step / 30)).warmup
    assert advice.values["updates_settled"] is None
    assert advice.confidence == "low"
    assert "updates still changed fast" in advice.because
    assert "settled" not in advice.answer


def test_a_wide_spread_of_norms_is_not_a_change_of_them() -> None:
    rng = np.random.default_rng(0)
    assert [settled_after(np.exp(rng.normal(size=400))) for _ in range(20)] == [0] * 20


@pytest.mark.parametrize("seed", range(20))
def test_the_luck_of_small_batches_asks_for_no_warmup(tmp_path: Path, seed: int) -> None:
    """Losses of 4 samples of a regression that learns nothing in so few steps, and norms that go with them."""
    squares = np.random.default_rng(seed).chisquare(4, size=300) / 4
    made = {"loss": lambda step: 10.0 * squares[step], "norm": lambda step: 3.0 * squares[step]}
    advice = advised(tmp_path, steps=300, lr=lambda step: 1e-3, **made).warmup
    assert advice.values["steps"] == 0, advice.answer


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_of_small_batches_that_multiplied_still_does(tmp_path: Path, seed: int) -> None:
    squares = np.random.default_rng(seed).chisquare(16, size=300) / 16
    made = {"loss": lambda step: 2.0 * squares[step] * (1 + 20 * math.exp(-(((step - 15) / 8) ** 2))), "norm": NOISE}
    advice = advised(tmp_path, steps=300, lr=lambda step: 1e-3, **made).warmup
    assert advice.answer.startswith("Warm up for about 30 steps"), advice.answer


def test_one_bad_batch_at_the_start_is_no_matter_of_warmup(tmp_path: Path) -> None:
    batch = Finding(id="explosion", severity="warning", title="a spike", first_step=30, last_step=30)
    assert advised(tmp_path / "batch", lr=lambda step: 1e-3, norm=NOISE, findings=[batch]).warmup.values["steps"] == 0
    lasting = Finding(id="explosion", severity="warning", title="it grows", first_step=30, last_step=90)
    assert advised(tmp_path / "lasting", lr=lambda step: 1e-3, norm=NOISE, findings=[lasting]).warmup.values["harm"]


@pytest.mark.parametrize("by", ["finding", "loss"])
def test_harm_at_the_start_asks_for_a_warmup(tmp_path: Path, by: str) -> None:
    finding = Finding(id="warmup_needed", severity="warning", title="a shock", first_step=0, last_step=40)
    made = {"findings": [finding]} if by == "finding" else {"loss": lambda step: 9.0 if 3 < step < 12 else 4.0}
    advice = advised(tmp_path, steps=1000, lr=lambda step: 1e-3, norm=NOISE, **made).warmup
    assert advice.values["used"] == 0
    assert advice.values["steps"] == 100
    assert advice.values["harm"]
    assert advice.answer.startswith("Warm up for about 100 steps where there was none")


def test_a_gsnr_known_to_be_zero_at_the_start_lengthens_the_warmup(tmp_path: Path) -> None:
    def gsnr(step: int) -> float:
        return 0.0 if step < 300 else 0.4

    made = {"steps": 1200, "lr": ramp(20), "norm": NOISE, "gsnr": gsnr, "gsnr_error": 0.05}
    advice = advised(tmp_path, **made, loss=stands_until(300)).warmup
    assert advice.values["gsnr_seen"] == 300
    assert 290 <= advice.values["steps"] <= 300


def test_a_gsnr_too_uncertain_to_tell_does_not(tmp_path: Path) -> None:
    advice = advised(tmp_path, steps=1200, lr=ramp(20), norm=NOISE, gsnr=lambda step: 0.4, gsnr_error=1.0).warmup
    assert advice.values["steps"] == 20


def test_a_loss_that_falls_needs_no_decay(tmp_path: Path) -> None:
    advice = advised(tmp_path, steps=900).decay
    assert advice.answer.startswith("No decay is due yet: the loss still fell by 1.2 over steps 600 to 899")
    assert advice.values["step"] is None


def levels(step: int) -> float:
    return 2.0 + 2.0 * max(0.0, 1 - step / 400) + 0.01 * math.sin(17.0 * step)


def test_a_level_loss_alone_is_a_weak_sign(tmp_path: Path) -> None:
    advice = advised(tmp_path, steps=1200, loss=levels).decay
    assert 340 <= advice.values["step"] <= 460
    assert advice.values["to_lr"] == pytest.approx(1e-3 / 3)
    assert advice.confidence == "low"


def test_a_level_loss_and_a_dropped_gsnr_agree(tmp_path: Path) -> None:
    def gsnr(step: int) -> float:
        return 2.0 if step < 600 else 0.1

    advice = advised(tmp_path, steps=1200, loss=levels, gsnr=gsnr, gsnr_error=0.05).decay
    assert advice.confidence == "good"
    assert advice.values["gsnr_dropped"] is not None
    assert 380 <= advice.values["step"] <= 620
    assert "dropped to under a quarter" in advice.answer


def test_the_high_gsnr_of_the_first_steps_is_no_height_to_drop_from(tmp_path: Path) -> None:
    advice = advised(
        tmp_path, steps=1200, loss=levels, gsnr=lambda step: 9.0 if step < 60 else 0.3, gsnr_error=0.05
    ).decay
    assert advice.values["gsnr_dropped"] is None


def test_a_decay_that_begins_while_the_loss_falls_is_kept(tmp_path: Path) -> None:
    advice = advised(tmp_path, steps=900, lr=lambda step: 1e-3 if step < 600 else 1e-4).decay
    assert advice.values["decays_from"] == 600
    assert advice.answer.startswith("Keep the start of the decay at step 600")


def test_a_decay_long_after_the_loss_was_level_could_be_earlier(tmp_path: Path) -> None:
    advice = advised(tmp_path, steps=1600, loss=levels, lr=lambda step: 1e-3 if step < 1200 else 1e-4).decay
    assert advice.answer.startswith("Decay earlier")
    assert 340 <= advice.values["step"] <= 460


def test_a_loss_of_nothing_but_noise_is_not_called_level() -> None:
    values = 2 + 3 * np.random.default_rng(0).normal(size=600)
    course = loss_course(Series(np.arange(600), values))
    assert course is not None
    assert not course.known


def flat(step: int) -> float:
    return 2.0 + 0.01 * math.sin(17.0 * step)


def steady(step: int) -> float:
    return 0.2


@pytest.mark.parametrize(
    ("topic", "made", "words"),
    [
        ("warmup", {"steps": 10}, "it needs 80 steps, and the run has 10"),
        ("warmup", {"first_step": 500}, "starts at step 500"),
        ("warmup", {"lr": None}, "the run has no learning rate"),
        ("warmup", {"lr": ramp(10_000)}, "still rising when the run ended"),
        ("decay", {"steps": 10}, "it needs 300 steps with a loss"),
        ("decay", {"loss": None}, "no loss"),
        ("decay", {"lr": None}, "the run has no learning rate"),
        ("decay", {"loss": flat}, "the loss never fell"),
        ("learning_rate", {"frozen": True}, "1 of 5 tensors are frozen"),
        ("learning_rate", {"lr": None}, "the learning rate was never above zero"),
        ("learning_rate", {"ratio": None}, "the middle of the run has 0 readings"),
        ("batch_size", {}, "this run has no GSNR"),
        ("batch_size", {"gsnr": steady, "source": "adam"}, "Adam's moments"),
        ("batch_size", {"gsnr": steady, "batch_size": lambda step: None}, "the batch size is unknown"),
        ("batch_size", {"gsnr": steady, "steps": 10}, "readings"),
        ("max_grad_norm", {"stage": "clipped"}, "after clipping"),
        ("layers", {"steps": 10, "every": 50}, "per-tensor readings"),
    ],
)
def test_what_keeps_a_setting_from_being_judged_is_said(
    tmp_path: Path, topic: str, made: dict[str, Any], words: str
) -> None:
    advice = getattr(advised(tmp_path, **made), topic)
    assert not advice.can_tell
    assert words in advice.answer
