"""A training run while it happens: a live panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gradvitals.show.terminal import LABELS, spark_of, vitals
from gradvitals.show.text import duration, interval, number

NAN = float("nan")
PLAIN_LINES = 12
"""Lines a plain view prints over a whole run, beside the first."""
JUMP = 5.0
"""Spike ratio from which a jump of the norm is told at once."""


class View(Protocol):
    """Shows a run step by step."""

    def update(self, step: int, loss: float, latest: Mapping[str, float]) -> None:
        """Take in one more step: how many are done, its loss, and the latest values of all metrics."""


class Panel:
    """Progress, loss, norm and GSNR as sparklines, and the noise scale."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.start = time.perf_counter()
        self.loss: list[float] = []
        self.norm: list[float] = []
        self.gsnr: list[float] = []
        self.scale = (NAN, NAN, NAN)

    def update(self, step: int, loss: float, latest: Mapping[str, float]) -> None:
        """Take in one more step."""
        self.done = step
        self.loss.append(loss)
        self.norm.append(latest.get("grad/norm", NAN))
        self.gsnr.append(latest.get("gsnr", NAN))
        self.scale = noise_scale_of(latest)

    def __rich__(self) -> RenderableType:
        """The panel as it stands."""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self.done}/{self.total}"),
            ProgressBar(total=self.total, completed=self.done, width=30),
            Text(duration(time.perf_counter() - self.start)),
        )
        series = {"loss": self.loss, "grad/norm": self.norm, "gsnr": self.gsnr}
        rows = ((LABELS[metric], _last(values), spark_of(metric, values)) for metric, values in series.items())
        return Group(head, vitals(rows), Text(f"noise scale    {noise_text(self.scale)}"))


class Lines:
    """A line now and then, for logs and pipes, and one more where the norm jumps."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.total = total
        self.every = max(1, total // PLAIN_LINES)

    def update(self, step: int, loss: float, latest: Mapping[str, float]) -> None:
        """Take in one more step."""
        norm, ratio = (latest.get(name, NAN) for name in ("grad/norm", "grad/spike_ratio"))
        if step == 1 or step % self.every == 0 or step == self.total:
            self.console.print(plain_line(f"step {step:>4}/{self.total}", {**latest, "loss": loss}), soft_wrap=True)
        if ratio > JUMP:
            text = f"step {step:>4}/{self.total}  the gradient norm jumped to {number(norm)}, "
            text += f"{number(ratio)} times its moving average"
            self.console.print(text, soft_wrap=True)


@contextmanager
def live_view(console: Console, total: int) -> Iterator[View]:
    """The view that suits the console, shown until the block ends."""
    if not can_redraw(console):
        yield Lines(console, total)
        return
    panel = Panel(total)
    with Live(panel, console=console, refresh_per_second=5):
        yield panel


def can_redraw(console: Console) -> bool:
    """Whether there is a screen that can be drawn on again and again, and somebody who may look at it."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


def plain_line(head: str, latest: Mapping[str, float], *, ended: bool = False) -> str:
    """The latest values in one line of text, of a run that goes on or has ended."""
    loss, norm, gsnr = (latest.get(name, NAN) for name in ("loss", "grad/norm", "gsnr"))
    line = f"{head}  loss {number(loss):<6}  norm {number(norm):<6}  GSNR {number(gsnr):<7}"
    if "noise_scale" not in latest or (ended and interval(*noise_scale_of(latest)) == "-"):
        return line.rstrip()  # it is not measured in this loop, or what could not be told by now never will
    return f"{line}  noise scale {noise_text(noise_scale_of(latest))}"


def _last(values: list[float]) -> str:
    return number(values[-1]) if values else "-"


def noise_scale_of(latest: Mapping[str, float]) -> tuple[float, float, float]:
    """The noise scale and the ends of its interval."""
    names = ("noise_scale", "noise_scale_low", "noise_scale_high")
    value, low, high = (latest.get(name, NAN) for name in names)
    return value, low, high


def noise_text(scale: tuple[float, float, float]) -> str:
    """The same in words."""
    text = interval(*scale)
    return "not identifiable yet" if text == "-" else f"{text} samples"
