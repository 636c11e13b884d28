"""The whole zoo: which runs there are, trained or taken from a folder, two at a time, and what was said about each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from benchmarks.command_line import Progress
from benchmarks.faults.record import Recording, load_recording, record, recorded, save_recording
from benchmarks.faults.score import Outcome, Planted, judge
from benchmarks.faults.tasks import RECIPES, Task
from benchmarks.faults.zoo import CONTROLS, FAULTS, Control
from benchmarks.runs import run_all
from gradvitals.errors import GradvitalsError

DEFAULT_SEEDS = 3
WORKERS = 2

QUICK = (
    "mlp.adamw_cosine",
    "cnn.sgd_cosine",
    "transformer.adamw_cosine",
    "mlp.bad_batch",
    "mlp.lr_x30",
    "mlp.frozen_lr_0",
    "mlp.same_micro_batches",
    "mlp.sigmoid_stack",
    "cnn.momentum_poisoned",
    "cnn.nan_in_layer",
    "transformer.dead_head",
)
"""A little of everything, for a test and for the impatient."""

SERIES = ("loss", "grad/norm", "update/norm")

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to make: a fault, or a healthy control of that name."""

    task: Task
    name: str
    seed: int

    @property
    def label(self) -> str:
        """As `Recording.label`."""
        return f"{self.task}.{self.name}.{self.seed}"


def cases(
    seeds: int = DEFAULT_SEEDS, only: str | None = None, quick: bool = False, *, first_seed: int = 0
) -> list[Case]:
    """All runs of the zoo.

    Args:
        seeds: How many of each.
        only: Regular expression that is looked for in ``model.name``, such as ``mlp`` or ``frozen``.
        quick: Only a small part, and one seed of it.
        first_seed: Seeds are counted from here. Rules that were tuned on some seeds are to be judged by others.
    """
    pairs = [(control.recipe.task, control.id) for control in CONTROLS]
    pairs += [(task, fault.id) for fault in FAULTS.values() for task in fault.tasks]
    if quick:
        pairs, seeds = [(task, name) for task, name in pairs if f"{task}.{name}" in QUICK], 1
    pairs.sort(key=lambda pair: pair[0] != "transformer")  # the slowest first: no worker is left with one at the end
    wanted = _pattern(only)
    found = [
        Case(task=task, name=name, seed=seed)
        for seed in range(first_seed, first_seed + seeds)
        for task, name in pairs
        if wanted.search(f"{task}.{name}")
    ]
    if not found:
        raise GradvitalsError(f"no run of the zoo is called like {only!r}; for example: mlp, frozen, cnn.lr_x30")
    return found


def run_zoo(
    wanted: Sequence[Case],
    *,
    keep: Path | None = None,
    tensor_every: int = 50,
    workers: int = WORKERS,
    progress: Progress | None = None,
) -> list[Outcome]:
    """Train every case, show it to every detector, and keep the recordings where asked to."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    job = partial(_train, keep=keep, tensor_every=tensor_every)
    return _all(job, list(wanted), [case.label for case in wanted], workers, progress)


def judge_again(
    folder: Path, only: str | None = None, *, workers: int = WORKERS, progress: Progress | None = None
) -> list[Outcome]:
    """Show the recordings of a folder to every detector, without training."""
    wanted = _pattern(only)
    paths = [path for path in recorded(folder) if wanted.search(path.stem.rpartition(".")[0])]
    if not paths:
        raise GradvitalsError(f"{folder} has no recording that is called like {only!r}")
    return _all(_load, paths, [path.stem for path in paths], workers, progress)


def _pattern(only: str | None) -> re.Pattern[str]:
    try:
        return re.compile(only or "")
    except re.error as error:
        raise GradvitalsError(f"{only!r} is no regular expression ({error}); for example: mlp|frozen") from None


# -- one run --------------------------------------------------------------------------------------------------------


def _train(case: Case, *, keep: Path | None, tensor_every: int) -> Outcome:
    start = time.process_time()
    fault = FAULTS.get(case.name)
    recipe = RECIPES[case.task] if fault else _control(case).recipe
    recording = record(case.name, recipe, case.seed, fault, tensor_every=tensor_every)
    seconds = time.process_time() - start
    if keep is not None:
        save_recording(recording, keep)
    return outcome_of(recording, seconds)


def _control(case: Case) -> Control:
    return next(control for control in CONTROLS if (control.recipe.task, control.id) == (case.task, case.name))


def _load(path: Path) -> Outcome:
    return outcome_of(load_recording(path))


def outcome_of(recording: Recording, seconds: float = 0.0) -> Outcome:
    """Show a recording to every detector."""
    planted = None
    if recording.fault is not None and recording.planted is not None:
        fault = FAULTS.get(recording.fault)
        if fault is None:
            raise GradvitalsError(f"{recording.label} has a fault this zoo does not know; record it again")
        planted = Planted(
            kind=fault.kind,
            step=recording.planted,
            finds=fault.finds,
            place=fault.place_in(recording.task),
            description=fault.description,
        )
    alarms, verdict, milliseconds = judge(recording)
    return Outcome(
        name=recording.name,
        task=recording.task,
        seed=recording.seed,
        steps=len(recording.steps),
        fault=planted,
        alarms=alarms,
        series={name: recording.series(name) for name in SERIES},
        verdict=verdict,
        seconds=seconds,
        diagnosis_ms=milliseconds,
    )


# -- many of them ---------------------------------------------------------------------------------------------------


def _all(
    job: Callable[[Item], Outcome],
    items: Sequence[Item],
    labels: Sequence[str],
    workers: int,
    progress: Progress | None,
) -> list[Outcome]:
    """The outcome of each, in the order given, whatever the order they are finished in."""
    tell = progress or (lambda done, total, label: None)
    outcomes: dict[int, Outcome] = {}
    for place, outcome in run_all(job, items, workers):
        outcomes[place] = outcome
        tell(len(outcomes), len(items), labels[place])
    return [outcomes[place] for place in range(len(items))]
