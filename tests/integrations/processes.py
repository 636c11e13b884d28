"""Scripts, run bare and under `gradvitals run`."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "examples" / "unmodified"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    status: int
    out: str
    err: str


def python(*args: str, cwd: Path, stdin: str = "", program: str = sys.executable) -> Ended:
    """What `python args...` does."""
    environment = {**ENVIRONMENT, "PYTHON_EXEC": program}  # which torchrun starts its ranks with
    done = subprocess.run(
        [program, *args], input=stdin, capture_output=True, text=True, cwd=cwd, env=environment, timeout=100
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def watched(*args: str, cwd: Path, stdin: str = "", program: str = sys.executable) -> Ended:
    """What `gradvitals run args...` does."""
    return python("-m", "gradvitals", "run", *args, cwd=cwd, stdin=stdin, program=program)


def in_this_process(script: Path, *args: str) -> str:
    """What a script prints without gradvitals. Here, where its frameworks are imported already."""
    out, before, threads = io.StringIO(), sys.argv, torch.get_num_threads()
    sys.argv = [str(script), *args]
    torch.set_num_threads(1)
    try:
        with contextlib.redirect_stdout(out), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
        torch.set_num_threads(threads)
    return out.getvalue()


def same_weights(one: Path, other: Path) -> bool:
    """Whether two files hold the same weights, bit for bit."""
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
