"""How the ranks of a run part when training ends: who has stopped, who keeps why, and who says the last word."""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable

from gradvitals.beginning import Beginning
from gradvitals.measure.ranks.exchange import Exchange, speaks_of_loss
from gradvitals.measure.ranks.farewell import Farewell
from gradvitals.types import Finding


class Parting:
    """The end of a run on this rank, which may be the only one.

    Args:
        start: How the run has begun.
        exchange: Where the ranks' numbers become one; None for a single process.
        keep: On the rank that keeps the run: keeps why another one has stopped, with all steps up to there.
    """

    def __init__(self, start: Beginning, exchange: Exchange | None, keep: Callable[[Finding], None]) -> None:
        self.stopped_elsewhere = False
        """Whether another rank was the first to stop; an error of this one only follows from that."""
        self._leads = start.leads
        self._exchange = exchange
        self._farewell: Farewell | None = None
        if start.roster is not None:
            self._farewell = Farewell(start.roster, keep if start.leads else None)

    def on_error(self, error: BaseException) -> None:
        """Training has ended with an error here: other ranks may be at another step, or gone."""
        if self._exchange is not None:
            self._exchange.explain(error)
            self._exchange.end()

    def tell(self, error: BaseException, finding: Finding) -> None:
        """Tell the rank that keeps the run, and wait until it has, since it is ended soon after this one."""
        if self._farewell is not None and not self._leads and not speaks_of_loss(error):
            self._farewell.tell(finding)

    def end(self) -> None:
        """Everything is written."""
        if self._farewell is not None:
            self._farewell.end(leads=self._leads)

    @property
    def speaks(self) -> bool:
        """Whether this rank says how the run has ended: the first to stop, or the one that keeps the run."""
        if self._farewell is not None and self._farewell.was_kept:
            return True
        return self._leads and not self.stopped_elsewhere


def close_at_exit(close: Callable[[BaseException | None], None]) -> None:
    """Have a method called when the program ends, when the last steps are still on their way, with what ended it.

    By a weak reference, so that a Monitor that is dropped can go, and its model with it.
    """
    reference = weakref.WeakMethod(close)

    def at_exit() -> None:
        method = reference()
        if method is not None:
            # Set where an exception nobody caught has ended the program; at a prompt it may be any earlier one.
            method(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))

    atexit.register(at_exit)
