"""A run in Python: its verdict, matplotlib plots, and what a notebook shows. `gradvitals.store` imports it on demand.

The theme of a notebook is not known here, so text and lines take the color around them, and styles are inline.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gradvitals.errors import GradvitalsError, RunError
from gradvitals.report.charts import Axis, curve_parts, value_axis
from gradvitals.report.format import TITLE, clean, cut, fix_snippet, number
from gradvitals.report.markup import Html, Part, folded, tag
from gradvitals.report.replay import UNDIAGNOSED, was_diagnosed
from gradvitals.report.series import Curve, read_curves, read_heatmap, span_of
from gradvitals.report.state import num_ranks, progress
from gradvitals.report.verdict import Verdict, judge_run
from gradvitals.store.blocks import Kind
from gradvitals.store.reader import Floats, Names, Run, open_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradvitals.monitor import Monitor

MAX_FINDINGS = 5
LIVE_SECONDS = 2.0
"""Between two updates of a card that follows a training."""
CURVE_COLUMNS = 160
WIDTH, HEIGHT = 180, 40
COLORS = {"critical": "#e5484d", "warning": "#d9822b", "info": "#3b82f6"}
LEVEL_COLORS = {"healthy": "#2f9e5b", "attention": "#d9822b", "unhealthy": "#e5484d"}
LINE = "#3b82f6"
DIM = "opacity:.7;font-size:12px"
FONT = "font:14px/1.45 system-ui,sans-serif;max-width:1000px"

KINDS: dict[str, Kind] = {"tensor": "tensors", "layer": "layers", "head": "heads", "rank": "ranks"}
PLOT_COLORS = {"critical": "tab:red", "warning": "tab:orange", "info": "tab:blue"}
FAR = 50.0
"""A plot whose largest value is more than this many times its median is logarithmic."""
NAMED_ROWS = 40


# -- HTML ----------------------------------------------------------------------------------------------------------


def display(path: Path | None, fallback: str) -> str:
    """Returns the run in a folder as HTML; the given text if there is none that can be read."""
    if path is not None:
        with suppress(GradvitalsError, OSError), open_run(path) as run:
            return run_html(run)
    return str(tag("pre", fallback))


def show_live(monitor: Monitor, every: float = LIVE_SECONDS) -> None:
    """Display a Monitor in a notebook, and again every few seconds until it is closed.

    A thread of its own does it, because the cell that trains keeps the kernel busy.
    """
    from IPython.display import HTML, display  # type: ignore[import-not-found]

    handle = display(HTML(monitor._repr_html_()), display_id=True)
    reference = weakref.ref(monitor)
    del monitor

    def refresh() -> None:
        while (shown := reference()) is not None:
            closed, path = shown.is_closed, shown.run_path
            del shown
            with suppress(Exception), open_run(path) as run:  # a card must never disturb training
                handle.update(HTML(run_html(run)))
            if closed:
                return
            time.sleep(every)

    if handle is not None:
        threading.Thread(target=refresh, name="gradvitals-card", daemon=True).start()


def run_html(run: Run) -> str:
    """Returns a run as a notebook shows it: headline, fix, small curves, findings."""
    parts: list[Part] = [_headline("No readings yet.")]
    if (span := span_of(run)) is not None:
        verdict, diagnosed = judge_run(run, run.findings), was_diagnosed(run.meta)
        cells = [_cell(curve, span.first, span.last) for curve in read_curves(run, span, CURVE_COLUMNS)]
        drawn = tag("div", *cells, style="display:flex;flex-wrap:wrap;gap:6px 22px;margin:8px 0") if cells else None
        parts = [*_verdict_parts(verdict, drawn)] if diagnosed else [_headline(UNDIAGNOSED), drawn]
    ranks = num_ranks(run.meta)
    about = f"{progress(run)}, {len(run.tensors):,} tensors{f', {ranks:,} ranks' if ranks > 1 else ''}"
    head = tag("div", tag("b", cut(run.path.name or str(run.path))), " ", tag("span", about, style=DIM))
    return str(tag("div", head, *parts, style=FONT))


def verdict_html(verdict: Verdict) -> str:
    """Returns a verdict as a notebook shows it."""
    return str(tag("div", *_verdict_parts(verdict), style=FONT))


def _verdict_parts(verdict: Verdict, drawn: Html | None = None) -> Iterator[Part]:
    yield _headline(verdict.headline, LEVEL_COLORS[verdict.level])
    for label, text in verdict.remedy.items():
        yield tag("div", tag("b", label), ": ", cut(text, TITLE))
    if snippet := fix_snippet(verdict.fix):
        yield tag("pre", snippet, style="margin:4px 0 4px 12px")
    yield tag("div", verdict.counted, style=DIM) if verdict.counted else None
    yield drawn
    yield _finding_list(verdict)


def _headline(text: str, color: str = "currentColor") -> Html:
    return tag("div", cut(text, TITLE), style=f"border-left:4px solid {color};padding:2px 10px;margin:6px 0")


def _finding_list(verdict: Verdict) -> Html | None:
    items = []
    for item in verdict.ranked[:MAX_FINDINGS]:
        finding = item.finding
        label = tag("b", item.label, style=f"color:{COLORS[finding.severity]}")
        text = f"{cut(finding.title, TITLE)} ({item.when(live=verdict.live)})"
        fix = tag("div", f"Fix: {cut(finding.fixes[0], TITLE)}", style=DIM) if finding.fixes and item.is_open else None
        items.append(tag("li", label, " ", text, fix, style="margin:2px 0"))
    hidden = len(verdict.ranked) - MAX_FINDINGS
    if hidden > 0:
        items.append(tag("li", f"and {hidden:,} more; run.findings has them all", style=DIM))
    if not items:
        return None
    listed = tag("ul", *items, style="margin:4px 0;padding-left:20px")
    return folded(f"Findings ({len(verdict.ranked)})", listed, opened=len(verdict.ranked) <= 3)


def _cell(curve: Curve, first: int, last: int) -> Html:
    """Returns one metric: its name, its latest value, and a small curve."""
    xs = Axis(first, max(last, first + 1), 0.0, float(WIDTH))
    ys = value_axis(curve, HEIGHT - 2.0, 2.0)
    styles: dict[str, dict[str, Any]] = {"curve": {"fill": "none", "stroke": LINE, "stroke_width": 1.4}}
    styles["band"] = styles["range"] = {"fill": LINE, "opacity": 0.2}
    styles["dot"] = {**styles["curve"], "stroke_width": 4.0, "stroke_linecap": "round"}
    styles["nonfinite"] = {"fill": COLORS["critical"], "opacity": 0.5}
    parts = [tag(kind, **shape, **styles[role]) for kind, role, shape in curve_parts(curve, xs, ys, float(HEIGHT))]
    label = f"{curve.title}: {number(curve.latest)}"
    box = f"0 0 {WIDTH} {HEIGHT}"
    svg = tag("svg", *parts, viewBox=box, width=WIDTH, height=HEIGHT, role="img", aria_label=label)
    alarm = bool(curve.nonfinite) and not np.isfinite(curve.latest)
    color = f"color:{COLORS['critical']}" if alarm else None
    value = tag("b", "NaN" if alarm else number(curve.latest), style=color)
    return tag("div", tag("div", tag("span", curve.title, style=DIM), " ", value), svg)


# -- matplotlib ----------------------------------------------------------------------------------------------------


class PlotsMissingError(GradvitalsError, ImportError):
    """matplotlib is not installed."""


def plot(
    run: Run,
    metric: str,
    chosen: Mapping[str, Names],
    *,
    kind: Kind | None,
    source: str | None,
    ax: Axes | None,
    band: bool,
    marks: bool,
    style: Mapping[str, Any],
) -> Axes:
    """See `Run.plot`. `chosen` has the names of a `tensor`, `layer`, `head` or `rank`."""
    given = {part: names for part, names in chosen.items() if names is not None}
    if len(given) + (kind is not None) > 1:
        raise RunError("a plot is of tensors, layers, heads or ranks, or of all of one kind; more than one was given")
    if ax is not None:
        axes = ax
    else:
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise PlotsMissingError(
                "plots need matplotlib; install it with: pip install 'gradvitals[plots]'"
            ) from error
        axes = pyplot.subplots()[1]
    if kind is not None:
        _plot_heatmap(run, metric, kind, source, axes, style)
        return axes
    of: Kind = next((KINDS[part] for part in given), "values")
    source = source if source is not None else next(iter(run.sources(metric, of)), None)
    drawn: list[Floats] = []
    for label, row in _rows(given):
        steps, values = run.series(metric, source=source, **row)
        drawn.append(values[np.isfinite(values)])
        [line] = axes.plot(steps, values, **{"label": label or metric, **style})
        if band and {f"{metric}_low", f"{metric}_high"} <= set(run.metrics(of)):
            ends, low = run.series(f"{metric}_low", source=source, **row)
            also, high = run.series(f"{metric}_high", source=source, **row)
            if np.array_equal(ends, also):
                finite = list(map(bool, np.isfinite(low) & np.isfinite(high)))
                axes.fill_between(ends, low, high, where=finite, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_xlabel("step")
    axes.set_ylabel(f"{metric} ({source})" if source else metric)
    known = np.concatenate(drawn) if drawn else np.empty(0)
    if not known.size:
        axes.text(0.5, 0.5, f"no values of {_label(metric)}", ha="center", va="center", transform=axes.transAxes)
    elif ax is None and known.min() > 0 and known.max() > FAR * np.median(known):
        axes.set_yscale("log")  # otherwise one outlier hides all other steps
    limits = axes.get_xlim()
    for finding in run.findings if marks else ():
        if finding.severity != "info":
            color = PLOT_COLORS[finding.severity]
            axes.axvline(finding.first_step, color=color, linestyle=":", linewidth=1, label="_")
    axes.set_xlim(limits)
    if given:
        axes.legend(fontsize="small")
    return axes


def _rows(given: Mapping[str, Names]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a label and the arguments of `Run.series` for each line."""
    if not given:
        yield "", {}
    for part, names in given.items():
        several = names if isinstance(names, Sequence) and not isinstance(names, str) else [names]
        for name in several:
            yield f"rank {name}" if part == "rank" else _label(str(name)), {part: name}


def _label(name: str) -> str:
    # matplotlib hides labels with a leading underscore and reads dollar signs as formulas.
    return cut(clean(name), 60).replace("$", r"\$").lstrip("_") or "?"


def _plot_heatmap(run: Run, metric: str, kind: Kind, source: str | None, axes: Axes, style: Mapping[str, Any]) -> None:
    span = span_of(run)
    found = read_heatmap(run, metric, kind, span, source) if span is not None else None
    if span is None or found is None:
        have = ", ".join(run.metrics(kind)) or "none"
        raise RunError(f"{run.file} has no {metric!r} to plot for {kind}; it has: {have}")
    known = found.values[np.isfinite(found.values)]
    rows = len(found.names)
    logarithmic = bool(known.min() > 0) and bool(known.max() > 20 * known.min())
    settings = {"norm": "log" if logarithmic else None, "aspect": "auto", "interpolation": "nearest", **style}
    extent = (span.first - 0.5, span.last + 0.5, rows - 0.5, -0.5)  # the input is at the top
    drawn = axes.imshow(found.values, extent=extent, **settings)
    every = -(-rows // NAMED_ROWS)
    axes.set_yticks(range(0, rows, every), [_label(name) for name in found.names[::every]], fontsize="small")
    axes.set_xlabel("step")
    axes.figure.colorbar(drawn, ax=axes, label=metric)
