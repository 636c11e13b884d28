"""A worker as a process of its own, which never imports torch and outlives a training process that is killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gradvitals.errors import RunError
from gradvitals.worker.channel import JournalChannel
from gradvitals.worker.journal import Journal
from gradvitals.worker.recover import remove_files
from gradvitals.worker.worker import Setup, Worker, print_line

_START = "import sys; sys.path.insert(0, sys.argv[1]); from gradvitals.worker.process import main; main(sys.argv[2])"

REPLY_SECONDS = 10.0
"""Longest time the last messages wait for a training process that has not read earlier ones."""

NICENESS = 5
"""Training goes first when there are fewer cores than threads."""


class WorkerProcess:
    """Starts a worker and talks to it. Its end of the pipe closes with this process, however that ends.

    Args:
        setup: The run.
        journal: The journal's file.
        replies: The file of the journal on the way back.

    Raises:
        OSError: If no process can be started.
        pickle.PickleError: If a sink or an alert cannot be moved to it.
    """

    def __init__(self, setup: Setup, journal: Path, replies: Path) -> None:
        self._pid = os.getpid()
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        if not sys.executable:
            raise OSError("the Python interpreter is not known")
        with tempfile.TemporaryFile() as settings:  # without a name: the address of an alert is a secret
            pickle.dump((setup, journal, replies), settings)
            settings.flush()
            settings.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(Path(__file__).parents[2]), str(settings.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(settings.fileno(),),
                env={**os.environ, **single},
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def wake(self) -> None:
        """Have it look at the journal now."""
        if self._process.stdin is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(b".")
                self._process.stdin.flush()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return os.getpid() == self._pid and self._process.poll() is None

    def stop(self, seconds: float) -> None:
        """Wait for it to end by itself."""
        if os.getpid() != self._pid:
            return
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.returncode = self._process.returncode or 0  # no warning if it is still there: it ends by itself


def main(settings: str) -> None:
    """Run a worker until its run is closed, or the training process is gone.

    Args:
        settings: Descriptor of the open file that its settings are in.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    with os.fdopen(int(settings), "rb") as file:
        setup, journal_path, replies_path = pickle.load(file)
    try:
        journal = Journal.open(journal_path)
        channel = JournalChannel(Journal.open(replies_path), replies_path.parent)
    except RunError:
        return  # the run was closed, or its folder deleted, before this process was ready
    worker = Worker(setup, journal, channel)
    while not worker.closed:
        worker.drain()
        channel.flush()
        if not worker.closed and _parent_gone(worker.pause):
            worker.abandon()
            if not worker.closed:
                _print_verdict(setup)
            break
    deadline = time.monotonic() + REPLY_SECONDS
    while not channel.flush() and time.monotonic() < deadline and not _parent_gone(0.01):
        pass
    is_read = not worker.closed or not channel.has_messages  # else the training process reads it, and cleans up
    if not journal.has_records and is_read:
        remove_files(setup.path, journal_path.parent)


def _print_verdict(setup: Setup) -> None:
    """Print how a run did whose training process was killed, and so could not print it itself."""
    from gradvitals.report.verdict import closing_lines

    if setup.config.quiet or not setup.diagnoses or not setup.keeps:
        return
    with contextlib.suppress(Exception):  # the run's folder may be gone, or stderr closed
        print_line("the training process was killed; every step it made is kept")
        for line in closing_lines({setup.path: ""}):
            print_line(line)


def _parent_gone(seconds: float) -> bool:
    """Wait to be woken; True once the training process closed its end of the pipe."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 4096)
