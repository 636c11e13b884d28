"""One cell: a training loop with its accident and the arm that looks after it.

The arms are nothing, a fixed clip, what OLMo-core and ZClip do, and the Guard. A cell whose process is killed runs in a
process of its own, which is started again with the same command: this module, with a cell and a folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.faults.presets import Olmo, ZClip
from benchmarks.recovery.cell import KILLED, ArmName, Cell, Result
from benchmarks.recovery.faults import Fault, plant
from benchmarks.recovery.tasks import Training, prepare
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.guard import Guard, RollBack
from gradvitals.monitor import watch
from gradvitals.types import Action

MAX_NORM = 1.0
"""What is usual, and what ZClip clips to beside its own limit."""


class Arm(Protocol):
    """Makes the steps of a run. One `step` a batch, called when the gradient is complete."""

    @property
    def steps(self) -> int:
        """Steps so far, as this arm counts them: the run ends when there are enough."""

    @property
    def kept(self) -> int:
        """Batches whose update is in the weights."""

    @property
    def actions(self) -> Counter[str]:
        """How often it did what."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Each action in a few words, where it has some."""

    def step(self, loss: Tensor) -> None:
        """Clip, step or leave it, and go on in the schedule."""

    def close(self) -> None:
        """The run is over."""


class Plain:
    """No care at all; others decide about its step in `admits`."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.steps = self.kept = 0
        self.actions: Counter[str] = Counter()
        self.notes: tuple[str, ...] = ()

    def step(self, loss: Tensor) -> None:
        """One step of the optimizer and of the schedule."""
        if self.admits(loss):
            self.training.optimizer.step()
            self.kept += 1
        self.training.scheduler.step()
        self.steps += 1

    def admits(self, loss: Tensor) -> bool:
        """Whether the step is to be made. What clips does so here."""
        return True

    def gradients(self) -> list[Tensor]:
        """All of them."""
        return [parameter.grad for parameter in self.training.model.parameters() if parameter.grad is not None]

    def close(self) -> None:
        """Nothing is open."""


class FixedClip(Plain):
    """`clip_grad_norm_(1.0)`."""

    def admits(self, loss: Tensor) -> bool:
        """Every step, clipped."""
        norm = nn.utils.clip_grad_norm_(self.training.model.parameters(), MAX_NORM)
        self.actions["clip"] += int(norm > MAX_NORM)
        return True


class OlmoSkip(Plain):
    """The steps OLMo-core's SkipStepOptimizer multiplies by 0 are left out.

    Left out for good, moments included; the original's 0 times NaN would be NaN. As there, a step that is left out
    counts as one, for the schedule too.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.detector = Olmo()

    def admits(self, loss: Tensor) -> bool:
        """Every step but those with a loss or norm over six standard deviations."""
        norm = float(nn.utils.get_total_norm(self.gradients()))
        flagged = self.detector.update(loss.item(), norm, 0.0)
        self.actions["skip"] += int(flagged)
        return not flagged


class ZClipped(Plain):
    """Gradients clipped as ZClip does: to its own limit where the z-score is high, and to 1 in any case."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self.detector = ZClip()

    def admits(self, loss: Tensor) -> bool:
        """Every step, clipped."""
        gradients = self.gradients()
        norm = nn.utils.get_total_norm(gradients)
        limit = self.detector.clip_value(norm.item())
        self.detector.update(loss.item(), norm.item(), 0.0)
        allowed = MAX_NORM if limit is None else min(limit, MAX_NORM)
        nn.utils.clip_grads_with_norm_(self.training.model.parameters(), allowed, norm)
        self.actions["clip"] += int(norm > allowed)
        return True


def is_broken(model: nn.Module) -> bool:
    """Whether a weight is not finite. No arm but the Guard comes back from there."""
    return not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


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


ALONE: dict[ArmName, type[Plain]] = {"none": Plain, "clip": FixedClip, "olmo": OlmoSkip, "zclip": ZClipped}
"""The arms that need nothing but the run."""

STRUCK = "killed.json"
"""What a process leaves in its folder before it is killed, so that the next one is not."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One batch, for whoever wants to see what happened."""

    index: int
    step: int
    """Steps before it, as the arm counts them."""
    loss: float
    norm: float
    """Of the gradient, before anybody clips it."""
    lr: float


Watcher = Callable[[Seen], object]


def train(cell: Cell, folder: Path | None = None, watcher: Watcher | None = None) -> Result:
    """Make one run, to its end.

    Args:
        cell: What to do.
        folder: Where a process that is killed leaves what the next one finds: see `killed.train_killed`. Without it
            nothing of the first process is left, and the run begins as the second: at the first step, with the
            batches of the first one spent.
        watcher: Called with every batch, after its step.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch has to say about a run that is meant to go wrong
        kill_at, batches = _fate(cell, folder)
        return _train(cell, folder or Path(scratch), watcher, kill_at, batches)


def _fate(cell: Cell, folder: Path | None) -> tuple[int | None, int]:
    """The batch at which this process is killed, if it is, and how many were drawn before it by another."""
    if not cell.is_killed:
        return None, 0
    kill_at = min(plant(KILLED, cell.seed, cell.steps).batches)
    if folder is None:
        return None, kill_at + 1
    struck = folder / STRUCK
    return (None, json.loads(struck.read_text("utf-8"))["batches"]) if struck.exists() else (kill_at, 0)


def _train(cell: Cell, folder: Path, watcher: Watcher | None, kill_at: int | None, batches: int) -> Result:
    started = time.perf_counter()
    training = prepare(cell.model, cell.seed, cell.steps)
    fault = plant(cell.fault, cell.seed, cell.steps)
    fault.install(training)
    untrained = training.validation_loss()
    arm = _arm(cell, training, folder)
    try:
        while arm.steps < cell.steps and batches < cell.max_batches:
            batches += 1
            if not _one_batch(training, arm, fault, watcher, kill_at, folder) and cell.arm != "guard":
                break  # nothing brings weights back that are not finite
    finally:
        arm.close()
    return Result(
        cell=cell,
        loss=training.validation_loss(),
        untrained=untrained,
        steps=arm.steps,
        batches=batches,
        kept=arm.kept,
        actions={kind: count for kind, count in sorted(arm.actions.items()) if count},
        notes=arm.notes,
        checksum=checksum(training.model),
        seconds=time.perf_counter() - started,
    )


def _arm(cell: Cell, training: Training, folder: Path) -> Arm:
    if cell.arm != "guard":
        return ALONE[cell.arm](training)
    from benchmarks.recovery.train import Guarded

    return Guarded(training, folder, keep=cell.is_killed)


def _one_batch(
    training: Training, arm: Arm, fault: Fault, watcher: Watcher | None, kill_at: int | None, folder: Path
) -> bool:
    """Returns whether the weights are still finite, as far as the loss tells."""
    index, step = training.data.index, arm.steps
    batch = fault.change(training, training.data.take(), index)
    fault.before(training, index)
    loss = fault.backward(training, batch, index)
    fault.after_backward(training, index)
    if index == kill_at:
        _die(folder, batches=index + 1)
    seen = _look(training, index, step, loss.item()) if watcher is not None else None
    arm.step(loss)
    fault.after(training, index)
    training.optimizer.zero_grad()
    if watcher is not None and seen is not None:
        watcher(seen)
    return bool(torch.isfinite(loss)) or not is_broken(training.model)


def _look(training: Training, index: int, step: int, loss: float) -> Seen:
    gradients = [parameter.grad for parameter in training.model.parameters() if parameter.grad is not None]
    norm = float(nn.utils.get_total_norm(gradients))
    return Seen(index=index, step=step, loss=loss, norm=norm, lr=training.optimizer.param_groups[0]["lr"])


def _die(folder: Path, *, batches: int) -> None:
    """As a machine dies: in the middle of a step, with no time for anything."""
    with (folder / STRUCK).open("w", encoding="utf-8") as file:
        json.dump({"batches": batches}, file)
        file.flush()
        os.fsync(file.fileno())
    os.kill(os.getpid(), signal.SIGKILL)


def checksum(model: nn.Module) -> str:
    """Of all weights and buffers, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


RESULT = "result.json"


def train_killed(cell: Cell) -> Result:
    """Start the process, see it die, start it again, and take its result."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        first = _start(cell, folder)
        if first.returncode != -signal.SIGKILL or not (folder / STRUCK).exists():
            raise GradvitalsError(f"{cell.label} was to be killed, but ended with {first.returncode}: {_tail(first)}")
        second = _start(cell, folder)
        if second.returncode != 0:
            raise GradvitalsError(f"{cell.label} failed when it was started again: {_tail(second)}")
        return Result.from_json(json.loads((folder / RESULT).read_text("utf-8")))


def _start(cell: Cell, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.recovery.train", json.dumps(asdict(cell)), str(folder)]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


def _tail(done: subprocess.CompletedProcess[str]) -> str:
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def main(description: str, folder: str) -> None:
    """The process."""
    torch.set_num_threads(1)
    result = train(Cell(**json.loads(description)), Path(folder))
    (Path(folder) / RESULT).write_text(json.dumps(result.to_json()), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
