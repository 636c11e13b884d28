"""What guarding costs: bare, monitored and guarded steps of one model in turn, and what a snapshot holds up.

All run in one process. Every stretch of steps lies between two bare ones and only its ratio to them is kept. Nothing is
wrong with these runs, so the Guard only checks.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.command_line import Command, device_option, echo_line, json_option, pick_device, print_result
from gradvitals.bench import (
    DEFAULT_WORKLOADS,
    WARM_UP_STEPS,
    WORKLOADS,
    Observe,
    Training,
    machine_name,
    markdown_table,
    percent,
)
from gradvitals.collect.schedule import YOUNG_STEPS
from gradvitals.config import Config
from gradvitals.errors import GradvitalsError
from gradvitals.guard import Guard, RollBack, Skip
from gradvitals.guard.policy import Mode
from gradvitals.monitor import watch

SETTLE_STEPS = 12
"""Untimed steps at the start of a stretch: by then limits are known, and hold in the steps that are timed."""

MOST_SETTLE_STEPS = 200
"""For snapshots, whose memory is made ready beside training."""

SNAPSHOT_EVERY = 10

VARIANTS = ("monitor", "guard", "guard and snapshots", "bare")


def run_guarding(
    device: str = "auto",
    shapes: Sequence[str] | None = None,
    steps: int = 60,
    rounds: int = 4,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Time guarded steps against bare ones.

    Args:
        device: ``cpu``, ``cuda``, or ``auto`` for a GPU where there is one.
        shapes: Names out of `WORKLOADS`; None takes those of the device, on a GPU gpt-124m.
        steps: Timed steps of a stretch.
        rounds: How often each variant is timed.
        progress: Called with a line of text now and then.

    Returns:
        Plain values, ready for JSON.
    """
    place = torch.device(pick_device(device))
    suited = DEFAULT_WORKLOADS[place.type]
    names = shapes or (suited[-1:] if place.type == "cuda" else suited)
    tell = progress or (lambda line: None)
    return {
        "device": place.type,
        "machine": machine_name(place),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": steps,
        "rounds": rounds,
        "snapshot_every": SNAPSHOT_EVERY,
        "shapes": [_time_shape(name, place, steps, rounds, tell) for name in names],
    }


def _time_shape(
    name: str, device: torch.device, steps: int, rounds: int, tell: Callable[[str], object]
) -> dict[str, Any]:
    torch.manual_seed(0)
    training = WORKLOADS[name](device)
    for _ in range(WARM_UP_STEPS):
        training.step()
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    taken: list[int] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        bare = [_bare(training, steps)]
        for number in range(rounds):
            turn = number % len(VARIANTS)
            for variant in (*VARIANTS[turn:], *VARIANTS[:turn]):
                if variant == "bare":
                    stretch = _bare(training, steps)
                else:
                    stretch, snapshots = _guarded(variant, training, steps, Path(tempfile.mkdtemp(dir=folder)))
                    taken += [snapshots] if "snapshots" in variant else []
                bare.append(_bare(training, steps))
                times[variant].append(2 * stretch / (bare[-2] + bare[-1]))
            tell(f"{name}: round {number + 1} of {rounds}")
    stalls = [
        (with_them - without) * steps / max(1, count)
        for with_them, without, count in zip(times["guard and snapshots"], times["guard"], taken, strict=True)
    ]
    return {
        "shape": name,
        "parameters": training.num_parameters,
        "tensors": training.num_tensors,
        "optimizer": type(training.optimizer).__name__,
        "fused": bool(training.optimizer.defaults.get("fused")),
        "bare_ms": 1000 * statistics.median(bare),
        "variants": {variant: _summary(values) for variant, values in times.items()},
        "guard_over_monitor": _summary(
            [guarded / seen for guarded, seen in zip(times["guard"], times["monitor"], strict=True)]
        ),
        "snapshots": sum(taken),
        "steps_a_snapshot": statistics.median(stalls),
    }


def _summary(values: list[float]) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return {"ratio": middle, "ratio_low": low, "ratio_high": high, "ratios": values}


def _time_steps(training: Training, observe: Observe | None, steps: int) -> float:
    """Seconds per step, from when the device is idle until it is again."""
    on_gpu = training.device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize(training.device)
    started = time.perf_counter()
    for _ in range(steps):
        training.step(observe)
    if on_gpu:
        torch.cuda.synchronize(training.device)
    return (time.perf_counter() - started) / steps


def _bare(training: Training, steps: int) -> float:
    for _ in range(3):
        training.step()
    return _time_steps(training, None, steps)


def _guarded(variant: str, training: Training, steps: int, folder: Path) -> tuple[float, int]:
    """Seconds per step, and the number of snapshots that were taken meanwhile."""
    guard = None
    if variant != "monitor":
        wanted: Mode = "on" if "snapshots" in variant else "off"
        rollback = RollBack(mode=wanted, every=SNAPSHOT_EVERY, settle=SNAPSHOT_EVERY // 2)
        early = 5  # limits hold in the steps that are timed
        guard = Guard(mode="act", skip=Skip(first_steps=early), rollback=rollback)
    config = Config(quiet=True)
    with watch(training.model, training.optimizer, run=folder / "run", config=config, guard=guard) as monitor:
        cycle = config.tensor_every * config.detail_factor
        monitor.recorder.start(-(-YOUNG_STEPS // cycle) * cycle)  # a young run is read more often
        for number in range(MOST_SETTLE_STEPS):
            training.step(monitor.observe)
            if number >= SETTLE_STEPS and ("snapshots" not in variant or (guard and guard.snapshots > 1)):
                break
        before = guard.snapshots if guard is not None else 0
        stretch = _time_steps(training, monitor.observe, steps)
        after = guard.snapshots if guard is not None else 0
    broken = [one for one in monitor.findings if one.id in ("monitor_error", "store_error", "guard_error")]
    if broken or (guard is not None and guard.actions):
        raise GradvitalsError(f"the timed run was not a quiet one: {[*broken, *(guard.actions if guard else ())][0]}")
    return stretch, after - before


def format_guarding(result: dict[str, Any]) -> str:
    """The result as text."""
    threads = f", {result['threads']} threads" if result["device"] == "cpu" else ""
    lines = [
        f"{result['machine']}{threads}, torch {result['torch']}, {result['date']}",
        f"{result['rounds']} rounds of {result['steps']} steps; change of the step's time: median [quartiles]",
    ]
    for shape in result["shapes"]:
        fused = "fused " if shape["fused"] else ""
        lines += [
            "",
            f"{shape['shape']}: {shape['parameters'] / 1e6:.3g}M parameters in {shape['tensors']} tensors, "
            f"{fused}{shape['optimizer']}, {shape['bare_ms']:.2f} ms a bare step",
            "",
        ]
        rows = [("variant", "step time", "quartiles")]
        named = {**shape["variants"], "guard over monitor": shape["guard_over_monitor"]}
        for variant, found in named.items():
            quartiles = f"[{percent(found['ratio_low'])}, {percent(found['ratio_high'])}]"
            rows.append(("bare, again" if variant == "bare" else variant, percent(found["ratio"]), quartiles))
        lines.append(markdown_table(rows))
        lines += ["", f"a snapshot costs {shape['steps_a_snapshot']:.2f} steps' time ({shape['snapshots']} were taken)"]
    return "\n".join(lines)


@click.command(cls=Command)
@device_option
@click.option(
    "--shape",
    "shapes",
    type=click.Choice(tuple(WORKLOADS)),
    multiple=True,
    help="Model to time; may be given several times. [default: gpt-124m on a GPU, all small ones on a CPU]",
)
@click.option("--steps", type=click.IntRange(min=1), default=60, show_default=True, help="Timed steps of a stretch.")
@click.option("--rounds", type=click.IntRange(min=1), default=4, show_default=True, help="How often each is timed.")
@json_option
def main(device: str, shapes: tuple[str, ...], steps: int, rounds: int, as_json: bool) -> None:
    """Time guarded steps of a healthy run against bare ones, and what a snapshot holds up.

    \b
    Example:
      python -m benchmarks.guard
      python -m benchmarks.guard --device cuda --shape gpt-124m --json
    """
    result = run_guarding(device, shapes or None, steps=steps, rounds=rounds, progress=echo_line)
    print_result(result, as_json, format_guarding)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.guard")
