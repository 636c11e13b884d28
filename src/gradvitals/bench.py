"""What monitoring costs on this machine: monitored and bare steps of one model, timed in turn.

A shared machine drifts by more than monitoring costs, so only steps that follow each other at once are compared.

- **On a CPU** every variant has a process of its own, and so have bare steps. Each makes a few steps in its turn, in an
  order that changes, and is stopped (SIGSTOP) while others take theirs. Every round starts new processes, because two
  bare processes also differ by where their memory lies. Unless asked otherwise, the C library keeps freed memory:
  giving it back and asking for it again can take a third of a step of ten milliseconds, monitored or not. The page
  faults that this causes are counted.
- **On a GPU** everything runs in one process. Every stretch of monitored steps lies between two stretches of bare
  steps, and only its ratio to their mean is kept. "bare, again" is bare steps put through the same motions: the
  resolution of the method.

With the default settings, the timed steps hold one full cycle of readings, so each kind of reading counts with its
share. Nothing is flushed inside a timed stretch: in the middle of a run, training never waits for the disk.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import cycle, pairwise
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals.collect.schedule import YOUNG_STEPS
from gradvitals.config import Config
from gradvitals.demo import CharLM, CharLMConfig
from gradvitals.errors import GradvitalsError
from gradvitals.measure.budget import Cadence
from gradvitals.monitor import Monitor, watch

LEARNING_RATE = 1e-6
"""So small that no batch is learnt by heart while it is timed: numbers near zero are slow on a CPU."""

MAX_NORM = 1.0
NUM_CLASSES = 10

Observe = Callable[[Tensor], object]
"""Called with the mean loss of a step between its last backward and clipping."""


MicroBatch = tuple[Tensor, Tensor]
"""Inputs and targets."""

NUM_BATCHES = 8
"""Different batches that are gone through in turn: with a single one, gradients would have no noise to measure."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its optimizer and the data, which is gone through again and again."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Sequence[Sequence[MicroBatch]]
    """The micro-batches of every step."""
    loss: Callable[[Tensor, Tensor], Tensor]
    """Mean loss of one micro-batch, from its inputs and targets."""
    autocast: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.batches[0][0][0].device

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_tensors(self) -> int:
        """Parameters, tied ones once."""
        return sum(1 for _ in self.model.parameters())

    @property
    def num_micro_batches(self) -> int:
        """Backward passes of one step."""
        return len(self.batches[0])

    @property
    def batch_size(self) -> int:
        """Samples of one step, over all micro-batches."""
        return sum(len(inputs) for inputs, _ in self.batches[0])

    @cached_property
    def _turns(self) -> Iterator[Sequence[MicroBatch]]:
        return cycle(self.batches)

    def step(self, observe: Observe | None = None) -> None:
        """One optimizer step, as a training loop does it. It never waits for the device."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for inputs, targets in next(self._turns):
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                loss = self.loss(inputs, targets) / self.num_micro_batches
            loss.backward()
            total += loss.detach()
        if observe is not None:
            observe(total)
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()


def gpt(
    device: torch.device,
    *,
    n_layer: int,
    d_model: int,
    n_head: int,
    micro_batch_size: int,
    vocab_size: int = 50257,
    context: int = 1024,
    tied: bool = True,
    bf16: bool = True,
    num_micro_batches: int = 2,
) -> Training:
    """A decoder-only transformer at GPT sizes: pre-LN, fused qkv, output head tied to the embedding."""
    config = CharLMConfig(vocab_size=vocab_size, context=context, d_model=d_model, n_layer=n_layer, n_head=n_head)
    with device:
        model = CharLM(config)
    if tied:
        model.head.weight = model.embed.weight
    shape = (NUM_BATCHES, num_micro_batches, micro_batch_size, context + 1)
    tokens = torch.randint(vocab_size, shape, device=device)
    return Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=device.type == "cuda" or None),
        batches=[[(micro[:, :-1], micro[:, 1:]) for micro in batch] for batch in tokens],
        loss=model,
        autocast=torch.bfloat16 if bf16 else None,
    )


def gpt_124m(device: torch.device, *, micro_batch_size: int = 8) -> Training:
    """The size of GPT-2 small."""
    return gpt(device, n_layer=12, d_model=768, n_head=12, micro_batch_size=micro_batch_size)


def gpt_1_3b(device: torch.device, *, micro_batch_size: int = 6) -> Training:
    """The size of GPT-3 XL."""
    return gpt(device, n_layer=24, d_model=2048, n_head=16, micro_batch_size=micro_batch_size)


def transformer(device: torch.device, *, micro_batch_size: int = 1, d_model: int = 128, n_layer: int = 5) -> Training:
    """A character-level transformer in float32: 1M parameters in 65 tensors."""
    return gpt(
        device,
        n_layer=n_layer,
        d_model=d_model,
        n_head=4,
        micro_batch_size=micro_batch_size,
        vocab_size=96,
        context=64,
        tied=False,
        bf16=False,
    )


def mlp(device: torch.device, *, micro_batch_size: int = 64, width: int = 512) -> Training:
    """A plain MLP in float32 with AdamW: 1M parameters in 10 tensors."""
    inputs = width // 2
    with device:
        model = nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            *(layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())),
            nn.Linear(width, NUM_CLASSES),
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    batches = _labelled(2, (micro_batch_size, inputs), device)
    return Training(model=model, optimizer=optimizer, batches=batches, loss=_classifier_loss(model))


def cnn(device: torch.device, *, micro_batch_size: int = 16, width: int = 32) -> Training:
    """A CNN with batch norm on 32×32 images, SGD with momentum, one batch a step: 1M parameters in 17 tensors."""
    channels = (3, width, 2 * width, 4 * width, 8 * width, 8 * width)
    layers: list[nn.Module] = []
    for position, (before, after) in enumerate(pairwise(channels)):
        stride = 2 if position < 4 else 1
        layers += [nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], NUM_CLASSES)]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    batches = _labelled(1, (micro_batch_size, 3, 32, 32), device)
    return Training(model=model, optimizer=optimizer, batches=batches, loss=_classifier_loss(model))


def _labelled(num_micro_batches: int, shape: tuple[int, ...], device: torch.device) -> list[list[MicroBatch]]:
    def one() -> MicroBatch:
        return torch.randn(shape, device=device), torch.randint(NUM_CLASSES, shape[:1], device=device)

    return [[one() for _ in range(num_micro_batches)] for _ in range(NUM_BATCHES)]


def _classifier_loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    return loss


SHAPES: dict[str, Callable[[torch.device], Training]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": transformer,
    "gpt-124m": gpt_124m,
    "gpt-1.3b": gpt_1_3b,
}

DEFAULT_SHAPES = {"cpu": ("mlp", "cnn", "transformer"), "cuda": ("gpt-124m", "gpt-1.3b")}
"""Those that suit a kind of device."""


WARM_UP_STEPS = 10
"""Bare steps before anything is timed: kernels are chosen, the optimizer makes its state."""

NUM_BINS = 64

MONITORED: dict[str, Config] = {
    "default": Config(quiet=True),
    "norms+gsnr every step": Config(tensor_every=1, metrics=("grad/norm", "gsnr"), quiet=True),
    "everything every step": Config(tensor_every=1, quiet=True),
}
"""Variants that attach a monitor."""


def norm_loop(training: Training) -> None:
    """What many loops do today: ask for the norm of each gradient, one by one."""
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            parameter.grad.norm().item()


def histograms(training: Training) -> None:
    """What `wandb.watch` and its like do: a histogram of each gradient, brought to the host one by one."""
    for parameter in training.model.parameters():
        if parameter.grad is not None:
            torch.histc(parameter.grad.float(), bins=NUM_BINS).cpu()


BY_HAND: dict[str, Callable[[Training], None]] = {"norm loop": norm_loop, "histograms": histograms}
"""Variants that people write themselves."""

VARIANTS = (*MONITORED, *BY_HAND, "bare")


SETTLE_STEPS = 3
THINNING_STEPS = 800
"""Steps in which a monitor finds out how many of them it can read within its budget."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """What one timed stretch of steps took."""

    wall_seconds: float
    """Per step."""
    cpu_seconds: float
    """Per step, of all threads of this process: also what ran beside training."""
    peak_bytes: int | None
    """Most device memory in use; None on a CPU."""
    flush_seconds: float | None = None
    """To bring the last readings to disk after the stretch; None without a monitor."""
    page_faults: float | None = None
    """Per step, pages of memory that the system had to give; None where they were not counted."""


@dataclass
class WatchedRun:
    """A run that is watched now and then, and has gone on in between without being seen."""

    path: Path
    state: dict[str, Any] | None = None
    """What its monitor knew at the end of its last stretch."""
    every: int = 0
    """Steps from one full reading to the next, as it has come to."""
    step_every: int = 1
    """The same for any reading."""
    pieces: int = 0
    """Stretches that were timed."""


def time_steps(training: Training, observe: Observe | None, steps: int) -> Stretch:
    """Time some steps, from when the device is idle until it is again."""
    on_gpu = training.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize(training.device)
        torch.cuda.reset_peak_memory_stats(training.device)
    cpu_started, started = time.process_time(), time.perf_counter()
    for _ in range(steps):
        training.step(observe)
    if on_gpu:
        torch.cuda.synchronize(training.device)
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
    peak = torch.cuda.max_memory_allocated(training.device) if on_gpu else None
    return Stretch(wall_seconds=wall / steps, cpu_seconds=cpu / steps, peak_bytes=peak)


def time_monitored(config: Config, training: Training, steps: int, run: WatchedRun) -> Stretch:
    """Time some steps of a run that is watched, or as many more as it reads single tensors more rarely by itself."""
    model, optimizer = training.model, training.optimizer
    with watch(model, optimizer, run=run.path, config=config, batch_size=training.batch_size) as monitor:
        settle(monitor, training, run)
        run.every, run.step_every = monitor.tap.cadence
        stretch = time_steps(training, monitor.observe, steps * run.every // config.tensor_every)
        started = time.perf_counter()
        written = monitor.flush()
        flush_seconds = time.perf_counter() - started
        run.state = monitor.state_dict()
    expect_whole(monitor)
    if not written:
        raise GradvitalsError("the monitor failed while it was timed: it could not write")
    return replace(stretch, flush_seconds=flush_seconds)


def expect_whole(monitor: Monitor) -> None:
    """A monitor that has given up on something is cheap, and its time would mean nothing: raise."""
    broken = [finding for finding in monitor.findings if finding.id in ("monitor_error", "store_error")]
    if broken:
        raise GradvitalsError(f"the monitor failed while it was timed: {broken[0]}")


def grown_step(config: Config, every: int | None = None, since: int = YOUNG_STEPS) -> int:
    """A step at which a run is young no more, and everything is due."""
    cycle = (every or config.tensor_every) * config.detail_factor
    return math.ceil(since / cycle) * cycle


def settle(monitor: Monitor, training: Training, run: WatchedRun, thinning_steps: int | None = None) -> None:
    """Bring a monitor to where it is in the middle of a run.

    A young run is read more often, so a new one begins at a step where it is young no more. In the first step all is
    due, and set up, and the flush after it opens the file. On a CPU the steps that follow also fill the sliding
    windows, which only then begin to report; on a GPU that takes some microseconds every tenth step, and the wait for
    it would take longer than all the rest. There, too, a new monitor finds out what it can afford, as if the first
    seconds, in which all is read, were over. A run that was watched before goes on with all it knows.

    What is timed begins right after a step that was due, each time after another of those that make a cycle.
    """
    tap, config = monitor.tap, monitor.config
    if run.state is None:
        tap.start(grown_step(config))
    else:
        monitor.load_state_dict(run.state)
        tap.start(grown_step(config, tap.cadence.every, tap.step))
    training.step(monitor.observe)
    monitor.flush()
    is_new = run.state is None and training.device.type == "cpu"
    for _ in range(config.window_steps if is_new else SETTLE_STEPS):
        training.step(monitor.observe)
    if is_new and tap.budget is not None and tap.budget.thins_tensors:
        tap.budget.free_seconds = 0.0
        for number in range(THINNING_STEPS if thinning_steps is None else thinning_steps):
            training.step(monitor.observe)
            if number % 100 == 99:
                monitor.flush()  # what they cost is known when they are written
    every = tap.cadence.every
    tap.start(grown_step(config, every, tap.step) + run.pieces % config.detail_factor * every + 1)
    run.pieces += 1


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
        thinning_steps=THINNING_STEPS,
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
        observe, cadence = monitor.observe, monitor.tap.cadence
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
        expect_whole(monitor)
    pipe.send(None)


def _page_faults() -> int:
    import resource  # which Windows lacks: beside a GPU nothing of this is called

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _watch(training: Training, task: Task, config: Config) -> Monitor:
    run = task.folder / "run"
    monitor = watch(training.model, training.optimizer, run=run, config=config, batch_size=training.batch_size)
    settle(monitor, training, WatchedRun(run), task.thinning_steps)
    if monitor.tap.budget is not None:
        monitor.tap.budget.free_seconds = math.inf  # the cadence stays: the time of other turns is none of its own
    return monitor


def _observe_by_hand(by_hand: Callable[[Training], None], training: Training) -> Observe:
    return lambda loss: by_hand(training)


DEFAULT_ROUNDS = {"cpu": 6, "cuda": 4}

SHORT = 8
"""Bare stretches, and those whose steps are all alike, are this many times shorter than a round of the default."""

EVERY_KIND = Config(tensor_every=2, detail_every=4, quiet=True)
"""Takes every kind of reading within a few steps, so that everything is compiled before anything is timed."""


Piece = tuple[Stretch, tuple[Stretch, Stretch]]
"""A stretch, and the bare ones before and after it."""


@dataclass
class Ratios:
    """The stretches of one variant, round by round, each beside the two bare stretches around it."""

    rounds: list[list[Piece]] = field(default_factory=list)

    def of(self, seconds: Callable[[Stretch], float]) -> list[float]:
        """The ratio to bare in every round."""
        return [
            sum(seconds(stretch) for stretch, _ in pieces)
            / sum(statistics.fmean(map(seconds, around)) for _, around in pieces)
            for pieces in self.rounds
        ]

    def extra_bytes(self) -> int | None:
        """The largest rise of the peak of device memory over that of the bare stretches around."""
        rises = [
            stretch.peak_bytes - max(bare.peak_bytes or 0 for bare in around)
            for pieces in self.rounds
            for stretch, around in pieces
            if stretch.peak_bytes is not None
        ]
        return max(rises, default=None)

    def flushes(self) -> list[float]:
        """How long each flush took after its stretch."""
        found = [stretch.flush_seconds for pieces in self.rounds for stretch, _ in pieces]
        return [seconds for seconds in found if seconds is not None]


def run_overhead(
    device: str = "auto",
    shapes: Sequence[str] | None = None,
    variants: Sequence[str] | None = None,
    steps: int | None = None,
    rounds: int | None = None,
    progress: Callable[[str], object] | None = None,
    *,
    keeps_memory: bool = True,
) -> dict[str, Any]:
    """Time every variant against bare steps of the same model.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
        shapes: Names out of `SHAPES`; None takes those that suit the device.
        variants: Names out of `VARIANTS`; None takes all. Few of them leave time for many rounds.
        steps: Timed steps of a stretch with the default settings, rounded up to a multiple of its slowest cadence.
        rounds: How often each variant is timed. The order changes from round to round.
        progress: Called with a line of text now and then.
        keeps_memory: On a CPU: whether the C library is told to keep freed memory (`in_turns`).

    Returns:
        Plain values, ready for JSON: the machine, and for every shape its size, the time of a bare step and for every
        variant the median `ratio` to bare with its quartiles, and the interval that holds it in 95 of 100 cases.
    """
    place = _device(device)
    default = MONITORED["default"]
    cycle = default.tensor_every * default.detail_factor
    steps = math.ceil((steps or 1) / cycle) * cycle
    rounds = DEFAULT_ROUNDS[place.type] if rounds is None else rounds
    if rounds < 1:
        raise ValueError(f"got {rounds} rounds; expected 1 or more")
    names = shapes or DEFAULT_SHAPES[place.type]
    unknown = [name for name in names if name not in SHAPES]
    if unknown:
        raise ValueError(f"there is no shape {unknown[0]!r}; expected one of {', '.join(SHAPES)}")
    chosen = variants or VARIANTS
    if not set(chosen) <= set(VARIANTS):
        raise ValueError(f"variants are {', '.join(chosen)}; expected some of {', '.join(VARIANTS)}")
    tell = progress or (lambda line: None)
    results = [_time_shape(name, chosen, place, steps, rounds, tell, keeps_memory) for name in names]
    return {
        "device": place.type,
        "machine": machine_name(place),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": steps,
        "rounds": rounds,
        "tensor_every": default.tensor_every,
        "keeps_memory": keeps_memory if place.type == "cpu" else None,
        "shapes": results,
    }


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type not in DEFAULT_SHAPES:
        raise ValueError(f"device is {device!r}; expected auto, cpu or cuda")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda'; torch sees no CUDA device here")
    return place


def _time_shape(
    name: str,
    variants: Sequence[str],
    device: torch.device,
    steps: int,
    rounds: int,
    tell: Callable[[str], object],
    keeps_memory: bool,
) -> dict[str, Any]:
    tell(f"{name}: building and warming up")
    torch.manual_seed(0)
    in_turns = device.type == "cpu"
    training = SHAPES[name](torch.device("meta") if in_turns else device)  # where others train, only to be counted
    measured = Measured({variant: Ratios() for variant in variants}, lambda line: tell(f"{name}: {line}"))
    if in_turns:
        time_in_turns(measured, name, steps, rounds, keeps_memory)
    else:
        time_in_stretches(measured, training, steps, rounds)
    return {
        "shape": name,
        "parameters": training.num_parameters,
        "tensors": training.num_tensors,
        "micro_batches": training.num_micro_batches,
        "batch_size": training.batch_size,
        "bare_ms": 1000 * statistics.median(map(_wall, measured.bare)),
        "bare_page_faults": _mean_page_faults(measured.bare),
        "default_cadence": list(statistics.mode(measured.cadences)) if measured.cadences else None,
        "variants": {variant: _summary(found) for variant, found in measured.ratios.items()},
    }


@dataclass
class Measured:
    """What was timed of one shape."""

    ratios: dict[str, Ratios]
    tell: Callable[[str], object]
    bare: list[Stretch] = field(default_factory=list)
    cadences: list[Cadence] = field(default_factory=list)
    """What was read with the default settings, as each monitor has come to."""

    def end_round(self, number: int, rounds: int) -> None:
        """Say where it stands."""
        variant, found = next(iter(self.ratios.items()))
        so_far = percent(statistics.median(found.of(_wall)))
        self.tell(f"round {number + 1} of {rounds}, {variant} at {so_far} so far")


def time_in_turns(measured: Measured, shape: str, steps: int, rounds: int, keeps_memory: bool = True) -> None:
    """Time every variant in a process of its own; each round has new ones."""
    for number in range(rounds):
        found = time_round(shape, list(measured.ratios), steps, seed=number, keeps_memory=keeps_memory)
        measured.bare.append(found.base)
        for variant, stretch in found.variants.items():
            measured.ratios[variant].rounds.append([(stretch, (found.base, found.base))])
        measured.cadences += [found.cadences["default"]] if "default" in found.cadences else []
        measured.end_round(number, rounds)


def time_in_stretches(measured: Measured, training: Training, steps: int, rounds: int) -> None:
    """Time every variant in this process, between bare stretches."""
    variants = list(measured.ratios)
    for _ in range(WARM_UP_STEPS):
        training.step()
    short = max(1, steps // SHORT)
    pieces = MONITORED["default"].detail_factor
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for config in (EVERY_KIND, *MONITORED.values()):
            time_monitored(config, training, 2 * EVERY_KIND.detail_factor, WatchedRun(Path(folder) / "compiling"))
        runs = {variant: WatchedRun(Path(tempfile.mkdtemp(dir=folder)) / "run") for variant in MONITORED}
        bare = measured.bare
        bare.append(_time_variant("bare", training, short, runs))
        for number in range(rounds):
            turn = number % len(variants)
            for variant in (*variants[turn:], *variants[:turn]):
                stretches: list[Piece] = []
                for length in [steps // pieces] * pieces if variant == "default" else [short]:
                    stretch = _time_variant(variant, training, length, runs)
                    bare.append(_time_variant("bare", training, short, runs))
                    stretches.append((stretch, (bare[-2], bare[-1])))
                measured.ratios[variant].rounds.append(stretches)
            measured.end_round(number, rounds)
    if "default" in variants:
        measured.cadences.append(Cadence(runs["default"].every, runs["default"].step_every))


def _summary(ratios: Ratios) -> dict[str, Any]:
    wall = ratios.of(_wall)
    low, middle, high = statistics.quantiles(wall, n=4, method="inclusive") if len(wall) > 1 else wall * 3
    flushes = ratios.flushes()
    return {
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "ratio_interval": median_interval(wall),
        "cpu_ratio": statistics.median(ratios.of(lambda stretch: stretch.cpu_seconds)),
        "extra_device_bytes": ratios.extra_bytes(),
        "flush_ms": 1000 * statistics.median(flushes) if flushes else None,
        "page_faults": _mean_page_faults([stretch for pieces in ratios.rounds for stretch, _ in pieces]),
        "ratios": wall,
    }


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Where the median of what these were drawn from lies, in 95 of 100 cases or more; None for fewer than six.

    The k-th smallest of n values is over the median where fewer than k of them are under it, each with probability 1/2.

    >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])  # 2 * (1/2)**6 = 3 % lie outside
    [1.0, 6.0]
    """
    ordered, outside, rank = sorted(values), 0.0, 0
    while (outside := outside + 2 * math.comb(len(ordered), rank) * 0.5 ** len(ordered)) <= 0.05:
        rank += 1
    return [ordered[rank - 1], ordered[-rank]] if rank else None


def _mean_page_faults(stretches: Sequence[Stretch]) -> float | None:
    """Of a step on average; None where they were not counted."""
    counts = [stretch.page_faults for stretch in stretches if stretch.page_faults is not None]
    return statistics.fmean(counts) if counts else None


def _wall(stretch: Stretch) -> float:
    return stretch.wall_seconds


# -- one stretch ----------------------------------------------------------------------------------------------------


def _time_variant(variant: str, training: Training, steps: int, runs: Mapping[str, WatchedRun]) -> Stretch:
    if variant in MONITORED:
        return time_monitored(MONITORED[variant], training, steps, runs[variant])
    observe: Observe | None = None
    if variant in BY_HAND:
        by_hand = BY_HAND[variant]

        def observe(loss: Tensor) -> None:
            by_hand(training)

    for _ in range(SETTLE_STEPS):
        training.step(observe)
    return time_steps(training, observe, steps)


# -- in words -------------------------------------------------------------------------------------------------------


def format_overhead(result: dict[str, Any]) -> str:
    """The result as text: one Markdown table for each shape.

    On a CPU there is the change of the processor time of all threads, too. It counts what ran on an idle core as well,
    and hardly feels other programs, so on a busy machine it is the steadier of the two. Page faults are the mean.
    """
    on_cpu = result["device"] == "cpu"
    threads, more = (f", {result['threads']} threads", " or more") if on_cpu else ("", "")
    lines = [
        f"{result['machine']}{threads}, torch {result['torch']}, {result['date']}",
        f"{result['rounds']} rounds of {result['steps']} steps{more}; change of the step's time: median [quartiles]",
        *([] if result["keeps_memory"] is not False else ["freed memory is left to the C library"]),
    ]
    for shape in result["shapes"]:
        lines += [
            "",
            f"{shape['shape']}: {shape['parameters'] / 1e6:.3g}M parameters in {shape['tensors']} tensors, "
            f"{shape['micro_batches']} micro-batch{'es' if shape['micro_batches'] > 1 else ''} a step, "
            f"{shape['bare_ms']:.2f} ms a bare step"
            + (f", with {shape['bare_page_faults']:.0f} page faults" if on_cpu else ""),
            "",
        ]
        costs: tuple[str, ...] = ("CPU time", "page faults") if on_cpu else ("extra memory",)
        rows = [("variant", "step time", "quartiles", "95 % interval", "ms a step", *costs)]
        for variant, found in shape["variants"].items():
            if on_cpu:
                costs = (percent(found["cpu_ratio"]), f"{found['page_faults']:.0f}")
            else:
                costs = (f"{found['extra_device_bytes'] / 2**20:.1f} MB",)
            rows.append(
                (
                    "bare, again" if variant == "bare" else variant,
                    percent(found["ratio"]),
                    _span([found["ratio_low"], found["ratio_high"]]),
                    _span(found["ratio_interval"]),
                    f"{(found['ratio'] - 1) * shape['bare_ms']:+.3f}",
                    *costs,
                )
            )
        lines.append(markdown_table(rows))
        every, step_every = shape["default_cadence"] or (0, 1)
        if step_every > 1:
            lines += ["", f"default: one step in {step_every} was read, and single tensors every {every} steps"]
    return "\n".join(lines)


def _span(ends: list[float] | None) -> str:
    return "too few rounds" if ends is None else f"[{percent(ends[0])}, {percent(ends[1])}]"


def percent(ratio: float) -> str:
    """A ratio as a change."""
    return f"{100 * (ratio - 1):+.2f} %"


def machine_name(device: torch.device) -> str:
    """What it runs on, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    return f"{name}, {os.cpu_count()} cores"


def markdown_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table with its columns padded to one width.

    Args:
        rows: The head first.
        left: Places of the columns that are aligned left; the others are numbers.
    """
    widths = [max(2, *map(len, column)) for column in zip(*rows, strict=True)]  # room for a hyphen and a colon
    aligned = [
        [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    rule = ["-" * width if place in left else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (aligned[0], rule, *aligned[1:]))
