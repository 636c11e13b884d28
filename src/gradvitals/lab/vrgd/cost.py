"""What variance reduction costs: the step, the collection of parts during backward, memory, and bytes between ranks."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch

from gradvitals import optim
from gradvitals.lab.markdown import markdown_table
from gradvitals.lab.shapes import Training, gpt
from gradvitals.lab.vrgd.cost_ranks import bytes_per_parameter
from gradvitals.lab.vrgd.cost_step import (
    FLOOR_BYTES,
    LEARNING_RATE,
    NUM_PARTS,
    StepCost,
    copy_bandwidth,
    quartiles,
    run_compiled,
)

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
