"""The figures as stand-alone SVG files: three that the reference note captions, and three of the language models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from experiments.scale_adaptation.adaptation import ADAPTS, TensorRow, balanced_accuracy, best_threshold, gains, roc
from experiments.scale_adaptation.run import Results
from experiments.scale_adaptation.simulation import SimRow
from gradvitals.show.svg import Axis

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


SHAPES = ("matrix", "vector", "scalar", "multiplier")
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}


def draw_figures(results: Results, folder: Path) -> list[Path]:
    """Write every figure that there is something for. Returns where they are."""
    figures: dict[str, str] = {}
    if results.simulation:
        rows = [row for row in results.simulation if (row.case.noise, row.case.target) == ("iid", "aligned")]
        most = max((row.seed for row in rows if row.case.shape == "matrix"), default=0)
        few = [row for row in rows if row.seed <= most]  # as many of each shape
        figures |= {
            "1_predictor": draw(_predictor(few), "GSNR as predictor of scale adaptation"),
            "2_noise_levels": draw(_levels(rows), "GSNR and scale adaptation across noise levels"),
            "3_classifier": draw(_classifier(few), "Threshold classification by GSNR"),
        }
    if results.adaptation:
        figures |= {
            "4_language_models": draw(_language(results.adaptation), "Tensors of language models"),
            "5_indicators": draw(_indicators(results.adaptation), "What tells which tensors adapt"),
        }
    if results.cure:
        figures["6_multipliers"] = draw(_cure(results), "Loss with and without multipliers")
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, content in figures.items():
        path = folder / f"{name}.svg"
        path.write_text(content, "utf-8")
        paths.append(path)
    return paths


def _by(rows: Sequence[SimRow], optimizer: str) -> dict[str, list[SimRow]]:
    mine = [row for row in rows if row.case.optimizer == optimizer]
    found = {shape: [row for row in mine if row.case.shape == shape] for shape in SHAPES}
    return {shape: some for shape, some in found.items() if some}


def _predictor(rows: Sequence[SimRow]) -> list[Panel]:
    panels = []
    for optimizer, name in OPTIMIZERS.items():
        groups = {shape: some for shape, some in _by(rows, optimizer).items() if shape != "multiplier"}
        every = [row for some in groups.values() for row in some]
        scores, labels = np.array([r.gsnr for r in every]), np.array([r.elasticity > ADAPTS for r in every])
        panel = Panel(title=name, x_name="GSNR", y_name="elasticity", x_log=True)
        panel.x_marks, panel.y_marks = [best_threshold(scores, labels)], [ADAPTS]
        for shape, some in groups.items():
            x, y = [row.gsnr for row in some], [min(max(row.elasticity, -0.2), 1.5) for row in some]
            panel.traces.append(Trace(name=shape, x=x, y=y, colour=SHAPES.index(shape)))
        panels.append(panel)
    return panels


def _levels(rows: Sequence[SimRow]) -> list[Panel]:
    left = Panel(title="GSNR", x_name="noise level", y_name="GSNR", x_log=True, y_log=True)
    panels = [left]
    for optimizer, name in OPTIMIZERS.items():
        panel = Panel(title=f"Adaptation, {name}", x_name="noise level", y_name="elasticity", x_log=True)
        for shape, some in _by(rows, optimizer).items():
            levels = sorted({row.noise_level for row in some})
            colour = SHAPES.index(shape)
            middle = [float(np.median([r.elasticity for r in some if r.noise_level == level])) for level in levels]
            panel.traces.append(Trace(name=shape, x=levels, y=middle, line=True, colour=colour))
            if optimizer == "sgd":
                gsnr = [float(np.median([r.gsnr for r in some if r.noise_level == level])) for level in levels]
                left.traces.append(Trace(name=shape, x=levels, y=gsnr, line=True, colour=colour))
        panel.y_marks = [ADAPTS]
        panels.append(panel)
    return panels


def _classifier(rows: Sequence[SimRow]) -> list[Panel]:
    accuracy = Panel(title="Accuracy", x_name="threshold of GSNR", y_name="balanced accuracy", x_log=True)
    curve = Panel(title="ROC", x_name="false alarms", y_name="found")
    for place, (optimizer, name) in enumerate(OPTIMIZERS.items()):
        some = [row for row in rows if row.case.optimizer == optimizer and row.case.shape != "multiplier"]
        scores, labels = np.array([r.gsnr for r in some]), np.array([r.elasticity > ADAPTS for r in some])
        thresholds = np.geomspace(1e-4, 1e6, 120)
        told = [balanced_accuracy(scores, labels, float(threshold)) for threshold in thresholds]
        accuracy.traces.append(Trace(name=name, x=thresholds.tolist(), y=told, line=True, colour=place))
        false, true = roc(scores, labels)
        curve.traces.append(Trace(name=name, x=false.tolist(), y=true.tolist(), line=True, colour=place))
    return [accuracy, curve]


def _roles(rows: Sequence[TensorRow], x: str, y: str, panel: Panel) -> Panel:
    for colour, role in enumerate(("matrix", "vector", "scalar")):
        some = [row for row in rows if row.role == role]
        if some:
            trace = Trace(name=role, x=[getattr(r, x) for r in some], y=[getattr(r, y) for r in some], colour=colour)
            panel.traces.append(trace)
    return panel


def _language(rows: Sequence[TensorRow]) -> list[Panel]:
    sizes = Panel(title="Size against pure noise", x_name="RMS by noise", y_name="RMS", x_log=True, y_log=True)
    ends = [min(row.noise_rms for row in rows), max(row.noise_rms for row in rows)]
    sizes.traces.append(Trace(name="", x=ends, y=ends, line=True, colour=5))
    follow = Panel(title="Who follows", x_name="norm over that of noise", y_name="elasticity", x_log=True)
    follow.x_marks, follow.y_marks = [1.0], [ADAPTS]
    return [_roles(rows, "noise_rms", "rms", sizes), _roles(rows, "norm_ratio", "elasticity", follow)]


def _indicators(rows: Sequence[TensorRow]) -> list[Panel]:
    named = {"gsnr": "GSNR", "radial_gsnr": "radial GSNR", "adam_gsnr": "debiased Adam proxy"}
    return [
        _roles(rows, x, "elasticity", Panel(title=name, x_name=name, y_name="elasticity", x_log=True, y_marks=[ADAPTS]))
        for x, name in named.items()
    ]


def _cure(results: Results) -> list[Panel]:
    found = gains(results.cure)
    panels = []
    for lr in dict.fromkeys(gain.lr for gain in found):
        panel = Panel(title=f"learning rate {lr:g}", x_name="weight decay", y_name="loss, nats a byte", x_log=True)
        for colour, arm in enumerate(dict.fromkeys(gain.arm for gain in found)):
            mine = [gain for gain in found if (gain.arm, gain.lr) == (arm, lr)]
            x, y = [gain.decay for gain in mine], [gain.loss for gain in mine]
            panel.traces.append(Trace(name=arm, x=x, y=y, line=True, colour=colour))
        panels.append(panel)
    return panels
