"""Reports for the terminal. Names and titles come from outside: they are printed as text, never as markup."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import ParamSpec

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from gradvitals.advise import Advice, Advised, Confidence
from gradvitals.places import relative
from gradvitals.report.catalog import Entry, name_of
from gradvitals.report.format import (
    ASCII_BLOCKS,
    BLOCKS,
    TITLE,
    ago,
    capitalized,
    clean,
    cut,
    fix_snippet,
    in_sentence,
    latest_actions,
    number,
    plural,
    sparkline,
    summarize_actions,
    where,
)
from gradvitals.report.listing import RunLine
from gradvitals.report.replay import UNDIAGNOSED, was_diagnosed
from gradvitals.report.report import Report
from gradvitals.report.state import restarts
from gradvitals.report.summary import LARGE_SPIKE, Summary, WorstList
from gradvitals.report.verdict import LABELS, Level, RankedFinding, Verdict
from gradvitals.types import Action, Finding, FloatArray, Severity

P = ParamSpec("P")

STYLES: dict[Severity, str] = {"critical": "bold red", "warning": "yellow", "info": "cyan"}
LEVEL_STYLES: dict[Level, str] = {"healthy": "bold green", "attention": "bold yellow", "unhealthy": "bold red"}
CONFIDENCE_STYLES: dict[Confidence, str] = {"good": "green", "fair": "cyan", "low": "yellow", "none": "dim"}
METRIC_LABELS = {
    "loss": "loss",
    "grad/norm": "gradient norm",
    "gsnr": "GSNR",
    "lr": "learning rate",
    "vrgd/mean": "VRGD factor",
}
ADVICE_TITLES = {
    "learning_rate": "Learning rate",
    "max_grad_norm": "Gradient clipping",
    "batch_size": "Batch size",
    "warmup": "Warmup",
    "decay": "Learning-rate decay",
    "layers": "Layers",
}

LABEL_WIDTH = 16
"""Columns for the label of each part of a finding."""
BULLET = "  - "
EVIDENCE = 3
"""Observations that doctor shows without --verbose."""
LIKELIEST = 3
"""Causes and fixes of a finding; one of each for a note and for a finding that no longer counts."""
OTHER_FINDINGS = 4
"""Findings beside the worst one that doctor names without --verbose."""
NAME_WIDTH = 16
"""Characters that a name gets before a column is dropped."""
MAX_LAYERS = 400
"""Rows of the layer table; with more, those in the middle are skipped."""


def grouped(parts: Callable[P, Iterator[RenderableType]]) -> Callable[P, Group]:
    """Makes a function that yields the parts of a report one that returns the report."""

    @wraps(parts)
    def render(*args: P.args, **options: P.kwargs) -> Group:
        return Group(*parts(*args, **options))

    return render


@dataclass(frozen=True)
class Paragraph:
    """A wrapped paragraph after a label or a bullet; its further lines line up with the first."""

    head: str
    text: str | Text
    style: str = ""
    """Of the head."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Wraps at the width at hand, without trailing blanks."""
        text = self.text if isinstance(self.text, Text) else Text(self.text)
        lines = text.wrap(console, max(1, options.max_width - len(self.head)))
        for i, line in enumerate(lines):
            head = (" " * len(self.head), "") if i else (self.head, self.style)
            whole = Text.assemble(head, line)
            whole.rstrip()
            yield whole


@dataclass(frozen=True)
class Spark:
    """A sparkline as wide as the space it gets, in ASCII if the terminal needs it."""

    values: FloatArray | list[float]
    robust: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws at the width at hand."""
        blocks = ASCII_BLOCKS if options.ascii_only else BLOCKS
        yield Text(sparkline(self.values, min(options.max_width, 60), robust=self.robust, blocks=blocks), no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Takes from one character to one per value, sixty at most."""
        return Measurement(1, max(1, min(options.max_width, 60, len(self.values))))


@dataclass
class FittedTable:
    """A table that drops its less important columns, the last one first, if the window is narrow."""

    title: str
    columns: Sequence[str]
    """The first one holds names, which are folded if they are long."""
    left: Sequence[str] = ()
    """Columns aligned to the left, beside the first."""
    optional: Sequence[str] = ()
    rows: list[list[Text]] = field(default_factory=list)

    def add(self, *cells: str | Text) -> None:
        """Adds a row."""
        self.rows.append([cell if isinstance(cell, Text) else Text(clean(cell)) for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Renders the table as wide as there is room for."""
        widths = [
            max(map(cell_len, (name, *(row[at].plain for row in self.rows)))) for at, name in enumerate(self.columns)
        ]
        name_width = min(widths[0], NAME_WIDTH)
        kept, optional = list(range(len(self.columns))), list(self.optional)
        while optional and sum(widths[at] + 3 for at in kept[1:]) > options.max_width - 2 - name_width:
            kept.remove(list(self.columns).index(optional.pop()))
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(self.columns[0], overflow="fold", min_width=name_width)
        for at in kept[1:]:
            left = self.columns[at] in self.left
            table.add_column(self.columns[at], justify="left" if left else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*(row[at] for at in kept))
        yield Text(self.title, style="bold")
        yield table


# -- gradvitals doctor ---------------------------------------------------------------------------------------------


@grouped
def render_doctor(report: Report, *, verbose: bool = False, all_checks: bool = False) -> Iterator[RenderableType]:
    """Returns what `gradvitals doctor` prints: the worst finding, or on demand every finding or also every check."""
    yield headline(report.verdict)
    yield from _doctor_in_full(report, all_checks) if verbose or all_checks else _doctor_in_short(report)


def _doctor_in_short(report: Report) -> Iterator[RenderableType]:
    verdict = report.verdict
    if report.diagnosed.replayed:
        yield Paragraph("", Text(f"Replayed with the current rules ({report.diagnosed.replayed}).", style="dim"))
    subject = verdict.subject  # the headline has its title
    if subject is not None:
        yield from _labeled("Likely cause", subject.finding.causes[:1])
        yield from _labeled("Fix", subject.finding.fixes[:1])
    if subject is not None and verdict.level != "healthy":
        place = [subject.place] if subject.place else []
        yield from _labeled("Evidence", ["; ".join([*subject.evidence[:EVIDENCE], *place])])
        caused = verdict.consequences()
        if caused:
            yield Paragraph("  Also caused by this: ", clean(verdict.also), "bold")
        rest = [item for item in verdict.ranked[1:] if item not in caused and item.weight != "info"]
        for item in rest[:OTHER_FINDINGS]:
            yield _heading(item, routine=True, suffix=f"; {item.when(live=verdict.live)}")
        if len(rest) > OTHER_FINDINGS:
            yield Text(f"and {len(rest) - OTHER_FINDINGS} more findings")
    counting = (item.finding.evidence.get("seen") for item in verdict.ranked if item.weight != "info")
    if report.caveat and any("source" in (seen or {}) for seen in counting):  # the verdict rests on a GSNR
        yield Paragraph("Note: ", clean(report.caveat), "yellow")
    if report.actions:
        yield Paragraph("", clean(f"{capitalized(summarize_actions(report.actions).splitlines()[0])}."))
    for finding in report.monitoring:
        if finding.severity != "info":
            yield Paragraph("Monitoring: ", clean(f"{finding.title} (step {finding.first_step:,})"), "yellow")
    counted = "; ".join(filter(None, (verdict.uncounted, report.checks.counted)))
    yield Paragraph("", Text(f"{clean(relative(report.run.path))}: {clean(counted)} (-v for more)", "dim"))


def _labeled(label: str, texts: Sequence[str], *, numbered: bool = False) -> Iterator[RenderableType]:
    """Yields texts under a label, with the lines to paste if they are fixes that have any."""
    for i, text in enumerate(filter(None, texts)):
        head = f"  {'' if i else label}".ljust(LABEL_WIDTH)
        yield Paragraph(f"{head}{i + 1}. " if numbered and len(texts) > 1 else head, clean(text), "bold")
        for line in fix_snippet(text).splitlines():
            yield Text(f"    {clean(line)}", style="green", no_wrap=True, overflow="ignore")


def _doctor_in_full(report: Report, all_checks: bool) -> Iterator[RenderableType]:
    verdict, checks = report.verdict, report.checks
    origin = clean(str(report.run.path))
    origin += f": {clean(verdict.uncounted)}" if verdict.uncounted else ""
    if report.diagnosed.replayed:
        origin += (
            f", replayed with the current rules ({report.diagnosed.replayed}). A run stores fewer tensor readings than "
            "it takes, so some findings come later, or not at all."
        )
    yield Paragraph("", Text(origin, style="dim"))
    for item in verdict.ranked:
        yield from (Text(), finding_in_full(item, live=verdict.live, routine=all_checks))
    if verdict.ranked:
        hint = "`gradvitals doctor --explain RULE` lists every cause and fix of a finding."
        yield from (Text(), Paragraph("", Text(hint, "dim")))
    if report.caveat:
        yield from (Text(), Paragraph("Note: ", clean(report.caveat), "yellow"))
    found = restarts(report.run)
    if len(found) > 1:  # the headline has a single one
        yield from (Text(), Text("Restarts", style="bold"))
        for restart in found:
            yield Paragraph(BULLET, clean(f"at step {restart.step:,}; before that: {restart.why}"))
    if report.actions:
        yield from (Text(), *actions_section(report.actions))
    yield Text()
    if all_checks:
        yield Text(f"{checks.passed_title} ({len(checks.passed)})", style="bold")
        yield from (Paragraph(BULLET, clean(text)) for text in checks.passed.values())
        yield from (Text(), Text(f"Checks skipped ({checks.num_skipped})", style="bold"))
        yield from (Paragraph(BULLET, clean(line)) for line in checks.skipped_lines)
    else:
        yield Paragraph("", Text.assemble(checks.counted, (" (--all to list them)", "dim")))
    if report.monitoring:
        yield from (Text(), *monitoring_section(report.monitoring))


@grouped
def finding_in_full(item: RankedFinding, *, live: bool, routine: bool = False) -> Iterator[RenderableType]:
    """Returns where, when, evidence, likely causes and fixes; a routine note takes one line unless `routine`."""
    yield _heading(item, routine=routine)
    if item.is_routine and not routine:
        return
    for label, texts in item.parts(live=live, limit=LIKELIEST if item.weight != "info" else 1).items():
        yield from _labeled(label, texts, numbered=label in ("Likely cause", "Fix"))


@grouped
def finding_in_short(item: RankedFinding, *, live: bool) -> Iterator[RenderableType]:
    """Returns a finding in a few lines: what, where and when, and the first fix."""
    yield _heading(item)
    if item.is_routine:
        return
    place = f"in {where(item.finding, 2)}; " if item.place else ""
    fixes = [text if item.finding.follows else f"Fix: {text}" for text in item.fixes[:1]]
    yield from (Paragraph("  ", clean(line)) for line in (f"{place}{item.when(live=live)}", *fixes))


def headline(verdict: Verdict, *, counted: bool = False) -> RenderableType:
    """Returns the headline of a verdict, its first words in color, and on demand what it counts below."""
    head, colon, rest = clean(verdict.headline).partition(":")
    line = Paragraph("", Text.assemble((head + colon, LEVEL_STYLES[verdict.level]), rest))
    return Group(line, Text(clean(verdict.uncounted), "dim")) if counted and verdict.uncounted else line


def actions_section(actions: Sequence[Action]) -> Iterator[RenderableType]:
    """Yields what a Guard or a schedule did; nothing if there was neither."""
    if actions:
        first, *others = summarize_actions(actions).splitlines()
        yield Text(clean(capitalized(first)), style="bold")
        yield from (Paragraph(BULLET, clean(line.strip())) for line in (*others, *latest_actions(actions)))


def monitoring_section(findings: Sequence[Finding]) -> Iterator[RenderableType]:
    """Yields what gradvitals reports about itself."""
    if findings:
        yield Text("Monitoring", style="bold")
    for finding in findings:
        fix = f"; fix: {finding.fixes[0]}" if finding.fixes else ""
        yield Paragraph(BULLET, clean(f"{finding.title} (step {finding.first_step:,}){fix}"))


def _heading(item: RankedFinding, *, routine: bool = False, suffix: str = "") -> RenderableType:
    """Returns severity, title and id; of a routine note its name, unless `routine`."""
    finding, style = item.finding, STYLES[item.finding.severity] if item.is_open else "dim"
    title = (clean(cut(finding.title, TITLE)), "bold")
    if item.is_routine and not routine:
        title = (f"{in_sentence(name_of(finding.id))}, as in nearly every healthy run", "")
    whole = Text.assemble(title, (f" [{clean(cut(finding.id))}]", "dim"), clean(suffix))
    return Paragraph(f"{item.label}: ", whole, style)


@grouped
def render_rules(entries: Sequence[Entry]) -> Iterator[RenderableType]:
    """Returns every rule by its id, with its pattern."""
    width = max((len(clean(entry.id)) for entry in entries), default=0) + 2
    yield from (Paragraph(clean(entry.id).ljust(width), clean(entry.pattern), "bold") for entry in entries)


@grouped
def render_rule(entry: Entry, *, verbose: bool = False) -> Iterator[RenderableType]:
    """Returns one rule: what it looks for, causes and fixes; `verbose` adds its settings."""
    yield Text.assemble((clean(entry.name), "bold"), (f"  [{clean(entry.id)}]", "dim"))
    yield Paragraph("", clean(entry.pattern))
    yield Paragraph("", entry.conditions.replace("`", ""))
    for title, texts in (("Likely causes", entry.causes), ("Fixes", entry.fixes)):
        if texts:
            yield from (Text(), Text(title, style="bold"))
            yield from (Paragraph(f"  {i}. ", clean(text)) for i, text in enumerate(texts, 1))
    if entry.settings and not verbose:
        yield from (Text(), Text(f"{plural(len(entry.settings), 'setting')} (-v to list them)", style="dim"))
    elif entry.settings:
        yield from (Text(), Text("Settings and their defaults", style="bold"))
        heads = [f"  {setting.name} = {setting.default!r}" for setting in entry.settings]
        width = max(map(len, heads)) + 2
        for head, setting in zip(heads, entry.settings, strict=True):
            yield Paragraph(head.ljust(width), clean(setting.text))
        first = entry.settings[0]
        change = f'Config(rules={{"{entry.id}": {{"{first.name}": {first.default!r}}}}})'
        yield from (Text(), Paragraph("", f"To change one: {change}"))
    if entry.reference:
        yield from (Text(), Paragraph("", f"Reference: {clean(entry.reference)}"))


# -- gradvitals report ---------------------------------------------------------------------------------------------


@grouped
def render_report(report: Report) -> Iterator[RenderableType]:
    """Returns what `gradvitals report` prints, ready for `rich.console.Console.print`."""
    yield run_in_numbers(report.summary, report.recorded_verdict, diagnosed=was_diagnosed(report.run.meta))
    yield from actions_section(report.actions)
    yield from monitoring_section(report.monitoring)
    if dropped := report.summary.dropped:
        yield Text(f"{dropped:,} readings were dropped because the disk could not keep up.", style="yellow")


@grouped
def run_in_numbers(
    summary: Summary, verdict: Verdict | None, *, diagnosed: bool = True, most: int | None = None
) -> Iterator[RenderableType]:
    """Returns the verdict, then vital signs, at most so many findings, layers, and tensors that stand out."""
    yield Text(clean(summary.run), style="bold").append(f"  {summary.about}", style="not bold")
    if summary.last_step is None:
        yield Text("No readings yet.")
    else:
        undiagnosed = Paragraph("", Text(UNDIAGNOSED, "dim"))
        yield headline(verdict, counted=True) if verdict is not None and diagnosed else undiagnosed
        yield from (Text(), vitals_table(summary))
    if summary.gsnr_caveat:
        yield Paragraph("Note: ", clean(summary.gsnr_caveat), "yellow")
    if verdict is not None and verdict.ranked:
        yield Text()
        yield from (finding_in_short(item, live=verdict.live) for item in verdict.ranked[:most])
        hidden = f"and {len(verdict.ranked) - most} more; " if most and len(verdict.ranked) > most else ""
        yield Paragraph("", Text(f"{hidden}`gradvitals doctor -v` has the evidence and the causes.", style="dim"))
    yield Text()
    if summary.layers:
        yield layer_table(summary)
    for worst in summary.worst:
        yield from (worst_list(worst), Text())


def vitals_table(summary: Summary) -> Table:
    """Returns a table with a row per metric: label, latest value, and a sparkline or a remark."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=8)
    table.add_column()

    def labeled(label: str, source: str | None) -> str:  # values of different sources are different quantities
        return label if source is None else f"{label} ({clean(source)})"

    for metric, label in METRIC_LABELS.items():
        trend = summary.trend(metric)
        if trend is not None:
            values = np.asarray(trend.values, dtype=np.float64)
            if metric in ("loss", "grad/norm"):  # NaN of these is not a gap but an alarm
                values = np.where(np.isnan(values), np.inf, values)
            # A spike of the norm is the news, so it may flatten the rest; for other metrics the shape is.
            spark = Spark(values, robust=metric != "grad/norm")
            table.add_row(labeled(label, trend.source), number(trend.latest), spark)
    scale = summary.noise_scale
    value, remark = number(scale.value), "not identifiable from these readings"
    if not scale.measured:
        also = "" if scale.batch_known else ", and watch(..., batch_size=...)"
        remark = f"needs two or more backward passes per step{also}"
    elif scale.identifiable:
        unknown = math.isnan(scale.low) and math.isnan(scale.high)
        remark = "samples" + ("" if unknown else f" (95%: {number(scale.low)} to {number(scale.high)})")
    table.add_row(labeled("noise scale", scale.source), value if scale.identifiable else "-", remark)
    return table


def layer_table(summary: Summary) -> RenderableType:
    """Returns the layers in depth order, with intervals if there is room."""
    rows = summary.layers
    title = f"Layers at step {summary.layers_step}, from input to output"
    if summary.no_layers:
        return Group(Text(summary.no_layers, "bold"), Text())
    title += f" ({summary.gsnr_origin})" if summary.shows_gsnr else ""
    gsnr = ("GSNR", "95% interval") if summary.shows_gsnr else ()
    columns = ("layer", "grad norm", "spike", *gsnr, "update/weight")
    table = FittedTable(title, columns, optional=("update/weight", "spike", *gsnr[1:]))
    hidden = max(0, len(rows) - MAX_LAYERS)
    shown = [*rows[: MAX_LAYERS // 2], *rows[MAX_LAYERS // 2 + hidden :]] if hidden else rows
    for at, row in enumerate(shown):
        if hidden and at == MAX_LAYERS // 2:
            table.add(f"… {hidden:,} more; gradvitals export has all", *[""] * (len(columns) - 1))
        known = not math.isnan(row.gsnr_low) and not math.isnan(row.gsnr_high)
        signal = (number(row.gsnr), f"{number(row.gsnr_low)} to {number(row.gsnr_high)}" if known else "-")
        table.add(
            row.name,
            Text(number(row.grad_norm), style="" if math.isfinite(row.grad_norm) else "bold red"),
            Text(number(row.spike_ratio), style="yellow" if row.spike_ratio > LARGE_SPIKE else ""),
            *signal[: len(gsnr)],
            number(row.update_ratio),
        )
    return table


def worst_list(found: WorstList) -> RenderableType:
    """Returns the tensors that stand out in one way, a line each."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(justify="right", no_wrap=True, min_width=8)
    table.add_column(no_wrap=True)
    table.add_column(overflow="ellipsis", no_wrap=True)
    for row in found.rows:
        table.add_row(number(row.value), f"step {row.step}", Text(clean(row.name)))
    head = Text.assemble((found.title, "bold"), (f", {found.remark}", "dim"))
    return Group(head, table) if found.rows else Paragraph("", head)


# -- gradvitals demo ---------------------------------------------------------------------------------------------

CURVE_COLUMNS, CURVE_ROWS = 30, 8
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The dots of a Braille character, row by row: two columns and four rows of a small picture."""


@dataclass(frozen=True)
class Curves:
    """Curves side by side on one scale, drawn with dots; in ASCII if the terminal needs it."""

    curves: Sequence[FloatArray]
    titles: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draws them in two columns."""
        known = np.concatenate([curve[np.isfinite(curve)] for curve in self.curves])
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
        for title in self.titles:
            table.add_column(clean(title), no_wrap=True)
        drawn = [_dots(curve, low, high) for curve in self.curves]
        for row in range(CURVE_ROWS):
            label = f"{high:6.2f} " if row == 0 else f"{low:6.2f} " if row == CURVE_ROWS - 1 else " " * 7
            lines = [
                "".join(("*" if cell else " ") if options.ascii_only else chr(BRAILLE + cell) for cell in dots[row])
                for dots in drawn
            ]
            table.add_row(*(Text.assemble((label, "dim"), (line, "cyan")) for line in lines))
        ends = (f"{'':7}step 0{f'step {len(curve) - 1:,}':>{CURVE_COLUMNS - 6}}" for curve in self.curves)
        table.add_row(*(Text(end, "dim") for end in ends))
        yield table


def _dots(values: FloatArray, low: float, high: float) -> list[list[int]]:
    """Returns the dots of a line, as bits of Braille characters."""
    columns = min(2 * CURVE_COLUMNS, len(values))
    cells = [[0] * CURVE_COLUMNS for _ in range(CURVE_ROWS)]
    before: int | None = None
    for place, part in enumerate(np.array_split(values, columns) if columns else ()):
        seen = part[np.isfinite(part)]
        if not seen.size:
            before = None
            continue
        x = place * 2 * CURVE_COLUMNS // columns
        y = round((1 - (float(seen.mean()) - low) / max(high - low, 1e-12)) * (4 * CURVE_ROWS - 1))
        start = y if before is None else before + (y > before) - (y < before)
        for dot in range(min(start, y), max(start, y) + 1):
            cells[dot // 4][x // 2] |= DOTS[dot % 4][x % 2]
        before = y
    return cells


# -- gradvitals ls -----------------------------------------------------------------------------------------------


def render_list(lines: Sequence[RunLine], *, hidden: int = 0, width: int = 80) -> RenderableType:
    """Returns what `gradvitals ls` prints: a light, name, steps, loss, age and the worst finding of each run."""
    longest = max(30, width - 50)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("run", no_wrap=True, overflow="ellipsis", max_width=longest)
    for name in ("steps", "loss", "age"):
        table.add_column(name, justify="right", no_wrap=True, min_width=5)
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    for line in lines:
        light, style = ("●", LEVEL_STYLES[line.level]) if line.level else ("○", "dim")
        label = LABELS[line.level] if line.level else "Unknown"
        age = "live" if line.state == "running" else ago(line.age)
        loss = "-" if line.loss is None else number(line.loss, missing="NaN")
        text = Text.assemble((label, style), clean(f": {line.short or line.text}" if line.text else ""))
        path = clean(line.path)
        if len(path) > longest:  # shortened at its start: runs in one folder differ at the end
            end = path[1 - longest :]
            path = f"…{end[max(end.find('/'), 0) :]}"
        table.add_row(Text(light, style), Text(path), f"{line.steps:,}", loss, age, text)
    more = [Text(f"and {hidden:,} more (-n 0 for all)", "dim")] if hidden else []
    return Group(table, *more)


# -- gradvitals advise ---------------------------------------------------------------------------------------------


@grouped
def render_advice(advised: Advised, *, verbose: bool = False) -> Iterator[RenderableType]:
    """Returns what `gradvitals advise` prints; `verbose` adds the evidence."""
    if advised.root is not None:
        title, name = clean(cut(advised.root.title, TITLE)), clean(cut(advised.root.id))
        yield Paragraph("", Text.assemble(("First: ", "bold yellow"), (title, "bold"), (f" [{name}]", "dim")))
        yield from (*_labeled("Fix", advised.root.fixes[:1]), Text())
    count = sum(advice.can_tell for advice in advised.pieces)
    steps = f"{plural(advised.steps, 'step')}{' so far' if advised.live else ''}"
    head = f"Advice on {count} of {len(advised.pieces)} settings"
    yield Paragraph("", Text.assemble((head, "bold"), f", from {steps}."))
    yield Paragraph("", Text(clean(advised.run), style="dim"))
    answers = Counter(advice.answer for advice in advised.pieces if not advice.can_tell)
    shared = {answer for answer, count in answers.items() if count > 1 and not verbose}
    for advice in advised.pieces:
        if advice.can_tell or advice.answer not in shared:
            yield from (Text(), *_advice(advice, verbose=verbose))
    for answer in shared:
        topics = [advice.topic for advice in advised.pieces if advice.answer == answer]
        first, *others = (ADVICE_TITLES.get(topic, topic) for topic in topics)
        yield from (Text(), Text(", ".join([first, *map(in_sentence, others)]), style="bold dim"))
        yield Paragraph("  ", clean(answer))


def _advice(advice: Advice, *, verbose: bool) -> Iterator[RenderableType]:
    yield Text(ADVICE_TITLES.get(advice.topic, advice.topic), style="bold" if advice.can_tell else "bold dim")
    yield Paragraph("  ", clean(advice.answer))
    if advice.can_tell:
        because = f": {advice.because}" if advice.because else ""
        confidence = Text.assemble((advice.confidence, CONFIDENCE_STYLES[advice.confidence]), clean(because))
        yield Paragraph("  Confidence".ljust(LABEL_WIDTH), confidence, "bold")
    if verbose:
        yield from _labeled("Evidence", [figure.with_steps for figure in advice.figures])
        yield from _labeled("Note", advice.notes)
