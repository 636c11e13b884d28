"""What happens in some steps only, and what an audit says of ranks that agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rank_compare import Seen, names
from rank_results import Results
from rank_scenarios import SCENARIOS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@names(lambda scenario: scenario.fault is None)
def test_clean_steps_have_nothing_to_tell(name: str, results: Results) -> None:
    for reading in results.of(name)[0]["readings"]:
        if reading["source"] is None:
            assert reading["values"]["grad/nonfinite"] == 0
            assert "grad/carried" not in reading["values"]
            assert "step/left_out" not in reading["values"]


@names(lambda scenario: scenario.fault == "nan")
def test_gradients_that_are_not_numbers_are_counted(name: str, results: Results) -> None:
    """At first the tensors that have any, from some step on the elements; never some of both."""
    truth, seen = results.truth(name), Seen(results, name).tables("grad/nonfinite")
    elements = False
    for number in range(2, SCENARIOS[name].steps):
        broken = {n: int((~np.isfinite(g)).sum()) for n, g in truth.steps[number].seen.items()}
        tensors = {n: float(count > 0) for n, count in broken.items()}
        table = {n: value for n, value in seen[number].items() if n}
        elements = elements or table != tensors
        assert table == (broken if elements else tensors), f"step {number}"
        assert seen[number][""] == sum(table.values())
        assert number > 2 or not elements


@names(lambda scenario: scenario.scaler)
def test_steps_that_a_scaler_skips(name: str, results: Results) -> None:
    found = [r["values"]["step/skipped"] for r in results.of(name)[0]["readings"] if r["source"] is None]
    assert found == [float(SCENARIOS[name].fault == "inf" and step == 2) for step in range(SCENARIOS[name].steps)]


@names(lambda scenario: scenario.clip is not None)
def test_what_the_loop_clips_to(name: str, results: Results) -> None:
    by_hand = SCENARIOS[name].way in ("tp", "tp_sequence", "fsdp_tp", "fsdp_tp_sequence", "pipeline")
    found = [r["values"].get("clip/max_norm") for r in results.of(name)[0]["readings"] if r["source"] is None]
    assert found == [None if by_hand else 0.3] * SCENARIOS[name].steps


@names(lambda scenario: scenario.fault == "carried")
def test_gradients_that_were_not_zeroed(name: str, results: Results) -> None:
    found = [r["values"].get("grad/carried", 0) for r in results.of(name)[0]["readings"] if r["source"] is None]
    assert found == [0, 0, *[1] * (SCENARIOS[name].steps - 2)]  # as in one process: seen from the third step on


# -- the audit ------------------------------------------------------------------------------------------------------


def of_audits(results: Results, name: str) -> list[dict[str, Any]]:
    """All steps are audited here."""
    return [reading for reading in results.of(name)[0]["readings"] if reading["source"] is None]


@names(lambda scenario: scenario.fault is None and not scenario.keep_none)
def test_an_audit_of_ranks_that_agree(name: str, results: Results) -> None:
    scenario = SCENARIOS[name]
    for reading in of_audits(results, name):
        values, ranks = reading["values"], reading["ranks"]
        assert all(len(array) == scenario.world for array in ranks.values())
        if scenario.has_replicas:
            assert values["ranks/checksum_mismatch"] == 0
            assert np.any(ranks["ranks/replica"] == 0)
        assert not np.any(ranks.get("ranks/replica", np.zeros(1)) == 1)
        assert "ranks/checksum_mismatch" not in reading["tensors"]
        if scenario.num_data > 1:
            assert values["ranks/duplicates"] == 0
            assert ranks["ranks/twin"].tolist() == [-1] * scenario.world
        assert values.get("ranks/duplicates", 0) == 0
        assert values.get("ranks/out_of_step", 0) == 0


@names(lambda scenario: scenario.num_data > 1 and scenario.fault is None and not scenario.keep_none)
def test_norms_before_the_reduction(name: str, results: Results) -> None:
    scenario = SCENARIOS[name]
    truth = results.truth(name).local_norms()
    per_worker = scenario.world // scenario.num_data
    for reading in of_audits(results, name):
        norms = truth[reading["step"]]
        expected = [norm for norm in norms for _ in range(per_worker)]
        tolerance = scenario.tolerance if scenario.precision == "float32" else 0.05
        assert reading["ranks"]["ranks/norm"].tolist() == pytest.approx(expected, rel=tolerance)
        spread = float(np.std(norms, ddof=1) / np.mean(norms))
        assert reading["values"]["ranks/norm_dispersion"] == pytest.approx(
            spread, rel=0.01 * (100 * tolerance), abs=3 * tolerance
        )
