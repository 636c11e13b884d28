"""A run's report for the terminal. Names and titles come from outside: they are printed as text, never as markup."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gradvitals.show.findings import Hanging, about_actions, about_monitoring, in_short, verdict_line
from gradvitals.show.sparkline import ASCII, BLOCKS, sparkline
from gradvitals.show.standouts import LayerRow, Worst
from gradvitals.show.summary import Summary, summarize
from gradvitals.show.text import clean, duration, number
from gradvitals.store.reader import Run
from gradvitals.types import FloatArray

__all__ = ["Spark", "findings_section", "render_report", "render_summary", "sparkline"]

LABELS = {"loss": "loss", "grad/norm": "gradient norm", "gsnr": "GSNR", "vrgd/mean": "VRGD factor"}
STATES = {"running": "still running", "finished": "finished", "stopped": "stopped without being closed"}
WIDE = 76
"""Columns of screen from which the layer table shows intervals."""
MOST_LAYERS = 400
"""Rows of the layer table; of more, those in the middle are left out."""


@dataclass(frozen=True)
class Spark:
    """A sparkline as wide as the place it is given, in ASCII where the terminal needs it."""

    values: FloatArray | list[float]
    robust: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw at the width at hand."""
        blocks = ASCII if options.ascii_only else BLOCKS
        yield Text(sparkline(self.values, min(options.max_width, 60), robust=self.robust, blocks=blocks), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Anything from one character to one for each value, sixty at most."""
        return Measurement(1, max(1, min(options.max_width, 60, len(self.values))))


def render_report(run: Run) -> RenderableType:
    """The report of a run, ready for `rich.console.Console.print`."""
    return render_summary(summarize(run))


def render_summary(summary: Summary) -> RenderableType:
    """The same from a summary already made."""
    return Group(*_sections(summary))


def findings_section(summary: Summary) -> Iterator[RenderableType]:
    """The verdict, the findings in short, and what gradvitals says about itself."""
    verdict = summary.verdict
    if summary.diagnosed and summary.last_step is not None:
        yield verdict_line(verdict)
    elif not summary.diagnosed:
        yield Hanging("", "This run was recorded without diagnosis; `gradvitals doctor` judges what it kept.")
    yield from (in_short(item, live=verdict.live) for item in verdict.findings)
    if verdict.findings:
        yield Hanging("", Text("`gradvitals doctor` has the evidence, the causes, and what is fine.", style="dim"))
    yield from about_actions(summary.actions)
    yield from about_monitoring(summary.monitoring)


def _sections(summary: Summary) -> Iterator[RenderableType]:
    yield _header(summary)
    if summary.last_step is None:
        yield Text("No readings yet.")
    else:
        yield vitals(_trends(summary))
    if summary.gsnr_doubt:
        yield Hanging("Note: ", clean(summary.gsnr_doubt), "yellow")
    yield Text()
    if summary.layers:
        yield LayerTable(summary.layers, summary.layers_step, summary.gsnr_source, summary.gsnr_batch_size)
    for table in _worst_tensors(summary):
        yield from (table, Text())
    yield from findings_section(summary)
    if summary.dropped:
        yield Text(f"{summary.dropped:,} readings were dropped because the disk could not keep up.", style="yellow")


def _header(summary: Summary) -> Text:
    steps = f"step {summary.last_step:,}" if summary.last_step is not None else "no steps"
    text = Text(clean(summary.run), style="bold")
    ranks = f"{summary.num_ranks:,} ranks, " if summary.num_ranks > 1 else ""
    text.append(
        f"  {STATES[summary.state]}, {steps}, {duration(summary.seconds)}, {ranks}"
        f"{summary.num_tensors:,} tensors, {summary.num_parameters:,} parameters",
        style="not bold",
    )
    return text


def vitals(rows: Iterable[tuple[str, str, RenderableType]]) -> Table:
    """Label, latest value, and a sparkline or a word more, one row a metric."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=8)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table


def _trends(summary: Summary) -> Iterator[tuple[str, str, RenderableType]]:
    for metric, label in LABELS.items():
        trend = summary.trend(metric)
        if trend is not None:
            yield _of(label, trend.source), number(trend.latest), spark_of(metric, trend.values)
    scale = summary.noise_scale
    if scale.identifiable:
        yield _of("noise scale", scale.source), number(scale.value), _range("samples", scale.low, scale.high)
    elif scale.measured:
        yield _of("noise scale", scale.source), "-", "not identifiable from these readings"
    else:
        also = "" if scale.batch_told else ", and watch(..., batch_size=...)"
        yield "noise scale", "-", f"needs two or more backward passes a step{also}"


def _of(label: str, source: str | None) -> str:
    """What is shown, and which samples it comes from: those of different sources are different quantities."""
    return label if source is None else f"{label} ({clean(source)})"


def spark_of(metric: str, values: FloatArray | list[float]) -> Spark:
    """The sparkline that suits a metric."""
    series = np.asarray(values, dtype=np.float64)
    if metric in ("loss", "grad/norm"):  # that these are not a number is not a gap but an alarm
        series = np.where(np.isnan(series), np.inf, series)
    # A spike of the norm is the news, so it may flatten the rest; elsewhere the shape is.
    return Spark(series, robust=metric != "grad/norm")


def _range(unit: str, low: float, high: float) -> str:
    return unit if math.isnan(low) and math.isnan(high) else f"{unit} (95 %: {number(low)} to {number(high)})"


@dataclass(frozen=True)
class LayerTable:
    """The layer table: depth order, intervals only where there is room."""

    rows: Sequence[LayerRow]
    step: int | None
    source: str | None
    batch_size: float | None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= WIDE
        headings = ("grad norm", "spike", "GSNR", "95 % interval", "update/weight")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("layer", overflow="ellipsis", no_wrap=True)
        for heading in headings if wide else ("norm", "spike", "GSNR", "update"):
            table.add_column(heading, justify="right", no_wrap=True)
        left_out = len(self.rows) - MOST_LAYERS
        head = MOST_LAYERS // 2 if left_out > 0 else len(self.rows)
        for at, row in enumerate(self.rows):
            if at < head or at >= head + left_out:
                table.add_row(Text(clean(row.name)), *_cells(row, wide=wide))
            elif at == head:
                table.add_row(Text(f"… {left_out:,} more; gradvitals export has all", style="dim"))
        yield self._title()
        yield table

    def _title(self) -> Text:
        text = f"Layers at step {self.step}, from input to output"
        if self.source:
            at = f" at batch size {number(self.batch_size)}" if self.batch_size is not None else ""
            text += f" (GSNR from {self.source}{at})"
        return Text(text, style="bold")


def _cells(row: LayerRow, *, wide: bool) -> Iterator[Text]:
    yield Text(number(row.grad_norm), style="" if math.isfinite(row.grad_norm) else "bold red")
    yield Text(number(row.spike_ratio), style="yellow" if row.spike_ratio > 5 else "")
    yield Text(number(row.gsnr))
    if wide:
        known = not math.isnan(row.gsnr_low) and not math.isnan(row.gsnr_high)
        yield Text(f"{number(row.gsnr_low)} to {number(row.gsnr_high)}" if known else "-")
    yield Text(number(row.update_ratio))


def _worst_tensors(summary: Summary) -> Iterator[RenderableType]:
    groups: tuple[tuple[str, tuple[Worst, ...]], ...] = (
        ("Lowest GSNR", summary.lowest_gsnr),
        ("Largest spike ratio of the run", summary.largest_spikes),
        ("Largest update/weight", summary.largest_updates),
        ("Non-finite elements where first seen (1: at least one)", summary.nonfinite),
    )
    return (worst_list(title, worst) for title, worst in groups if worst)


def worst_list(title: str, worst: Sequence[Worst]) -> RenderableType:
    """Tensors that stand out in one way, a line each."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(justify="right", no_wrap=True, min_width=8)
    table.add_column(no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for item in worst:
        table.add_row(number(item.value), f"step {item.step}", Text(clean(item.name)))
    return Group(Text(title, style="bold"), table)
