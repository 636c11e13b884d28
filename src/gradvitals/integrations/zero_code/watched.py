"""One model of the script with its Monitor: which backward passes are its own, and what its loss is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradvitals.integrations.backward import Ear, observe_part
from gradvitals.integrations.zero_code.discovery import Found
from gradvitals.integrations.zero_code.samples import SampleCount
from gradvitals.monitor import Monitor
from gradvitals.report.verdict import relative

ANNOUNCE_SECONDS = 5.0
"""How long to wait for the batch size before printing what is watched."""


class Watched:
    """A model that is being watched.

    Args:
        found: The model and its optimizers.
        watch: Begins to watch them, in a folder where a run is to be continued.
        resume: That folder, where this model, or the same with other optimizers, was watched before.
        thread: The one that is taken to train it, until another does.
        announce: Prints what is watched.
    """

    def __init__(
        self,
        found: Found,
        watch: Callable[[Found, Path | None], Monitor],
        resume: Path | None,
        thread: threading.Thread,
        announce: Callable[[str], None] | None,
    ) -> None:
        self.found = found
        self.monitor = watch(found, resume)
        self.parameters = list(self.monitor.recorder.table.parameters)
        self.thread = thread
        """The one that trains it. Backward changes gradients without Python's lock: no other may look at them."""
        self.idle = 0
        """Backward passes since the last one that has reached it, of its own thread, or of any once that is gone."""
        self._announce = announce
        self._announce_by = time.monotonic() + ANNOUNCE_SECONDS
        self._samples = SampleCount(found.model, self._on_samples)
        self._late = _reduces_by_hand(found.model, self.parameters)
        self._losses: list[Tensor] = []
        self._before: list[Any] = []

    @property
    def run_path(self) -> Path:
        """Where its run is kept."""
        return self.monitor.run_path

    def before_backward(self, *, alone: bool) -> None:
        """A backward pass begins; where there are other models, it may be theirs."""
        self._samples.in_backward = True
        self._before = [] if alone else _versions(self.parameters)

    def after_backward(self, loss: Tensor | None, *, alone: bool) -> bool:
        """It is over. Returns whether it was this model's."""
        self._samples.in_backward = False
        if not alone and _versions(self.parameters) == self._before:
            return False
        if not self._late and self.monitor.recorder.observes == 0:
            self._samples.forget()  # the passes so far were given up, as those of a generator through this model
        self._samples.after_backward()
        if self._late:
            self._losses += [loss] if loss is not None else []
        else:
            observe_part(self.monitor, loss)
        return True

    def before_step(self) -> None:
        """One of its optimizers is about to step."""
        self.idle = 0
        for loss in self._losses:
            observe_part(self.monitor, loss)
        self._losses = []

    def move(self, thread: threading.Thread, losses: Sequence[Tensor]) -> None:
        """A step shows that another thread trains it, which has gone backward with these losses since the last."""
        self.thread = thread
        for loss in losses:
            observe_part(self.monitor, loss)

    def after_step(self) -> None:
        """One of its optimizers has stepped."""
        self._samples.after_step()
        if not self._samples.is_counting or time.monotonic() > self._announce_by:
            self._print_start()

    def catch_up(self, losses: Sequence[Tensor], heard: Ear) -> None:
        """Take in what has happened in its first step before it was found."""
        recorder = self.monitor.recorder
        recorder.assumed_scaler = heard.scaler
        devices = {parameter.device.type for parameter in self.parameters}
        recorder.autocast = next((kind for device, kind in heard.autocast.items() if device in devices), None)
        if heard.clipped:
            for state in recorder.optimizers:
                state.clipped = state.step.clipped = True
        for loss in losses:
            observe_part(self.monitor, loss)

    def close(self, error: BaseException | None = None) -> None:
        """Watch it no more."""
        self._samples.stop()
        if self.monitor.step:
            self._print_start()
        self.monitor.close(error)

    def _print_start(self) -> None:
        """Print one line that says what is watched. It waits for the batch size, which takes a few steps."""
        if self._announce is None:
            return
        announce, self._announce = self._announce, None
        optimizers = " and ".join(dict.fromkeys(type(optimizer).__name__ for optimizer in self.found.optimizers))
        samples = self.monitor.recorder.batch_size
        batch = "" if samples is None else f", {samples:g} samples per step"
        announce(f"watching {self.found.name} with {optimizers}{batch}; the run is in {relative(self.run_path)}")

    def _on_samples(self, samples: float) -> None:
        self.monitor.recorder.batch_size = samples


def _versions(parameters: Sequence[nn.Parameter]) -> list[Any]:
    """What every gradient is, and how often it was written to."""
    return [(id(grad), grad._version) if (grad := parameter.grad) is not None else None for parameter in parameters]


def _reduces_by_hand(model: nn.Module, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether gradients, after a backward pass, are still those of this rank alone."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return False
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return False
    return not any(hasattr(parameter, "placements") for parameter in parameters)  # DTensors reduce in backward
