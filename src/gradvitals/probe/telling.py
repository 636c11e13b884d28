"""How far an examination is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, str], object]


class Telling:
    """Counts what is done and passes it on."""

    def __init__(self, progress: Progress, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def step(self, label: str) -> None:
        """One part is done."""
        self.done = min(self.done + 1, self.total)
        self.say(label)

    def say(self, label: str) -> None:
        """Something goes on within a part."""
        self.progress(self.done, self.total, label)


@contextmanager
def telling(progress: Progress | bool, total: int) -> Iterator[Telling]:
    """A bar on stderr where that is a terminal, nothing where it is not, or the function given."""
    if callable(progress):
        yield Telling(progress, total)
        return
    from rich.console import Console

    console = Console(stderr=True)
    if not progress or not console.is_terminal:
        yield Telling(lambda done, total, label: None, total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield Telling(lambda done, total, label: bar.update(task, completed=done, description=label), total)
