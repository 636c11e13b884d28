"""The way back: messages from the worker to the training process, which looks for them once per step."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from gradvitals.types import Finding
from gradvitals.worker.journal import Journal
from gradvitals.worker.record import readings_from_bytes, readings_to_bytes

MESSAGE, READINGS, IN_FILE = 1, 2, 4
"""Kinds of records on the way back; `IN_FILE` is added if the record is the name of a file."""

LARGEST_SHARE = 1 / 8
"""Share of the journal above which a message goes through a file of its own."""

MOST_WAITING = 1000
"""Messages that may wait for a training process that does not look for them."""

Message = dict[str, Any]
"""What happened, under `what`, and its numbers. Findings and readings are objects on both ends."""


class Channel(Protocol):
    """Both ends of the way back."""

    def send(self, message: Message) -> None:
        """From the worker. Never blocks."""

    @property
    def has_messages(self) -> bool:
        """Whether there is anything to receive. Called at every step."""

    def receive(self) -> Iterator[Message]:
        """Yield all messages there are."""

    def close(self) -> None:
        """Give back what it holds."""


class ThreadChannel:
    """For a worker that is a thread of the training process."""

    def __init__(self) -> None:
        self._queue: deque[Message] = deque()

    def send(self, message: Message) -> None:
        """Add a message."""
        self._queue.append(message)

    @property
    def has_messages(self) -> bool:
        """Whether there is anything to receive."""
        return bool(self._queue)

    def receive(self) -> Iterator[Message]:
        """Yield all messages there are."""
        while self._queue:
            yield self._queue.popleft()

    def close(self) -> None:
        """Nothing to give back."""


class JournalChannel:
    """For a worker that is a process: a second journal, written by the worker."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal = journal
        self._folder = folder
        self._files = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        """Messages that found no room yet."""

    def send(self, message: Message) -> None:
        """Add a message."""
        if "readings" in message:
            self._write(READINGS, readings_to_bytes(message["readings"], plain=message["plain"]))
            return
        if isinstance(message.get("finding"), Finding):
            message = {**message, "finding": message["finding"].to_json()}
        self._write(MESSAGE, json.dumps(message).encode())

    def _write(self, kind: int, data: bytes) -> None:
        if len(data) > LARGEST_SHARE * self._journal.capacity:
            self._files += 1
            path = self._folder / f"message-{self._files}"
            path.write_bytes(data)
            kind, data = kind | IN_FILE, path.name.encode()
        self._waiting.append((kind, data))
        self.flush()
        while len(self._waiting) > MOST_WAITING:
            self._waiting.popleft()

    def flush(self) -> bool:
        """Write what found no room before, as far as there is room now; returns whether all of it is written."""
        while self._waiting and self._journal.append(*self._waiting[0]):
            self._waiting.popleft()
        return not self._waiting

    @property
    def has_messages(self) -> bool:
        """Whether there is anything to receive."""
        return self._journal.has_records

    def receive(self) -> Iterator[Message]:
        """Yield all messages there are."""
        for kind, data in self._journal.read():
            if kind & IN_FILE:
                path = self._folder / Path(data.decode()).name
                data = path.read_bytes()
                path.unlink(missing_ok=True)
            if kind & READINGS:
                readings, plain = readings_from_bytes(data)
                yield {"what": "readings", "readings": readings, "plain": plain}
                continue
            message = json.loads(data)
            if "finding" in message:
                message["finding"] = Finding.from_json(message["finding"])
            yield message
        self._journal.release()

    def close(self) -> None:
        """Give the memory back."""
        self._journal.close()
