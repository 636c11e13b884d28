"""Curves of a run over one shared axis of steps, with marks for what was found and done.

The drawings are stretched to the width at hand while the words beside them keep their size, so that one page suits a
wide window and a phone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradvitals.show.curves import Curve, Floats, Span
from gradvitals.show.html import Html, Part, tag
from gradvitals.show.svg import Axis, tick_text
from gradvitals.show.text import cut, number
from gradvitals.types import Action

WIDTH, HEIGHT = 1000, 100
LOGARITHMIC = 20
"""Largest over smallest value from which a curve is drawn by its logarithm."""
FLAG_ROOM = 3.2
"""Share of the width, in percent, that one flag takes up."""
FLAG_ROWS = 4
_CLASSES = {"band": "band", "range": "band range", "curve": "curve", "dot": "curve dot", "broken": "broken"}
SOURCES = {
    "microbatch": "from micro-batches",
    "ranks": "from ranks",
    "adam": "from Adam's averages",
    "window": "from a window of steps",
}


@dataclass(frozen=True)
class Mark:
    """A finding on the time axis."""

    label: str
    first: int
    last: int | None
    """None where it goes on."""
    severity: str
    words: str
    href: str


def timeline(
    curves: Sequence[Curve],
    span: Span,
    *,
    marks: Sequence[Mark] = (),
    actions: Sequence[Action] = (),
    batch_size: float | None = None,
) -> Html:
    """All curves, one under the other.

    Args:
        curves: what to draw.
        span: the steps they share.
        marks: what was found.
        actions: what a Guard or a schedule did.
        batch_size: samples of one step, which the noise scale is held against.
    """
    xs = Axis(span.first, max(span.last, span.first + 1), 0.0, float(WIDTH))
    parts: list[Part] = [_flags(marks, xs) if marks else None, _actions(actions, xs) if actions else None]
    parts += [_lane(curve, xs, marks, batch_size if curve.metric == "noise_scale" else None) for curve in curves]
    return tag("div", *parts, x_axis(xs), class_="timeline", data_first=span.first, data_last=span.last)


def x_axis(xs: Axis) -> Html:
    """Step numbers under everything that shares the axis; every other one is left out where it is narrow."""
    ticks = [tick for tick in xs.ticks(8) if tick == int(tick)]
    steps = [
        tag("span", f"{int(tick):,}", style=f"left:{_percent(xs, tick)}%", class_="odd" if at % 2 else None)
        for at, tick in enumerate(ticks)
    ]
    return tag("div", tag("div", class_="label"), tag("div", *steps, class_="xs"), class_="lane axis")


def _lane(curve: Curve, xs: Axis, marks: Sequence[Mark], batch_size: float | None) -> Html:
    ys = value_axis(curve, HEIGHT - 4.0, 4.0, beside=batch_size)
    parts: list[Part] = [_line([(0, ys.at(tick)), (WIDTH, ys.at(tick))], "grid") for tick in ys.ticks(3)]
    parts += _mark_lines(marks, xs)
    if batch_size is not None and ys.has(batch_size):
        parts.append(_line([(0, ys.at(batch_size)), (WIDTH, ys.at(batch_size))], "batch"))
    parts += [tag(kind, **shape, class_=_CLASSES[role]) for kind, role, shape in curve_parts(curve, xs, ys, HEIGHT)]
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
        aria_label=_in_words(curve),
        data_x=json.dumps([round(float(step), 1) for step in curve.steps], separators=(",", ":")),
        data_y=json.dumps([_short(value) for value in curve.middle], separators=(",", ":")),
    )
    ticks = [tag("span", tick_text(tick), style=f"top:{ys.at(tick):.1f}%") for tick in ys.ticks(3)]
    return tag(
        "div",
        _label(curve, batch_size if batch_size is not None and ys.has(batch_size) else None),
        tag("div", tag("div", *ticks, class_="ys", aria_hidden="true"), drawing, class_="plot"),
        class_="lane curve",
    )


def _label(curve: Curve, batch_size: float | None) -> Html:
    alarm = bool(curve.broken) and not math.isfinite(curve.latest)
    latest = "not a number" if alarm else "cannot tell" if math.isnan(curve.latest) else number(curve.latest)
    notes = []
    if curve.source:
        of = f" of batches of {number(curve.batch_size)}" if curve.batch_size and curve.metric == "gsnr" else ""
        notes.append(f"{SOURCES.get(curve.source, curve.source)}{of}")
    if curve.metric == "noise_scale":
        notes.append("in samples")
    if curve.is_interval:
        notes.append("shaded: 95 % interval")
    elif curve.steps_a_point > 1 and curve.metric != "lr":
        notes.append(f"shaded: range over {number(curve.steps_a_point)} steps")
    if batch_size is not None:
        notes.append(f"dashed: your batch of {number(batch_size)}")
    if curve.broken:
        notes.append(f"red: NaN or Inf, first at step {int(curve.broken[0][0]):,}")
    return tag(
        "div",
        tag("b", curve.title),
        tag("output", latest, class_="now critical" if alarm else "now", data_latest=latest),
        tag("small", "; ".join(notes)) if notes else None,
        class_="label",
    )


def _in_words(curve: Curve) -> str:
    broken = f"; NaN or infinite from step {int(curve.broken[0][0])}" if curve.broken else ""
    return f"{curve.title} over steps: from {number(curve.first)} to {number(curve.latest)}{broken}"


def value_axis(curve: Curve, start: float, end: float, *, beside: float | None = None) -> Axis:
    """The axis that suits a curve, and holds a value beside it where that is not far off."""
    known = curve.middle[np.isfinite(curve.middle)]
    # The ends of intervals can be anywhere; the most of them are enough.
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
    """The shapes of a curve: the element, what it stands for (`band`, `curve`, `dot`, `broken`), and its attributes."""
    if curve.is_interval or curve.steps_a_point > 1:
        yield "path", "band" if curve.is_interval else "range", {"d": _band(curve, xs, ys)}
    for piece in _pieces(np.isfinite(curve.middle)):
        points = [(xs.at(float(curve.steps[i])), _place(float(curve.middle[i]), ys)) for i in piece]
        if len(points) == 1:  # a line without length, which has round ends
            yield "path", "dot", {"d": f"M{_points([*points, (points[0][0] + 0.01, points[0][1])])}"}
        else:
            yield "path", "curve", {"d": f"M{_points(points)}"}
    for first, last in curve.broken:
        width = max(xs.at(last) - xs.at(first), (xs.end - xs.start) / 300)
        yield "rect", "broken", {"x": min(xs.at(first), xs.end - width), "width": width, "y": 0, "height": height}


def _quantile(values: Floats, share: float) -> float:
    known = values[np.isfinite(values)]
    return float(np.quantile(known, share)) if known.size else math.nan


def _place(value: float, ys: Axis) -> float:
    """Where a value is drawn: what is beyond the axis at its end."""
    if value <= ys.low or (ys.logarithmic and value <= 0):
        return ys.start
    return ys.end if value >= ys.high else ys.at(value)


def _band(curve: Curve, xs: Axis, ys: Axis) -> str:
    path = []
    for piece in _pieces(~np.isnan(curve.low) & ~np.isnan(curve.high)):
        upper = [(xs.at(float(curve.steps[i])), _place(float(curve.high[i]), ys)) for i in piece]
        lower = [(xs.at(float(curve.steps[i])), _place(float(curve.low[i]), ys)) for i in reversed(piece)]
        path.append(f"M{_points([*upper, *lower])}Z")
    return "".join(path)


def _pieces(present: Iterable[np.bool_]) -> list[list[int]]:
    """Neighbours that are all there."""
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


def _mark_lines(marks: Sequence[Mark], xs: Axis) -> list[Part]:
    parts: list[Part] = []
    for mark in marks:
        at = xs.at(min(max(mark.first, xs.low), xs.high))
        to = xs.at(min(mark.last if mark.last is not None else xs.high, xs.high))
        if to - at > 2 and mark.severity != "info":
            parts.append(tag("rect", x=at, width=to - at, y=0, height=HEIGHT, class_=f"during {mark.severity}"))
        parts.append(_line([(at, 0), (at, HEIGHT)], f"found {mark.severity}"))
    return parts


def _flags(marks: Sequence[Mark], xs: Axis) -> Html:
    """A numbered flag for each finding, above the others where they would overlap."""
    ends = [-math.inf] * FLAG_ROWS
    flags: list[Part] = []
    for mark in sorted(marks, key=lambda each: each.first):
        at = _percent(xs, min(max(mark.first, xs.low), xs.high))
        row = next((row for row, end in enumerate(ends) if at - end >= FLAG_ROOM), FLAG_ROWS - 1)
        ends[row] = at
        style = f"left:{at}%;top:{row * 21}px"
        words = f"Finding {mark.label}, {mark.severity}, step {mark.first:,}: {cut(mark.words, 160)}"
        flags.append(tag("a", mark.label, href=mark.href, title=words, style=style, class_=f"flag {mark.severity}"))
    rows = 1 + max(row for row, end in enumerate(ends) if end > -math.inf)
    label = tag("div", tag("b", "Findings"), class_="label")
    return tag("div", label, tag("div", *flags, class_="flags", style=f"height:{rows * 21}px"), class_="lane")


def _actions(actions: Sequence[Action], xs: Axis) -> Html:
    """Ticks where something was done; fainter where it would have been."""
    parts = []
    for taken in (False, True):
        places = sorted(
            {round(xs.at(action.step)) for action in actions if action.taken is taken and xs.has(action.step)}
        )
        path = "".join(f"M{place},2V18" for place in places)
        parts.append(tag("path", d=path, class_="act" if taken else "act faint") if path else None)
    count = sum(action.taken for action in actions)
    words = f"{count:,} taken, {len(actions) - count:,} not"
    svg = tag("svg", *parts, viewBox=f"0 0 {WIDTH} 20", preserveAspectRatio="none", role="img", aria_label=words)
    label = tag("div", tag("b", "Actions"), tag("small", words), class_="label")
    return tag("div", label, tag("div", svg, class_="plot acts"), class_="lane")


def _percent(xs: Axis, step: float) -> float:
    return round(xs.at(step) / WIDTH * 100, 2)


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
