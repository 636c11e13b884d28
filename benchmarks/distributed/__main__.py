"""`python -m benchmarks.distributed`: are faults of one rank found, and is that rank named?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from benchmarks.command_line import Command, echo_line, json_option, print_result, progress_bar
from benchmarks.distributed.cost import format_paper, format_ranks, on_paper, run_ranks
from benchmarks.distributed.faults import (
    DEFAULT_AUDIT_EVERY,
    DEFAULT_CLEAN_STEPS,
    DEFAULT_FAULT_STEP,
    DEFAULT_RANKS,
    DEFAULT_STEPS,
    FAULTS,
    WRAPS,
)
from benchmarks.distributed.report import format_distributed, summarise
from benchmarks.distributed.run import plan, run_cells
from benchmarks.distributed.simulation import NOISES, SCALES, WORLDS, simulate, table


@click.group()
def main() -> None:
    """Faults of one rank among several, and what watching several ranks costs.

    \b
    Example:
      python -m benchmarks.distributed faults
      python -m benchmarks.distributed cost --paper
    """


@main.command(cls=Command)
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
@click.option("--fault", "names", type=click.Choice(FAULTS), multiple=True, help="Only this fault; may be repeated.")
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
@json_option
def faults(
    ranks: int,
    wraps: tuple[Any, ...],
    names: tuple[Any, ...],
    steps: int,
    fault_step: int,
    clean_steps: int,
    audit_every: int,
    seed: int,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Plant faults on one of several ranks, and see whether they are found and the rank is named.

    Starts real processes (gloo, on the CPU) that train a small model together, each watched as by default, and plants
    one fault on one rank: a seed of its own, another rank's samples, a flipped bit in a weight or in optimizer state,
    scaled gradients, NaN, a kill. Clean runs count false alarms. It takes some minutes on two cores.

    \b
    Example:
      python -m benchmarks.distributed faults
      python -m benchmarks.distributed faults --wrap fsdp --fault scaled --fault shard --clean-steps 0
    """
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise click.UsageError(f"--keep {keep} is not empty; name a new folder.")

    cells = plan(
        names or None,
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
    print_result(summary, as_json, format_distributed)


@main.command(cls=Command)
@click.option("--audits", type=click.IntRange(min=200), default=2000, show_default=True, help="Clean audits of a kind.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the gradient norms.")
@json_option
def simulation(audits: int, seed: int, as_json: bool) -> None:
    """Show virtual ranks, up to 4,096, to the rules that compare gradient norms, and count false alarms.

    \b
    Example:
      python -m benchmarks.distributed simulation --audits 10000
    """
    records = []
    total = len(WORLDS) * len(NOISES) * (1 + len(SCALES))
    with progress_bar() as progress:
        for record in simulate(audits=audits, seed=seed, processes=os.cpu_count() or 1):
            records.append(record)
            progress(len(records), total, f"{record.world} workers, {record.noise}")
    print_result(records, as_json, table)


@main.command(cls=Command)
@click.option("--ranks", type=click.IntRange(min=2), default=4, show_default=True, help="Processes to start.")
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=2,
    show_default=True,
    help="How often to go through all kinds of readings, 200 watched steps each.",
)
@click.option("--paper", is_flag=True, help="Time nothing: only what follows from the layout of the messages.")
@json_option
def cost(ranks: int, rounds: int, paper: bool, as_json: bool) -> None:
    """Time watched steps of several ranks against bare ones, and count what they tell each other.

    Starts processes (gloo, on the CPU) that train a small transformer under DDP, and prints the same for 1,024 GPUs and
    more on paper: bytes, time, memory, and what they grow with. Takes about ten minutes on two cores.

    \b
    Example:
      python -m benchmarks.distributed cost
      python -m benchmarks.distributed cost --paper
      python -m benchmarks.distributed cost --ranks 2 --rounds 1 --json
    """
    if paper:
        print_result(on_paper(), as_json, format_paper)
    else:
        print_result(run_ranks(ranks=ranks, rounds=rounds, progress=echo_line), as_json, format_ranks)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.distributed")
