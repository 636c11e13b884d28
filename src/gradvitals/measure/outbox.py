"""Where finished steps wait until they are sent to the host, the fast ones several at a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from gradvitals.measure.packet import ship
from gradvitals.measure.rawstep import RawStep

SHIP_SECONDS = 0.1
"""Fast steps are sent together, as many as fit into this time."""


class Outbox:
    """Sends the sums of finished steps to the host in one copy and hands the steps on."""

    def __init__(self, deliver: Callable[[list[RawStep]], None]) -> None:
        self._deliver = deliver
        self._waiting: list[RawStep] = []
        self._sent_at = 0.0

    def add(self, raw: RawStep) -> None:
        """Take a finished step; a full reading, or one long after the last, leaves at once."""
        self._waiting.append(raw)
        if raw.full or time.time() - self._sent_at >= SHIP_SECONDS:
            self.send()

    def send(self) -> None:
        """Send what is waiting."""
        waiting, self._waiting = self._waiting, []
        self._sent_at = time.time()
        for raw, shipment in zip(waiting, ship([raw.packet for raw in waiting]), strict=True):
            raw.shipment = shipment
        if waiting:
            self._deliver(waiting)
