"""News of runs for the page: one look at the files for all readers, sent as server-sent events with a cursor."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from anyio import CapacityLimiter, to_thread

from gradvitals.show.web.limits import may_pass
from gradvitals.show.web.shelf import Place, Shelf, Stamp, stamp

LOOK_SECONDS = 0.2
"""From one look at the files to the next, while anybody listens."""
SLOW_SECONDS = 2.0
"""The same for runs that have not changed lately, and for new ones."""
HEARTBEAT_SECONDS = 5.0
"""A sign of life where there is no news, by which both ends notice that the other is gone."""
MAX_READERS = 64


@dataclass
class _State:
    revision: int
    stamp: Stamp
    looked: float
    news: dict[str, Any]
    is_refused: bool = False
    """Whether it cannot be read until it is written to again."""


class Watcher:
    """Looks at the runs of a shelf while anybody listens, and tells what changed."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self._shown: Mapping[str, tuple[int, dict[str, Any]]] = {}
        self._looker: CapacityLimiter | None = None
        self._revision = 0
        self._epoch = secrets.token_hex(4)  # a cursor of another server, or of this one before a restart, means nothing
        self._readers = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stopped = False

    async def events(self, cursor: str | None) -> AsyncIterator[bytes]:
        """The stream: what changed after `cursor`, then whatever changes."""
        self._readers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._look_again_and_again())
        try:
            yield b"retry: 1000\n\n"
            seen = self._revision_of(cursor)
            said = time.monotonic()
            await self._look()
            while not self.stopped:
                for revision, news in self._after(seen):
                    yield f"id: {self._epoch}-{revision}\ndata: {json.dumps(news)}\n\n".encode()
                    seen, said = revision, time.monotonic()
                if time.monotonic() - said > HEARTBEAT_SECONDS:
                    yield b"event: beat\ndata: {}\n\n"
                    said = time.monotonic()
                changed = self._changed
                try:
                    await asyncio.wait_for(changed.wait(), 1.0)
                except TimeoutError:
                    continue
        finally:
            self._readers -= 1

    @property
    def is_full(self) -> bool:
        """Whether so many listen that a further one is sent away."""
        return self._readers >= MAX_READERS

    def is_live(self, run_id: str) -> bool:
        """Whether a run was live when last looked at."""
        shown = self._shown.get(run_id)
        return shown is not None and bool(shown[1]["live"])

    def stop(self) -> None:
        """End all streams."""
        self.stopped = True

    def _after(self, seen: int) -> list[tuple[int, dict[str, Any]]]:
        # What the last look left, which nobody changes: the loop must not wait for the look that is under way.
        fresh = [(revision, news) for revision, news in self._shown.values() if revision > seen]
        return sorted(fresh, key=lambda pair: pair[0])

    def _revision_of(self, cursor: str | None) -> int:
        epoch, _, number = (cursor or "").partition("-")
        return int(number) if epoch == self._epoch and number.isdecimal() and len(number) < 18 else 0

    async def _look_again_and_again(self) -> None:
        while self._readers and not self.stopped:
            await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        if self._looker is None:
            self._looker = CapacityLimiter(1)  # of its own: news do not wait behind requests, nor these behind news
        if await to_thread.run_sync(self._look_now, limiter=self._looker):
            self._changed.set()
            self._changed = asyncio.Event()

    def _look_now(self) -> bool:
        with self._lock:  # a reader who has just come looks at once, beside the look that is due
            changed = self._look_at_all(time.monotonic())
            if changed:
                self._shown = {run: (state.revision, state.news) for run, state in self._states.items()}
            return changed

    def _look_at_all(self, now: float) -> bool:
        places = self._shelf.places(most_age=SLOW_SECONDS)
        changed = False
        for place in places:
            state = self._states.get(place.id)
            quick = state is not None and state.news["live"]
            if state is not None and now - state.looked < (0.0 if quick else SLOW_SECONDS):
                continue
            fresh = stamp(place.file)
            # A file whose content is refused is left alone until it changes: that may have taken long.
            if state is not None and fresh == state.stamp and state.is_refused:
                continue
            changed |= self._take_in(place, fresh, now)
        for gone in self._states.keys() - {place.id for place in places}:
            if not self._states[gone].news.get("gone"):
                self._revision += 1
                news = {"run": gone, "gone": True, "live": False, "last_step": None, "findings": 0, "segments": 0}
                self._states[gone] = _State(self._revision, (), now, news)
                changed = True
        return changed

    def _take_in(self, place: Place, fresh: Stamp, now: float) -> bool:
        state = self._states.get(place.id)
        is_refused = False
        try:
            news = self._news(place)
        except Exception as error:  # whatever is wrong with one file, the others still have news; the list says what
            news = {"run": place.id, "last_step": None, "findings": 0, "segments": 0, "live": False}
            is_refused = not may_pass(error)
        if state is not None and state.news == news:
            state.stamp, state.looked, state.is_refused = fresh, now, is_refused
            return False
        self._revision += 1
        self._states[place.id] = _State(self._revision, fresh, now, news, is_refused)
        return True

    def _news(self, place: Place) -> dict[str, Any]:
        """What there is to tell of a run."""
        with self._shelf.opened(place.id) as run, run.moment():
            census = run.census()
            records = census["findings"] + census["actions"]
            return {
                "run": place.id,
                "last_step": run.last_step,
                "findings": records,
                "segments": census["segments"],
                "live": run.is_live,
            }
