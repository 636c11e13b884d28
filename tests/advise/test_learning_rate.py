from __future__ import annotations

from pathlib import Path

import pytest
from runs_to_advise import advised

from gradvitals.types import Finding


def lr(step: int) -> float:
    return 1e-3


@pytest.mark.parametrize(
    ("ratio", "proposed"),
    [
        (1e-3, 5e-3),  # five times to 0.5 %
        (5e-5, 1e-2),  # a hundred times, of which it takes ten
        (5e-2, 1e-4),
        (1.0, 1e-4),
        (2.1e-3, None),
        (5e-3, None),
        (2.9e-2, None),
    ],
)
def test_the_rate_goes_to_the_usual_size_of_updates(tmp_path: Path, ratio: float, proposed: float | None) -> None:
    advice = advised(tmp_path, lr=lr, ratio=lambda step: ratio).learning_rate
    assert advice.confidence == "fair"
    assert advice.values["proposed"] == (proposed if proposed is None else pytest.approx(proposed))
    assert advice.values["lr"] == pytest.approx(1e-3)
    assert advice.values["ratio"] == pytest.approx(ratio)
    assert advice.figures


def test_only_the_middle_of_the_run_counts(tmp_path: Path) -> None:
    def ratio(step: int) -> float:
        return 5e-3 if 150 <= step < 450 else 1e-6

    advice = advised(tmp_path, lr=lr, ratio=ratio).learning_rate
    assert advice.answer.startswith("Keep the learning rate of 0.001")


def test_readings_on_both_sides_of_the_limit_are_a_weak_sign(tmp_path: Path) -> None:
    advice = advised(tmp_path, lr=lr, ratio=lambda step: 1e-3 if step % 5 < 3 else 4e-3).learning_rate
    assert advice.values["proposed"] == pytest.approx(5e-3)
    assert advice.confidence == "low"


def warning(name: str, **more: int) -> Finding:
    return Finding(id=name, severity="warning", title=f"about {name}", first_step=5, **more)


@pytest.mark.parametrize("name", ["explosion", "lr_too_high", "dead_units", "clip_saturated", "loss_rising"])
def test_an_unstable_run_gets_no_higher_rate(tmp_path: Path, name: str) -> None:
    unstable = [warning(name, last_step=50)]
    advice = advised(tmp_path / "low", lr=lr, ratio=lambda step: 1e-4, findings=unstable).learning_rate
    assert not advice.can_tell
    assert f"not stable: about {name}" in advice.answer
    lower = advised(tmp_path / "high", lr=lr, ratio=lambda step: 0.5, findings=unstable).learning_rate
    assert lower.values["proposed"] == pytest.approx(1e-4)


@pytest.mark.parametrize("name", ["stale_gradients", "unchanged_weights"])
def test_a_bug_of_the_loop_comes_before_settings(tmp_path: Path, name: str) -> None:
    advice = advised(tmp_path, lr=lr, ratio=lambda step: 1e-4, gsnr=lambda step: 0.02, findings=[warning(name)])
    for piece in (advice.learning_rate, advice.batch_size, advice.warmup, advice.decay):
        assert f"the training loop has a bug: about {name}" in piece.answer


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ({"frozen": True}, "1 of 5 tensors are frozen"),
        ({"lr": None}, "the learning rate was never above zero"),
        ({"ratio": None}, "the middle of the run has 0 readings"),
    ],
)
def test_what_keeps_it_from_being_judged_is_said(tmp_path: Path, made: dict[str, object], words: str) -> None:
    advice = advised(tmp_path, **({"lr": lr, "ratio": lambda step: 1e-4} | made)).learning_rate
    assert not advice.can_tell
    assert words in advice.answer
