"""A snapshot that some ranks wrote is gone on from by more or fewer of them, sharded in the same way or in another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from moving_ranks import AFTER, BEFORE, MOVES, WORLD, size_of
from started import results_of

from gradvitals.act.snap_place import Place, source_of

SCRIPT = Path(__file__).parent / "moving_ranks.py"
NAMES = [f"{before} to {after}" for before, after in MOVES]
WHOLE = [name for name in NAMES if not name.startswith("own") and not name.endswith(("pipe", "same_names"))]
"""Moves after which each rank trains the whole model on. Stages without their neighbours cannot."""


pytestmark = pytest.mark.timeout(300)  # four processes on whatever machine there is


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    results = results_of(SCRIPT, tmp_path_factory.mktemp("moved"), WORLD)
    return {name: [result.get(name, {"error": "not reached"}) for result in results] for name in NAMES}


def after(moved: dict[str, list[dict[str, Any]]], name: str) -> list[dict[str, Any]]:
    """What the ranks have that went on."""
    for rank, result in enumerate(moved[name]):
        assert "error" not in result, f"rank {rank}: {result['error']}"
    return moved[name][: size_of(name.split(" to ")[1])]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_what_it_was(moved: dict[str, Any], name: str) -> None:
    for result in after(moved, name):
        assert result["step"] == BEFORE
        assert result["read"] < 1e-6
        assert result["lr"] == pytest.approx(0.05 * 0.9 ** (BEFORE + AFTER))


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_training_goes_on_as_in_one_process(moved: dict[str, Any], name: str) -> None:
    for result in after(moved, name):
        assert result["later"] < 1e-5
    if name.endswith("zero3"):
        assert sum(result["states"] for result in after(moved, name)) == 6


@pytest.mark.slow
def test_state_that_ranks_have_parts_of_begins_anew(moved: dict[str, Any]) -> None:
    for result in after(moved, "own_state2 to own_state4"):
        assert result["states"] == 0
        assert "state of 6 tensors" in result["changed"][0]


@pytest.mark.slow
def test_a_position_that_all_ranks_had_is_set(moved: dict[str, Any]) -> None:
    for result in after(moved, "ddp2 to ddp3"):
        assert result["position"] == [BEFORE + AFTER, 0]
        assert "mind the 3 data workers in place of 2" in result["changed"][0]


@pytest.mark.slow
def test_positions_of_single_ranks_are_not(moved: dict[str, Any]) -> None:
    for result in after(moved, "ddp3 to ddp2"):
        assert result["position"] == [AFTER, 0]
        assert "the data position is not set" in result["changed"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("fsdp4 to fsdp2", [10, 11]),
        ("ddp2 to ddp3", [10, 11, 12]),
        ("alone to fsdp2", [10, 11]),
        ("fsdp_tp to tp", [10, 11]),
        ("fsdp_tp to fsdp4", [10, 12, 12, 13]),
    ],
)
def test_random_numbers_go_on_where_a_worker_stays(moved: dict[str, Any], name: str, seeds: list[int]) -> None:
    """Ranks were seeded by 10 and their number. A worker that was not there before keeps its own."""
    assert [result["random"] for result in after(moved, name)] == [[seed] for seed in seeds]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp2 to ddp2", "same_names to same_names"])
def test_nothing_is_said_where_as_many_ranks_go_on(moved: dict[str, Any], name: str) -> None:
    results = after(moved, name)
    assert [result["changed"] for result in results] == [[], []]
    assert [result["extra"] for result in results] == [0, 1]


def test_a_rank_goes_on_with_what_one_in_its_place_had() -> None:
    then = [Place(rank, worker=rank // 2) for rank in range(4)]
    now = [Place(rank, worker=rank // 2) for rank in range(6)]
    assert [source_of(here, now, then).rank for here in now] == [0, 1, 2, 3, 0, 1]
    assert [source_of(here, now[:2], then).rank for here in now[:2]] == [0, 1]
    stages = [Place(rank, worker=0, stage=rank) for rank in range(3)]
    assert [source_of(here, stages, stages).rank for here in stages] == [0, 1, 2]
