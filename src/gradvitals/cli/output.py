"""Shared by commands: the RUN argument, strict JSON, and text made for the terminal."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gradvitals.places import default_folder, searched_folders

if TYPE_CHECKING:
    from rich.console import Console

    from gradvitals.report.replay import OnStep

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")


def print_json(result: Any, *, indent: int | None = 2) -> None:
    """Print strict JSON: numbers that JSON cannot hold become the strings 'nan', 'inf' and '-inf'."""
    from gradvitals.types import json_ready

    click.echo(json.dumps(json_ready(result), indent=indent, allow_nan=False))


def console() -> Console:
    """A console that prints text as it is: no markup, no emoji codes, no guessing at numbers.

    A character that the terminal has no code for is shown as its escape.
    """
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(markup=False, emoji=False, highlight=False)


@contextmanager
def replay_bar(last_step: int) -> Iterator[OnStep]:
    """Shows a bar on stderr while readings are replayed, if it is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("replaying", total=last_step + 1, visible=False)
        yield lambda step: bar.update(task, completed=step + 1, visible=True)


Command = TypeVar("Command", bound=Callable[..., Any])


def run_argument(command: Command) -> Command:
    """Adds RUN to a command, as `run`: the path of a folder."""
    return click.argument("run", required=False, metavar="[RUN]", callback=lambda _, __, run: resolve(run))(command)


def resolve(name: str | None, *, must_exist: bool = True) -> Path:
    """Returns the folder that a RUN on the command line means; the newest run in the default folder if it is None.

    Raises:
        RunNotFoundError: If there is none; it names those that exist.
    """
    from gradvitals.report.listing import newest_runs
    from gradvitals.store.opening import find_run_file

    if name is None:
        return newest_runs(1)[0]
    path = Path(name)
    kept = [folder / path for folder in searched_folders() if (folder / path).exists()]
    short = kept[0] if kept else default_folder() / path
    if path.exists() or path.is_absolute() or (not short.exists() and len(path.parts) > 1):
        return path
    if must_exist and default_folder().exists():
        find_run_file(short)
    return short if short.exists() else path
