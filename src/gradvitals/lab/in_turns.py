"""What monitoring costs on a CPU: processes that take turns of a few steps.

The speed of a shared machine changes by several percent from one tenth of a second to the next, and from one minute to
the next by no more: only what follows at once can be compared. So every variant has a process of its own, bare steps
have another, and each makes a few steps in its turn. While it is not its turn a process is stopped, all its threads
with it: what its monitor has yet to write is written when it goes on, beside its own training.

Two bare processes differ too, by where their memory happens to lie. Every round begins with new ones; and the C library
is told to keep its memory, which it else gives back to the system and asks for again at every step, or never, for no
reason that one could see: that alone can make a third of a step of ten milliseconds.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.lab import stretch
from gradvitals.lab.shapes import SHAPES, Observe, Training
from gradvitals.lab.stretch import Stretch, WatchedRun, settle
from gradvitals.lab.variants import BY_HAND, MONITORED, WARM_UP_STEPS
from gradvitals.measure.budget import Cadence
from gradvitals.monitor import Monitor
from gradvitals.watching import watch

TURN_STEPS = 5

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_MMAP_MAX_": "0"}
"""For glibc; others do not know these names."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process is to do."""

    build: Callable[[torch.device], Training]
    config: Config | None
    """How it is watched; None where it is not."""
    by_hand: Callable[[Training], None] | None
    """What else is done in every step."""
    thinning_steps: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """What every process took in one round, per step."""

    base: Stretch
    """Of the process with bare steps that the others are compared with."""
    variants: dict[str, Stretch]
    cadences: dict[str, Cadence]
    """Of those that are watched: what they have come to read."""


class Runner:
    """One process, which is stopped whenever it is not its turn. Leave its context to end it."""

    def __init__(self, task: Task, name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, task), daemon=True)
        with _environment(KEEPS_MEMORY):
            self._process.start()
        theirs.close()
        self.cadence: Cadence | None = None

    def __enter__(self) -> Runner:
        try:
            self.cadence = self._answer()  # it has settled: with others at work it could not find its cadence
        except BaseException:
            self._process.kill()
            raise
        self._send(signal.SIGSTOP)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()

    def turn(self, steps: int) -> tuple[float, float]:
        """Make some steps. Returns the seconds they took, and those of the processor."""
        self._send(signal.SIGCONT)
        self._pipe.send(steps)
        answer: tuple[float, float] = self._answer()
        self._send(signal.SIGSTOP)
        return answer

    def finish(self) -> None:
        """See whether all went well."""
        self._send(signal.SIGCONT)
        self._pipe.send(0)
        self._answer()

    def _send(self, sign: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, sign)

    def _answer(self) -> Any:
        connection.wait([self._pipe, self._process.sentinel])
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise GradvitalsError(f"the process that timed {self._name} ended with {self._process.exitcode}") from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def time_round(shape: str, variants: Sequence[str], steps: int) -> Round:
    """Start a process for every variant, and one more for bare steps, and let them take turns.

    Args:
        shape: A name out of `SHAPES`.
        variants: Names out of `VARIANTS`.
        steps: Steps of each; more where a monitor takes longer to read everything once.
    """
    names = ("", *variants)
    with ExitStack() as stack:
        runners = [stack.enter_context(Runner(_task(shape, name), name or "bare steps")) for name in names]
        for runner, name in zip(runners, names, strict=True):
            if name in MONITORED and runner.cadence is not None:
                steps = max(steps, runner.cadence.every * MONITORED[name].detail_factor)
        turns = math.ceil(steps / TURN_STEPS)
        seconds = [[0.0, 0.0] for _ in runners]
        for number in range(turns):
            for place in range(len(runners)):
                whose = (number + place) % len(runners)  # nobody always follows the same one
                for kind, taken in enumerate(runners[whose].turn(TURN_STEPS)):
                    seconds[whose][kind] += taken / (turns * TURN_STEPS)
        for runner in runners:
            runner.finish()
    base, *others = [Stretch(wall_seconds=wall, cpu_seconds=cpu, peak_bytes=None) for wall, cpu in seconds]
    cadences = {name: runner.cadence for name, runner in zip(names, runners, strict=True) if runner.cadence is not None}
    return Round(base=base, variants=dict(zip(variants, others, strict=True)), cadences=cadences)


def _task(shape: str, variant: str) -> Task:
    return Task(
        build=SHAPES[shape],
        config=MONITORED.get(variant),
        by_hand=BY_HAND.get(variant),
        thinning_steps=stretch.THINNING_STEPS,
    )


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """What a process that is started here finds in its environment, over what this one has."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# -- in the process -------------------------------------------------------------------------------------------------


def _work(pipe: connection.Connection, task: Task) -> None:
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            _train(pipe, task, Path(folder))
    except Exception as error:
        pipe.send(GradvitalsError(f"{type(error).__name__}: {error}"))


def _train(pipe: connection.Connection, task: Task, folder: Path) -> None:
    torch.manual_seed(0)
    training = task.build(torch.device("cpu"))
    for _ in range(WARM_UP_STEPS):
        training.step()
    monitor, cadence = None, None
    observe: Observe | None = None
    if task.config is not None:
        monitor = _watch(training, task, folder)
        observe, cadence = monitor.observe, monitor.tap.cadence
    elif task.by_hand is not None:
        observe = _observe_by_hand(task.by_hand, training)
    pipe.send(cadence)
    while steps := pipe.recv():
        cpu_started, started = time.process_time(), time.perf_counter()
        for _ in range(steps):
            training.step(observe)
        pipe.send((time.perf_counter() - started, time.process_time() - cpu_started))
    if monitor is not None:
        monitor.close()
        stretch.expect_whole(monitor)
    pipe.send(None)


def _watch(training: Training, task: Task, folder: Path) -> Monitor:
    assert task.config is not None
    run = folder / "run"
    monitor = watch(training.model, training.optimizer, run=run, config=task.config, batch_size=training.batch_size)
    settle(monitor, training, WatchedRun(run), task.thinning_steps)
    if monitor.tap.budget is not None:
        monitor.tap.budget.free_seconds = math.inf  # the cadence stays: the time of other turns is none of its own
    return monitor


def _observe_by_hand(by_hand: Callable[[Training], None], training: Training) -> Observe:
    return lambda loss: by_hand(training)
