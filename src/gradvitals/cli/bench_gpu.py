"""`gradvitals bench gpu`: what the kernels reach beside torch's own, and beside the bandwidth of a copy."""

from __future__ import annotations

import click

from gradvitals.cli.output import json_option, print_json

SHAPES = ("gpt-124m", "gpt-1.3b")
PARTS = ("kernels", "training")


@click.command()
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(SHAPES),
    multiple=True,
    help="Model whose tensors to use; may be given several times. [default: both]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="How often each is timed.")
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="The kernels by themselves, or whole training steps. [default: both]",
)
@json_option
def gpu(shapes: tuple[str, ...], rounds: int, parts: tuple[str, ...], as_json: bool) -> None:
    """Time the kernels on an NVIDIA GPU: statistics, AdamW, clipping, whole watched training steps.

    \b
    Example:
      gradvitals bench gpu
      gradvitals bench gpu --shape gpt-124m --part kernels --json
    """
    from gradvitals.lab.gpu import format_gpu, run_gpu

    result = run_gpu(
        shapes or None, rounds=rounds, parts=parts or PARTS, progress=lambda line: click.echo(line, err=True)
    )
    if as_json:
        print_json(result)
    else:
        click.echo(format_gpu(result))
