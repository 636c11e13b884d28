"""The last word of a rank that stops with an error, to the one that keeps the run.

Whoever started the ranks ends all others when one of them is gone. So the rank that stops waits a little before it
goes, until the first one has kept what it was told and the steps up to there.
"""

from __future__ import annotations

import collections
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from gradvitals.measure.ranks.roster import Roster
from gradvitals.types import Finding

LISTEN_SECONDS = 0.5
"""How often the first rank looks whether another has left a word."""
LOOKS = 6
"""How often it looks, twice as fast, whether its own training stands."""
WAIT_SECONDS = 5.0
"""How long a rank that stops waits for the first one to keep it."""

_said: collections.Counter[str] = collections.Counter()


class Farewell:
    """A place in the store of torch.distributed where one word can be left. Nothing of it raises.

    Args:
        roster: Who takes part.
        on_word: For the rank that keeps the run: called once, on a thread of its own, with what another rank has said.
            When it returns, that rank goes. None on all other ranks.
    """

    def __init__(self, roster: Roster, on_word: Callable[[Finding], None] | None) -> None:
        self.was_kept = False
        """Whether a word of this rank has been kept by the first one."""
        self._store = _store_of(roster)
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


def _store_of(roster: Roster) -> Any:
    from torch.distributed import distributed_c10d as c10d

    try:
        name = str(roster.group.group_name)
        _said[name] += 1
        # Ranks that were started again may meet in the store of those before them.
        place = f"gradvitals/farewell/{name}/{_said[name]}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return c10d.PrefixStore(place, c10d._get_default_store())
    except Exception:
        return None
