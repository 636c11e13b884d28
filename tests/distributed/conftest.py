"""Runs every scenario once, two and four processes at a time, for all tests of this folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_results import Results


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which the workers share
    # Named, results outlive the session: to look at what one failed at, or to hold them against a changed test.
    folder = Path(os.environ.get("RANKS_FOLDER", folder / "ranks_of_the_matrix"))
    folder.mkdir(exist_ok=True)
    return Results(folder)
