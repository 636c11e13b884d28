"""A run in a notebook: the verdict, small pictures of the trends, and what was found. Styles are on the elements.

The theme of a notebook is not known here, so words and lines take the colour of the text around them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradvitals.errors import GradvitalsError
from gradvitals.show.again import was_diagnosed
from gradvitals.show.checkup import judge_run, num_ranks
from gradvitals.show.curves import Curve, read_curves, span_of
from gradvitals.show.ending import state_of
from gradvitals.show.findings import TITLE
from gradvitals.show.html import Html, Part, folded, tag
from gradvitals.show.svg import Axis
from gradvitals.show.terminal import STATES
from gradvitals.show.text import cut, number
from gradvitals.show.timeline import curve_parts, value_axis
from gradvitals.show.verdict import LEVELS, Weighed, when
from gradvitals.store.reader import Run, open_run

FINDINGS = 5
COLUMNS = 160
WIDTH, HEIGHT = 180, 40
COLOURS = {"critical": "#e5484d", "warning": "#d9822b", "info": "#3b82f6"}
FINE = "#2f9e5b"
LINE = "#3b82f6"
DIM = "opacity:.7;font-size:12px"


def display(path: Path | None, otherwise: str) -> str:
    """The run in a folder as HTML; the given words where there is none that can be read."""
    if path is not None:
        try:
            with open_run(path) as run:
                return run_html(run)
        except (GradvitalsError, OSError):
            pass
    return str(tag("pre", otherwise))


def run_html(run: Run) -> str:
    """A run as what a notebook shows of it."""
    span = span_of(run)
    findings: list[Part] = []
    pictures: list[Part] = []
    colour, line = "currentColor", "No readings yet."
    if span is not None:
        judged = was_diagnosed(run.meta)
        verdict = judge_run(run, run.findings())
        level = next(severity for severity, level in LEVELS.items() if level == verdict.level)
        colour = COLOURS[level] if level != "info" else FINE
        line = verdict.line if judged else "Recorded without diagnosis; gradvitals doctor judges what was kept."
        colour = colour if judged else "currentColor"
        findings = [_finding(item, live=verdict.live) for item in verdict.findings[:FINDINGS]]
        more = len(verdict.findings) - FINDINGS
        if more > 0:
            findings.append(tag("li", f"and {more:,} more; run.findings() has all", style=DIM))
        pictures = [_cell(curve, span.first, span.last) for curve in read_curves(run, span, COLUMNS)]
    head = tag("div", tag("b", cut(run.path.name or str(run.path))), " ", tag("span", _about(run), style=DIM))
    words = tag("div", cut(line, TITLE), style=f"border-left:4px solid {colour};padding:2px 10px;margin:6px 0")
    row = tag("div", *pictures, style="display:flex;flex-wrap:wrap;gap:6px 22px;margin:8px 0") if pictures else None
    listed = tag("ul", *findings, style="margin:4px 0;padding-left:20px") if findings else None
    fold = folded(f"Findings ({len(findings)})", listed, opened=len(findings) <= 3) if listed else None
    return str(tag("div", head, words, row, fold, style="font:14px/1.45 system-ui,sans-serif;max-width:1000px"))


def _about(run: Run) -> str:
    last = run.last_step
    steps = "no steps" if last is None else f"step {last:,}"
    ranks = num_ranks(run.meta)
    return f"{STATES[state_of(run)]}, {steps}, {len(run.tensors):,} tensors{f', {ranks:,} ranks' if ranks > 1 else ''}"


def _cell(curve: Curve, first: int, last: int) -> Html:
    """One metric: its name, its latest value, and a small curve."""
    xs = Axis(first, max(last, first + 1), 0.0, float(WIDTH))
    ys = value_axis(curve, HEIGHT - 2.0, 2.0)
    styles = {"curve": {"fill": "none", "stroke": LINE, "stroke_width": 1.4}, "band": {"fill": LINE, "opacity": 0.2}}
    styles["range"] = styles["band"]
    styles["dot"] = {**styles["curve"], "stroke_width": 4.0, "stroke_linecap": "round"}
    styles["broken"] = {"fill": COLOURS["critical"], "opacity": 0.5}
    parts = [tag(kind, **shape, **styles[role]) for kind, role, shape in curve_parts(curve, xs, ys, float(HEIGHT))]
    box = f"0 0 {WIDTH} {HEIGHT}"
    words = f"{curve.title}: {number(curve.latest)}"
    svg = tag("svg", *parts, viewBox=box, width=WIDTH, height=HEIGHT, role="img", aria_label=words)
    broken = bool(curve.broken) and not np.isfinite(curve.latest)
    value = tag(
        "b",
        "not a number" if broken else number(curve.latest),
        style=f"color:{COLOURS['critical']}" if broken else None,
    )
    return tag("div", tag("div", tag("span", curve.title, style=DIM), " ", value), svg)


def _finding(item: Weighed, *, live: bool) -> Html:
    finding = item.finding
    over = item.clear is not None
    label = f"{finding.severity}{', over' if over else ''}"
    colour = COLOURS.get(finding.severity, COLOURS["info"])
    todo = tag("div", f"to do: {cut(finding.fixes[0], TITLE)}", style=DIM) if finding.fixes and not over else None
    words = f"{cut(finding.title, TITLE)} ({when(item, live=live)})"
    return tag("li", tag("b", label, style=f"color:{colour}"), " ", words, todo, style="margin:2px 0")
