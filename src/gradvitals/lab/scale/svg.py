"""Small figures as SVG files that stand alone: one or more panels side by side, each with points and lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from gradvitals.report.charts import Axis

WIDTH, HEIGHT = 400, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 34, 46
COLOURS = ("#3b6fd4", "#d9822b", "#2f9e6e", "#b04fc0", "#c0392b", "#6b7280")
INK = "#808080"
"""Readable on white and on black, as a page may be either."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Points or a line, of one colour and one name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = False
    colour: int = 0


@dataclass(kw_only=True)
class Panel:
    """One pair of axes. Points that are not finite, or not above 0 on a logarithmic axis, are left out."""

    title: str
    x_name: str
    y_name: str
    x_log: bool = False
    y_log: bool = False
    traces: list[Trace] = field(default_factory=list)
    x_marks: Sequence[float] = ()
    """Dashed lines straight up."""
    y_marks: Sequence[float] = ()
    """Dashed lines across."""


def draw(panels: Sequence[Panel], title: str) -> str:
    """The figure as the text of an SVG file."""
    width = WIDTH * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'role="img" font-family="sans-serif" font-size="11" fill="{INK}">',
        f"<title>{escape(title)}</title>",
    ]
    for place, panel in enumerate(panels):
        parts += [f'<g transform="translate({place * WIDTH} 0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    xs = _axis([x for trace in panel.traces for x in trace.x], panel.x_marks, LEFT, WIDTH - RIGHT, panel.x_log)
    ys = _axis([y for trace in panel.traces for y in trace.y], panel.y_marks, HEIGHT - BOTTOM, TOP, panel.y_log)
    parts = [f'<text x="{LEFT}" y="14" font-weight="bold">{escape(panel.title)}</text>']
    parts.append(_rule(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM))
    parts.append(_rule(LEFT, TOP, LEFT, HEIGHT - BOTTOM))
    for tick in xs.ticks():
        parts.append(_words(xs.at(tick), HEIGHT - BOTTOM + 15, _number(tick), "middle"))
        parts.append(_rule(xs.at(tick), HEIGHT - BOTTOM, xs.at(tick), HEIGHT - BOTTOM + 4))
    for tick in ys.ticks():
        parts.append(_words(LEFT - 7, ys.at(tick) + 4, _number(tick), "end"))
        parts.append(_rule(LEFT - 4, ys.at(tick), LEFT, ys.at(tick)))
    parts.append(_words((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, panel.x_name, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f'transform="rotate(-90 12 {middle})"'
    parts.append(f'<text x="12" y="{middle}" text-anchor="middle" {turned}>{escape(panel.y_name)}</text>')
    for mark in panel.x_marks:
        if xs.has(mark):
            parts.append(_rule(xs.at(mark), TOP, xs.at(mark), HEIGHT - BOTTOM, dashed=True))
    for mark in panel.y_marks:
        if ys.has(mark):
            parts.append(_rule(LEFT, ys.at(mark), WIDTH - RIGHT, ys.at(mark), dashed=True))
    for trace in panel.traces:
        parts += _trace(trace, xs, ys)
    return parts + _legend(panel.traces)


def _axis(values: Sequence[float], marks: Sequence[float], start: float, end: float, logarithmic: bool) -> Axis:
    shown = [value for value in (*values, *marks) if math.isfinite(value) and (value > 0 or not logarithmic)]
    axis = Axis.over(shown, start, end, logarithmic=logarithmic)
    if logarithmic:
        return Axis(axis.low / 1.3, axis.high * 1.3, start, end, True)
    room = 0.04 * (axis.high - axis.low)
    return Axis(axis.low - room, axis.high + room, start, end)


def _trace(trace: Trace, xs: Axis, ys: Axis) -> list[str]:
    colour = COLOURS[trace.colour % len(COLOURS)]
    points = [(xs.at(x), ys.at(y)) for x, y in zip(trace.x, trace.y, strict=True) if xs.has(x) and ys.has(y)]
    if trace.line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>']
    return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}" fill-opacity="0.65"/>' for x, y in points]


def _legend(traces: Sequence[Trace]) -> list[str]:
    """Names in one row over the axes, each in its colour."""
    parts, x = [], float(LEFT)
    for name, colour in dict.fromkeys((trace.name, trace.colour) for trace in traces if trace.name):
        ink = COLOURS[colour % len(COLOURS)]
        parts.append(f'<circle cx="{x + 4}" cy="24" r="4" fill="{ink}"/>')
        parts.append(_words(x + 12, 28, name, "start"))
        x += 24 + 6.2 * len(name)
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}"{dash}/>'


def _words(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(value: float) -> str:
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)) + 1e-9)
    return f"{value:.4g}" if -3 <= power < 4 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
