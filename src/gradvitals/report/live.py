"""A run in the terminal while it trains: `gradvitals watch`, redrawn or printed as lines."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from gradvitals.errors import RunFormatError, RunNotFoundError
from gradvitals.report.format import clean, interval, number
from gradvitals.report.replay import was_diagnosed
from gradvitals.report.state import STATES
from gradvitals.report.summary import Summary, summarize
from gradvitals.report.terminal import run_in_numbers
from gradvitals.report.verdict import Verdict, judge_run
from gradvitals.store.reader import open_run

SILENT_SECONDS = 15.0
"""A run that is silent for longer has ended without being closed."""
MAX_FINDINGS = 6
POLL_SECONDS = 0.5
"""Between two looks for a run that does not exist yet."""
END_SECONDS = 1.0
"""Between two looks whether a run has ended, which need not wait for the next line."""
HALF_WRITTEN_SECONDS = 10.0
"""Time for which a file that is not a run yet may be one that is being created."""

# -- reading a run as it grows -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A run as it is now."""

    summary: Summary
    verdict: Verdict | None
    """None for a run that is recorded without diagnosis."""
    ended: bool
    """Whether nothing more will come."""

    @property
    def latest(self) -> dict[str, float]:
        """The newest value of each metric."""
        scale = self.summary.noise_scale
        noise = {"noise_scale": scale.value, "noise_scale_low": scale.low, "noise_scale_high": scale.high}
        return self.summary.latest | (noise if scale.measured else {})

    def to_json(self) -> dict[str, Any]:
        """Returns one line of `gradvitals watch --json`."""
        summary, verdict = self.summary, self.verdict
        return {
            "run": summary.run,
            "state": summary.state,
            "seconds": summary.seconds,
            "ranks": summary.num_ranks,
            "last_step": summary.last_step,
            "values": self.latest,
            "verdict": verdict.to_json() if verdict is not None else None,
            "findings": [item.to_json() for item in verdict.ranked] if verdict is not None else [],
        }


def look(path: Path) -> Moment:
    """Returns how a run is now. Its file may be replaced meanwhile: every look opens it."""
    with open_run(path) as run:
        meta, summary = run.meta, summarize(run, whole_run=False)
        diagnosed = was_diagnosed(meta) and run.last_step is not None
        verdict = judge_run(run, run.findings) if diagnosed else None
    silent = time.time() - meta["heartbeat"] > SILENT_SECONDS
    ended = summary.state == "finished" or (summary.state == "stopped" and silent)
    return Moment(summary=summary, verdict=verdict, ended=ended)


def wait_for(path: Path, report: Callable[[str], object]) -> None:
    """Waits until there is a run at a path, and reports it if there is none yet.

    Raises:
        RunFormatError: If what is there is not a run and does not become one.
    """
    reported, since = False, 0.0
    while True:
        try:
            return open_run(path).close()
        except RunNotFoundError:
            since = 0.0
            if not reported:
                report(f"Waiting for a run in {clean(str(path))} (Ctrl-C to leave) ...")
                reported = True
        except RunFormatError:
            since = since or time.monotonic()
            if not reported or time.monotonic() - since > HALF_WRITTEN_SECONDS:
                raise
        time.sleep(POLL_SECONDS)


def moments(path: Path, every: float) -> Iterator[Moment]:
    """Yields the run as it is now, and again every so many seconds, until it has ended."""

    def is_finished() -> bool:  # far cheaper than a look
        with open_run(path) as run:
            return run.meta["finished_at"] is not None

    while True:
        start = time.monotonic()
        moment = look(path)
        took = time.monotonic() - start
        yield moment
        if moment.ended:
            return
        left = max(every, 4 * took)  # never more than a fifth of a core, which training may need
        while left > 0 and not is_finished():
            time.sleep(min(left, END_SECONDS))
            left -= END_SECONDS


# -- gradvitals watch ----------------------------------------------------------------------------------------------


def can_redraw(console: Console) -> bool:
    """Returns whether there is a screen that can be redrawn, and somebody who may look at it."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


def draw(console: Console, following: Iterator[Moment]) -> None:
    """Draws each moment over the one before; the last one stays, at its full length."""
    last: Moment | None = None
    with Live(Text(""), console=console, screen=True, auto_refresh=False) as live:
        for last in following:
            live.update(_Cropped(frame(last)), refresh=True)
    if last is not None:
        console.print(frame(last))


@dataclass
class Lines:
    """Prints a line now and then, for logs and pipes, and one when a finding opens or resolves."""

    console: Console
    reported: set[tuple[str, int, bool]] = field(default_factory=set)
    step: int | None = -1
    """The last one a line was printed for."""

    def show(self, moment: Moment) -> None:
        """Prints what is new; the last line counts what was resolved before the first look."""
        is_first, step, verdict = self.step == -1, moment.summary.last_step, moment.verdict
        lines = []
        if step != self.step:
            self.step = step
            lines.append("no readings yet" if step is None else plain_line(moment))
        for item in verdict.ranked if verdict is not None else ():
            key = (item.finding.id, item.finding.first_step, item.is_open)
            if key not in self.reported and (item.is_open or not is_first):
                lines.append(f"{'' if item.is_open else 'resolved: '}{item.finding}")
            self.reported.add(key)
        if moment.ended:
            lines.append(f"{moment.summary.run}: {STATES[moment.summary.state]}")
            lines += filter(None, (verdict.headline, verdict.uncounted)) if verdict is not None else ()
        for line in lines:
            self.console.print(clean(line), soft_wrap=True)


def frame(moment: Moment) -> RenderableType:
    """Returns all there is to show of a moment, the most important first."""
    return run_in_numbers(moment.summary, moment.verdict, most=MAX_FINDINGS)


@dataclass(frozen=True)
class _Cropped:
    """As much as fits on the screen, and how much does not."""

    content: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self.content, options.update(height=None), pad=False)
        room = options.height or console.height
        if len(lines) > room:
            hidden = len(lines) - room + 1
            note = console.render_lines(Text(f"... {hidden} more lines in a taller window", style="dim"), pad=False)
            lines = [*lines[: room - 1], note[0]]
        for line in lines:
            yield from (*line, Segment.line())


def plain_line(moment: Moment) -> str:
    """Returns the latest values in one line of text."""
    loss, norm, gsnr = (number(moment.latest.get(name)) for name in ("loss", "grad/norm", "gsnr"))
    line = f"{f'step {moment.summary.last_step:,}':<12}  loss {loss:<6}  norm {norm:<6}  GSNR {gsnr:<7}"
    scale = moment.summary.noise_scale
    noise = f"{interval(scale.value, scale.low, scale.high)} samples"
    if not scale.measured or (moment.ended and math.isnan(scale.value)):
        return line.rstrip()  # not measured in this loop, or not identifiable up to its end
    return f"{line}  noise scale {'not identifiable yet' if math.isnan(scale.value) else noise}"
