"""Changes of runs for the page: one look at the files for all readers, sent as server-sent events with a cursor."""

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

from gradvitals.report.listing import RunFile
from gradvitals.web.run_index import RunIndex

LOOK_SECONDS = 0.2
"""Between two looks at live runs, while anybody listens."""
SLOW_SECONDS = 2.0
"""Between two looks at other runs, and for new ones."""
HEARTBEAT_SECONDS = 5.0
"""Between two events if there is no news, by which both ends notice that the other is gone."""
MAX_READERS = 64

News = dict[str, Any]


@dataclass
class _State:
    revision: int
    looked: float
    news: News


class Watcher:
    """Looks at the runs while anybody listens, and streams what changed."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._states: dict[str, _State] = {}
        self._published: Mapping[str, tuple[int, News]] = {}
        self._limiter: CapacityLimiter | None = None
        self._revision = 0
        self._epoch = secrets.token_hex(4)  # a cursor from before a restart of the server means nothing
        self._readers = 0
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.stopped = False

    async def events(self, cursor: str | None) -> AsyncIterator[bytes]:
        """Yields what changed after `cursor`, then whatever changes."""
        self._readers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_looking())
        try:
            yield b"retry: 1000\n\n"
            seen = self._revision_of(cursor)
            sent = time.monotonic()
            await self._look()
            while not self.stopped:
                for revision, news in self._after(seen):
                    yield f"id: {self._epoch}-{revision}\ndata: {json.dumps(news)}\n\n".encode()
                    seen, sent = revision, time.monotonic()
                if time.monotonic() - sent > HEARTBEAT_SECONDS:
                    yield b"event: beat\ndata: {}\n\n"
                    sent = time.monotonic()
                changed = self._changed
                try:
                    await asyncio.wait_for(changed.wait(), 1.0)
                except TimeoutError:
                    continue
        finally:
            self._readers -= 1

    @property
    def is_full(self) -> bool:
        """Whether a further reader is turned away."""
        return self._readers >= MAX_READERS

    def is_live(self, run_id: str) -> bool:
        """Returns whether a run was live at the last look."""
        published = self._published.get(run_id)
        return published is not None and bool(published[1]["live"])

    def stop(self) -> None:
        """Ends all streams."""
        self.stopped = True

    def _after(self, seen: int) -> list[tuple[int, News]]:
        # Reads what the last look published, so that the event loop never waits for a look under way.
        fresh = [(revision, news) for revision, news in self._published.values() if revision > seen]
        return sorted(fresh, key=lambda pair: pair[0])

    def _revision_of(self, cursor: str | None) -> int:
        epoch, _, number = (cursor or "").partition("-")
        return int(number) if epoch == self._epoch and number.isdecimal() and len(number) < 18 else 0

    async def _keep_looking(self) -> None:
        while self._readers and not self.stopped:
            await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        if self._limiter is None:
            self._limiter = CapacityLimiter(1)  # its own, so that looks and requests do not wait for each other
        if await to_thread.run_sync(self._look_now, limiter=self._limiter):
            self._changed.set()
            self._changed = asyncio.Event()

    def _look_now(self) -> bool:
        with self._lock:  # a new reader looks at once, beside the look that is due
            changed = self._look_at_all(time.monotonic())
            if changed:
                self._published = {run: (state.revision, state.news) for run, state in self._states.items()}
            return changed

    def _look_at_all(self, now: float) -> bool:
        files = self._index.files(max_age=SLOW_SECONDS)
        changed = False
        for file in files:
            state = self._states.get(file.id)
            if state is None or state.news["live"] or now - state.looked >= SLOW_SECONDS:
                changed |= self._update(file.id, self._news(file), now)
        for gone in self._states.keys() - {file.id for file in files}:
            changed |= self._update(gone, {**_nothing(gone), "gone": True}, now)
        return changed

    def _update(self, run_id: str, news: News, now: float) -> bool:
        state = self._states.get(run_id)
        if state is not None and state.news == news:
            state.looked = now
            return False
        self._revision += 1
        self._states[run_id] = _State(self._revision, now, news)
        return True

    def _news(self, file: RunFile) -> News:
        try:
            with self._index.opened(file.id) as run, run.moment():
                return {
                    "run": file.id,
                    "last_step": run.last_step,
                    "findings": run.num_records(),
                    "segments": len(run.segments),
                    "live": run.is_live,
                }
        except Exception:  # a damaged file must not hide the news of others; the list shows what is wrong
            return _nothing(file.id)


def _nothing(run_id: str) -> News:
    return {"run": run_id, "last_step": None, "findings": 0, "segments": 0, "live": False}
