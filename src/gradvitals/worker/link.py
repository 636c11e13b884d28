"""WorkerLink: the training process's end of its worker. Starts it, writes to its journal, and takes its messages."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gradvitals.worker.channel import Channel, JournalChannel, Message, ThreadChannel
from gradvitals.worker.journal import Journal, journal_folder
from gradvitals.worker.process import WorkerProcess
from gradvitals.worker.publish import Destination, runs_in_worker, wants_readings
from gradvitals.worker.record import COMMAND, CONTEXT, Context
from gradvitals.worker.recover import JOURNAL, REPLIES, leave_context, leave_note, remove_files, successor
from gradvitals.worker.worker import Setup, Worker, WorkerThread, print_line

REPLY_BYTES = 1 << 20


class WorkerLink:
    """The worker of a run as the training process sees it: written to through the journal, it answers by messages.

    Args:
        on_message: Called with every message but answers to `request`.
    """

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._pid = os.getpid()
        self._writing, self._reading = threading.Lock(), threading.RLock()  # a Guard writes snapshots in a thread
        self._early: list[bytes] = []
        """Commands from before the first step."""
        self._requests = 0
        self._answers: dict[int, Message] = {}
        self._worker: WorkerProcess | WorkerThread | None = None
        self.is_open = False
        """Whether the worker was started."""
        self._journal: Journal | None = None
        self._channel: Channel = ThreadChannel()
        self._setup: Setup | None = None

    @property
    def publishes(self) -> bool:
        """Whether the worker has sinks or alerts to close, and reads nothing while it does."""
        return self._setup is not None and bool(self._setup.destinations)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made it. A forked child shares the journal, but must not write to it."""
        return os.getpid() == self._pid

    def open(self, setup: Setup, journal_bytes: int, *, as_process: bool) -> list[Destination]:
        """Start the worker: as a process, if wanted and possible, or in a thread.

        Returns:
            Those of the run's destinations that cannot move to its process.
        """
        here = [one for one in setup.destinations if not runs_in_worker(one)]
        if not (as_process and self._open_process(setup, journal_bytes, here)):
            here = []
            self._setup, self._journal, self._channel = setup, Journal.in_memory(journal_bytes), ThreadChannel()
            self._worker = WorkerThread(Worker(setup, self._journal, self._channel))
        self.is_open = True
        early, self._early = self._early, []
        for data in early:
            self.write(COMMAND, data)
        return here

    def _open_process(self, setup: Setup, journal_bytes: int, here: Sequence[Destination]) -> bool:
        moved = [one for one in setup.destinations if runs_in_worker(one)]
        wants = setup.wants_readings or any(map(wants_readings, here))
        self._setup = replace(setup, destinations=moved, wants_readings=wants)
        try:
            setup.path.mkdir(parents=True, exist_ok=True)
            folder = journal_folder(setup.path)
            replies = Journal.create(folder / REPLIES, REPLY_BYTES)
            self._journal = Journal.create(folder / JOURNAL, journal_bytes)
            self._channel = JournalChannel(replies, folder)
            worker = self._worker = WorkerProcess(self._setup, folder / JOURNAL, folder / REPLIES)
            leave_note(setup, folder, worker.pid)
        except (OSError, ValueError, TypeError, AttributeError, ImportError, pickle.PickleError) as error:
            print_line(f"the worker process cannot be started ({error}); a thread does its work", setup.config.quiet)
            return False
        return True

    def write(self, kind: int, data: bytes, steps: int = 1) -> None:
        """Append a record to the journal. If the journal is full, count its steps as dropped."""
        if os.getpid() != self._pid:
            return
        assert self._journal is not None
        with self._writing:
            fits = self._journal.append(kind, data)
        if not fits:
            self._journal.drop(steps)
            self._replace_worker()

    def write_context(self, context: Context) -> None:
        """Say what the steps that follow belong to."""
        data = context.to_bytes()
        if self._journal is not None and self._journal.path is not None:
            with contextlib.suppress(OSError):
                leave_context(data, self._journal.path.parent)
        self.write(CONTEXT, data)

    def command(self, command: dict[str, Any]) -> None:
        """Have the worker do something, once it has read the steps so far."""
        data = json.dumps(command).encode()
        if self._journal is None:
            self._early.append(data)
        else:
            self.write(COMMAND, data)

    def request(self, command: dict[str, Any]) -> int:
        """Have the worker do something and answer; returns the number that `wait` takes."""
        self._requests += 1
        if self._worker is not None:
            self.command({**command, "id": self._requests})
            self._worker.wake()
        return self._requests

    def wait(self, request: int, seconds: float, hang_seconds: float = math.inf) -> Message | None:
        """Wait for the answer to a request; None if there is none in time, or nobody to ask.

        Args:
            request: Its number.
            seconds: How long to wait.
            hang_seconds: How long to wait for a worker that empties no more of the journal.
        """
        if self._worker is None or self._journal is None or not self.is_here:
            return None
        moved, pause = time.monotonic(), 0.0005
        deadline, fill = moved + seconds, self._journal.fill
        while request not in self._answers:
            self.receive()
            if request in self._answers:
                break
            now = time.monotonic()
            if self._journal.fill != fill:
                moved, fill = now, self._journal.fill
            if now > deadline or now - moved > hang_seconds:
                return None
            if not self._worker.is_alive and not self._channel.has_messages:
                self._replace_worker()
                if not self._worker.is_alive:
                    return None
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        return self._answers.pop(request)

    def ask(self, command: dict[str, Any], seconds: float, hang_seconds: float = math.inf) -> Message | None:
        """Have the worker do something and wait for its answer, as `wait` does."""
        return self.wait(self.request(command), seconds, hang_seconds)

    @property
    def has_messages(self) -> bool:
        """Whether there is anything to receive. Checked at every step."""
        return self._channel.has_messages

    def receive(self) -> None:
        """Hand on all messages that have arrived."""
        if not self.is_here:
            return
        with self._reading:
            for message in self._channel.receive():
                if message["what"] == "done":
                    self._answers[message["id"]] = message
                else:
                    self._on_message(message)

    def _replace_worker(self) -> None:
        """Continue the work of a process that is gone in a thread."""
        journal = self._journal
        if self._worker is None or self._worker.is_alive or journal is None or journal.path is None:
            return
        assert self._setup is not None
        self._channel = ThreadChannel()
        self._worker = WorkerThread(successor(self._setup, journal.path, self._channel))

    def close(self, seconds: float) -> None:
        """End the worker, which was asked to close before, and remove the journal if everything in it was written.

        Args:
            seconds: How long to wait for it to end.
        """
        assert self._worker is not None
        assert self._setup is not None
        self._worker.stop(seconds)
        self.receive()
        channel, self._channel = self._channel, ThreadChannel()
        channel.close()
        if self._journal is not None and self._journal.path is not None:
            if not self._journal.has_records:
                remove_files(self._setup.path, self._journal.path.parent)
            if not self._worker.is_alive:
                self._journal.close()
