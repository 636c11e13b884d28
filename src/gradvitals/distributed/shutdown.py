"""Ends a run on several ranks: one of them reports the error that ended training."""

from __future__ import annotations

import atexit
import collections
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch.distributed import distributed_c10d as c10d

from gradvitals.distributed.allreduce import RankReducer, speaks_of_loss
from gradvitals.distributed.topology import Topology
from gradvitals.types import Finding

LISTEN_SECONDS = 0.5
"""Interval at which the first rank checks whether another one reported an error."""
LOOKS = 6
"""How often `is_still` checks, at twice that rate, whether training makes steps."""
WAIT_SECONDS = 5.0
"""Longest time a rank that stops waits until the first rank has stored its error."""

_said: collections.Counter[str] = collections.Counter()


class Shutdown:
    """Ends a run on this rank, which may be the only one.

    A rank that stops with an error writes it to the store of torch.distributed, where the rank that writes the run
    looks for it. None of this raises: the store may have died with its rank.

    Args:
        topology: The ranks; None for a single process.
        leads: Whether this rank writes the run.
        reducer: Adds up the numbers of all ranks; None for a single process.
        keep: On the rank that writes the run: stores why another one stopped, and all steps until then. Called once on
            a thread of its own; when it returns, the other rank exits.
    """

    def __init__(
        self,
        topology: Topology | None,
        leads: bool,
        reducer: RankReducer | None,
        keep: Callable[[Finding], None],
    ) -> None:
        self.stopped_elsewhere = False
        """Whether another rank stopped first, so that an error of this one is only a consequence."""
        self._leads = leads
        self._reducer = reducer
        self._was_kept = False
        """Whether the first rank stored the error of this one."""
        self._store = None if topology is None else _store_of(topology)
        self._over = threading.Event()
        if self._store is not None and leads:
            # The thread must not hold the Monitor, so that it ends when that is dropped.
            held = (self._store, keep, self._over)
            threading.Thread(target=_listen, args=held, name="gradvitals-ranks", daemon=True).start()

    def on_error(self, error: BaseException) -> None:
        """Training ended with an error on this rank: other ranks may be at another step, or gone."""
        if self._reducer is not None:
            self._reducer.explain(error)
            self._reducer.end()

    def tell(self, error: BaseException, finding: Finding) -> None:
        """Report the error to the rank that writes the run, and wait until it is stored."""
        if self._store is None or self._leads or speaks_of_loss(error):
            return
        try:
            self._store.set("word", json.dumps(finding.to_json()))
            deadline = time.monotonic() + WAIT_SECONDS
            while time.monotonic() < deadline and not self._was_kept:
                time.sleep(0.02)
                self._was_kept = bool(self._store.check(["kept"]))
        except Exception:
            self._store = None

    def end(self) -> None:
        """Everything is written: stop listening, and release a rank that still waits."""
        self._over.set()
        store, self._store = self._store, None
        if store is not None and self._leads:
            with suppress(Exception):
                store.set("kept", "1")

    @property
    def speaks(self) -> bool:
        """Whether this rank reports how the run ended: the first to stop, or the one that writes the run."""
        return self._was_kept or (self._leads and not self.stopped_elsewhere)


def is_still(step: Callable[[], int]) -> bool:
    """Wait until training stalls because a rank has stopped; returns False if it keeps making steps."""
    before = -1
    for _ in range(LOOKS):
        if before == (before := step()):
            return True
        time.sleep(LISTEN_SECONDS / 2)
    return False


def _listen(store: Any, keep: Callable[[Finding], None], over: threading.Event) -> None:
    with suppress(Exception):  # the store may be gone
        while not over.wait(LISTEN_SECONDS):
            if store.check(["word"]):
                keep(Finding.from_json(json.loads(store.get("word"))))
                store.set("kept", "1")
                return


def _store_of(topology: Topology) -> Any:
    with suppress(Exception):
        name = str(topology.group.group_name)
        _said[name] += 1
        # Restarted ranks may share the store with those before them.
        place = f"gradvitals/last_word/{name}/{_said[name]}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return c10d.PrefixStore(place, c10d._get_default_store())
    return None


def close_at_exit(close: Callable[[BaseException | None], None]) -> None:
    """Call a method when the program exits, with the exception that ended it.

    Holds it weakly, so that a Monitor that is dropped, and its model, can be freed.
    """
    reference = weakref.WeakMethod(close)

    def at_exit() -> None:
        method = reference()
        if method is not None:
            # Set if an uncaught exception ended the program; at a prompt it may be any earlier one.
            method(None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))

    atexit.register(at_exit)
