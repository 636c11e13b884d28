"""One cell: the training loop, with its accidents and with whoever looks after it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from gradvitals.lab.recovery.arms import Arm, FixedClip, OlmoSkip, Plain, ZClipped, is_broken
from gradvitals.lab.recovery.cell import KILLED, ArmName, Cell, Result
from gradvitals.lab.recovery.faults import Fault, plant
from gradvitals.lab.recovery.tasks import Training, prepare

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
    from gradvitals.lab.recovery.guarded import Guarded

    return Guarded(training, folder, keep=cell.is_killed)


def _one_batch(
    training: Training, arm: Arm, fault: Fault, watcher: Watcher | None, kill_at: int | None, folder: Path
) -> bool:
    """Returns whether the weights are still finite, as far as the loss tells."""
    index, step = training.data.index, arm.steps
    batch = fault.change(training, training.data.take(), index)
    fault.before(training, index)
    loss = training.model(*batch)
    (loss * fault.loss_factor(index)).backward()
    fault.after_backward(training, index)
    if index == kill_at:
        _die(folder, batches=index + 1)
    seen = _look(training, index, step, loss.item()) if watcher is not None else None
    arm.step(loss.detach())
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
