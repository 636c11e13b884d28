"""The whole zoo: which runs there are, trained or taken from a folder, two at a time, and what was said about each."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.faults.record import Recording, load_recording, record, recorded, save_recording
from benchmarks.faults.score import Outcome, Planted, judge
from benchmarks.faults.tasks import RECIPES, Task
from benchmarks.faults.zoo import CONTROLS, FAULTS, Control
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
Progress = Callable[[int, int, str], object]
"""Called with how many runs are done, how many there are, and the name of the last."""


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
    for place, outcome in _finished(job, items, workers):
        outcomes[place] = outcome
        tell(len(outcomes), len(items), labels[place])
    return [outcomes[place] for place in range(len(items))]


def _finished(job: Callable[[Item], Outcome], items: Sequence[Item], workers: int) -> Iterator[tuple[int, Outcome]]:
    if workers <= 1:
        threads = torch.get_num_threads()
        _one_thread()
        try:
            yield from ((place, job(item)) for place, item in enumerate(items))
        finally:
            torch.set_num_threads(threads)
        return
    # Spawned, not forked: a fork of a process in which torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_one_thread) as pool:
        places: dict[Future[Outcome], int] = {pool.submit(job, item): place for place, item in enumerate(items)}
        try:
            for future in as_completed(places):
                yield places[future], future.result()
        except BrokenProcessPool:
            raise GradvitalsError("a worker process was killed, perhaps for want of memory; try --workers 1") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _one_thread() -> None:
    """So small a model gains nothing from more threads, and workers would wait for each other."""
    torch.set_num_threads(1)
