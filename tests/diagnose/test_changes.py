"""What a program is asked to set: the height of a schedule, and within what one run supports."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from benchmarks.faults.record import record
from benchmarks.faults.tasks import RECIPES, Recipe, with_changes
from benchmarks.faults.zoo import OTHER_OPTIMIZER
from gradvitals.diagnose import Diagnosis, RunInfo
from gradvitals.diagnose.message import Message, Observation, explain
from gradvitals.diagnose.rule import RULES, Rule
from gradvitals.diagnose.step import Step
from gradvitals.types import Reading

MESSAGE = Message(
    name="n", pattern="p", title="t", causes={}, fixes={"low": "Lower it from {lr} to {lr_proposed}"}, passed="p"
)


def change(seen: dict[str, float], peak: float) -> dict[str, float]:
    observation = Observation(severity="warning", seen=seen, text={"peak_lr": peak}, fixes=("low",))
    return dict(explain(MESSAGE, observation, 9).fixes[0].change)


def test_a_change_is_of_the_schedule_and_not_of_the_moment() -> None:
    assert change({"lr": 1e-3, "lr_proposed": 3e-4}, 1e-2) == {"lr": pytest.approx(3e-3)}
    assert change({"lr": 1e-2, "lr_proposed": 3e-3}, 1e-2) == {"lr": pytest.approx(3e-3)}


def test_the_first_rate_of_a_warmup_is_no_change() -> None:
    for name in ("warmup_needed", "near_zero_initial_gsnr"):
        message = RULES[name].message
        assert message is not None
        assert "lr_proposed" not in message.fixes["warmup"]


@dataclass
class Raises(Rule):
    """Would raise the learning rate a millionfold."""

    id = "raises"
    message = MESSAGE
    needs = ("lr",)

    def check(self, step: Step) -> Observation | None:
        lr = step.value("lr")
        seen = {"lr": lr, "lr_proposed": 1e6 * lr}
        return Observation(severity="warning", seen=seen, fixes=("low",)) if step.number == 40 else None


@pytest.mark.parametrize(
    ("rates", "per_rate", "proposed"),
    [
        ([1e-6], math.nan, 1e-5),  # nobody knows what updates do
        ([1e-6], 1e-3 / 5e-6, 1e-5),  # what is measured does not lower it
        ([1e-6], 1e-3 / 2e-4, 2e-4),  # updates change the weights by 0.1% at 2e-4
        ([1e-6], 1e-3 / 2.0, 1e-3),  # at most a thousandfold
        ([1e-7] * 35 + [1e-5], 1e-3 / 2e-4, 2e-4),  # each reading tells by its own rate
        ([1e-5] * 20 + [1e-6], 1e-3 / 2e-4, 2e-4),  # and what is proposed is the height of the schedule
        ([1e-2] * 20 + [1e-4], 1e-3 / 2e-4, 0.1),
    ],
)
def test_a_rate_may_rise_tenfold_or_until_updates_are_of_an_ordinary_size(
    rates: list[float], per_rate: float, proposed: float
) -> None:
    diagnosis = Diagnosis(rules=[Raises()])
    for step in range(41):
        lr = rates[min(step, len(rates) - 1)]
        values = {"lr": lr, "update/ratio": per_rate * lr}
        diagnosis.read([Reading(step=step, time=0.0, values=values)])
    (finding,) = diagnosis.findings
    assert finding.fixes[0].change["lr"] == pytest.approx(proposed)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("recipe", "factor"), [(RECIPES["mlp"], 1e-5), (OTHER_OPTIMIZER["mlp"], 1e-3), (OTHER_OPTIMIZER["cnn"], 1e-3)]
)
def test_a_rate_far_too_low_is_raised_more_than_tenfold_and_not_too_far(recipe: Recipe, factor: float) -> None:
    low = with_changes(
        recipe, schedule="constant", lr=factor * recipe.lr, micro_batches=1, micro_batch_size=64, stop=60
    )
    recording = record("run", low, seed=0, tensor_every=50)
    diagnosis = Diagnosis(info=RunInfo.from_json(recording.facts))  # type: ignore[arg-type]
    diagnosis.describe(recording.layout)
    for step in recording.steps:
        diagnosis.read(step)
    (finding,) = [one for one in diagnosis.findings if one.id == "update_ratio"]
    proposed = finding.fixes[0].change["lr"] / recipe.lr  # type: ignore[union-attr]
    assert 20 * factor < proposed < 0.5
