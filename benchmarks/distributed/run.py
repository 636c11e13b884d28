"""All runs of the table: which there are, and making them in processes that are started once for many."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.distributed.faults import (
    CLEAN,
    DEFAULT_AUDIT_EVERY,
    DEFAULT_CLEAN_STEPS,
    DEFAULT_FAULT_STEP,
    DEFAULT_RANKS,
    DEFAULT_STEPS,
    FAULTS,
    KILLED,
    OF_REPLICAS,
    UNSEEN,
    Cell,
    FaultName,
    RankResult,
    Result,
    WrapName,
)
from benchmarks.distributed.launch import RUN, serve, team
from gradvitals.errors import GradvitalsError
from gradvitals.store import open_run

START_SECONDS = 120.0
STEP_SECONDS = 1.0
"""A step takes a hundredth of this; after so much of each the run is taken to hang."""

Progress = Callable[[int, int, str], object]
"""Called with how many runs are done, how many there are, and the name of the last."""


def plan(
    faults: Sequence[FaultName] | None = None,
    *,
    wraps: Sequence[WrapName] = ("ddp",),
    ranks: int = DEFAULT_RANKS,
    steps: int = DEFAULT_STEPS,
    fault_step: int = DEFAULT_FAULT_STEP,
    clean_steps: int = DEFAULT_CLEAN_STEPS,
    audit_every: int = DEFAULT_AUDIT_EVERY,
    seed: int = 0,
) -> list[Cell]:
    """The runs of a table.

    Args:
        faults: What to plant; None for all that an audit can see.
        wraps: How ranks share the model. Sharded, there are no copies that could differ: those faults are left out.
        ranks: Processes.
        steps: Of every run with a fault.
        fault_step: When it happens.
        clean_steps: Of each of the two clean runs; 0 for none.
        audit_every: As in `Config`.
        seed: Of weights and data.
    """
    if fault_step >= steps:
        raise GradvitalsError(f"the fault is planted at step {fault_step}, but a run has {steps}; give it more steps")
    chosen = [name for name in FAULTS if name not in UNSEEN] if faults is None else list(faults)
    cells = []
    for wrap in wraps:
        usual = Cell(fault="clean", wrap=wrap, ranks=ranks, audit_every=audit_every, seed=seed)
        if clean_steps:
            cells += [replace(usual, fault=name, steps=clean_steps, fault_step=0) for name in CLEAN]
        fitting = [name for name in chosen if wrap == "ddp" or name not in OF_REPLICAS]
        cells += [replace(usual, fault=name, steps=steps, fault_step=fault_step) for name in fitting]
    return cells


def run_cells(cells: Sequence[Cell], *, folder: Path | None = None, progress: Progress | None = None) -> list[Result]:
    """Make every run.

    Args:
        cells: What to make.
        folder: Keep the runs here; None for a temporary folder.
        progress: See `Progress`.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        home = folder if folder is not None else Path(temporary)
        results = {}
        for result in _made(cells, home):
            results[result.cell] = result
            if progress is not None:
                progress(len(results), len(cells), result.cell.label)
        return [results[cell] for cell in cells]


def _made(cells: Sequence[Cell], home: Path) -> Iterator[Result]:
    """In one group of processes, but for those that do not survive it."""
    lasting = [cell for cell in cells if cell.fault != KILLED]
    for group in ([lasting] if lasting else []) + [[cell] for cell in cells if cell.fault == KILLED]:
        yield from _made_together(group, home)


def _made_together(cells: Sequence[Cell], home: Path) -> Iterator[Result]:
    killed = [cell.odd_rank for cell in cells if cell.fault == KILLED]
    world = cells[0].ranks
    with team(world, serve, list(cells), str(home), may_be_killed=killed[0] if killed else None) as processes:
        for number, cell in enumerate(cells):
            living = [rank for rank in range(world) if rank not in killed]
            files = [home / cell.label / f"rank{rank}.json" for rank in living]
            seconds = STEP_SECONDS * cell.steps + (0 if number else START_SECONDS)
            processes.wait_until(partial(_all_there, files), cell.label, seconds)
            yield _read(cell, home / cell.label, files)


def _all_there(files: Sequence[Path]) -> bool:
    return all(file.exists() for file in files)


def _read(cell: Cell, home: Path, files: Sequence[Path]) -> Result:
    ranks = tuple(RankResult.from_json(json.loads(file.read_text("utf-8"))) for file in files)
    with open_run(home / RUN) as run:
        findings = tuple(finding.to_json() for finding in run.findings)
        steps, _ = run.series("grad/norm")
    return Result(cell=cell, ranks=ranks, findings=findings, steps_kept=len(steps))
