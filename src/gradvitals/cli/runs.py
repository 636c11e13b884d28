"""Commands on the runs that there are: report, watch, advise, diff, ls, export, serve, mcp."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import console, json_option, print_json, replay_bar, resolve, run_argument
from gradvitals.places import default_folder, run_folders, searched_folders


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
    from gradvitals.report.live import Lines, can_redraw, draw, frame, look, moments, wait_for

    screen = console()
    path = resolve(run, must_exist=False)
    if not once:
        wait_for(path, lambda text: click.echo(text, err=True))
    if once and not as_json:
        screen.print(frame(look(path)))
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


@click.command()
@click.argument("first", metavar="[A]", required=False)
@click.argument("second", metavar="[B]", required=False)
@json_option
def diff(first: str | None, second: str | None, as_json: bool) -> None:
    """Compare run A with run B: where they diverge for good, settings, findings.

    With one run, compares it with the newest; with none, compares the two newest runs in gradvitals_runs/ and runs/.
    Needs no torch.

    \b
    Example:
      gradvitals diff runs/before runs/after
      gradvitals diff runs/before
      gradvitals diff runs/before runs/after --json | jq .curves
    """
    from gradvitals.report.diff import diff as compare
    from gradvitals.report.listing import newest_runs

    named = [resolve(name) for name in (first, second) if name is not None]
    if len(named) < 2:
        named = [*named, *newest_runs(2 - len(named), without=named)]
    found = compare(*named)
    if as_json:
        print_json(found.to_json())
    else:
        console().print(str(found), soft_wrap=True)


SHOWN = 20


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option(
    "-n",
    "--limit",
    type=click.IntRange(min=0),
    default=SHOWN,
    show_default=True,
    help="Number of runs to show; 0 shows all.",
)
@json_option
def ls(folder: Path | None, limit: int, as_json: bool) -> None:
    """List the runs in FOLDER, newest first. FOLDER defaults to gradvitals_runs/ and runs/.

    Each line shows a status light, the steps, the last loss, the age, and what is wrong.

    \b
    Example:
      gradvitals ls
      gradvitals ls /data/runs -n 0 --json
    """
    from gradvitals.errors import RunNotFoundError
    from gradvitals.report.listing import find_runs, list_runs

    if folder is not None and not folder.exists():
        raise RunNotFoundError(f"there is no folder {folder}")
    folders = searched_folders() if folder is None else [folder]
    found = sorted(((file, one) for one in folders for file in find_runs(one)), key=lambda pair: -pair[0].modified)
    lines = [line for file, one in found[: limit or None] for line in list_runs([file], one)]
    if as_json:
        runs = [line.to_json() for line in lines]
        print_json({"folders": [str(one) for one in folders], "num_runs": len(found), "runs": runs})
        return
    if not found:
        places = " or ".join(map(str, folders))
        click.echo(
            f"There are no runs in {places}. Record one with `gradvitals run train.py`, or try `gradvitals demo`."
        )
        return
    from gradvitals.report.terminal import render_list

    screen = console()
    screen.print(render_list(lines, hidden=len(found) - len(lines), width=screen.width))


KINDS = ("run", "layer", "tensor", "head")


@click.command()
@run_argument
@click.option("--csv", "csv_path", type=click.Path(allow_dash=True), help="Write CSV to this file; - prints it.")
@click.option("--parquet", "parquet_path", type=click.Path(path_type=Path), help="Write Parquet to this file.")
@click.option("--metric", "metrics", multiple=True, help="Keep only this metric. Repeatable.")
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(KINDS),
    multiple=True,
    help="Keep only rows of this kind. Repeatable.",
)
@json_option
def export(
    run: Path,
    csv_path: str | None,
    parquet_path: Path | None,
    metrics: tuple[str, ...],
    kinds: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the readings of RUN as a table: CSV or Parquet.

    Each row is a step, a kind (run, layer, tensor or head) and a name; each column is a metric. Metrics computed from
    samples name their source, as in gsnr:microbatch. A cell is empty if the metric was not measured or is NaN.
    Parquet needs an extra: pip install 'gradvitals[parquet]'.

    \b
    Example:
      gradvitals export --csv readings.csv
      gradvitals export runs/demo --csv - --kind run --metric loss | head
    """
    if (csv_path is None) == (parquet_path is None):
        raise click.UsageError("give one of --csv PATH and --parquet PATH.")
    if csv_path == "-" and as_json:
        raise click.UsageError("--json and --csv - both print to the screen; give --csv a file.")

    from gradvitals.report.export import write_csv, write_parquet
    from gradvitals.store.reader import open_run

    with open_run(run) as opened:
        if parquet_path is not None:
            count = write_parquet(opened, parquet_path, kinds, metrics)
        else:
            with click.open_file(str(csv_path), "w", encoding="utf-8", errors="backslashreplace") as stream:
                count = write_csv(opened, stream, kinds, metrics)
    if as_json:
        print_json({"path": str(parquet_path or csv_path), "rows": count})
    elif csv_path != "-":
        click.echo(f"{count:,} rows written to {parquet_path or csv_path}", err=True)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port to listen on; 0 picks a free one. [default: 8484, or a free one if that is taken]",
)
@click.option("--open", "open_browser", is_flag=True, help="Open the page in a browser.")
def serve(folder: Path | None, host: str, port: int | None, open_browser: bool) -> None:
    """Show the runs in FOLDER on a live page in the browser.

    FOLDER is a run or contains runs at any depth. Without it, serves gradvitals_runs/ and runs/.
    New runs appear automatically. Only this machine can open the page unless you set --host, and the page loads
    nothing from the network. Ctrl-C stops the server.

    \b
    Example:
      gradvitals serve
      gradvitals serve runs/gpt --open
      gradvitals serve /data/runs --port 0
    """
    from gradvitals.errors import RunNotFoundError
    from gradvitals.web.app import addresses, bind, serve_runs

    if folder is None:
        folders, named = run_folders(), searched_folders()
    elif folder.exists():
        folders = named = [folder.parent if folder.is_file() else folder]
    else:
        raise RunNotFoundError(f"there is no folder {folder}")
    listening = bind(host, port)
    url, tunnel = addresses(listening)
    click.echo(f"{url} shows the runs in {' and '.join(map(str, named))}; Ctrl-C stops it")
    click.echo(f"From another machine:  {tunnel}")
    if open_browser:
        import webbrowser

        webbrowser.open(url)
    serve_runs(folders, listening, host=host)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=default_folder)
def mcp(folder: Path) -> None:
    """Serve the runs in FOLDER to a coding agent over stdio (Model Context Protocol).

    The agent can list runs, get verdicts, read series, explain rules and compare runs; it cannot change anything.
    Without FOLDER, serves gradvitals_runs/, or runs/ if only that exists. Needs an extra: pip install
    'gradvitals[mcp]'.

    \b
    Example:
      claude mcp add gradvitals -- gradvitals mcp runs
    """
    from gradvitals.web.mcp import build_server

    build_server(folder).run("stdio")
