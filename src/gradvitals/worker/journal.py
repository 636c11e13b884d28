"""The journal: a ring of records in a memory-mapped file that one process writes and another reads.

The pages belong to the kernel, so a record survives the death of the process that wrote it. A record is its length,
its kind and its payload. The writer moves its position only when all three are in place, so a reader never sees half a
record.

    offset 0      magic, format version, capacity
    offset 64     head: bytes written since the start        (moved by the writer)
    offset 128    tail: bytes read since the start           (moved by the reader)
    offset 192    dropped records                            (moved by the writer)
    offset 4096   the ring
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gradvitals.errors import RunError
from gradvitals.store.opening import filesystem_type, is_shared

MAGIC = b"gvjrnl02"
HEADER_BYTES = 4096
HEAD, TAIL, DROPPED = 64, 128, 192
MAX_CAPACITY = 1 << 32

_RECORD = struct.Struct("<II")  # payload bytes, kind
_COUNTER = struct.Struct("<Q")
PADDING = 0
"""Kind of the padding at the end of the ring: a record never wraps."""


class Journal:
    """One end of a journal. `create` returns the writer's end, `open` the reader's."""

    def __init__(self, path: Path | None, memory: mmap.mmap, capacity: int) -> None:
        self.path = path
        self.capacity = capacity
        self._memory = memory
        self._head = self._counter(HEAD)
        self._position = self._counter(TAIL)
        """The position up to which this end has read."""

    @classmethod
    def create(cls, path: Path, capacity: int) -> Journal:
        """Create a journal of at least `capacity` bytes, and reserve its blocks so that no later write can fail.

        Raises:
            OSError: If there is no room, or no permission.
        """
        capacity = -(-capacity // HEADER_BYTES) * HEADER_BYTES
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, HEADER_BYTES + capacity)
            # Touch every page now: the first write to a page takes longer than a whole record.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            memory = mmap.mmap(descriptor, HEADER_BYTES + capacity, flags)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return cls._initialized(path, memory, capacity)

    @classmethod
    def in_memory(cls, capacity: int) -> Journal:
        """Create a journal for two threads of one process."""
        capacity = -(-capacity // HEADER_BYTES) * HEADER_BYTES
        return cls._initialized(None, mmap.mmap(-1, HEADER_BYTES + capacity), capacity)

    @classmethod
    def _initialized(cls, path: Path | None, memory: mmap.mmap, capacity: int) -> Journal:
        struct.pack_into("<8sQQ", memory, 0, MAGIC, HEADER_BYTES, capacity)
        return cls(path, memory, capacity)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Open a journal that another process created.

        Raises:
            RunError: If the file is not a journal, or its header is damaged.
        """
        try:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise RunError(f"the journal {path} cannot be opened ({error})") from error
        size = len(memory)
        magic, header, capacity = struct.unpack_from("<8sQQ", memory, 0) if size > HEADER_BYTES else (b"", 0, 0)
        if magic != MAGIC or header != HEADER_BYTES or capacity != size - HEADER_BYTES or capacity > MAX_CAPACITY:
            raise RunError(f"{path} is not a journal of this version of gradvitals, or is damaged; delete it")
        return cls(path, memory, capacity)

    # -- writing ------------------------------------------------------------------------------------------------

    def append(self, kind: int, data: bytes) -> bool:
        """Append a record. Returns False, without blocking, if the ring has no room for it."""
        length = len(data)
        needed = (_RECORD.size + length + 7) & ~7  # as in `read`; a function would be one more call per plain step
        memory, head = self._memory, self._head
        position = head % self.capacity
        to_end = self.capacity - position
        skipped = to_end if needed > to_end else 0
        (tail,) = _COUNTER.unpack_from(memory, TAIL)
        if head + skipped + needed - tail > self.capacity:
            return False
        if skipped:
            _RECORD.pack_into(memory, HEADER_BYTES + position, to_end - _RECORD.size, PADDING)
            head += skipped
            position = 0
        at = HEADER_BYTES + position
        _RECORD.pack_into(memory, at, length, kind)
        at += _RECORD.size
        memory[at : at + length] = data
        self._head = head + needed
        _COUNTER.pack_into(memory, HEAD, self._head)
        return True

    def drop(self, count: int) -> None:
        """Count steps that found no room."""
        self._set(DROPPED, self._counter(DROPPED) + count)

    # -- reading ------------------------------------------------------------------------------------------------

    @property
    def has_records(self) -> bool:
        """Whether there is anything to read."""
        memory = self._memory
        return bool(memory[TAIL : TAIL + 8] != memory[HEAD : HEAD + 8])

    @property
    def fill(self) -> float:
        """Share of the ring that is not read yet."""
        return (self._counter(HEAD) - self._counter(TAIL)) / self.capacity

    @property
    def dropped(self) -> int:
        """Records that found no room."""
        return self._counter(DROPPED)

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the kind and the payload of every unread record. Call `release` once they are processed.

        Raises:
            RunError: If lengths do not fit: the file is damaged.
        """
        tail = self._position
        head = self._counter(HEAD)
        if head - tail > self.capacity:
            raise RunError("the journal is damaged: more is unread than it can hold")
        while tail < head:
            position = tail % self.capacity
            at = HEADER_BYTES + position
            length, kind = _RECORD.unpack_from(self._memory, at)
            needed = (_RECORD.size + length + 7) & ~7
            if tail + needed > head or position + needed > self.capacity:
                raise RunError("the journal is damaged: a record is longer than what was written")
            tail += needed
            if kind != PADDING:
                payload = self._memory[at + _RECORD.size : at + _RECORD.size + length]
                self._position = tail
                yield kind, payload
        self._position = tail

    def release(self) -> None:
        """Free the room of all records read so far for the writer."""
        self._set(TAIL, self._position)

    def close(self) -> None:
        """Unmap the memory. Do not use the journal afterwards."""
        self._memory.close()

    def _counter(self, at: int) -> int:
        value: int = _COUNTER.unpack_from(self._memory, at)[0]
        return value

    def _set(self, at: int, value: int) -> None:
        _COUNTER.pack_into(self._memory, at, value)


def journal_folder(run: Path) -> Path:
    """Returns the folder for the journals of a run: its own, or shared memory if that is on a network file system."""
    if not is_shared(filesystem_type(run)):
        return run
    shm = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="gradvitals-", dir=shm if shm.is_dir() else None))
