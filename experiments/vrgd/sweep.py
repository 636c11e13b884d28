"""The same learning-rate sweep for every arm, then fresh seeds at its best; several trials at once, and resumable.

Finished trials are kept as one line of JSON each, in a file that an interrupted run leaves usable.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.runs import append_line, read_lines
from experiments.vrgd.trial import Result, Trial
from gradvitals.errors import GradvitalsError

Phase = Literal["sweep", "fresh"]
"""Whether a trial was made to choose the learning rate, or to measure at the chosen one with a seed of its own."""
Settings = Mapping[str, float | str]
"""What else the result depends on: warm-up, precision, ... Trials with other settings are other trials."""
Key = tuple[Trial, tuple[tuple[str, float | str], ...]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """A finished trial."""

    trial: Trial
    phase: Phase
    result: Result
    elapsed: float
    """Seconds that a worker was busy with it: data, compilation and evaluation included."""
    settings: Settings = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """What must be equal for a trial not to be run again."""
        return key_of(self.trial, self.settings)

    @property
    def score(self) -> float:
        """Nan if the trial diverged."""
        return self.result["score"]


def key_of(trial: Trial, settings: Settings) -> Key:
    """See `Record.key`."""
    return trial, tuple(sorted(settings.items()))


def read_records(path: Path) -> list[Record]:
    """Returns the finished trials of a file, none if it does not exist."""
    return read_lines(path, _from_json, "python -m experiments.vrgd")


def append_record(path: Path, record: Record) -> None:
    """Add one line."""
    append_line(path, asdict(record))


def _from_json(line: dict[str, Any]) -> Record:
    return Record(
        trial=Trial(**line["trial"]),
        phase=line["phase"],
        result={name: float(value) for name, value in line["result"].items()},  # 'nan' is a string in strict JSON
        elapsed=float(line["elapsed"]),
        settings=line["settings"],
    )


FIRST_FRESH_SEED = 100
"""Sweeps count their seeds from 0. What is reported is measured with seeds that chose nothing."""

Scores = dict[tuple[float, int], float]
"""Of one group: score by learning rate and seed; nan for a trial that diverged."""
Train = Callable[[Trial], Result]
Progress = Callable[[int, int, str], object]
"""Called with how many trials are done, how many there will be as far as is known, and the name of the last."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a learning rate is chosen. One plan holds for all arms of a comparison."""

    span: int = 2
    """The grid is the start times 2**-span up to 2**span."""
    reach: int = 6
    """How many more factors of 2 a sweep goes beyond either end of its grid, while the best is at that end."""
    refine: int = 1
    """How often to halve the distance: with 1, learning rates a factor of the square root of 2 beside the best too."""
    sweep_seeds: int = 1
    """Trials that a learning rate must lead with, by its mean, before it counts as the best; the others get one."""
    seeds: int = 3
    """Fresh seeds at the best learning rate."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run of the sweep came to."""

    records: list[Record]
    left: int
    """How many trials are known to be left, for want of time."""
    failures: list[tuple[Trial, str]] = field(default_factory=list)
    """Trials that raised an error, and the error. The rest of their group was not run."""


def run_sweep(
    train: Train,
    groups: Iterable[Trial],
    *,
    plan: Plan | None = None,
    out: Path | None = None,
    settings: Settings | None = None,
    workers: int = 1,
    minutes: float | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Sweep the learning rate of each group and measure at its best.

    Args:
        train: Trains one trial. With several workers it must be a function of a module, or a `functools.partial` of
            one; it is called again and again in the same processes, so it may keep its data.
        groups: One trial for each arm, with the start of its sweep as `lr`; its `seed` does not matter. Earlier groups
            are finished first.
        plan: How wide and with how many seeds.
        out: File that finished trials are added to. Those it already has are not run again.
        settings: What else the results depend on; see `records.Settings`.
        workers: Processes to train in at once, on one GPU or on the CPU. 1: in this process.
        minutes: Begin no trial that would likely not end by then, judging by the duration of earlier ones.
        progress: See `Progress`.

    Raises:
        GradvitalsError: raised by `train`, such as for data that is not there; or when a worker is killed.
    """
    run = _Run(groups, plan or Plan(), settings or {})
    run.take(read_records(out) if out is not None else [])
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    tell = progress or (lambda done, total, label: None)
    in_flight: dict[Future[tuple[Result, float]], tuple[Phase, Trial]] = {}
    pool: Executor = _pool(workers)
    try:
        while True:
            while len(in_flight) < workers:
                job = run.next_job({trial for _, trial in in_flight.values()}, deadline - time.monotonic())
                if job is None:
                    break
                in_flight[pool.submit(_timed, train, job[1])] = job
            if not in_flight:
                break
            for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                phase, trial = in_flight.pop(future)
                record = run.finish(phase, trial, future)
                if record is not None and out is not None:
                    append_record(out, record)
                score = "failed" if record is None else f"{record.score:.4g}"
                tell(len(run.records), len(run.records) + run.left(), f"{describe(trial)}: {score}")
    except BrokenProcessPool:
        raise GradvitalsError(
            "a worker process was killed, perhaps for want of memory; try fewer --workers. Finished trials are kept."
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return Outcome(records=list(run.records.values()), left=run.left(), failures=list(run.failures.values()))


def describe(trial: Trial) -> str:
    """A trial in a few words, for a line of progress."""
    return f"{trial.model} {trial.batch} {trial.optimizer} {trial.arm} lr {trial.lr:g} seed {trial.seed}"


# -- what to run next, from what has been run -----------------------------------------------------------------------


def identity(trial: Trial) -> Trial:
    """The group a trial belongs to: what it shares with those that differ in learning rate and seed alone."""
    return replace(trial, lr=0.0, seed=0)


def pending(group: Trial, scores: Scores, plan: Plan) -> list[tuple[Phase, Trial]]:
    """The trials of a group that can be run now: of its sweep, or once that has ended, of its fresh seeds.

    Args:
        group: As given to `run_sweep`.
        scores: What is known of this group.
        plan: How far to go.
    """
    left = _untried(group, scores, {group.lr * 2.0**step for step in range(-plan.span, plan.span + 1)})
    if left:
        return left
    lr, tried = best_lr(scores), sweep_means(scores)
    # One trial may lead by luck. With more it leads on, or falls back behind the next, which then has to prove itself.
    proof = [seed for seed in range(plan.sweep_seeds) if (lr, seed) not in scores]
    if proof:
        return [("sweep", replace(group, lr=lr, seed=seed)) for seed in proof]
    farthest = 2.0 ** (plan.span + plan.reach)
    if lr == min(tried) and lr / 2 >= group.lr / farthest:
        return _untried(group, scores, {lr / 2})
    if lr == max(tried) and lr * 2 <= group.lr * farthest:
        return _untried(group, scores, {lr * 2})
    for halving in range(1, plan.refine + 1):
        step = 2.0 ** (0.5**halving)
        beside = _untried(group, scores, {lr / step, lr * step})
        if beside:
            return beside
    fresh = range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + plan.seeds)
    return [("fresh", replace(group, lr=lr, seed=seed)) for seed in fresh if (lr, seed) not in scores]


def _untried(group: Trial, scores: Scores, wanted: Iterable[float]) -> list[tuple[Phase, Trial]]:
    """One trial of each learning rate that is wanted, but for those that were tried, or as good as."""
    tried = sweep_means(scores)
    lrs = [lr for lr in sorted(wanted) if not any(math.isclose(lr, other, rel_tol=1e-3) for other in tried)]
    return [("sweep", replace(group, lr=lr, seed=0)) for lr in lrs]


def sweep_means(scores: Scores) -> dict[float, float]:
    """The mean score of each learning rate the sweep has tried, from low to high; nan if one of its trials diverged."""
    found: dict[float, list[float]] = {}
    for (lr, seed), score in sorted(scores.items()):
        if seed < FIRST_FRESH_SEED:
            found.setdefault(lr, []).append(score)
    return {lr: statistics.fmean(values) for lr, values in found.items()}


def best_lr(scores: Scores) -> float:
    """The learning rate with the best mean score in the sweep. Of equals the lowest, so also where all diverged."""
    means = sweep_means(scores)
    return max(means, key=lambda lr: -math.inf if math.isnan(means[lr]) else means[lr])


class _Run:
    """What is known so far, and what follows from it."""

    def __init__(self, groups: Iterable[Trial], plan: Plan, settings: Settings) -> None:
        self.groups = {identity(group): group for group in groups}
        self.plan = plan
        self.settings = settings
        self.records: dict[Key, Record] = {}
        self.failures: dict[Trial, tuple[Trial, str]] = {}
        """By group."""
        self._scores: dict[Trial, Scores] = {group: {} for group in self.groups}
        self._durations: list[tuple[Trial, float]] = []
        self._earlier: list[tuple[Trial, float]] = []

    def take(self, records: Iterable[Record]) -> None:
        """Records of earlier runs. Those of other groups or settings do not matter."""
        for record in records:
            if record.key == key_of(record.trial, self.settings) and identity(record.trial) in self.groups:
                self._add(record)
                self._earlier.append((record.trial, record.elapsed))

    def _add(self, record: Record) -> None:
        self.records[record.key] = record
        self._scores[identity(record.trial)][record.trial.lr, record.trial.seed] = record.score

    def finish(self, phase: Phase, trial: Trial, future: Future[tuple[Result, float]]) -> Record | None:
        try:
            result, elapsed = future.result()
        except (GradvitalsError, BrokenProcessPool):
            raise
        except Exception as error:
            self.failures.setdefault(identity(trial), (trial, f"{type(error).__name__}: {error}"))
            return None
        record = Record(trial=trial, phase=phase, result=result, elapsed=elapsed, settings=self.settings)
        self._add(record)
        self._durations.append((trial, elapsed))
        return record

    def next_job(self, in_flight: Collection[Trial], seconds_left: float) -> tuple[Phase, Trial] | None:
        for group in self.groups:
            for phase, trial in self._pending(group):
                if trial not in in_flight and self._expected_seconds(trial) <= seconds_left:
                    return phase, trial
        return None

    def left(self) -> int:
        """Trials to come, as far as is known: a sweep may go on further than its grid."""
        jobs = [self._pending(group) for group in self.groups]
        return sum(len(those) + (self.plan.seeds if those and those[0][0] == "sweep" else 0) for those in jobs)

    def _pending(self, group: Trial) -> list[tuple[Phase, Trial]]:
        return [] if group in self.failures else pending(self.groups[group], self._scores[group], self.plan)

    def _expected_seconds(self, trial: Trial) -> float:
        """From trials like it, of this run before those of others; else from any.

        Of others the shortest, because they may have shared the machine with more trials at once.
        """
        runs: tuple[tuple[list[tuple[Trial, float]], Callable[[list[float]], float]], ...]
        runs = ((self._durations, statistics.median), (self._earlier, min))
        for alike in (True, False):
            for known, typical in runs:
                found = [seconds for other, seconds in known if not alike or _same_work(other, trial)]
                if found:
                    return typical(found)
        return 0.0


def _same_work(first: Trial, second: Trial) -> bool:
    names = ("task", "model", "batch", "k", "epochs")
    return all(getattr(first, name) == getattr(second, name) for name in names)


# -- several at once ------------------------------------------------------------------------------------------------


def _timed(train: Train, trial: Trial) -> tuple[Result, float]:
    start = time.perf_counter()
    result = train(trial)
    return result, time.perf_counter() - start


class _Here(Executor):
    """Runs a job in this process, when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _pool(workers: int) -> Executor:
    if workers <= 1:
        return _Here()
    # Spawned, not forked: neither torch's threads nor a CUDA context outlive a fork.
    context = multiprocessing.get_context("spawn")
    threads = max(1, (os.cpu_count() or 1) // workers)
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_set_threads, initargs=(threads,))


def _set_threads(threads: int) -> None:
    # Read by torch when it is loaded, which is later. Workers with all threads each would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
