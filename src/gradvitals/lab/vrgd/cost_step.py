"""What the step of a variance-reduced optimizer takes beside its base's: time, memory, and the floor under the time.

Only `step()` is timed. Gradients are random tensors that backward adds to ``.grad`` of parameters that no model uses,
so that the parts are collected by the same hooks as ever. On a GPU a kernel that only waits is put before the step: the
host has queued all of it before the device begins, as in training, and what is measured is the device's own time. The
host's time to queue it is reported beside.

Compiled steps are timed in a process of their own, which can be ended when compilation takes too long.

The floor is the fewest bytes a step must move (each input read once, each output written once, float32) at the speed
of a large copy on this device. A VR step reads the summed squared deviations besides, and with a moving average of
factors (VR-AdamW, VR-LAMB) reads and writes that. It is a floor only: factors need a mean over each tensor, and LAMB
norms, before anything is written.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from gradvitals import optim

LEARNING_RATE = 1e-6
NUM_PARTS = 8
WARM_UP_STEPS = 3
GPU_CLOCK = 2e9
"""Cycles a second, about: what a kernel that waits counts."""

Make = Callable[[list[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "adamw": (
        lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE, foreach=True),
        lambda parameters: optim.VRAdamW(parameters, lr=LEARNING_RATE),
    ),
    "momentum": (
        lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9, foreach=True),
        lambda parameters: optim.VRSGD(parameters, lr=LEARNING_RATE, momentum=0.9),
    ),
    "lamb": (
        lambda parameters: optim.LAMB(parameters, lr=LEARNING_RATE, foreach=True),
        lambda parameters: optim.VRLAMB(parameters, lr=LEARNING_RATE),
    ),
}
"""The base and its twin. The one whose compiled form matters most comes first, should time run out."""

FLOOR_BYTES = {"adamw": (28, 40), "momentum": (20, 24), "lamb": (28, 40)}
"""Of the base's step and its twin's, for each parameter: weight, gradient and states in, weight and states out."""


@dataclass
class Contender:
    """One optimizer with parameters of its own."""

    parameters: list[Tensor]
    optimizer: torch.optim.Optimizer
    num_parts: int
    """Gradients a step gets: the base needs one."""
    persistent_bytes: int = 0
    """That the optimizer keeps from step to step."""
    peak_bytes: int | None = None
    """Most that a step takes on top while it runs; None on a CPU."""
    device_ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    def feed(self, noises: Sequence[Sequence[Tensor]]) -> None:
        """Gradients as of a backward for each part."""
        for part in range(self.num_parts):
            torch.autograd.backward(self.parameters, list(noises[part % len(noises)]))

    def time(self, noises: Sequence[Sequence[Tensor]], step: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of the device and of the host for one step."""
        self.feed(noises)
        if self.parameters[0].device.type == "cpu":
            start = time.perf_counter()
            step()
            spent = 1000 * (time.perf_counter() - start)
            found = (spent, spent)
        else:
            found = _time_on_gpu(step, wait_ms=5 + 2 * max(self.host_ms[-3:], default=20.0))
        self.optimizer.zero_grad()
        return found


def _time_on_gpu(step: Callable[[], object], wait_ms: float) -> tuple[float, float]:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(int(wait_ms / 1000 * GPU_CLOCK))
    begin.record()
    start = time.perf_counter()
    step()
    host = 1000 * (time.perf_counter() - start)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end), host


class StepCost:
    """Every base optimizer and its twin, on parameters of given shapes."""

    def __init__(self, shapes: Sequence[torch.Size], device: torch.device, names: Sequence[str] | None = None) -> None:
        self.device = device
        self.names = list(OPTIMIZERS if names is None else names)
        self._shapes = shapes
        self._noises = [[torch.randn(shape, device=device) for shape in shapes] for _ in range(2)]
        self.pairs = {name: tuple(self._contender(name, place) for place in (0, 1)) for name in self.names}

    @property
    def num_parameters(self) -> int:
        """Of one contender."""
        return sum(shape.numel() for shape in self._shapes)

    def _contender(self, name: str, place: int) -> Contender:
        parameters = [torch.randn(shape, device=self.device).requires_grad_() for shape in self._shapes]
        before = self._allocated()
        optimizer = OPTIMIZERS[name][place](parameters)
        contender = Contender(parameters, optimizer, num_parts=NUM_PARTS if place else 1)
        for _ in range(2):
            contender.feed(self._noises)
            optimizer.step()
            optimizer.zero_grad()
        contender.persistent_bytes = self._allocated() - before
        if self.device.type == "cpu":
            own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
            contender.persistent_bytes = tensor_bytes(optimizer, leave_out=own)
        else:
            contender.feed(self._noises)
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)
            optimizer.step()
            contender.peak_bytes = torch.cuda.max_memory_allocated(self.device) - held
            optimizer.zero_grad()
        return contender

    def _allocated(self) -> int:
        if self.device.type == "cpu":
            return 0
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device)

    def run_eager(self, rounds: int) -> dict[str, dict[str, Any]]:
        """Time all of them in turn, the order changing from round to round."""
        for number in range(-WARM_UP_STEPS, rounds):
            order = [contender for pair in self.pairs.values() for contender in pair]
            turn = number % len(order)
            for contender in (*order[turn:], *order[:turn]):
                device_ms, host_ms = contender.time(self._noises, contender.optimizer.step)
                contender.host_ms.append(host_ms)
                if number >= 0:
                    contender.device_ms.append(device_ms)
        return {name: self._eager_summary(*self.pairs[name]) for name in self.names}

    def _eager_summary(self, base: Contender, twin: Contender) -> dict[str, Any]:
        both = (base, twin)
        return {
            "base_ms": statistics.median(base.device_ms),
            "vr_ms": statistics.median(twin.device_ms),
            **quartiles([b / a for a, b in zip(base.device_ms, twin.device_ms, strict=True)]),
            "host_ms": [statistics.median(contender.host_ms[WARM_UP_STEPS:]) for contender in both],
            "persistent_bytes": [contender.persistent_bytes / self.num_parameters for contender in both],
            "peak_bytes": [
                None if contender.peak_bytes is None else contender.peak_bytes / self.num_parameters
                for contender in both
            ],
        }

    def run_compiled(self, name: str, rounds: int) -> dict[str, Any]:
        """The same for one pair with `step` compiled. Says why where that fails, and does not raise."""
        torch._dynamo.reset()
        pair = self.pairs[name]
        steps: list[Callable[[], object]] = []
        seconds = []
        try:
            for contender in pair:
                step: Callable[[], object] = torch.compile(contender.optimizer.step)
                start = time.perf_counter()
                for _ in range(WARM_UP_STEPS):
                    contender.time(self._noises, step)
                seconds.append(time.perf_counter() - start)
                steps.append(step)
            times = [
                [contender.time(self._noises, step)[0] for contender, step in zip(pair, steps, strict=True)]
                for _ in range(rounds)
            ]
        except Exception as error:  # whatever the compiler of the day cannot do
            return {"skipped": _first_line(error)}
        return {
            "base_ms": statistics.median(a for a, _ in times),
            "vr_ms": statistics.median(b for _, b in times),
            **quartiles([b / a for a, b in times]),
            "compile_seconds": seconds,
        }


def run_compiled(
    shapes: Sequence[torch.Size], device: torch.device, names: Sequence[str], rounds: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """`StepCost.run_compiled` of each pair, in another process that is ended after so many seconds."""
    if seconds <= 0:
        return {name: {"skipped": "there was no time left"} for name in names}
    deadline = time.perf_counter() + seconds
    found: dict[str, dict[str, Any]] = {}
    late = {"skipped": f"compilation had {seconds:.0f} s and did not end"}
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_compiled, args=(there, list(shapes), device, list(names), rounds))
    process.start()
    there.close()
    try:
        while len(found) < len(names) and here.poll(max(0.0, deadline - time.perf_counter())):
            found.update([here.recv()])
    except EOFError:
        late = {"skipped": "the process that compiled it ended early"}
    if len(found) < len(names):
        process.terminate()
    process.join()
    return {name: found.get(name, late) for name in names}


def _send_compiled(
    there: Connection, shapes: list[torch.Size], device: torch.device, names: list[str], rounds: int
) -> None:
    for name in names:
        try:
            result = StepCost(shapes, device, [name]).run_compiled(name, rounds)
        except Exception as error:
            result = {"skipped": _first_line(error)}
        there.send((name, result))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def tensor_bytes(owner: object, leave_out: Collection[int]) -> int:
    """Bytes of all storages that an object holds, through its attributes and containers.

    Args:
        owner: Where to begin.
        leave_out: Addresses of storages that do not count.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [owner]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, Mapping):
            waiting += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set)):
            waiting += thing
        elif thing is owner or type(thing).__module__.startswith("gradvitals"):
            waiting += getattr(thing, "__dict__", {}).values()
            waiting += [getattr(thing, name) for name in getattr(type(thing), "__slots__", ())]
    return sum(size for address, size in storages.items() if address not in leave_out)


def quartiles(ratios: Sequence[float]) -> dict[str, float]:
    """The median and its quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else [*ratios] * 3
    return {"ratio": middle, "ratio_low": low, "ratio_high": high}


def copy_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes read and written each second by a large copy on the device: the best of some."""
    source = torch.randn(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            best = min(best, _time_on_gpu(lambda: target.copy_(source), wait_ms=1.0)[0])
        else:
            start = time.perf_counter()
            target.copy_(source)
            best = min(best, 1000 * (time.perf_counter() - start))
    return 2 * source.nbytes / (best / 1000)
