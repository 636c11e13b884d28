"""How the ranks of a run stop: who reports the error that ended training."""

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
"""How often the first rank looks whether another has left a word."""
LOOKS = 6
"""How often it looks, twice as fast, whether its own training stands."""
WAIT_SECONDS = 5.0
"""How long a rank that stops waits for the first one to keep it."""

_said: collections.Counter[str] = collections.Counter()


class Shutdown:
    """The end of a run on this rank, which may be the only one.

    A rank that stops with an error leaves its reason in the store of torch.distributed, where the rank that keeps the
    run looks for it. None of this raises: the store may have died with its rank.

    Args:
        topology: The ranks; None for a single process.
        leads: Whether this rank keeps the run.
        reducer: Adds up the numbers of all ranks; None for a single process.
        keep: On the rank that keeps the run: keeps why another one stopped, with all steps up to there. Called once, on
            a thread of its own; when it returns, the other rank goes.
    """

    def __init__(
        self,
        topology: Topology | None,
        leads: bool,
        reducer: RankReducer | None,
        keep: Callable[[Finding], None],
    ) -> None:
        self.stopped_elsewhere = False
        """Whether another rank was the first to stop; an error of this one only follows from that."""
        self._leads = leads
        self._reducer = reducer
        self._was_kept = False
        """Whether the reason of this rank was kept by the first one."""
        self._store = None if topology is None else _store_of(topology)
        self._over = threading.Event()
        if self._store is not None and leads:
            # What the thread holds must not hold the Monitor: it ends when that is dropped.
            held = (self._store, keep, self._over)
            threading.Thread(target=_listen, args=held, name="gradvitals-ranks", daemon=True).start()

    def on_error(self, error: BaseException) -> None:
        """Training has ended with an error here: other ranks may be at another step, or gone."""
        if self._reducer is not None:
            self._reducer.explain(error)
            self._reducer.end()

    def tell(self, error: BaseException, finding: Finding) -> None:
        """Tell the rank that keeps the run, and wait until it has, since it is ended soon after this one."""
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
        """Everything is written: listen no more. A rank that still waits for the first one need not."""
        self._over.set()
        store, self._store = self._store, None
        if store is not None and self._leads:
            with suppress(Exception):
                store.set("kept", "1")

    @property
    def speaks(self) -> bool:
        """Whether this rank says how the run has ended: the first to stop, or the one that keeps the run."""
        return self._was_kept or (self._leads and not self.stopped_elsewhere)


def is_still(step: Callable[[], int]) -> bool:
    """Wait until training stands, as it does where it waits for a rank that has stopped; False where it does not."""
    before = -1
    for _ in range(LOOKS):
        if before == (before := step()):
            return True
        time.sleep(LISTEN_SECONDS / 2)
    return False


def _listen(store: Any, keep: Callable[[Finding], None], over: threading.Event) -> None:
    with suppress(Exception):  # without a store there is nobody to listen to
        while not over.wait(LISTEN_SECONDS):
            if store.check(["word"]):
                keep(Finding.from_json(json.loads(store.get("word"))))
                store.set("kept", "1")
                return


def _store_of(topology: Topology) -> Any:
    with suppress(Exception):
        name = str(topology.group.group_name)
        _said[name] += 1
        # Ranks that were started again may meet in the store of those before them.
        place = f"gradvitals/last_word/{name}/{_said[name]}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return c10d.PrefixStore(place, c10d._get_default_store())
    return None


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
