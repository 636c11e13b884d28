"""Runs every scenario once, two and four processes at a time, for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_results import JOBS, Results

HERE = Path(__file__).parent
TURNS = {name: turn / len(jobs) for jobs in JOBS.values() for turn, name in enumerate(jobs)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one scenario follow each other: a worker of xdist finds the truth of some scenarios, not of all."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    mine = sorted((items[place] for place in places), key=_turn)
    for place, item in zip(places, mine, strict=True):
        items[place] = item


def _turn(item: pytest.Item) -> float:
    """When the ranks come to its scenario, both worlds at once; tests of no scenario come last."""
    callspec = getattr(item, "callspec", None)
    return TURNS.get(callspec.params.get("name"), 1.0) if callspec else 1.0


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    folder, alone = tmp_path_factory.getbasetemp(), "PYTEST_XDIST_WORKER" not in os.environ
    if not alone:
        folder = folder.parent  # which the workers share
    # Named, results outlive the session: to look at what one failed at, or to hold them against a changed test.
    named = os.environ.get("RANKS_FOLDER")
    folder = Path(named or folder / "ranks_of_the_matrix")
    folder.mkdir(exist_ok=True)
    results = Results(folder)
    yield results
    results.close(stop=alone and named is None)
