"""Rules about the batch, on made-up runs whose noise scale is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_up import Run, alarms, diagnose, diagnose_with_breaks, make_run, same_findings, words_of

from gradvitals.diagnose import Rule
from gradvitals.diagnose.rules.batch import (
    BatchTooLarge,
    BatchTooSmall,
    EstimatorUnreliable,
    FewParts,
    IdenticalMicrobatches,
    MixedPasses,
)
from gradvitals.diagnose.rules.schedule import DecayDue
from gradvitals.diagnose.rules.signal import NearZeroInitialGsnr
from gradvitals.types import Reading

RULES: tuple[type[Rule], ...] = (
    BatchTooLarge,
    BatchTooSmall,
    EstimatorUnreliable,
    FewParts,
    IdenticalMicrobatches,
    MixedPasses,
)


def at_noise_scale(noise_scale: float, *, spread: float = 0.1, **options: object) -> Run:
    """A run at a batch of 64 in four micro-batches: the GSNR of one of them is 16 over the noise scale."""
    gsnr = 16 / noise_scale
    return make_run(gsnr=lambda step: gsnr, spread=spread * gsnr, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("noise_scale", [40.0, 64.0, 200.0, 500.0])
@pytest.mark.parametrize("every", [1, 10])
def test_a_batch_near_the_noise_scale_is_fine(noise_scale: float, every: int) -> None:
    assert diagnose(at_noise_scale(noise_scale, every=every), *(rule() for rule in RULES)) == []


# -- batch_too_large -------------------------------------------------------------------------------------------------


def test_a_batch_far_over_the_noise_scale() -> None:
    [finding] = diagnose(at_noise_scale(6.0, every=1), BatchTooLarge())
    assert (finding.id, finding.severity) == ("batch_too_large", "warning")
    assert finding.found_step is not None
    assert finding.found_step < 40
    seen = finding.evidence["seen"]
    assert seen["noise_scale"] == pytest.approx(6.0, rel=0.1)
    assert 8 < seen["ratio"] < 64 / 6.0
    assert "A batch of 64" in finding.title
    assert f"Use about {seen['proposed']} samples" in finding.fixes[0]
    assert "?" not in words_of(finding)


def test_a_batch_some_way_over_it_is_worth_knowing() -> None:
    [finding] = diagnose(at_noise_scale(20.0), BatchTooLarge())
    assert finding.severity == "info"


def test_every_run_begins_with_a_small_noise_scale() -> None:
    early = make_run(gsnr=lambda step: 4 * math.exp(-step / 8), spread=0.05, every=1)
    assert alarms(diagnose(early, BatchTooLarge())) == []


def test_a_warmup_is_waited_for() -> None:
    def lr(step: int) -> float:
        return 1e-6 * min(step, 200)

    [finding] = diagnose(at_noise_scale(6.0, every=1, lr=lr), BatchTooLarge())
    assert finding.found_step is not None
    assert finding.found_step >= 200


def test_without_a_batch_size_there_is_no_noise_scale() -> None:
    run = at_noise_scale(2.0, batch_size=lambda step: None)
    assert diagnose(run, BatchTooLarge(), BatchTooSmall()) == []


def test_a_wide_interval_says_nothing() -> None:
    assert diagnose(at_noise_scale(6.0, spread=5.0), BatchTooLarge(), BatchTooSmall()) == []


# -- batch_too_small -------------------------------------------------------------------------------------------------


def test_a_batch_far_below_the_noise_scale_is_info_while_the_loss_falls() -> None:
    [finding] = diagnose(at_noise_scale(5000.0, steps=600), BatchTooSmall())
    assert (finding.id, finding.severity) == ("batch_too_small", "info")
    assert 10 < finding.evidence["seen"]["ratio"] < 5000 / 64
    assert "?" not in words_of(finding)


def test_it_is_a_warning_where_there_is_no_signal_at_all_and_the_loss_stays() -> None:
    run = make_run(steps=600, gsnr=lambda step: 0.0, spread=0.002, loss=lambda step: 2.3)
    [finding] = diagnose(run, BatchTooSmall())
    assert finding.severity == "warning"
    assert finding.evidence["seen"]["ratio"] > 100


def test_moments_that_lag_do_not_tell() -> None:
    assert diagnose(make_run(steps=600, gsnr=lambda step: 0.0, spread=0.002, source="adam"), BatchTooSmall()) == []


@pytest.mark.parametrize(("size", "severity"), [(1.0, "warning"), (2.0, "warning"), (4.0, "info")])
def test_a_tiny_batch_that_makes_the_loss_swing(size: float, severity: str) -> None:
    run = make_run(steps=200, batch_size=lambda step: size, loss_noise=0.2)
    [finding] = diagnose(run, BatchTooSmall())
    assert (finding.severity, finding.found_step) == (severity, 50)
    assert finding.evidence["seen"]["swing"] == pytest.approx(0.2, rel=0.3)
    assert f"A batch of {size:.0f} is small" in finding.title
    assert "?" not in words_of(finding)


@pytest.mark.parametrize(("size", "noise"), [(8.0, 0.3), (2.0, 0.02)])
def test_a_small_batch_alone_or_a_swing_alone(size: float, noise: float) -> None:
    assert diagnose(make_run(batch_size=lambda step: size, loss_noise=noise), BatchTooSmall()) == []


def test_a_tiny_batch_with_a_clear_signal_is_fine() -> None:
    run = make_run(gsnr=lambda step: 2.0, spread=0.1, batch_size=lambda step: 2.0, micro_batches=2, loss_noise=0.2)
    found = diagnose(run, BatchTooSmall())
    assert all(finding.last_step is not None and finding.last_step < 100 for finding in found)


# -- estimator_unreliable --------------------------------------------------------------------------------------------


def test_an_interval_over_a_decade() -> None:
    run = make_run(steps=1500, gsnr=lambda step: 0.05, spread=0.5)
    [finding] = diagnose(run, EstimatorUnreliable())
    assert finding.severity == "info"
    assert "4 micro-batches" in finding.causes[0]
    assert finding.fixes[0].startswith("Split the same batch")
    assert "?" not in words_of(finding)


def test_a_young_interval_is_not_unreliable() -> None:
    assert diagnose(make_run(steps=150, gsnr=lambda step: 0.05, spread=0.5), EstimatorUnreliable()) == []


# -- identical_microbatches ------------------------------------------------------------------------------------------


def test_micro_batches_without_noise_between_them() -> None:
    [finding] = diagnose(make_run(gsnr=lambda step: math.inf), IdenticalMicrobatches())
    assert (finding.severity, finding.first_step, finding.found_step) == ("warning", 0, 2)
    assert "All 4 micro-batches" in finding.title
    assert "64 samples per step are worth only 16" in finding.fixes[0]
    assert "?" not in words_of(finding)


def test_a_very_high_gsnr_is_not_none() -> None:
    assert diagnose(make_run(gsnr=lambda step: 300.0), IdenticalMicrobatches()) == []


def test_one_reading_without_noise_is_not_enough() -> None:
    run = [
        [Reading(step=step, time=0.0, source="microbatch", values={"gsnr": math.inf if step % 3 else 1.0})]
        for step in range(30)
    ]
    assert diagnose(run, IdenticalMicrobatches()) == []


# -- few_parts -------------------------------------------------------------------------------------------------------


def scaled(parts: int, **options: object) -> Run:
    """A run whose optimizer scales gradients by how well so many parts agree."""
    run = make_run(gsnr=lambda step: 0.5, micro_batches=parts, **options)  # type: ignore[arg-type]
    for readings in run:
        if len(readings) > 1:
            readings[0].values["vrgd/mean"] = 0.4  # type: ignore[index]
    return run


def test_a_variance_reduced_optimizer_with_two_parts_is_noted() -> None:
    [finding] = diagnose(scaled(2), FewParts())
    assert (finding.severity, finding.first_step) == ("info", 0)
    assert "the agreement of only 2 micro-batches" in finding.title
    assert "the same batch of 64 into 6 or more" in finding.fixes[0]
    assert "?" not in words_of(finding)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(scaled(8), id="enough parts"),
        pytest.param(make_run(gsnr=lambda step: 0.5, micro_batches=2), id="an optimizer that does not scale"),
        pytest.param(scaled(2, batch_size=lambda step: None), id="nobody told the batch size"),
    ],
)
def test_what_is_no_few_parts(run: Run) -> None:
    assert diagnose(run, FewParts()) == []


# -- resuming --------------------------------------------------------------------------------------------------------


# -- mixed_passes ----------------------------------------------------------------------------------------------------


def opposed(**options: object) -> Run:
    """Two passes whose gradients point against each other, so that the GSNR between them is near -1/2."""
    return make_run(gsnr=lambda step: -0.45, spread=0.05, micro_batches=2, loss=lambda step: 1.3, **options)  # type: ignore[arg-type]


def in_turn(run: Run) -> Run:
    return [[replace(first, values={**first.values, "step/in_turn": 1.0}), *others] for first, *others in run]


def test_passes_that_point_against_each_other_are_no_samples_of_one_thing() -> None:
    [finding] = diagnose(opposed(), MixedPasses())
    assert (finding.severity, finding.first_step, finding.last_step) == ("info", 2, None)
    assert finding.found_step == 220  # the 25th reading in a row
    assert "their GSNR and noise scale are meaningless" in finding.title


def test_a_game_needs_fewer_readings_and_is_named() -> None:
    [finding] = diagnose(in_turn(opposed()), MixedPasses())
    assert finding.found_step == 10  # readings 2, 4, 8 and 10
    assert "GAN" in finding.causes[0]


@pytest.mark.parametrize("seed", range(4))
def test_no_signal_at_all_is_not_a_signal_below_0(seed: int) -> None:
    assert diagnose(make_run(gsnr=lambda step: 0.0, steps=2000, spread=0.1, seed=seed), MixedPasses()) == []


def test_nobody_judges_by_a_gsnr_that_means_nothing() -> None:
    rules = (BatchTooSmall(), BatchTooLarge(), EstimatorUnreliable(), NearZeroInitialGsnr(), DecayDue())
    assert diagnose(opposed(steps=800), *rules) == []
    [before] = diagnose(make_run(gsnr=lambda step: 0.0, spread=0.02, loss=lambda step: 1.3), NearZeroInitialGsnr())
    assert before.severity == "warning"


def test_where_passes_are_mixed_the_next_best_source_is_followed() -> None:
    below = opposed(steps=400)
    moments = make_run(gsnr=lambda step: 4.0, spread=0.1, source="adam", steps=400)
    both = [[*first, *second[1:]] for first, second in zip(below, moments, strict=True)]
    assert [finding.id for finding in diagnose(both, MixedPasses(), BatchTooLarge(far=100.0))] == [
        "mixed_passes",
        "batch_too_large",
    ]


@pytest.mark.parametrize("rule", RULES)
def test_resuming_changes_nothing(rule: type[Rule]) -> None:
    runs = [at_noise_scale(6.0), at_noise_scale(5000.0, steps=600), make_run(gsnr=lambda step: math.inf)]
    runs += [make_run(steps=900, gsnr=lambda step: 0.05, spread=0.5), scaled(2)]
    for run in runs:
        whole = diagnose(run, rule())
        assert same_findings(diagnose_with_breaks(run, rule, (0, 3, 45, 111, 333)), whole)


def test_nothing_of_this_needs_a_number_that_may_be_missing() -> None:
    silent = [[Reading(step=step, time=0.0)] for step in range(100)]
    nan = {"gsnr": math.nan, "gsnr_low": math.nan, "gsnr_high": math.nan}
    broken = [
        [
            Reading(step=step, time=0.0, batch_size=2, values={"loss": math.nan, "grad/norm": np.nan}),
            Reading(step=step, time=0.0, source="microbatch", batch_size=1, values=nan),
        ]
        for step in range(100)
    ]
    for run in (silent, broken):
        assert diagnose(run, *(rule() for rule in RULES)) == []
