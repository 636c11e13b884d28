"""`python -m benchmarks.faults`: who finds the faults that are planted in small real training runs?"""

from __future__ import annotations

from pathlib import Path

import click

from benchmarks.command_line import Command, json_option, print_result, progress_bar
from benchmarks.faults.report import format_zoo, summarise
from benchmarks.faults.run import cases, judge_again, run_zoo

positive = click.IntRange(min=1)


@click.command(cls=Command)
@click.option("--seeds", type=positive, default=3, show_default=True, help="Runs of each kind, with different seeds.")
@click.option(
    "--first-seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The first seed. Rules were tuned on some seeds; judge them by others.",
)
@click.option("--only", metavar="REGEX", help="Only runs whose model.name it matches, e.g. mlp, frozen, cnn.lr_x30.")
@click.option("--quick", is_flag=True, help="A small part of it with one seed, in less than a minute.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep all readings, to diagnose them again with --reuse.",
)
@click.option(
    "--reuse",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Do not train: diagnose what --keep kept.",
)
@click.option("--every", type=positive, default=50, show_default=True, help="Steps between full readings.")
@click.option("--workers", type=positive, default=2, show_default=True, help="Processes that train at once.")
@json_option
def main(
    seeds: int,
    first_seed: int,
    only: str | None,
    quick: bool,
    keep: Path | None,
    reuse: Path | None,
    every: int,
    workers: int,
    as_json: bool,
) -> None:
    """Plant faults in small real training runs and see who finds them.

    Trains an MLP, a CNN, a transformer and a recurrent network, healthy and with one fault each. The readings are then
    shown to gradvitals, to trainpulse if it is installed, and to the spike detectors of other projects, side by side:
    how many faults each finds, how fast, and how many false alarms it raises.

    All of it takes about a quarter of an hour on two cores.

    \b
    Example:
      python -m benchmarks.faults --quick
      python -m benchmarks.faults --only 'transformer|rnn' --seeds 1
      python -m benchmarks.faults --keep zoo && python -m benchmarks.faults --reuse zoo --json
    """
    if reuse is not None and keep is not None:
        raise click.UsageError("--keep is for runs that are trained now, and --reuse trains none; give one of them.")
    with progress_bar() as progress:
        if reuse is not None:
            outcomes = judge_again(reuse, only, workers=workers, progress=progress)
        else:
            wanted = cases(seeds, only, quick, first_seed=first_seed)
            outcomes = run_zoo(wanted, keep=keep, tensor_every=every, workers=workers, progress=progress)
    print_result(summarise(outcomes), as_json, format_zoo)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.faults")
