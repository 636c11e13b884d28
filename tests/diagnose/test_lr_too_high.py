"""A learning rate that is far too high and breaks nothing: the weights grow, and then nothing is learnt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
from made_up import Run, due, make_layout, same_findings, words_of

from benchmarks.faults.record import record
from benchmarks.faults.tasks import RECIPES, Recipe, with_changes
from benchmarks.faults.zoo import OTHER_OPTIMIZER
from gradvitals.diagnose import Diagnosis, RunInfo
from gradvitals.diagnose.rules.schedule import LrTooHigh
from gradvitals.types import Finding, Layout, Reading, TensorInfo

ADAM = RunInfo(optimizer="AdamW", betas=(0.9, 0.999))
LOWEST = -0.1 / 1.9
"""What Adam's averages give where there is no signal at all and gradients cancel."""
FIRST_RATIO = 0.6
"""Of the first step, to the weights after it, which are then 1 where they began with 0.8."""


def jumped(step: int, loss: float) -> float:
    """A loss that began with 4 and jumped."""
    return 4.0 if step == 0 else 5.0 if step < 4 else loss


def thrown(
    *,
    grows_to: float = 4.0,
    loss: Callable[[int], float] = lambda step: jumped(step, 3.2),
    signal: Callable[[int], float] = lambda step: 0.98,
    adam: bool = True,
    tensors: int = 6,
    steps: int = 300,
) -> Run:
    """Weights grow to some multiple of what they began with; the GSNR is a share of the lowest there is."""
    run: Run = []
    for step in range(steps):
        values = {"loss": loss(step), "lr": 0.1, "grad/norm": 1.0}
        if not due(step, 10):
            run.append([Reading(step=step, time=0.0, values=values)])
            continue
        ratio = FIRST_RATIO if step == 0 else 0.02
        size = 1.0 if step == 0 else 0.8 * (1 + (grows_to - 1) * min(1.0, step / 40))
        rows = np.full(tensors, 8.0 * size)
        general = Reading(
            step=step,
            time=0.0,
            values={**values, "update/ratio": ratio, "weight/norm": 8.0 * size},
            tensors={"weight/norm": rows, "update/ratio": np.full(tensors, ratio)},
        )
        gsnr = np.full(tensors, LOWEST * signal(step))
        run.append([general])
        if adam and step:
            run[-1].append(Reading(step=step, time=0.0, source="adam", tensors={"gsnr": gsnr}))
    return run


def found(run: Run, info: RunInfo = ADAM, layout: Layout | None = None, breaks: tuple[int, ...] = ()) -> list[Finding]:
    diagnosis = Diagnosis(rules=[LrTooHigh()], info=info)
    diagnosis.describe(layout or make_layout())
    for readings in run:
        if readings[0].step in breaks:
            saved = json.loads(json.dumps(diagnosis.state_dict()))
            diagnosis = Diagnosis(rules=[LrTooHigh()], info=info)
            diagnosis.describe(layout or make_layout())
            diagnosis.load_state_dict(saved)
        diagnosis.read(readings)
    return diagnosis.findings


def test_weights_that_grew_and_a_model_that_learns_nothing() -> None:
    [finding] = found(thrown())
    assert (finding.severity, finding.first_step, finding.found_step, finding.last_step) == ("warning", 0, 60, None)
    assert finding.title == (
        "The learning rate of 0.1 is too high: the first 50 steps multiplied the weights by 4, and after 60 steps the "
        "loss is still 3.2 (it started at 4)"
    )
    # One step was 0.6 / 0.8 of what the weights began with, at 0.1: a step of 0.015 of them takes 0.002.
    assert finding.fixes[0] == "Start again and lower the learning rate from 0.1 to about 0.002"
    assert "median GSNR of -0.0516" in finding.causes[0]
    assert "?" not in words_of(finding)
    assert same_findings(found(thrown(), breaks=(1, 9, 50, 60, 61, 200)), [finding])


def test_a_run_that_was_never_thrown_may_be_at_its_lowest() -> None:
    """Soft or noisy labels have a high floor; near it there is no signal, and weights that began small have grown."""
    assert found(thrown(loss=lambda step: 4.0 if step == 0 else 3.2)) == []


def test_it_is_over_when_the_loss_falls_far() -> None:
    [finding] = found(thrown(loss=lambda step: jumped(step, 3.2 if step < 120 else 1.5)))
    assert finding.last_step is not None
    assert 120 < finding.last_step < 145


def test_it_is_over_when_there_is_a_signal_and_the_loss_follows_it() -> None:
    def loss(step: int) -> float:
        return jumped(step, 3.2 if step < 120 else 2.7)

    [finding] = found(thrown(loss=loss, signal=lambda step: 0.98 if step < 120 else 0.2))
    assert finding.last_step is not None
    [finding] = found(thrown(signal=lambda step: 0.98 if step < 120 else 0.2))  # Adam forgets, the loss stays
    assert finding.last_step is None


def test_without_adams_averages_only_a_loss_that_has_not_moved_tells() -> None:
    sgd = RunInfo(optimizer="SGD", momentum=0.9)
    [finding] = found(thrown(adam=False, loss=lambda step: jumped(step, 3.9)), sgd)
    assert finding.found_step == 60
    assert "One step changed the weights by 60% of their norm" in finding.causes[0]
    assert found(thrown(adam=False), sgd) == []


def one_matrix() -> Layout:
    return make_layout(["head"])


def biases() -> Layout:
    tensors = [
        TensorInfo(index=i, name=f"b{i}", shape=(64,), dtype="float32", layer=f"b{i}", depth=i) for i in range(6)
    ]
    return Layout(tensors=tuple(tensors), layers=tuple(f"b{i}" for i in range(6)))


@pytest.mark.parametrize(
    ("run", "layout"),
    [
        (thrown(grows_to=2.2), None),  # as with a good learning rate
        (thrown(signal=lambda step: 0.6), None),
        (thrown(loss=lambda step: 4.0 * math.exp(-step / 50)), None),
        (thrown(tensors=1), one_matrix()),  # a linear model has to grow
        (thrown(), biases()),
        (thrown()[1:], None),  # not seen from its start
    ],
)
def test_what_does_not_tell_a_learning_rate_that_is_too_high(run: Run, layout: Layout | None) -> None:
    assert found(run, layout=layout) == []


@pytest.mark.parametrize(
    ("recipe", "factor", "is_found"),
    [
        (RECIPES["mlp"], 100.0, True),
        (RECIPES["mlp"], 30.0, True),
        (RECIPES["mlp"], 3.0, False),
        (OTHER_OPTIMIZER["cnn"], 10.0, False),  # the weights grow fivefold, and it learns as well as any
    ],
)
def test_real_runs(recipe: Recipe, factor: float, is_found: bool) -> None:
    plain = with_changes(
        recipe, schedule="constant", lr=factor * recipe.lr, micro_batches=1, micro_batch_size=64, stop=80
    )
    recording = record("run", plain, seed=0, tensor_every=50)
    findings = found(recording.steps, RunInfo.from_json(recording.facts), recording.layout)  # type: ignore[arg-type]
    assert [finding.id for finding in findings] == ["lr_too_high"] * is_found
    if is_found:
        proposed = findings[0].evidence["seen"]["lr_proposed"]
        assert 0.3 * recipe.lr < proposed < 5 * recipe.lr
