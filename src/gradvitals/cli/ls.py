"""`gradvitals ls`: the runs in a folder, a line each."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, print_json
from gradvitals.places import searched_folders

SHOWN = 20


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    default=SHOWN,
    show_default=True,
    help="Number of runs to show; 0 shows all.",
)
@json_option
def ls(folder: Path | None, limit: int, as_json: bool) -> None:
    """List the runs in FOLDER, newest first. FOLDER defaults to gradvitals_runs/ and runs/.

    Each line shows a status light, the steps, the last loss, the age, and what is wrong.

    \b
    Example:
      gradvitals ls
      gradvitals ls /data/runs -n 0 --json
    """
    from gradvitals.errors import RunNotFoundError
    from gradvitals.report.listing import find_runs, list_runs

    if folder is not None and not folder.exists():
        raise RunNotFoundError(f"there is no folder {folder}")
    folders = searched_folders() if folder is None else [folder]
    found = sorted(((file, one) for one in folders for file in find_runs(one)), key=lambda pair: -pair[0].modified)
    lines = [line for file, one in found[: limit or None] for line in list_runs([file], one)]
    if as_json:
        runs = [line.to_json() for line in lines]
        print_json({"folders": [str(one) for one in folders], "num_runs": len(found), "runs": runs})
        return
    if not found:
        places = " or ".join(map(str, folders))
        click.echo(
            f"There are no runs in {places}. Record one with `gradvitals run train.py`, or try `gradvitals demo`."
        )
        return
    from gradvitals.report.terminal import render_list

    screen = console()
    screen.print(render_list(lines, hidden=len(found) - len(lines), width=screen.width))
