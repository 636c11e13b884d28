"""`gradvitals report`: the numbers and findings of a run."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, print_json, replay_bar, run_argument


@click.command()
@run_argument
@click.option(
    "--html",
    "html_file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write one HTML file with charts instead, to share or attach to an issue.",
)
@json_option
@click.pass_context
def report(ctx: click.Context, run: Path, html_file: Path | None, as_json: bool) -> None:
    """Print the numbers of RUN: curves, every layer, the worst tensors, findings.

    Works while the run is still training. Needs no torch.

    \b
    Example:
      gradvitals report
      gradvitals report runs/demo --html report.html
      gradvitals report runs/demo --json | jq .noise_scale
    """
    if html_file is not None and as_json:
        raise click.UsageError("give one of --html and --json.", ctx)

    from gradvitals.report.report import Report
    from gradvitals.store.reader import open_run

    with open_run(run) as opened:
        if html_file is not None:
            from gradvitals.report.html import render_html

            with replay_bar(opened.last_step or 0) as on_step:
                page = render_html(opened, on_step=on_step)
            html_file.write_text(page, encoding="utf-8")
            click.echo(f"Wrote {html_file} ({len(page.encode()) / 1e6:.2f} MB); open it in any browser.")
        elif as_json:
            print_json(Report(opened).summary_json())
        else:
            from gradvitals.report.terminal import render_report

            console().print(render_report(Report(opened)))
