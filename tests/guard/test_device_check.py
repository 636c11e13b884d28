"""What a step is about to do, and whether the device leaves it out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from gradvitals.guard.actions import LAG, DeviceCheck, StepNumbers, step_numbers
from gradvitals.guard.monitor_link import StepInputs
from gradvitals.guard.policy import LARGEST_NORM

NAN, INF = math.nan, math.inf


def arrival(*norms: Any, losses: Any = (), scale: float | None = None) -> StepInputs:
    parts = [(list(range(len(part))), torch.tensor(part)) for part in norms]
    return StepInputs(
        norms=parts,
        parameters=[nn.Parameter(torch.zeros(1)) for part in norms for _ in part],
        scale=torch.tensor(scale) if scale is not None else None,
        losses=list(losses),
        clipped=False,
        max_norm=None,
    )


def seen(norm: float, loss: float = NAN) -> StepNumbers:
    return StepNumbers(torch.tensor(norm), torch.tensor(loss), [])


def looked(*args: Any, per_tensor: bool = False, **settings: Any) -> StepNumbers:
    found = step_numbers(arrival(*args, **settings), per_tensor=per_tensor)
    assert found is not None
    return found


def test_the_norm_of_all_is_that_of_the_norms() -> None:
    assert float(looked([3.0, 4.0]).norm) == pytest.approx(5.0)
    assert float(looked([2.0, 3.0], [6.0]).norm) == pytest.approx(7.0)


def test_a_loss_scale_is_taken_out() -> None:
    found = looked([300.0, 400.0], scale=100.0, per_tensor=True)
    assert float(found.norm) == pytest.approx(5.0)
    assert [values.tolist() for _, values in found.tensor_norms] == [[3.0, 4.0]]


@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_tensor_that_is_not_finite_makes_the_norm_so(bad: float) -> None:
    assert not float(looked([1.0, bad], [2.0]).norm) <= LARGEST_NORM


def test_the_loss_is_the_mean_of_the_losses_of_the_loop() -> None:
    assert float(looked([1.0], losses=[torch.tensor(2.5)]).loss) == 2.5
    assert float(looked([1.0], losses=[1.0, torch.tensor(2.0), 6.0]).loss) == pytest.approx(3.0)
    assert float(looked([1.0], losses=[1.0, 2.0]).loss) == pytest.approx(1.5)
    assert float(looked([1.0], losses=[torch.tensor(2.0, dtype=torch.bfloat16)]).loss) == 2.0
    assert math.isnan(float(looked([1.0]).loss))


def test_losses_of_any_size_are_no_error() -> None:
    assert math.isnan(float(looked([1.0], losses=[INF, -INF]).loss))
    assert float(looked([1.0], losses=[1e300]).loss) == INF
    assert float(looked([1.0], losses=[1e300, torch.tensor(1.0)]).loss) == INF


@pytest.mark.parametrize(
    ("norm", "surprise", "limit", "expected"),
    [
        (1.0, 1.0, 2.0, 0),
        (2.0, 2.0, 2.0, 0),
        (2.1, 1.0, 2.0, 1),
        (1.0, 2.1, 2.0, 1),
        (1.0, NAN, 2.0, 1),
        (1e30, 1e30, INF, 0),
        (NAN, 1.0, INF, 1),
        (INF, 1.0, INF, 1),
    ],
)
def test_what_is_over_a_limit_or_not_finite_is_skipped(
    norm: float, surprise: float, limit: float, expected: int
) -> None:
    numbers = StepNumbers(torch.tensor(norm), torch.tensor(NAN), [], torch.tensor(surprise))
    assert float(DeviceCheck(3).skips(numbers, limit, limit)) == expected


def test_a_streak_is_over_at_its_maximum_but_not_for_what_is_not_finite() -> None:
    gate = DeviceCheck(2)
    norms = [9.0, 9.0, 9.0, 9.0, NAN, 9.0, 1.0, 9.0, INF, 9.0]
    assert [float(gate.skips(seen(norm), 2.0, INF)) for norm in norms] == [1, 1, 0, 0, 1, 0, 0, 1, 1, 0]


def send(check: DeviceCheck, step: int, **numbers: float) -> None:
    names = ("norm", "loss", "skipped", "scaler", "factor", "streak", "surprise")
    check.send(step, 5.0, False, *(torch.tensor(numbers.get(name, 0.0)) for name in names))


def test_results_are_read_a_fixed_number_of_steps_later_and_as_they_were_sent() -> None:
    check = DeviceCheck(3)
    for now in range(LAG + 3):
        assert [result.step for result in check.results(now)] == ([now - LAG] if now >= LAG else [])
        send(check, now, norm=float(now), loss=2.5, skipped=1.0, factor=0.25)
    rest = check.results()
    assert [(one.step, one.norm, one.loss) for one in rest] == [(now, float(now), 2.5) for now in range(3, LAG + 3)]
    assert {(one.limit, one.skipped, one.scaler_skipped, one.factor) for one in rest} == {(5.0, True, False, 0.25)}
    assert check.results() == []
