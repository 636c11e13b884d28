"""`gradvitals lab examples`: the noise scale of norm layers against that of the whole model."""

from __future__ import annotations

import click

from gradvitals.cli.output import json_option, print_json
from gradvitals.cli.progress import progress_bar


@click.command()
@click.option("--steps", type=click.IntRange(min=10), default=600, show_default=True, help="Steps of each training.")
@click.option(
    "--every", type=click.IntRange(min=1), default=5, show_default=True, help="Steps from one reading to the next."
)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="How often to train.")
@json_option
def examples(steps: int, every: int, seeds: int, as_json: bool) -> None:
    """Hold the noise scale that norm layers show against that of the whole model.

    Trains a small transformer on text that comes with the package. At every reading the gradient of each example of the
    whole model is computed exactly, and beside the noise scale that follows from them stand those that a Monitor has
    from the weights of norm layers (the source "examples") and from micro-batches.

    It takes about two minutes on one core.

    \b
    Example:
      gradvitals lab examples
      gradvitals lab examples --steps 2000 --every 10 --seeds 2 --json
    """
    from gradvitals.lab.examples import compare, format_comparison

    with progress_bar() as progress:
        result = compare(steps=steps, every=every, seeds=seeds, progress=progress)
    if as_json:
        print_json(result)
    else:
        click.echo(format_comparison(result))
