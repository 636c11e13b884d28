"""Ranks under DistributedDataParallel count as parts of a batch, like micro-batches: four processes over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from four_ranks import (
    MISTAKES,
    SCENARIOS,
    STEPS,
    WORLD,
    in_one_process,
    loss_of,
    new_model,
    run_all,
    then_another_in_one_process,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(spawned_once: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each rank found in each scenario."""
    return spawned_once("ranks", run_all, WORLD)


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_equal_micro_batches(name: str, results: list[dict[str, Any]]) -> None:
    scenario = SCENARIOS[name]
    found = [results[rank][name] for rank in range(scenario.ranks)]
    for each in found:
        assert "error" not in each, each["trace"]
        assert set(each["num_parts"]) == {scenario.num_parts}
    expected, start = in_one_process(scenario), [p.detach() for p in new_model(scenario).parameters()]
    moved = max((wanted - before).abs().max() for wanted, before in zip(expected, start, strict=True))
    assert moved > 1e-3
    for got, wanted in zip(found[0]["weights"], expected, strict=True):
        assert (got - wanted).abs().max() <= scenario.tolerance * moved


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_agree_bit_for_bit(name: str, results: list[dict[str, Any]]) -> None:
    found = [results[rank][name]["weights"] for rank in range(SCENARIOS[name].ranks)]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_identical_ranks_equal_the_base(results: list[dict[str, Any]]) -> None:
    scenario = SCENARIOS["identical ranks"]
    model = new_model(scenario)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, scenario, step, 0).backward()
        optimizer.step()
    for got, wanted in zip(results[0]["identical ranks"]["weights"], model.parameters(), strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-12, atol=1e-13)


def test_model_outlives_its_optimizer(results: list[dict[str, Any]]) -> None:
    """Plain descent afterwards equals that on a model that never had such an optimizer."""
    for rank in range(WORLD):
        found = results[rank]["then_plain"]
        assert "error" not in found, found["trace"]
        for got, wanted in zip(found["weights"], found["expected"], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def test_second_optimizer_on_the_same_model(results: list[dict[str, Any]]) -> None:
    expected = then_another_in_one_process()
    for rank in range(WORLD):
        found = results[rank]["then_another"]
        assert "error" not in found, found["trace"]
        assert found["num_parts"] == [8] * STEPS
        for got, wanted in zip(found["weights"], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


WORDS = {
    "forgotten": ("RuntimeError", "use_ranks"),
    "wrong_number": ("RuntimeError", "8"),
    "no_sync_forgotten": ("RuntimeError", "no_sync"),
    "no_sync_forgotten_later": ("RuntimeError", "no_sync"),
    "averaged_twice": ("RuntimeError", "no_sync"),
    "not_a_ddp_model": ("TypeError", "DistributedDataParallel"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_raise_with_the_fix(name: str, results: list[dict[str, Any]]) -> None:
    kind, word = WORDS[name]
    for rank in range(WORLD):
        assert results[rank][name].get("kind") == kind, results[rank][name]
        assert word in results[rank][name]["error"]
