"""The Guard as an arm: as it comes, but for snapshots as close together as a run of a few hundred steps needs them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from torch import Tensor

from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.guard import Guard, RollBack
from gradvitals.lab.recovery.tasks import Training
from gradvitals.types import Action
from gradvitals.watching import watch

SNAPSHOT_EVERY = 25
SETTLE = 15
OUR_OWN = ("guard_error", "monitor_error", "store_error")
"""Findings about gradvitals itself: with one of them a run proves nothing."""


class Guarded:
    """A run under a Monitor and a Guard that may do everything."""

    def __init__(self, training: Training, folder: Path, *, keep: bool) -> None:
        self.training = training
        self.monitor = watch(training.model, training.optimizer, run=folder / "run", config=Config(quiet=True))
        self.guard = Guard(
            self.monitor,
            mode="act",
            scheduler=training.scheduler,
            data=training.data,
            folder=folder / "snapshots" if keep else None,
            rollback=RollBack(every=SNAPSHOT_EVERY, settle=SETTLE),
        )
        if keep:
            self.guard.resume()

    @property
    def steps(self) -> int:
        """Steps that count."""
        return self.guard.step

    @property
    def kept(self) -> int:
        """The same: what was skipped or rolled back does not count."""
        return self.guard.step

    @property
    def actions(self) -> Counter[str]:
        """What the Guard did, and what it would have done but might not."""
        return Counter(action.kind if action.taken else f"{action.kind} refused" for action in self.guard.actions)

    @property
    def notes(self) -> tuple[str, ...]:
        """Each action in a few words."""
        return tuple(map(_in_words, self.guard.actions))

    def step(self, loss: Tensor) -> None:
        """As in any loop."""
        self.monitor.observe(loss)
        self.training.optimizer.step()
        self.training.scheduler.step()

    def close(self) -> None:
        """End the record."""
        self.monitor.close()
        broken = [finding for finding in self.monitor.findings if finding.id in OUR_OWN]
        if broken:
            raise GradvitalsError(f"gradvitals itself failed in this run: {broken[0]} {dict(broken[0].evidence)}")


def _in_words(action: Action) -> str:
    taken = "" if action.taken else "not taken, "
    return f"{action.kind} at {action.step} for {action.finding}: {taken}{action.reason}"
