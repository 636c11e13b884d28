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
from typing import Any

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


class LastWord:
    """A place in the store of torch.distributed where one word can be left. Nothing of it raises.

    Args:
        topology: Who takes part.
        on_word: For the rank that keeps the run: called once, on a thread of its own, with what another rank has said.
            When it returns, that rank goes. None on all other ranks.
    """

    def __init__(self, topology: Topology, on_word: Callable[[Finding], None] | None) -> None:
        self.was_kept = False
        """Whether a word of this rank has been kept by the first one."""
        self._store = _store_of(topology)
        self._over = threading.Event()
        if self._store is not None and on_word is not None:
            # What the thread holds must not hold the Monitor: it ends when that is dropped.
            held = (self._store, on_word, self._over)
            threading.Thread(target=_listen, args=held, name="gradvitals-ranks", daemon=True).start()

    def tell(self, finding: Finding) -> None:
        """Leave a word, and wait until it is kept; in vain where the first rank is gone, or has ended by itself."""
        store = self._store
        if store is None:
            return
        try:
            store.set("word", json.dumps(finding.to_json()))
            deadline = time.monotonic() + WAIT_SECONDS
            while time.monotonic() < deadline and not self.was_kept:
                time.sleep(0.02)
                self.was_kept = bool(store.check(["kept"]))
        except Exception:  # the store has died with its rank
            self._store = None

    def end(self, *, leads: bool) -> None:
        """Listen no more; whoever still waits for the first rank need not."""
        self._over.set()
        store, self._store = self._store, None
        if store is not None and leads:
            _note(store, "kept")


def is_still(step: Callable[[], int]) -> bool:
    """Wait until training stands, as it does where it waits for a rank that has stopped; False where it does not."""
    before = -1
    for _ in range(LOOKS):
        if before == (before := step()):
            return True
        time.sleep(LISTEN_SECONDS / 2)
    return False


def _listen(store: Any, on_word: Callable[[Finding], None], over: threading.Event) -> None:
    try:
        while not over.wait(LISTEN_SECONDS):
            if store.check(["word"]):
                on_word(Finding.from_json(json.loads(store.get("word"))))
                _note(store, "kept")
                return
    except Exception:  # without a store there is nobody to listen to
        return


def _note(store: Any, key: str) -> None:
    try:
        store.set(key, "1")
    except Exception:
        return


def _store_of(topology: Topology) -> Any:
    from torch.distributed import distributed_c10d as c10d

    try:
        name = str(topology.group.group_name)
        _said[name] += 1
        # Ranks that were started again may meet in the store of those before them.
        place = f"gradvitals/last_word/{name}/{_said[name]}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return c10d.PrefixStore(place, c10d._get_default_store())
    except Exception:
        return None


class Shutdown:
    """The end of a run on this rank, which may be the only one.

    Args:
        topology: The ranks; None for a single process.
        leads: Whether this rank keeps the run.
        reducer: Adds up the numbers of all ranks; None for a single process.
        keep: On the rank that keeps the run: keeps why another one stopped, with all steps up to there.
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
        self._exchange = reducer
        self._last_word: LastWord | None = None
        if topology is not None:
            self._last_word = LastWord(topology, keep if leads else None)

    def on_error(self, error: BaseException) -> None:
        """Training has ended with an error here: other ranks may be at another step, or gone."""
        if self._exchange is not None:
            self._exchange.explain(error)
            self._exchange.end()

    def tell(self, error: BaseException, finding: Finding) -> None:
        """Tell the rank that keeps the run, and wait until it has, since it is ended soon after this one."""
        if self._last_word is not None and not self._leads and not speaks_of_loss(error):
            self._last_word.tell(finding)

    def end(self) -> None:
        """Everything is written."""
        if self._last_word is not None:
            self._last_word.end(leads=self._leads)

    @property
    def speaks(self) -> bool:
        """Whether this rank says how the run has ended: the first to stop, or the one that keeps the run."""
        if self._last_word is not None and self._last_word.was_kept:
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
