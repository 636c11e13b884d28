"""How the processes of a run ended: closed, stopped by an error, or cut off without a word."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

from gradvitals.show.text import duration
from gradvitals.store.process import is_gone
from gradvitals.store.reader import Run
from gradvitals.store.segments import Segment
from gradvitals.types import Finding

State = Literal["running", "finished", "stopped"]

WHY_STOPPED = ("training_stopped", "ranks_lost")
"""Findings that say why a process came to its end, the one that says most first."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Another process went on with the run."""

    step: int
    """Where it went on."""
    why: str
    """How the process before it had ended."""
    crashed: bool
    """Whether that was an error, or without a word."""

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)


def state_of(run: Run) -> State:
    """Whether a run goes on, was closed, or ended without being closed."""
    if run.is_live:
        return "running"
    return "stopped" if run.meta["finished_at"] is None else "finished"


def is_cut_off(run: Run) -> bool:
    """Whether its last process was not closed and is not heard of any more."""
    return state_of(run) == "stopped"


def run_cut_off(run: Run, last_step: int) -> Finding:
    """What is to be said of such a run: its process could not say it itself."""
    meta = run.meta
    silent = time.time() - float(meta["heartbeat"])
    heard = (
        f"its process is gone, last heard of {duration(silent)} ago"
        if is_gone(meta)
        else f"not heard of for {duration(silent)}"
    )
    return Finding(
        id="run_cut_off",
        severity="warning",
        title=f"the run was cut off at step {last_step:,}: not closed, and {heard}",
        first_step=last_step,
        evidence={"silent_seconds": round(silent, 1)},
        causes=(
            "the process was killed: out of memory, the time limit of a scheduler, kill -9, or the machine went down",
            "the files were copied while it was running, or it can no longer write to them",
        ),
        fixes=(
            "look at the end of its output, and in the log of the system or the scheduler for who killed it",
            "start it again from its last checkpoint with watch(..., resume=True): the record goes on",
        ),
    )


def restarts(run: Run) -> tuple[Restart, ...]:
    """Each time another process went on with the run, and why it had to."""
    segments = run.segments
    if len(segments) < 2:
        return ()
    told = [finding for finding in run.findings() if finding.id in WHY_STOPPED]
    return tuple(_restart(before, after, told) for before, after in pairwise(segments))


def about_restarts(found: Sequence[Restart]) -> str:
    """The restarts in a sentence, the last one with its reason; empty where there was none."""
    if not found:
        return ""
    last = found[-1]
    often = "once" if len(found) == 1 else "twice" if len(found) == 2 else f"{len(found)} times"
    crashed = sum(restart.crashed for restart in found)
    of_these = f", {crashed} of them after a crash" if 1 < len(found) != crashed else ""
    latest = "" if len(found) == 1 else "the last time "
    return f"It was started again {often}{of_these}, {latest}at step {last.step:,}; before: {last.why}."


def _restart(before: Segment, after: Segment, told: Sequence[Finding]) -> Restart:
    # What was found before the step it went on at is not hidden; only the step can tell whose it is.
    own = [*before.hidden, *(finding for finding in told if before.first_step <= finding.first_step < after.first_step)]
    why = next((finding for name in WHY_STOPPED for finding in own if finding.id == name), None)
    if why is not None:
        return Restart(
            step=after.first_step, why=f"{why.title} (step {why.first_step:,})", crashed=why.severity != "info"
        )
    if before.finished_at is None:
        return Restart(step=after.first_step, why="it was cut off without a word", crashed=True)
    return Restart(step=after.first_step, why="it had been closed", crashed=False)
