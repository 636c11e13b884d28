"""`python -m benchmarks.recovery`: does a Guard bring a run through accidents, and does it leave healthy ones alone?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.command_line import Command, json_option, print_result, progress_bar
from benchmarks.recovery.cell import ARMS, DEFAULT_CLEAN_STEPS, DEFAULT_SEEDS, DEFAULT_STEPS, FAULTS, MODELS
from benchmarks.recovery.report import draw_figure, format_recovery, summarise
from benchmarks.recovery.run import plan, run_cells


@click.command(cls=Command)
@click.option(
    "--model",
    "models",
    type=click.Choice(MODELS),
    multiple=True,
    help="Only this model, the MLP with faults too; may be repeated.",
)
@click.option("--fault", "faults", type=click.Choice(FAULTS), multiple=True, help="Only this fault; may be repeated.")
@click.option("--arm", "arms", type=click.Choice(ARMS), multiple=True, help="Only this arm; may be repeated.")
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=DEFAULT_SEEDS,
    show_default=True,
    help="How often to make each run, differently.",
)
@click.option(
    "--first-seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Where to begin counting seeds.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=40),
    default=DEFAULT_STEPS,
    show_default=True,
    help="Steps of each run with a fault.",
)
@click.option(
    "--clean-steps",
    type=click.IntRange(min=0),
    default=DEFAULT_CLEAN_STEPS,
    show_default=True,
    help="Steps of the clean runs that the Guard has to leave alone; 0 for none.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep finished runs here; those that it has already are not made again.",
)
@click.option("--figure", type=click.Path(path_type=Path, dir_okay=False), help="Draw the losses into this SVG file.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=2, show_default=True, help="Processes to train in at once."
)
@json_option
def main(
    models: tuple[Any, ...],
    faults: tuple[Any, ...],
    arms: tuple[Any, ...],
    seeds: int,
    first_seed: int,
    steps: int,
    clean_steps: int,
    out: Path | None,
    figure: Path | None,
    workers: int,
    as_json: bool,
) -> None:
    """Let accidents happen to small real training runs, and see who gets over them.

    Trains a transformer and a CNN on data that comes with the package: clean, and with corrupted batches, a poisoned
    gradient, NaN, a jump of the learning rate, flipped bits in the optimizer or a weight, and a process that is killed.
    Each with the Guard, with nothing, with a fixed clip, and with what OLMo-core and ZClip do. Longer clean runs, an
    MLP's too, show whether the Guard leaves them alone.

    All of it takes about ten minutes on two cores.

    \b
    Example:
      python -m benchmarks.recovery --out recovery.jsonl
      python -m benchmarks.recovery --model mlp --seeds 1
      python -m benchmarks.recovery --fault lr_spike --arm guard --arm none --clean-steps 0
    """
    cells = plan(
        models or None,
        faults or FAULTS,
        arms or ARMS,
        seeds=seeds,
        first_seed=first_seed,
        steps=steps,
        clean_steps=clean_steps,
    )
    with progress_bar() as progress:
        results = run_cells(cells, out=out, workers=workers, progress=progress)
    if figure is not None:
        draw_figure(results, figure)
    print_result(summarise(results), as_json, format_recovery)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.recovery")
