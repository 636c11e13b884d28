"""Draws panels of points and lines into an SVG file that is readable on white and on black."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDTH, HEIGHT = 4.0, 3.0
"""Of a panel, in inches."""
COLORS = ("#3b6fd4", "#d9822b", "#2f9e6e", "#b04fc0", "#c0392b", "#6b7280")
INK = "#808080"
"""Readable on white and on black, as a page may be either."""
STYLE: dict[Any, Any] = {
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "gradvitals",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Points or a line, of one color and one name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    line: bool = False
    color: int = 0


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


def draw(panels: Sequence[Panel], title: str, path: Path) -> None:
    """Draw panels side by side into an SVG file."""
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(panels), figsize=(WIDTH * len(panels), HEIGHT), squeeze=False, layout="constrained"
        )
        for panel, axis in zip(panels, axes[0], strict=True):
            _draw_panel(panel, axis)
        figure.savefig(path, format="svg", transparent=True, metadata={"Title": title, "Date": None})
        plt.close(figure)


def _draw_panel(panel: Panel, axis: Any) -> None:
    axis.set(title=panel.title, xlabel=panel.x_name, ylabel=panel.y_name)
    axis.set_xscale("log" if panel.x_log else "linear")
    axis.set_yscale("log" if panel.y_log else "linear")
    for trace in panel.traces:
        style = {"linewidth": 1.8} if trace.line else {"marker": ".", "linestyle": "", "alpha": 0.65}
        axis.plot(trace.x, trace.y, color=COLORS[trace.color % len(COLORS)], label=trace.name or "_", **style)
    for mark in panel.x_marks:
        if math.isfinite(mark):
            axis.axvline(mark, color=INK, linestyle="--")
    for mark in panel.y_marks:
        axis.axhline(mark, color=INK, linestyle="--")
    if any(trace.name for trace in panel.traces):
        axis.legend(frameon=False)
