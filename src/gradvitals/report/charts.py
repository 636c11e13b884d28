"""Charts as inline SVG, whose colors follow the page, images as inline PNG, and the time axis of a run."""

from __future__ import annotations

import base64
import json
import math
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.report.format import clean, cut, number
from gradvitals.report.markup import Html, Part, join, tag
from gradvitals.report.series import Curve, Floats, Heatmap, Span
from gradvitals.types import Action, FloatArray

WIDTH, HEIGHT = 380, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 12, 40
_MAX_DOTS = 40
_LARGEST = 1e290  # beyond this the width of an axis could overflow
_POSITIVE, _NEGATIVE, _STRONG = (37, 99, 235), (220, 38, 38), (217, 119, 6)


@dataclass(frozen=True)
class Axis:
    """Maps values to positions on the page, linearly or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, *, logarithmic: bool = False) -> Axis:
        """Returns an axis that holds all finite values, with a little room if they are all the same."""
        fit = [value for value in values if abs(value) < _LARGEST and (value > 0 or not logarithmic)]
        low, high = (min(fit), max(fit)) if fit else (0.1 if logarithmic else 0.0, 1.0)
        if logarithmic:
            room = 1.5 if high < 1.5 * low else 1.0
            return cls(low / room, high * room, start, end, True)
        # Values that differ only by rounding are drawn as equal.
        room = (abs(low) * 0.1 or 0.5) if high - low <= 1e-9 * max(abs(low), abs(high), 1e-290) else 0.0
        return cls(low - room, high + room, start, end)

    def at(self, value: float) -> float:
        """Returns the position of a value; beyond the ends if it is outside."""
        if self.logarithmic:
            share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def has(self, value: float) -> bool:
        """Returns whether the value is on the axis."""
        return math.isfinite(value) and self.low <= value <= self.high

    def rounded(self) -> Axis:
        """Returns the axis with its ends at round values; a logarithmic one stays as it is."""
        if self.logarithmic:
            return self
        width = self._width(4)
        low, high = math.floor(self.low / width + 1e-9) * width, math.ceil(self.high / width - 1e-9) * width
        return replace(self, low=min(low, self.low), high=max(high, self.high))

    def _width(self, count: int) -> float:
        """Returns the distance of round values, so that there are about `count` of them."""
        rough = (self.high - self.low) / count
        unit = 10.0 ** math.floor(math.log10(rough))
        return next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough * (1 - 1e-9))

    def ticks(self, count: int = 5) -> list[float]:
        """Returns round values along the axis.

        >>> Axis(0, 1, 0, 100).ticks(), Axis(0.01, 20, 0, 100, True).ticks()
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.01, 0.1, 1.0, 10.0])
        """
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            if last - first >= 1:
                step = max(1, -(-(last - first + 1) // (count + 1)))
                return [float(f"1e{power}") for power in range(first, last + 1, step)]
            steps = [times * 10.0**power for power in range(first - 1, last + 2) for times in (1, 2, 5)]
            inside = [float(f"{step:.6g}") for step in steps if self.low <= step <= self.high]
            return inside if len(inside) > 1 else [self.low, self.high]
        width = self._width(count)
        start = math.ceil(self.low / width - 1e-9)
        return [float(f"{width * at:.12g}") for at in range(start, math.floor(self.high / width + 1e-9) + 1)]


def line_chart(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    title: str,
    x_name: str,
    y_name: str,
    x_log: bool = False,
    y_log: bool = False,
    y_range: tuple[float, float] | None = None,
    marks: Mapping[str, float] | None = None,
) -> Html:
    """Returns lines with points, a legend if there are several, and named vertical marks.

    Points that are not finite, or not above zero on a logarithmic axis, are skipped and leave a gap.
    """
    xs = Axis.over((x for x_values, _ in series.values() for x in x_values), _LEFT, WIDTH - _RIGHT, logarithmic=x_log)
    y_all = y_range or [y for _, y_values in series.values() for y in y_values]
    ys = Axis.over(y_all, HEIGHT - _BOTTOM, _TOP, logarithmic=y_log).rounded()
    parts: list[Part] = [_frame(xs, ys, x_name)]
    for at, (name, x) in enumerate(sorted((marks or {}).items(), key=lambda mark: mark[1])):
        if xs.has(x) and (x > 0 or not x_log):
            place = xs.at(x)
            end, shift = ("end", -4) if place > (_LEFT + WIDTH) / 2 else (None, 4)
            parts.append(tag("line", x1=place, x2=place, y1=float(_TOP), y2=float(HEIGHT - _BOTTOM), class_="mark"))
            parts.append(tag("text", name, x=place + shift, y=_TOP + 11.0 + 13 * at, text_anchor=end))
    for at, pairs in enumerate(series.values()):
        points = [(xs.at(x), ys.at(y)) if xs.has(x) and ys.has(y) else None for x, y in zip(*pairs, strict=False)]
        pieces = [list(piece) for known, piece in groupby(points, bool) if known]
        lines = (" ".join(f"{x:.1f},{y:.1f}" for x, y in filter(None, piece)) for piece in pieces if len(piece) > 1)
        parts += [tag("polyline", points=line, class_=f"line s{at}") for line in lines]
        dots = (dot for piece in pieces for dot in piece if dot and (len(points) <= _MAX_DOTS or len(piece) == 1))
        parts += [tag("circle", cx=x, cy=y, r=2.6, class_=f"dot s{at}") for x, y in dots]
    keys = [tag("span", tag("i", class_=f"key s{at}"), name) for at, name in enumerate(series)]
    return _figure(title, y_name, parts, tag("div", *keys, class_="legend") if len(keys) > 1 else None)


def histogram(
    edges: Sequence[float], counts: Sequence[float], *, title: str, x_name: str, y_name: str = "count"
) -> Html:
    """Returns counts between edges as bars."""
    xs = Axis.over(edges, _LEFT, WIDTH - _RIGHT)
    ys = Axis.over([0.0, max([1.0, *counts])], HEIGHT - _BOTTOM, _TOP).rounded()
    bars = [
        tag(
            "rect",
            x=xs.at(low) + 0.5,
            width=max(xs.at(high) - xs.at(low) - 1, 0.5),
            y=ys.at(count),
            height=ys.at(0) - ys.at(count),
            class_="bar",
        )
        for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
        if count > 0
    ]
    return _figure(title, y_name, [_frame(xs, ys, x_name), *bars])


def _figure(title: str, y_name: str, parts: Iterable[Part], legend: Part = None) -> Html:
    drawing = tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title, class_="chart")
    return tag("figure", tag("figcaption", tag("b", title), tag("span", y_name, class_="dim")), drawing, legend)


def bar(value: float, largest: float, text: str) -> Html:
    """Returns a bar for the cell of a table, its length the share of the largest, with a text beside it."""
    share = min(max(value / largest, 0.0), 1.0) if largest > 0 and math.isfinite(value) else 0.0
    filled = tag("rect", x=0, y=2, width=max(share * 100, 0.0), height=8, class_="bar")
    rail = tag("rect", x=0, y=2, width=100, height=8, class_="rail")
    box = "0 0 100 12"
    drawing = tag("svg", rail, filled, viewBox=box, preserveAspectRatio="none", class_="mini", aria_hidden="true")
    return tag("span", drawing, tag("span", text), class_="meter")


def interval_mark(value: float, low: float, high: float, axis: Axis) -> Html:
    """Returns a value and its interval on a logarithmic axis that the rows of a table share; clipped to its ends."""

    def place(number_: float) -> float:
        if math.isnan(number_):
            return math.nan
        return min(max(axis.at(number_), axis.start), axis.end) if number_ > 0 else axis.start

    middle, left, right = place(value), place(low), place(high) if math.isfinite(high) else axis.end
    parts: list[Part] = [tag("line", x1=axis.start, x2=axis.end, y1=6, y2=6, class_="rail")]
    if axis.has(1.0):
        parts.append(tag("line", x1=place(1.0), x2=place(1.0), y1=0, y2=12, class_="mark"))
    if not math.isnan(left) and not math.isnan(high):
        parts.append(tag("line", x1=left, x2=right, y1=6, y2=6, class_="span"))
    if not math.isnan(middle):
        parts.append(tag("circle", cx=middle, cy=6, r=3.5, class_="dot"))
    return tag("svg", *parts, viewBox="0 0 120 12", class_="interval", role="img", aria_label=number(value))


def _frame(xs: Axis, ys: Axis, x_name: str) -> Html:
    parts: list[Part] = []
    for y in ys.ticks(4):
        parts.append(tag("line", x1=xs.start, x2=xs.end, y1=ys.at(y), y2=ys.at(y), class_="grid"))
        parts.append(tag("text", tick_text(y), x=xs.start - 6, y=ys.at(y) + 4, text_anchor="end"))
    for x in xs.ticks(5):
        parts.append(tag("line", x1=xs.at(x), x2=xs.at(x), y1=ys.start, y2=ys.start + 4, class_="grid"))
        parts.append(tag("text", tick_text(x), x=xs.at(x), y=ys.start + 16, text_anchor="middle"))
    parts.append(tag("line", x1=xs.start, x2=xs.end, y1=ys.start, y2=ys.start, class_="base"))
    parts.append(tag("text", x_name, x=(xs.start + xs.end) / 2, y=HEIGHT - 6.0, text_anchor="middle", class_="name"))
    return join(parts)


def tick_text(value: float) -> str:
    """Returns a number under an axis, in few characters.

    >>> tick_text(0.001), tick_text(1e-5), tick_text(2500.0)
    ('0.001', '1e-5', '2500')
    """
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def photo(data: Any) -> NDArray[np.uint8]:
    """Returns ``[channels, rows, columns]`` as pixels: three channels are RGB, others become their gray mean.

    Brightness runs from the smallest to the largest value, however the data were scaled.
    """
    array = np.nan_to_num(np.asarray(data, dtype=np.float64))
    if array.shape[0] != 3:
        array = np.repeat(array.mean(axis=0, keepdims=True), 3, axis=0)
    low, high = array.min(), array.max()
    bright = (array - low) / (high - low) if high > low else np.full_like(array, 0.5)
    opaque = np.ones((1, *array.shape[1:]))
    return _bytes(np.concatenate([bright, opaque]).transpose(1, 2, 0))


def heat(values: Any, *, signed: bool) -> NDArray[np.uint8]:
    """Returns ``[rows, columns]`` of numbers as pixels: large values are opaque, zero is transparent.

    Full color is the 99th percentile of the absolute values, so that one pixel does not hide the others. If `signed`,
    blue is positive and red negative.
    """
    array = np.nan_to_num(np.asarray(values, dtype=np.float64))
    full = float(np.quantile(np.abs(array), 0.99)) or float(np.abs(array).max()) or 1.0
    strength = np.clip(np.abs(array) / full, 0, 1)
    color = np.where(array[..., None] >= 0, _POSITIVE if signed else _STRONG, _NEGATIVE) / 255
    return _bytes(np.concatenate([color, strength[..., None]], axis=-1))


def image(pixels: NDArray[np.uint8], alt: str, palette: NDArray[np.uint8] | None = None, **more: object) -> Html:
    """Returns the pixels as an element of the page; `more` are its attributes."""
    data = base64.b64encode(png(pixels, palette)).decode("ascii")
    return tag("img", src=f"data:image/png;base64,{data}", alt=alt, **{"class_": "px", **more})


def png(pixels: NDArray[np.uint8], palette: NDArray[np.uint8] | None = None) -> bytes:
    """Returns a PNG file of ``[rows, columns]`` of RGBA; with a palette, of indices into it.

    Reference: W3C, PNG specification (third edition), sections 5 and 11: signature, IHDR, PLTE, tRNS, IDAT, IEND.
    """
    rows, columns = pixels.shape[:2]
    lines = np.zeros((rows, 1 + pixels[0].size), dtype=np.uint8)  # each line starts with its filter: 0, none
    lines[:, 1:] = pixels.reshape(rows, -1)
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6 if palette is None else 3, 0, 0, 0)
    parts = [(b"IHDR", header)]
    if palette is not None:
        parts += [(b"PLTE", palette[:, :3].tobytes()), (b"tRNS", palette[:, 3].tobytes())]
    parts += [(b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _bytes(shares: FloatArray) -> NDArray[np.uint8]:
    return np.round(shares * 255).astype(np.uint8)


# -- the time axis of the HTML report --------------------------------------------------------------------------------

WIDE, TALL = 1000, 100
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
    xs = _step_axis(span)
    parts: list[Part] = [_flags(marks, xs) if marks else None, _actions(actions, xs) if actions else None]
    parts += [_lane(curve, xs, marks, batch_size if curve.metric == "noise_scale" else None) for curve in curves]
    return over_steps(parts, span)


def _step_axis(span: Span) -> Axis:
    return Axis(span.first, max(span.last, span.first + 1), 0.0, float(WIDE))


def over_steps(parts: Iterable[Part], span: Span) -> Html:
    """Returns drawings one under the other, with the steps below; a narrow window hides every other number."""
    xs = _step_axis(span)
    ticks = [tick for tick in xs.ticks(8) if tick == int(tick)]
    steps = [
        tag("span", f"{int(tick):,}", style=f"left:{_percent(xs, tick)}%", class_="odd" if at % 2 else None)
        for at, tick in enumerate(ticks)
    ]
    axis = tag("div", tag("div", class_="label"), tag("div", *steps, class_="xs"), class_="lane axis")
    return tag("div", *parts, axis, class_="timeline", data_first=span.first, data_last=span.last)


def _lane(curve: Curve, xs: Axis, marks: Sequence[Mark], batch_size: float | None) -> Html:
    ys = value_axis(curve, TALL - 4.0, 4.0, beside=batch_size)
    batch_size = batch_size if batch_size is not None and ys.has(batch_size) else None
    parts: list[Part] = [_line([(0, ys.at(tick)), (WIDE, ys.at(tick))], "grid") for tick in ys.ticks(3)]
    for mark in marks:
        at = xs.at(min(max(mark.first, xs.low), xs.high))
        to = xs.at(min(mark.last if mark.last is not None else xs.high, xs.high))
        if to - at > 2 and mark.severity != "info":
            parts.append(tag("rect", x=at, width=to - at, y=0, height=TALL, class_=f"during {mark.severity}"))
        parts.append(_line([(at, 0), (at, TALL)], f"found {mark.severity}"))
    if batch_size is not None:
        parts.append(_line([(0, ys.at(batch_size)), (WIDE, ys.at(batch_size))], "batch"))
    parts += [tag(kind, **shape, class_=_CLASSES[role]) for kind, role, shape in curve_parts(curve, xs, ys, TALL)]
    nonfinite = f"; NaN or infinite from step {int(curve.nonfinite[0][0])}" if curve.nonfinite else ""
    drawing = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {WIDE} {TALL}",
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
    svg = tag("svg", *parts, viewBox=f"0 0 {WIDE} 20", preserveAspectRatio="none", role="img", aria_label=text)
    label = tag("div", tag("b", "Actions"), tag("small", text), class_="label")
    return tag("div", label, tag("div", svg, class_="plot acts"), class_="lane")


def _percent(xs: Axis, step: float) -> float:
    return round(xs.at(step) / WIDE * 100, 2)


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
