"""The RUN argument that most commands share: a folder, a name in runs/, or nothing for the newest run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from gradvitals.places import default_folder

Command = TypeVar("Command", bound=Callable[..., Any])


def run_argument(command: Command) -> Command:
    """Adds RUN to a command, as `run`: the path of a folder."""
    return click.argument("run", required=False, metavar="[RUN]", callback=lambda _, __, run: resolve(run))(command)


def resolve(name: str | None, *, must_exist: bool = True) -> Path:
    """Returns the folder that a RUN on the command line means; the newest run in the default folder if it is None.

    Raises:
        RunNotFoundError: If there is none; it names those that exist.
    """
    from gradvitals.report.listing import newest_run
    from gradvitals.store.opening import find_run_file

    if name is None:
        return newest_run()
    path = Path(name)
    short = default_folder() / path
    if path.exists() or path.is_absolute() or (not short.exists() and len(path.parts) > 1):
        return path
    if must_exist and default_folder().exists():
        find_run_file(short)
    return short if short.exists() else path
