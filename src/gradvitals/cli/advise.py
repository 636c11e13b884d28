"""`gradvitals advise`: settings for the next run."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, print_json, run_argument


@click.command()
@run_argument
@click.option("-v", "--verbose", is_flag=True, help="Show the evidence behind each piece of advice.")
@json_option
def advise(run: Path, verbose: bool, as_json: bool) -> None:
    """Suggest settings for the next run: learning rate, clipping, batch size, warmup, decay, layers.

    Every suggestion has a confidence. If the run does not show enough, says what is missing. Works while the run is
    still training. Needs no torch.

    \b
    Example:
      gradvitals advise
      gradvitals advise runs/demo -v
      gradvitals advise runs/demo --json | jq .max_grad_norm.values
    """
    from gradvitals.advise import advise as advise_on
    from gradvitals.store.reader import open_run

    with open_run(run) as opened:
        advised = advise_on(opened)
    if as_json:
        print_json(advised.to_json())
    else:
        from gradvitals.report.terminal import render_advice

        console().print(render_advice(advised, verbose=verbose))
