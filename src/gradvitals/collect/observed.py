"""Keeps what the loop observes in a step: losses, batch sizes, and which of these batches it discarded."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from gradvitals.collect.reductions import norm_of_all
from gradvitals.collect.transfer import Known, ReadingBuffer
from gradvitals.distributed.shards import local, placements
from gradvitals.errors import NoStepError, ObserveError
from gradvitals.worker.record import StepRecord


def check_observed(loss: Any, batch_size: Any) -> None:
    """Raise an `ObserveError` that says what `observe` was given instead of numbers, and what to do."""
    if batch_size is None and (loss is None or (type(loss) is Tensor and loss.dim() == 0)):
        return
    if not (loss is None or isinstance(loss, (Tensor, Real)) or hasattr(loss, "__float__")):
        inside = " as out.loss, if that is what it holds" if hasattr(loss, "loss") else ""
        raise ObserveError(
            f"observe got a {type(loss).__name__} as loss; expected a tensor or a number: pass the loss itself{inside}"
        )
    if isinstance(loss, Tensor) and not loss.numel():
        raise ObserveError("observe got a tensor without elements as loss; expected one number or the mean of several")
    spread = placements(loss) if isinstance(loss, Tensor) else ()
    if any(type(placement).__name__ != "Replicate" for placement in spread):
        raise ObserveError(
            f"observe got a DTensor as loss that lies on the ranks as {spread}; expected one that all of them know: "
            "pass loss.full_tensor()"
        )
    if batch_size is not None and not (isinstance(batch_size, Real) and float(batch_size) > 0):
        given = repr(batch_size) if isinstance(batch_size, Real) else f"a {type(batch_size).__name__}"
        raise ObserveError(
            f"observe got {given} as batch_size; expected the number of samples behind the loss: pass len(inputs)"
        )


def _number(loss: float) -> float:
    try:
        return float(loss)
    except (TypeError, ValueError) as error:
        kind = type(loss).__name__
        raise ObserveError(f"observe got a {kind} as loss that is not one number ({error}): pass its mean") from None


MOST_WITHOUT_A_PASS = 100
"""Losses to keep before the first backward pass of a step."""

NO_STEP_FOR = 50
"""Report that the loop makes no more steps after this many discarded batches in a row."""

NO_STEP_AT_THE_END = 5
"""The same at the end of the run."""


@dataclass(slots=True, eq=False)  # comparing losses would synchronize
class Observation:
    """One call of `observe`."""

    loss: Tensor | float | None
    size: float | None
    """Samples behind it."""
    passes: int
    """Backward passes of the step before it."""

    @property
    def is_broken(self) -> bool:
        """Whether the loss is known to be non-finite; a loss on a device is not known yet."""
        return isinstance(self.loss, float) and not math.isfinite(self.loss)


@dataclass(slots=True)
class Observed:
    """Everything that was observed in one step."""

    calls: list[Observation] = field(default_factory=list)
    adds_up: bool = False
    """Whether the step's loss is the sum of the observed ones instead of their mean."""
    passes: int = 0
    """Backward passes of the step."""
    given_up: int = 0
    """Batches whose gradients were discarded before this step."""
    lost: Tensor | float | None = None
    """The last loss observed for them; not finite if one of them was not."""
    lost_norm: Tensor | float | None = None
    """The same for the norm of their gradient, if it was read."""
    _reported_no_step: bool = False

    @property
    def losses(self) -> list[Tensor | float]:
        """The losses of batches that are in the step."""
        return [each.loss for each in self.calls if each.loss is not None]

    @property
    def without_a_step(self) -> int:
        """Batches known to be discarded since the last step."""
        return self.given_up + sum(each.passes == 0 and each.is_broken for each in self.calls)

    @property
    def batch_size(self) -> float | None:
        """Samples of all observed batches together; None if no call reported any."""
        sizes = [each.size for each in self.calls if each.size is not None]
        return float(sum(sizes)) if sizes else None

    def note(self, loss: Tensor | float | None, batch_size: float | None, passes: int) -> None:
        """Keep a loss and its batch size, observed after `passes` backward passes.

        Raises:
            ObserveError: If these are not numbers; nothing is kept.
            NoStepError: If many batches in a row were discarded.
        """
        check_observed(loss, batch_size)
        if isinstance(loss, Tensor):
            loss = loss if type(loss) is Tensor else local(loss)
            # On the host, reading it takes no synchronization.
            at_hand = type(loss) is Tensor and loss.is_cpu and loss.is_floating_point()
            at_hand = at_hand and not torch.compiler.is_compiling()
            if loss.dim():
                loss = loss.detach().float().mean()
            loss = loss.item() if at_hand else loss.detach().clone()
        elif loss is not None:
            loss = _number(loss)
        if self.adds_up and self.calls and loss is not None:
            first = self.calls.pop()
            loss = loss if first.loss is None else first.loss + _beside(first.loss, loss)
        size = None if batch_size is None else float(batch_size)
        self.calls.append(Observation(loss, size, passes))
        if len(self.calls) > MOST_WITHOUT_A_PASS and passes == 0:
            first = self.calls.pop(0)
            self._lose(first, batches=first.is_broken)  # a finite loss may not be of a training batch
        if passes == 0 or self.given_up:  # otherwise every call is of a batch in the step
            self._check(NO_STEP_FOR)

    def give_up(self, passes: float, counts: bool) -> int:
        """The next pass showed that the gradients of `passes` backward passes were discarded.

        Args:
            passes: Their number. Observations of them are not part of the step.
            counts: Whether this was a skipped batch, as far as can be known.

        Returns:
            The number of remaining observations.
        """
        # A loop that observes before its backward pass has observed the next batch already.
        before = bool(self.calls) and self.calls[0].passes == 0
        calls, self.calls = self.calls, []
        self.given_up += counts
        for each in calls:
            if before and each.passes >= passes:
                self.calls.append(Observation(each.loss, each.size, 0))
            elif counts:
                self._lose(each, batches=0)
        return len(self.calls)

    def lose_norms(self, known: Known) -> None:
        """Keep the norm of gradients that were discarded, if it is known."""
        norm = norm_of_all(known)
        if norm is not None:
            self.lost_norm = _with(norm.item() if norm.is_cpu else norm, self.lost_norm)

    def _check(self, most: int) -> None:
        if self._reported_no_step or self.without_a_step < most:
            return
        # Gradients may be discarded for other reasons than skipping a batch, such as a trial pass.
        if self.is_broken or any(each.is_broken for each in self.calls):
            self._reported_no_step = True
            raise NoStepError(self.without_a_step)

    @property
    def is_broken(self) -> bool:
        """Whether the loss of a discarded batch, or its gradient, is known not to be finite."""
        known = (number for number in (self.lost, self.lost_norm) if isinstance(number, float))
        return not all(map(math.isfinite, known))

    def check_end(self) -> None:
        """At the end of the run, raise a `NoStepError` if it made no more steps and that was not reported yet."""
        self.lost = None if self.lost is None else float(self.lost)  # training has ended: it is fine to synchronize
        self.lost_norm = None if self.lost_norm is None else float(self.lost_norm)
        self._check(NO_STEP_AT_THE_END)

    def _lose(self, one: Observation, batches: int = 1) -> None:
        """This observation is of a batch that is not part of any step."""
        self.given_up += batches
        if one.loss is not None:
            self.lost = _with(one.loss, self.lost)

    def write(self, record: StepRecord, buffer: ReadingBuffer) -> None:
        """Write everything into the record of the step; numbers on a device go into the buffer."""
        for index, each in enumerate(self.calls):
            loss = each.loss
            if isinstance(loss, Tensor):
                buffer.add(f"loss{index}", loss)
                loss = None
            record.losses.append((loss, each.size))
        record.passes, record.given_up = self.passes, self.given_up
        if self.given_up:
            for name in ("lost", "lost_norm"):
                number = getattr(self, name)
                if isinstance(number, Tensor):
                    buffer.add(name, number)
                elif number is not None:
                    setattr(record, name, number)


def _with(last: Tensor | float, before: Tensor | float | None) -> Tensor | float:
    """Returns the last number, or a non-finite one if an earlier one was non-finite."""
    return last if before is None else last + 0 * _beside(last, before)


def _beside(first: Tensor | float, loss: Tensor | float) -> Tensor | float:
    return loss.to(first.device) if isinstance(first, Tensor) and isinstance(loss, Tensor) else loss
