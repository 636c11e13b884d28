"""`gradvitals ls`: the runs in a folder, a line each."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, print_json
from gradvitals.places import default_folder

SHOWN = 20


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=default_folder)
@click.option(
    "-n", "--limit", type=click.IntRange(min=0), default=SHOWN, show_default=True, help="Runs to show; 0: all."
)
@json_option
def ls(folder: Path, limit: int, as_json: bool) -> None:
    """List the runs in FOLDER, the newest first.

    Without FOLDER, lists those in gradvitals_runs/, or in runs/ if only that is there.

    Each line shows a status light, the number of steps, the last loss, the age of the run, and what is wrong.

    \b
    Example:
      gradvitals ls
      gradvitals ls /data/runs -n 0 --json
    """
    from gradvitals.errors import RunNotFoundError
    from gradvitals.report.listing import find_runs, list_runs

    if not folder.exists() and folder != default_folder():
        raise RunNotFoundError(f"there is no folder {folder}")
    found = sorted(find_runs(folder), key=lambda file: -file.modified)
    lines = list_runs(found[: limit or None], folder)
    if as_json:
        print_json({"folder": str(folder), "num_runs": len(found), "runs": [line.to_json() for line in lines]})
        return
    if not found:
        click.echo(
            f"There are no runs in {folder}. Record one with `gradvitals run train.py`, or try `gradvitals demo`."
        )
        return
    from gradvitals.report.terminal import render_list

    console().print(render_list(lines, hidden=len(found) - len(lines)))
