"""All cells of the table, several at a time; finished ones are kept in a file and never made again."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import torch

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
from gradvitals.errors import GradvitalsError


def read_results(path: Path) -> dict[Cell, Result]:
    """What a file holds; nothing where it does not exist. A last line that was cut short is left out.

    Raises:
        GradvitalsError: when another line cannot be read.
    """
    lines = path.read_text("utf-8").split("\n") if path.exists() else [""]
    found = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            result = Result.from_json(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise GradvitalsError(
                f"{path}, line {number}, is no finished run ({error}); expected what "
                "`python -m benchmarks.recovery` writes with --out: delete that line, or name another file"
            ) from None
        found[result.cell] = result
    return found


def begin_file(path: Path, results: Iterable[Result]) -> None:
    """Write what is known already, without what is left of a line that was cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text("".join(map(_line, results)), "utf-8")
    fresh.replace(path)


def append_result(path: Path, result: Result) -> None:
    """Add one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(_line(result))


def _line(result: Result) -> str:
    return json.dumps(result.to_json(), allow_nan=False) + "\n"


WORKERS = 2
WITH_ACTIONS: FaultName = "corrupted"
"""A run that is killed while this happens to it, too, must come back to the same actions."""

Progress = Callable[[int, int, str], object]
"""Called with how many runs are done, how many there are, and the name of the last."""


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
    if out is not None:
        begin_file(out, known.values())
    results = {cell: known[cell] for cell in cells if cell in known}
    for result in _made([cell for cell in cells if cell not in known], workers):
        results[result.cell] = result
        if out is not None:
            append_result(out, result)
        tell(len(results), len(cells), result.cell.label)
    return [results[cell] for cell in cells]


def make(cell: Cell) -> Result:
    """One run. Only the Guard's can come back from a process that was killed; of others nothing would be left."""
    return train_killed(cell) if cell.is_killed and cell.arm == "guard" else train(cell)


def _made(cells: Sequence[Cell], workers: int) -> Iterator[Result]:
    if workers <= 1 or len(cells) <= 1:
        threads = torch.get_num_threads()
        _one_thread()
        try:
            yield from map(make, cells)
        finally:
            torch.set_num_threads(threads)
        return
    # Spawned, not forked: a fork of a process in which torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        futures: list[Future[Result]] = [pool.submit(make, cell) for cell in cells]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            raise GradvitalsError("a worker process was killed, perhaps for want of memory; try --workers 1") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    """So small a model gains nothing from more threads, and sums over them would differ from run to run."""
    torch.set_num_threads(1)
