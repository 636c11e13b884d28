"""Keeper: a ring of snapshots in host memory, their copies on disk, and the way back to a healthy one."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import distributed as dist

from gradvitals.act.snap_copy import Slots, dense_all
from gradvitals.act.snap_disk import Group
from gradvitals.act.snap_fit import SnapshotError, check_fit
from gradvitals.act.snap_place import Place
from gradvitals.act.snap_ring import MAX_PENDING, Entry, Ring
from gradvitals.act.snapshot import Snapshot
from gradvitals.act.subject import Subject
from gradvitals.act.vault import Vault
from gradvitals.errors import ConfigError
from gradvitals.distributed.topology import own_group


@dataclass(frozen=True)
class Restored:
    """What the run went back to.

    Attributes:
        step: Steps that were done when the snapshot was taken.
        extra: What was given to `take` then.
        changed: What is not as it was then, in words, as there are more or fewer ranks than wrote it.
    """

    step: int
    extra: Mapping[str, Any]
    changed: Sequence[str] = ()


class Keeper:
    """Takes snapshots of a run, learns which of them are healthy, and brings the run back to one.

    Host memory holds `keep` healthy snapshots and up to two pending ones: ``keep + 2`` copies of parameters, buffers
    and optimizer state, in memory that is allocated once. On a GPU it is pinned, and a side stream fills it while
    training goes on. In a run of many processes all of them must make the same calls with the same steps.

    Args:
        subject: What to keep.
        every: Steps from one snapshot to the next.
        settle: Steps without trouble after which a snapshot counts as healthy.
        keep: Healthy snapshots in memory.
        folder: Where to keep them on disk too; None keeps them in memory alone.
        keep_on_disk: Healthy snapshots there.
        on_problem: Called with a sentence when a snapshot cannot be written, once for each kind of problem, on a thread
            of its own. Without it, look at `problems`.
        group: The processes that train together; None for all.
        place: Where this one stands among them; None where each sees data of its own.

    Attributes:
        problems: Those sentences so far.
        found: Steps of the snapshots that were in the folder already, oldest first. `resume` goes on from the newest;
            without it, new ones take their place as they become healthy.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        every: int,
        settle: int,
        keep: int = 2,
        folder: Path | str | None = None,
        keep_on_disk: int = 2,
        on_problem: Callable[[str], object] | None = None,
        group: Group = None,
        place: Place | None = None,
    ) -> None:
        _expect_at_least(1, every=every, keep=keep, keep_on_disk=keep_on_disk)
        _expect_at_least(0, settle=settle)
        self.subject = subject
        self.problems: list[str] = []
        self._on_problem = on_problem
        self._ring = Ring(every=every, settle=settle, keep=keep)
        self._slots = Slots(keep + MAX_PENDING)
        self._snapshots: dict[int, Snapshot] = {}
        self._open: Snapshot | None = None
        self._prepared = False
        self._in_step = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self._group = _own_group(subject, group) if folder is not None and self._in_step else None
        self._vault: Vault | None = None
        if folder is not None:
            told = _weakly(self._note_problem)
            self._vault = Vault(Path(folder), keep=keep_on_disk, on_problem=told, group=self._group, place=place)
            self._ring.count_from(max((one.serial for one in self._vault.kept), default=0) + 1)
        self.found = [one.step for one in self._vault.kept] if self._vault is not None else []
        self._at_exit = partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def any(self) -> bool:
        """Whether there is any snapshot, pending or healthy."""
        return bool(self._ring.entries)

    @property
    def healthy_step(self) -> int | None:
        """The step that `restore` would go back to; None if there is no healthy snapshot."""
        newest = self._ring.newest_healthy()
        return newest.step if newest is not None else None

    # -- in the loop --------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether a snapshot should be taken after `step` steps. Ask at every step."""
        if not self._prepared and step > 0:
            self._prepared = True  # by now optimizers have made their state, so the size is known
            self._slots.prepare(dense_all(self.subject.read_tensors().tensors))
        return self._ring.due(step)

    def take(
        self, step: int, extra: Mapping[str, Any] | None = None, *, to_disk: bool = True, wait: bool = False
    ) -> bool:
        """Start a snapshot, pending for now. Call it when `step` steps are done and nothing of the next has begun.

        On a GPU it returns at once. Random generators and the data position are read here; what schedulers and scalers
        change after the optimizer's step is read by `complete`.

        Args:
            step: Steps of training that are done.
            extra: Plain values to get back with it; they must be picklable. Functions among them are called when it is
                written.
            to_disk: False keeps this one in memory alone. So one that is taken amid a step, when its data is drawn
                already, can be gone back to, but no process resumes from it.
            wait: Wait for memory to be allocated. Many processes always do: they take it together or not at all.

        Returns:
            False if there is no room, or no memory yet: it stays due, and the next step may try again.
        """
        self.complete()
        if not self._ring.has_room():
            return False
        part = self.subject.read()
        tensors = dense_all(part.tensors)
        memory = self._slots.acquire(tensors, wait=wait or self._in_step)
        if memory is None and self._in_step:  # all processes take it or none: wait for the disk
            self.flush()
            memory = self._slots.acquire(tensors, wait=True)
        if memory is None:
            return False
        memory.start(tensors, part.fragile)
        entry = self._ring.add(step)
        kept = deepcopy(dict(extra or {}))
        self._open = Snapshot(entry, part, memory, kept, self._slots, on_disk=to_disk and self._vault is not None)
        self._snapshots[entry.serial] = self._open
        return True

    def complete(self) -> None:
        """Complete the snapshot that was begun, if one was, by what schedulers and scalers have done since.

        The device finishes the copy before it goes on with what is queued from here; the host does not wait.
        """
        snapshot, self._open = self._open, None
        if snapshot is None:
            return
        snapshot.complete(self.subject.read_settings())
        if self._vault is not None and snapshot.on_disk:
            self._vault.write(snapshot)

    def before_update(self) -> None:
        """Call it right before parameters change again, and after schedulers and scalers had their turn."""
        self.complete()

    def settle(self, step: int) -> list[int]:
        """No trouble up to `step`: returns the steps of the snapshots that are healthy by now.

        Healthy ones beyond `keep` make room, the oldest first.
        """
        settled, gone = self._ring.settle(step)
        for entry in settled:
            if self._vault is not None:
                self._vault.mark(entry.serial)
        for entry in gone:
            self._forget(entry)
        return [entry.step for entry in settled]

    def spoil(self, step: int) -> list[int]:
        """Trouble at `step`: pending snapshots may hold it, and go from memory and disk. Returns their steps."""
        bad = self._ring.spoil()
        for entry in bad:
            self._discard(entry)
        return [entry.step for entry in bad]

    # -- going back ---------------------------------------------------------------------------------------------

    def restore(self, began: int | None = None) -> Restored | None:
        """Go back to the newest healthy snapshot, in place; random generators and the data position stay.

        Pending ones are dropped: what follows is another course of training. None if there is no healthy one.

        Args:
            began: The step at which the trouble began, where it was found late: snapshots from after it go too, if
                there is one from before.
        """
        self.spoil(-1)
        self.complete()
        if began is not None and any(entry.step <= began for entry in self._ring.healthy):
            for late in [entry for entry in self._ring.healthy if entry.step > began]:
                self._ring.drop(late)
                self._discard(late)
        while (entry := self._ring.newest_healthy()) is not None:
            snapshot = self._snapshots.get(entry.serial)
            try:
                plain, tensors = snapshot.content() if snapshot is not None else self._read(entry)
                if snapshot is not None:
                    check_fit(self.subject, plain, snapshot.sizes, f"the snapshot of step {entry.step}")
            except SnapshotError as error:  # it cannot be read, or the model has changed; an older one may do
                self._note_problem(str(error))
                self._ring.drop(entry)
                self._forget(entry)
                continue
            self.subject.put_back(plain, tensors, position=False)
            self._ring.go_on_from(entry.step)
            return Restored(entry.step, deepcopy(plain["extra"]))
        return None

    def resume(self) -> Restored | None:
        """Go on from the newest snapshot in the folder, with random generators and data position.

        Call it before the first step. None if the folder holds none. A snapshot that does not fit raises a
        `SnapshotError`, and nothing is changed.
        """
        if self._vault is None:
            return None
        self.flush()
        kept = self._vault.kept
        if not kept:
            return None
        newest = kept[-1]
        found = self._vault.read(newest.serial, self.subject)
        self.subject.put_back(found.plain, found.tensors, position=True)
        healthy = [one for one in kept if one.health == "healthy"][-self._ring.keep :]
        adopted = healthy if newest in healthy else [*healthy, newest]
        self._drop_all()
        self._ring.adopt([Entry(one.serial, one.step, one.health) for one in adopted])
        self._ring.go_on_from(newest.step)
        return Restored(newest.step, found.plain["extra"], found.changed)

    # -- the end ------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until what was taken so far is on disk; False if `timeout` seconds were not enough."""
        self.complete()
        return self._vault.flush(timeout) if self._vault is not None else True

    def close(self, timeout: float | None = 60.0) -> bool:
        """Write what is left, and end. Returns whether all of it was done in time."""
        atexit.unregister(self._at_exit)
        self.complete()
        return self._vault.close(timeout) if self._vault is not None else True

    # -- details ------------------------------------------------------------------------------------------------

    def _read(self, entry: Entry) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
        assert self._vault is not None
        self._vault.flush()  # it reads through the same processes that it writes through
        found = self._vault.read(entry.serial, self.subject)
        return found.plain, found.tensors

    def _discard(self, entry: Entry) -> None:
        self._forget(entry, spoiled=True)
        if self._vault is not None:
            self._vault.discard(entry.serial)

    def _forget(self, entry: Entry, *, spoiled: bool = False) -> None:
        snapshot = self._snapshots.pop(entry.serial, None)
        if snapshot is None:
            return
        if snapshot is self._open:
            self._open = None
            snapshot.hold_back()
        snapshot.forget(spoiled=spoiled)

    def _drop_all(self) -> None:
        for entry in self._ring.entries:
            self._forget(entry)

    def _note_problem(self, problem: str) -> None:
        self.problems.append(problem)
        if self._on_problem is not None:
            self._on_problem(problem)


def _own_group(subject: Subject, group: Group) -> Group:
    """A group of the same processes for snapshots alone: training must not meet their messages."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in subject.model.modules()):
        raise SnapshotError(
            "the model is sharded by FullyShardedDataParallel, whose parts cannot be told apart on disk; expected "
            "torch.distributed.fsdp.fully_shard, or no folder"
        )
    return own_group(group)


def _expect_at_least(least: int, **numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{name} is {value!r}; expected a whole number, {least} or more")


def _weakly(method: Callable[[str], None]) -> Callable[[str], None]:
    """Call a method as long as its object lives; the vault's thread must not keep the model in memory."""
    reference = weakref.WeakMethod(method)

    def call(problem: str) -> None:
        alive = reference()
        if alive is not None:
            alive(problem)

    return call


def _close(keeper: weakref.ref[Keeper]) -> None:
    alive = keeper()
    if alive is not None:
        alive.close()
