"""`gradvitals export`: a run as a table for pandas, polars or a spreadsheet."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import json_option, print_json, run_argument

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
