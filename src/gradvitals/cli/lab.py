"""`gradvitals lab`: experiments that show what gradvitals is worth."""

from __future__ import annotations

from pathlib import Path

import click

from gradvitals.cli.lab_distributed import distributed
from gradvitals.cli.lab_recovery import recovery
from gradvitals.cli.lab_scale import scale_adaptation
from gradvitals.cli.lab_vrgd import vrgd
from gradvitals.cli.output import json_option, print_json
from gradvitals.cli.progress import progress_bar


@click.group()
def lab() -> None:
    """Experiments that show what gradvitals is worth.

    \b
    Example:
      gradvitals lab faults --quick
    """


@lab.command()
@click.option(
    "--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="How often to make each run, differently."
)
@click.option(
    "--first-seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Where to begin counting seeds: rules were tuned on some, and are to be judged by others.",
)
@click.option("--only", metavar="REGEX", help="Only runs whose model.name it matches, e.g. mlp, frozen, cnn.lr_x30.")
@click.option("--quick", is_flag=True, help="A small part of it with one seed, in less than a minute.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep everything that was read, to be diagnosed again with --reuse.",
)
@click.option(
    "--reuse",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Do not train: diagnose what --keep kept.",
)
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=50,
    show_default=True,
    help="Steps from one per-tensor reading to the next, as tensor_every in Config.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Processes to train in at once."
)
@json_option
def faults(
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

    Trains an MLP, a CNN, a transformer and a recurrent network, healthy and with one fault each, on data that comes
    with the package. What was read is then shown to gradvitals, to trainpulse where it is installed, and to the spike
    detectors of other projects, side by side: how many faults each finds, how fast, and how often each cries wolf.

    All of it takes about a quarter of an hour on two cores.

    \b
    Example:
      gradvitals lab faults --quick
      gradvitals lab faults --only 'transformer|rnn' --seeds 1
      gradvitals lab faults --keep zoo && gradvitals lab faults --reuse zoo --json
    """
    if reuse is not None and keep is not None:
        raise click.UsageError("--keep is for runs that are trained now, and --reuse trains none; give one of them.")

    from gradvitals.lab.faults.report import format_zoo, summarise
    from gradvitals.lab.faults.run import cases, judge_again, run_zoo

    with progress_bar() as progress:
        if reuse is not None:
            outcomes = judge_again(reuse, only, workers=workers, progress=progress)
        else:
            wanted = cases(seeds, only, quick, first_seed=first_seed)
            outcomes = run_zoo(wanted, keep=keep, tensor_every=every, workers=workers, progress=progress)
    result = summarise(outcomes)
    if as_json:
        print_json(result)
    else:
        click.echo(format_zoo(result))


for command in (distributed, recovery, scale_adaptation, vrgd):
    lab.add_command(command)
