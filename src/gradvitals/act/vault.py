"""Vault: snapshots in a folder, written by a thread of its own, so that a kill at any moment leaves those before it.

A snapshot is a folder ``snapshot-00000012`` with DCP's files and a ``meta.json``. It appears by a rename when all of
it is on disk, and disappears by a rename before anything of it is deleted; what else is in the folder is unfinished
work of a process that was killed, and is removed by the next one.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from gradvitals.act.snap_disk import Group, write_files
from gradvitals.act.snap_fit import SnapshotError
from gradvitals.act.snap_place import Place
from gradvitals.act.snap_read import Found, cause, read_snapshot, reason
from gradvitals.act.snap_ring import Health
from gradvitals.act.subject import Subject

FORMAT = 1
PREFIX, WRITING, REMOVING = "snapshot-", ".writing-", ".removing-"
WHAT = "A snapshot of a training run by gradvitals; the tensors are in torch.distributed.checkpoint's format."


@dataclass
class Kept:
    """A complete snapshot on disk."""

    serial: int
    step: int
    health: Health


class Content(Protocol):
    """What is to be written. Methods are called on the vault's thread."""

    @property
    def serial(self) -> int:
        """Its number, higher than those of all before it."""

    @property
    def step(self) -> int:
        """Steps that were done."""

    @property
    def health(self) -> Health:
        """What is known of it by now."""

    def begin(self) -> bool:
        """Whether it is still worth the effort of writing it; if so, it stays as it is until `written`."""

    def spoiled(self) -> bool:
        """Whether it must not be kept."""

    def load(self) -> tuple[Mapping[str, Any], Mapping[str, Tensor], Mapping[str, Any]]:
        """Plain values, tensors and how they are sharded; may wait for a device."""

    def written(self) -> None:
        """It was written, or will not be."""


class Vault:
    """Writes snapshots and their health into a folder, and reads them back.

    Args:
        folder: Where; it is made if need be. One run a folder.
        keep: Healthy snapshots to keep. Older ones go when newer healthy ones are complete.
        on_problem: Called with a sentence when something cannot be written, once for each kind of problem; on the
            vault's thread. Writing is tried again with every later snapshot.
        group: The processes that write together, through a group of their own; None if there is one.
        place: Where this process stands among them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        on_problem: Callable[[str], None],
        group: Group = None,
        place: Place | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._keep, self._on_problem, self._group = keep, on_problem, group
        self._leads = group is None or dist.get_rank(group) == 0
        rank = dist.get_rank(group) if group is not None else 0
        self._place = Place(rank, rank) if place is None else replace(place, rank=rank)
        self._places: list[Place] = self._all_told(self._place)
        self._lock = threading.Lock()
        self._seen_problems: set[tuple[Any, ...]] = set()
        self._kept: dict[int, Kept] = {}
        found = _caught(self._open) if self._leads else None
        found = self._told(found)
        if isinstance(found, BaseException):
            raise found
        assert found is not None
        self._kept = {one.serial: one for one in found}
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._waiting = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gradvitals-snapshots", daemon=True)
        self._thread.start()

    @property
    def kept(self) -> list[Kept]:
        """Complete snapshots, oldest first."""
        with self._lock:
            return sorted(self._kept.values(), key=lambda one: one.serial)

    # -- called on the training thread --------------------------------------------------------------------------

    def write(self, content: Content) -> None:
        """Write a snapshot in a while."""
        self._do_later(lambda: self._write(content))

    def mark(self, serial: int) -> None:
        """A snapshot is healthy. Its `health` says so already, in case it is still to be written."""
        self._do_later(lambda: self._mark(serial))

    def discard(self, serial: int) -> None:
        """A snapshot is bad: at once it is one no longer. A process killed later cannot come back to it."""
        with self._lock:
            known = self._kept.pop(serial, None)
            if known is not None and self._leads:
                self._attempt(lambda: self._set_aside(serial))
        self._do_later(self._delete_set_aside)

    def read(self, serial: int, subject: Subject) -> Found:
        """Read a snapshot into host memory and check that it fits; nothing of the subject is touched.

        It may have been written by another number of processes. Where one cannot read its part, none goes on.
        """
        path = self.path(serial)
        names = {*(f"parameter/{one}" for one in subject.parameters()), *(f"buffer/{one}" for one in subject.buffers())}
        elsewhere = set().union(*self._all_told(names)) - names
        found = _caught(lambda: read_snapshot(path, _meta(path), subject, self._place, self._places, elsewhere))
        errors = self._all_told(str(found) if isinstance(found, Exception) else None)
        if isinstance(found, Exception):
            raise found
        for rank, error in enumerate(errors):
            if error is not None:
                raise SnapshotError(f"rank {rank} cannot go on: {error}")
        assert isinstance(found, Found)
        return found

    def path(self, serial: int) -> Path:
        """The folder of a snapshot."""
        return self.folder / f"{PREFIX}{serial:08d}"

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything asked for so far was done or has failed; False if `timeout` seconds were too few."""
        with self._idle:
            return self._idle.wait_for(lambda: self._waiting == 0, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Finish what was asked for, and end the thread."""
        done = self.flush(timeout)
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            if done:
                self._thread.join(timeout)
        return done

    # -- on the thread ------------------------------------------------------------------------------------------

    def _do_later(self, job: Callable[[], None]) -> None:
        if not self._closed:
            with self._idle:
                self._waiting += 1
            self._queue.put(job)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._attempt(job)
            del job  # it may hold a snapshot's memory
            with self._idle:
                self._waiting -= 1
                self._idle.notify_all()

    def _attempt(self, job: Callable[[], object]) -> None:
        try:
            job()
        except (Exception, CheckpointException) as error:
            origin = cause(error)
            kind = (type(origin), getattr(origin, "errno", None))
            if kind not in self._seen_problems:
                self._seen_problems.add(kind)
                self._on_problem(f"snapshots cannot be written to {self.folder} ({reason(origin)}); training goes on")

    def _write(self, content: Content) -> None:
        path = self.folder / f"{WRITING}{content.serial:08d}"
        try:
            # Processes write together or not at all; each may have given up the snapshot at another moment.
            if self._agree(content.begin()):
                self._raise_together(_caught(self._check_folder) if self._leads else None)
                safe = self._agree(write_files(path, *content.load(), self._place, self._group))
                self._raise_together(_caught(lambda: self._complete(path, content, safe)) if self._leads else None)
                self._kept = {one.serial: one for one in self._told(self.kept)}
        finally:
            content.written()
            if self._leads:
                shutil.rmtree(path, ignore_errors=True)
        self._prune()

    def _complete(self, path: Path, content: Content, safe: bool) -> None:
        """All of it is on disk: make it a snapshot, unless it turned out to be bad meanwhile."""
        meta = {
            "what": WHAT,
            "format": FORMAT,
            "step": content.step,
            "health": content.health,
            "torch": str(torch.__version__),
            "num_processes": len(self._places),
            "places": [place.to_json() for place in self._places],
            "plain": "safe" if safe else "pickle",
            "written_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        _write_down(path / "meta.json", meta)
        _sync_folder(path)
        with self._lock:
            if content.spoiled():
                return
            path.rename(self.path(content.serial))
            _sync_folder(self.folder)
            self._kept[content.serial] = Kept(content.serial, content.step, content.health)
        if content.health != meta["health"]:  # it became healthy while it was being written
            self._mark(content.serial)

    def _mark(self, serial: int) -> None:
        with self._lock:
            known = self._kept.get(serial)
        if known is not None:
            if self._leads and self.path(serial).is_dir():
                _write_down(self.path(serial) / "meta.json", _meta(self.path(serial)) | {"health": "healthy"})
            known.health = "healthy"
        self._prune()

    def _prune(self) -> None:
        """Remove what is older than the healthy ones to keep."""
        with self._lock:
            healthy = sorted(serial for serial, one in self._kept.items() if one.health == "healthy")
            oldest = healthy[-self._keep] if len(healthy) >= self._keep else 0
            for serial in [serial for serial in self._kept if serial < oldest]:
                del self._kept[serial]
                if self._leads:
                    self._set_aside(serial)
        self._delete_set_aside()

    def _set_aside(self, serial: int) -> None:
        """Make a snapshot no snapshot any more, in one stroke."""
        if self.path(serial).is_dir():
            self.path(serial).rename(self.folder / f"{REMOVING}{serial:08d}")

    def _delete_set_aside(self) -> None:
        if self._leads:
            for path in self.folder.glob(f"{REMOVING}*"):
                shutil.rmtree(path, ignore_errors=True)

    # -- between processes --------------------------------------------------------------------------------------

    def _agree(self, yes: bool) -> bool:
        """Whether all processes say yes."""
        if self._group is None:
            return yes
        flag = torch.tensor(int(yes))
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._group)
        return bool(flag)

    def _told(self, value: Any) -> Any:
        """What the first process says, everywhere."""
        if self._group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=dist.get_global_rank(self._group, 0), group=self._group)
        return box[0]

    def _all_told(self, value: Any) -> list[Any]:
        """What each process says."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _raise_together(self, error: Any) -> None:
        """Raise what the first process met with, everywhere."""
        error = self._told(error)
        if error is not None:
            raise error

    # -- the folder ---------------------------------------------------------------------------------------------

    def _open(self) -> list[Kept]:
        """Check that the folder can be written to, remove what a killed process left, and list what is there."""
        probe = self.folder / f".probe-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise SnapshotError(
                f"snapshots cannot be written to {self.folder} ({reason(error)}); expected a folder that can be "
                "made and written to"
            ) from error
        for path in (*self.folder.glob(f"{WRITING}*"), *self.folder.glob(f"{REMOVING}*")):
            shutil.rmtree(path, ignore_errors=True)
        return [self._describe(path) for path in sorted(self.folder.glob(f"{PREFIX}*"))]

    def _check_folder(self) -> None:
        if not self.folder.is_dir():  # DCP would make it again, and nobody would look for it there
            raise FileNotFoundError("the folder is gone")

    def _describe(self, path: Path) -> Kept:
        try:
            serial = int(path.name.removeprefix(PREFIX))
            meta = _meta(path)
            version, step, health, _ = (meta[key] for key in ("format", "step", "health", "num_processes"))
        except (OSError, ValueError, KeyError) as error:
            raise SnapshotError(f"{path} is not a snapshot of gradvitals ({error}); remove it") from error
        if version != FORMAT:
            raise SnapshotError(f"{path} has format {version}; this gradvitals reads {FORMAT}")
        return Kept(serial, step, health)


def _meta(path: Path) -> dict[str, Any]:
    meta = json.loads((path / "meta.json").read_text("utf-8"))
    assert isinstance(meta, dict)
    return meta


def _write_down(path: Path, meta: Mapping[str, Any]) -> None:
    """Replace a file in one stroke, down to the disk."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _caught(call: Callable[[], Any]) -> Any:
    """What a call returns, or the error it raised."""
    try:
        return call()
    except Exception as error:
        return error
