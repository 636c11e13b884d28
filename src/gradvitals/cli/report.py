"""`gradvitals report`: what a run shows, on one screen."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, print_json


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def report(run: Path, as_json: bool) -> None:
    """Show the state of RUN: trends, every layer, the worst tensors, findings.

    Works on a finished run and on one that is being written. Needs no torch.

    \b
    Example:
      gradvitals report runs/demo
      gradvitals report runs/demo --json | jq .noise_scale
    """
    from gradvitals.show.summary import summarize
    from gradvitals.store.reader import open_run

    opened = open_run(run)
    try:
        summary = summarize(opened)
    finally:
        opened.close()
    if as_json:
        print_json(summary.to_json())
    else:
        from gradvitals.show.terminal import render_summary

        console().print(render_summary(summary))
