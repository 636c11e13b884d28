"""The time axis of the HTML report: curves with marks for findings and actions, and heatmaps of layers over steps.

Drawings stretch to the width of the window while the text beside them keeps its size, so that one page suits a wide
window and a phone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.report.charts import Axis, image, tick_text
from gradvitals.report.format import clean, cut, number
from gradvitals.report.markup import Html, Part, tag
from gradvitals.report.series import Curve, Floats, Heatmap, Span
from gradvitals.types import Action

WIDTH, HEIGHT = 1000, 100
LOGARITHMIC = 20
"""A curve with a larger ratio of largest to smallest value is drawn by its logarithm."""
FLAG_ROOM = 3.2
"""Percentage of the width that one flag takes."""
FLAG_ROWS = 4
_CLASSES = {"band": "band", "range": "band range", "curve": "curve", "dot": "curve dot", "nonfinite": "broken"}
_SHADES = ((48, 18, 92), (45, 62, 140), (26, 108, 148), (34, 148, 128), (96, 186, 94), (184, 214, 70), (255, 236, 92))
"""From low to high. They grow brighter all the way, so that they can be told apart without seeing colors."""
_NONFINITE = (255, 45, 85)
FIRST_SHADE, LAST_SHADE = 1, 254
"""Indices of the palette for values; 0 means nothing known, 255 NaN or Inf."""
ROW_HEIGHT, MAX_HEIGHT = 18, 460
"""Height of a row, and of a whole heatmap, in pixels of the page."""
NAME_HEIGHT = 15
"""Room that a name takes."""
SOURCES = {
    "microbatch": "from micro-batches",
    "ranks": "from ranks",
    "adam": "from Adam's moments",
    "window": "from a window of steps",
}


@dataclass(frozen=True)
class Mark:
    """A finding on the time axis."""

    label: str
    first: int
    last: int | None
    """None while it is open."""
    severity: str
    title: str
    href: str


def timeline(
    curves: Sequence[Curve],
    span: Span,
    *,
    marks: Sequence[Mark] = (),
    actions: Sequence[Action] = (),
    batch_size: float | None = None,
) -> Html:
    """Returns all curves, one under the other."""
    xs = Axis(span.first, max(span.last, span.first + 1), 0.0, float(WIDTH))
    parts: list[Part] = [_flags(marks, xs) if marks else None, _actions(actions, xs) if actions else None]
    parts += [_lane(curve, xs, marks, batch_size if curve.metric == "noise_scale" else None) for curve in curves]
    return tag("div", *parts, x_axis(xs), class_="timeline", data_first=span.first, data_last=span.last)


def x_axis(xs: Axis) -> Html:
    """Returns step numbers for everything that shares the axis; a narrow window hides every other one."""
    ticks = [tick for tick in xs.ticks(8) if tick == int(tick)]
    steps = [
        tag("span", f"{int(tick):,}", style=f"left:{_percent(xs, tick)}%", class_="odd" if at % 2 else None)
        for at, tick in enumerate(ticks)
    ]
    return tag("div", tag("div", class_="label"), tag("div", *steps, class_="xs"), class_="lane axis")


def _lane(curve: Curve, xs: Axis, marks: Sequence[Mark], batch_size: float | None) -> Html:
    ys = value_axis(curve, HEIGHT - 4.0, 4.0, beside=batch_size)
    batch_size = batch_size if batch_size is not None and ys.has(batch_size) else None
    parts: list[Part] = [_line([(0, ys.at(tick)), (WIDTH, ys.at(tick))], "grid") for tick in ys.ticks(3)]
    for mark in marks:
        at = xs.at(min(max(mark.first, xs.low), xs.high))
        to = xs.at(min(mark.last if mark.last is not None else xs.high, xs.high))
        if to - at > 2 and mark.severity != "info":
            parts.append(tag("rect", x=at, width=to - at, y=0, height=HEIGHT, class_=f"during {mark.severity}"))
        parts.append(_line([(at, 0), (at, HEIGHT)], f"found {mark.severity}"))
    if batch_size is not None:
        parts.append(_line([(0, ys.at(batch_size)), (WIDTH, ys.at(batch_size))], "batch"))
    parts += [tag(kind, **shape, class_=_CLASSES[role]) for kind, role, shape in curve_parts(curve, xs, ys, HEIGHT)]
    nonfinite = f"; NaN or infinite from step {int(curve.nonfinite[0][0])}" if curve.nonfinite else ""
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{curve.title} over steps: from {number(curve.first)} to {number(curve.latest)}{nonfinite}",
        data_x=json.dumps([round(float(step), 1) for step in curve.steps], separators=(",", ":")),
        data_y=json.dumps([_short(value) for value in curve.middle], separators=(",", ":")),
    )
    ticks = [tag("span", tick_text(tick), style=f"top:{ys.at(tick):.1f}%") for tick in ys.ticks(3)]
    plot = tag("div", tag("div", *ticks, class_="ys", aria_hidden="true"), drawing, class_="plot")
    return tag("div", _label(curve, batch_size), plot, class_="lane curve")


def _label(curve: Curve, batch_size: float | None) -> Html:
    alarm = bool(curve.nonfinite) and not math.isfinite(curve.latest)
    latest = "NaN" if alarm else "unknown" if math.isnan(curve.latest) else number(curve.latest)
    notes = []
    if curve.source:
        of = f" of batches of {number(curve.batch_size)}" if curve.batch_size and curve.metric == "gsnr" else ""
        notes.append(f"{SOURCES.get(curve.source, curve.source)}{of}")
    if curve.metric == "noise_scale":
        notes.append("in samples")
    if curve.is_interval:
        notes.append("shaded: 95% interval")
    elif curve.steps_per_point > 1 and curve.metric != "lr":
        notes.append(f"shaded: range over {number(curve.steps_per_point)} steps")
    if batch_size is not None:
        notes.append(f"dashed: your batch of {number(batch_size)}")
    if curve.nonfinite:
        notes.append(f"red: NaN or Inf, first at step {int(curve.nonfinite[0][0]):,}")
    shown = tag("output", latest, class_="now critical" if alarm else "now", data_latest=latest)
    small = tag("small", "; ".join(notes)) if notes else None
    return tag("div", tag("b", curve.title), shown, small, class_="label")


def value_axis(curve: Curve, start: float, end: float, *, beside: float | None = None) -> Axis:
    """Returns the axis that suits a curve, and holds a value beside it if that is not far off."""
    known = curve.middle[np.isfinite(curve.middle)]
    # The ends of intervals can be anywhere; most of them are enough.
    shares = (0.05, 0.95) if curve.is_interval else (0.0, 1.0)
    ends = [_quantile(curve.low, shares[0]), _quantile(curve.high, shares[1])]
    values = [*known.tolist(), *(end for end in ends if math.isfinite(end))]
    usual = known[known > 0]
    wide = usual.size > 0.9 * max(known.size, 1) and max(values, default=0.0) > LOGARITHMIC * _quantile(usual, 0.02)
    if beside is not None and values and min(values) / 8 < beside < max(values) * 8:
        values.append(beside)
    logarithmic = wide and curve.metric != "lr"
    if logarithmic:
        values = [value for value in values if value > _quantile(usual, 0.02) / 100]
    return Axis.over(values, start, end, logarithmic=logarithmic).rounded()


def curve_parts(curve: Curve, xs: Axis, ys: Axis, height: float) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields the shapes of a curve: the element, its role (a key of `_CLASSES`), and its attributes."""
    if curve.is_interval or curve.steps_per_point > 1:
        yield "path", "band" if curve.is_interval else "range", {"d": _band(curve, xs, ys)}
    for piece in _pieces(np.isfinite(curve.middle)):
        points = [(xs.at(float(curve.steps[i])), _position(float(curve.middle[i]), ys)) for i in piece]
        if len(points) == 1:  # a line without length, with round ends
            yield "path", "dot", {"d": f"M{_points([*points, (points[0][0] + 0.01, points[0][1])])}"}
        else:
            yield "path", "curve", {"d": f"M{_points(points)}"}
    for first, last in curve.nonfinite:
        width = max(xs.at(last) - xs.at(first), (xs.end - xs.start) / 300)
        yield "rect", "nonfinite", {"x": min(xs.at(first), xs.end - width), "width": width, "y": 0, "height": height}


def _quantile(values: Floats, share: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, share)) if known.size else math.nan


def _position(value: float, ys: Axis) -> float:
    """Returns where a value is drawn: at the end of the axis if it is beyond."""
    if value <= ys.low or (ys.logarithmic and value <= 0):
        return ys.start
    return ys.end if value >= ys.high else ys.at(value)


def _band(curve: Curve, xs: Axis, ys: Axis) -> str:
    path = []
    for piece in _pieces(~np.isnan(curve.low) & ~np.isnan(curve.high)):
        upper = [(xs.at(float(curve.steps[i])), _position(float(curve.high[i]), ys)) for i in piece]
        lower = [(xs.at(float(curve.steps[i])), _position(float(curve.low[i]), ys)) for i in reversed(piece)]
        path.append(f"M{_points([*upper, *lower])}Z")
    return "".join(path)


def _pieces(present: Iterable[np.bool_]) -> list[list[int]]:
    """Returns the runs of neighbors that are present."""
    pieces: list[list[int]] = [[]]
    for at, there in enumerate(present):
        if there:
            pieces[-1].append(at)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _line(points: Iterable[tuple[float, float]], kind: str) -> Html:
    return tag("path", d=f"M{_points(points)}", class_=kind)


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _flags(marks: Sequence[Mark], xs: Axis) -> Html:
    """Returns a numbered flag per finding, in further rows if they would overlap."""
    ends = [-math.inf] * FLAG_ROWS
    flags: list[Part] = []
    for mark in sorted(marks, key=lambda each: each.first):
        at = _percent(xs, min(max(mark.first, xs.low), xs.high))
        row = next((row for row, end in enumerate(ends) if at - end >= FLAG_ROOM), FLAG_ROWS - 1)
        ends[row] = at
        style = f"left:{at}%;top:{row * 21}px"
        text = f"Finding {mark.label}, {mark.severity}, step {mark.first:,}: {cut(mark.title, 160)}"
        flags.append(tag("a", mark.label, href=mark.href, title=text, style=style, class_=f"flag {mark.severity}"))
    rows = 1 + max(row for row, end in enumerate(ends) if end > -math.inf)
    label = tag("div", tag("b", "Findings"), class_="label")
    return tag("div", label, tag("div", *flags, class_="flags", style=f"height:{rows * 21}px"), class_="lane")


def _actions(actions: Sequence[Action], xs: Axis) -> Html:
    """Returns ticks at the steps of actions; fainter for those that were not taken."""
    parts = []
    for taken in (False, True):
        places = {round(xs.at(action.step)) for action in actions if action.taken is taken and xs.has(action.step)}
        path = "".join(f"M{place},2V18" for place in sorted(places))
        parts.append(tag("path", d=path, class_="act" if taken else "act faint") if path else None)
    count = sum(action.taken for action in actions)
    text = f"{count:,} taken, {len(actions) - count:,} not"
    svg = tag("svg", *parts, viewBox=f"0 0 {WIDTH} 20", preserveAspectRatio="none", role="img", aria_label=text)
    label = tag("div", tag("b", "Actions"), tag("small", text), class_="label")
    return tag("div", label, tag("div", svg, class_="plot acts"), class_="lane")


def _percent(xs: Axis, step: float) -> float:
    return round(xs.at(step) / WIDTH * 100, 2)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


def palette() -> NDArray[np.uint8]:
    """Returns 256 RGBA colors."""
    shades = np.array(_SHADES, dtype=np.float64)
    places = np.linspace(0, len(shades) - 1, LAST_SHADE - FIRST_SHADE + 1)
    colors = np.full((256, 4), 255, dtype=np.uint8)
    parts = [np.round(np.interp(places, np.arange(len(shades)), part)) for part in shades.T]
    colors[FIRST_SHADE : LAST_SHADE + 1, :3] = np.transpose(parts)
    colors[0], colors[255, :3] = 0, _NONFINITE
    return colors


def scale_of(values: Floats) -> tuple[float, float] | None:
    """Returns the values of the lowest and the highest color: all but the outermost few, above zero."""
    known = values[np.isfinite(values) & (values > 0)]
    if not known.size:
        return None
    low, high = np.quantile(known, [0.01, 0.999])
    low = max(float(low), float(high) / 1e6)
    return (low, float(high)) if high > 1.2 * low else (float(high) / 1.2, float(high) * 1.2)


def shades(found: Heatmap, scale: tuple[float, float]) -> NDArray[np.uint8]:
    """Returns the index of every cell in the palette, by the logarithm; values not above zero get the lowest color."""
    low, high = scale
    with np.errstate(divide="ignore", invalid="ignore"):
        share = (np.log(found.values) - math.log(low)) / (math.log(high) - math.log(low))
    share = np.where(found.values <= 0, 0.0, np.clip(share, 0.0, 1.0))
    place = np.round(FIRST_SHADE + np.nan_to_num(share) * (LAST_SHADE - FIRST_SHADE))
    place = np.where(np.isnan(found.values), 0, place)
    return np.where(found.nonfinite, 255, place).astype(np.uint8)


def heatmap_figure(found: Heatmap) -> Html | None:
    """Returns the heatmap as a figure; None if there is nothing to show."""
    scale = scale_of(found.values)
    if scale is None:
        return None
    rows = len(found.names)
    height = min(rows * ROW_HEIGHT, MAX_HEIGHT)
    every = max(1, math.ceil(NAME_HEIGHT * rows / height))
    names = []
    for row, name in list(enumerate(found.names))[::every]:
        place = f"top:{100 * (row + 0.5) / rows:.2f}%"
        kind = "critical" if found.nonfinite[row : row + every].any() else None
        names.append(tag("span", tag("bdi", cut(name, 80)), style=place, title=cut(name, 300), class_=kind))
    label = tag("div", *names, class_="label rows", style=f"height:{height}px")
    low, high = map(number, scale)
    text = f"{found.title} of {rows} layers over steps, from {low} to {high}"
    ends = {"data_low": f"{scale[0]:.4g}", "data_high": f"{scale[1]:.4g}"}
    drawing = image(shades(found, scale), text, palette(), class_="heat", style=f"height:{height}px", **ends)
    ramp = np.arange(FIRST_SHADE, LAST_SHADE + 1, dtype=np.uint8)[None, :]
    bar = image(ramp, "the colors from low to high", palette(), class_="ramp")
    nonfinite = tag("span", tag("i", class_="key broken"), "NaN or Inf") if found.nonfinite.any() else None
    legend = tag("span", tag("output", "", class_="at"), low, bar, high, nonfinite, class_="scale")
    return tag(
        "div",
        tag("div", tag("b", found.title), tag("small", found.note), legend, class_="heat-head"),
        tag("div", label, tag("div", drawing, class_="plot heats"), class_="lane"),
        class_="heatmap",
        data_names=json.dumps([clean(cut(name, 80)) for name in found.names], ensure_ascii=False),
    )
