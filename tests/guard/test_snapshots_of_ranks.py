"""Two processes write one snapshot together, and each continues from its part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed as dist
from warm_process import run_ranks

SCRIPT = Path(__file__).parent / "snapshot_ranks.py"


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_two_processes_resume_what_they_wrote_together(tmp_path: Path, kind: str) -> None:
    run_ranks(SCRIPT, 2, tmp_path / "meeting", tmp_path / "snapshots", kind, folder=tmp_path, seconds=100)
