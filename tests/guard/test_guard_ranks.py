"""Ranks under a Guard do the same, and what one process would, however the model is spread over them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import guarded_ranks
import pytest
import torch
from guarded_shards import BROKEN, BUMP, KINDS, MOVED, SPIKE, STEPS, WORLD, train
from torch import distributed as dist
from warm_process import run_ranks

HERE = Path(__file__).parent
NAMES = [*KINDS, MOVED]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # four processes on whatever machine there is


def results_of(script: str, folder: Path, world: int) -> list[dict[str, Any]]:
    """What the ranks of a script have written into a folder; all of them must end well."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    run_ranks(HERE / script, world, folder, folder=folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]


# -- two ranks under DDP: whatever one rank alone sees, both do the same ----------------------------------------------

SKIPPED = [["skip", guarded_ranks.BAD, True]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("guarded_ranks.py", tmp_path_factory.mktemp("pair"), 2)


@pytest.mark.parametrize(
    ("scenario", "actions"),
    [
        ("clean", []),
        ("nan_gradient", SKIPPED),
        ("observed_on_one", []),
        ("nan_loss", []),
        ("nan_weight_on_one", [*SKIPPED, ["roll_back", guarded_ranks.BAD, True]]),
        ("scaler", []),
        ("scaler_on_one", []),
    ],
)
def test_both_decide_the_same(pair: list[dict[str, Any]], scenario: str, actions: list[Any]) -> None:
    first, second = (rank[scenario] for rank in pair)
    assert first["actions"] == second["actions"] == actions
    assert first["step"] == second["step"]
    if scenario != "scaler_on_one":  # after which the ranks' scales differ, as they would without a Guard
        assert first["weights"] == second["weights"]
    assert not first["errors"]
    assert not second["errors"]
    steps, bad = guarded_ranks.STEPS, guarded_ranks.BAD
    back_at_8 = 8 + steps - bad - 1  # the last healthy snapshot; the batch itself is skipped
    lost = {"nan_weight_on_one": steps - back_at_8, "clean": 0, "observed_on_one": 0, "nan_loss": 0}
    assert first["step"] == steps - lost.get(scenario, 1)


# -- four ranks in every arrangement ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    return {name: json.loads(json.dumps(train(name, None, folder))) for name in ("alone", "alone, whole")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of("guarded_shards.py", tmp_path_factory.mktemp("together"), WORLD)


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
