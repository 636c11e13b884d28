"""`gradvitals lab distributed`: are faults of one rank found, and is that rank named?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from gradvitals.cli.output import json_option, print_json
from gradvitals.cli.progress import progress_bar
from gradvitals.lab.distributed.cell import (
    DEFAULT_AUDIT_EVERY,
    DEFAULT_CLEAN_STEPS,
    DEFAULT_FAULT_STEP,
    DEFAULT_RANKS,
    DEFAULT_STEPS,
    FAULTS,
    WRAPS,
)


@click.command()
@click.option(
    "--ranks", type=click.IntRange(min=3), default=DEFAULT_RANKS, show_default=True, help="Processes to start."
)
@click.option(
    "--wrap",
    "wraps",
    type=click.Choice(WRAPS),
    multiple=True,
    help="How they share the model: whole on each (ddp) or in shards (fsdp); may be repeated. [default: ddp]",
)
@click.option("--fault", "faults", type=click.Choice(FAULTS), multiple=True, help="Only this fault; may be repeated.")
@click.option(
    "--steps",
    type=click.IntRange(min=2),
    default=DEFAULT_STEPS,
    show_default=True,
    help="Steps of each run with a fault.",
)
@click.option(
    "--fault-step",
    type=click.IntRange(min=1),
    default=DEFAULT_FAULT_STEP,
    show_default=True,
    help="Step at which it happens.",
)
@click.option(
    "--clean-steps",
    type=click.IntRange(min=0),
    default=DEFAULT_CLEAN_STEPS,
    show_default=True,
    help="Steps of each of the two clean runs, in which any finding about ranks is a false one; 0 for none.",
)
@click.option(
    "--audit-every",
    type=click.IntRange(min=1),
    default=DEFAULT_AUDIT_EVERY,
    show_default=True,
    help="Steps from one comparison of ranks to the next, as audit_every in Config.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of weights and data.")
@click.option(
    "--keep",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Keep the runs here, a new or empty folder, to be looked at with gradvitals doctor.",
)
@click.option(
    "--simulate",
    is_flag=True,
    help="Train nothing: show virtual ranks, up to 4,096, to the rules that compare gradient norms, and count false "
    "alarms.",
)
@click.option(
    "--audits",
    type=click.IntRange(min=200),
    default=2000,
    show_default=True,
    help="With --simulate: clean audits of each kind.",
)
@json_option
def distributed(
    ranks: int,
    wraps: tuple[Any, ...],
    faults: tuple[Any, ...],
    steps: int,
    fault_step: int,
    clean_steps: int,
    audit_every: int,
    seed: int,
    keep: Path | None,
    simulate: bool,
    audits: int,
    as_json: bool,
) -> None:
    """Plant faults on one of several ranks, and see whether they are found and the rank is named.

    Starts real processes (gloo, on the CPU) that train a small model together, each watched as by default, and plants
    one fault on one rank: a seed of its own, another rank's samples, a flipped bit in a weight or in optimizer state,
    scaled gradients, NaN, a kill. Clean runs count false alarms. It takes some minutes on two cores.

    \b
    Example:
      gradvitals lab distributed
      gradvitals lab distributed --wrap fsdp --fault scaled --fault shard --clean-steps 0
      gradvitals lab distributed --simulate --audits 10000
    """
    if simulate:
        _simulate(audits, seed, as_json)
        return
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise click.UsageError(f"--keep {keep} is not empty; name a new folder.")

    from gradvitals.lab.distributed.report import format_distributed
    from gradvitals.lab.distributed.run import plan, run_cells
    from gradvitals.lab.distributed.score import summarise

    cells = plan(
        faults or None,
        wraps=wraps or ("ddp",),
        ranks=ranks,
        steps=steps,
        fault_step=fault_step,
        clean_steps=clean_steps,
        audit_every=audit_every,
        seed=seed,
    )
    with progress_bar() as progress:
        summary = summarise(run_cells(cells, folder=keep, progress=progress))
    if as_json:
        print_json(summary)
    else:
        click.echo(format_distributed(summary))


def _simulate(audits: int, seed: int, as_json: bool) -> None:
    from gradvitals.lab.distributed.simulation import NOISES, SCALES, WORLDS, simulate, table

    records = []
    total = len(WORLDS) * len(NOISES) * (1 + len(SCALES))
    with progress_bar() as progress:
        for record in simulate(audits=audits, seed=seed, processes=os.cpu_count() or 1):
            records.append(record)
            progress(len(records), total, f"{record.world} workers, {record.noise}")
    if as_json:
        print_json([record.to_json() for record in records])
    else:
        click.echo(table(records))
