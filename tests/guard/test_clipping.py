"""What is left of a gradient by the run's own past, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_runs import bits
from torch import Tensor, nn

import gradvitals as gv
from gradvitals.guard import Clip

NO_SKIP = {"skip": "off", "rollback": "off"}


class Direct(nn.Module):
    """A model whose gradient is what it is told to be."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        first, second = dtypes or (torch.float32, torch.float32)
        self.first = nn.Parameter(torch.zeros(4, dtype=first))
        self.second = nn.Parameter(torch.zeros(9, dtype=second))

    def backward(self, first: float, second: float) -> None:
        """Gradients of these norms, all elements the same."""
        for parameter, norm in ((self.first, first), (self.second, second)):
            value = norm / math.sqrt(parameter.numel())
            (parameter * torch.full_like(parameter, value)).sum().backward()


def steps(
    model: Direct,
    where: Path,
    norms: list[tuple[float, float]],
    clip: Clip,
    *,
    loop: Callable[[Iterable[nn.Parameter]], Any] = lambda parameters: None,
    **guard: Any,
) -> tuple[list[tuple[float, float]], gv.Guard]:
    """The norms that were left, as plain gradient descent shows them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = gv.watch(model, optimizer, run=where, config=gv.Config(quiet=True, diagnose=False))
    watching = gv.Guard(monitor, mode="act", clip=clip, **{**NO_SKIP, **guard})
    left = []
    for first, second in norms:
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.zero_()
        model.backward(first, second)
        monitor.observe()
        loop(model.parameters())
        optimizer.step()
        left.append((float(model.first.detach().norm()), float(model.second.detach().norm())))
    monitor.close()
    return left, watching


def clipped_to(max_norm: float) -> Callable[[Iterable[nn.Parameter]], Any]:
    return lambda parameters: nn.utils.clip_grad_norm_(parameters, max_norm)


STEADY = [(0.6 * norm, 0.8 * norm) for norm in (1.0, 1.01, 1.02, 1.03, 1.04)] * 8
MEAN, STD = 1.02, 0.01 * math.sqrt(2)


@pytest.mark.parametrize(
    ("clip", "norm", "expected"),
    [
        (Clip(quantile=0.5), 2.04, 1.02),
        (Clip(quantile=0.99), 2.08, 1.04),
        (Clip(method="zscore"), MEAN + 5 * STD, MEAN + 1.25 * STD),  # acceptance test A16
        (Clip(method="zscore"), MEAN + 2.4 * STD, MEAN + 2.4 * STD),
        (Clip(first_steps=41), 50.0, 50.0),
        (Clip(method="zscore", first_steps=41), 50.0, 50.0),
        (Clip(method="tensor", first_steps=41), 50.0, 50.0),
    ],
)
def test_what_is_left_follows_from_the_past(clip: Clip, norm: float, expected: float, tmp_path: Path) -> None:
    left, _ = steps(Direct(), tmp_path / "run", [*STEADY, (0.6 * norm, 0.8 * norm)], clip)
    assert math.hypot(*left[-1]) == pytest.approx(expected, rel=1e-4)


def test_each_tensor_by_its_own_past_as_adagc(tmp_path: Path) -> None:
    norms = [(2.0, 8.0), (1.0, 9.0), (3.0, 4.0), (2.1, 4.0), (2.1, 4.0)]
    left, _ = steps(Direct(), tmp_path / "run", norms, Clip(method="tensor", first_steps=3))
    assert left[:3] == [pytest.approx(pair) for pair in norms[:3]]
    assert left[3] == pytest.approx((1.05, 4.0))  # the averages begin at the smallest norm so far
    assert left[4] == pytest.approx((1.05 * (0.98 * 1.0 + 0.02 * 1.05), 4.0))


def test_what_is_not_finite_does_not_get_into_the_averages(tmp_path: Path) -> None:
    norms = [(2.0, 1.0), (2.0, 1.0), (math.nan, 1.0), (2.0, math.inf), (4.2, 1.05)]
    left, _ = steps(Direct(), tmp_path / "run", norms, Clip(method="tensor", first_steps=2))
    assert left[-1] == pytest.approx((2.1, 1.05))


@pytest.mark.parametrize(
    ("clip", "loop"),
    [(Clip(), lambda parameters: nn.utils.clip_grad_value_(parameters, 1e9)), (Clip(method="tensor"), clipped_to(1e9))],
    ids=["to a value", "by one norm, beside one of each tensor"],
)
def test_what_the_loop_clips_in_another_way_is_left_alone(clip: Clip, loop: Any, tmp_path: Path) -> None:
    left, guard = steps(Direct(), tmp_path / "run", [*QUIET, (300.0, 400.0)], clip, loop=loop)
    assert left[30] == pytest.approx((300.0, 400.0))
    assert guard.actions == []


QUIET = [(3.0, 4.0)] * 30


@pytest.mark.parametrize(
    "dtypes",
    [(torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)],
    ids=["double", "half", "mixed"],
)
def test_gradients_of_any_precision_are_clipped_to_the_limit(dtypes: tuple[torch.dtype, ...], tmp_path: Path) -> None:
    left, guard = steps(Direct(*dtypes), tmp_path / "run", [*QUIET, (300.0, 400.0), (3.0, 4.0)], Clip())
    tolerance = 2e-2 if torch.bfloat16 in dtypes else 1e-5
    assert left[29] == pytest.approx((3.0, 4.0), rel=tolerance)
    assert left[30] == pytest.approx((3.0, 4.0), rel=tolerance)  # the largest norm before
    assert left[31] == pytest.approx((3.0, 4.0), rel=tolerance)
    action = next(action for action in guard.actions if action.step == 30)
    assert (action.kind, action.finding, action.taken) == ("clip", "explosion", True)
    assert action.before["norm"] == pytest.approx(500.0, rel=tolerance)
    assert action.after["norm"] == pytest.approx(5.0, rel=tolerance)


@pytest.mark.parametrize("method", ["quantile", "zscore"])
def test_with_the_loops_own_clipping_no_more_than_that_is_left(method: str, tmp_path: Path) -> None:
    left, guard = steps(Direct(), tmp_path / "run", [*QUIET, (300.0, 400.0)], Clip(method=method), loop=clipped_to(2.0))  # type: ignore[arg-type]
    assert left[30] == pytest.approx((1.2, 1.6), rel=1e-4)
    assert guard.actions == []


def test_if_the_loop_allows_more_the_limit_of_the_past_counts(tmp_path: Path) -> None:
    left, _ = steps(Direct(), tmp_path / "run", [*QUIET, (300.0, 400.0)], Clip(), loop=clipped_to(50.0))
    assert left[30] == pytest.approx((3.0, 4.0), rel=1e-4)


def test_a_dry_run_clips_nothing_and_says_what_it_would(tmp_path: Path) -> None:
    left, guard = steps(Direct(), tmp_path / "run", [*QUIET, (300.0, 400.0)], Clip(mode="dry_run"))
    assert left[30] == pytest.approx((300.0, 400.0))
    (action,) = guard.actions
    assert not action.taken
    assert action.reason == "dry run; the gradient norm is 500; it would be clipped to 5 (quantile)"


@pytest.mark.parametrize(
    ("clip", "name"),
    [(Clip(mode="off"), "SparseAdam"), (Clip(), "SGD"), (Clip(method="tensor"), "SparseAdam")],
    ids=["off", "quantile", "tensor"],
)
def test_sparse_gradients(clip: Clip, name: str, tmp_path: Path) -> None:
    def train(where: Path | None, bad: set[int]) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Embedding(20, 4, sparse=True)
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        monitor, guard = None, None
        if where is not None:
            monitor = gv.watch(model, optimizer, run=where, config=gv.Config(quiet=True, diagnose=False))
            guard = gv.Guard(monitor, mode="act", clip=clip, skip=gv.guard.Skip(ratio=100.0))
        for index in range(60):
            if where is None and index in bad:
                continue
            optimizer.zero_grad()
            rows = torch.randint(0, 20, (8,), generator=torch.Generator().manual_seed(index))
            loss = (model(rows) * (math.nan if index in bad else 1.0)).square().sum()
            loss.backward()
            if monitor is not None:
                monitor.observe(loss)
            optimizer.step()
        if monitor is not None:
            assert [finding.id for finding in monitor.findings if finding.id.endswith("error")] == []
            monitor.close()
        return guard, bits(model.state_dict())

    guard, got = train(tmp_path / "run", {7, 40})
    assert {action.step for action in guard.actions if action.kind == "skip"} == {7, 40}
    if clip.mode == "off":
        assert got == train(None, {7, 40})[1]


def test_a_sparse_gradient_is_clipped(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    monitor = gv.watch(model, optimizer, run=tmp_path / "run", config=gv.Config(quiet=True, diagnose=False))
    guard = gv.Guard(monitor, clip="on", **NO_SKIP)
    rows = torch.arange(4)
    before: Tensor = torch.empty(0)
    for index in range(31):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model(rows) * (50.0 if index == 30 else 0.5)).sum().backward()
        optimizer.step()
    monitor.close()
    assert [finding.id for finding in monitor.findings if finding.id.endswith("error")] == []
    assert [action.kind for action in guard.actions] == ["clip"]
    assert float((model.weight - before).detach().norm()) == pytest.approx(2.0, rel=1e-4)
