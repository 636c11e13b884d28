"""What monitoring costs on a CPU: processes that take turns of a few steps.

The speed of a shared machine changes by several percent from one tenth of a second to the next, and from one minute to
the next by no more: only what follows at once can be compared. So every variant has a process of its own, bare steps
have another, and each makes a few steps in its turn, in an order that changes. While it is not its turn a process is
stopped, all its threads with it: what its monitor has yet to write is written when it goes on, beside its own training.
Its clocks go on meanwhile, so that it writes more often in a number of steps than it would alone: the cost is rather
too high than too low.

Two bare processes differ too, by where their memory happens to lie. Every round begins with new ones; and unless told
otherwise the C library keeps its memory, which it else gives back to the system and asks for again at every step, or
never, for no reason that one could see: that alone can make a third of a step of ten milliseconds, watched or not. The
page faults that it shows by are counted.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.lab import stretch
from gradvitals.lab.shapes import SHAPES, Observe, Training
from gradvitals.lab.stretch import Stretch, WatchedRun, settle
from gradvitals.lab.variants import BY_HAND, MONITORED, WARM_UP_STEPS
from gradvitals.measure.budget import Cadence
from gradvitals.monitor import Monitor
from gradvitals.monitor import watch

TURN_STEPS = 5

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_MMAP_MAX_": "0"}
"""For glibc; others do not know these names."""

PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process is to do."""

    build: Callable[[torch.device], Training]
    config: Config | None
    """How it is watched; None where it is not."""
    by_hand: Callable[[Training], None] | None
    """What else is done in every step."""
    thinning_steps: int
    threads: int
    """Of torch."""
    folder: Path
    """Empty, for its run."""
    keeps_memory: bool = True


class Taken(NamedTuple):
    """What some steps took."""

    wall_seconds: float
    cpu_seconds: float
    """Of all threads."""
    page_faults: float
    """Pages of memory that the system had to give."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What every process took in one round, per step."""

    base: Stretch
    """Of the process with bare steps that the others are compared with."""
    variants: dict[str, Stretch]
    cadences: dict[str, Cadence]
    """Of those that are watched: what they have come to read."""


class Runner:
    """One process, from where its context is entered to where it is left; stopped whenever it is not its turn."""

    def __init__(self, task: Task, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._environment = KEEPS_MEMORY if task.keeps_memory else {}
        self._pipe, self._theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(self._theirs, task), daemon=True)
        self.cadence: Cadence | None = None

    def __enter__(self) -> Runner:
        try:
            with _environment(self._environment):
                self._process.start()
            self._theirs.close()  # so that its end is heard
            self.cadence = self._ask(None)  # it has settled: with others at work it could not find its cadence
            self._send(signal.SIGSTOP)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()

    def turn(self, steps: int) -> Taken:
        """Make some steps."""
        self._send(signal.SIGCONT)
        taken: Taken = self._ask(steps)
        self._send(signal.SIGSTOP)
        return taken

    def finish(self) -> None:
        """See whether all went well."""
        self._send(signal.SIGCONT)
        self._ask(0)

    def _send(self, sign: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, sign)

    def _ask(self, steps: int | None) -> Any:
        try:
            if steps is not None:
                self._pipe.send(steps)
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            raise GradvitalsError(f"the process that timed {self._name} ended with {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def time_round(shape: str, variants: Sequence[str], steps: int, seed: int = 0, *, keeps_memory: bool = True) -> Round:
    """Start a process for every variant, and one more for bare steps, and let them take turns.

    Args:
        shape: A name out of `SHAPES`.
        variants: Names out of `VARIANTS`.
        steps: Steps of each, rounded up to what the slowest monitor takes to read everything once, or several times.
        seed: Of the order in which they are started, and take their turns.
        keeps_memory: Whether the C library is told to.
    """
    shuffled = random.Random(seed)
    names = shuffled.sample(("", *variants), len(variants) + 1)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        runners = {}
        for name in names:
            task = _task(shape, name, Path(tempfile.mkdtemp(dir=folder)), keeps_memory)
            runners[name] = stack.enter_context(Runner(task, name or "bare steps"))
        cadences = {name: runner.cadence for name, runner in runners.items() if runner.cadence is not None}
        cycle = max((cadences[name].every * MONITORED[name].detail_factor for name in cadences), default=1)
        turns = math.ceil(math.ceil(steps / cycle) * cycle / TURN_STEPS)
        per_step = {name: [0.0] * len(Taken._fields) for name in names}
        for _ in range(turns):
            for name in shuffled.sample(names, len(names)):
                for kind, taken in enumerate(runners[name].turn(TURN_STEPS)):
                    per_step[name][kind] += taken / (turns * TURN_STEPS)
        for runner in runners.values():
            runner.finish()
    timed = {
        name: Stretch(wall_seconds=wall, cpu_seconds=cpu, peak_bytes=None, page_faults=faults)
        for name, (wall, cpu, faults) in per_step.items()
    }
    return Round(base=timed[""], variants={name: timed[name] for name in variants}, cadences=cadences)


def _task(shape: str, variant: str, folder: Path, keeps_memory: bool) -> Task:
    return Task(
        build=SHAPES[shape],
        config=MONITORED.get(variant),
        by_hand=BY_HAND.get(variant),
        thinning_steps=stretch.THINNING_STEPS,
        threads=torch.get_num_threads(),
        folder=folder,
        keeps_memory=keeps_memory,
    )


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """What a process that is started here finds in its environment, over what this one has."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# -- in the process -------------------------------------------------------------------------------------------------


def _work(pipe: connection.Connection, task: Task) -> None:
    if sys.platform == "linux":  # who is stopped does not see that its parent is gone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _train(pipe, task)
    except Exception as error:
        pipe.send(GradvitalsError(f"{type(error).__name__}: {error}"))


def _train(pipe: connection.Connection, task: Task) -> None:
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    training = task.build(torch.device("cpu"))
    monitor, cadence = None, None
    observe: Observe | None = None
    if task.config is not None:  # before the first step, as loops do it: that decides where memory lies
        monitor = _watch(training, task, task.config)
        observe, cadence = monitor.observe, monitor.recorder.cadence
    elif task.by_hand is not None:
        observe = _observe_by_hand(task.by_hand, training)
    for _ in range(WARM_UP_STEPS):
        training.step(observe)
    pipe.send(cadence)
    while steps := pipe.recv():
        faults, cpu_started, started = _page_faults(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            training.step(observe)
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
        pipe.send(Taken(wall, cpu, _page_faults() - faults))
    if monitor is not None:
        monitor.close()
        stretch.expect_whole(monitor)
    pipe.send(None)


def _page_faults() -> int:
    import resource  # which Windows lacks: beside a GPU nothing of this is called

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _watch(training: Training, task: Task, config: Config) -> Monitor:
    run = task.folder / "run"
    monitor = watch(training.model, training.optimizer, run=run, config=config, batch_size=training.batch_size)
    settle(monitor, training, WatchedRun(run), task.thinning_steps)
    if monitor.recorder.budget is not None:
        monitor.recorder.budget.free_seconds = math.inf  # the cadence stays: the time of other turns is none of its own
    return monitor


def _observe_by_hand(by_hand: Callable[[Training], None], training: Training) -> Observe:
    return lambda loss: by_hand(training)
