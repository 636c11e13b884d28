"""`gradvitals bench page`: how quick the live page is, in a real browser."""

from __future__ import annotations

import click

from gradvitals.cli.output import json_option, print_json


@click.command()
@click.option("--steps", type=click.IntRange(min=1000), default=100_000, show_default=True, help="Length of the run.")
@click.option("--tensors", type=click.IntRange(min=14), default=500, show_default=True, help="Parameters of the model.")
@click.option(
    "--runs", type=click.IntRange(min=1), default=50, show_default=True, help="Runs that one server is asked for."
)
@json_option
def page(steps: int, tensors: int, runs: int, as_json: bool) -> None:
    """Time the page of `gradvitals serve` with made-up runs: first picture, a million points, new steps, memory.

    Needs a Chromium, and playwright to drive it. Takes some two minutes.

    \b
    Example:
      gradvitals bench page
      gradvitals bench page --steps 10000 --json
    """
    from gradvitals.lab.page import format_page, run_page

    result = run_page(steps=steps, tensors=tensors, runs=runs, progress=lambda line: click.echo(line, err=True))
    if as_json:
        print_json(result)
    else:
        click.echo(format_page(result))
