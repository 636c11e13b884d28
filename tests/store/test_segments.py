"""Runs that were continued, killed, or kept without a log."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from gradvitals.errors import RunError
from gradvitals.store import RunWriter, open_run, opening
from gradvitals.types import Action, Finding, Layout, Reading, TensorInfo


def test_later_segments_win(tmp_path, make_reading):
    writer = RunWriter(tmp_path, meta={"note": 1})
    for step in range(400):
        writer.write(make_reading(step))
    writer.write(Finding(id="spike", severity="warning", title="s", first_step=100))
    writer.write(Finding(id="nan", severity="critical", title="n", first_step=350))
    writer.write(Action(kind="stop", step=360, finding="nan", taken=True))
    writer.commit()
    writer.discard()  # as a crash would: no close
    with RunWriter(tmp_path, meta={"again": True}, resume=True, first_step=300) as again:
        assert again.run_id == writer.run_id
        for step in range(300, 350):
            again.write(make_reading(step, values={"loss": -1.0 * step}))
    with RunWriter(tmp_path, meta={}, resume=True, first_step=340) as third:
        third.write(make_reading(340, values={"loss": 0.5}))
    with open_run(tmp_path) as run:
        steps, loss = run.series("loss")
        assert steps.tolist() == list(range(341))
        expected = [2.0 * step for step in range(300)] + [-1.0 * step for step in range(300, 340)] + [0.5]
        assert loss.tolist() == expected
        assert run.last_step == 340
        assert run.series("loss", since=330)[0].tolist() == list(range(331, 341))
        assert [reading.step for reading in run.readings(since=298)] == list(range(299, 341))
        assert run.matrix("grad/norm", since=335)[0].tolist() == list(range(336, 341))
        assert [finding.id for finding in run.findings] == ["spike"]
        assert [finding.id for segment in run.segments for finding in segment.hidden] == ["nan"]
        assert run.actions == []
        assert run.meta["note"] == 1
        assert run.meta["again"] is True


def test_the_last_step_is_that_of_the_checkpoint_until_new_ones_come(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        for step in range(300):
            writer.write(make_reading(step))
    RunWriter(tmp_path, meta={}, resume=True, first_step=123).close()
    with open_run(tmp_path) as run:
        assert run.last_step == 122
        assert run.table("grad/norm")[0] == 122


def test_resuming_nothing_starts_a_run(tmp_path, make_reading):
    with RunWriter(tmp_path / "new", meta={}, resume=True, first_step=10) as writer:
        writer.write(make_reading(10))
    with open_run(tmp_path / "new") as run:
        assert run.last_step == 10


def test_dropped_adds_up_over_segments(tmp_path):
    for count in (2, 3):
        with RunWriter(tmp_path, meta={}, resume=True) as writer:
            writer.dropped = count
    with open_run(tmp_path) as run:
        assert run.dropped == 5


def test_two_processes_do_not_write_one_run(tmp_path):
    writer = RunWriter(tmp_path, meta={})
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        writer._execute("UPDATE segment SET pid = ?, hostname = ?", (child.pid, socket.gethostname()))
        writer.commit()
        with pytest.raises(RunError, match=f"process {child.pid}"):
            RunWriter(tmp_path, meta={}, resume=True)
    finally:
        child.communicate(b"\n")
    RunWriter(tmp_path, meta={}, resume=True).close()  # it is gone now
    writer.close()
    assert os.getpid() != child.pid


def test_layouts_of_each_segment_name_their_rows(tmp_path, make_layout, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_layout("a", "b", "c"))
        writer.write(make_reading(0))
    with RunWriter(tmp_path, meta={}, resume=True, first_step=1) as writer:
        writer.write(make_layout("c", "b", "a"))
        writer.write(make_reading(1))
    with open_run(tmp_path) as run:
        assert run.series("grad/norm", tensor="a")[1].tolist() == [0.0, 1.5]
        np.testing.assert_array_equal(run.matrix("grad/norm")[1], [[0.5, 0.25, 0.0], [1.0, 1.25, 1.5]])


def test_segments_tell_who_wrote_what_and_what_was_hidden(tmp_path, make_reading):
    writer = RunWriter(tmp_path, meta={})
    for step in range(50):
        writer.write(make_reading(step))
    writer.write(Finding(id="early", severity="warning", title="e", first_step=5))
    writer.write(Finding(id="training_stopped", severity="critical", title="boom", first_step=49))
    writer.commit()
    writer.discard()
    RunWriter(tmp_path, meta={}, resume=True, first_step=30).close()
    with open_run(tmp_path) as run:
        first, second = run.segments
    assert (first.first_step, second.first_step) == (0, 30)
    assert first.finished_at is None
    assert second.finished_at is not None
    assert [finding.id for finding in first.hidden] == ["training_stopped"]
    assert second.hidden == ()


def test_a_rank_that_is_not_there_is_told_which_there_are(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        writer.write(make_reading(0, ranks={"ranks/norm": np.ones(3)}))
    with open_run(tmp_path) as run:
        assert run.series("ranks/norm", rank=2)[1].tolist() == [1.0]
        with pytest.raises(RunError, match=r"has no rank 5; it has ranks 0 to 2"):
            run.series("ranks/norm", rank=5)


# -- SIGKILL at random moments under full load -----------------------------------------------------------------------

NUM_TENSORS, NUM_METRICS, STEPS_PER_COMMIT = 500, 10, 20
MARK = struct.Struct("<q")
LAYOUT = Layout(
    tensors=tuple(
        TensorInfo(index=i, name=f"t{i}", shape=(4, 4), dtype="float32", layer="l", depth=0) for i in range(NUM_TENSORS)
    )
)


def write(folder: Path, marks: Path, first_step: int) -> None:
    """Write readings without end, and note every step that was committed in a file of its own."""
    writer = RunWriter(folder, meta={}, resume=True, first_step=first_step)
    writer.write(LAYOUT)
    noted = os.open(marks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    step = first_step
    while True:
        row = np.arange(NUM_TENSORS) + step
        tensors = {f"metric/{number}": row for number in range(NUM_METRICS)}
        writer.write(Reading(step=step, time=time.time(), values={"loss": float(step)}, tensors=tensors))
        if (step - first_step) % STEPS_PER_COMMIT == 0:
            writer.commit()
            os.write(noted, MARK.pack(step))
        step += 1


def start(folder: Path, marks: Path, first_step: int = 0) -> multiprocessing.process.BaseProcess:
    """Start a writer and wait for its first commit."""
    process = multiprocessing.get_context("fork").Process(target=write, args=(folder, marks, first_step))
    process.start()
    while not marks.exists() or marks.stat().st_size < MARK.size:
        time.sleep(0.002)
        assert process.is_alive()
    return process


def kill(process: multiprocessing.process.BaseProcess) -> None:
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("number", range(2))
def test_a_killed_run_opens_with_all_that_was_committed(tmp_path: Path, number: int) -> None:
    """Ten kills of one run, resumed after each, many of them amid compaction."""
    rng = random.Random(number)
    folder, marks, first_step = tmp_path / "run", tmp_path / "marks", 0
    for _ in range(10):
        process = start(folder, marks, first_step)
        time.sleep(rng.uniform(0.0, 0.5))
        kill(process)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        content = marks.read_bytes()
        marks.unlink()
        (committed,) = MARK.unpack_from(content, (len(content) // MARK.size - 1) * MARK.size)
        with open_run(folder) as run:
            steps, values = run.series("metric/7", tensor="t123")
            last = int(steps[-1])
            assert last >= committed
            np.testing.assert_array_equal(steps, np.arange(last + 1))
            np.testing.assert_array_equal(values, steps + 123)
            assert run.last_step == last
            assert run.series("loss")[0].size == last + 1
            _, row = run.table("metric/3")
            np.testing.assert_array_equal(row, np.arange(NUM_TENSORS) + last)
            assert run.meta["finished_at"] is None
        first_step = last + 1
    with open_run(folder) as run:
        assert sum(1 for _ in run.readings()) == first_step


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_killed_writer_is_known_to_be_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while its parent has not reaped it; by its silence alone it would count as live for seconds more."""
    monkeypatch.setattr("gradvitals.store.reader.LIVE_SECONDS", 1e9)
    process = start(tmp_path / "run", tmp_path / "marks")
    with open_run(tmp_path / "run") as run:
        assert run.is_live
        kill(process)
        os.waitid(os.P_PID, process.pid or 0, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
        assert not run.is_live
        process.join()
        assert not run.is_live
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("gradvitals.store.opening.pid_space", lambda: "another machine, or another container")
            assert run.is_live
        with monkeypatch.context() as elsewhere:  # a copy of a machine that was running has its process ids, and a name
            elsewhere.setattr("socket.gethostname", lambda: "another machine")
            assert run.is_live
        assert not run.is_live


# -- the journal follows the filesystem ------------------------------------------------------------------------------

MOUNTS = r"""
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
scratch /scratch lustre rw 0 0
/dev/sdb /home/local\040disk xfs rw 0 0
overlay /scratch/over overlay rw 0 0
store /scratch/over ceph rw 0 0
sshfs#x /mnt/x fuse.sshfs rw 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind", "shared"),
    [
        ("/tmp/x", "ext4", False),
        ("/home/me/runs/a", "nfs4", True),
        ("/home", "nfs4", True),
        ("/homework/x", "ext4", False),
        ("/home/local disk/run", "xfs", False),
        ("/scratch/run", "lustre", True),
        ("/scratch/over/run", "ceph", True),
        ("/mnt/x/run", "fuse.sshfs", True),
    ],
)
def test_the_longest_mount_point_counts(tmp_path, path, kind, shared):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    found = opening.filesystem_type(type(mounts)(path), mounts)
    assert found == kind
    assert opening.is_shared(found) is shared


def test_without_proc_the_disk_is_taken_for_local(tmp_path):
    assert opening.filesystem_type(tmp_path, tmp_path / "missing") is None
    assert not opening.is_shared(None)


@pytest.mark.parametrize(
    ("kind", "mode"), [("ext4", "wal"), ("nfs4", "truncate"), ("gpfs", "truncate"), ("smb3", "truncate")]
)
def test_the_writer_uses_it(tmp_path, monkeypatch, make_reading, kind, mode):
    monkeypatch.setattr(opening, "filesystem_type", lambda path: kind)
    with RunWriter(tmp_path, meta={}) as writer:
        assert writer.journal_mode == mode
        for step in range(600):
            writer.write(make_reading(step))
            if step % 50 == 0:
                writer.commit()
                assert (tmp_path / "run.db-wal").exists() == (mode == "wal")
                with open_run(tmp_path) as run:
                    assert run.last_step == step
    with open_run(tmp_path) as run:
        assert run.series("loss")[0].size == 600


def test_a_run_moves_from_local_to_shared_disk_and_back(tmp_path, monkeypatch, make_reading):
    for number, kind in enumerate(("ext4", "nfs", "ext4")):
        monkeypatch.setattr(opening, "filesystem_type", lambda path, kind=kind: kind)
        writer = RunWriter(tmp_path, meta={}, resume=True, first_step=number)
        writer.write(make_reading(number))
        writer.commit()
        writer.discard()
    with open_run(tmp_path) as run:
        assert run.series("loss")[0].tolist() == [0, 1, 2]


def test_the_log_stays_small(tmp_path, make_reading):
    with RunWriter(tmp_path, meta={}) as writer:
        largest = 0
        for step in range(2000):
            writer.write(make_reading(step))
            if step % 5 == 0:
                writer.commit()
                largest = max(largest, (tmp_path / "run.db-wal").stat().st_size)
    assert largest < 2 * opening.WAL_BYTES
    assert [file.name for file in tmp_path.iterdir()] == ["run.db"]
