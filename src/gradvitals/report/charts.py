"""Small charts as inline SVG, whose colors follow the page's light or dark style, and images as inline PNG."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradvitals.report.format import number
from gradvitals.report.markup import Html, Part, join, tag
from gradvitals.types import FloatArray

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
