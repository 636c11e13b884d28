"""Two processes write one snapshot together, and each goes on from its part of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed as dist

TWO_RANKS = Path(__file__).parent / "two_ranks.py"


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_two_processes_resume_what_they_wrote_together(tmp_path: Path, kind: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, TWO_RANKS, str(rank), tmp_path / "meeting", tmp_path / "snapshots", kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
