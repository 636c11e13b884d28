"""The journal follows the filesystem."""

from __future__ import annotations

import pytest

from gradvitals.store import RunWriter, open_run, opening

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
