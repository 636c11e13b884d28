"""`gradvitals report`: what a run shows, on one screen."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, judging_bar, print_json


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page with pictures instead, one file to send or attach; it needs no network.",
)
@json_option
@click.pass_context
def report(ctx: click.Context, run: Path, html_file: Path | None, as_json: bool) -> None:
    """Show the state of RUN: trends, every layer, the worst tensors, findings.

    Works on a finished run and on one that is being written. Needs no torch.

    \b
    Example:
      gradvitals report runs/demo
      gradvitals report runs/demo --html report.html
      gradvitals report runs/demo --json | jq .noise_scale
    """
    if html_file is not None and as_json:
        raise click.UsageError("give one of --html and --json.", ctx)
    if html_file is not None:
        _write_page(run, html_file)
        return

    from gradvitals.show.summary import summarize
    from gradvitals.store.reader import open_run

    with open_run(run) as opened:
        summary = summarize(opened)
    if as_json:
        print_json(summary.to_json())
    else:
        from gradvitals.show.terminal import render_summary

        console().print(render_summary(summary))


def _write_page(path: Path, file: Path) -> None:
    from gradvitals.show.run_page import run_page
    from gradvitals.store.reader import open_run

    with open_run(path) as opened, judging_bar(opened.last_step or 0) as on_step:
        page = run_page(opened, on_step=on_step)
    file.write_text(page, encoding="utf-8")
    click.echo(f"Wrote {file} ({len(page.encode()) / 1e6:.2f} MB); open it in any browser.")
