"""A worker as a process of its own, which never imports torch and outlives a training process that is killed."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
from pathlib import Path

from gradvitals.worker.channel import JournalChannel
from gradvitals.worker.journal import Journal
from gradvitals.worker.recover import SETTINGS, remove_files
from gradvitals.worker.worker import COMMIT_SECONDS, Setup, Worker

_START = "import sys; sys.path.insert(0, sys.argv[1]); from gradvitals.worker.process import main; main(sys.argv[2])"

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
    """

    def __init__(self, setup: Setup, journal: Path, replies: Path) -> None:
        self._pid = os.getpid()
        settings = journal.with_name(SETTINGS)
        settings.unlink(missing_ok=True)
        descriptor = os.open(settings, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            pickle.dump((setup, journal, replies), file)
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        if not sys.executable:
            raise OSError("the Python interpreter is not known")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(Path(__file__).parents[2]), str(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
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
    """Run a worker until its run is closed, or the training process is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    path = Path(settings)
    setup, journal_path, replies_path = pickle.loads(path.read_bytes())
    path.unlink(missing_ok=True)
    journal = Journal.open(journal_path)
    channel = JournalChannel(Journal.open(replies_path), replies_path.parent)
    worker = Worker(setup, journal, channel)
    while not worker.closed:
        worker.drain()
        if not worker.closed and _parent_gone(COMMIT_SECONDS):
            worker.abandon()
            break
    if not journal.has_records:
        remove_files(setup.path, journal_path.parent)


def _parent_gone(seconds: float) -> bool:
    """Wait to be woken; True once the training process closed its end of the pipe."""
    ready, _, _ = select.select([0], [], [], seconds)
    return bool(ready) and not os.read(0, 4096)
