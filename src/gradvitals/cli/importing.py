"""`gradvitals import`: a run that was never watched, as a run folder that can be judged."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.output import json_option, print_json


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--run",
    "run",
    type=click.Path(path_type=Path),
    help="Folder to create.  [default: gradvitals_runs/<source>-imported]",
)
@click.option(
    "--map",
    "mapped",
    multiple=True,
    metavar="COLUMN=METRIC",
    help="Map a column to a metric, such as train_nll=loss. Repeatable.",
)
@json_option
def import_(source: Path, run: Path | None, mapped: tuple[str, ...], as_json: bool) -> None:
    """Import SOURCE, a history that another tool recorded, as a run.

    SOURCE is TensorBoard event files, an offline W&B run, a CSV, JSONL or JSON file, or a folder with one of these.
    gradvitals guesses the columns of step, loss, gradient norm and learning rate by name, and skips checks that need
    more.

    \b
    Example:
      gradvitals import lightning_logs/version_0
      gradvitals import history.csv --map train_nll=loss --run runs/old
      gradvitals doctor runs/old
    """
    from gradvitals.format import clean
    from gradvitals.importing import import_run

    columns = {}
    for text in mapped:
        column, _, metric = text.rpartition("=")
        if not column or not metric:
            raise click.UsageError(f"--map is {text!r}; expected COLUMN=METRIC, such as train_nll=loss.")
        columns[column] = metric
    done = import_run(source, run, columns=columns)
    if as_json:
        print_json(done.to_json())
        return
    read = ", ".join(f"{metric} from {column!r}" for metric, column in done.columns.items())
    lines = [f"{done.steps:,} steps of {done.source} ({done.kind}): {read}", *(f"Note: {note}" for note in done.notes)]
    for line in (*lines, f"Kept in {done.run}. Now: gradvitals doctor {done.run}"):
        click.echo(clean(line))
