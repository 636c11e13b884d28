"""`gradvitals watch`: a run in the terminal while it trains."""

from __future__ import annotations

import click

from gradvitals.cli.output import console, print_json, resolve

SCREEN_SECONDS, LINE_SECONDS = 1.0, 10.0


@click.command()
@click.argument("run", required=False, metavar="[RUN]")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="Seconds between updates.  [default: 1, or 10 without a terminal]",
)
@click.option("--once", is_flag=True, help="Print the current state and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON per update.")
def watch(run: str | None, every: float | None, once: bool, as_json: bool) -> None:
    """Follow RUN in the terminal: verdict, curves, findings, layers, worst tensors.

    Waits if the run does not exist yet, and exits when it ends. Ctrl-C stops watching; the run continues. Without a
    terminal (in a pipe or CI), prints lines instead. Needs no torch.

    \b
    Example:
      gradvitals watch
      gradvitals watch runs/gpt --once
      ssh cluster gradvitals watch runs/gpt --json | jq .verdict.headline
    """
    from gradvitals.report.live import Frame, Lines, can_redraw, draw, look, moments, wait_for

    screen = console()
    path = resolve(run, must_exist=False)
    if not once:
        wait_for(path, lambda text: click.echo(text, err=True))
    if once and not as_json:
        screen.print(Frame(look(path)))
    elif as_json:
        before: object = None
        for moment in [look(path)] if once else moments(path, every or SCREEN_SECONDS):
            now = (moment.summary.last_step, moment.summary.state, moment.verdict)
            if now != before:
                print_json(moment.to_json(), indent=None)
            before = now
    elif can_redraw(screen):
        draw(screen, moments(path, every or SCREEN_SECONDS))
    else:
        lines = Lines(screen)
        for moment in moments(path, every or LINE_SECONDS):
            lines.show(moment)
