"""PlainStep: the step in progress as long as it goes like most steps of a run, which have no objects of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradvitals.collect import reductions
from gradvitals.collect.transfer import DeviceRing, HostRing


class PlainStep:
    """The step in progress, as long as it goes as plain steps do. What does not is for `StepRecorder` to read.

    Every method that returns False leaves the step as it was: the recorder then takes over what was kept so far.
    """

    def __init__(self) -> None:
        self.ring: HostRing | DeviceRing | None = None
        self.active = False
        """Whether the step has been plain so far."""

    def begin(self, ring: HostRing | DeviceRing, reads_norm: bool) -> None:
        """Start a step.

        Args:
            ring: Where its numbers go.
            reads_norm: Whether norms are read if the loop does not compute them itself.
        """
        self.active, self.ring, self.reads_norm = True, ring, reads_norm
        self.loss: object = None
        self.observes = 0
        self.passes = 0
        """Backward passes before the last observation."""
        self.read_at = -1
        """After how many backward passes the gradients were looked at."""
        self.has_norms = self.paid = self.clipped = False
        self.max_norm: float | None = None

    def observe(self, loss: Tensor | float | None, passes: int, adds_up: bool) -> bool:
        """Keep the loss of a step; several are kept only if the step's loss is their sum."""
        assert self.ring is not None
        if loss is None or passes == 0 or (self.observes and not adds_up):
            return False
        kept = self.ring.note_loss(loss, self.loss)
        if kept is None:
            return False
        self.loss, self.passes = kept, passes
        self.observes += 1
        return True

    def take_norms(self, norms: Tensor, passes: int) -> bool:
        """Keep the norms that the loop computed."""
        assert self.ring is not None
        if norms.dtype != torch.float32 or not self.ring.note_norms(norms):
            return False
        self.read_at, self.has_norms = passes, True
        return True

    @torch.no_grad()
    def read_norms(self, parameters: Sequence[Tensor], passes: int) -> bool:
        """Read the norms of gradients as they are now, if that is due."""
        if not self.reads_norm:
            self.read_at = passes
            return True
        grads = [grad for parameter in parameters if (grad := parameter.grad) is not None]
        if len(grads) != len(parameters) or not self.take_norms(torch.stack(list(reductions.norms(grads))), passes):
            return False
        self.paid = True
        return True
