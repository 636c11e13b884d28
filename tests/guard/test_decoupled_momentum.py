"""decoupled_momentum: momentum by rank, in both directions, from given and measured GSNR, and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gradvitals as gv
from gradvitals.errors import ConfigError
from gradvitals.schedules import decoupled_momentum, split_by_layer


def optimizer_of(kind: Any, count: int = 3, **options: Any) -> torch.optim.Optimizer:
    return kind([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(count)], lr=0.1, **options)


def momenta(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups]


@pytest.mark.parametrize(("direction", "expected"), [(1, [0.825, 0.975, 0.9]), (-1, [0.975, 0.825, 0.9])])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_momentum_goes_by_rank_in_either_direction_and_back(kind: Any, direction: Any, expected: list[float]) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {"betas": (0.9, 0.95)}
    optimizer = optimizer_of(kind, **options)
    before = [dict(group) for group in optimizer.param_groups]
    done = decoupled_momentum(optimizer, [0.1, 7.0, 0.2], direction=direction)
    assert momenta(optimizer) == pytest.approx(expected)
    assert done.momentum == momenta(optimizer)
    if kind is torch.optim.AdamW:
        assert {group["betas"][1] for group in optimizer.param_groups} == {0.95}
    (action,) = done.actions
    assert (action.kind, action.taken) == ("momentum", True)
    assert action.before["momentum"]["group 1"] == 0.9
    assert action.after["momentum"]["group 1"] == pytest.approx(expected[1])
    assert action.after["gsnr"]["group 1"] == 7.0
    optimizer.step()  # the settings are ones that the optimizer takes
    done.undo()
    assert [dict(group) for group in optimizer.param_groups] == before


def test_ties_share_a_rank_and_a_group_without_a_gsnr_keeps_its_momentum() -> None:
    optimizer = optimizer_of(torch.optim.SGD, count=5, momentum=0.9)
    decoupled_momentum(optimizer, [5.0, 1.0, math.nan, 5.0, 2.0], delta=0.03)
    # Four are known: places -1, -1/3, and 2/3 for the two that share the ranks 2 and 3.
    assert momenta(optimizer) == pytest.approx([0.92, 0.87, 0.9, 0.92, 0.89])


def test_groups_keep_their_own_momentum_as_the_middle() -> None:
    optimizer = optimizer_of(torch.optim.SGD, count=2, momentum=0.9)
    optimizer.param_groups[0]["momentum"] = 0.5
    decoupled_momentum(optimizer, [2.0, 1.0], delta=0.1)
    assert momenta(optimizer) == pytest.approx([0.6, 0.8])


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=2, max_size=6),
    base=st.floats(0.001, 0.999),
    delta=st.floats(0.001, 0.999),
    direction=st.sampled_from([1, -1]),
)
def test_momentum_stays_in_bounds_and_undo_is_exact(
    values: list[float], base: float, delta: float, direction: Any
) -> None:
    optimizer = optimizer_of(torch.optim.SGD, count=len(values), momentum=base)
    done = decoupled_momentum(optimizer, values, delta=delta, direction=direction)
    assert all(0 < momentum < 1 for momentum in momenta(optimizer))
    done.update(values[::-1])
    done.undo()
    assert momenta(optimizer) == [base] * len(values)


def test_a_second_ranking_starts_from_what_was_there_first() -> None:
    optimizer = optimizer_of(torch.optim.SGD, count=2, momentum=0.9)
    done = decoupled_momentum(optimizer, [1.0, 2.0])
    with pytest.raises(ConfigError, match="already"):
        decoupled_momentum(optimizer, [1.0, 2.0])
    done.update([2.0, 1.0])
    assert momenta(optimizer) == pytest.approx([0.975, 0.825])


@pytest.mark.parametrize(
    ("optimizer", "options", "told"),
    [
        (optimizer_of(torch.optim.SGD, count=1, momentum=0.9), {}, "split_by_layer"),
        (optimizer_of(torch.optim.SGD), {}, "no momentum to shift"),
        (optimizer_of(torch.optim.Adagrad), {}, "no momentum to shift"),
        (optimizer_of(torch.optim.SGD, momentum=0.9), {"delta": 0.0}, "delta is 0.0"),
        (optimizer_of(torch.optim.SGD, momentum=0.9), {"direction": 2}, "direction is 2"),
        (optimizer_of(torch.optim.SGD, momentum=0.9), {"bounds": (0.0, 1.0)}, "bounds are"),
        (optimizer_of(torch.optim.SGD, count=2, momentum=0.9), {}, "3 values of GSNR for 2 groups"),
    ],
)
def test_what_cannot_be_done_is_reported(optimizer: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        decoupled_momentum(optimizer, [1.0, 2.0, 3.0], **options)


# -- splitting groups -------------------------------------------------------------------------------------------------


def test_groups_are_split_by_layer_with_their_settings_and_train_as_before() -> None:
    def trained(split: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        matrices = [(n, p) for n, p in model.named_parameters() if p.dim() == 2]
        vectors = [(n, p) for n, p in model.named_parameters() if p.dim() == 1]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2
        )
        if split:
            assert split_by_layer(optimizer, model) == ["0", "2", "0", "2"]
            assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.1, 0.0, 0.0]
            assert optimizer.param_groups[1]["param_names"] == ["2.weight"]
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def test_groups_that_a_scheduler_counts_are_not_split() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(ConfigError, match="before"):
        split_by_layer(optimizer, model)


# -- a real run -------------------------------------------------------------------------------------------------------


def noisy_run(tmp_path: Path, signals: tuple[float, ...], steps: int = 30) -> tuple[gv.Monitor, torch.optim.Optimizer]:
    """Layers whose gradients have these means and a standard deviation of 1, by four micro-batches a step."""
    torch.manual_seed(0)
    model = nn.ModuleDict({f"layer{i}": nn.Linear(50, 1, bias=False) for i in range(len(signals))})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    split_by_layer(optimizer, model)
    monitor = gv.Monitor(model, optimizer, run=tmp_path / "run", config=gv.Config(tensor_every=1, quiet=True))
    for _ in range(steps):
        for _ in range(4):
            parts = zip(model.parameters(), signals, strict=True)
            (sum((p * (mean + torch.randn_like(p))).sum() for p, mean in parts) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return monitor, optimizer


def test_measured_layers_are_ranked_and_it_is_in_the_run(tmp_path: Path) -> None:
    monitor, optimizer = noisy_run(tmp_path, (1.0, 3.0, 0.1))
    done = decoupled_momentum(optimizer, monitor)
    assert momenta(optimizer) == pytest.approx([0.9, 0.975, 0.825])
    assert done.actions[0].step == 29
    found = done.actions[0].after["gsnr"]
    assert found["group 1 (layer1)"] == pytest.approx(9.0, rel=0.1)  # per micro-batch: mean² / variance
    done.undo()
    monitor.close()
    assert [action.kind for action in gv.open_run(monitor.run_path).actions] == ["momentum", "momentum"]


def test_layers_of_one_kind_are_left_alone(tmp_path: Path) -> None:
    monitor, optimizer = noisy_run(tmp_path, (0.1, 0.1, 0.1))
    done = decoupled_momentum(optimizer, monitor)
    monitor.close()
    assert momenta(optimizer) == [0.9] * 3
    assert not done.actions[0].taken


def test_without_readings_of_micro_batches_it_says_what_to_do(tmp_path: Path) -> None:
    monitor, optimizer = noisy_run(tmp_path, (1.0, 2.0), steps=1)
    with monitor, pytest.raises(ConfigError, match="no GSNR from adam"):
        decoupled_momentum(optimizer, monitor, source="adam")
