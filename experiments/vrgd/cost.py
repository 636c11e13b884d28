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

Bytes between ranks are counted in two processes over gloo, as each collective is called: what a rank hands over. What
goes over the wire depends on the algorithm: in a ring of n ranks 2 (n - 1) / n times as much. gloo has torch's fp16
compression but refuses its bf16 hook, which needs NCCL; both send 2 bytes.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradvitals import optim
from gradvitals.bench import Training, gpt, markdown_table

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


NUM_RANKS = 2
NUM_MICRO_BATCHES = 4
SETTLE_STEPS = 2
"""DDP rearranges its buckets in the second step, and tells the other ranks."""

MakeForRanks = Callable[[nn.Module, DistributedDataParallel], torch.optim.Optimizer]


def _base(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def _base_16(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    ddp.register_comm_hook(None, fp16_compress_hook)
    return torch.optim.AdamW(model.parameters())


def _vr(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = optim.VRAdamW(model.parameters())
    optimizer.use_ranks(ddp)
    return optimizer


def _vr_16(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = optim.VRAdamW(model.parameters())
    optimizer.use_ranks(ddp, hook=fp16_compress_hook)
    return optimizer


def _vr_all_16(model: nn.Module, ddp: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = optim.VRAdamW(model.parameters(), moments_dtype=torch.bfloat16)
    optimizer.use_ranks(ddp, hook=fp16_compress_hook)
    return optimizer


VARIANTS: dict[str, MakeForRanks] = {
    "base": _base,
    "base, 16-bit hook": _base_16,
    "use_ranks": _vr,
    "use_ranks, 16-bit hook": _vr_16,
    "use_ranks, 16-bit hook, 16-bit moments": _vr_all_16,
}


class _SentBytes(TorchDispatchMode):
    """Adds up the tensors that collectives are called with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.total += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        return func(*args, **(kwargs or {}))


def bytes_per_parameter() -> dict[str, float]:
    """Bytes a rank hands to collectives in one step of k micro-batches, for each parameter, in every variant."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(NUM_RANKS, mp_context=context) as pool:
            found = [pool.submit(_rank, rank, meeting) for rank in range(NUM_RANKS)]
            return found[0].result()


def _rank(rank: int, meeting: Path) -> dict[str, float]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # gloo and DDP warn of much that does not matter here
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=rank, world_size=NUM_RANKS)
    try:
        return {name: _count(make) for name, make in VARIANTS.items()}
    finally:
        dist.destroy_process_group()


def _count(make: MakeForRanks) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    ddp = DistributedDataParallel(model)
    optimizer = make(model, ddp)
    total = 0
    for _ in range(SETTLE_STEPS + 1):
        with _SentBytes() as sent:
            for number in range(1, NUM_MICRO_BATCHES + 1):
                with ddp.no_sync() if number < NUM_MICRO_BATCHES else nullcontext():
                    ddp(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        total = sent.total
    return total / sum(parameter.numel() for parameter in model.parameters())


SHAPES: dict[str, Callable[[torch.device], Training]] = {
    "gpt-124m": partial(gpt, n_layer=12, d_model=768, n_head=12, micro_batch_size=8, num_micro_batches=NUM_PARTS),
    "transformer": partial(
        gpt,
        n_layer=5,
        d_model=128,
        n_head=4,
        micro_batch_size=4,
        vocab_size=96,
        context=64,
        tied=False,
        bf16=False,
        num_micro_batches=NUM_PARTS,
    ),
}
DEFAULT_SHAPES = {"cpu": "transformer", "cuda": "gpt-124m"}
ROUNDS = {"cpu": 20, "cuda": 20}
COLLECTION_ROUNDS = {"cpu": 10, "cuda": 8}
COPY_MEGABYTES = {"cpu": 128, "cuda": 2048}
COLLECTION_WARM_UP = 2

Tell = Callable[[str], object]


def run_cost(
    device: str = "cpu",
    shape: str | None = None,
    *,
    rounds: int | None = None,
    compiled: bool = True,
    ranks: bool = True,
    seconds: float = 120.0,
    progress: Tell | None = None,
) -> dict[str, Any]:
    """Measure everything.

    Args:
        device: ``cpu`` or ``cuda``.
        shape: Out of `SHAPES`; None: what suits the device.
        rounds: Timed steps of each kind.
        compiled: Time compiled steps too, as far as time allows.
        ranks: Count bytes between two processes too.
        seconds: End what is compiled after so many seconds from the start. The rest takes about half a minute.
        progress: Called with a line of text now and then.

    Returns:
        Plain values, ready for JSON; `format_cost` shows them.
    """
    tell = progress or (lambda line: None)
    place = torch.device(device)
    name = shape or DEFAULT_SHAPES[place.type]
    if name not in SHAPES:
        raise ValueError(f"there is no shape {name!r}; expected one of {', '.join(SHAPES)}")
    started = time.perf_counter()
    torch.manual_seed(0)
    tell(f"{name}: collecting parts during backward")
    training = SHAPES[name](place)
    collection = time_collection(training, partial(SHAPES[name], place), COLLECTION_ROUNDS[place.type])
    shapes = [parameter.shape for parameter in training.model.parameters()]
    context = {
        "device": place.type,
        "machine": _machine(place),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "shape": name,
        "parameters": training.num_parameters,
        "tensors": training.num_tensors,
        "k": NUM_PARTS,
    }
    del training
    bandwidth = copy_bandwidth(place, COPY_MEGABYTES[place.type])
    cost = StepCost(shapes, place)
    number = rounds or ROUNDS[place.type]
    tell(f"{name}: {number} rounds of steps")
    found = cost.run_eager(number)
    for optimizer, summary in found.items():
        floors = [1000 * size * cost.num_parameters / bandwidth for size in FLOOR_BYTES[optimizer]]
        summary |= {"floor_bytes": FLOOR_BYTES[optimizer], "floor_ms": floors}
    del cost
    sent = bytes_per_parameter() if ranks else None
    late: dict[str, dict[str, Any]] = {optimizer: {"skipped": "not asked for"} for optimizer in found}
    if compiled:
        tell(f"{name}: compiling")
        left = seconds - (time.perf_counter() - started)
        late = run_compiled(shapes, place, list(found), number, left)
    for optimizer, summary in found.items():
        summary["compiled"] = late[optimizer]
    return context | {
        "rounds": number,
        "copy_bytes_per_second": bandwidth,
        "steps": found,
        "collection": collection,
        "sent_bytes_per_parameter": sent,
        "seconds": time.perf_counter() - started,
    }


def time_collection(plain: Training, twin: Callable[[], Training], rounds: int) -> dict[str, Any]:
    """Forward and backward of a step's micro-batches, with a VR optimizer attached against its base.

    Every round also times the base a second time: the ratio of the two shows what the method cannot see.
    """
    collecting = twin()
    optimizers = {
        "base": torch.optim.AdamW(plain.model.parameters(), lr=LEARNING_RATE, foreach=True),
        "vr": optim.VRAdamW(collecting.model.parameters(), lr=LEARNING_RATE),
    }
    trainings = {"base": plain, "vr": collecting}
    times: dict[str, list[float]] = {"base": [], "vr": [], "again": []}
    for number in range(-COLLECTION_WARM_UP, rounds):
        order = ("base", "vr", "again") if number % 2 else ("again", "vr", "base")
        for kind in order:
            source = "base" if kind == "again" else kind
            spent = _forward_and_backward(trainings[source], number)
            optimizers[source].step()
            optimizers[source].zero_grad()
            if number >= 0:
                times[kind].append(spent)
    means = [(a + b) / 2 for a, b in zip(times["base"], times["again"], strict=True)]
    return {
        "base_ms": 1000 * sorted(means)[len(means) // 2],
        **quartiles([vr / base for vr, base in zip(times["vr"], means, strict=True)]),
        "again": quartiles([b / a for a, b in zip(times["base"], times["again"], strict=True)]),
    }


def _forward_and_backward(training: Training, number: int) -> float:
    on_gpu = training.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for inputs, targets in training.batches[number % len(training.batches)]:
        with torch.autocast(training.device.type, dtype=training.autocast, enabled=training.autocast is not None):
            loss = training.loss(inputs, targets) / training.num_micro_batches
        loss.backward()
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


# -- in words -------------------------------------------------------------------------------------------------------


def format_cost(result: dict[str, Any]) -> str:
    """The result as text: a Markdown table of steps, one of memory, one of bytes between ranks."""
    lines = [
        f"{result['machine']}, torch {result['torch']}, {result['date']}, {result['seconds']:.0f} s in all",
        f"{result['shape']}: {result['parameters'] / 1e6:.3g}M parameters in {result['tensors']} tensors, "
        f"k = {result['k']}; a copy moves {result['copy_bytes_per_second'] / 1e9:,.0f} GB/s",
        "",
        f"step(), median of {result['rounds']} rounds; ratio to the base in the same round [quartiles]",
        "",
        markdown_table(_step_rows(result)),
        "",
        *_skipped(result),
        "Floor: the fewest bytes a step must move, at the speed of a copy.",
        "",
        "memory, bytes a parameter, beside weights and gradients",
        "",
        markdown_table(_memory_rows(result)),
        "",
        _collection_line(result["collection"]),
    ]
    if result["sent_bytes_per_parameter"] is not None:
        rows = [("2 ranks, gloo", "bytes a parameter")]
        rows += [(name, f"{sent:.3g}") for name, sent in result["sent_bytes_per_parameter"].items()]
        lines += ["", "handed to collectives by a rank in one step, accumulation included", "", markdown_table(rows)]
    return "\n".join(lines)


def _step_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("optimizer", "base ms", "VR ms", "ratio", "quartiles", "floor ms", "VR / floor", "host ms", "VR / eager base")
    ]
    for name, step in result["steps"].items():
        floor = step["floor_ms"][1]
        for label, some in ((name, step), (f"{name}, compiled", step["compiled"])):
            if "skipped" in some:
                rows.append((label, *["-"] * 8))
                continue
            host = " → ".join(f"{ms:.2f}" for ms in some["host_ms"]) if "host_ms" in some else "-"
            rows.append(
                (
                    label,
                    f"{some['base_ms']:.3f}",
                    f"{some['vr_ms']:.3f}",
                    f"{some['ratio']:.2f}",
                    f"[{some['ratio_low']:.2f}, {some['ratio_high']:.2f}]",
                    f"{step['floor_ms'][0]:.3f} → {floor:.3f}",
                    f"{some['vr_ms'] / floor:.2f}",
                    host,
                    f"{some['vr_ms'] / step['base_ms']:.2f}",
                )
            )
    return rows


def _skipped(result: dict[str, Any]) -> list[str]:
    found = {name: step["compiled"].get("skipped") for name, step in result["steps"].items()}
    return [f"{name}: no compiled step: {why}" for name, why in found.items() if why is not None]


def _memory_rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("optimizer", "base keeps", "VR keeps", "base's step, peak", "VR's step, peak")]
    for name, step in result["steps"].items():
        peaks = ["-" if peak is None else f"{peak:.2f}" for peak in step["peak_bytes"]]
        rows.append((name, *(f"{kept:.2f}" for kept in step["persistent_bytes"]), *peaks))
    return rows


def _collection_line(collection: dict[str, Any]) -> str:
    def percent(ratio: float) -> str:
        return f"{100 * (ratio - 1):+.2f} %"

    def spread(found: dict[str, float]) -> str:
        quarter = f"[{percent(found['ratio_low'])}, {percent(found['ratio_high'])}]"
        return f"{percent(found['ratio'])} {quarter}"

    return (
        f"collecting parts: {spread(collection)} of the {collection['base_ms']:.2f} ms of a step's forward and backward"
        f" (the base against itself: {spread(collection['again'])})"
    )
