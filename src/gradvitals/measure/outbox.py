"""Where finished steps wait until they are sent to the host, the fast ones several at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gradvitals.measure.packet import ship
from gradvitals.measure.rawstep import RawStep

SHIP_SECONDS = 0.1
"""Fast steps are sent together, as many as fit into this time."""


class Outbox:
    """Sends the sums of finished steps to the host in one copy and hands the steps on."""

    def __init__(self, deliver: Callable[[list[RawStep]], None], every: int | None = None) -> None:
        self._deliver = deliver
        self.every = every
        """Send at steps that are a multiple of this, whatever the time; None goes by the time.

        Ranks add up what they send, so all must send the same steps: when is for the step's number alone to say.
        """
        self._waiting: list[RawStep] = []
        self._lock = threading.Lock()  # when another rank has stopped, what is left is sent from another thread
        self._sent_at = 0.0

    def add(self, raw: RawStep) -> None:
        """Take a finished step; a full reading, or one long after the last, leaves at once."""
        with self._lock:
            self._waiting.append(raw)
        late = time.time() - self._sent_at >= SHIP_SECONDS if self.every is None else raw.step % self.every == 0
        if raw.full or late:
            self.send()

    def hurry(self) -> None:
        """Send what is waiting, unless other ranks would have to do the same."""
        if self.every is None:
            self.send()

    def send(self) -> None:
        """Send what is waiting."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        self._sent_at = time.time()
        for raw, shipment in zip(waiting, ship([raw.packet for raw in waiting]), strict=True):
            raw.shipment = shipment
        if waiting:
            self._deliver(waiting)


class Job:
    """Some steps on their way to the host: called on another thread, once they are there."""

    def __init__(
        self,
        steps: Sequence[RawStep],
        complete: Callable[[Sequence[RawStep]], Iterable[Any]],
        *,
        may_wait: bool = False,
    ) -> None:
        self._steps = steps
        self._complete = complete
        self.may_wait = may_wait
        """Whether completing them may take long: for other ranks to bring theirs."""

    def ready(self) -> bool:
        """Whether the device has sent everything."""
        return all(raw.shipment.ready() for raw in self._steps)

    def __call__(self) -> Iterable[Any]:
        """What the steps have become."""
        return self._complete(self._steps)
