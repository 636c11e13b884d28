"""What a Run takes from `gradvitals.report`, which is above the store: its verdict, plots, and its notebook display."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from gradvitals.store.frames import Kind

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gradvitals.report.verdict import Verdict
    from gradvitals.store.reader import Run

Names = str | int | Sequence[str | int] | None
"""A tensor, layer or head by its name, a rank by its number, several of them, or none."""


class Drawn:
    """The verdict on a run, and its plots. All of it is imported on first use."""

    @property
    def verdict(self) -> Verdict:
        """How the run is: level, headline, cause, fix, findings. Prints itself, and displays itself in a notebook.

        A run that was recorded without diagnosis is replayed first, which takes a while if it is long.

        Raises:
            RunError: If the run has no readings yet.
        """
        return cast("Verdict", _report().verdict_of(cast("Run", self)))

    def plot(
        self,
        metric: str,
        *,
        tensor: Names = None,
        layer: Names = None,
        head: Names = None,
        rank: Names = None,
        kind: Kind | None = None,
        source: str | None = None,
        ax: Axes | None = None,
        band: bool = True,
        marks: bool = True,
        **style: Any,
    ) -> Axes:
        """Draw one metric over steps with matplotlib (``pip install 'gradvitals[plots]'``).

        Args:
            metric: Its id, such as ``gsnr``.
            tensor: A tensor's name, or several for a line each.
            layer: Likewise of layers.
            head: Likewise of attention heads.
            rank: Likewise the number of a process.
            kind: Instead of lines a map of all ``layers``, ``tensors``, ``heads`` or ``ranks``.
            source: Which source; None takes the most trustworthy one present.
            ax: Where to draw; None makes a new figure.
            band: Shade the 95% interval, where the metric has one.
            marks: Dotted lines where something was found that is more than a note.
            **style: For matplotlib, such as ``color`` or ``linewidth``.

        Returns:
            The axes that were drawn on.

        Example:
            >>> run.plot("gsnr", tensor="head.weight")  # doctest: +SKIP
            >>> run.plot("grad/norm", kind="layers")  # doctest: +SKIP
        """
        chosen = {"tensor": tensor, "layer": layer, "head": head, "rank": rank}
        drawn = _report().plot(
            cast("Run", self), metric, chosen, kind=kind, source=source, ax=ax, band=band, marks=marks, style=style
        )
        return cast("Axes", drawn)

    def _repr_html_(self) -> str:
        return str(_report().run_html(cast("Run", self)))


def _report() -> ModuleType:
    from gradvitals.report import notebook

    return notebook
