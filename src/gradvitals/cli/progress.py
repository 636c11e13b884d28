"""How far a long command is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

Progress = Callable[[int, int, str], object]
"""Called with how many runs are done, how many there are, and the name of the last."""


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on stderr, where that is a terminal; a line now and then where it is not."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    if not console.is_terminal:
        yield _tell_now_and_then
        return
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


def _tell_now_and_then(done: int, total: int, label: str) -> None:
    if done == total or done % max(1, total // 10) == 0:
        click.echo(f"{done} of {total} runs, the last was {label}", err=True)
