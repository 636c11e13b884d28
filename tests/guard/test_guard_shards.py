"""A Guard over four ranks sees and does what it would in one process, however the model is spread over them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded_shards import BROKEN, BUMP, KINDS, MOVED, SPIKE, STEPS, WORLD, train
from ranks import results_of

SCRIPT = Path(__file__).parent / "guarded_shards.py"
NAMES = [*KINDS, MOVED]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # four processes on whatever machine there is


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return {name: json.loads(json.dumps(train(name, None, folder))) for name in ("alone", "alone, whole")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(SCRIPT, tmp_path_factory.mktemp("together"), WORLD)


def both(ranks: list[dict[str, Any]], alone: dict[str, Any], name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What every rank has, and what a single process has."""
    results = [rank.get(name, {"failed": "not reached"}) for rank in ranks]
    for rank, result in enumerate(results):
        assert "failed" not in result, f"rank {rank}: {result['failed']}"
    return results, alone["alone, whole" if "whole" in name else "alone"]


def test_the_single_process_meets_with_everything(alone: dict[str, Any]) -> None:
    """Or the comparison would show little."""
    for name in ("alone", "alone, whole"):
        kinds = {step: kind for kind, step, _ in alone[name]["actions"]}
        assert (kinds[SPIKE], kinds[BUMP], kinds[BROKEN]) == ("skip", "clip", "skip")


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_losses_are_those_of_one_process(ranks: Any, alone: Any, name: str) -> None:
    results, want = both(ranks, alone, name)
    seen, begun = results[0]["seen"], results[0]["begun"]
    assert len(seen) == STEPS - begun
    for step, (found, expected) in enumerate(zip(seen, want["seen"][begun:], strict=True), start=begun):
        if step == BROKEN:
            assert math.isnan(found[0])
            continue
        assert found[0] == pytest.approx(expected[0], rel=1e-5)
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
        assert found[2] == pytest.approx(expected[2], rel=1e-4, abs=1e-6)  # of single tensors, as written down


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_see_the_same_bits(ranks: Any, alone: Any, name: str) -> None:
    results, _ = both(ranks, alone, name)
    for result in results[1:]:
        assert json.dumps(result["seen"]) == json.dumps(results[0]["seen"])  # NaN is not equal to itself


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_do_what_one_process_does(ranks: Any, alone: Any, name: str) -> None:
    results, want = both(ranks, alone, name)
    begun = results[0]["begun"]
    for result in results:
        actions = [action for action in result["actions"] if action[1] >= begun]
        assert actions == [action for action in want["actions"] if action[1] >= begun]
        assert result["step"] == want["step"]
        assert not result["errors"]
        for weight, values in result["weights"].items():
            assert torch.allclose(torch.tensor(values), torch.tensor(want["weights"][weight]), atol=1e-6), weight


def test_the_run_that_moved_continued_from_its_snapshot(ranks: Any, alone: Any) -> None:
    results, _ = both(ranks, alone, MOVED)
    assert [result["begun"] for result in results] == [10] * WORLD
