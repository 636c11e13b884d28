"""What an examination costs: the streaming pass against bare passes and against the post's own functions.

Every timed stretch lies between two stretches of bare forward and backward passes over the same batches, and only its
ratio to their mean is kept: drift of a shared machine cancels. Memory is the peak of the whole question above that of
the bare passes, over the size of the parameters: on a GPU as the allocator counts it, on a CPU as the resident set of a
process of its own, with a larger model.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from gradvitals.lab.device import pick_device
from gradvitals.lab.kept_gradients import check_gradient_snr_perlayer, check_gradient_snr_perparam
from gradvitals.lab.markdown import markdown_table
from gradvitals.lab.overhead import machine_name
from gradvitals.lab.shapes import Training, cnn, gpt_124m, mlp, transformer
from gradvitals.probe.batches import Subject
from gradvitals.probe.examination import probe
from gradvitals.probe.gradients import Gradients, trainable
from gradvitals.probe.per_example import PerExample
from gradvitals.probe.signal import signal_record
from gradvitals.probe.streaming import Stream

Batch = tuple[Tensor, Tensor]

SHAPES: dict[str, Callable[[torch.device], Training]] = {
    "mlp": partial(mlp, micro_batch_size=256),
    "cnn": partial(cnn, micro_batch_size=64),
    "transformer": partial(transformer, micro_batch_size=8),
    "gpt-124m": gpt_124m,
}
"""With batches of the size a loader gives."""

DEFAULT = {"cpu": ("mlp", "cnn", "transformer"), "cuda": ("gpt-124m",)}
EXAMPLES = 16
"""Single examples whose gradients are compared with a loop."""


def run_probing(
    device: str = "auto",
    shapes: Sequence[str] | None = None,
    batches: int = 10,
    rounds: int = 4,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Time and weigh the examination.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
        shapes: Names out of `SHAPES`; None takes those of the device.
        batches: Batches of one examination.
        rounds: How often each variant is timed.
        progress: Called with a line of text now and then.

    Returns:
        Plain values, ready for JSON.
    """
    place = torch.device(pick_device(device))
    tell = progress or (lambda line: None)
    return {
        "device": place.type,
        "machine": machine_name(place),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "batches": batches,
        "rounds": rounds,
        "shapes": [_one_shape(name, place, batches, rounds, tell) for name in shapes or DEFAULT[place.type]],
    }


class FusedReducer:
    """One model with some batches, and what can be done with them."""

    def __init__(self, name: str, device: torch.device, batches: int) -> None:
        torch.manual_seed(0)
        self.training = SHAPES[name](device)
        self.model = self.training.model
        every = [micro for step in self.training.batches for micro in step]
        self.batches = [every[i % len(every)] for i in range(batches)]
        self.parameters = trainable(self.model)

    def loss(self, batch: Batch) -> Tensor:
        """The loss of one batch."""
        kind, dtype = self.training.device.type, self.training.autocast
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            return self.training.loss(*batch)

    def bare(self) -> None:
        """Forward and backward, and nothing else."""
        for batch in self.batches:
            self.model.zero_grad()
            self.loss(batch).backward()
        self.model.zero_grad()

    def stream(self) -> Stream:
        """The streaming pass."""
        parameters = list(self.parameters.values())
        stream, gradients = Stream(parameters, len(self.batches)), Gradients(parameters)
        for batch in self.batches:
            stream.add(gradients(self.loss(batch)))
        return stream

    def signal(self) -> dict[str, Any]:
        """The whole question, as `gv.probe` asks it."""
        loss_fn = lambda model, batch: self.loss(batch)  # noqa: E731
        found = probe(self.model, self.batches, loss_fn, len(self.batches), questions="signal", progress=False)
        assert found.signal is not None
        return found.signal

    def kept(self) -> None:
        """Both functions of the post, one after the other."""
        for function in (check_gradient_snr_perparam, check_gradient_snr_perlayer):
            function(self.model, self.batches, self.loss, len(self.batches))
            self.model.zero_grad()


VARIANTS = ("stream", "signal", "kept", "bare")


def _one_shape(
    name: str, device: torch.device, batches: int, rounds: int, tell: Callable[[str], object]
) -> dict[str, Any]:
    passes = FusedReducer(name, device, batches)
    for variant in ("bare", *VARIANTS):
        getattr(passes, variant)()
    ratios: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    bare = [_seconds(passes.bare, device)]
    for number in range(rounds):
        for variant in VARIANTS:
            took = _seconds(getattr(passes, variant), device)
            bare.append(_seconds(passes.bare, device))
            ratios[variant].append(2 * took / (bare[-2] + bare[-1]))
        tell(f"{name}: round {number + 1} of {rounds}")
    stream = passes.stream()
    summary = _seconds(lambda: signal_record(list(passes.parameters), stream, 1, None), device)
    result = {
        "shape": name,
        "parameters": sum(p.numel() for p in passes.parameters.values()),
        "tensors": len(passes.parameters),
        "batch_size": len(passes.batches[0][0]),
        "bare_ms": 1000 * statistics.median(bare) / batches,
        "ratios": {variant: statistics.median(values) for variant, values in ratios.items()},
        "ratios_of_rounds": ratios,
        "summary_ms": 1000 * summary,
        "against_kept": against_kept(passes),
        "against_loop": against_loop(passes),
        "memory": _memory(name, device, batches, passes),
    }
    tell(f"{name}: done")
    return result


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Processor time on a CPU, which other programs lengthen least; on a GPU until it is idle again."""
    if device.type == "cpu":
        started = time.process_time()
        work()
        return time.process_time() - started
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started


def against_kept(passes: FusedReducer) -> dict[str, float]:
    """Largest relative difference of the post's numbers, over tensors."""
    theirs = check_gradient_snr_perparam(passes.model, passes.batches, passes.loss, len(passes.batches))
    passes.model.zero_grad()
    ours = {row["name"]: row for row in passes.signal()["tensors"]}
    worst = {"median": 0.0, "mean": 0.0, "below_one": 0.0}
    for name, values in theirs.items():
        for key, value in values.items():
            off = abs(ours[name][f"plug_in_{key}"] - value) / max(abs(value), 1e-12)
            worst[key] = max(worst[key], off if key != "below_one" else abs(ours[name]["plug_in_below_one"] - value))
    return worst


def against_loop(passes: FusedReducer) -> dict[str, Any]:
    """Largest difference of single examples' gradients from a loop, over the largest element of each."""
    loss_fn = lambda model, batch: passes.loss(batch)  # noqa: E731
    subject = Subject(passes.model, loss_fn, "model, batch", passes.training.device)
    count = min(EXAMPLES, len(passes.batches[0][0]))
    batch = subject.take(passes.batches[0], 0, count)
    passes.model.eval()
    try:
        reader = PerExample(subject, passes.parameters, 1 << 30)
        found = list(reader.chunks(batch, count))
        looped = PerExample(subject, passes.parameters, 1 << 30)
        looped.method = "loop"
        wanted = list(looped.chunks(batch, count))
    finally:
        passes.model.train()
    worst = 0.0
    for place in range(len(passes.parameters)):
        ours = torch.cat([grads[place] for _, grads in found])
        loop = torch.cat([grads[place] for _, grads in wanted])
        largest = float(loop.abs().max())
        worst = max(worst, float((ours - loop).abs().max()) / largest if largest else 0.0)
    return {"method": reader.method, "examples": count, "difference": worst}


def _memory(name: str, device: torch.device, batches: int, passes: FusedReducer) -> dict[str, float]:
    """Peak beyond the bare passes, in sizes of the parameters."""
    if device.type == "cpu":
        return memory_on_the_host(batches)
    peaks = {}
    for variant, count in _weighed(batches):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        passes.batches = [passes.batches[i % len(passes.batches)] for i in range(count)]
        getattr(passes, variant)()
        peaks[f"{variant} {count}"] = torch.cuda.max_memory_allocated(device)
    bare = peaks.pop(f"bare {batches}")
    size = sum(p.numel() * p.element_size() for p in passes.parameters.values())
    return {key: (peak - bare) / size for key, peak in peaks.items()}


@cache
def memory_on_the_host(batches: int) -> dict[str, float]:
    """The same on a CPU, where every variant has a process of its own; one model stands for all shapes."""
    peaks = {}
    # Spawned, not forked: a child that starts with this one's memory would show that as its own.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for variant, count in _weighed(batches):
            peaks[f"{variant} {count}"] = pool.apply(resident_peak, (variant, count))
    bare = peaks.pop(f"bare {batches}")
    return {key: (peak - bare) / (4 * MEMORY_PARAMETERS) for key, peak in peaks.items()}


def _weighed(batches: int) -> list[tuple[str, int]]:
    return [("bare", batches), ("signal", batches), ("signal", 4 * batches), ("kept", batches)]


MEMORY_WIDTH = 2048
MEMORY_PARAMETERS = 4 * MEMORY_WIDTH * (MEMORY_WIDTH + 1) + MEMORY_WIDTH + 1


def resident_peak(variant: str, batches: int) -> float:
    """Most memory that this process has had, in bytes, after one variant with a model of 17 million parameters."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Linear(MEMORY_WIDTH, MEMORY_WIDTH) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(MEMORY_WIDTH, 1))
    passes = FusedReducer.__new__(FusedReducer)
    passes.model, passes.parameters = model, trainable(model)
    data = [(torch.randn(8, MEMORY_WIDTH), torch.randn(8, 1)) for _ in range(batches)]
    passes.batches = data
    passes.loss = lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1])  # type: ignore[method-assign]
    getattr(passes, variant)()
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def format_probing(result: dict[str, Any]) -> str:
    """The result as text: one Markdown table."""
    threads = f", {result['threads']} threads" if result["device"] == "cpu" else ""
    kind = "processor time" if result["device"] == "cpu" else "time"
    n = result["batches"]
    lines = [
        f"{result['machine']}{threads}, torch {result['torch']}, {result['date']}",
        f"{n} batches, median of {result['rounds']} rounds; {kind} over that of the bare forward and backward passes",
        "",
    ]
    head = ["", *(shape["shape"] for shape in result["shapes"])]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("parameters", lambda s: f"{s['parameters'] / 1e6:.3g}M in {s['tensors']}"),
        ("batch size", lambda s: str(s["batch_size"])),
        ("bare pass, ms a batch", lambda s: f"{s['bare_ms']:.1f}"),
        ("streaming pass", lambda s: f"{s['ratios']['stream']:.2f} x"),
        ("whole question", lambda s: f"{s['ratios']['signal']:.2f} x"),
        ("of it once, ms", lambda s: f"{s['summary_ms']:.0f}"),
        ("the post's two functions", lambda s: f"{s['ratios']['kept']:.2f} x"),
        ("bare, again", lambda s: f"{s['ratios']['bare']:.2f} x"),
        (f"memory, {n} batches", lambda s: f"{s['memory'][f'signal {n}']:.2f} x"),
        (f"memory, {4 * n} batches", lambda s: f"{s['memory'][f'signal {4 * n}']:.2f} x"),
        (f"memory of the post's, {n}", lambda s: f"{s['memory'][f'kept {n}']:.2f} x"),
        ("post's median, difference", lambda s: f"{s['against_kept']['median']:.1e}"),
        ("post's mean, difference", lambda s: f"{s['against_kept']['mean']:.1e}"),
        ("one example, difference", lambda s: f"{s['against_loop']['difference']:.1e}"),
    ]
    table = [tuple(head), *((label, *(draw(shape) for shape in result["shapes"])) for label, draw in rows)]
    lines += [
        markdown_table(table),
        "",
        "Memory is beyond the bare passes, in sizes of the parameters; bars: streaming",
    ]
    lines[-1] += " pass at most 1.2 x, memory at most 3 x whatever the batches, one example equal to 1e-5."
    return "\n".join(lines)
