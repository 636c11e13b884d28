"""The verdict on each run of the page, by the same code as `gradvitals doctor`, worked out once for each change."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from gradvitals.show.again import diagnose_again, was_diagnosed
from gradvitals.show.checkup import judge_run
from gradvitals.show.verdict import Verdict
from gradvitals.show.web.shelf import Shelf
from gradvitals.store.reader import Run
from gradvitals.types import Finding

LONGEST = 30_000
"""Steps of a run recorded without diagnosis up to which the page judges it unasked: that takes a while."""
GROWTH = 1.25
"""A live run of that kind is judged again when it has grown by so much."""


class _Stopped(Exception):
    """The page is closed, and nobody waits for the verdict."""


@dataclass(frozen=True)
class Judged:
    """A verdict, and what it rests on."""

    verdict: Verdict
    findings: tuple[Finding, ...]
    note: str = ""
    """How the verdict came about, where it is not by what was found while the run was recorded."""
    pending: bool = False
    """Whether the run is still being judged."""

    @property
    def level(self) -> str:
        """``healthy``, ``watch``, ``unhealthy``, or ``pending`` and ``unknown`` where there is no verdict."""
        if self.pending:
            return "pending"
        return "unknown" if self.note.startswith("Not judged") or not self.verdict.steps else self.verdict.level


class Judge:
    """Judges runs; those recorded without diagnosis in a thread of its own, one at a time."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lock = threading.Lock()
        self._done: dict[str, tuple[int, Sequence[Finding]]] = {}
        self._busy: set[str] = set()
        self._failed: set[str] = set()
        self._stop = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradvitals-judge")

    def judged(self, run_id: str, run: Run, *, begin: bool = True) -> Judged:
        """The verdict on a run as far as it has come.

        Args:
            run_id: Its id.
            run: The run.
            begin: Whether to begin judging a run that was recorded without diagnosis; a list only tells what is known.
        """
        kept = tuple(run.findings())
        if was_diagnosed(run.meta) or run.last_step is None:
            return Judged(judge_run(run, kept), kept)
        last_step = run.last_step
        if last_step >= LONGEST:
            note = "Not judged: it was recorded without diagnosis and is long. gradvitals doctor judges it when asked."
            return Judged(judge_run(run, kept), kept, note)
        done = self._diagnosed(run_id, last_step, begin=begin)
        if done is None and not begin:
            return Judged(judge_run(run, kept), kept, "Not judged yet: open it.")
        if done is None:
            return Judged(judge_run(run, kept), kept, "Being judged by the rules of today.", pending=True)
        if run_id in self._failed:
            return Judged(judge_run(run, kept), kept, "Not judged: the rules could not read it to its end.")
        found = (*kept, *done)
        note = "Judged by the rules of today: it was recorded without diagnosis."
        return Judged(judge_run(run, found), found, note)

    def version(self, run_id: str) -> int:
        """Changes when a run that is judged in the background has been judged."""
        with self._lock:
            return self._done[run_id][0] if run_id in self._done else -1

    def close(self) -> None:
        """Begin no further judging, and break off what is under way."""
        self._stop.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _diagnosed(self, run_id: str, last_step: int, *, begin: bool) -> Sequence[Finding] | None:
        """What the rules of today find; None until they are through. A live run is shown as last judged meanwhile."""
        with self._lock:
            step, found = self._done.get(run_id, (-1, None))
            outdated = last_step < step or (last_step > step and last_step > GROWTH * step + 50)
            if begin and (found is None or outdated) and run_id not in self._busy:
                self._busy.add(run_id)
                self._thread.submit(self._diagnose, run_id, last_step)
        return found

    def _go_on(self, step: int) -> None:
        if self._stop.is_set():
            raise _Stopped

    def _diagnose(self, run_id: str, last_step: int) -> None:
        found: Sequence[Finding] = ()
        failed = False
        try:
            with self._shelf.opened(run_id) as run:
                found = diagnose_again(run, on_step=self._go_on).findings
        except Exception:  # the run is gone or damaged, or the page is closed
            failed = True
        finally:
            with self._lock:
                self._done[run_id] = (last_step, found)
                (self._failed.add if failed else self._failed.discard)(run_id)
                self._busy.discard(run_id)
