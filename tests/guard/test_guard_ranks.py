"""Two real processes under DDP: whatever one rank alone sees, both do the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
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
        ("loss_on_one", SKIPPED),
        ("told_by_one", SKIPPED),
        ("nan_loss", SKIPPED),
        ("finding_on_one", [["roll_back", 20, True]]),
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
    back_at_8 = 8 + STEPS - 20 - 1  # the last snapshot before the finding; the batch of step 20 is skipped
    assert first["step"] == {"clean": STEPS, "finding_on_one": back_at_8}.get(scenario, STEPS - 1)
