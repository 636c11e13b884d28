from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from runs_to_advise import advised, lognormal

from gradvitals.advise.advice import rounded_up
from gradvitals.advise.clip import quantile_interval
from gradvitals.advise.record import far_above
from gradvitals.diagnose import RULES
from gradvitals.types import Action, Finding

Z95 = 1.6449


def spike(first: int, last: int | None, severity: str = "warning") -> Finding:
    return Finding(id="explosion", severity=severity, title="a spike", first_step=first, last_step=last)  # type: ignore[arg-type]


def test_the_limit_is_the_known_quantile_of_healthy_norms(tmp_path: Path) -> None:
    advice = advised(tmp_path, steps=2000, norm=lognormal(2.0, 0.2)).max_grad_norm
    truth = 2.0 * math.exp(0.2 * Z95)
    assert advice.values["low"] < truth < advice.values["high"]
    assert truth * 0.95 < advice.values["max_norm"] < truth * 1.08
    assert advice.values["would_clip"] == pytest.approx(0.05, abs=0.02)
    assert advice.values["schedule"] is None
    assert advice.values["clips_at"] is None
    assert advice.confidence == "good"
    assert advice.answer.startswith("Clip to a norm of 2.8; this run does not clip.")


def test_the_interval_holds_the_quantile_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    truth = math.exp(0.3 * Z95)
    held = 0
    for _ in range(400):
        _, low, high = quantile_interval(np.exp(0.3 * rng.normal(size=600)), 0.95)
        held += low <= truth <= high
    assert 0.92 <= held / 400 <= 0.995


def test_the_interval_is_wider_where_neighbouring_steps_are_alike() -> None:
    rng = np.random.default_rng(0)
    independent, walk = rng.normal(size=2000), np.zeros(2000)
    for i in range(1, 2000):
        walk[i] = 0.95 * walk[i - 1] + math.sqrt(1 - 0.95**2) * independent[i]
    widths = []
    for values in (independent, walk):
        _, low, high = quantile_interval(np.exp(0.3 * values), 0.95)
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


def test_spikes_neither_raise_the_limit_nor_go_uncounted(tmp_path: Path) -> None:
    calm = lognormal(1.0, 0.1)
    plain = advised(tmp_path / "a", norm=calm).max_grad_norm
    spiky = advised(tmp_path / "b", norm=lambda step: 50.0 if step % 40 == 7 else calm(step)).max_grad_norm
    assert spiky.values["max_norm"] == pytest.approx(plain.values["max_norm"], rel=0.1)
    assert any("and 13 of those left out (13)" in figure.text for figure in spiky.figures)


def test_steps_inside_findings_and_actions_are_left_out(tmp_path: Path) -> None:
    def norm(step: int) -> float:
        return 9.0 if 200 <= step < 300 else 1.0 + 0.001 * (step % 10)

    actions = [Action(kind="skip", step=step, finding="explosion", taken=True) for step in (400, 401)]
    advice = advised(tmp_path, norm=norm, findings=[spike(200, 299)], actions=actions).max_grad_norm
    assert advice.values["max_norm"] == 1.1
    counted = next(figure for figure in advice.figures if "in_findings" in figure.values)
    assert counted.values["in_findings"] == 102


def test_a_run_in_trouble_throughout_gives_no_limit(tmp_path: Path) -> None:
    advice = advised(tmp_path, findings=[spike(0, None)]).max_grad_norm
    assert not advice.can_tell
    assert advice.answer.startswith("Cannot tell, because it needs 100 healthy steps")


def test_falling_norms_give_a_schedule_and_name_what_follows_them(tmp_path: Path) -> None:
    noise = lognormal(1.0, 0.05)
    advice = advised(tmp_path, steps=1000, norm=lambda step: 4.0 * math.exp(-step / 400) * noise(step)).max_grad_norm
    limits = [part["max_norm"] for part in advice.values["schedule"]]
    assert limits == sorted(limits, reverse=True)
    assert advice.values["max_norm"] == limits[0]
    assert advice.values["drift"] == pytest.approx(math.exp(-675 / 400), rel=0.1)
    assert "Let the clipping limit fall" in advice.answer
    assert "ZClip" in advice.notes[0]
    assert "AdaGC" in advice.notes[0]


@pytest.mark.parametrize(
    ("max_norm", "words"), [(0.1, "Raise max_norm from 0.1"), (1.3, "Keep max_norm at 1.3"), (20.0, "Lower max_norm")]
)
def test_the_limit_in_use_is_judged(tmp_path: Path, max_norm: float, words: str) -> None:
    advice = advised(tmp_path, norm=lognormal(1.0, 0.1), max_norm=max_norm).max_grad_norm
    assert advice.answer.startswith(words)
    assert advice.values["clips_at"] == pytest.approx(max_norm)
    assert advice.values["clips"] == {0.1: 1.0, 1.3: pytest.approx(0.004, abs=0.01), 20.0: 0.0}[max_norm]


def test_raising_the_limit_makes_the_steps_of_sgd_longer(tmp_path: Path) -> None:
    sgd = advised(tmp_path, norm=lognormal(1.0, 0.1), max_norm=0.1, facts={"optimizer": "SGD"}).max_grad_norm
    assert "lower the learning rate" in sgd.notes[0]


def test_norms_read_after_clipping_are_no_grounds(tmp_path: Path) -> None:
    advice = advised(tmp_path, stage="clipped").max_grad_norm
    assert not advice.can_tell
    assert "after clipping" in advice.answer


def test_an_outlier_is_far_above_its_neighbours_alone() -> None:
    values = np.exp(np.linspace(0, 3, 500))  # rises twentyfold, slowly
    assert not far_above(values).any()
    values[250] *= 5
    assert np.flatnonzero(far_above(values)).tolist() == [250]


@settings(deadline=None, max_examples=60)
@given(hnp.arrays(np.float64, st.integers(100, 300), elements=st.floats(1e-6, 1e6)))
def test_the_limit_is_never_below_the_median(values: np.ndarray) -> None:
    value, low, high = quantile_interval(values, 0.95)
    assert low <= value <= high
    assert rounded_up(value) >= value >= np.median(values)


@given(st.floats(1e-12, 1e12))
def test_rounding_up_never_rounds_down(value: float) -> None:
    assert value <= rounded_up(value) <= 1.1 * value * (1 + 1e-9)


def named(name: str, **seen: float) -> Finding:
    return Finding(id=name, severity="info", title="a limit", first_step=9, evidence={"seen": seen})


@pytest.mark.parametrize(
    ("findings", "notes"),
    [
        ([], []),
        ([named("clip_saturated", max_norm=2.0)], []),  # the same
        (
            [
                named("clip_saturated", max_norm=1.5, steps=240),
                named("clip_saturated", max_norm=1.1, steps=200),
            ],
            [
                "`gradvitals doctor` names 1.1 (clip_saturated), which is based on 200 steps alone; "
                "prefer the one above."
            ],
        ),
        (
            [named("clipped_twice", loop=0.5, optimizer=0.2)],
            [
                "Clip in one place (clipped_twice): 0.2 is only the lower of two limits in use; prefer the one "
                "above, which is based on the norms."
            ],
        ),
    ],
)
def test_of_several_limits_it_says_which_to_take(tmp_path: Path, findings: list[Finding], notes: list[str]) -> None:
    advice = advised(tmp_path, norm=lambda step: 2.0, max_norm=1.9, findings=findings).max_grad_norm
    assert advice.values["max_norm"] == 2.0
    assert [note for note in advice.notes if "the one above" in note] == notes


@pytest.mark.parametrize("name", ["clip_saturated", "clip_idle"])
def test_a_finding_about_the_limit_names_the_advice_as_the_one_to_take(name: str) -> None:
    [cure, *_] = RULES[name].message.fixes.values()
    assert cure.endswith("After the run, `gradvitals advise` suggests a limit based on all healthy steps")


def test_notes_do_not_make_steps_unhealthy(tmp_path: Path) -> None:
    advice = advised(tmp_path, norm=lognormal(1.0, 0.1), findings=[spike(0, None, "info")]).max_grad_norm
    assert advice.can_tell
