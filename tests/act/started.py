"""Starts a script once for each rank, and reads what each rank wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist


def results_of(script: str | Path, folder: Path, world: int) -> list[dict[str, Any]]:
    """What the ranks of a script have written into a folder; all of them must end well."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", script, str(rank), folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=280)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
