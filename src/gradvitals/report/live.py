"""A run in the terminal while it trains: `gradvitals watch`, redrawn or printed as lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from gradvitals.errors import RunFormatError, RunNotFoundError
from gradvitals.report.format import clean, duration, interval, number
from gradvitals.report.series import Floats
from gradvitals.report.summary import LayerRow, WorstList, layer_rows, seconds_of, worst_lists
from gradvitals.report.terminal import (
    METRIC_LABELS,
    WIDE,
    finding_in_short,
    headline,
    layer_table,
    spark_of,
    vitals_table,
    worst_list,
)
from gradvitals.report.verdict import STATES, UNDIAGNOSED, State, Verdict, judge_run, num_ranks, state_of, was_diagnosed
from gradvitals.store.reader import Run, open_run

NAN = float("nan")
METRICS = ("loss", "grad/norm", "gsnr", "noise_scale", "noise_scale_low", "noise_scale_high", "lr", "vrgd/mean")
SILENT_SECONDS = 15.0
"""A run that is silent for longer has ended without being closed."""
MAX_FINDINGS = 6
POLL_SECONDS = 0.5
"""Between two looks for a run that does not exist yet."""
END_SECONDS = 1.0
"""Between two looks whether a run has ended, which need not wait for the next line."""
HALF_WRITTEN_SECONDS = 10.0
"""How long a file that is no run yet may be one that is being created."""

# -- reading a run as it grows -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LatestTensors:
    """Layers and tensors at their latest reading."""

    step: int | None
    source: str | None
    layers: tuple[LayerRow, ...]
    worst: tuple[WorstList, ...]

    @classmethod
    def of(cls, run: Run) -> LatestTensors:
        """Reads them from a run."""
        source = next(iter(run.sources("gsnr", "layers")), None)
        step, layers = layer_rows(run, source)
        return cls(step=step, source=source, layers=layers, worst=worst_lists(run, source, whole_run=False))


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A run as it is now."""

    run: str
    state: State
    seconds: float
    num_ranks: int
    num_parameters: int
    last_step: int | None
    series: dict[str, Floats]
    verdict: Verdict | None
    """None for a run that is recorded without diagnosis."""
    tensors: LatestTensors
    ended: bool
    """Whether nothing more will come."""

    @cached_property
    def latest(self) -> dict[str, float]:
        """The newest value of each metric."""
        return {metric: float(values[-1]) for metric, values in self.series.items() if values.size}

    def to_json(self) -> dict[str, Any]:
        """Returns one line of `gradvitals watch --json`."""
        verdict = self.verdict
        return {
            "run": self.run,
            "state": self.state,
            "seconds": self.seconds,
            "ranks": self.num_ranks,
            "last_step": self.last_step,
            "values": self.latest,
            "verdict": verdict.to_json() if verdict is not None else None,
            "findings": [item.to_json() for item in verdict.ranked] if verdict is not None else [],
        }


class Follower:
    """Follows one run, and reopens a file that was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run = open_run(path)
        self._file = self._identity()
        self._tensors: tuple[list[int], LatestTensors] | None = None

    def look(self) -> Moment:
        """Returns how the run is now."""
        if self._identity() != self._file:
            self._run.close()
            self._run, self._tensors = open_run(self._path), None
            self._file = self._identity()
        run, meta, state = self._run, self._run.meta, state_of(self._run)
        silent = time.time() - meta["heartbeat"]
        return Moment(
            run=str(run.path),
            state=state,
            seconds=seconds_of(run),
            num_ranks=num_ranks(meta),
            num_parameters=sum(info.numel for info in run.tensors),
            last_step=run.last_step,
            series={
                metric: run.series(metric, source=next(iter(run.sources(metric, "values")), None))[1]
                for metric in METRICS
                if metric in run.metrics("values")
            },
            verdict=judge_run(run, run.findings) if was_diagnosed(meta) and run.last_step is not None else None,
            tensors=self._latest_tensors(),
            ended=state == "finished" or (state == "stopped" and silent > SILENT_SECONDS),
        )

    @property
    def is_finished(self) -> bool:
        """Whether the run was closed; far cheaper than a look."""
        return self._run.meta["finished_at"] is not None

    def close(self) -> None:
        """Closes the file."""
        self._run.close()

    def _latest_tensors(self) -> LatestTensors:
        """Returns the latest tensors, read again if there are new ones: that takes long, and they seldom change."""
        run, steps = self._run, []
        for metric in ("grad/norm", "gsnr", "update/ratio"):
            if metric in run.metrics("tensors"):
                steps += run.times(metric, kind="tensors")[0][-1:].tolist()
        if self._tensors is None or self._tensors[0] != steps:
            self._tensors = steps, LatestTensors.of(run)
        return self._tensors[1]

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = self._run.file.stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino


def wait_for(path: Path, report: Callable[[str], object]) -> Follower:
    """Follows the run at a path; if there is none yet, reports that it waits, and waits.

    Raises:
        RunFormatError: If what is there is not a run and does not become one.
    """
    reported, since = False, 0.0
    while True:
        try:
            return Follower(path)
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


def moments(follower: Follower, every: float) -> Iterator[Moment]:
    """Yields the run as it is now, and again every so many seconds, until it has ended."""
    while True:
        start = time.monotonic()
        moment = follower.look()
        took = time.monotonic() - start
        yield moment
        if moment.ended:
            return
        left = max(every, 4 * took)  # never more than a fifth of a core, which training may need
        while left > 0 and not follower.is_finished:
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
            live.update(_Cropped(Frame(last)), refresh=True)
    if last is not None:
        console.print(Frame(last))


@dataclass
class Lines:
    """Prints a line now and then, for logs and pipes, and one when a finding opens or resolves."""

    console: Console
    reported: set[tuple[str, int, bool]] = field(default_factory=set)
    step: int | None = -1
    """The last one a line was printed for."""

    def show(self, moment: Moment) -> None:
        """Prints what is new; the headline counts what was resolved before the first look."""
        is_first = self.step == -1
        if moment.last_step != self.step:
            self.step = moment.last_step
            line = (
                plain_line(f"{f'step {self.step:,}':<12}", moment.latest, ended=moment.ended)
                if self.step is not None
                else None
            )
            self.console.print(line or "no readings yet", soft_wrap=True)
        for item in moment.verdict.ranked if moment.verdict is not None else ():
            key = (item.finding.id, item.finding.first_step, item.is_open)
            if key not in self.reported and (item.is_open or not is_first):
                self.console.print(clean(f"{'' if item.is_open else 'resolved: '}{item.finding}"), soft_wrap=True)
            self.reported.add(key)
        if moment.ended:
            self.console.print(clean(f"{moment.run}: {STATES[moment.state]}"), soft_wrap=True)
            if moment.verdict is not None:
                self.console.print(clean(moment.verdict.headline), soft_wrap=True)


@dataclass(frozen=True)
class Frame:
    """One moment of a run, in the width at hand."""

    moment: Moment

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders all of it, the most important first."""
        moment, tensors, verdict = self.moment, self.moment.tensors, self.moment.verdict
        yield self._head()
        if moment.last_step is None:
            yield Text("No readings yet.")
            return
        yield headline(verdict) if verdict is not None else Text(UNDIAGNOSED, style="dim")
        yield Text()
        yield vitals_table(self._vitals(wide=options.max_width >= WIDE))
        if verdict is not None and verdict.ranked:
            yield Text()
            yield from (finding_in_short(item, live=verdict.live) for item in verdict.ranked[:MAX_FINDINGS])
            hidden = len(verdict.ranked) - MAX_FINDINGS
            if hidden > 0:
                yield Text(f"and {hidden} more; see `gradvitals doctor -v`", style="dim")
        if tensors.layers:
            yield from (Text(), layer_table(tensors.layers, tensors.step, tensors.source, None))
        yield from map(worst_list, tensors.worst)

    def _head(self) -> Text:
        moment = self.moment
        step = f"step {moment.last_step:,}" if moment.last_step is not None else "no steps"
        ranks = f", {moment.num_ranks:,} ranks" if moment.num_ranks > 1 else ""
        about = f"  {STATES[moment.state]}, {step}, {duration(moment.seconds)}{ranks}"
        text = Text(clean(moment.run), style="bold")
        return text.append(f"{about}, {moment.num_parameters:,} parameters", style="not bold")

    def _vitals(self, *, wide: bool) -> Iterator[tuple[str, str, RenderableType]]:
        moment = self.moment
        labels = {**METRIC_LABELS, "noise_scale": "noise scale", "lr": "learning rate"}
        short = {"grad/norm": "norm", "noise_scale": "noise", "lr": "lr"}
        for metric, label in labels.items():
            if metric in moment.latest:
                name = label if wide else short.get(metric, label)
                yield name, number(moment.latest[metric]), spark_of(metric, moment.series[metric])
            if metric == "noise_scale" and metric in moment.latest:
                text = noise_text(moment.latest)
                yield "", "", Text(text.removesuffix(" yet") if moment.ended else text, style="dim")


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


def plain_line(head: str, latest: Mapping[str, float], *, ended: bool = False) -> str:
    """Returns the latest values in one line of text."""
    loss, norm, gsnr = (latest.get(name, NAN) for name in ("loss", "grad/norm", "gsnr"))
    line = f"{head}  loss {number(loss):<6}  norm {number(norm):<6}  GSNR {number(gsnr):<7}"
    noise = noise_text(latest)
    if "noise_scale" not in latest or (ended and noise.endswith(" yet")):
        return line.rstrip()  # not measured in this loop, or not identifiable up to its end
    return f"{line}  noise scale {noise}"


def noise_text(latest: Mapping[str, float]) -> str:
    """Returns the noise scale and its interval in words."""
    text = interval(*(latest.get(name, NAN) for name in ("noise_scale", "noise_scale_low", "noise_scale_high")))
    return "not identifiable yet" if text == "-" else f"{text} samples"
