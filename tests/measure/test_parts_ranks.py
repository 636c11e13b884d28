"""Every rank's own gradients, before they are reduced: four processes over gloo against a plain float64 copy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parts_scenarios import ALSO_UNWATCHED, SCENARIOS, STEPS, WORLD, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def results(spawned_once: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each rank found in each scenario."""
    return spawned_once("parts", run_ranks, 1)[0]["ranks"]


def compared(name: str, results: list[dict[str, Any]]) -> list[tuple[str, dict[int, float], dict[int, float], Any]]:
    """What was measured and expected under each name, for every rank and step."""
    pairs = []
    for rank in range(WORLD):
        found = results[rank][name]
        assert not found["errors"], found["errors"][0]
        assert len(found["steps"]) == STEPS
        for step in found["steps"]:
            assert step["count"] == SCENARIOS[name].micro
            assert step["measured"].keys() == step["expected"].keys()
            pairs += [(key, step["measured"][key], step["expected"][key], step) for key in step["expected"]]
    return pairs


@pytest.mark.parametrize("name", SCENARIOS)
def test_norms_are_those_of_the_ranks_own_samples(name: str, results: list[dict[str, Any]]) -> None:
    names, tolerance = results[0][name].get("names"), SCENARIOS[name].tolerance
    for key, measured, expected, _ in compared(name, results):
        assert measured.keys() == expected.keys(), key
        if "radial" not in key:
            for row, square in expected.items():
                close = math.isclose(measured[row], square, rel_tol=2 * tolerance, abs_tol=1e-14)
                assert close, (key, row if "heads" in key else names[row], measured[row], square)


@pytest.mark.parametrize("name", SCENARIOS)
def test_components_along_the_weights(name: str, results: list[dict[str, Any]]) -> None:
    for key, measured, expected, step in compared(name, results):
        if "radial" in key:
            for row, product in expected.items():
                length = math.sqrt(step["expected"][key.replace("_radial", "")][row])
                close = math.isclose(measured[row], product, abs_tol=20 * SCENARIOS[name].tolerance * length + 1e-9)
                assert close, (key, results[0][name]["names"][row], measured[row], product)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp x tp, sequence"])
def test_backward_shows_the_order_of_the_layers(name: str, results: list[dict[str, Any]]) -> None:
    found = results[0][name]
    order = [found["names"][row] for row in found["arrivals"]]
    assert sorted(order) == sorted(set(order))
    assert order.index("head.weight") < order.index("blocks.1.up.weight") < order.index("blocks.0.up.weight")
    assert order.index("blocks.0.attention.out.weight") < order.index("words.weight")


@pytest.mark.parametrize("name", ALSO_UNWATCHED)
def test_training_is_the_same_to_the_last_bit(name: str, results: list[dict[str, Any]]) -> None:
    for rank in range(WORLD):
        found = results[rank][name]
        assert all(torch.equal(a, b) for a, b in zip(found["weights"], found["unwatched"], strict=True))


def test_flat_parameters_are_refused_with_a_reason(results: list[dict[str, Any]]) -> None:
    for rank in range(WORLD):
        assert results[rank]["refused"]["refused"]
        assert "fully_shard" in results[rank]["refused"]["reason"]
