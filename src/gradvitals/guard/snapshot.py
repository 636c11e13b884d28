"""Snapshots of a training run: a ring of them in host memory, their copies on disk, and the way back to one.

On disk a snapshot is a folder ``snapshot-00000012`` with the files of `torch.distributed.checkpoint`, one ``rank0.pt``
per rank with everything but tensors, and a ``meta.json``. That file is written last and removed first: a folder
without it was left by a process that was killed, and the next process removes it.

Reading a snapshot unpickles, as with any checkpoint of PyTorch: resume only from folders that you trust.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import queue
import shutil
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from gradvitals.distributed.shards import local, placements
from gradvitals.distributed.topology import own_group
from gradvitals.guard.actions import copy_all
from gradvitals.guard.policy import RollBack
from gradvitals.guard.training_state import SnapshotError, TrainingState, dense, sizes_of

MAX_PENDING = 2  # snapshots that may wait to be known healthy; while there are so many, no further one is due
FIRST_STEPS = 10
"""A young run has its first snapshot after so many steps, and each next one when the run is twice as long."""

KEPT_ON_DISK = 2  # healthy snapshots to keep on disk. Older ones go once newer healthy ones are complete.
FORMAT = 3
PREFIX = "snapshot-"
META = "meta.json"
HAS_NO_DIST = "no_dist" in inspect.signature(state_dict_saver.save).parameters
"""In torch 2.6 only the older functions have the argument, which later versions call deprecated."""


# -- one snapshot in host memory ---------------------------------------------------------------------------------


class HostCopy:
    """A copy of tensors in host memory. From a GPU, a side stream fills pinned memory while training continues.

    What is on a GPU must not change before `hold_back` was called, except buffers of the model, which a forward pass
    changes and which are cloned on the device first. PyTorch caches pinned memory, so later snapshots reuse that of
    earlier ones.
    """

    _streams: dict[torch.device, torch.cuda.Stream] = {}  # noqa: RUF012  # one per device for all copies

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        parts = {name: dense(tensor) for name, tensor in tensors.items()}
        self.tensors = {
            name: torch.empty_like(part, device="cpu", pin_memory=part.is_cuda) for name, part in parts.items()
        }
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._sources: list[Tensor] = []  # their memory must not serve others meanwhile
        later: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for name, part in parts.items():
            if part.is_cuda:
                source = part.clone() if name.startswith("buffer/") else part
                later.setdefault(part.device, []).append((self.tensors[name], source))
        for device, pairs in later.items():
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                copy_all(pairs)
                self._events[device] = torch.cuda.Event()
                self._events[device].record(stream)
            self._sources += [source for _, source in pairs]
        copy_all([(self.tensors[name], part) for name, part in parts.items() if not part.is_cuda])

    def hold_back(self) -> None:
        """Make each device finish the copy before what is queued from here; the host does not wait."""
        for device, event in self._events.items():
            torch.cuda.current_stream(device).wait_event(event)
        self._sources.clear()

    def wait(self) -> dict[str, Tensor]:
        """The copies, once they are complete."""
        for event in self._events.values():
            event.synchronize()
        return self.tensors


@dataclass(eq=False)
class Snapshot:
    """One snapshot, in memory, on disk or both."""

    serial: int  # counts snapshots; steps do not, as they come again after a rollback
    step: int  # steps of training that were done
    healthy: bool = False  # false until it has survived its settling time
    plain: dict[str, Any] = field(default_factory=lambda: {"sizes": {}})
    """Everything but tensors, and the size of each tensor."""
    specs: dict[str, Any] = field(default_factory=dict)  # how tensors are sharded, by name
    copies: Sequence[HostCopy] | None = None  # None if it is on disk alone, or was dropped
    to_disk: bool = False
    spoiled: bool = False  # whether there was trouble before it was known to be healthy

    def add(self, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Start copying this state into it."""
        self.plain |= {**plain, "sizes": self.plain["sizes"] | sizes_of(tensors)}
        self.specs |= {name: tensor._spec for name, tensor in tensors.items() if placements(tensor)}  # type: ignore[attr-defined]
        self.copies = [*(self.copies or ()), HostCopy(tensors)]

    def hold_back(self) -> None:
        """See `HostCopy`."""
        for one in self.copies or ():
            one.hold_back()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, once they have arrived in host memory."""
        return {name: tensor for one in self.copies or () for name, tensor in one.wait().items()}


def resolve(value: Any) -> Any:
    """Plain values with every function among them replaced by its result, which may wait for a device or a thread."""
    if callable(value):
        return value()
    if isinstance(value, Mapping):
        return {key: resolve(item) for key, item in value.items()}
    return [resolve(item) for item in value] if isinstance(value, list) else value


# -- on disk ------------------------------------------------------------------------------------------------------


class SnapshotStore:
    """Writes snapshots and their health into a folder, on a thread, and reads them back. One run per folder.

    Several processes write together, through a group of their own. If something cannot be written, `problems` gets a
    sentence, once per kind of problem, and the next snapshot is tried again.
    """

    def __init__(self, folder: Path, problems: list[str], group: Any, several: bool, stage: int | None) -> None:
        self.folder, self._problems = folder, problems
        self._group = own_group(group) if several else None
        self._rank = dist.get_rank(self._group) if several else 0
        self._num_ranks = dist.get_world_size(self._group) if several else 1
        self._common = "" if stage is None else f"stage{stage}/"
        self._lock = threading.Lock()
        self._reported: set[tuple[Any, ...]] = set()
        found = self._all(self._open if self._rank == 0 else lambda: None)[0]
        self._complete = {serial: Snapshot(serial, step, healthy) for serial, step, healthy in found}
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self._closed = False
        threading.Thread(target=self._run, name="gradvitals-snapshots", daemon=True).start()

    @property
    def complete(self) -> list[Snapshot]:
        """Complete snapshots on disk, oldest first."""
        with self._lock:
            return [self._complete[serial] for serial in sorted(self._complete)]

    # -- on the training thread ---------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot) -> None:
        """Write a snapshot, on the thread."""
        self._later(partial(self._write, snapshot))

    def mark_healthy(self, serial: int) -> None:
        """Note that a snapshot is healthy, on the thread."""
        self._later(partial(self._mark, serial))

    def discard(self, serial: int) -> None:
        """Remove a bad snapshot at once: a process that is killed later cannot come back to it."""
        with self._lock:
            if self._complete.pop(serial, None) is not None:
                self._attempt(partial(self._revoke, serial))
        self._later(partial(self._delete, serial))

    def read(self, serial: int, state: TrainingState) -> tuple[dict[str, Any], dict[str, Tensor], str]:
        """Read a snapshot into host memory and check that it fits.

        Returns:
            Plain values, tensors, and what cannot be restored because the number of ranks has changed. Tensors are then
            re-sharded by `torch.distributed.checkpoint`.
        """
        self.flush()  # the thread uses the same process group
        found: tuple[Any, Any, str] = self._all(lambda: self._read(self._path(serial), state))[self._rank]
        return found

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything asked for so far was done or has failed; False if `timeout` seconds were too few."""
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Finish what was asked for, and end the thread."""
        done = self.flush(timeout)
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        return done

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _later(self, job: Callable[[], object]) -> None:
        if not self._closed:
            self._queue.put(job)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._attempt(job)
            del job  # it may hold a snapshot's memory
            self._queue.task_done()
        self._queue.task_done()

    def _attempt(self, job: Callable[[], object]) -> None:
        try:
            job()
        except (Exception, CheckpointException) as error:
            origin = _cause(error)
            kind = (type(origin), getattr(origin, "errno", None))
            if kind not in self._reported:
                self._reported.add(kind)
                self._problems.append(
                    f"snapshots cannot be written to {self.folder} ({_reason(origin)}); training continues"
                )

    def _write(self, snapshot: Snapshot) -> None:
        path, copies = self._path(snapshot.serial), snapshot.copies
        # Processes write together or not at all; each may have dropped the snapshot at another moment.
        if not all(self._all(lambda: copies is not None)):
            return
        try:
            self._all(lambda: self._write_plain(path, snapshot))
            tensors = {name: tensor for one in copies or () for name, tensor in one.wait().items()}
            save_tensors(path, snapshot, tensors, partial(self._key, snapshot.plain, self._rank), self._group)
            done = self._all(lambda: self._finish(path, snapshot))[0]
            if done and self._rank and not snapshot.spoiled:
                self._add(snapshot)
        finally:
            if snapshot.serial not in self._complete:
                self._delete(snapshot.serial)
        self._prune()

    def _write_plain(self, path: Path, snapshot: Snapshot) -> None:
        """Write everything of this rank but the tensors."""
        if not self.folder.is_dir():  # it is not made again: nobody would look for it there
            raise FileNotFoundError("the folder is gone")
        path.mkdir(exist_ok=True)
        with (path / f"rank{self._rank}.pt").open("wb") as file:
            torch.save({**snapshot.plain, "extra": resolve(snapshot.plain["extra"])}, file)
            file.flush()
            os.fsync(file.fileno())

    def _finish(self, path: Path, snapshot: Snapshot) -> bool:
        """All of it is on disk: make it a snapshot, unless it turned out to be bad meanwhile."""
        if self._rank:
            return False
        meta = {
            "what": "A snapshot of a training run by gradvitals; tensors are in torch.distributed.checkpoint's format.",
            "format": FORMAT,
            "step": snapshot.step,
            "healthy": snapshot.healthy,
            "torch": str(torch.__version__),
            "num_ranks": self._num_ranks,
            "files": {file.name: file.stat().st_size for file in sorted(path.iterdir())},
            "written_at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        with self._lock:
            if not snapshot.spoiled:
                _write_json(path / META, meta)
                _sync_folder(self.folder)
                self._add(snapshot)
            return not snapshot.spoiled

    def _add(self, snapshot: Snapshot) -> None:
        """A snapshot is complete. Without its plain values, which may hold the Monitor, and so the model."""
        self._complete[snapshot.serial] = Snapshot(snapshot.serial, snapshot.step, snapshot.healthy)

    def _mark(self, serial: int) -> None:
        with self._lock:
            if serial in self._complete:
                self._complete[serial].healthy = True
                file = self._path(serial) / META
                if self._rank == 0 and file.exists():
                    _write_json(file, json.loads(file.read_text("utf-8")) | {"healthy": True})
        self._prune()

    def _prune(self) -> None:
        """Remove what is older than the healthy ones to keep."""
        with self._lock:
            healthy = sorted(serial for serial, one in self._complete.items() if one.healthy)
            oldest = healthy[-KEPT_ON_DISK] if len(healthy) >= KEPT_ON_DISK else 0
            outdated = [serial for serial in self._complete if serial < oldest]
            for serial in outdated:
                del self._complete[serial]
                self._revoke(serial)
        for serial in outdated:
            self._delete(serial)

    def _revoke(self, serial: int) -> None:
        """Make a folder no snapshot any more, in one operation."""
        if self._rank == 0:
            (self._path(serial) / META).unlink(missing_ok=True)

    def _delete(self, serial: int) -> None:
        if self._rank == 0:
            shutil.rmtree(self._path(serial), ignore_errors=True)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _open(self) -> list[tuple[int, int, bool]]:
        """Check that the folder is writable, remove what a killed process left, and list what is there."""
        probe = self.folder / f".probe-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise SnapshotError(
                f"snapshots cannot be written to {self.folder} ({_reason(error)}); expected a writable folder"
            ) from error
        found = []
        for path in sorted(self.folder.glob(PREFIX + 8 * "[0-9]")):
            if not (path / META).exists():
                shutil.rmtree(path, ignore_errors=True)
                continue
            try:
                meta = json.loads((path / META).read_text("utf-8"))
                if meta["format"] == FORMAT:
                    found.append((int(path.name.removeprefix(PREFIX)), int(meta["step"]), bool(meta["healthy"])))
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise SnapshotError(f"{path} is not a snapshot of gradvitals ({error}); remove it") from error
            if meta["format"] != FORMAT:
                raise SnapshotError(f"{path} has format {meta['format']}; this gradvitals reads {FORMAT}; remove it")
        return found

    def _read(self, path: Path, state: TrainingState) -> tuple[dict[str, Any], dict[str, Tensor], str]:
        changed = ""
        try:
            meta = json.loads((path / META).read_text("utf-8"))
            for name, size in meta["files"].items():
                if (path / name).stat().st_size != size:
                    raise ValueError(f"{name} does not have its {size} bytes")
            num = int(meta["num_ranks"])
            source = self._rank if self._rank < num else 0
            where = None if torch.cuda.is_available() else "cpu"
            plain: dict[str, Any] = torch.load(path / f"rank{source}.pt", map_location=where, weights_only=False)
            if num != self._num_ranks:
                few = f"the number of ranks changed from {num} to {self._num_ranks}"
                if any(name.startswith("state/") for name in plain["own"]):
                    raise SnapshotError(f"{path} has optimizer state of each rank's own, and {few}; resume with {num}")
                changed = f"{few}: the data position and random generators are not restored"
            state.check_fit(plain, str(path))
            return plain, load_tensors(path, plain, state, partial(self._key, plain, source)), changed
        except SnapshotError:
            raise
        except (Exception, CheckpointException) as error:
            reason = _reason(_cause(error))
            raise SnapshotError(f"{path} cannot be read ({reason}); remove it to continue from an older one") from error

    def _path(self, serial: int) -> Path:
        return self.folder / f"{PREFIX}{serial:08d}"

    def _key(self, plain: Mapping[str, Any], rank: int, name: str) -> str:
        """The name of a tensor on disk."""
        return (f"rank{rank}/" if name in plain["own"] else self._common) + name

    def _all(self, call: Callable[[], Any]) -> list[Any]:
        """Returns the results of the call on all ranks. If it raises on one, it raises on all."""
        value, error = None, None
        try:
            value = call()
        except Exception as caught:
            error = caught
        answers: list[Any] = [None] * self._num_ranks
        if self._group is not None:
            # A rank's own value need not travel: tensors that were read stay where they are.
            sent = value if isinstance(value, (bool, list)) else None
            dist.all_gather_object(answers, (sent, None if error is None else str(error)), group=self._group)
        if error is not None:
            raise error
        answers[self._rank] = (value, None)
        for rank, (_, failure) in enumerate(answers):
            if failure is not None:
                raise SnapshotError(f"rank {rank} cannot continue: {failure}")
        return [answer for answer, _ in answers]


def save_tensors(
    path: Path, snapshot: Snapshot, tensors: Mapping[str, Tensor], key: Callable[[str], str], group: Any
) -> None:
    """Write the tensors, with all ranks of `group` together."""
    _silence()
    # Copying ahead would wait for streams of a device that has nothing to do with it.
    writer = filesystem.FileSystemWriter(path, per_thread_copy_ahead=0)
    save: Any = state_dict_saver.save if HAS_NO_DIST else state_dict_saver.save_state_dict
    written = {key(name): _with_spec(tensor, snapshot.specs.get(name)) for name, tensor in tensors.items()}
    save(written, storage_writer=writer, process_group=group, no_dist=group is None)


def load_tensors(
    path: Path, plain: Mapping[str, Any], state: TrainingState, key: Callable[[str], str]
) -> dict[str, Tensor]:
    """This rank's part of every tensor, in host memory."""
    like = state.sharded_like(plain)
    parts = {
        name: torch.empty(local(like[name]).shape if name in like else shape, dtype=dtype)
        for name, (shape, dtype) in plain["sizes"].items()
    }
    _silence()
    load: Any = state_dict_loader.load if HAS_NO_DIST else state_dict_loader.load_state_dict
    wanted = {key(name): _with_spec(part, getattr(like.get(name), "_spec", None)) for name, part in parts.items()}
    # Each process reads by itself, so that one that cannot does not leave the others waiting.
    load(wanted, storage_reader=filesystem.FileSystemReader(path), no_dist=True)
    return parts


def _with_spec(part: Tensor, spec: Any) -> Tensor:
    if spec is None:
        return part
    from torch.distributed.tensor import DTensor

    return DTensor(part, spec, requires_grad=False)  # from_local would move host memory to the mesh's device


def _silence() -> None:
    """DCP warns at every call that there is one process. The filter stays: another thread may be setting its own."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    if not HAS_NO_DIST:
        warnings.filterwarnings("ignore", message="`(save|load)_state_dict` is deprecated", category=FutureWarning)
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated", category=UserWarning)


def _write_json(path: Path, meta: Mapping[str, Any]) -> None:
    """Replace a file by one rename, down to the disk."""
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _cause(error: BaseException) -> BaseException:
    """The error of a process that an error of DCP reports."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failure[0] for failure in failures.values()), error)


def _reason(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# -- the ring ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Restored:
    """The snapshot that the run went back to."""

    step: int  # steps of training that were done when the snapshot was taken
    extra: Mapping[str, Any]  # what was given to `take` then
    changed: str = ""  # what could not be restored because the number of ranks changed


class SnapshotManager:
    """Takes snapshots, learns which are healthy, and restores one.

    Host memory holds `keep` healthy snapshots and up to two pending ones. In a distributed run all processes of the
    `group` must make the same calls with the same steps. `stage` is the pipeline stage, if stages use the same names
    for different tensors.
    """

    def __init__(
        self,
        state: TrainingState,
        pace: RollBack,
        folder: Path | None = None,
        group: Any = None,
        stage: int | None = None,
    ) -> None:
        self.state, self._pace = state, pace
        self._takes = pace.mode == "on" or folder is not None  # else there is never a snapshot
        self.problems: list[str] = []  # a sentence for each kind of problem so far. A thread adds to it.
        self._ring: list[Snapshot] = []  # at most `keep` healthy ones and `MAX_PENDING` pending ones, oldest first
        self._open: Snapshot | None = None  # the one that still lacks the settings
        self._last_step, self._next_serial = 0, 1
        self._store: SnapshotStore | None = None
        self.found = False  # whether there were snapshots in the folder at the start
        if folder is not None:
            several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
            if several and any(type(one).__name__ == "FullyShardedDataParallel" for one in state.model.modules()):
                raise SnapshotError(
                    "the model is sharded by FullyShardedDataParallel, whose shards cannot be told apart on disk; "
                    "expected torch.distributed.fsdp.fully_shard, or no folder"
                )
            # The store's thread knows nothing of this object, so that it does not keep the model in memory.
            self._store = SnapshotStore(folder, self.problems, group, several, stage)
            complete = self._store.complete
            self.found = bool(complete)
            self._next_serial = complete[-1].serial + 1 if complete else 1
            weakref.finalize(self, self._store.close, 60.0)

    # -- which there are ----------------------------------------------------------------------------------------------

    @property
    def _pending(self) -> list[Snapshot]:
        return [one for one in self._ring if not one.healthy]

    @property
    def _healthy(self) -> list[Snapshot]:
        """The healthy ones in memory."""
        return [one for one in self._ring if one.healthy and one.copies is not None]

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken after `step` steps; at the start of a run more often."""
        wait = min(self._pace.every, max(FIRST_STEPS, self._last_step))
        return self._takes and step - self._last_step >= wait and len(self._pending) < MAX_PENDING

    def newest(self, before: int | None = None) -> Snapshot | None:
        """The newest healthy snapshot in memory, if possible from before a step; None if there is none."""
        return next((one for one in reversed(self._healthy) if before is None or one.step <= before), None)

    def moves(self, lr_sum: float) -> dict[str, float]:
        """Returns the distance of each parameter from the newest healthy snapshot, divided by the last two's.

        Both in relation to the sum of learning rates. Empty if there are no two snapshots to compare.
        """
        healthy = self._healthy[-2:]
        rates = [*(one.plain["extra"]["guard"]["lr_sum"] for one in healthy), lr_sum]
        if len(healthy) < 2 or not rates[0] < rates[1] < rates[2]:
            return {}
        older, newer = (one.tensors() for one in healthy)
        found = {}
        for name, parameter in self.state.parameters().items():
            first, last = (copies.get(f"parameter/{name}") for copies in (older, newer))
            if first is None or last is None or not (before := float(torch.dist(last.float(), first.float()))):
                continue
            moved = float(torch.dist(dense(parameter).detach().float(), last.to(parameter.device).float()))
            ratio = moved / before * (rates[1] - rates[0]) / (rates[2] - rates[1])
            found[name] = math.inf if math.isnan(ratio) else ratio
        return found

    # -- taking them --------------------------------------------------------------------------------------------------

    def take(
        self, step: int, extra: Mapping[str, Any] | None = None, *, to_disk: bool = True, healthy: bool = False
    ) -> bool:
        """Start a snapshot, pending for now. Call it when `step` steps are done and nothing of the next has started.

        On a GPU the host does not wait. Random generators and the data position are read here; what schedulers and
        scalers change after the optimizer's step is read by `complete`.

        Args:
            step: Steps of training that are done.
            extra: Plain values to get back with it. Functions among them are called when it is written.
            to_disk: False for one that is taken within a step, when its data is drawn already: it serves no other
                process.
            healthy: Whether it counts as healthy at once, as that of the start does.

        Returns:
            False if there are too many pending ones: it stays due. Or if rollbacks are off, and there is no folder.
        """
        self.complete()
        if not self._takes or len(self._pending) >= MAX_PENDING:
            return False
        plain, tensors = self.state.read()
        snapshot = Snapshot(self._next_serial, step, healthy, to_disk=to_disk)
        snapshot.add({**plain, "extra": deepcopy(dict(extra or {}))}, tensors)
        self._open, self._last_step, self._next_serial = snapshot, step, self._next_serial + 1
        self._ring.append(snapshot)
        return True

    def complete(self) -> None:
        """Add the settings to the snapshot that was started. Call it right before parameters change again."""
        snapshot, self._open = self._open, None
        if snapshot is None:
            return
        snapshot.add(*self.state.read_settings())
        snapshot.hold_back()
        if self._store is not None and snapshot.to_disk:
            self._store.write(snapshot)

    def settle(self, step: int) -> None:
        """No trouble up to `step`: some snapshots are healthy by now. Those beyond `keep` go, the oldest first."""
        for one in self._pending:
            if one.step <= step - min(self._pace.settle, max(FIRST_STEPS, one.step // 2)):
                one.healthy = True
                if self._store is not None:
                    self._store.mark_healthy(one.serial)
        for one in [one for one in self._ring if one.healthy][: -self._pace.keep]:
            self._remove(one)

    def spoil(self) -> None:
        """Trouble: pending snapshots may hold it, and go from memory and disk."""
        for one in self._pending:
            self._discard(one)

    def forget(self) -> None:
        """Drop every snapshot in memory."""
        for one in list(self._ring):
            self._remove(one)

    def _discard(self, snapshot: Snapshot) -> None:
        self._remove(snapshot, spoiled=True)
        if self._store is not None:
            self._store.discard(snapshot.serial)

    def _remove(self, snapshot: Snapshot, *, spoiled: bool = False) -> None:
        self._ring.remove(snapshot)
        if snapshot is self._open:
            self._open = None
            snapshot.hold_back()
        snapshot.spoiled, snapshot.copies = spoiled, None

    # -- going back to one --------------------------------------------------------------------------------------------

    def restore(self, started: int | None = None) -> Restored | None:
        """Go back to the newest healthy snapshot, in place; None if there is none.

        Random generators and the data position stay, and pending snapshots go: what follows is another course of
        training. If the trouble `started` at a known step, snapshots from after it go too, if there is one from before.
        """
        self.spoil()
        self.complete()
        if started is not None and any(one.step <= started for one in self._ring):
            for late in [one for one in self._ring if one.step > started]:
                self._discard(late)
        while self._ring:
            one = self._ring[-1]
            try:
                if one.copies is not None:
                    self.state.check_fit(one.plain, f"the snapshot of step {one.step}")
                    plain, tensors = one.plain, one.tensors()
                else:
                    assert self._store is not None
                    plain, tensors, _ = self._store.read(one.serial, self.state)
            except SnapshotError as error:  # unreadable, or the model has changed; an older one may do
                self.problems.append(str(error))
                self._remove(one)
                continue
            self.state.restore(plain, tensors, position=False)
            self._last_step = one.step
            return Restored(one.step, deepcopy(plain["extra"]))
        return None

    def resume(self) -> Restored | None:
        """Continue from the newest snapshot in the folder, with random generators and data position.

        Call it before the first step. None if the folder holds none. Raises a `SnapshotError` and changes nothing if
        the snapshot does not fit.
        """
        self.flush()
        complete = self._store.complete if self._store is not None else []
        if self._store is None or not complete:
            return None
        newest = complete[-1]
        plain, tensors, changed = self._store.read(newest.serial, self.state)
        self.state.restore(plain, tensors, position=not changed)
        self.forget()
        healthy = [one for one in complete if one.healthy][-self._pace.keep :]
        self._ring = healthy if newest in healthy else [*healthy, newest]
        self._last_step = newest.step
        return Restored(newest.step, plain["extra"], changed)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until everything is on disk; False if `timeout` seconds were not enough."""
        self.complete()
        return self._store.flush(timeout) if self._store is not None else True

    def close(self, timeout: float | None = 60.0) -> bool:
        """Write what is left, and end. Returns whether all of it was done in time."""
        self.complete()
        return self._store.close(timeout) if self._store is not None else True
