"""Runs in a process of their own that is killed, and started again with the same command.

Run as a module, with a cell and a folder, it is that process.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from gradvitals.errors import GradvitalsError
from gradvitals.lab.recovery.cell import Cell, Result
from gradvitals.lab.recovery.train import STRUCK, train

RESULT = "result.json"


def train_killed(cell: Cell) -> Result:
    """Start the process, see it die, start it again, and take its result."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        first = _start(cell, folder)
        if first.returncode != -signal.SIGKILL or not (folder / STRUCK).exists():
            raise GradvitalsError(f"{cell.label} was to be killed, but ended with {first.returncode}: {_tail(first)}")
        second = _start(cell, folder)
        if second.returncode != 0:
            raise GradvitalsError(f"{cell.label} failed when it was started again: {_tail(second)}")
        return Result.from_json(json.loads((folder / RESULT).read_text("utf-8")))


def _start(cell: Cell, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", __name__, json.dumps(asdict(cell)), str(folder)]
    return subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def main(description: str, folder: str) -> None:
    """The process."""
    torch.set_num_threads(1)
    result = train(Cell(**json.loads(description)), Path(folder))
    (Path(folder) / RESULT).write_text(json.dumps(result.to_json()), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
