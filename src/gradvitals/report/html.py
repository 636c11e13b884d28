"""A run as one HTML file to attach to an issue or to mail: it opens from disk, without network."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from gradvitals.report.charts import Axis, Mark, bar, heatmap_figure, interval_mark, over_steps, timeline
from gradvitals.report.format import TITLE, capitalized, cut, duration, number, summarize_actions
from gradvitals.report.markup import Html, Part, document, folded, join, table, tag
from gradvitals.report.replay import OnStep
from gradvitals.report.report import Checks, Report
from gradvitals.report.series import Span, read_curves, read_heatmaps, span_of
from gradvitals.report.summary import LARGE_SPIKE, Summary, step_batch
from gradvitals.report.verdict import LABELS, RankedFinding, Verdict
from gradvitals.store.reader import Run
from gradvitals.types import Action, Finding

LEVEL_CLASSES = {"healthy": "fine", "attention": "warning", "unhealthy": "critical"}
SEVERITIES = {"critical": "Critical", "warning": "Warning", "info": "Note"}
MAX_IN_FULL = 40
"""Findings that are shown with everything; further ones take a line each."""
MAX_IN_A_LINE = 200
MAX_ACTIONS = 100
MAX_LAYERS = 200
MAX_RANKS = 256
MAX_OPEN_ROWS = 40
"""A table with more rows is folded."""
NAME = 100

RANK_COLUMNS = {
    "ranks/norm": "Own norm",
    "ranks/norm_ratio": "Over the others'",
    "ranks/step_seconds": "Seconds per step",
    "ranks/replica": "Copies differ",
    "ranks/out_of_step": "Out of step",
    "ranks/nonfinite": "NaN or Inf",
    "ranks/errors": "Errors",
}


def render_html(run: Run, *, on_step: OnStep | None = None) -> str:
    """Returns the report on a run, finished or being written, as a whole HTML document."""
    report = Report(run, on_step=on_step)
    name = cut(run.path.resolve().name or str(run.path), 120)
    sections = [(title, part) for title, part in _sections(report) if part]
    links = [tag("a", title, href=f"#s{at}") for at, (title, _) in enumerate(sections)]
    banner = tag("p", "No readings yet.")
    if run.last_step is not None:
        verdict = report.verdict
        head, colon, rest = cut(verdict.headline, TITLE).partition(":")
        if not colon:
            head, rest = LABELS[verdict.level], verdict.headline
        text = (
            tag("strong", head),
            tag("p", rest.strip()),
            *(tag("p", tag("b", label), ": ", cut(words, TITLE)) for label, words in verdict.remedy.items()),
            tag("p", verdict.counted, class_="dim") if verdict.counted else None,
        )
        banner = tag("div", *text, class_=f"banner {LEVEL_CLASSES[verdict.level]}")
    made = f"{cut(str(run.meta.get('version', '')), 40)} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    return document(
        f"{name}: gradvitals report",
        tag("h1", name),
        tag("p", capitalized(report.summary.about), class_="dim"),
        banner,
        tag("nav", *links, aria_label="Sections") if links else None,
        *(tag("section", tag("h2", title, id=f"s{at}"), part) for at, (title, part) in enumerate(sections)),
        tag("footer", f"Made by gradvitals {made}. Times are in optimizer steps."),
        styles=("page.css", "run_page.css"),
        script="run_page.js",
    )


def _sections(report: Report) -> Iterator[tuple[str, Part]]:
    run, summary = report.run, report.summary
    has_readings, span = run.last_step is not None, span_of(run)
    if has_readings:
        replayed = "Recorded without diagnosis; replayed with the current rules." if report.diagnosed.replayed else None
        yield "Findings", join([tag("p", replayed, class_="dim") if replayed else None, _findings(report.verdict)])
        if report.actions:
            yield "Actions", _actions(report.actions)
    if has_readings and span is not None:
        curves = list(read_curves(run, span))
        numbered = enumerate(report.verdict.findings[:MAX_IN_FULL], 1)  # as in the list of findings
        marks = [Mark(str(at), f.first_step, f.last_step, f.severity, f.title, f"#f{at}") for at, f in numbered]
        lanes = timeline(curves, span, marks=marks, actions=report.actions, batch_size=step_batch(run))
        yield "The run, step by step", lanes if curves else None
        yield "Layers over steps", _heatmaps(run, span)
    if summary.no_layers:
        yield "Layers", tag("p", summary.no_layers)
    elif summary.layers:
        yield f"Layers at step {summary.layers_step:,}", join([_gsnr_note(summary), _layers(summary)])
    yield "Tensors that stand out", _worst_tensors(summary)
    if summary.num_ranks > 1:
        yield f"The {summary.num_ranks:,} ranks", _ranks(run)
    if has_readings:
        yield "Checks", join(_checks(report.checks, report.monitoring))
    dropped = f"{summary.dropped:,} readings were dropped because the disk could not keep up."
    lost = tag("p", dropped, class_="word warning") if summary.dropped else None
    yield "How it was recorded", join([_settings(run.meta, summary), lost])


# -- findings, actions, checks -------------------------------------------------------------------------------------


def _findings(verdict: Verdict) -> Html:
    """Returns every finding, the worst first; resolved ones and routine notes are folded."""
    if not verdict.ranked:
        return tag("p", "No findings.", class_="dim")
    shown = [_finding(item, at, live=verdict.live) for at, item in enumerate(verdict.ranked[:MAX_IN_FULL], 1)]
    others = verdict.ranked[MAX_IN_FULL : MAX_IN_FULL + MAX_IN_A_LINE]
    lines = [tag("li", f"{cut(item.finding.title, 200)} ({item.when(live=verdict.live)})") for item in others]
    rest = len(verdict.ranked) - MAX_IN_FULL - len(others)
    more = f", {rest:,} of them not listed; gradvitals doctor --json has all" if rest > 0 else ""
    fold = folded(f"{len(others) + max(rest, 0):,} more findings{more}", tag("ul", *lines)) if others else None
    return join([tag("ol", *shown, class_="verdict"), fold])


def _finding(item: RankedFinding, at: int, *, live: bool) -> Html:
    finding, severity = item.finding, item.finding.severity
    parts = item.parts(live=live)
    two = (_numbered("Likely causes", parts.pop("Likely cause")), _numbered("Fixes", parts.pop("Fix")))
    facts = {label: "; ".join(cut(text, 200) for text in texts) for label, texts in parts.items()}
    pairs = (join([tag("dt", name), tag("dd", cut(text, TITLE))]) for name, text in facts.items() if text)
    head = tag(
        "summary",
        tag("span", str(at), class_="flag", aria_hidden="true"),
        tag("span", item.label.replace(severity, SEVERITIES[severity]), class_="tag"),
        tag("b", cut(finding.title, TITLE)),
        tag("code", cut(finding.id, 60)),
    )
    content = (tag("dl", *pairs, class_="about"), tag("div", *two, class_="two"))
    body = tag("details", head, *content, open="open" if item.is_open and not item.is_routine else None)
    return tag("li", body, class_=f"{severity} {'open' if item.is_open else 'over'}", id=f"f{at}")


def _numbered(title: str, texts: Sequence[str]) -> Html | None:
    if not texts:
        return None
    return tag("div", tag("h4", title), tag("ol", *(tag("li", cut(text, TITLE)) for text in texts[:8])))


def _actions(actions: Sequence[Action]) -> Html:
    first, *others = summarize_actions(actions).splitlines()
    rows = []
    for action in actions[-MAX_ACTIONS:]:
        why = tag("span", cut(("" if action.taken else "not taken: ") + action.reason, 300), class_="left")
        rows.append([cut(action.kind.replace("_", " "), 60), f"{action.step:,}", why, cut(action.finding, 60)])
    title = f"The last {len(rows)} actions" if len(actions) > len(rows) else f"All actions ({len(rows)})"
    more = tag("ul", *(tag("li", cut(line.strip(), TITLE)) for line in others)) if others else None
    listed = folded(title, table(["Action", "Step", "Why", "Finding"], rows), opened=len(actions) <= 8)
    return join([tag("p", f"{capitalized(first)}."), more, listed])


def _checks(checks: Checks, monitoring: Sequence[Finding]) -> Iterator[Html]:
    if checks.passed:
        items = [tag("li", text) for text in checks.passed.values()]
        yield folded(f"{checks.passed_title} ({len(items)})", tag("ul", *items, class_="columns"))
    if checks.skipped:
        items = [tag("li", cut(line, 2 * TITLE)) for line in checks.skipped_lines]
        yield folded(f"Checks skipped, and why ({checks.num_skipped})", tag("ul", *items))
    if monitoring:
        shown = monitoring[:MAX_IN_A_LINE]
        items = [tag("li", f"{cut(finding.title, TITLE)} (step {finding.first_step:,})") for finding in shown]
        yield folded(f"Monitoring ({len(items)})", tag("ul", *items), opened=True)


# -- charts and tables ---------------------------------------------------------------------------------------------


def _heatmaps(run: Run, span: Span) -> Html | None:
    figures = [part for found in read_heatmaps(run, span) if (part := heatmap_figure(found)) is not None]
    if not figures:
        return None
    text = "Input at the top, output at the bottom. Colors are logarithmic; a reading lasts until the next one."
    return join([tag("p", text, class_="dim"), over_steps(figures, span)])


def _gsnr_note(summary: Summary) -> Html | None:
    if not summary.shows_gsnr:
        return None
    caveat = f" Note: {summary.gsnr_caveat}." if summary.gsnr_caveat else ""
    return tag("p", f"{summary.gsnr_origin}. A dashed line is at GSNR 1.{caveat}", class_="dim")


def _layers(summary: Summary) -> Html:
    rows = summary.layers[:MAX_LAYERS]
    largest = max((row.grad_norm for row in rows if math.isfinite(row.grad_norm)), default=0.0)
    known = [value for row in rows for value in (row.gsnr, row.gsnr_low, row.gsnr_high) if value > 0]
    axis = Axis.over(known, 4.0, 116.0, logarithmic=True)
    cells: list[list[Part]] = []
    for row in rows:
        norm: Part = number(row.grad_norm)
        if math.isfinite(row.grad_norm):
            norm = bar(row.grad_norm, largest, number(row.grad_norm))
        elif math.isinf(row.grad_norm):
            norm = tag("b", "Inf", class_="word critical")
        spike = tag("span", number(row.spike_ratio), class_="word warning" if row.spike_ratio > LARGE_SPIKE else None)
        unknown = math.isnan(row.gsnr_low) or math.isnan(row.gsnr_high)
        ends = "-" if unknown else interval_mark(row.gsnr, row.gsnr_low, row.gsnr_high, axis)
        signal = [number(row.gsnr), ends] if summary.shows_gsnr else []
        cells.append([_name(row.name), norm, spike, *signal, number(row.update_ratio)])
    heads = ["GSNR", "95% interval"] if summary.shows_gsnr else []
    whole = table(["Layer", "Gradient norm", "Spike ratio", *heads, "Update over weight"], cells)
    return _unless_long(whole, "layers", len(rows), len(summary.layers))


def _worst_tensors(summary: Summary) -> Html | None:
    shown = []
    for found in summary.worst:
        rows = table(
            ["Tensor", "Value", "Step"],
            ([_name(row.name), number(row.value), f"{row.step:,}"] for row in found.rows),
        )
        remark = tag("p", found.remark, class_="dim")
        shown.append(tag("div", tag("h3", found.title), remark, rows if found.rows else None))
    return tag("div", *shown, class_="pairs") if shown else None


def _name(name: str) -> Html:
    return tag("span", cut(name, NAME), title=cut(name, 300))


def _ranks(run: Run) -> Html | None:
    """Returns a row per rank, with its latest readings; None if no ranks were compared."""
    count = len(run.names("ranks"))
    columns = [metric for metric in RANK_COLUMNS if metric in run.metrics("ranks")]
    if not count or not columns:
        return None
    values = []
    for metric in columns:  # the last number that each rank has
        steps, _ = run.times(metric, kind="ranks")
        latest = np.full(count, np.nan)
        for row in run.matrix(metric, "ranks", since=int(steps[-200:][0]) - 1)[1] if steps.size else ():
            latest = np.where(np.isnan(row), latest, row)
        values.append(latest)
    shown = min(count, MAX_RANKS)
    rows = ([f"rank {rank}", *(number(float(column[rank])) for column in values)] for rank in range(shown))
    whole = table(["Rank", *(RANK_COLUMNS[metric] for metric in columns)], rows)
    return _unless_long(whole, "ranks", shown, count)


def _unless_long(whole: Html, what: str, shown: int, count: int) -> Html:
    """Returns a table, folded if it is long, and how much of it is not shown."""
    more = (
        tag("p", f"The first {shown:,} of {count:,} {what}; gradvitals export has all.", class_="dim")
        if count > shown
        else None
    )
    return join([whole if shown <= MAX_OPEN_ROWS else folded(f"All {shown:,} {what}", whole), more])


def _settings(meta: Mapping[str, Any], summary: Summary) -> Html:
    """Returns how the run was recorded, without its path and machine: a report is made to be sent."""

    def pairs(rows: Iterable[tuple[str, str]]) -> Html:
        cells = ([cut(name, 60), tag("span", cut(text, 300), class_="left")] for name, text in rows)
        return table(["Setting", "Value"], cells, numbers_from=2)

    return join([pairs(_about(meta, summary)), folded("Monitoring settings", pairs(_known(meta.get("config"))))])


def _about(meta: Mapping[str, Any], summary: Summary) -> Iterator[tuple[str, str]]:
    started = meta.get("started_at")
    if isinstance(started, (int, float)):
        yield "started", f"{datetime.fromtimestamp(started, UTC):%Y-%m-%d %H:%M} UTC, for {duration(summary.seconds)}"
    yield "processes", f"{summary.num_ranks:,}"
    yield "watched", f"{summary.num_tensors:,} tensors, {summary.num_parameters:,} parameters"
    for name, key in (("gradvitals", "version"), ("torch", "torch")):
        if key in meta:
            yield name, str(meta[key])
    yield from ((key, text) for key, text in _known(meta.get("facts")) if key != "world_size")
    yield from _known(meta.get("extra"))


def _known(content: Any) -> Iterator[tuple[str, str]]:
    for key, value in list(content.items())[:60] if isinstance(content, Mapping) else ():
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(item, str) for item in texts):
            value = ", ".join(texts)
        elif value is not None:
            value = json.dumps(value, ensure_ascii=False)
        if value not in (None, "{}", "") and key != "extra":
            yield str(key), value
