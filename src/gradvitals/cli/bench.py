"""`gradvitals bench`: what monitoring costs on this machine."""

from __future__ import annotations

import click

from gradvitals.cli.output import json_option, print_json

SHAPES = ("mlp", "cnn", "transformer", "gpt-124m", "gpt-1.3b")
VARIANTS = ("default", "norms+gsnr every step", "everything every step", "norm loop", "histograms", "bare")
"""Both as in `gradvitals.bench`, which imports torch."""


@click.group()
def bench() -> None:
    """Measure what gradvitals costs on this machine.

    \b
    Example:
      gradvitals bench overhead
    """


@bench.command()
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where to run; auto takes a GPU if there is one.",
)
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(SHAPES),
    multiple=True,
    help="Model to time; may be given several times. [default: all that suit the device]",
)
@click.option(
    "--variant",
    "variants",
    type=click.Choice(VARIANTS),
    multiple=True,
    help="What to time; may be given several times. [default: all]",
)
@click.option("--steps", type=click.IntRange(min=1), help="Timed steps of each kind in a round.")
@click.option("--rounds", type=click.IntRange(min=1), help="Rounds of bare and monitored steps in turn.")
@click.option(
    "--keep-memory/--no-keep-memory",
    default=True,
    show_default=True,
    help="On a CPU: have the C library keep freed memory, so that page faults do not blur the times.",
)
@json_option
def overhead(
    device: str,
    shapes: tuple[str, ...],
    variants: tuple[str, ...],
    steps: int | None,
    rounds: int | None,
    keep_memory: bool,
    as_json: bool,
) -> None:
    """Time monitored steps against bare steps of the same model, in turn.

    \b
    Example:
      gradvitals bench overhead
      gradvitals bench overhead --variant default --variant bare --rounds 40
      gradvitals bench overhead --device cuda --shape gpt-124m --json
    """
    from gradvitals.bench import format_overhead, run_overhead

    result = run_overhead(
        device=device,
        shapes=shapes or None,
        variants=variants or None,
        steps=steps,
        rounds=rounds,
        progress=lambda line: click.echo(line, err=True),
        keeps_memory=keep_memory,
    )
    if as_json:
        print_json(result)
    else:
        click.echo(format_overhead(result))
