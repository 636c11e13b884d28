"""Runs every scenario once, two and four processes at a time, for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rank_results import Results


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
