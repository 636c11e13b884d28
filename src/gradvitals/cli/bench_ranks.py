"""`gradvitals bench ranks`: what watching costs several ranks, measured here and on paper for many more."""

from __future__ import annotations

import click

from gradvitals.cli.output import json_option, print_json


@click.command()
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True, help="Processes to start.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How often to go through all kinds of readings, 200 watched steps each.",
)
@click.option("--paper", is_flag=True, help="Time nothing: only what follows from the layout of the messages.")
@json_option
def ranks(ranks: int, rounds: int, paper: bool, as_json: bool) -> None:
    """Time watched steps of several ranks against bare ones, and count what they tell each other.

    Starts processes (gloo, on the CPU) that train a small transformer under DDP, and prints the same for 1,024 GPUs and
    more on paper: bytes, time, memory, and what they grow with. Takes about ten minutes on two cores.

    \b
    Example:
      gradvitals bench ranks
      gradvitals bench ranks --paper
      gradvitals bench ranks --ranks 2 --rounds 1 --json
    """
    from gradvitals.lab.distributed.cost import format_paper, format_ranks, run_ranks
    from gradvitals.lab.distributed.paper import on_paper

    if paper:
        found = on_paper()
        if as_json:
            print_json(found)
        else:
            click.echo(format_paper(found))
        return
    result = run_ranks(ranks=ranks, rounds=rounds, progress=lambda line: click.echo(line, err=True))
    if as_json:
        print_json(result)
    else:
        click.echo(format_ranks(result))
