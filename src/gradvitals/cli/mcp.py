"""`gradvitals mcp`: the runs in a folder, for a coding agent."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.places import default_folder


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=default_folder)
def mcp(folder: Path) -> None:
    """Serve the runs in FOLDER to a coding agent over stdio (Model Context Protocol).

    The agent can list runs, get verdicts, read series, explain rules and compare runs; it cannot change anything.
    Without FOLDER, serves gradvitals_runs/, or runs/ if only that exists. Needs an extra: pip install
    'gradvitals[mcp]'.

    \b
    Example:
      claude mcp add gradvitals -- gradvitals mcp runs
    """
    from gradvitals.web.mcp import build_server

    build_server(folder).run("stdio")
