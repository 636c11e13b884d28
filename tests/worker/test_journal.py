"""The journal: what is appended is read once, in order, whole or not at all."""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gradvitals.errors import RunError
from gradvitals.worker.journal import HEAD, HEADER_BYTES, Journal


def test_records_of_any_length_come_out_as_they_went_in(tmp_path: Path) -> None:
    writer = Journal.create(tmp_path / "journal", 64 << 10)
    reader = Journal.open(tmp_path / "journal")
    rng = random.Random(0)
    sent, received = [], []
    for _ in range(5000):
        record = (rng.randrange(1, 9), rng.randbytes(rng.randrange(0, 3000)))
        while not writer.append(*record):
            received += list(reader.read())
            reader.release()
        sent.append(record)
    received += list(reader.read())
    assert received == sent


def test_a_full_journal_refuses_and_counts(tmp_path: Path) -> None:
    writer = Journal.create(tmp_path / "journal", 8 << 10)
    accepted = 0
    while writer.append(1, bytes(1000)):
        accepted += 1
    writer.drop(1)
    reader = Journal.open(tmp_path / "journal")
    assert accepted == len(list(reader.read())) == 8
    assert reader.dropped == 1
    assert not writer.append(1, bytes(1000)), "read, but not released yet"
    reader.release()
    assert writer.append(1, bytes(1000))


def test_a_record_larger_than_the_ring_is_refused(tmp_path: Path) -> None:
    assert not Journal.create(tmp_path / "journal", 8 << 10).append(1, bytes(9000))


@pytest.mark.parametrize("damage", ["not a journal", "cut", "head", "length"])
def test_a_damaged_file_is_an_error_and_never_read_beyond_its_end(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal"
    writer = Journal.create(path, 8 << 10)
    writer.append(1, b"x" * 100)
    content = bytearray(path.read_bytes())
    if damage == "not a journal":
        content[:8] = b"somethin"
    elif damage == "cut":
        content = content[:5000]
    elif damage == "head":
        struct.pack_into("<Q", content, HEAD, 1 << 40)
    else:
        struct.pack_into("<I", content, HEADER_BYTES, 1 << 31)
    path.write_bytes(content)
    with pytest.raises(RunError):
        list(Journal.open(path).read())


WRITER = """
import sys
from pathlib import Path
from gradvitals.worker.journal import Journal
journal = Journal.create(Path(sys.argv[1]), 1 << 20)
number = 0
print("go", flush=True)
while True:
    if journal.append(1, number.to_bytes(8, "little") * 50):
        number += 1
        if number % 100 == 0:
            print(number, flush=True)
"""


def test_a_writer_that_is_killed_leaves_every_record_whole(tmp_path: Path) -> None:
    for attempt in range(5):
        path = tmp_path / f"journal{attempt}"
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        reader, read = Journal.open(path), 0
        deadline = time.monotonic() + 0.05 * (attempt + 1)
        while time.monotonic() < deadline:
            read = check(reader, read)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        reported = [int(line) for line in process.stdout.read().split()]
        process.stdout.close()
        read = check(reader, read)
        assert read >= max(reported, default=0), "what was appended before the kill is there"


def check(reader: Journal, read: int) -> int:
    for _, data in reader.read():
        assert data == read.to_bytes(8, "little") * 50
        read += 1
    reader.release()
    return read
