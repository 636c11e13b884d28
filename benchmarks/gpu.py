"""What the kernels reach on a GPU: statistics, AdamW and clipping beside torch's own, and whole training steps.

Everything that is compared runs in turn in one process, and medians are told. A kernel's time is that of the device,
with the queue kept full; "from idle" is what a caller waits for one call when nothing is queued, host time included.
Bytes are the fewest that must be moved, and bandwidth is given beside that of a copy, measured here too.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

from benchmarks.command_line import Command, echo_line, json_option, print_result
from gradvitals import bench, kernels, optim
from gradvitals.bench import LEARNING_RATE, MAX_NORM, MicroBatch, Training, markdown_table
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.monitor import watch

SHAPES = {"gpt-124m": (12, 768), "gpt-1.3b": (24, 2048)}
"""Layers and width."""

NUM_SMALL, SMALL_SIZE = 2000, 3000
NUM_PARTS = (2, 8)
COPY_ELEMENTS = 2**29
CYCLES_A_SECOND = 2e9
"""Of a GPU, or some more."""
ADAM_BYTES = 28
"""A parameter's: weight and two moments read and written, gradient read, all in float32."""

PARTS = ("kernels", "training")

Work = Callable[[], object]
Tell = Callable[[str], object]


def gpt_tensors(shape: str) -> list[tuple[int, ...]]:
    """The parameters of a GPT, each a tensor of its own."""
    layers, d = SHAPES[shape]
    block: list[tuple[int, ...]] = [
        (d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)
    ]  # fmt: skip
    return [(50257, d), (1024, d), *block * layers, (d,), (d,)]


def run_gpu(
    shapes: Sequence[str] | None = None,
    *,
    rounds: int = 7,
    parts: Sequence[str] = PARTS,
    progress: Tell | None = None,
) -> dict[str, Any]:
    """Measure everything on the current CUDA device.

    Args:
        shapes: Names out of `SHAPES`; None for all.
        rounds: How often each is timed, in turn with what it is compared with.
        parts: ``kernels``, and whole steps of ``training``, which take most of the time.
        progress: Called with a line of text now and then.

    Returns:
        Plain values, ready for JSON; `format_gpu` shows them.
    """
    if not torch.cuda.is_available():
        raise GradvitalsError("torch finds no CUDA device here; expected an NVIDIA GPU with Triton")
    if kernels.ready("adam") is None:
        raise GradvitalsError("there is no Triton to compile kernels with; expected it beside torch")
    import triton

    tell = progress or (lambda line: None)
    device = torch.device("cuda")
    bandwidth = copy_bandwidth(device, rounds)
    tell(f"a copy moves {bandwidth / 1e9:,.0f} GB/s")
    result: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rounds": rounds,
        "copy_bytes_per_second": bandwidth,
        "shapes": {},
    }
    names = list(shapes or SHAPES)
    if "kernels" in parts:
        for name in names:
            tell(f"{name}: statistics and updates")
            result["shapes"][name] = _time_shape(gpt_tensors(name), device, rounds, bandwidth)
            torch.cuda.empty_cache()
            tell(f"{name}: variance-reduced steps")
            more = passes(_parameters(gpt_tensors(name), device))
            result["shapes"][name]["works"] |= _rows(more, BYTES, gpt_tensors(name), rounds, bandwidth)
            del more
            torch.cuda.empty_cache()
            tell("\n".join(_kernel_lines(name, result["shapes"][name], bandwidth)))
        tell(f"{NUM_SMALL} small tensors")
        result["small"] = _time_small(device, rounds)
        tell("gpt-124m: VRAdamW")
        make = partial(_parameters, gpt_tensors("gpt-124m"), device)
        result["vr"] = [time_steps(make, k, rounds, in_turn, launched) for k in NUM_PARTS]
        torch.cuda.empty_cache()
    if "training" in parts:
        result["training"] = {}
        for name in names:
            result["training"][name] = time_training(name, device, tell)
            tell("\n".join(_training_lines(name, result["training"][name])))  # the rest takes minutes
    return result


# -- timing ---------------------------------------------------------------------------------------------------------


def in_turn(works: dict[str, Work], rounds: int, repeats: int = 10) -> dict[str, float]:
    """Median milliseconds of device time of each, timed one after the other in every round."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    ahead = {name: repeats * _host_seconds(work) for name, work in works.items()}
    for _ in range(rounds):
        for name, work in works.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            work()
            # So that the queue never runs empty: the host has launched everything before the device begins.
            torch.cuda._sleep(int(2 * ahead[name] * CYCLES_A_SECOND))
            begin.record()
            for _ in range(repeats):
                work()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / repeats)
    return {name: statistics.median(some) for name, some in times.items()}


def _host_seconds(work: Work) -> float:
    """What the host takes to launch a work."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def from_idle(works: dict[str, Work], rounds: int) -> dict[str, float]:
    """Median milliseconds that a caller waits for one call, from idle to idle."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(3 * rounds):
        for name, work in works.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times[name].append(1000 * (time.perf_counter() - started))
    return {name: statistics.median(some) for name, some in times.items()}


def launched(work: Work) -> tuple[int, float]:
    """Kernels that a call launches, and the milliseconds that they take: no waiting between them."""
    work()
    torch.cuda.synchronize()
    cuda = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[cuda], acc_events=True) as profile:
        work()
        torch.cuda.synchronize()
    other = ("Memcpy", "Memset", "cu", "Activity Buffer")  # the last is the profiler's own
    found = [event for event in profile.events() if not event.name.startswith(other)]
    return len(found), sum(event.device_time_total for event in found) / 1000


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes read and written a second by a copy."""
    source = torch.randn(COPY_ELEMENTS, device=device)
    target = torch.empty_like(source)
    milliseconds = in_turn({"copy": lambda: target.copy_(source)}, rounds)["copy"]
    return 8 * COPY_ELEMENTS / milliseconds * 1000


# -- what is timed --------------------------------------------------------------------------------------------------


def _parameters(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[nn.Parameter]:
    parameters = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = 1e-3 * torch.randn_like(parameter)
    return parameters


def _time_shape(
    shapes: Sequence[tuple[int, ...]], device: torch.device, rounds: int, bandwidth: float
) -> dict[str, Any]:
    parameters = _parameters(shapes, device)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    numel = sum(parameter.numel() for parameter in parameters)
    read = statistics_works(grads, parameters)
    fused = torch.optim.AdamW(parameters, lr=1e-6, fused=True)
    plain = optim.AdamW(parameters, lr=1e-6)
    told = optim.AdamW(parameters, lr=1e-6)
    clipping = optim.AdamW(parameters, lr=1e-6, max_norm=1.0)
    for optimizer in (told, clipping):
        optimizer.register_vitals_hook(lambda vitals: None)

    def torchs_two() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        fused.step()

    fused.step()
    moments = [[fused.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq")]
    read |= moments_works(*moments)
    updates: dict[str, Work] = {
        "torch fused AdamW": fused.step,
        "AdamW": plain.step,
        "AdamW with vitals": told.step,
        "torch clip and fused AdamW": torchs_two,
        "AdamW clipping, with vitals": clipping.step,
    }
    sizes: dict[str, float] = {"statistics": 4, "norms": 4, "statistics and <W,g>": 8, "torch foreach norm": 4}
    module: Any = kernels.ready("moments")
    sampled = module.MomentReader([p.numel() for p in parameters], device).num_sampled
    sizes |= {"moments": 8, "medians of moments": round(8 * sampled / numel, 3), "torch foreach norms of moments": 8}
    sizes |= dict.fromkeys(("torch fused AdamW", "AdamW", "AdamW with vitals"), ADAM_BYTES)
    sizes |= {"torch clip and fused AdamW": ADAM_BYTES + 4, "AdamW clipping, with vitals": ADAM_BYTES + 4}
    works = [_rows(some, sizes, shapes, rounds, bandwidth) for some in (read, updates)]
    return {
        "parameters": numel,
        "tensors": len(parameters),
        "works": works[0] | works[1],
        "from_idle_ms": from_idle(updates, rounds),
    }


def _rows(
    works: dict[str, Work], sizes: Mapping[str, float], shapes: Sequence[tuple[int, ...]], rounds: int, bandwidth: float
) -> dict[str, Any]:
    """What each takes, beside what its bytes would take."""
    numel = sum(math.prod(shape) for shape in shapes)
    return {
        name: {
            "ms": ms,
            "bytes_per_parameter": sizes[name],
            "share_of_copy": sizes[name] * numel / (ms / 1000) / bandwidth,
            "launches": launched(works[name])[0],
        }
        for name, ms in in_turn(works, rounds).items()
    }


def statistics_works(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[str, Work]:
    """Readings of a set of gradients, by kernels and by torch."""
    reader: Any = kernels.ready("reductions")
    counting, norms, inner = (reader.Reader() for _ in range(3))
    beside = [weight.detach() for weight in weights]
    return {
        "statistics": lambda: counting.read(grads, counts=True),
        "norms": lambda: norms.read(grads),
        "statistics and <W,g>": lambda: inner.read(grads, counts=True, others=beside),
        "torch foreach norm": lambda: torch._foreach_norm(list(grads)),
    }


def moments_works(firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> dict[str, Work]:
    """Readings of Adam's moments, by kernels and by torch, which has no counts in its own."""
    module: Any = kernels.ready("moments")
    reader = module.MomentReader([m.numel() for m in firsts], firsts[0].device)
    limits = torch.full((len(firsts),), 0.5, device=firsts[0].device)
    return {
        "moments": lambda: reader.sums(firsts, seconds, limits),
        "medians of moments": lambda: reader.medians(firsts, seconds),
        "torch foreach norms of moments": lambda: (
            torch._foreach_norm(list(firsts)),
            torch._foreach_norm(list(seconds), 1),
        ),
    }


def _time_small(device: torch.device, rounds: int) -> dict[str, Any]:
    parameters = _parameters([(SMALL_SIZE,)] * NUM_SMALL, device)
    works = statistics_works([p.grad for p in parameters if p.grad is not None], parameters)
    optimizer = optim.AdamW(parameters, lr=1e-6)
    optimizer.register_vitals_hook(lambda vitals: None)
    works["AdamW with vitals"] = optimizer.step
    works["torch fused AdamW"] = torch.optim.AdamW(parameters, lr=1e-6, fused=True).step
    times = from_idle(works, rounds)
    return {name: {"from_idle_ms": ms, "launches": launched(works[name])[0]} for name, ms in times.items()}


# -- in words -------------------------------------------------------------------------------------------------------

PAIRS = (
    ("AdamW with vitals", "torch fused AdamW"),
    ("AdamW clipping, with vitals", "torch clip and fused AdamW"),
)
"""What is compared with what."""


def format_gpu(result: dict[str, Any]) -> str:
    """The result as text, in tables."""
    copy = result["copy_bytes_per_second"]
    lines = [
        f"{result['machine']}, torch {result['torch']}, Triton {result['triton']}, {result['date']}",
        f"a copy moves {copy / 1e9:,.0f} GB/s; medians of {result['rounds']} rounds, in turn, in one process",
    ]
    for name, shape in result["shapes"].items():
        lines += _kernel_lines(name, shape, copy)
    if "small" in result:
        rows = [("", "from idle, ms", "launches")]
        rows += [(work, f"{it['from_idle_ms']:.3f}", str(it["launches"])) for work, it in result["small"].items()]
        lines += ["", f"{NUM_SMALL:,} tensors of {SMALL_SIZE:,} elements", "", markdown_table(rows)]
    for found in result.get("vr", []):
        lines += [
            "",
            f"VRAdamW, gpt-124m, {found['k']} parts, collecting, scaling and updating: kernels of "
            f"{found['kernels_ms']:.2f} ms, {found['kernels_ratio']:.2f} × torch's fused AdamW; "
            f"{found['vr_ms']:.2f} ms, {found['ratio']:.2f} ×, where nothing else keeps the device busy meanwhile "
            f"(torch's: {found['fused_ms']:.2f} ms; {found['launches']['vr']} launches, "
            f"{found['launches']['fused']} with torch's)",
        ]
    for name, found in result.get("training", {}).items():
        lines += _training_lines(name, found)
    return "\n".join(lines)


def _kernel_lines(name: str, shape: dict[str, Any], copy: float) -> list[str]:
    works = shape["works"]
    rows: list[tuple[str, ...]] = [("", "ms", "bytes a parameter", "floor ms", "of a copy's bandwidth", "launches")]
    for work, found in works.items():
        floor = found["bytes_per_parameter"] * shape["parameters"] / copy * 1000
        rows.append(
            (
                work,
                f"{found['ms']:.3f}",
                str(found["bytes_per_parameter"]),
                f"{floor:.3f}",
                f"{100 * found['share_of_copy']:.0f} %",
                str(found["launches"]),
            )
        )
    lines = ["", f"{name}: {shape['parameters'] / 1e6:.0f}M parameters in {shape['tensors']} tensors, float32", ""]
    lines += [markdown_table(rows), ""]
    for ours, theirs in PAIRS:
        idle = shape["from_idle_ms"]
        lines.append(
            f"{ours} / {theirs}: {works[ours]['ms'] / works[theirs]['ms']:.2f} on the device, "
            f"{idle[ours] / idle[theirs]:.2f} from idle ({idle[ours]:.2f} and {idle[theirs]:.2f} ms)"
        )
    return lines


def _training_lines(name: str, found: dict[str, Any]) -> list[str]:
    rows: list[tuple[str, ...]] = [("", "ms a step", "host ms a step", "of bare", "quartiles")]
    for variant, times in found["variants"].items():
        low, high = times["ratio_low"], times["ratio_high"]
        row = (f"{times['ms']:.2f}", f"{times['host_ms']:.2f}", f"{times['ratio']:.4f}", f"[{low:.4f}, {high:.4f}]")
        rows.append((variant, *row))
    title = f"{name}: whole training steps, {found['micro_batches']} micro-batches, bf16 autocast"
    return ["", title, "", markdown_table(rows)]


STEPS = {"gpt-124m": 16, "gpt-1.3b": 6}
ROUNDS = {"gpt-124m": 3, "gpt-1.3b": 2}
WARM_UP = 4

CONFIGS = {
    "watched, everything every step": Config(tensor_every=1, quiet=True),
    "the same, not judged": Config(tensor_every=1, diagnose=False, quiet=True),
    "watched, default settings, between full readings": Config(quiet=True),
}


class _Loop:
    """One way to train: its optimizer, and whether it clips by torch's function."""

    def __init__(self, training: Training, optimizer: torch.optim.Optimizer, *, clips: bool) -> None:
        self.training, self.optimizer, self.clips = training, optimizer, clips
        self._turns: Iterator[list[MicroBatch]] = cycle(map(list, training.batches))

    def step(self, observe: Callable[[Tensor], object] | None = None) -> None:
        training = self.training
        self.optimizer.zero_grad()
        total = torch.zeros((), device=training.device)
        for inputs, targets in next(self._turns):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = training.loss(inputs, targets) / training.num_micro_batches
            loss.backward()
            total += loss.detach()
        if observe is not None:
            observe(total)
        if self.clips:
            nn.utils.clip_grad_norm_(training.model.parameters(), MAX_NORM)
        self.optimizer.step()

    def time(self, steps: int, observe: Callable[[Tensor], object] | None = None) -> tuple[float, float]:
        """Milliseconds a step, from idle to idle; and those of the host, until it had launched everything."""
        for _ in range(WARM_UP):
            self.step(observe)
        gc.collect()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(steps):
            self.step(observe)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - started) / steps, 1000 * (launched - started) / steps


def time_training(name: str, device: torch.device, tell: Callable[[str], object]) -> dict[str, Any]:
    """Time every variant between two bare stretches of the same model, and keep its ratio to their mean."""
    torch.manual_seed(0)
    training = bench.WORKLOADS[name](device)
    parameters = list(training.model.parameters())
    bare = _Loop(training, training.optimizer, clips=True)
    ours = _Loop(training, optim.AdamW(parameters, lr=LEARNING_RATE, max_norm=MAX_NORM), clips=False)
    unclipped = _Loop(training, training.optimizer, clips=False)
    alone = {"bare": bare, "AdamW alone": ours, "bare, not clipped": unclipped}
    times: dict[str, list[float]] = {variant: [] for variant in (*alone, "VRAdamW, not clipped", *CONFIGS)}
    hosts: dict[str, list[float]] = {variant: [] for variant in times}
    ratios: dict[str, list[float]] = {variant: [] for variant in times}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        before, _ = bare.time(STEPS[name])
        for number in range(ROUNDS[name]):
            for variant in times:
                if variant in alone:
                    spent, host = alone[variant].time(STEPS[name])
                elif variant not in CONFIGS:
                    spent, host = _time_reduced(training, STEPS[name])
                else:
                    run = Path(folder) / f"{number}-{list(times).index(variant)}"
                    spent, host = _time_watched(ours, CONFIGS[variant], training, STEPS[name], run)
                after, _ = bare.time(STEPS[name])
                times[variant].append(spent)
                hosts[variant].append(host)
                ratios[variant].append(spent / statistics.fmean((before, after)))
                before = after
            so_far = statistics.median(ratios["watched, everything every step"])
            tell(f"{name}: round {number + 1} of {ROUNDS[name]}, everything every step at {so_far:.4f} of bare")
    return {
        "micro_batches": training.num_micro_batches,
        "variants": {variant: _summary(times[variant], hosts[variant], ratios[variant]) for variant in times},
    }


def _time_reduced(training: Training, steps: int) -> tuple[float, float]:
    """A VRAdamW of its own, which collects from any backward while it is there."""
    parameters = list(training.model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts, which are meant
        vr = optim.VRAdamW(parameters, lr=LEARNING_RATE, k=training.num_micro_batches)
        return _Loop(training, vr, clips=False).time(steps)


def _time_watched(loop: _Loop, config: Config, training: Training, steps: int, run: Path) -> tuple[float, float]:
    with watch(training.model, loop.optimizer, run=run, config=config, batch_size=training.batch_size) as monitor:
        # A young run is read more often; this one is just after a full reading.
        monitor.recorder.start(20 * config.tensor_every * config.detail_factor + 1)
        loop.step(monitor.observe)
        monitor.flush()
        spent = loop.time(steps, monitor.observe)
    broken = [finding for finding in monitor.findings if finding.id in ("monitor_error", "store_error")]
    if broken:  # one that has given up on something is cheap: its time would mean nothing
        raise GradvitalsError(f"the monitor failed while it was timed: {broken[0]}")
    return spent


def _summary(times: list[float], hosts: list[float], ratios: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "ms": statistics.median(times),
        "host_ms": statistics.median(hosts),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "ratios": ratios,
    }


VRWork = Callable[[], object]
InTurn = Callable[..., dict[str, float]]
Launched = Callable[[VRWork], tuple[int, float]]

BYTES = {
    "VRGD, second part": 16,
    "VRGD, later parts": 20,
    "VRGD, later parts, added by autograd": 16,
    "torch foreach add": 12,
    "VRAdamW, its two passes": 48,
}
"""A parameter's, in float32. Parts: read, with the sum read and written, and deviations written, and read but for the
second part. FusedReducer: gradient and deviations twice; weight, two moments, the factors' average read and written."""


class _Fresh(torch.autograd.Function):
    """Has gradients of its own for every parameter, as layers do: autograd need not copy them."""

    @staticmethod
    def forward(ctx: Any, given: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.given = given
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *torch._foreach_mul(list(ctx.given), 1.0)


def backward(parameters: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """One backward that gives every parameter its gradient."""
    loss: Any = _Fresh.apply(list(given), *parameters)  # type: ignore[no-untyped-call]
    loss.backward()


def passes(parameters: Sequence[nn.Parameter]) -> dict[str, VRWork]:
    """The parts of a variance-reduced step, one by one."""
    vrgd: Any = kernels.ready("vrgd")
    sizes, device = [p.numel() for p in parameters], parameters[0].device
    optimizer = optim.VRAdamW(parameters, lr=1e-6)
    given = [1e-3 * torch.randn_like(p) for p in parameters]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts, which are meant
        optimizer.zero_grad()
        for _ in range(3):
            backward(parameters, given)
        optimizer.graph_captured()  # what there is now counts again before every step
        optimizer.graph_replayed()
        optimizer.step()
    totals = [p.grad for p in parameters if p.grad is not None]
    noises = [optimizer._parts.noise_of(p) for p in parameters]
    second, later, compared = (vrgd.Adding(sizes, device) for _ in range(3))

    def step() -> None:
        optimizer.graph_replayed()
        optimizer.step()

    def add(which: Any, *, added: bool, fresh: bool) -> VRWork:
        return lambda: which.add(given, totals, noises, count=3, rounding=1e-15, added=added, fresh=fresh)

    return {
        "torch foreach add": lambda: torch._foreach_add_(totals, given),
        "VRGD, second part": add(second, added=False, fresh=True),
        "VRGD, later parts": add(later, added=False, fresh=False),
        "VRGD, later parts, added by autograd": add(compared, added=True, fresh=False),
        "VRAdamW, its two passes": step,
    }


def time_steps(
    make: Callable[[], list[nn.Parameter]], num_parts: int, rounds: int, in_turn: InTurn, launched: Launched
) -> dict[str, Any]:
    """A whole step: gradients arrive and are added up, then the update; what collecting adds counts with it.

    Args:
        make: Makes parameters.
        num_parts: Gradients a step is made of.
        rounds: How often each is timed.
        in_turn: Times works.
        launched: Counts the kernels of a work, and the milliseconds that they take.
    """
    plain, reduced = make(), make()
    given = [[1e-3 * torch.randn_like(p) for p in reduced] for _ in range(2)]
    fused = torch.optim.AdamW(plain, lr=1e-6, fused=True)
    vr = optim.VRAdamW(reduced, lr=1e-6, k=num_parts)

    def whole(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> VRWork:
        def work() -> None:
            optimizer.zero_grad()
            for number in range(num_parts):
                backward(parameters, given[number % 2])
            optimizer.step()

        return work

    works = {"fused": fused.step, "fused, whole": whole(fused, plain), "vr, whole": whole(vr, reduced)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few parts, which are meant
        works["fused, whole"]()  # leaves gradients for the step alone
        times = in_turn(works, rounds, repeats=5)
        launches = {name: launched(work) for name, work in works.items()}
    spent = times["fused"] + times["vr, whole"] - times["fused, whole"]
    busy = {name: milliseconds for name, (_, milliseconds) in launches.items()}
    kernels_ms = busy["fused"] + busy["vr, whole"] - busy["fused, whole"]
    return {
        "k": num_parts,
        "fused_ms": times["fused"],
        "vr_ms": spent,
        "ratio": spent / times["fused"],
        "kernels_ms": kernels_ms,
        "kernels_ratio": kernels_ms / busy["fused"],
        "whole_ms": {"fused": times["fused, whole"], "vr": times["vr, whole"]},
        "launches": {"fused": launches["fused, whole"][0], "vr": launches["vr, whole"][0]},
    }


@click.command(cls=Command)
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(tuple(SHAPES)),
    multiple=True,
    help="Model to time; may be given several times. [default: both]",
)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="How often each is timed.")
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    help="The kernels by themselves, or whole training steps. [default: both]",
)
@json_option
def main(shapes: tuple[str, ...], rounds: int, parts: tuple[str, ...], as_json: bool) -> None:
    """Time the kernels on an NVIDIA GPU: statistics, AdamW, clipping, whole watched training steps.

    \b
    Example:
      python -m benchmarks.gpu
      python -m benchmarks.gpu --shape gpt-124m --part kernels --json
    """
    result = run_gpu(shapes or None, rounds=rounds, parts=parts or PARTS, progress=echo_line)
    print_result(result, as_json, format_gpu)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.gpu")
