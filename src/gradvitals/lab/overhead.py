"""What monitoring costs: monitored and bare steps of one model, in turn.

A shared machine drifts by more than monitoring costs, so no two runs can be compared. On a CPU processes take turns
(`in_turns`). Beside a GPU, where a stretch of steps takes the same time as the next, all is done in one process: every
stretch lies between two stretches of bare steps, and only its ratio to their mean is kept, so that drift cancels. What
is bare goes through the same motions once more, and its ratio shows what the method itself cannot see.

With the default settings a round of stretches is as long as their slowest cadence, and so holds its share of every
kind of reading: it is cut into stretches of one full reading each, with bare steps between them. The shorter a stretch,
the less of a machine's drift is in its ratio.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradvitals.config import Config
from gradvitals.lab.in_turns import time_round
from gradvitals.lab.markdown import markdown_table
from gradvitals.lab.shapes import DEFAULT_SHAPES, SHAPES, Observe, Training
from gradvitals.lab.stretch import SETTLE_STEPS, Stretch, WatchedRun, time_monitored, time_steps
from gradvitals.lab.variants import BY_HAND, MONITORED, VARIANTS, WARM_UP_STEPS
from gradvitals.measure.budget import Cadence

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
