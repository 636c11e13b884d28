"""Two processes write one snapshot together, and each continues from its part of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from snapshot_ranks import Trained
from torch import distributed as dist
from warm_process import run_ranks

SCRIPT = Path(__file__).parent / "snapshot_ranks.py"


@pytest.mark.slow
@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo")
@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_two_processes_resume_what_they_wrote_and_one_process_resumes_it_too(tmp_path: Path, kind: str) -> None:
    run_ranks(SCRIPT, 2, tmp_path / "meeting", tmp_path / "snapshots", kind, folder=tmp_path, seconds=100)
    alone = Trained("alone", tmp_path / "snapshots")
    restored = alone.snapshots.resume()
    assert restored is not None
    assert (restored.step, "changed from 2 to 1" in restored.changed) == (6, True)
    full = torch.load(tmp_path / "meeting.pt")
    assert all(torch.equal(value, full[name]) for name, value in alone.net.state_dict().items())
    assert len(alone.optimizer.state) == 6
    alone.snapshots.close()
