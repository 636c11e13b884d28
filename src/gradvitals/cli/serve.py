"""`gradvitals serve`: the live page."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.places import default_folder


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

    FOLDER is a run or contains runs at any depth. Without it, serves gradvitals_runs/, or runs/ if only that exists.
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

    chosen = folder or default_folder()
    if folder is not None and not chosen.exists():
        raise RunNotFoundError(f"there is no folder {folder}")
    if chosen.is_file():
        chosen = chosen.parent
    listening = bind(host, port)
    url, tunnel = addresses(listening)
    click.echo(f"{url} shows the runs in {chosen}; Ctrl-C stops it")
    click.echo(f"From another machine:  {tunnel}")
    if open_browser:
        import webbrowser

        webbrowser.open(url)
    serve_runs(chosen, listening, host=host)
