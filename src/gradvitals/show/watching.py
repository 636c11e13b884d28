"""`gradvitals watch`: a run in the terminal while it happens, drawn again and again, or as lines where it cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from gradvitals.errors import RunFormatError, RunNotFoundError
from gradvitals.show.findings import in_short, verdict_line
from gradvitals.show.follow import Follower, Moment
from gradvitals.show.live import noise_scale_of, noise_text, plain_line
from gradvitals.show.terminal import LABELS, STATES, WIDE, LayerTable, spark_of, vitals, worst_list
from gradvitals.show.text import clean, duration, number

FINDINGS = 6
"""Findings that are shown; of more, the number."""
POLL_SECONDS = 0.5
"""Between two looks for a run that is not there yet."""
END_SECONDS = 1.0
"""Between two looks whether a run has come to its end, which need not wait for the next line."""
HALF_WRITTEN_SECONDS = 10.0
"""How long a file that is no run yet may be one that is being made."""


def wait_for(path: Path, say: Callable[[str], object]) -> Follower:
    """Follow the run at a path; where there is none, wait for it, with a word.

    Raises:
        RunFormatError: If what is there is not a run and does not become one.
    """
    said, since = False, 0.0
    while True:
        try:
            return Follower(path)
        except RunNotFoundError:
            since = 0.0
            if not said:
                say(f"Waiting for a run in {clean(str(path))} (Ctrl-C to leave) ...")
                said = True
        except RunFormatError:
            since = since or time.monotonic()
            if not said or time.monotonic() - since > HALF_WRITTEN_SECONDS:
                raise
        time.sleep(POLL_SECONDS)


def moments(follower: Follower, every: float) -> Iterator[Moment]:
    """The run as it is now, and again every so many seconds, until it has ended."""
    while True:
        begun = time.monotonic()
        moment = follower.look()
        took = time.monotonic() - begun
        yield moment
        if moment.ended:
            return
        left = max(every, 4 * took)  # never more than a fifth of a core, which training may need
        while left > 0 and not follower.is_finished:
            time.sleep(min(left, END_SECONDS))
            left -= END_SECONDS


def draw(console: Console, following: Iterator[Moment]) -> None:
    """Draw each moment over the one before; the last one stays, at its full length."""
    last: Moment | None = None
    with Live(Text(""), console=console, screen=True, auto_refresh=False) as live:
        for last in following:
            live.update(_Cropped(Frame(last)), refresh=True)
    if last is not None:
        console.print(Frame(last))


@dataclass
class Lines:
    """A line now and then, for logs and pipes, and one for every finding when it comes and when it is over."""

    console: Console
    told: set[tuple[str, int, bool]] = field(default_factory=set)
    step: int | None = -1
    """The last one a line was printed for."""

    def show(self, moment: Moment) -> None:
        """Print what is new; of what was over before the first look, the verdict has the number."""
        is_first = self.step == -1
        if moment.last_step != self.step:
            self.step = moment.last_step
            head = "no readings yet" if self.step is None else f"step {self.step:,}"
            line = head if self.step is None else plain_line(f"{head:<12}", moment.latest, ended=moment.ended)
            self.console.print(line, soft_wrap=True)
        for item in moment.verdict.findings if moment.verdict is not None else ():
            finding, over = item.finding, item.clear is not None
            key = (finding.id, finding.first_step, over)
            if key not in self.told:
                self.told.add(key)
                if is_first and over:
                    continue
                word = "over: " if over else ""
                self.console.print(clean(f"{word}{finding}"), soft_wrap=True)
        if moment.ended:
            self.console.print(clean(f"{moment.run}: {STATES[moment.state]}"), soft_wrap=True)
            if moment.verdict is not None:
                self.console.print(clean(moment.verdict.line), soft_wrap=True)


@dataclass(frozen=True)
class Frame:
    """One moment of a run, in the width at hand."""

    moment: Moment

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """All of it, the most important first."""
        yield self._head()
        moment = self.moment
        if moment.last_step is None:
            yield Text("No readings yet.")
            return
        if moment.verdict is not None:
            yield verdict_line(moment.verdict)
        else:
            yield Text("Recorded without diagnosis; `gradvitals doctor` judges what was kept.", style="dim")
        yield Text()
        yield vitals(self._vitals(wide=options.max_width >= WIDE))
        yield from self._findings()
        latest = moment.latest_tensors
        if latest.layers:
            yield from (Text(), LayerTable(latest.layers, latest.step, latest.gsnr_source, None))
        for title, worst in (("Lowest GSNR", latest.lowest_gsnr), ("Largest update/weight", latest.largest_updates)):
            if worst:
                yield worst_list(title, worst)

    def _head(self) -> Text:
        moment = self.moment
        text = Text(clean(moment.run), style="bold")
        step = f"step {moment.last_step:,}" if moment.last_step is not None else "no steps"
        ranks = f", {moment.num_ranks:,} ranks" if moment.num_ranks > 1 else ""
        about = f"  {STATES[moment.state]}, {step}, {duration(moment.seconds)}{ranks}"
        return text.append(f"{about}, {moment.num_parameters:,} parameters", style="not bold")

    def _vitals(self, *, wide: bool) -> Iterator[tuple[str, str, RenderableType]]:
        moment = self.moment
        for metric, label in LABELS.items():
            if metric in moment.series:
                values = moment.series[metric]
                name = label if wide else label.replace("gradient ", "")
                yield name, number(float(values[-1])), spark_of(metric, values)
        if "noise_scale" in moment.series:
            name = "noise scale" if wide else "noise"
            scale = noise_scale_of(moment.latest)
            yield name, number(scale[0]), spark_of("noise_scale", moment.series["noise_scale"])
            text = noise_text(scale)
            yield "", "", Text(text.removesuffix(" yet") if moment.ended else text, style="dim")
        if "lr" in moment.series:
            yield "learning rate" if wide else "lr", number(moment.latest["lr"]), spark_of("lr", moment.series["lr"])

    def _findings(self) -> Iterator[RenderableType]:
        verdict = self.moment.verdict
        if verdict is None or not verdict.findings:
            return
        yield Text()
        yield from (in_short(item, live=verdict.live) for item in verdict.findings[:FINDINGS])
        if len(verdict.findings) > FINDINGS:
            yield Text(f"and {len(verdict.findings) - FINDINGS} more; `gradvitals doctor` has them", style="dim")


@dataclass(frozen=True)
class _Cropped:
    """As much as fits on the screen, and a word where something does not."""

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
