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

from gradvitals.show.terminal import Spark
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
        self.scale = _noise_scale(latest)

    def __rich__(self) -> RenderableType:
        """The panel as it stands."""
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(f"step {self.done}/{self.total}"),
            ProgressBar(total=self.total, completed=self.done, width=30),
            Text(duration(time.perf_counter() - self.start)),
        )
        body = Table.grid(padding=(0, 2))
        body.add_column(no_wrap=True)
        body.add_column(justify="right", no_wrap=True, min_width=8)
        body.add_column(ratio=1)
        body.add_row("loss", _last(self.loss), Spark(self.loss))
        body.add_row("gradient norm", _last(self.norm), Spark(self.norm, robust=False))
        body.add_row("GSNR", _last(self.gsnr), Spark(self.gsnr))
        return Group(head, body, Text(f"noise scale    {_noise_text(self.scale)}"))


class Lines:
    """A line now and then, for logs and pipes, and one more where the norm jumps."""

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self.total = total
        self.every = max(1, total // PLAIN_LINES)

    def update(self, step: int, loss: float, latest: Mapping[str, float]) -> None:
        """Take in one more step."""
        norm, gsnr, ratio = (latest.get(name, NAN) for name in ("grad/norm", "gsnr", "grad/spike_ratio"))
        if step == 1 or step % self.every == 0 or step == self.total:
            line = f"step {step:>4}/{self.total}  loss {number(loss):<6}  norm {number(norm):<6}"
            line += f"  GSNR {number(gsnr):<7}  noise scale {_noise_text(_noise_scale(latest))}"
            self.console.print(line, soft_wrap=True)
        if ratio > JUMP:
            text = f"step {step:>4}/{self.total}  the gradient norm jumped to {number(norm)}, "
            text += f"{number(ratio)} times its moving average"
            self.console.print(text, soft_wrap=True)


@contextmanager
def live_view(console: Console, total: int) -> Iterator[View]:
    """The view that suits the console, shown until the block ends."""
    if not console.is_terminal or console.is_dumb_terminal or os.environ.get("CI"):
        yield Lines(console, total)
        return
    panel = Panel(total)
    with Live(panel, console=console, refresh_per_second=5):
        yield panel


def _last(values: list[float]) -> str:
    return number(values[-1]) if values else "-"


def _noise_scale(latest: Mapping[str, float]) -> tuple[float, float, float]:
    names = ("noise_scale", "noise_scale_low", "noise_scale_high")
    value, low, high = (latest.get(name, NAN) for name in names)
    return value, low, high


def _noise_text(scale: tuple[float, float, float]) -> str:
    text = interval(*scale)
    return "not identifiable yet" if text == "-" else f"{text} samples"
