"""What comes with backward rather than after it: the gradients of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from gradvitals.config import Config
from gradvitals.measure.clock import Clock
from gradvitals.measure.microbatch import MicrobatchSums
from gradvitals.measure.packet import Packet
from gradvitals.measure.ranks.fsdp import parts_of
from gradvitals.measure.rawstep import StationStep
from gradvitals.measure.rows import Rows

Parts = Iterator[tuple[str, Callable[[], object]]]


class Collectors:
    """The collector of one optimizer's rows.

    Args:
        config: What to collect.
        reduced: Whether gradients are reduced over ranks, during backward or after it.
    """

    def __init__(self, config: Config, *, reduced: bool) -> None:
        self._config = config
        self._reduced = reduced
        self._micro: MicrobatchSums | None = None

    def assign(self, rows: list[int], watched: Rows, clock: Clock, on_error: Callable[[str, Exception], None]) -> None:
        """Collect for these rows."""
        self.stop()
        self._micro = None
        if "gsnr" not in self._config.metrics:
            return
        if ("ranks" if self._reduced else "microbatch") in self._config.sources:
            self._micro, _ = parts_of(
                watched.model,
                watched.parameters,
                watched.heads,
                rows=rows,
                arrivals=watched.arrivals,
                clock=clock,
                on_error=partial(on_error, "microbatch"),
                reduced=self._reduced,
            )

    @property
    def has_micro_batches(self) -> bool:
        """Whether the gradients of micro-batches are being collected."""
        return self._micro is not None and self._micro.armed

    def prepare(self, *, full: bool, detail: bool) -> Parts:
        """What is to be done before the backward passes of a step."""
        if self._micro is not None:
            radial = detail and "radial_gsnr" in self._config.metrics
            yield "microbatch", partial(self._micro.arm, radial=radial) if full else self._micro.disarm

    def take(self, step: StationStep, packet: Packet) -> Parts:
        """What puts that which came with backward into the packet."""
        if self._micro is not None and self._micro.armed:
            yield "microbatch", partial(self._take_micro_batches, self._micro, step, packet)

    def _take_micro_batches(self, micro: MicrobatchSums, step: StationStep, packet: Packet) -> None:
        step.micro_batches, norms = micro.finish()
        if step.micro_batches >= 2 or self._reduced:  # a single one is the gradient itself
            packet.extend(norms)

    def restart(self) -> None:
        """The batches so far were given up."""
        if self._micro is not None and self._micro.armed:
            self._micro.restart()

    def stop(self) -> None:
        """Take all hooks away."""
        if self._micro is not None:
            self._micro.disarm()
