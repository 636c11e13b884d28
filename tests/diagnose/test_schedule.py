"""Rules about the learning rate's schedule."""

from __future__ import annotations

import math

import pytest
from made_up import Run, diagnose, diagnose_with_breaks, make_run, same_findings, words_of

from gradvitals.diagnose.rules.schedule import DecayDue, LrTooHigh, WarmupNeeded

SMALL_BATCH = (
    *(7.04, 11.2, 9.46, 16.0, 15.5, 19.0, 25.4, 7.15, 20.8, 25.4),
    *(22.6, 9.25, 8.24, 3.24, 7.54, 17.9, 8.6, 11.9, 11.6, 8.15),
)
"""The first losses of a healthy regression."""


def cold(**options: object) -> Run:
    """A run that begins at its full learning rate."""
    return make_run(lr=lambda step: 0.01, **options)  # type: ignore[arg-type]


# -- warmup_needed ---------------------------------------------------------------------------------------------------


def test_a_loss_that_rises_in_the_first_steps() -> None:
    run = cold(loss=lambda step: 2.3 + 8 * math.exp(-((step - 8) ** 2) / 8))
    [finding] = diagnose(run, WarmupNeeded())
    assert (finding.severity, finding.first_step) == ("warning", 0)
    assert finding.found_step is not None
    assert 3 <= finding.found_step <= 8
    assert "the loss rose from" in finding.title
    assert "0.01" in finding.fixes[0]
    assert finding.evidence["seen"]["lr_first"] == 0.01
    assert "?" not in words_of(finding)


def test_where_the_loss_multiplies_a_warmup_is_not_what_helps() -> None:
    run = cold(loss=lambda step: 2.3 + 800 * math.exp(-((step - 8) ** 2) / 8))
    [finding] = diagnose(run, WarmupNeeded())
    assert "a learning rate of 0.001 or less" in finding.fixes[0]
    assert "warmup over about" not in words_of(finding)


def test_first_gradients_far_over_all_that_follow() -> None:
    run = cold(norm=lambda step: 30.0 if step < 2 else 1.0, loss=lambda step: 3.0)
    [finding] = diagnose(run, WarmupNeeded())
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 0, 20)
    assert finding.title.endswith("× the median of the run, and the loss stays at 2.98")


def test_a_run_that_clips_is_told_about_its_limit() -> None:
    def shock(step: int) -> float:
        return 30.0 if step < 2 else 1.0

    [without] = diagnose(cold(norm=shock, loss=lambda step: 3.0), WarmupNeeded())
    assert any(cure.startswith("Clip gradients to a norm of 1.0") for cure in without.fixes)
    clipping = cold(norm=shock, loss=lambda step: 3.0)
    for step in clipping:
        step[0].values["clip/max_norm"] = 5.0  # type: ignore[index]
    [finding] = diagnose(clipping, WarmupNeeded())
    assert "warmup over about" in finding.fixes[0]
    assert finding.fixes[1].startswith("Clip to 4 instead of 5:")
    assert "the current limit applies to 10% of recent steps" in finding.fixes[1]
    assert not any(cure.startswith("Clip gradients") for cure in finding.fixes)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(cold(), id="a smooth cold start"),
        pytest.param(cold(norm=lambda step: 4 * math.exp(-step / 5) + 1), id="norms that fall as they usually do"),
        pytest.param(
            make_run(norm=lambda step: 30.0 if step < 2 else 1.0, loss=lambda step: 3.0), id="there was a warmup"
        ),
        pytest.param(
            cold(norm=lambda step: 30.0 if step < 2 else 1.0, loss=lambda step: 4.0 if step < 9 else 0.01),
            id="a simple model that has learnt all there is",
        ),
        pytest.param(cold(loss=lambda step: 2.0 + (6.0 if step == 7 else 0.0)), id="a single bad batch"),
        pytest.param(cold(loss=lambda step: 2.0 + step / 100), id="a loss that rises later"),
        pytest.param(cold(loss=lambda step: SMALL_BATCH[step % 20]), id="what a batch of 8 makes of a loss that stays"),
        pytest.param(
            cold(loss=lambda step: 2.0 if step == 0 else (3.0, 5.0, 3.4, 4.6)[step % 4]),
            id="a first batch that was easy",
        ),
    ],
)
def test_what_needs_no_warmup(run: Run) -> None:
    assert diagnose(run, WarmupNeeded()) == []


# -- decay_due -------------------------------------------------------------------------------------------------------


def fading(*, gsnr: float = 0.02, loss: float = 1.0, decays: bool = False) -> Run:
    """The GSNR falls from 2 to this, the loss to this, over the first 200 steps."""

    def fall(step: int, begin: float, end: float) -> float:
        return end + (begin - end) * math.exp(-step / 40)

    return make_run(
        steps=1200,
        gsnr=lambda step: fall(step, 2.0, gsnr),
        loss=lambda step: fall(step, 4.0, 1.0) if loss == 1.0 else 4.0 - loss * step / 1200,
        lr=lambda step: 0.01 * (1 - step / 1300) if decays else 0.01,
        spread=0.03,
    )


def test_no_signal_left_and_a_level_loss_at_a_constant_rate() -> None:
    [finding] = diagnose(fading(), DecayDue())
    assert finding.severity == "info"
    assert finding.found_step is not None
    assert finding.found_step > 200
    assert "from 0.01 to about 0.00333" in finding.fixes[0]
    assert "?" not in words_of(finding)


@pytest.mark.parametrize("change", [{"gsnr": 2.0}, {"loss": 3.0}, {"decays": True}])
def test_two_of_the_three_are_not_enough(change: dict[str, float]) -> None:
    assert diagnose(fading(**change), DecayDue()) == []  # type: ignore[arg-type]


def test_an_estimate_below_zero_cannot_fade() -> None:
    def faded(begin: float, end: float) -> Run:
        return make_run(
            steps=1200,
            gsnr=lambda step: begin if step < 300 else end,
            loss=lambda step: 1.0,
            lr=lambda step: 0.01,
            spread=0.0003,
            source="adam",
        )

    assert [finding.id for finding in diagnose(faded(0.01, 0.001), DecayDue())] == ["decay_due"]
    assert diagnose(faded(-0.001, -0.01), DecayDue()) == []


@pytest.mark.parametrize("rule", [WarmupNeeded, DecayDue])
def test_resuming_changes_nothing(rule: type[WarmupNeeded] | type[DecayDue]) -> None:
    shock = cold(norm=lambda step: 30.0 if step < 2 else 1.0, loss=lambda step: 3.0)
    for run in (fading(), shock):
        assert same_findings(diagnose_with_breaks(run, rule, (1, 15, 21, 230, 600)), diagnose(run, rule()))


# -- lr_too_high -----------------------------------------------------------------------------------------------------


def destroyed(after: float = 2.5, **options: object) -> Run:
    """The loss goes from 2.3 to thousands within the first steps, and stays at `after`."""
    known: dict[str, object] = dict(update=0.5, norm=lambda step: 300.0 if 0 < step < 7 else 1.0)
    return cold(loss=lambda step: 2.3 * 5.0**step if step < 7 else after, **{**known, **options})


def test_a_net_that_the_first_steps_destroyed() -> None:
    [finding] = diagnose(destroyed(), LrTooHigh())
    assert (finding.severity, finding.first_step, finding.last_step) == ("critical", 0, None)
    assert finding.found_step == 3
    assert finding.title.startswith("The learning rate of 0.01 is too high: in the first steps the loss rose from 2.3")
    assert finding.evidence["seen"]["loss"] == pytest.approx(2.3 * 5.0**6, rel=0.1)  # the highest there was
    assert "from 0.01 to about 6.00e-05" in finding.fixes[0]
    assert "?" not in words_of(finding)
    whole = diagnose_with_breaks(destroyed(), LrTooHigh, (2, 5, 19, 20, 30, 200))
    assert same_findings(whole, [finding])


def test_a_run_that_comes_back_is_over_it() -> None:
    [finding] = diagnose(destroyed(after=1.0), LrTooHigh())
    assert finding.last_step is not None
    assert finding.last_step < 30


@pytest.mark.parametrize(
    "run",
    [
        destroyed(update=0.003),  # an easy first batch: nothing threw the weights anywhere
        destroyed(norm=lambda step: 1.0),
        cold(loss=lambda step: 2.3, update=0.5, norm=lambda step: 300.0),
        make_run(loss=lambda step: 2.3 * 5.0**step if step < 7 else 2.5, update=0.5, norm=lambda step: 1.0 + 99 * step),
    ],
)
def test_what_is_not_the_learning_rates_doing(run: Run) -> None:
    assert diagnose(run, LrTooHigh()) == []


def test_a_run_that_was_not_seen_from_its_start_is_not_judged_by_it() -> None:
    assert diagnose(destroyed()[1:], LrTooHigh()) == []
