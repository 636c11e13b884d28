"""Processes that have torch when they begin: forks of one that has imported it, which takes every new one seconds.

A script runs in one as ``python script arguments`` would run it, and ends like that: an error goes through
``sys.excepthook``, threads are waited for, functions of ``atexit`` are called. How Python itself starts and ends is
not for these; such tests start processes of their own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def context() -> Any:
    """Of multiprocessing: what starts processes that have torch."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["warm_imports"])
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
    try:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before["PYTHONPATH"]]))
        os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads is not to be forked
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return found


class WarmProcess:
    """A script in a process of its own, with what tests ask of a ``Popen``; what it prints goes to a file."""

    def __init__(
        self, script: Path, *arguments: object, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        variables = {**os.environ, **(environment or {})}
        told = (str(script), [str(argument) for argument in arguments], str(log), variables)
        self._process = context().Process(target=_run, args=told)
        self._process.start()
        self._log = log

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """Its exit status; when it takes longer, it is killed."""
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise TimeoutError(f"{self._process.name} took more than {seconds} s. It said:\n{self.output}")
        return int(self._process.exitcode)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    @property
    def output(self) -> str:
        return self._log.read_text("utf-8") if self._log.exists() else ""


def run_ranks(script: Path, world: int, *arguments: object, folder: Path, seconds: float = 280) -> None:
    """Run a script once for each rank, with its number before the other arguments; all must end well."""
    ranks = [WarmProcess(script, rank, *arguments, log=folder / f"log{rank}") for rank in range(world)]
    try:
        statuses = [rank.wait(seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert statuses == [0] * world, "\n".join(rank.output for rank in ranks)


def _run(script: str, arguments: list[str], log: str, environment: dict[str, str]) -> None:
    with Path(log).open("ab") as out:
        for stream in (1, 2):
            os.dup2(out.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Torch tells scripts, as if they were at fault, what it is about to change, so warnings cannot be errors here as
    # they are in tests. Those who look for our own set PYTHONWARNINGS, which the first of these processes begins with.
    if "PYTHONWARNINGS" not in environment:
        warnings.simplefilter("ignore")
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    os._exit(_status(lambda: runpy.run_path(script, run_name="__main__")))


def _status(work: Callable[[], object]) -> int:
    """What Python does when a script ends, up to where it would take itself apart."""
    status = 0
    try:
        work()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException as error:
        status = 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status
