"""A Python that has torch when it begins, for tests that start many: ``[warm_python.executable(), "script.py"]``.

Importing torch and what its first optimizer imports takes every new process seconds. What is started here is a fork of
one process that has imported it, and otherwise as ``python`` would start it: a process of its own, with the arguments,
folder, environment and streams it was given, that hears its signals and goes through all of Python's own end. What
Python and torch read from the environment when they begin has been read; torch has one thread. Where that matters, or
that nothing has been imported yet, tests start ``sys.executable``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@cache
def executable() -> str:
    """Path of the program. All workers of one run of the tests share the process that it has forked."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    began = Path(f"/proc/{owner}/stat").read_text().rpartition(")")[2].split()[19]  # numbers of processes come again
    home = Path(tempfile.gettempdir()) / f"warm_python.{owner}.{began}"
    program, address = home / "python", home / "socket"
    try:
        home.mkdir()
    except FileExistsError:
        pass  # by a worker that came first
    else:
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {HERE / "warm_client.py"} {address} "$@"\n')
        program.chmod(0o755)
        with (home / "log").open("w") as log:
            subprocess.run(
                [sys.executable, HERE / "warm_server.py", address, str(owner)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # a process with threads is not to be forked
                check=True,
            )
    deadline = time.monotonic() + 100
    while not address.exists():
        assert time.monotonic() < deadline, f"nobody answers; see {home}/log"
        time.sleep(0.05)
    return str(program)


def run(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """What ``python arguments...`` does, as `subprocess.run` tells it; its output is kept."""
    given: dict[str, Any] = {"capture_output": "stderr" not in options, "text": True, "timeout": 100, **options}
    return subprocess.run([executable(), *map(str, arguments)], check=False, **given)
