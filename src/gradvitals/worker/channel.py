"""Messages from the worker to the training process, which checks for them once per step."""

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
"""Kinds of records. `IN_FILE` is added if the record is the name of a file that has the message."""

LARGEST_SHARE = 1 / 8
"""A message larger than this share of the journal goes through a file of its own."""

MOST_WAITING = 1000
"""Messages that may wait for a training process that does not receive them."""

Message = dict[str, Any]
"""The kind of message, under `what`, and its contents. Findings and readings are objects on both ends."""


class Channel(Protocol):
    """Both ends of the channel."""

    def send(self, message: Message) -> None:
        """Send a message from the worker. Never blocks."""

    @property
    def has_messages(self) -> bool:
        """Whether there is anything to receive. Checked at every step."""

    def receive(self) -> Iterator[Message]:
        """Yield all messages there are."""

    def close(self) -> None:
        """Free its memory."""


class ThreadChannel:
    """The channel of a worker thread."""

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
        """Do nothing."""


class JournalChannel:
    """The channel of a worker process: a second journal, which the worker writes."""

    def __init__(self, journal: Journal, folder: Path) -> None:
        self._journal = journal
        self._folder = folder
        self._files = 0
        self._waiting: deque[tuple[int, bytes]] = deque()
        """Messages that did not fit yet."""

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
        """Write waiting messages as far as there is room; returns whether all are written."""
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
        """Free its memory."""
        self._journal.close()
