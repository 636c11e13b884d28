"""`gradvitals advise`: what a run says about how to set the next one."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, print_json


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def advise(run: Path, as_json: bool) -> None:
    """Advise on settings, by what RUN shows: clipping, batch size, warmup, decay, layers.

    Each piece of advice comes with the figures it rests on and with how sure it is; where the run does not tell, it
    says so and why. Works on a finished run and on one that is being written. Needs no torch. Exits with 0 when it
    could look, and with 2 when it could not.

    \b
    Example:
      gradvitals advise runs/demo
      gradvitals advise runs/demo --json | jq .max_grad_norm.values
    """
    from gradvitals.advise import advise as advise_on
    from gradvitals.store.reader import open_run

    opened = open_run(run)
    try:
        advised = advise_on(opened)
    finally:
        opened.close()
    if as_json:
        print_json(advised.to_json())
    else:
        from gradvitals.report.terminal import render_advice

        console().print(render_advice(advised))
