"""Plots of a run with matplotlib: one metric over steps, of the whole run, of some of its parts, or of all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gradvitals.errors import GradvitalsError, RunError
from gradvitals.show.curves import span_of
from gradvitals.show.heatmap import read_heatmap
from gradvitals.show.text import clean, cut
from gradvitals.store.drawn import Names
from gradvitals.store.frames import Kind
from gradvitals.store.reader import Floats, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS: dict[str, Kind] = {"tensor": "tensors", "layer": "layers", "head": "heads", "rank": "ranks"}
COLOURS = {"critical": "tab:red", "warning": "tab:orange", "info": "tab:blue"}
FAR = 50.0
"""Above so many times its median, a value is far off the others."""
NAMED = 40
"""Rows of a map that are named."""


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
    axes, is_ours = (ax, False) if ax is not None else (_new_axes(), True)
    if kind is not None:
        _draw_map(run, metric, kind, source, axes, style)
        return axes
    of: Kind = next((KINDS[part] for part in given), "values")
    source = source if source is not None else next(iter(run.sources(metric, of)), None)
    drawn: list[Floats] = []
    for label, where in _wanted(given):
        steps, values = run.series(metric, source=source, **where)
        drawn.append(values[np.isfinite(values)])
        [line] = axes.plot(steps, values, **{"label": label or metric, **style})
        if band and {f"{metric}_low", f"{metric}_high"} <= set(run.metrics(of)):
            _draw_band(run, metric, source, where, axes, line.get_color())
    axes.set_xlabel("step")
    axes.set_ylabel(f"{metric} ({source})" if source else metric)
    known = np.concatenate(drawn) if drawn else np.empty(0)
    if not known.size:
        axes.text(0.5, 0.5, f"no values of {_label(metric)}", ha="center", va="center", transform=axes.transAxes)
    elif is_ours and known.min() > 0 and known.max() > FAR * np.median(known):
        axes.set_yscale("log")  # else one step that went astray hides all others
    if marks:
        _mark_findings(run, axes)
    if given:
        axes.legend(fontsize="small")
    return axes


def _new_axes() -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise PlotsMissingError("plots need matplotlib; install it with: pip install 'gradvitals[plots]'") from error
    _, axes = pyplot.subplots()
    return axes


def _wanted(given: Mapping[str, Names]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A label and the arguments of `Run.series` for each line."""
    if not given:
        yield "", {}
    for part, names in given.items():
        several = names if isinstance(names, Sequence) and not isinstance(names, str) else [names]
        for name in several:
            yield f"rank {name}" if part == "rank" else _label(str(name)), {part: name}


def _label(name: str) -> str:
    # matplotlib takes a leading underscore for a secret and dollar signs for formulas.
    return cut(clean(name), 60).replace("$", r"\$").lstrip("_") or "?"


def _draw_band(run: Run, metric: str, source: str | None, where: dict[str, Any], axes: Axes, colour: Any) -> None:
    steps, low = run.series(f"{metric}_low", source=source, **where)
    also, high = run.series(f"{metric}_high", source=source, **where)
    if np.array_equal(steps, also):
        axes.fill_between(steps, low, high, where=_finite(low, high), color=colour, alpha=0.2, linewidth=0)


def _finite(low: Floats, high: Floats) -> list[bool]:
    return list(map(bool, np.isfinite(low) & np.isfinite(high)))


def _mark_findings(run: Run, axes: Axes) -> None:
    """A dotted line where something was found that is more than a note; the axes keep their limits."""
    limits = axes.get_xlim()
    for finding in run.findings():
        if finding.severity != "info":
            colour = COLOURS.get(finding.severity, "tab:gray")
            axes.axvline(finding.first_step, color=colour, linestyle=":", linewidth=1, label="_")
    axes.set_xlim(limits)


def _draw_map(run: Run, metric: str, kind: Kind, source: str | None, axes: Axes, style: Mapping[str, Any]) -> None:
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
    every = -(-rows // NAMED)
    axes.set_yticks(range(0, rows, every), [_label(name) for name in found.names[::every]], fontsize="small")
    axes.set_xlabel("step")
    axes.figure.colorbar(drawn, ax=axes, label=metric)
