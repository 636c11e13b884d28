"""Two real processes under DDP: whatever one rank alone sees, both do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from guarded_ranks import BAD, STEPS
from ranks import results_of

SCRIPT = Path(__file__).parent / "guarded_ranks.py"
SKIPPED = [["skip", BAD, True]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results_of(SCRIPT, tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "actions"),
    [
        ("clean", []),
        ("nan_gradient", SKIPPED),
        ("observed_on_one", []),
        ("nan_loss", []),
        ("nan_weight_on_one", [*SKIPPED, ["roll_back", BAD, True]]),
        ("scaler", []),
        ("scaler_on_one", []),
    ],
)
def test_both_decide_the_same(ranks: list[dict[str, Any]], scenario: str, actions: list[Any]) -> None:
    first, second = (rank[scenario] for rank in ranks)
    assert first["actions"] == second["actions"] == actions
    assert first["step"] == second["step"]
    if scenario != "scaler_on_one":  # after which the ranks' scales differ, as they would without a Guard
        assert first["weights"] == second["weights"]
    assert not first["errors"]
    assert not second["errors"]
    back_at_8 = 8 + STEPS - BAD - 1  # the last healthy snapshot; the batch itself is skipped
    lost = {"nan_weight_on_one": STEPS - back_at_8, "clean": 0, "observed_on_one": 0, "nan_loss": 0}
    assert first["step"] == STEPS - lost.get(scenario, 1)
