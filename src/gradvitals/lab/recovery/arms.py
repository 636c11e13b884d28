"""Who looks after a run: nobody, a fixed clip, or what OLMo-core and ZClip do. The Guard is in `guarded`."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch
from torch import Tensor, nn

from gradvitals.diagnose.presets import Olmo, ZClip
from gradvitals.lab.recovery.tasks import Training

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
