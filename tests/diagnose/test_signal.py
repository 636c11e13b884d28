"""Rules about GSNR, on made-up runs whose GSNR is known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from made_up import (
    Run,
    alarms,
    diagnose,
    diagnose_with_breaks,
    make_layout,
    make_run,
    same_findings,
    words_of,
)

from gradvitals.diagnose import RULES, Rule
from gradvitals.diagnose.history import Averages
from gradvitals.diagnose.rules import batch, schedule, signal
from gradvitals.diagnose.rules.signal import (
    DeepLayerCollapse,
    HighEffortLowProgress,
    NearZeroInitialGsnr,
    NoisyGradients,
    SparseFeatureNoise,
    SuddenGsnrDrop,
)
from gradvitals.types import Reading

FLAT = {"loss": lambda step: 2.3}
BLOCKS = [f"blocks.{i}" for i in range(6)]
HEADS = [f"blocks.{layer}.attn/head{head}" for layer in range(2) for head in range(4)]


def healthy(seed: int, *, every: int = 10, layers: int = 6, heads: int = 0) -> Run:
    """Starts high, falls as a power of the step, each layer and head at its own level."""
    steps = {1: 500, 10: 1500, 50: 3000}[every]
    own = np.exp(0.4 * np.random.default_rng(seed + 1000).normal(size=layers + heads))
    return make_run(
        steps=steps,
        gsnr=lambda step: own * 3.0 / (1 + step / 10) ** 0.8,
        loss=lambda step: 1 + 3 * math.exp(-step / 300),
        norm=lambda step: 1 + 2 * math.exp(-step / 200),
        lr=lambda step: 1e-3 * min(1, (step + 1) / 50) * (1 - 0.9 * step / steps),
        every=every,
        heads=heads,
        spread=0.1,
        seed=seed,
    )


@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize("seed", range(2))
def test_a_healthy_run_has_none_of_these(seed: int, every: int) -> None:
    layout = make_layout(BLOCKS, HEADS)
    rules: list[Rule] = [NearZeroInitialGsnr(), DeepLayerCollapse(), SuddenGsnrDrop()]
    rules += [SparseFeatureNoise(), HighEffortLowProgress(), NoisyGradients()]
    run = healthy(seed, every=every, heads=8)
    assert alarms(diagnose(run, *rules, layout=layout)) == []


@pytest.mark.parametrize("seed", range(8))
def test_noise_that_drowns_the_signal_is_no_alarm(seed: int) -> None:
    """A hundred looks at intervals that overlap, each wrong in one of twenty: nothing may come of chance alone."""
    rng = np.random.default_rng(seed)
    level = math.exp(rng.uniform(math.log(0.02), math.log(1.5)))
    spread = level * math.exp(rng.uniform(0, math.log(8)))
    power, floor = rng.uniform(0, 0.8), rng.uniform(0.1, 2)
    own = np.exp(0.4 * rng.normal(size=14))
    run = make_run(
        steps=600 if seed % 2 else 2000,
        gsnr=lambda step: own * level / (1 + step / 10) ** power,
        loss=lambda step: floor + 3 * math.exp(-step / 300),
        loss_noise=rng.uniform(0.01, 0.1),
        every=1 if seed % 2 else 10,
        heads=8,
        spread=spread,
        seed=seed,
    )
    families = (signal, batch, schedule)
    rules = [rule() for rule in RULES.values() if rule.__module__ in {family.__name__ for family in families}]
    assert len(rules) == 16
    assert alarms(diagnose(run, *rules, layout=make_layout(BLOCKS, HEADS))) == []


# -- near_zero_initial_gsnr ------------------------------------------------------------------------------------------


def test_no_signal_and_a_loss_that_stays() -> None:
    [finding] = diagnose(make_run(gsnr=lambda step: 0.0, spread=0.1, **FLAT), NearZeroInitialGsnr())
    assert (finding.id, finding.severity) == ("near_zero_initial_gsnr", "warning")
    assert finding.found_step is not None
    assert 60 <= finding.found_step <= 200
    assert finding.evidence["seen"]["low"] <= 0 < finding.evidence["seen"]["high"] < 1
    assert "?" not in words_of(finding)
    assert finding.causes[0].startswith("Inputs and targets")


def test_a_cold_start_is_named_as_the_cause() -> None:
    run = make_run(gsnr=lambda step: 0.0, spread=0.1, lr=lambda step: 0.003, **FLAT)
    [finding] = diagnose(run, NearZeroInitialGsnr())
    assert "from the first step" in finding.causes[0]
    assert "warmup" in finding.fixes[1]


def test_a_cold_start_is_told_with_the_rate_it_began_with_whatever_it_is_now() -> None:
    run = make_run(gsnr=lambda step: 0.0, spread=0.1, lr=lambda step: 0.003 * math.exp(-step / 100), **FLAT)
    [finding] = diagnose(run, NearZeroInitialGsnr())
    assert "The learning rate was 0.003 from the first step" in finding.causes[0]
    assert finding.evidence["seen"]["lr"] < 0.002


def test_small_steps_may_just_not_have_moved_the_loss_yet() -> None:
    [finding] = diagnose(make_run(gsnr=lambda step: 0.0, spread=0.1, update=1e-4, **FLAT), NearZeroInitialGsnr())
    assert finding.severity == "info"


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(make_run(gsnr=lambda step: 0.5, spread=0.1, **FLAT), id="there is signal"),
        pytest.param(make_run(gsnr=lambda step: 0.0, spread=0.1), id="the loss falls"),
        pytest.param(make_run(gsnr=lambda step: 0.0, spread=3.0, steps=250, **FLAT), id="nothing is known"),
        pytest.param(make_run(gsnr=lambda step: 0.0, spread=0.1, source="adam", **FLAT), id="moments lag"),
        pytest.param(
            make_run(gsnr=lambda step: 0.0, spread=0.1, lr=lambda step: 1e-6 * (step + 1), **FLAT), id="warming up"
        ),
        pytest.param(
            make_run(gsnr=lambda step: max(0.0, 1 - step / 200), spread=0.1, loss=lambda step: max(1.0, 3 - step / 50)),
            id="it learnt before",
        ),
    ],
)
def test_what_is_not_a_lack_of_signal_at_the_start(run: Run) -> None:
    assert diagnose(run, NearZeroInitialGsnr()) == []


# -- deep_layer_collapse ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("towards", "first"), [("input", "blocks.0"), ("output", "blocks.5")])
def test_a_signal_that_fades_with_depth(towards: str, first: str) -> None:
    levels = np.geomspace(0.02, 2.0, 6)
    run = make_run(gsnr=lambda step: levels if towards == "input" else levels[::-1], spread=0.02)
    [finding] = diagnose(run, DeepLayerCollapse(), layout=make_layout(BLOCKS))
    assert finding.tensors[0] == first
    assert f"toward the {towards}" in finding.title
    assert "?" not in words_of(finding)


@pytest.mark.parametrize(
    ("levels", "spread"),
    [
        pytest.param(np.geomspace(0.5, 2.0, 6), 0.02, id="by too little"),
        pytest.param(np.array([0.02, 2.0, 0.05, 1.5, 0.1, 1.0]), 0.02, id="not in order"),
        pytest.param(np.geomspace(0.02, 2.0, 6), 5.0, id="intervals are wide"),
        pytest.param(np.array([1.0, 1.0, 1.0]), 0.02, id="three layers"),
    ],
)
def test_what_is_not_a_collapse(levels: np.ndarray, spread: float) -> None:
    run = make_run(gsnr=lambda step: levels, spread=spread)
    assert diagnose(run, DeepLayerCollapse(), layout=make_layout(BLOCKS[: len(levels)])) == []


def test_only_layers_that_are_alike_are_compared() -> None:
    names = ["embed", *BLOCKS[:4], "head"]
    levels = np.array([0.001, 1.0, 1.1, 1.2, 1.3, 50.0])
    run = make_run(gsnr=lambda step: levels, spread=0.01)
    assert diagnose(run, DeepLayerCollapse(), layout=make_layout(names)) == []


# -- sudden_gsnr_drop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["microbatch", "adam"])
def test_a_drop_is_found_where_it_is(source: str) -> None:
    run = make_run(steps=1500, gsnr=lambda step: 1.0 if step < 800 else 0.0, spread=0.1, every=10, source=source)  # type: ignore[arg-type]
    [finding] = diagnose(run, SuddenGsnrDrop())
    assert finding.found_step is not None
    assert 800 < finding.found_step <= 800 + 2 * 200
    assert finding.evidence["seen"]["before"] == pytest.approx(1.0, abs=0.2)
    assert "?" not in words_of(finding)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(make_run(steps=1500, gsnr=lambda step: 3 / (1 + step / 20), spread=0.05), id="a slow decline"),
        pytest.param(
            make_run(steps=1500, gsnr=lambda step: 3 / (1 + step / 50) ** 2, spread=0.02), id="a fast decline"
        ),
        pytest.param(
            make_run(
                steps=1500,
                gsnr=lambda step: 1.0 if step < 800 else 0.1,
                spread=0.05,
                lr=lambda step: 1e-6 * min(step, 810),
            ),
            id="the end of warmup",
        ),
        pytest.param(
            make_run(
                steps=1500,
                gsnr=lambda step: 1.0 if step < 800 else 0.05,
                spread=0.05,
                batch_size=lambda step: 64.0 if step < 800 else 4.0,
            ),
            id="a smaller batch",
        ),
        pytest.param(make_run(steps=3000, gsnr=lambda step: 0.03, spread=0.3, every=1), id="hardly any signal"),
    ],
)
def test_what_is_not_a_sudden_drop(run: Run) -> None:
    assert diagnose(run, SuddenGsnrDrop()) == []


def test_sources_are_never_compared_with_each_other() -> None:
    high = make_run(steps=800, gsnr=lambda step: 5.0, spread=0.1, source="adam")
    low = make_run(steps=1600, gsnr=lambda step: 0.01, spread=0.01, source="microbatch")
    assert diagnose([*high, *low[800:]], SuddenGsnrDrop()) == []
    assert (
        diagnose([*low[:800], *make_run(steps=1600, gsnr=lambda step: 0.0, source="adam")[800:]], SuddenGsnrDrop())
        == []
    )


# -- sparse_feature_noise --------------------------------------------------------------------------------------------


def test_a_head_without_a_gradient_is_named() -> None:
    levels = np.array([1.0, 1.0, *[0.5] * 8])
    levels[2 + 6] = np.nan
    run = make_run(gsnr=lambda step: levels, heads=8, spread=0.05)
    [finding] = diagnose(run, SparseFeatureNoise(), layout=make_layout(BLOCKS[:2], HEADS))
    assert (finding.severity, finding.tensors) == ("warning", ("blocks.1.attn/head2",))
    assert finding.found_step == 2
    assert "has no gradient" in finding.title
    assert "?" not in words_of(finding)


def test_a_head_far_below_the_others_is_told_as_info() -> None:
    levels = np.array([1.0, 1.0, *[2.0] * 8])
    levels[3] = 0.01
    run = make_run(steps=600, gsnr=lambda step: levels, heads=8, spread=0.02)
    [finding] = diagnose(run, SparseFeatureNoise(), layout=make_layout(BLOCKS[:2], HEADS))
    assert (finding.severity, finding.tensors) == ("info", ("blocks.0.attn/head1",))


def test_a_layer_whose_heads_are_all_silent_has_another_trouble() -> None:
    levels = np.array([1.0, 1.0, *[0.5] * 4, *[np.nan] * 4])
    run = make_run(gsnr=lambda step: levels, heads=8, spread=0.05)
    assert diagnose(run, SparseFeatureNoise(), layout=make_layout(BLOCKS[:2], HEADS)) == []


# -- high_effort_low_progress ----------------------------------------------------------------------------------------


def effort(*, norm: float = 4.0, gsnr: float = 0.0, loss: float = 3.0) -> Run:
    """After step 300 the norm, the GSNR and the loss become these."""
    return make_run(
        steps=600,
        gsnr=lambda step: 1.0 if step < 300 else gsnr,
        norm=lambda step: 1.0 if step < 300 else norm,
        loss=lambda step: 1 + 2 * math.exp(-step / 60) if step < 300 else loss,
        every=2,
        spread=0.1,
    )


def test_large_steps_without_progress() -> None:
    [finding] = diagnose(effort(), HighEffortLowProgress())
    assert (finding.severity, finding.id) == ("info", "high_effort_low_progress")
    assert finding.found_step is not None
    assert 300 < finding.found_step < 400
    assert finding.evidence["seen"]["ratio"] == pytest.approx(4.0, rel=0.2)
    assert "?" not in words_of(finding)


@pytest.mark.parametrize("change", [{"norm": 1.0}, {"gsnr": 2.0}, {"loss": 0.9}])
def test_two_of_the_three_are_not_enough(change: dict[str, float]) -> None:
    assert diagnose(effort(**change), HighEffortLowProgress()) == []


# -- noisy_gradients -------------------------------------------------------------------------------------------------


def with_shares(run: Run, share: float) -> Run:
    """The same, with the share of coordinates below 1 from the optimizer's moments."""
    below = {"gsnr/below_one_fraction": np.full(6, share)}
    return [[*step, Reading(step=step[0].step, time=0.0, source="adam", tensors=below)] for step in run]


def test_noise_over_signal_is_info_and_said_to_be_ordinary() -> None:
    levels = np.full(6, 0.05)
    [finding] = diagnose(with_shares(make_run(gsnr=lambda step: levels, spread=0.02), 0.93), NoisyGradients())
    assert finding.severity == "info"
    assert "93% of coordinates" in finding.title
    assert "normal" in finding.causes[0]
    seen = finding.evidence["seen"]
    assert seen["whole"] == pytest.approx(4 * 0.05, rel=0.3)
    assert f"the median GSNR per tensor is {seen['median']:.3g}" in finding.title  # the figure that it judges by


def test_a_share_of_coordinates_that_adam_has_wrong_is_not_told() -> None:
    """One huge gradient in its averages makes nearly all coordinates look like noise."""
    run = make_run(gsnr=lambda step: np.full(6, 0.05), spread=0.02)
    run[0][0] = replace(run[0][0], values={**run[0][0].values, "grad/spike_ratio": 1e4})
    [finding] = diagnose(with_shares(run, 0.93), NoisyGradients())
    assert "most tensors" in finding.title


def test_more_signal_than_noise() -> None:
    levels = np.full(6, 2.0)
    assert diagnose(with_shares(make_run(gsnr=lambda step: levels, spread=0.02), 0.2), NoisyGradients()) == []


# -- averages --------------------------------------------------------------------------------------------------------


def general(step: int, size: float) -> Reading:
    return Reading(step=step, time=0.0, batch_size=size)


def gsnr_reading(step: int, size: float) -> Reading:
    return Reading(step=step, time=0.0, source="microbatch", batch_size=size / 4, values={"gsnr": 1.0})


def test_averages_know_where_they_begin() -> None:
    averages = Averages()
    for step in range(0, 1000, 10):
        average = averages.take(gsnr_reading(step, 64), general(step, 64))
        assert average is not None
        assert average.begins == max(10 * math.ceil(step / 20), step - 190)
        before = averages.before(average.begins)
        assert before is None or before.step == average.begins - 10


def test_one_odd_batch_is_passed_over_and_a_new_size_begins_anew() -> None:
    averages = Averages()
    sizes = [64.0] * 30 + [3.0] + [64.0] * 5 + [256.0] * 60
    taken = [averages.take(gsnr_reading(step, size), general(step, size)) for step, size in enumerate(sizes)]
    counts = [average.count if average else 0 for average in taken]
    assert counts[30:32] == [0, 16]  # those of the second half of the run so far
    assert counts[36:55] == [0] * 19  # while readings at the old size are in the average
    assert counts[55] == 20
    assert averages.before(56) is not None
    assert averages.before(55) is None


# -- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [NearZeroInitialGsnr, SuddenGsnrDrop, HighEffortLowProgress, NoisyGradients])
def test_resuming_changes_nothing(rule: type[Rule]) -> None:
    for run in (effort(), make_run(gsnr=lambda step: 0.0, spread=0.1, **FLAT)):
        whole = diagnose(run, rule())
        assert same_findings(diagnose_with_breaks(run, rule, (0, 7, 115, 301, 320)), whole)


def test_resuming_changes_nothing_for_layers_and_heads() -> None:
    layout = make_layout(BLOCKS[:4], HEADS)
    levels = np.array([0.01, 0.1, 0.5, 2.0, *[2.0] * 8])
    levels[9] = np.nan
    run = make_run(steps=600, gsnr=lambda step: levels, heads=8, spread=0.01)
    for rule in (DeepLayerCollapse, SparseFeatureNoise):
        whole = diagnose(run, rule(), layout=layout)
        assert len(whole) == 1
        assert same_findings(diagnose_with_breaks(run, rule, (1, 3, 55, 200), layout), whole)
