"""What an examination costs: the streaming pass against bare passes and against the post's own functions.

Every timed stretch lies between two stretches of bare forward and backward passes over the same batches, and only its
ratio to their mean is kept: drift of a shared machine cancels. Memory is the peak of the whole question above that of
the bare passes, over the size of the parameters: on a GPU as the allocator counts it, on a CPU as the resident set of a
process of its own, with a larger model.
"""

from __future__ import annotations

import copy
import multiprocessing
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from importlib import import_module
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.command_line import Command, device_option, echo_line, json_option, pick_device, print_result
from gradvitals.bench import Training, cnn, gpt_124m, machine_name, markdown_table, mlp, transformer
from gradvitals.probe.data import Subject
from gradvitals.probe.examination import probe
from gradvitals.probe.gradients import Stream, gradients, signal_record, trainable
from gradvitals.probe.samples import PerExample

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
        stream = Stream(parameters, len(self.batches))
        for batch in self.batches:
            stream.add(gradients(self.loss(batch), parameters))
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


Loss = Callable[[Any], Tensor]


def _all_gradients(model: nn.Module, batches: Iterable[Any], loss: Loss, n_batches: int) -> dict[str, list[Tensor]]:
    all_grads: dict[str, list[Tensor]] = {}
    for i, batch in enumerate(batches):
        if i >= n_batches:
            break
        model.zero_grad()
        loss(batch).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                all_grads.setdefault(name, []).append(param.grad.clone().flatten())
    return all_grads


def check_gradient_snr_perparam(
    model: nn.Module, batches: Iterable[Any], loss: Loss, n_batches: int = 10
) -> dict[str, dict[str, float]]:
    """Median and mean over coordinates of ``mean^2 / (variance + 1e-8)``, and the share below 1, for each tensor."""
    found = {}
    for name, grads in _all_gradients(model, batches, loss, n_batches).items():
        if len(grads) > 1:
            stacked = torch.stack(grads)
            gsnr = (stacked.mean(dim=0) ** 2) / (stacked.var(dim=0) + 1e-8)
            found[name] = {
                "median": gsnr.median().item(),
                "mean": gsnr.mean().item(),
                "below_one": (gsnr < 1.0).float().mean().item(),
            }
    return found


def check_gradient_snr_perlayer(
    model: nn.Module, batches: Iterable[Any], loss: Loss, n_batches: int = 10
) -> dict[str, float]:
    """The mean alone, for each tensor."""
    found = {}
    for name, grads in _all_gradients(model, batches, loss, n_batches).items():
        if len(grads) > 1:
            stacked = torch.stack(grads)
            gsnr = (stacked.mean(dim=0) ** 2) / (stacked.var(dim=0) + 1e-8)
            found[name] = gsnr.mean().item()
    return found


PEER_EXAMPLES = 64
CLASSES = 10
REPEATS = 5
Way = Callable[[], list[Tensor]]


class Words(nn.Module):
    """Embedding, layer norm and two linear layers, with a mean over positions."""

    def __init__(self, vocab: int = 50, width: int = 32) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores."""
        scores: Tensor = self.down(torch.relu(self.up(self.norm(self.embed(tokens))))).mean(1)
        return scores


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """Models and inputs."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    cnn = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )
    return {
        "mlp": (mlp, torch.randn(PEER_EXAMPLES, 64)),
        "cnn": (cnn, torch.randn(PEER_EXAMPLES, 3, 16, 16)),
        "words": (Words(), torch.randint(50, (PEER_EXAMPLES, 12))),
    }


def compare_with_peers() -> list[dict[str, Any]]:
    """For each model and way: the largest difference from a loop, over the tensor's largest element, and the time."""
    found = []
    for name, (model, inputs) in models().items():
        targets = torch.randint(CLASSES, (PEER_EXAMPLES,))
        parameters = list(model.parameters())

        def loop(model: nn.Module = model, x: Tensor = inputs, y: Tensor = targets) -> list[Tensor]:
            losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in range(PEER_EXAMPLES)]
            rows = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
            return [torch.stack(column) for column in zip(*rows, strict=True)]

        expected = loop()
        ways: dict[str, Callable[[], Way]] = {
            "loop": lambda loop=loop: loop,  # type: ignore[misc]
            "gradvitals": lambda m=model, x=inputs, y=targets: _ours(m, x, y),  # type: ignore[misc]
            "Opacus": lambda m=model, x=inputs, y=targets: _opacus(m, x, y),  # type: ignore[misc]
            "BackPACK": lambda m=model, x=inputs, y=targets: _backpack(m, x, y),  # type: ignore[misc]
        }
        for way, make in ways.items():
            row: dict[str, Any] = {"model": name, "parameters": sum(p.numel() for p in parameters), "way": way}
            try:
                work = make()
                row |= {"difference": _difference(work(), expected), "ms": _milliseconds(work), "problem": ""}
            except Exception as error:  # a peer that is not installed, or does not know a layer
                row |= {"difference": None, "ms": None, "problem": f"{type(error).__name__}: {error}"[:90]}
            found.append(row)
    return found


def _ours(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    subject = Subject(model, nn.CrossEntropyLoss(), "output, target", x.device)
    parameters = trainable(model)

    def work() -> list[Tensor]:
        [(_, grads)] = PerExample(subject, parameters, 1 << 30).chunks((x, y), PEER_EXAMPLES)
        return grads

    return work


def _opacus(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    wrapped = import_module("opacus").GradSampleModule(copy.deepcopy(model))

    def work() -> list[Tensor]:
        wrapped.zero_grad()
        F.cross_entropy(wrapped(x), y).backward()
        return [p.grad_sample for p in wrapped.parameters()]

    return work


def _backpack(model: nn.Module, x: Tensor, y: Tensor) -> Way:
    package, extensions = import_module("backpack"), import_module("backpack.extensions")
    extended = package.extend(copy.deepcopy(model))
    # A sum, since BackPACK's gradients carry the loss's 1/N.
    loss = package.extend(nn.CrossEntropyLoss(reduction="sum"))

    def work() -> list[Tensor]:
        extended.zero_grad()
        with package.backpack(extensions.BatchGrad()):
            loss(extended(x), y).backward()
        return [p.grad_batch for p in extended.parameters()]

    return work


def _difference(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def _milliseconds(work: Way) -> float:
    took = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hooks of the peers warn about inputs without gradients
        for _ in range(REPEATS):
            started = time.process_time()
            work()
            took.append(time.process_time() - started)
    return 1000 * min(took)


def format_peers(rows: list[dict[str, Any]]) -> str:
    """The comparison as a Markdown table."""
    table = [("model", "by", "difference from the loop", f"ms for {PEER_EXAMPLES} examples")]
    for row in rows:
        told = (f"{row['difference']:.1e}", f"{row['ms']:.1f}") if row["ms"] is not None else (row["problem"], "-")
        table.append((f"{row['model']}, {row['parameters']:,} parameters", row["way"], *told))
    return markdown_table(table, left=(0, 1))


@click.command(cls=Command)
@device_option
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(tuple(SHAPES)),
    multiple=True,
    help="Model to time; may be given several times. [default: all that suit the device]",
)
@click.option("--batches", type=click.IntRange(min=2), default=10, show_default=True, help="Batches of an examination.")
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="How often each is timed.")
@click.option("--peers", is_flag=True, help="Instead, gradients of single examples beside Opacus and BackPACK.")
@json_option
def main(device: str, shapes: tuple[str, ...], batches: int, rounds: int, peers: bool, as_json: bool) -> None:
    """Time and weigh `gv.probe` against bare passes and against functions that keep every gradient.

    \b
    Example:
      python -m benchmarks.probe
      python -m benchmarks.probe --device cuda --shape gpt-124m --json
      python -m benchmarks.probe --peers
    """
    if peers:
        print_result(compare_with_peers(), as_json, format_peers)
    else:
        result = run_probing(device, shapes or None, batches=batches, rounds=rounds, progress=echo_line)
        print_result(result, as_json, format_probing)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.probe")
