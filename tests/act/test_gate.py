"""What a step is about to do, and whether the device leaves it out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gradvitals.act.gate import DeviceGate, Landing, Seen, look
from gradvitals.act.limits import LARGEST_NORM
from gradvitals.collect.recorder import StepInputs

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


def seen(norm: float, loss: float = NAN) -> Seen:
    return Seen(torch.tensor(norm), torch.tensor(loss), [])


def looked(*args: Any, each: bool = False, **settings: Any) -> Seen:
    found = look(arrival(*args, **settings), each=each)
    assert found is not None
    return found


def test_the_norm_of_all_is_that_of_the_norms() -> None:
    assert float(looked([3.0, 4.0]).norm) == pytest.approx(5.0)
    assert float(looked([2.0, 3.0], [6.0]).norm) == pytest.approx(7.0)


def test_norms_may_come_as_single_numbers() -> None:
    single = StepInputs([([0, 1], [torch.tensor(3.0), torch.tensor(4.0)])], [], None, [], False, None)
    found = look(single, each=True)
    assert found is not None
    assert float(found.norm) == pytest.approx(5.0)
    assert [values.tolist() for _, values in found.tensor_norms] == [[3.0, 4.0]]


def test_a_loss_scale_is_taken_out() -> None:
    found = looked([300.0, 400.0], scale=100.0, each=True)
    assert float(found.norm) == pytest.approx(5.0)
    assert [values.tolist() for _, values in found.tensor_norms] == [[3.0, 4.0]]


def test_there_is_nothing_to_see_without_gradients() -> None:
    assert look(arrival(), each=False) is None


@pytest.mark.parametrize("bad", [NAN, INF])
def test_one_tensor_that_is_not_finite_makes_the_norm_so(bad: float) -> None:
    assert not float(looked([1.0, bad], [2.0]).norm) <= LARGEST_NORM


def test_the_loss_is_the_mean_of_what_the_loop_told() -> None:
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
    ("norm", "loss", "limits", "expected"),
    [
        (1.0, 1.0, (2.0, 2.0), 0),
        (2.0, 2.0, (2.0, 2.0), 0),
        (2.1, 1.0, (2.0, 2.0), 1),
        (1.0, 2.1, (2.0, 2.0), 1),
        (1.0, NAN, (2.0, 2.0), 0),
        (1e30, 1e30, (INF, INF), 0),
        (NAN, 1.0, (INF, INF), 1),
        (INF, 1.0, (INF, INF), 1),
        (INF, NAN, (2.0, 2.0), 1),
    ],
)
def test_what_is_over_a_limit_or_not_finite_is_left_out(
    norm: float, loss: float, limits: tuple[float, float], expected: int
) -> None:
    assert float(DeviceGate(3).left_out(seen(norm, loss), *limits)) == expected


def test_a_streak_is_over_at_its_maximum_but_not_for_what_is_not_finite() -> None:
    gate = DeviceGate(2)
    norms = [9.0, 9.0, 9.0, 9.0, NAN, 9.0, 1.0, 9.0, INF, 9.0]
    assert [float(gate.left_out(seen(norm), 2.0, INF)) for norm in norms] == [1, 1, 0, 0, 1, 0, 0, 1, 1, 0]


@given(st.lists(st.sampled_from([1.0, 9.0, 9.0, 9.0, NAN]), max_size=60), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_finite_steps_are_never_left_out_more_than_max_streak_times_in_a_row(norms: list[float], most: int) -> None:
    gate, row = DeviceGate(most), 0
    for norm in norms:
        out = float(gate.left_out(seen(norm), 2.0, INF)) == 1
        assert out or math.isfinite(norm)
        row = row + 1 if out and math.isfinite(norm) else 0
        assert row <= most


def send(landing: Landing, step: int, **numbers: float) -> None:
    names = ("norm", "loss", "left_out", "scaler", "factor", "streak")
    landing.send(step, (5.0, 6.0), False, *(torch.tensor(numbers.get(name, 0.0)) for name in names))


def test_numbers_are_looked_at_a_fixed_number_of_steps_later() -> None:
    landing = Landing(lag=3)
    arrived = {}
    for now in range(8):
        arrived[now] = [landed.step for landed in landing.landed(now)]
        send(landing, now, norm=float(now))
    assert arrived == {0: [], 1: [], 2: [], 3: [0], 4: [1], 5: [2], 6: [3], 7: [4]}
    rest = landing.landed()
    assert [(landed.step, landed.norm) for landed in rest] == [(5, 5.0), (6, 6.0), (7, 7.0)]
    assert landing.landed() == []


def test_numbers_arrive_as_they_were_sent() -> None:
    landing = Landing(lag=0)
    send(landing, 4, norm=1.5, loss=2.5, left_out=1.0, scaler=0.0, factor=0.25)
    (landed,) = landing.landed(4)
    assert (landed.step, landed.limits, landed.norm, landed.loss) == (4, (5.0, 6.0), 1.5, 2.5)
    assert (landed.left_out, landed.scaler_skipped, landed.factor) == (True, False, 0.25)
