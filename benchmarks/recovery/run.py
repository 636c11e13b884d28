"""All cells of the table, several at a time; finished ones are kept in a file and never made again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import Progress
from benchmarks.recovery.cell import (
    ARMS,
    CLEAN,
    DEFAULT_CLEAN_STEPS,
    DEFAULT_SEEDS,
    DEFAULT_STEPS,
    FAULTS,
    KILLED,
    MODELS,
    STRUCK_MODELS,
    ArmName,
    Cell,
    FaultName,
    ModelName,
    Result,
)
from benchmarks.recovery.train import train, train_killed
from benchmarks.runs import append_line, read_lines, run_all


def read_results(path: Path) -> dict[Cell, Result]:
    """Returns the finished runs of a file, none if it does not exist."""
    return {result.cell: result for result in read_lines(path, Result.from_json, "python -m benchmarks.recovery")}


WORKERS = 2
WITH_ACTIONS: FaultName = "corrupted"
"""A run that is killed while this happens to it, too, must come back to the same actions."""


def plan(
    models: Sequence[ModelName] | None = None,
    faults: Sequence[FaultName] = FAULTS,
    arms: Sequence[ArmName] = ARMS,
    *,
    seeds: int = DEFAULT_SEEDS,
    first_seed: int = 0,
    steps: int = DEFAULT_STEPS,
    clean_steps: int = DEFAULT_CLEAN_STEPS,
) -> list[Cell]:
    """The cells of a table.

    Args:
        models: What to train; None for `STRUCK_MODELS`, and all three for the long clean runs.
        faults: What to plant.
        arms: Who looks after it. The clean run under nobody is always made: all others are judged by it.
        seeds: How many of each.
        first_seed: Where to begin counting them.
        steps: Of every run with a fault.
        clean_steps: Of the clean runs in which any action of the Guard is a false one; 0 for none.
    """
    cells: dict[Cell, None] = {}
    for seed in range(first_seed, first_seed + seeds):
        if "guard" in arms and clean_steps:
            for model in models or MODELS:
                cells[Cell(model=model, fault=CLEAN, arm="guard", seed=seed, steps=clean_steps)] = None
        for model in models or STRUCK_MODELS:
            if "guard" in arms and {KILLED, WITH_ACTIONS} <= set(faults):
                both = Cell(model=model, fault=WITH_ACTIONS, arm="guard", seed=seed, steps=steps, killed=True)
                cells[both] = None
            for fault in (CLEAN, *faults):
                for arm in (*arms, "none") if fault == CLEAN else arms:
                    cells[Cell(model=model, fault=fault, arm=arm, seed=seed, steps=steps)] = None
    # The longest first, so that no worker is left with one at the end.
    return sorted(cells, key=lambda cell: (MODELS.index(cell.model), -cell.steps, not cell.is_killed))


def run_cells(
    cells: Sequence[Cell],
    *,
    out: Path | None = None,
    workers: int = WORKERS,
    progress: Progress | None = None,
) -> list[Result]:
    """Make every run.

    Args:
        cells: What to make.
        out: File that finished runs are added to. Those it already has are not made again.
        workers: Processes to train in at once; 1 for this one.
        progress: See `Progress`.

    Returns:
        The results, in the order of `cells`.
    """
    tell = progress or (lambda done, total, label: None)
    known = read_results(out) if out is not None else {}
    results = {cell: known[cell] for cell in cells if cell in known}
    for _, result in run_all(make, [cell for cell in cells if cell not in known], workers):
        results[result.cell] = result
        if out is not None:
            append_line(out, result.to_json())
        tell(len(results), len(cells), result.cell.label)
    return [results[cell] for cell in cells]


def make(cell: Cell) -> Result:
    """One run. Only the Guard's can come back from a process that was killed; of others nothing would be left."""
    return train_killed(cell) if cell.is_killed and cell.arm == "guard" else train(cell)
