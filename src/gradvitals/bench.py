"""Measures the cost of monitoring on this machine: times watched and bare steps of one training script in turn.

Every variant trains in a process of its own. Each makes 200 steps in its turn, in an order that changes, and is
stopped (SIGSTOP) together with its worker process while the others take theirs. The speed of a shared machine drifts by
more than monitoring costs, so only turns that follow each other closely are compared. Every round starts new processes,
because two processes that do the same differ too, by where their memory lies. The row "bare again" is a second process
without monitoring: the resolution of the method.

Monitored processes are timed as they are in the middle of a long run: the phase in which a young run is read more often
is over, and on a CPU the schedule has found what it can afford. It stays fixed while steps are timed, because the clock
of a stopped process runs on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradvitals import optim
from gradvitals.collect import schedule
from gradvitals.collect.optimizer_state import OptimizerState
from gradvitals.collect.recorder import StepRecorder
from gradvitals.collect.schedule import ReadSchedule
from gradvitals.config import Config
from gradvitals.demo import CharLM, CharLMConfig
from gradvitals.errors import GradvitalsError
from gradvitals.monitor import Monitor, watch
from gradvitals.store import open_run
from gradvitals.worker.recover import NOTE

LEARNING_RATE = 1e-6  # so small that no batch is memorized while it is timed: numbers near zero are slow on a CPU
MAX_NORM = 1.0
NUM_CLASSES = 10
NUM_BATCHES = 8  # different batches that take turns: with a single one, gradients would have no noise to measure
LOG_EVERY = 10  # steps from one `.item()` on the loss to the next
NUM_BINS = 64
Observe = Callable[[Tensor], object]  # called with the mean loss of a step between its last backward and clipping
MicroBatch = tuple[Tensor, Tensor]  # inputs and targets


# -- workloads ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its optimizer and the data, which it goes through again and again."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Sequence[Sequence[MicroBatch]]  # the micro-batches of every step
    loss: Callable[[Tensor, Tensor], Tensor]  # mean loss of one micro-batch, from its inputs and targets
    autocast: torch.dtype | None = None
    max_norm: float | None = MAX_NORM  # what the loop clips to; None if it does not clip

    @property
    def device(self) -> torch.device:
        """The device that it runs on."""
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
        """Samples per step, over all micro-batches."""
        return sum(len(inputs) for inputs, _ in self.batches[0])

    @cached_property
    def _turns(self) -> Iterator[Sequence[MicroBatch]]:
        return cycle(self.batches)

    def step(self, observe: Observe | None = None) -> Tensor:
        """One optimizer step, as a training loop does it; returns the mean loss. It never waits for the device."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for inputs, targets in next(self._turns):
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                loss = self.loss(inputs, targets) / self.num_micro_batches
            loss.backward()
            total += loss.detach()
        if observe is not None:
            observe(total)
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        return total


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


gpt_124m = partial(gpt, n_layer=12, d_model=768, n_head=12, micro_batch_size=8)  # the size of GPT-2 small
gpt_1_3b = partial(gpt, n_layer=24, d_model=2048, n_head=16, micro_batch_size=6)  # the size of GPT-3 XL

# A character-level transformer in float32: 1M parameters in 65 tensors.
transformer = partial(
    gpt, n_layer=5, d_model=128, n_head=4, micro_batch_size=1, vocab_size=96, context=64, tied=False, bf16=False
)


def small_gpt(device: torch.device) -> Training:
    """10M parameters on a GPU, 0.5M on a CPU."""
    if device.type == "cuda":
        shape: dict[str, Any] = {"n_layer": 6, "d_model": 384, "n_head": 6, "vocab_size": 96, "context": 256}
        return gpt(device, micro_batch_size=32, tied=False, **shape)
    return transformer(device, d_model=96, n_layer=4)


def _classifier(
    model: nn.Module, optimizer: torch.optim.Optimizer, shape: tuple[int, ...], device: torch.device
) -> Training:
    """One batch per step, without clipping."""
    batches = [
        [(torch.randn(shape, device=device), torch.randint(NUM_CLASSES, shape[:1], device=device))]
        for _ in range(NUM_BATCHES)
    ]

    def loss(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    return Training(model=model, optimizer=optimizer, batches=batches, loss=loss, max_norm=None)


def mlp(device: torch.device, *, micro_batch_size: int = 128, width: int = 512) -> Training:
    """An MLP of 7 layers in float32 with AdamW."""
    inputs = width // 2
    with device:
        hidden = (layer for _ in range(5) for layer in (nn.Linear(width, width), nn.ReLU()))
        model = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), *hidden, nn.Linear(width, NUM_CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return _classifier(model, optimizer, (micro_batch_size, inputs), device)


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after))


class _Block(nn.Module):
    """A basic residual block."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_conv(before, after, 3, stride), nn.ReLU(), _conv(after, after, 3))
        self.shortcut = nn.Identity() if before == after else _conv(before, after, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.layers(inputs) + self.shortcut(inputs))


def cnn(device: torch.device, *, micro_batch_size: int | None = None, width: int | None = None) -> Training:
    """ResNet-18 for 32×32 images, SGD with momentum; narrow and with few images on a CPU."""
    size = micro_batch_size or (128 if device.type == "cuda" else 2)
    width = width or (64 if device.type == "cuda" else 8)
    with device:
        layers: list[nn.Module] = [_conv(3, width, 3), nn.ReLU()]
        for stage in range(4):
            after = width * 2**stage
            layers += [_Block(width if stage == 0 else after // 2, after, 1 if stage == 0 else 2)]
            layers += [_Block(after, after, 1)]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(after, NUM_CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    return _classifier(model, optimizer, (size, 3, 32, 32), device)


Build = Callable[[torch.device], Training]
WORKLOADS: dict[str, Build] = {"mlp": mlp, "cnn": cnn, "gpt": small_gpt, "gpt-124m": gpt_124m, "gpt-1.3b": gpt_1_3b}

DEFAULT_WORKLOADS = {"cpu": ("mlp", "cnn", "gpt"), "cuda": ("mlp", "cnn", "gpt", "gpt-124m")}

# -- variants -------------------------------------------------------------------------------------------------------


OUR_ADAMW = "gv.optim.AdamW"

WATCHED = {  # variants that call `watch` themselves; in "every step" no budget thins the readings
    "watch": Config(quiet=True),
    "every step": Config(tensor_every=1, overhead_budget=1, quiet=True),
    OUR_ADAMW: Config(quiet=True),
}

BY_HAND: dict[str, Callable[[Tensor], object]] = {  # what people do with each gradient, one by one
    "norm loop": lambda grad: grad.norm().item(),
    "histograms": lambda grad: torch.histc(grad.float(), bins=NUM_BINS).cpu(),  # as `wandb.watch` and its like
}

BARE, RUN = "bare", "run"
VARIANTS = (BARE, "bare again", "watch", RUN, "every step", OUR_ADAMW, "norm loop", "histograms")


# -- in the process of a variant ------------------------------------------------------------------------------------

WARM_UP_STEPS = 20
SETTLE_STEPS = 120  # steps in which a monitor finds out how many of them it can read within its budget
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a process."""

    workload: str
    variant: str
    device: str
    compiled: bool
    threads: int
    run: str  # the folder of its run

    @property
    def is_watched(self) -> bool:
        """Whether there is a monitor."""
        return self.variant in WATCHED or self.variant == RUN


class CostLog:
    """Times recording on the training thread, step by step. Wraps what the loop calls, in this process.

    It measures only while it is `on`, in steps that are not timed: to measure takes time too. Until it is `frozen`,
    schedules adapt, from the first step on: the default starts to do so only after a second of work.
    """

    def __init__(self) -> None:
        self.frozen = self.on = False
        self.costs: list[tuple[str, float]] = []  # one of `KINDS`, and microseconds
        self.every = 0
        self._spent = 0.0
        self._step = ("plain", 0.0)  # the kind and the cost of the step, if it was accounted for
        schedule.FREE_SECONDS = 0.0
        schedule.YOUNG_STEPS = SETTLE_STEPS
        wrappers: list[tuple[type, str, Callable[..., Any]]] = [
            (StepRecorder, "observe", self._time),
            (StepRecorder, "on_total_norm", self._time),
            (StepRecorder, "on_clip", self._time),
            (StepRecorder, "_hook_steps", self._hook_steps),
            (ReadSchedule, "account", self._account),
            (ReadSchedule, "account_plain", lambda account, own, walls: not self.frozen and account(own, walls)),
        ]
        for owner, name, wrapper in wrappers:
            setattr(owner, name, _around(getattr(owner, name), wrapper))

    def _time(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if not self.on:
            return original(*args, **options)
        started = time.perf_counter()
        try:
            return original(*args, **options)
        finally:
            self._spent += time.perf_counter() - started

    def _hook_steps(self, original: Callable[..., list[Any]], own: StepRecorder, state: OptimizerState) -> list[Any]:
        before, after = handles = original(own, state)
        pre: Any = state.optimizer._optimizer_step_pre_hooks
        post: Any = state.optimizer._optimizer_step_post_hooks
        pre[before.id] = _around(pre[before.id], self._time)
        post[after.id] = _around(post[after.id], self._end_step)
        return handles

    def _end_step(self, original: Callable[..., Any], *args: Any) -> None:
        self._time(original, *args)
        kind, seconds = self._step
        # A full reading has costs that no call of the loop shows: its hooks in backward.
        if self.on or kind == "full":
            self.costs.append((kind, 1e6 * (seconds if kind == "full" else self._spent)))
        self._spent, self._step = 0.0, ("plain", 0.0)

    def _account(self, account: Callable[..., bool], own: ReadSchedule, *, full: bool, **costs: Any) -> bool:
        self._step = "full" if full else "norm" if costs["paid_norm"] else "plain", costs["cost_seconds"]
        self.every = own.every
        return not self.frozen and account(own, full=full, **costs)


def _around(original: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapped(*args: Any, **options: Any) -> Any:
        return around(original, *args, **options)

    return wrapped


def train(task: Task, commands: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Train one variant: each command is a number of steps to make; yields what they took.

    The loop is the same for every variant. Under `gradvitals run` it is the script, and nothing in it is different.
    """
    torch.set_num_threads(task.threads)
    torch.manual_seed(0)
    log = CostLog()
    first = next(commands)  # processes settle one at a time
    training = WORKLOADS[task.workload](torch.device(task.device))
    if task.variant == OUR_ADAMW:
        adamw = optim.AdamW(training.model.parameters(), lr=LEARNING_RATE, max_norm=training.max_norm)
        training = replace(training, optimizer=adamw, max_norm=None)
    if task.compiled:
        training = replace(training, loss=torch.compile(training.loss))
    observe: Observe | None = None
    monitor: Monitor | None = None
    if task.variant in WATCHED:  # before the first step, as loops do it: that decides where memory lies
        config = WATCHED[task.variant]
        monitor = watch(training.model, training.optimizer, run=task.run, config=config, batch_size=training.batch_size)
        observe = monitor.observe
    elif task.variant in BY_HAND:
        observe = partial(_for_each_gradient, BY_HAND[task.variant], list(training.model.parameters()))
    number = 0

    def make(steps: int) -> None:
        nonlocal number
        for _ in range(steps):
            loss = training.step(observe)
            number += 1
            if number % LOG_EVERY == 0:
                loss.item()
        if training.device.type == "cuda":
            torch.cuda.synchronize(training.device)

    for command in chain([first], commands):
        log.costs.clear()
        cpu_started, started = time.process_time(), time.perf_counter()
        make(int(command))
        wall, cpu = time.perf_counter() - started, time.process_time() - cpu_started
        had_full = bool(log.costs)
        log.on = True
        make(COST_STEPS)
        log.on, log.frozen = False, True
        yield {"wall": wall, "cpu": cpu, "full": had_full, "costs": log.costs, "every": log.every}
    if monitor is not None:
        monitor.close()


def _for_each_gradient(work: Callable[[Tensor], object], parameters: Sequence[Tensor], loss: Tensor) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            work(parameter.grad)


def _main() -> None:
    if sys.platform == "linux":  # a stopped process does not see that its parent is gone
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    print(json.dumps("ready"), flush=True)
    for answer in train(Task(**json.loads(sys.argv[1])), iter(sys.stdin)):
        print(json.dumps(answer), flush=True)


# -- taking turns ---------------------------------------------------------------------------------------------------

KINDS = ("plain", "norm", "full")
"""Of steps: one that reads what costs nothing, one that pays for a norm, and a full reading."""

TURN_STEPS = 200
"""Long enough that the worker, which looks at the journal once per second, works as in a run of its own."""

COST_STEPS = 20
"""Steps at the end of a turn that are not timed: what recording takes is measured in them."""

KEEPS_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**36), "MALLOC_MMAP_MAX_": "0"}
"""For glibc, which otherwise gives freed memory back and asks for it again at every step, or never, by luck."""

END_SECONDS = 60.0


class Runner:
    """The process of one variant, and its worker; both are stopped whenever it is not their turn."""

    def __init__(self, task: Task, *, keeps_memory: bool = True) -> None:
        self.task = task
        self._worker: int | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed at the end
        watching = ["gradvitals", "run", "--quiet", "--run", task.run, "-m"] if task.variant == RUN else []
        command = [sys.executable, "-m", *watching, "gradvitals.bench", json.dumps(asdict(task))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        environment = os.environ | (KEEPS_MEMORY if keeps_memory else {})
        self._process = subprocess.Popen(command, text=True, env=environment, **pipes)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._commands, self._answers = self._process.stdin, self._process.stdout

    def wait_until_ready(self) -> None:
        """Wait until everything is imported."""
        self._answer()

    def settle(self) -> None:
        """Make the first steps, then stop."""
        adapts = self.task.is_watched and self.task.variant != "every step"
        self._make(SETTLE_STEPS if adapts else WARM_UP_STEPS)
        note = Path(self.task.run) / NOTE
        if note.exists():  # none if the worker is a thread
            self._worker = json.loads(note.read_text())["worker"]["pid"]
        self._signal(signal.SIGSTOP)

    def turn(self) -> dict[str, Any]:
        """Make some steps."""
        self._signal(signal.SIGCONT)
        answer: dict[str, Any] = self._make(TURN_STEPS)
        self._signal(signal.SIGSTOP)
        return answer

    def finish(self) -> None:
        """End the run and check that nothing in it failed: a monitor that gave up on something is cheap."""
        self._signal(signal.SIGCONT)
        self._commands.close()
        if self._process.wait(END_SECONDS):
            self._fail()
        if self.task.is_watched:
            with open_run(self.task.run) as run:
                broken = [one for one in run.findings if one.id in ("monitor_error", "store_error")]
            if broken:
                raise GradvitalsError(f"the monitor failed while it was timed: {broken[0]}")

    def kill(self) -> None:
        """End the process, if it has not ended; its worker then ends by itself."""
        self._process.kill()
        self._signal(signal.SIGCONT)
        self._process.wait()
        for pipe in (self._commands, self._answers, self._errors):
            with contextlib.suppress(OSError):
                pipe.close()

    def _signal(self, sign: signal.Signals) -> None:
        for pid in filter(None, (self._process.pid if self._process.poll() is None else None, self._worker)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sign)

    def _make(self, steps: int) -> Any:
        with contextlib.suppress(BrokenPipeError):  # then there is no answer
            print(steps, file=self._commands, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        line = self._answers.readline()
        return json.loads(line) if line else self._fail()

    def _fail(self) -> NoReturn:
        code = self._process.wait(END_SECONDS)
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["it printed no error"])[-1]
        raise GradvitalsError(f"the process that timed {self.task.variant!r} ended with {code}: {last}")


@dataclass
class Round:
    """The times of one variant in one round, turn by turn."""

    turns: list[tuple[float, bool]] = field(default_factory=list)
    """Seconds per step, and whether one of the steps was read in full."""
    costs: list[tuple[str, float]] = field(default_factory=list)
    """The kind of each step, and the microseconds its recording took."""
    every: int = 0  # steps from one full reading to the next; 0 without a monitor
    cpu_seconds: float = 0.0  # of all threads of the training process, its worker not included

    def add(self, answer: Mapping[str, Any]) -> None:
        """Add one turn."""
        self.turns.append((answer["wall"] / TURN_STEPS, answer["full"]))
        self.costs += answer["costs"]
        self.every = answer["every"]
        self.cpu_seconds += answer["cpu"]

    @property
    def mean(self) -> float:
        """Seconds per step."""
        return statistics.fmean(seconds for seconds, _ in self.turns)

    @property
    def typical(self) -> float:
        """Seconds per step without the turns that something else on the machine held up.

        The median of the turns with a full reading and that of those without, weighted as they come in a long run.
        """
        kinds = [[seconds for seconds, full in self.turns if full is kind] for kind in (False, True)]
        if not all(kinds):
            return statistics.median(seconds for seconds, _ in self.turns)
        plain, full = map(statistics.median, kinds)
        return plain + (full - plain) * min(1.0, TURN_STEPS / self.every)


def time_round(tasks: Sequence[Task], steps: int, seed: int = 0, *, keeps_memory: bool = True) -> dict[str, Round]:
    """Start a process for every variant and let them take turns, in an order that changes with the seed."""
    shuffled = random.Random(seed)
    found = {task.variant: Round() for task in tasks}
    with ExitStack() as stack:
        runners = []
        for task in tasks:
            runners.append(Runner(task, keeps_memory=keeps_memory))
            stack.callback(runners[-1].kill)
        for runner in runners:
            runner.wait_until_ready()
        for runner in shuffled.sample(runners, len(runners)):
            runner.settle()
        for _ in range(math.ceil(steps / TURN_STEPS)):
            for runner in shuffled.sample(runners, len(runners)):
                found[runner.task.variant].add(runner.turn())
        for runner in runners:
            runner.finish()
    return found


# -- the whole measurement ------------------------------------------------------------------------------------------


def run_overhead(
    device: str = "auto",
    workloads: Collection[str] = (),
    variants: Collection[str] = (),
    steps: int = 200,
    rounds: int = 6,
    progress: Callable[[int, int, str], object] = lambda done, total, text: None,
    *,
    compiled: bool = False,
    threads: int | None = None,
    keep_memory: bool = True,
) -> dict[str, Any]:
    """Time every variant against bare steps of the same loop; the arguments are the options of the command.

    ``bare`` is always timed. `progress` is called with the number of finished rounds, of all, and what was found so
    far.

    Returns:
        Plain values, ready for JSON: the machine, and for every workload its size and its variants, each with the
        median `ratio` to bare over the rounds, its quartiles, the 95 % interval of the median and what recording cost.
    """
    if not hasattr(signal, "SIGSTOP"):
        raise GradvitalsError("the benchmark stops processes between their turns, which this system cannot do")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda'; torch finds no CUDA device here")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = threads or torch.get_num_threads()
    jobs = list(product(workloads or DEFAULT_WORKLOADS[device], (False, True) if compiled else (False,)))
    results: list[dict[str, Any]] = []
    for name, mode in jobs:
        counted = WORKLOADS[name](torch.device("meta"))
        chosen = [one for one in VARIANTS if one == BARE or not variants or one in variants]
        if not isinstance(counted.optimizer, torch.optim.AdamW):
            chosen = [one for one in chosen if one != OUR_ADAMW]
        shown = next(iter(chosen[2:] or chosen[1:]), BARE)
        found: dict[str, list[Round]] = {one: [] for one in chosen}
        so_far = "starting processes"
        for number in range(rounds):
            before, total = len(results) * rounds + number, len(jobs) * rounds
            progress(before, total, f"{_label(name, mode)}: {so_far}")
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                task = Task(workload=name, variant=BARE, device=device, compiled=mode, threads=threads, run=folder)
                tasks = [replace(task, variant=one, run=f"{folder}/{place}") for place, one in enumerate(chosen)]
                for one, timed in time_round(tasks, steps, seed=number, keeps_memory=keep_memory).items():
                    found[one].append(timed)
            ratio = summarize(found[shown], found[BARE])["ratio"]
            so_far = f"{shown} at {percent(ratio)} so far"
            progress(before + 1, total, f"{_label(name, mode)}: {so_far}")
        results.append(
            {
                "workload": name,
                "compiled": mode,
                "parameters": counted.num_parameters,
                "tensors": counted.num_tensors,
                "micro_batches": counted.num_micro_batches,
                "clips": counted.max_norm is not None,
                "optimizer": type(counted.optimizer).__name__,
                "variants": {one: summarize(found[one], found[BARE]) for one in chosen},
            }
        )
    return {
        "device": device,
        "machine": machine_name(torch.device(device)),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": math.ceil(steps / TURN_STEPS) * TURN_STEPS,
        "rounds": rounds,
        "keeps_memory": keep_memory,
        "workloads": results,
    }


def summarize(rounds: Sequence[Round], bare: Sequence[Round]) -> dict[str, Any]:
    """The time of a variant, divided by that of the bare process of the same round."""
    pairs = list(zip(rounds, bare, strict=True))
    ratios = [one.typical / base.typical for one, base in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    costs: dict[str, list[float]] = {}
    for kind, cost in chain.from_iterable(one.costs for one in rounds):
        costs.setdefault(kind, []).append(cost)
    return {
        "ms": 1000 * statistics.median(one.typical for one in rounds),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "ratio_interval": median_interval(ratios),
        "mean_ratio": statistics.median(one.mean / base.mean for one, base in pairs),
        "cpu_ratio": statistics.median(one.cpu_seconds / base.cpu_seconds for one, base in pairs),
        "host_us": {kind: statistics.median(costs[kind]) for kind in KINDS if kind in costs},
        "measured": {kind: len(costs[kind]) for kind in KINDS if kind in costs},
        "every": [one.every for one in rounds if one.every],
        "ratios": ratios,
    }


def median_interval(values: Sequence[float]) -> list[float] | None:
    """Returns a 95% confidence interval of the median; None for fewer than six values.

    The k-th smallest of n values is over the median if fewer than k of them are under it, each with probability 1/2.

    >>> median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])  # 2 * (1/2)**6 = 3 % lie outside
    [1.0, 6.0]
    """
    ordered, outside, rank = sorted(values), 0.0, 0
    while (outside := outside + 2 * math.comb(len(ordered), rank) * 0.5 ** len(ordered)) <= 0.05:
        rank += 1
    return [ordered[rank - 1], ordered[-rank]] if rank else None


# -- in words -------------------------------------------------------------------------------------------------------


def headline(result: Mapping[str, Any]) -> str:
    """The machine and how it was measured."""
    threads = f", torch with {result['threads']} thread(s)" if result["device"] == "cpu" else ""
    memory = "" if result["keeps_memory"] else "; freed memory is left to the C library"
    return (
        f"{result['machine']}{threads}, torch {result['torch']}, Python {result['python']}, {result['date']}\n"
        f"{result['rounds']} rounds of {result['steps']} steps per variant, in turns of {TURN_STEPS}{memory}"
    )


def describe_workload(found: Mapping[str, Any]) -> str:
    """A workload in one line."""
    batches = "2 micro-batches" if found["micro_batches"] == 2 else "1 batch"
    clipping = "with" if found["clips"] else "without"
    return (
        f"{_label(found['workload'], found['compiled'])}: {found['parameters'] / 1e6:.3g}M parameters in "
        f"{found['tensors']} tensors, {found['optimizer']}, {batches} per step, {clipping} clipping"
    )


def _label(name: str, compiled: bool) -> str:
    return f"{name}, compiled" if compiled else name


def table_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """The variants of one workload, by column."""
    rows = []
    for variant, one in found["variants"].items():
        changes = {
            "change": percent(one["ratio"]),
            "quartiles": _span([one["ratio_low"], one["ratio_high"]]),
            "95 % interval": _span(one["ratio_interval"]),
            "by means": percent(one["mean_ratio"]),
            "CPU time": percent(one["cpu_ratio"]),
        }
        if variant == BARE:
            changes = dict.fromkeys(changes, "")
        host = {f"{kind} µs": f"{one['host_us'][kind]:,.0f}" if kind in one["host_us"] else "" for kind in KINDS}
        rows.append({"variant": variant, "ms per step": f"{one['ms']:.2f}", **changes, **host})
    return rows


def notes(found: Mapping[str, Any]) -> list[str]:
    """The intervals at which monitors read."""
    lines = []
    for variant, one in found["variants"].items():
        if one["every"]:
            span = " to ".join(map(str, sorted({min(one["every"]), max(one["every"])})))
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in one["measured"].items())
            lines.append(f"{variant}: a full reading every {span} steps; measured: {kinds}")
    return lines


def format_markdown(result: Mapping[str, Any]) -> str:
    """The result as Markdown, one table per workload."""
    parts = [headline(result)]
    for found in result["workloads"]:
        rows = table_rows(found)
        table = markdown_table([list(rows[0]), *(list(row.values()) for row in rows)])
        parts += [describe_workload(found), table, "\n".join(f"- {note}" for note in notes(found))]
    return "\n\n".join(filter(None, parts))


def _span(ends: Sequence[float] | None) -> str:
    return "too few rounds" if ends is None else f"[{percent(ends[0])}, {percent(ends[1])}]"


def percent(ratio: float) -> str:
    """A ratio as a change."""
    return f"{100 * (ratio - 1):+.2f} %"


def machine_name(device: torch.device) -> str:
    """The machine, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    models = cpuinfo.read_text().split("model name", 1)[1:] if cpuinfo.exists() else []
    if models:
        name = models[0].splitlines()[0].split(":", 1)[1].strip()
    return f"{name}, {os.cpu_count()} cores"


def markdown_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table of rows, the head first; columns are padded, and aligned right but for those named `left`."""
    columns = []
    for place, cells in enumerate(zip(*rows, strict=True)):
        width = max(2, *map(len, cells))  # room for a hyphen and a colon
        head, *others = [cell.ljust(width) if place in left else cell.rjust(width) for cell in cells]
        columns.append([head, "-" * width if place in left else "-" * (width - 1) + ":", *others])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in zip(*columns, strict=True))


if __name__ == "__main__":
    _main()
