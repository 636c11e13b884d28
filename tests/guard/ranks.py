"""Starts a script once for each rank, and reads what each rank wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist
from warm_process import run_ranks


def results_of(script: Path, folder: Path, world: int) -> list[dict[str, Any]]:
    """What the ranks of a script have written into a folder; all of them must end well."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    run_ranks(script, world, folder, folder=folder)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world)]
