"""A run in the terminal while it trains: `gradvitals watch`, redrawn or printed as lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from gradvitals.errors import RunFormatError, RunNotFoundError
from gradvitals.report.format import clean, duration, interval, number
from gradvitals.report.series import Floats, Steps
from gradvitals.report.summary import LayerRow, Worst, latest_extremes, layer_rows
from gradvitals.report.terminal import (
    METRIC_LABELS,
    WIDE,
    LayerTable,
    finding_in_short,
    headline,
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

    step: int | None = None
    gsnr_source: str | None = None
    layers: Sequence[LayerRow] = ()
    lowest_gsnr: Sequence[Worst] = ()
    largest_updates: Sequence[Worst] = ()

    @classmethod
    def of(cls, run: Run) -> LatestTensors:
        """Reads them from a run."""
        source = next(iter(run.sources("gsnr", "layers")), None)
        step, layers = layer_rows(run, source)
        return cls(
            step=step,
            gsnr_source=source,
            layers=layers,
            lowest_gsnr=latest_extremes(run, "gsnr", lowest=True),
            largest_updates=latest_extremes(run, "update/ratio"),
        )


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
    latest_tensors: LatestTensors
    ended: bool
    """Whether nothing more will come."""

    @property
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
    """Follows one run. It reads only what is new of its series, and reopens a file that was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._run = open_run(self._path)
        self._file = self._identity()
        self._forget()

    def _forget(self) -> None:
        self._writer = (self._run.meta["hostname"], self._run.meta["pid"], len(self._run.segments))
        self._series: dict[str, tuple[Steps, Floats]] = {}
        self._sources: dict[str, str | None] = {}
        self._tensor_steps: list[int] | None = None
        self._latest = LatestTensors()

    def look(self) -> Moment:
        """Reads what is new, and returns how the run is."""
        if self._identity() != self._file:
            self._run.close()
            self._open()
        run, meta = self._run, self._run.meta
        if (meta["hostname"], meta["pid"], len(run.segments)) != self._writer:
            self._forget()  # another process continues it, perhaps from an earlier step
        available = run.metrics("values")
        for metric in METRICS:
            if metric in available:
                self._read_on(run, metric)
        if (steps := self._latest_tensor_steps(run)) != self._tensor_steps:
            self._tensor_steps, self._latest = steps, LatestTensors.of(run)
        state = state_of(run)
        silent = time.time() - meta["heartbeat"]
        return Moment(
            run=str(run.path),
            state=state,
            seconds=(meta["finished_at"] or meta["heartbeat"]) - meta["started_at"],
            num_ranks=num_ranks(meta),
            num_parameters=sum(info.numel for info in run.tensors),
            last_step=run.last_step,
            series={metric: values for metric, (_, values) in self._series.items()},
            verdict=judge_run(run, run.findings) if was_diagnosed(meta) and run.last_step is not None else None,
            latest_tensors=self._latest,
            ended=state == "finished" or (state == "stopped" and silent > SILENT_SECONDS),
        )

    @property
    def is_finished(self) -> bool:
        """Whether the run was closed; far cheaper than a look."""
        return self._run.meta["finished_at"] is not None

    def close(self) -> None:
        """Closes the file."""
        self._run.close()

    def _read_on(self, run: Run, metric: str) -> None:
        source = next(iter(run.sources(metric, "values")), None)
        if source != self._sources.get(metric):
            self._sources[metric] = source
            self._series.pop(metric, None)  # values of different sources never mix
        steps, values = self._series.get(metric, (np.empty(0, np.int64), np.empty(0)))
        more, new = run.series(metric, source=source, since=int(steps[-1]) if steps.size else None)
        if more.size:
            self._series[metric] = (np.concatenate([steps, more]), np.concatenate([values, new]))

    def _latest_tensor_steps(self, run: Run) -> list[int]:
        """Returns when tensors were last read: reading them takes long, and they seldom change."""
        steps = []
        for metric in ("grad/norm", "gsnr", "update/ratio"):
            if metric in run.metrics("tensors"):
                steps += run.times(metric, kind="tensors")[0][-1:].tolist()
        return steps

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
            head = "no readings yet" if self.step is None else f"step {self.step:,}"
            line = head if self.step is None else plain_line(f"{head:<12}", moment.latest, ended=moment.ended)
            self.console.print(line, soft_wrap=True)
        for item in moment.verdict.ranked if moment.verdict is not None else ():
            key = (item.finding.id, item.finding.first_step, item.is_open)
            if key not in self.reported:
                self.reported.add(key)
                if is_first and not item.is_open:
                    continue
                word = "" if item.is_open else "resolved: "
                self.console.print(clean(f"{word}{item.finding}"), soft_wrap=True)
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
        yield self._head()
        moment = self.moment
        if moment.last_step is None:
            yield Text("No readings yet.")
            return
        yield headline(moment.verdict) if moment.verdict is not None else Text(UNDIAGNOSED, style="dim")
        yield Text()
        yield vitals_table(self._vitals(wide=options.max_width >= WIDE))
        yield from self._findings()
        latest = moment.latest_tensors
        if latest.layers:
            yield from (Text(), LayerTable(latest.layers, latest.step, latest.gsnr_source, None))
        for title, worst in (("Lowest GSNR", latest.lowest_gsnr), ("Largest update/weight", latest.largest_updates)):
            if worst:
                yield worst_list(title, worst)

    def _head(self) -> Text:
        moment = self.moment
        step = f"step {moment.last_step:,}" if moment.last_step is not None else "no steps"
        ranks = f", {moment.num_ranks:,} ranks" if moment.num_ranks > 1 else ""
        about = f"  {STATES[moment.state]}, {step}, {duration(moment.seconds)}{ranks}"
        text = Text(clean(moment.run), style="bold")
        return text.append(f"{about}, {moment.num_parameters:,} parameters", style="not bold")

    def _vitals(self, *, wide: bool) -> Iterator[tuple[str, str, RenderableType]]:
        moment = self.moment
        for metric, label in METRIC_LABELS.items():
            if metric in moment.series:
                values = moment.series[metric]
                name = label if wide else label.replace("gradient ", "")
                yield name, number(float(values[-1])), spark_of(metric, values)
        if "noise_scale" in moment.series:
            scale = noise_scale_of(moment.latest)
            spark = spark_of("noise_scale", moment.series["noise_scale"])
            yield "noise scale" if wide else "noise", number(scale[0]), spark
            text = noise_text(scale)
            yield "", "", Text(text.removesuffix(" yet") if moment.ended else text, style="dim")
        if "lr" in moment.series:
            yield "learning rate" if wide else "lr", number(moment.latest["lr"]), spark_of("lr", moment.series["lr"])

    def _findings(self) -> Iterator[RenderableType]:
        verdict = self.moment.verdict
        if verdict is None or not verdict.ranked:
            return
        yield Text()
        yield from (finding_in_short(item, live=verdict.live) for item in verdict.ranked[:MAX_FINDINGS])
        if len(verdict.ranked) > MAX_FINDINGS:
            yield Text(f"and {len(verdict.ranked) - MAX_FINDINGS} more; see `gradvitals doctor -v`", style="dim")


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
    if "noise_scale" not in latest or (ended and interval(*noise_scale_of(latest)) == "-"):
        return line.rstrip()  # not measured in this loop, or not identifiable up to its end
    return f"{line}  noise scale {noise_text(noise_scale_of(latest))}"


def noise_scale_of(latest: Mapping[str, float]) -> tuple[float, float, float]:
    """Returns the noise scale and the ends of its interval."""
    value, low, high = (latest.get(name, NAN) for name in ("noise_scale", "noise_scale_low", "noise_scale_high"))
    return value, low, high


def noise_text(scale: tuple[float, float, float]) -> str:
    """Returns the same in words."""
    text = interval(*scale)
    return "not identifiable yet" if text == "-" else f"{text} samples"
