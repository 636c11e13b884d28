"""One record of all ranks, and training as if nobody looked."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from rank_compare import same
from rank_results import Results
from rank_scenarios import ALSO_BARE, COUNTED, SCENARIOS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

OURS = ("monitor_error", "store_error", "rule_error", "guard_error", "ranks_error")


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_have_the_same_readings(name: str, results: Results) -> None:
    first, *others = results.of(name)
    for rank, other in enumerate(others, 1):
        assert len(first["readings"]) == len(other["readings"]) > 0
        for one, two in zip(first["readings"], other["readings"], strict=True):
            assert same(one, two), f"rank {rank} has another {one['source']} reading of step {one['step']}"
        assert same(first["latest"], other["latest"]), f"rank {rank} has another latest"


@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if scenario.fault is None])
def test_what_was_read_is_on_disk(name: str, results: Results) -> None:
    record = results.of(name)[0]
    for metric, (steps, values) in record["stored"].items():
        read = [r for r in record["readings"] if r["source"] is None and metric in r["values"]]
        assert steps == [r["step"] for r in read] == list(range(SCENARIOS[name].steps))
        assert np.allclose(values, [r["values"][metric] for r in read], rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_only_rank_0_writes_and_no_rank_has_an_error_of_ours(name: str, results: Results) -> None:
    for rank, answer in enumerate(results.of(name)):
        assert len(answer["files"]) == 1
        errors = [finding for finding in answer["findings"] if finding[0] in OURS]
        assert not errors, f"rank {rank}: {errors[0]}"


@pytest.mark.parametrize("name", ALSO_BARE)
def test_training_is_the_same_to_the_last_bit(name: str, results: Results) -> None:
    watched, bare = results.of(name), results.of(f"{name} / not watched")
    for rank, (one, other) in enumerate(zip(watched, bare, strict=True)):
        assert len(one["final"]) == len(other["final"]) > 0
        for number, (a, b) in enumerate(zip(one["final"], other["final"], strict=True)):
            assert np.array_equal(a, b), f"rank {rank}, tensor {number}"


@pytest.mark.parametrize("name", COUNTED)
def test_few_small_all_reduces_and_nothing_else(name: str, results: Results) -> None:
    """Every step is read in full: one sum, before it a check that ranks bring the same, and one maximum."""
    for answer, bare in zip(results.of(name), results.of(f"{name} / not watched"), strict=True):
        calls: Counter[str] = Counter()
        for part in (answer["calls"], answer["calls_at_close"]):
            calls.update(part["main"])
            calls.update(part["other"])
        calls.subtract(bare["calls"]["main"])
        calls.subtract(bare["calls"]["other"])
        steps = SCENARIOS[name].steps
        reduced = sum(calls.pop(name, 0) for name in ("all_reduce", "all_reduce:SUM", "all_reduce:MAX"))
        assert 2 * steps <= reduced <= 3 * steps
        assert not +calls
        assert max(answer["calls"]["sizes"] + answer["calls_at_close"]["sizes"], default=0) < 64_000
