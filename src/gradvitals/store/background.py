"""BackgroundWriter: takes records from the training thread and writes them on a thread of its own."""

from __future__ import annotations

import atexit
import os
import sqlite3
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from gradvitals.breath import Breath
from gradvitals.errors import RunError
from gradvitals.store.writer import Record, RunWriter, run_file
from gradvitals.types import Reading

Told = TypeVar("Told")
Item = Record | Callable[[], Iterable[Record]]

MAX_PENDING_BYTES = 64 << 20
"""Readings that wait for a disk that refuses them; past this, or past `queue_size` of them, they are dropped."""

HEARTBEAT_SECONDS = 1.0

LATE_SECONDS = 0.5
"""Time that the thread takes for what is in the queue without haste."""

StoreError = (sqlite3.Error, OSError, RunError)


THREAD_NAME = "gradvitals-store"


class BackgroundWriter:
    """Keeps a run without ever making the training thread wait, and without ever raising into it.

    The thread gathers what was put, and commits it every `commit_every` seconds. A disk that is full, locked, gone
    or read-only is reported once and tried again with every commit; what cannot be kept meanwhile is counted.

    Args:
        path: Folder of the run.
        meta: Kept with the run, see `RunWriter`.
        resume: Go on with the run that is there.
        first_step: First step of this segment.
        queue_size: Items that may wait for the thread.
        commit_every: Seconds from one commit to the next: the most that a killed process loses.
        on_error: Called on the thread, once for each kind of error.
        keep: Whether anything is written at all. Of several ranks only one does; the others finish their part of it.
        breath: How the thread leaves others the interpreter; it is told here who waits and how much there is to do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        meta: Mapping[str, Any],
        resume: bool = False,
        first_step: int = 0,
        queue_size: int = 1024,
        commit_every: float = 0.25,
        on_error: Callable[[BaseException], None],
        keep: bool = True,
        breath: Breath | None = None,
    ) -> None:
        self._keeps = keep
        self._breath = Breath() if breath is None else breath
        self.path = run_file(path).parent
        self._open_new = partial(RunWriter, path, meta=dict(meta), resume=resume, first_step=first_step)
        self._writer: RunWriter | None = None
        self._broken = False
        self._queue: deque[Item] = deque()
        self._queue_size = queue_size
        self._commit_every = commit_every
        self._on_error = on_error
        self._seen_errors: set[tuple[object, ...]] = set()
        self._pending: list[Record] = []
        self._pending_bytes = 0
        self._changed = threading.Condition()
        self._wake = threading.Event()
        self._dropped = 0
        self._accepted = self._taken = 0
        self._settled = -1  # items that are safe; not even none of them before the file is open
        self._closing = False
        self._pid = os.getpid()
        self._last_commit = 0.0
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def dropped(self) -> int:
        """Items and records that could not be kept."""
        return self._dropped

    @property
    def run_id(self) -> str | None:
        """Identity of the run; None until the thread has opened the file (`flush` waits for that)."""
        return self._writer.run_id if self._writer else None

    def put(self, item: Item) -> bool:
        """Hand over a record, or a callable that the thread calls to get records.

        Never blocks and never raises. False says that it was dropped: the queue is full, or the writer closed.
        """
        if os.getpid() != self._pid:  # a forked child has no thread, and may have copied a held lock
            return False
        with self._changed:
            if self._closing or len(self._queue) >= self._queue_size or not self._thread.is_alive():
                self._dropped += 1
                return False
            self._queue.append(item)
            self._accepted += 1
            if len(self._queue) * 2 == self._queue_size:
                self._wake.set()
        return True

    def hurry(self) -> None:
        """Have the thread look at the queue now; does not wait for it."""
        self._wake.set()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything put so far is safely on disk; False if `timeout` seconds were not enough."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            target = self._accepted
            self._await(lambda: self._settled >= target, timeout)
            return self._settled >= target

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until everything put so far has been taken from the queue, written or not; False if it was not."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            target = self._accepted
            self._await(lambda: self._taken >= target, timeout)
            return self._taken >= target

    def _await(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        """Have the thread look at the queue, and wait; the lock is held."""
        self._wake.set()
        self._breath.awaited += 1
        try:
            self._changed.wait_for(lambda: is_done() or not self._thread.is_alive(), timeout)
        finally:
            self._breath.awaited -= 1

    def close(self, timeout: float | None = 10.0) -> bool:
        """Write what is left and finish the run; False if that failed or took longer than `timeout` seconds."""
        if os.getpid() != self._pid:
            return False
        with self._changed:
            self._closing = True
            self._breath.awaited += 1
            self._wake.set()
        atexit.unregister(self.close)
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return not self._thread.is_alive() and self._settled >= self._accepted and not self._broken

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing
            try:
                self._take()
                with self._changed:
                    self._changed.notify_all()
                if self._store():
                    with self._changed:
                        self._settled = self._taken
                        self._changed.notify_all()
            except BaseException as error:  # nothing may end this thread but `close`
                self._report(error)
            if not closing:
                self._wake.wait(self._commit_every)
                self._wake.clear()
        self._finish()
        with self._changed:
            self._changed.notify_all()

    def _take(self) -> None:
        """Move what is in the queue to the pending records, calling what has to be called."""
        began = time.monotonic()
        for _ in range(len(self._queue)):
            self._breath.is_late = time.monotonic() - began > LATE_SECONDS
            # What a slow device has not sent yet must not hold up what is there already.
            ready = getattr(self._queue[0], "ready", None)
            if ready is not None and not ready() and not self._closing:
                return
            item = self._queue.popleft()
            if getattr(item, "may_wait", False) and self._pending:
                self._store()  # what is there must not wait with it
            try:
                for record in item() if callable(item) else (item,):
                    self._keep(record)
            except BaseException as error:
                self._drop(1)
                self._report(error)
            self._taken += 1

    def _keep(self, record: Record) -> None:
        if not self._has_room(record) and not self._broken:
            self._store()
        if not self._has_room(record):
            self._drop(1)
            return
        self._pending.append(record)
        self._pending_bytes += _num_bytes(record)

    def _has_room(self, record: Record) -> bool:
        # Findings, actions and layouts are few and matter more: they may wait where readings no longer may.
        room = self._queue_size if isinstance(record, Reading) else 2 * self._queue_size
        size = _num_bytes(record)
        fits = self._pending_bytes + size <= MAX_PENDING_BYTES or not self._pending
        return len(self._pending) < room and fits

    def _store(self) -> bool:
        """Write and commit what is pending. On failure it stays pending, for the next time."""
        if not self._keeps:
            self._pending, self._pending_bytes = [], 0
            return True
        idle = time.monotonic() - self._last_commit < HEARTBEAT_SECONDS
        if self._writer is not None and not self._broken and not self._pending and idle:
            return True
        try:
            if self._writer is None:
                self._writer = self._open_new()
            elif self._broken:
                self._writer.reopen()
            self._broken = False
            unfit = self._write_pending(self._writer)
            self._writer.dropped = self._dropped + unfit
            self._writer.commit()
        except Exception as error:
            self._broken = True
            if self._writer is not None:
                self._writer.discard()
            self._report(error, store=True)
            return False
        self._drop(unfit)
        self._pending, self._pending_bytes = [], 0
        self._last_commit = time.monotonic()
        return True

    def _write_pending(self, writer: RunWriter) -> int:
        """Write all pending records; return how many of them cannot be stored by their nature."""
        unfit = 0
        for record in self._pending:
            self._breath()
            try:
                writer.write(record)
            except StoreError:
                raise
            except Exception as error:
                unfit += 1
                self._report(error)
        return unfit

    def _finish(self) -> None:
        try:
            if self._pending:
                self._drop(len(self._pending))
            if self._writer is not None and not self._broken:
                self._writer.dropped = self._dropped
                self._writer.close()
        except Exception as error:
            self._broken = True
            self._report(error, store=True)

    def _drop(self, count: int) -> None:
        with self._changed:
            self._dropped += count

    def _report(self, error: BaseException, *, store: bool = False) -> None:
        kind = (type(error), getattr(error, "sqlite_errorname", None))
        if kind in self._seen_errors:
            return
        self._seen_errors.add(kind)
        if store and not isinstance(error, RunError):
            told: BaseException = RunError(f"{self.path} could not be written ({error})")
            told.__cause__ = error
        else:
            told = error
        try:
            self._on_error(told)
        except Exception:
            return


def _num_bytes(record: Record) -> int:
    if not isinstance(record, Reading):
        return 0
    arrays = (array for kind in (record.tensors, record.layers, record.heads, record.ranks) for array in kind.values())
    return sum(int(getattr(array, "nbytes", 0)) for array in arrays)


def call_weakly(method: Callable[[Told], None]) -> Callable[[Told], None]:
    """Call a method as long as its object lives, without keeping it alive: a thread must not hold its owner."""
    reference = weakref.WeakMethod(method)

    def call(told: Told) -> None:
        alive = reference()
        if alive is not None:
            alive(told)

    return call
