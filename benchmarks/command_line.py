"""What the benchmarks and experiments share: options, progress and how a result is printed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from gradvitals.cli.output import json_option, print_json
from gradvitals.errors import GradvitalsError
from gradvitals.probe.examination import pick_device

__all__ = [
    "Command",
    "Progress",
    "device_option",
    "echo_line",
    "json_option",
    "pick_device",
    "print_json",
    "print_result",
    "progress_bar",
]

Result = TypeVar("Result")
Progress = Callable[[int, int, str], object]
"""Called with the number of finished runs, the number of all runs, and the name of the last one."""

device_option = click.option(
    "--device",
    type=click.Choice(("auto", "cpu", "cuda")),
    default="auto",
    show_default=True,
    help="Where to run; auto takes a GPU if there is one.",
)


class Failure(click.ClickException):
    """Ends a command with one line on stderr and status 2."""

    exit_code = 2


class Command(click.Command):
    """A command that prints an error of gradvitals in one line and exits with 2."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except GradvitalsError as error:
            raise Failure(" ".join(str(error).split())) from error


def print_result(result: Result, as_json: bool, format_result: Callable[[Result], str]) -> None:
    """Print a result as one JSON value or as text."""
    if as_json:
        print_json(result)
    else:
        click.echo(format_result(result))


def echo_line(line: str) -> None:
    """Print a line of progress on stderr."""
    click.echo(line, err=True)


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a bar on stderr if that is a terminal, and ten lines of progress if it is not."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    if not console.is_terminal:
        yield _echo_every_tenth
        return
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda done, total, label: bar.update(task, completed=done, total=total, description=label)


def _echo_every_tenth(done: int, total: int, label: str) -> None:
    if done == total or done % max(1, total // 10) == 0:
        echo_line(f"{done} of {total} runs, last: {label}")
