"""The state of a run: whether it is being written, how many steps and ranks it has, how its processes ended."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradvitals.notices import made
from gradvitals.report.format import duration, plural
from gradvitals.store.opening import is_gone
from gradvitals.store.reader import Run
from gradvitals.types import Finding

State = Literal["running", "finished", "stopped"]
STATES: dict[State, str] = {"running": "running", "finished": "finished", "stopped": "cut off"}

STOPPED = "training_stopped"
WHY_STOPPED = (STOPPED, "ranks_lost")
"""Findings that explain why a process ended, the most specific first."""
ENDS = (STOPPED, "run_cut_off")
"""Findings about the end itself."""


@dataclass(frozen=True)
class Restart:
    """Another process continued the run."""

    step: int
    """Where it continued."""
    why: str
    """How the process before it had ended."""
    crashed: bool
    """Whether that was an error or a kill."""


def state_of(run: Run) -> State:
    """Returns whether a run is being written, was closed, or ended without being closed."""
    if run.is_live:
        return "running"
    return "stopped" if run.meta["finished_at"] is None else "finished"


def progress(run: Run) -> str:
    """Returns the state of a run, and how far it is, in words."""
    state, last = state_of(run), run.last_step
    if last is None:
        return f"{STATES[state]}, no steps"
    return f"{STATES[state]}, {f'step {last:,}' if state == 'running' else plural(last + 1, 'step')}"


def interruption(run: Run, last_step: int) -> Finding:
    """Returns the finding for a run whose process ended without a trace."""
    silent = time.time() - float(run.meta["heartbeat"])
    seen = "its process is gone, last seen" if is_gone(run.meta) else "its process was last seen"
    title = f"The run was cut off at step {last_step:,}: it was not closed, and {seen} {duration(silent)} ago"
    return made("run_cut_off", title, last_step, evidence={"silent_seconds": round(silent, 1)})


def restarts(run: Run) -> tuple[Restart, ...]:
    """Returns each time another process continued the run, and why it had to."""
    ends = [finding for finding in run.findings if finding.id in WHY_STOPPED]
    found = []
    for before, after in pairwise(run.segments):
        first, step = before.first_step, after.first_step
        # A finding from before the step of the restart is not hidden; only its step shows which process it belongs to.
        own = [*before.hidden, *(finding for finding in ends if first <= finding.first_step < step)]
        why = next((finding for name in WHY_STOPPED for finding in own if finding.id == name), None)
        cut_off = before.finished_at is None
        text, crashed = "the process was cut off" if cut_off else "the run was closed", cut_off
        if why is not None:
            text, crashed = f"{why.title} (step {why.first_step:,})", why.severity != "info"
        found.append(Restart(step, text, crashed))
    return tuple(found)


def describe_restarts(found: Sequence[Restart]) -> str:
    """Returns the restarts in a sentence, the last one with its reason; empty if there was none."""
    if not found:
        return ""
    last = found[-1]
    often = {1: "once", 2: "twice"}.get(len(found), f"{len(found)} times")
    crashed = sum(restart.crashed for restart in found)
    of_these = f" ({crashed} after a crash)" if 1 < len(found) != crashed else ""
    latest = "" if len(found) == 1 else "last "
    return f"Restarted {often}{of_these}, {latest}at step {last.step:,}; before that: {last.why}."


def steps_spanned(run: Run, steps: NDArray[np.int64]) -> int:
    """Returns how many steps training made from the first to the last of those that were read, in order.

    Some between them may have been passed over. What lies between two processes of a run is not counted.
    """
    # Of a process that a later one did all over again, nothing is left.
    begins = np.minimum.accumulate([segment.first_step for segment in reversed(run.segments)])[::-1]
    parts = np.split(steps, np.searchsorted(steps, begins))
    return sum(int(part[-1]) - int(part[0]) + 1 for part in parts if len(part))


def metric_of_every_step(run: Run) -> str | None:
    """Returns a metric that every step has; None if there is none."""
    values = run.metrics("values")
    return next((metric for metric in ("grad/norm", "loss") if metric in values), None)


def num_ranks(meta: Mapping[str, Any]) -> int:
    """Returns how many processes the run was recorded with."""
    return int(meta.get("ranks") or 1)
